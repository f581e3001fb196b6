"""Predicted rows of published measurements: what is read, what is refused, how wrong it is."""

from __future__ import annotations

import csv
import math
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.planner_page import ERRORS, errors_toml
from titanlite.errors import ConfigError, DataError
from titanlite_planner.accuracy.published_rows import published_models, read_row
from titanlite_planner.accuracy.row_errors import (
    error_table,
    kendall_tau,
    kind_of_row,
    naive_errors,
    rank_layouts,
    summarise_errors,
)
from titanlite_planner.accuracy.rows import COLUMNS, predict_rows, read_rows, write_predictions
from titanlite_planner.model_shape import count_parameters
from titanlite_planner.plan.layout_space import LEAST_TOKENS_PER_CONTEXT_RANK, PUBLISHED

RUNS = Path(__file__).parents[3] / "benchmarks" / "published_runs.csv"
ROWS = {row["id"]: row for row in read_rows(RUNS)}


@pytest.fixture(scope="module")
def predictions():
    return predict_rows(list(ROWS.values()))


@pytest.mark.slow
def test_the_errors_that_the_page_states_hold(predictions):
    found = summarise_errors(predictions)
    assert found["dense bf16"].median < 0.06
    assert found["dense bf16"].within_20 > 0.95
    assert found["dense fp8"].median < 0.08
    assert found["MoE fp8"].median < 0.1
    assert found["MoE fp8"].rows > 100  # those with latent attention too
    assert found["dense bf16"].median < found["dense bf16"].naive_median / 2
    assert len(predictions) == len(ROWS) == 672


@pytest.mark.slow
def test_the_errors_that_a_plan_prints_are_those_of_the_rows(predictions):
    assert ERRORS.read_text("utf-8") == errors_toml(predictions)


def test_what_a_plan_marks_is_in_no_published_run(predictions):
    runs = [found.workload for found in predictions if found.workload]
    short = [run.seq_len // run.layout.context for run in runs if run.layout.context > 1]
    assert min(short) == LEAST_TOKENS_PER_CONTEXT_RANK
    assert {run.layout.schedule for run in runs} == set(PUBLISHED["schedule"])
    assert not any(run.offload_activations or run.offload_optimizer for run in runs)
    assert "selective" not in {run.recompute for run in runs}  # every k-th block


def test_the_error_of_the_memory_that_the_page_states_holds(predictions):
    errors: dict[str, list[float]] = {}
    for found in predictions:
        if found.memory_error is not None:
            name = found.row["framework"].split()[0]
            errors.setdefault(name, []).append(abs(found.memory_error))
    every = [error for of_framework in errors.values() for error in of_framework]
    assert len(every) > 100
    assert statistics.median(every) < 0.04
    assert statistics.median(errors["torchtitan"]) < 0.04


def test_megatrons_golden_rows_have_the_memory_at_rest_of_the_estimate(predictions):
    errors = []
    for found in predictions:
        if found.memory and (
            text := re.search(r"allocated at rest ([\d.]+) GiB", found.row["note"])
        ):
            errors.append(found.memory.rest_gib / float(text[1]) - 1)
    assert len(errors) >= 6
    assert all(-0.05 < error < 0.02 for error in errors)


def test_whether_a_run_fits_is_right_wherever_it_is_said(predictions):
    said = [p for p in predictions if p.memory and p.memory.fits is not None]
    without_memory = {p.row["id"] for p in said if not p.memory.fits}
    assert without_memory == {"626", "627"}  # published as out of memory
    assert all(p.row["mem_GiB"] != "OOM" for p in said if p.memory.fits)
    assert len(said) > 200


def test_the_optimizer_of_blooms_last_runs_has_more_gradients():
    before, after = (read_row(ROWS[key]).workload for key in ("620", "622"))
    assert (before.numerics.gradient_bytes, after.numerics.gradient_bytes) == (2, 6)
    assert before.layout.stage_blocks == ()
    assert after.layout.stage_blocks == (8, *[9] * 10, 8)  # an embedding counts as a block


def test_nanotron_divides_blocks_by_their_weights(predictions):
    by_id = {p.row["id"]: p for p in predictions}
    stages = [by_id[row].workload.layout.stage_blocks for row in ("777", "775", "783")]
    assert stages == [(14, 10), (7, 7, 6, 4), (4, 3, 3, 4, 3, 3, 4, 0)]
    for row in ("773", "775", "777", "783"):  # which say what is allocated at rest
        at_rest = float(re.search(r"at rest ([\d.]+) MiB", by_id[row].row["note"])[1])
        assert by_id[row].memory.rest_gib * 1024 == pytest.approx(at_rest, rel=0.03)


def test_layouts_are_ranked_as_measured(predictions):
    rankings = rank_layouts(predictions)
    assert all(found.rank_of_best <= 3 for found in rankings)
    assert statistics.mean(found.tau for found in rankings) > 0.8
    below = {found.name for found in rankings if found.tau_apart < 0.7}
    # docs/explanation/planner.md says why
    assert below == {"BLOOM 02-26, 13824 x 78, 64 heads, 384 GPUs, batch 2048"}


def test_the_constants_of_the_naive_model_are_medians(predictions):
    rows = [p for p in predictions if p.error is not None and kind_of_row(p) == "dense fp8"]
    h100 = [p.row["id"] for p in rows if p.cluster.gpu.name == "GB200"]
    errors = naive_errors(rows)
    assert statistics.median(errors[key] for key in h100) == pytest.approx(0, abs=0.02)


def test_a_row_becomes_the_workload_that_its_source_describes():
    bloom = read_row(ROWS["615"])
    assert bloom.cluster.machine.name == "jean-zay-a100"
    assert (bloom.workload.layout.n_microbatches, bloom.workload.recompute) == (128, "full")
    assert not bloom.workload.fused_attention
    titan = read_row(ROWS["714"])
    assert titan.workload.overlap.tensor
    assert titan.workload.numerics.float8_gather
    assert titan.workload.layout.gpus == 256
    foundry = read_row(ROWS["382"])  # its sizes are those of the named model
    assert foundry.workload.model.n_layers == 24
    simumax = read_row(ROWS["825"])  # its layout is in the name of the case
    assert (simumax.workload.layout.context, simumax.workload.seq_len) == (4, 32768)


@pytest.mark.parametrize(
    ("row", "note"),
    [
        ("2", "sparse attention"),
        ("733", "ep is not published"),
        ("10", "Mamba"),
        ("252", "ambiguous"),
        ("484", "not published: layers, hidden, ffn"),
        ("644", "gpus is not published"),
        ("663", "mbs is not published"),
        ("542", "dp = 8"),
    ],
)
def test_a_row_that_lacks_a_fact_is_not_predicted(row, note):
    assert note in read_row(ROWS[row])


def test_an_unknown_framework_is_predicted_with_defaults_that_are_named():
    (found,) = predict_rows([{**ROWS["615"], "framework": "MegaScale"}])
    assert found.step is not None and found.memory is not None
    assert 'framework "MegaScale" is not known: fused kernels' in found.note


@pytest.mark.parametrize("framework", ["torchtitan", "Meta"])
def test_the_batch_of_a_rank_is_not_one_micro_batch_of_a_pipeline(framework):
    sizes = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    degrees = {"gpus": "512", "tp": "8", "pp": "8", "dp": "8", "gbs": "256", "mbs": "32"}
    row = {**ROWS["703"], **sizes, **degrees, "model": "LLAMA3.1_405B", "framework": framework}
    row["note"] = "3D (mbs = local batch)"
    (found,) = predict_rows([row])
    assert 0.8 < found.step.total / 32 < 1.3  # 175 s if the 32 sequences are one micro-batch
    assert "micro-batches of one sequence assumed" in found.note
    layout = read_row({**row, "microbatches": "16"}).workload.layout
    assert (layout.micro_batch, layout.n_microbatches) == (2, 16)


def test_an_unknown_gpu_or_precision_gets_a_note():
    assert "hardware" in read_row({**ROWS["615"], "hardware": "TPU v5p"})
    assert "precision" in read_row({**ROWS["615"], "precision": "int8"})
    assert "seq is not a number" in read_row({**ROWS["615"], "seq": "2k"})
    assert "tp is not a number" in read_row({**ROWS["615"], "tp": "8x2"})


@pytest.mark.parametrize(
    ("hardware", "machine"),
    [
        ("a100_40gb", "dgx-a100-40gb"),
        ("NVIDIA A100-SXM4-40GB", "dgx-a100-40gb"),
        ("A100 40 GB", "dgx-a100-40gb"),
        ("A100-80GB, 640GB a server", "dgx-a100"),
        ("H100 96GB", "grand-teton-h100-96gb"),
        ("h100_80gb", "dgx-h100"),
    ],
)
def test_the_memory_of_a_gpu_is_read_however_it_is_written(hardware, machine):
    assert read_row({**ROWS["382"], "hardware": hardware}).cluster.machine.name == machine


def test_models_have_their_published_parameters():
    counted = 0
    for row in ROWS.values():
        if published := re.search(r"NumParams (\d+)", row["note"]):  # of MPT: learned positions
            model = read_row(row).workload.model
            assert count_parameters(model) == pytest.approx(int(published[1]), rel=1e-3)
            counted += 1
    assert counted > 100
    nemotron = read_row(ROWS["741"]).workload.model  # rotary, untied
    assert count_parameters(nemotron) == pytest.approx(8.54e9, rel=1e-3)
    assert read_row(ROWS["682"]).workload.model.positions == 2048


@pytest.mark.parametrize("key", ["gpus", "tp", "pp", "cp", "vp", "ep", "mbs", "seq", "layers"])
@pytest.mark.parametrize(
    ("number", "problem"),
    [
        ("0", "is not 1 or more"),
        ("-1", "is not 1 or more"),
        ("nan", "is not a whole number"),
        ("8.5", "is not a whole number"),
        ("inf", "is more than"),
    ],
)
def test_a_number_that_no_run_has_gets_a_note(key, number, problem):
    assert f"{key} = {number} {problem}" in read_row({**ROWS["615"], key: number})


def test_a_row_of_ones_own_gets_a_note_where_nothing_is_known():
    assert 'fsdp = "ZeRO-9"' in read_row({**ROWS["382"], "fsdp": "ZeRO-9"})
    assert "lacks l and mbc" in read_row({**ROWS["825"], "note": ""})
    assert "tp = 0 is not 1 or more" in read_row({**ROWS["825"], "note": "tp0_pp1_l2_mbc1"})
    assert "ep is not published" in read_row({**ROWS["733"], "note": "tp1_ep8"})
    assumed = "sequence parallelism is not published: assumed"
    assert assumed in read_row({**ROWS["615"], "sp": ""}).notes
    assert assumed not in read_row(ROWS["382"]).notes  # tp = 1
    assert "no recipe of experts for H200" in read_row({**ROWS["47"], "hardware": "H200"})


def test_measurements_of_ones_own_are_compared_as_far_as_they_are_numbers():
    own = {**ROWS["714"], "source": "torchtitan on our cluster"}
    assert "| **dense fp8** |" in error_table(predict_rows([own]))
    (found,) = predict_rows([{**own, "step_s": "inf", "mem_GiB": "0"}])
    assert found.error is None and found.memory_error is None


def test_a_row_of_a_stranger_is_refused_where_it_is_too_large_and_is_no_formula(tmp_path):
    rows = [{**ROWS["615"], "layers": "999999999999", "id": "=cmd|' /C calc'!A0"}]
    rows += [{**ROWS["615"], key: "1e12"} for key in ("gpus", "pp", "vp", "gbs", "seq", "ep")]
    rows += [{**ROWS["615"], "heads": "1e9"}]
    found = predict_rows(rows)
    assert all("is more than" in each.note and each.step is None for each in found)
    rebalanced = {**ROWS["625"], "vp": "2"}
    assert predict_rows([rebalanced])[0].step is not None  # blocks of a rank, not of a stage
    assert "stages, but 106 layers" in predict_rows([{**rebalanced, "vp": "9999"}])[0].note
    write_predictions(found, tmp_path / "out.csv")
    assert "\n'=cmd" in (tmp_path / "out.csv").read_text()


def test_predictions_that_cannot_be_written_are_a_users_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_predictions([], tmp_path / "none" / "out.csv")


def test_a_precision_that_the_gpu_lacks_gets_a_note():
    (found,) = predict_rows([{**ROWS["615"], "precision": "fp8"}])
    assert found.step is None
    assert "A100 has no matmul units for float8" in found.note


def test_heads_of_odd_widths_are_slow_without_flash_attention(predictions):
    odd = next(found for found in predictions if found.row["id"] == "598")  # 108 wide
    assert abs(odd.error) < 0.15


def test_recipes_say_how_experts_exchange_tokens():
    before = {**ROWS["47"], "source": "archive 26.04 NeMo Container"}  # Qwen3 30B, GB200, MXFP8
    graph, launched = read_row(ROWS["47"]).workload.exchange, read_row(before).workload.exchange
    assert graph.one_graph and graph.overlapped
    assert launched.once_per_rank and not (launched.one_graph or launched.overlapped)
    golden = read_row(ROWS["656"]).workload
    assert golden.layout.expert_tensor == 0 and not golden.exchange.once_per_rank


def test_a_known_regression_is_not_compared():
    assert "regression" in read_row(ROWS["20"]).untimed
    assert not read_row(ROWS["4"]).untimed


def test_runs_on_a_slow_network_tell_their_memory_only(predictions):
    slow = next(found for found in predictions if found.row["id"] == "784")
    assert slow.step is None
    assert slow.workload is not None
    assert "network" in slow.note


def test_predictions_are_written_with_their_notes(predictions, tmp_path):
    write_predictions(predictions[:60], tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == COLUMNS
    assert written[10]["step_s"] == ""  # Mamba layers
    assert "latent attention" in written[0]["note"]
    assert written[0]["peak_gib"] == ""
    assert float(written[4]["step_s"]) > 0
    assert float(written[4]["peak_gib"]) > float(written[4]["rest_gib"]) > 0
    assert written[4]["fits"] == ""  # what it recomputes is not published
    assert "none assumed" in written[4]["note"]
    assert "| **dense bf16** |" in error_table(predictions)


def test_a_file_without_the_columns_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("id,model\n1,x\n")
    with pytest.raises(DataError, match="lacks the columns source, framework"):
        read_rows(tmp_path / "rows.csv")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_kendall_tau_counts_pairs():
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)


def test_kendall_tau_leaves_out_pairs_that_repeated_runs_could_exchange():
    assert kendall_tau([100, 102, 150], [2, 1, 3], resolution=0.03) == 1
    assert kendall_tau([100, 104, 150], [2, 1, 3], resolution=0.03) == pytest.approx(1 / 3)
    assert math.isnan(kendall_tau([100, 101], [1, 2], resolution=0.03))


def test_every_published_model_has_a_source_and_its_published_size():
    sizes = published_models()["llama3_70b"]
    heads = 2 * (sizes["n_heads"] + sizes["n_kv_heads"]) * sizes["dim"] // sizes["n_heads"]
    block = sizes["dim"] * (heads + 3 * sizes["hidden_dim"])
    total = sizes["n_layers"] * block + 2 * sizes["vocab_size"] * sizes["dim"]
    assert total == pytest.approx(70.55e9, rel=0.001)
