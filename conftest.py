"""A small real corpus: this repository's own text, as raw bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded_python import preloaded_python
from titanlite.data import open_tokenizer
from titanlite.distributed.rendezvous import bind_gloo_to_loopback
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest

ROOT = Path(__file__).parent
# After this a process is taken for hung, on a machine however busy; no measure of speed.
HANG_SECONDS = 600
bind_gloo_to_loopback(1)  # all ranks of tests run on this machine, and inherit it


def pytest_addoption(parser) -> None:
    parser.addoption("--layouts", type=int, default=1, help="number of random layouts per kind")
    parser.addoption("--layout-seed", type=int, default=1, help="seed of the random layouts")
    parser.addoption("--layout-family", default="", help="family of the random layouts")
    parser.addoption(
        "--planted", action="store_true", help="plant all faults that the oracle must find"
    )
    parser.addoption(
        "--fuzz", type=float, default=0, help="minutes of fuzzing all readers; runs no other test"
    )
    parser.addoption(
        "--chat-templates", help="folder whose chat templates are compared with transformers"
    )


SWEEPS = (  # tests that run with `--layouts 2` only: others find the same faults with less work
    "test_clusters.py::test_a_slurm_job_goes_on_after_its_time_limit_a_lost_node_and_sigterm",
    "test_clusters.py::test_each_job_of_a_slurm_array_has_its_folder_and_a_user_error_is_final",
    "test_clusters.py::test_pods_that_end_do_not_show_in_the_losses[jobset.yaml]",
    "test_clusters.py::test_pods_that_end_do_not_show_in_the_losses[trainjob.yaml]",
    "test_dry_run.py::test_the_estimate_equals_a_dry_run[FSDP 2, not resharded after forward]",
    "test_dry_run.py::test_the_estimate_equals_a_dry_run[FSDP 3, uneven]",
    "test_dry_run.py::test_the_estimate_equals_a_dry_run[PP 2, HSDP without shards]",
    "test_dry_run.py::test_the_estimate_equals_a_dry_run[PP 2, TP 2]",
    "test_expert_dry_run.py::test_the_formula_equals_a_dry_run[EP 2, full]",
    "test_expert_dry_run.py::test_the_formula_equals_a_dry_run[EP 4, TP 2, op]",
    "test_expert_dry_run.py::test_the_formula_equals_a_dry_run[TP 2, EP 2, own tokens]",
    "test_recipe.py::test_kills_and_workers_change_no_byte",
    "test_steady_state.py::test_no_step_waits_for_the_device[Float8 scales, compile]",
    "test_steady_state.py::test_no_step_waits_for_the_device[SOAP, Float8 rowwise]",
    "test_steady_state.py::test_no_step_waits_for_the_device[offload, Float8 scales]",
    "test_steady_state.py::test_collectives_have_the_configured_dtypes[CP, ring]",
    "test_steady_state.py::test_collectives_have_the_configured_dtypes[replicas]",
    "test_elastic.py::test_a_run_on_4_then_3_then_4_ranks_matches_one_process[8bit]",
    "test_float8.py::test_tensor_and_context_parallel_train_like_one_process[four ranks]",
    "test_guard.py::test_a_fault_that_is_gone_in_the_replay_changes_nothing[CP 2, loss]",
    "test_guard.py::test_two_ranks_skip_and_name_each_fault[Float8]",
    "test_low_precision.py::test_gradients_of_every_layout_are_as_accurate_as_on_one_process[tensor=4]",
    "test_low_precision.py::test_z_loss_does_not_make_gradients_less_accurate",
    "test_machines.py::test_a_lost_machine_and_its_return_do_not_show_in_the_losses",
    "test_machines.py::test_many_lost_machines_do_not_show_in_the_losses[dense]",
    "test_machines.py::test_many_lost_machines_do_not_show_in_the_losses[experts]",
    "test_optimizers.py::test_a_run_saved_under_one_layout_resumes_under_another[hsdp-tp2]",
    "test_optimizers.py::test_update_and_state_equal_one_process[fsdp3]",
    "test_precision.py::test_an_overflow_in_fp16_skips_one_step_on_all_ranks_and_changes_no_bit[4]",
    "test_precision.py::test_every_layout_uses_the_configured_dtypes[4]",
    "test_random_layouts.py::test_valid_random_layouts_are_as_precise_as_one_process",
    "test_replica_check.py::test_one_flipped_bit_names_the_odd_rank_and_a_healthy_run_none[4]",
    "test_stop.py::test_a_step_that_torchrun_would_not_wait_for_is_abandoned_and_repeated[1]",
)


def pytest_collection_modifyitems(config, items) -> None:
    if config.getoption("--layouts") > 1 or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.nodeid.rpartition("/")[2] in SWEEPS]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_configure(config) -> None:
    if config.getoption("--fuzz"):  # instead of all other tests
        config.args = [str(ROOT / "tests" / "fuzz")]


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Iterator[str]:
    """A Python for programs that has torch and titanlite imported; see tests/preloaded_python.py"""
    with preloaded_python(tmp_path_factory.mktemp("python"), ROOT) as programs:
        yield str(programs / "python")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with `train` and `validation`, of different files."""
    files = sorted((ROOT / "titanlite").rglob("*.py"))
    optim = ROOT / "titanlite" / "optim"
    validation = [optim / "__init__.py", optim / "loss_scale.py"]
    training = [path for path in files if path not in validation]
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "train", [path.read_text("utf-8") for path in training])
    write_corpus(folder / "validation", [path.read_text("utf-8") for path in validation])
    return folder


def write_corpus(folder: Path, texts: list[str]) -> None:
    tokenizer = open_tokenizer("bytes")
    folder.mkdir()
    with ShardWriter(folder / "shard", tokenizer.vocab_size) as writer:
        for text in texts:
            writer.add([*tokenizer.encode(text), tokenizer.eos_id])
        record = writer.close()
    write_corpus_manifest(folder, tokenizer.fingerprint, tokenizer.vocab_size, [record])


@pytest.fixture
def run_toml(corpus, tmp_path) -> Path:
    """A complete tiny job; tests override settings on the command line."""
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [job]
        dump_folder = "{tmp_path}/out"
        device = "cpu"
        [model]
        dim = 32
        n_layers = 2
        n_heads = 4
        n_kv_heads = 2
        hidden_dim = 64
        vocab_size = 258
        [data]
        tokenizer = "bytes"
        sources = [{{ name = "code", path = "{corpus}/train" }}]
        validation = [{{ name = "code", path = "{corpus}/validation" }}]
        [training]
        seq_len = 48
        local_batch_size = 2
        global_batch_size = 8
        steps = 6
        mixed_precision_param = "float32"
        [lr_scheduler]
        warmup_steps = 2
        [activation_checkpoint]
        mode = "none"
        [validation]
        enable = true
        freq = 3
        seq_len = 48
        steps = 2
        [checkpoint]
        enable = true
        interval = 3
        [metrics]
        log_freq = 1
        """
    )
    return path
