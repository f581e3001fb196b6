"""torch.compile of blocks: one graph for all blocks, no recompilation, no renamed parameters."""

from __future__ import annotations

import logging
import os
import subprocess
import sysconfig
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tests.distributed.oracle import (
    SGD,
    Layout,
    batch_at,
    build_sharded,
    own_rows,
    with_enough_blocks,
)
from tests.distributed.ranks import run_on_ranks
from tests.parallelize.memory import measure_allocations
from titanlite.errors import ConfigError
from titanlite.models import FAMILIES, Llama3Sizes, valid_tokens
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    set_memory_budget,
)
from titanlite.parallelize.compile import (
    CompileConfig,
    check_compiler,
    compile_blocks,
    describe_compilation,
    prepare_compiler,
)

pytestmark = pytest.mark.slow


def compile_each_layout(layouts) -> list[tuple[int, int, str, bool]]:
    results = []
    for layout in layouts:
        torch._dynamo.reset()
        counters.clear()
        results.append(run_compiled_steps(replace(layout, compile="aot_eager")))
    return results


def run_compiled_steps(layout) -> tuple[int, int, str, bool]:
    """(graphs after two steps, after four, the log line, whether parameter names are unchanged)."""
    recipe = with_enough_blocks(SGD, layout)
    model, mesh, engine = build_sharded(layout, recipe)
    graphs = []
    for stance in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            for step in (0, 1):
                inputs, labels = own_rows(mesh, *batch_at(step, recipe))
                engine.forward_backward(engine.prepare(inputs, labels), valid_tokens(labels))
        graphs.append(counters["stats"]["unique_graphs"])
    original = {name for name, _ in FAMILIES["llama3"].build(recipe.sizes).named_parameters()}
    unchanged = {name for name, _ in model.named_parameters()} <= original
    return *graphs, describe_compilation(), unchanged


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(), Layout(recompute="op"), Layout(recompute="full")],
        [
            Layout(shard=2, accumulate=3),
            Layout(shard=2, offload_activations=True),
            Layout(pipeline=2, microbatch=9),
            Layout(tensor=2),
            Layout(context=2),
        ],
    ],
    ids=["one", "two"],
)
def test_all_blocks_share_a_graph_and_nothing_recompiles_after_the_second_step(layouts):
    for rank_results in run_on_ranks(compile_each_layout, layouts[0].degrees.ranks, layouts):
        for graphs, later_graphs, log_line, names_unchanged in rank_results:
            assert later_graphs == graphs <= 3  # one of the block, two of the loss
            assert log_line.startswith(f"compiled {graphs} graphs in ")
            assert names_unchanged


def test_a_smaller_memory_budget_saves_fewer_activations():
    saved_bytes = {}
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    sizes = Llama3Sizes(64, 2, 4, 4, 256, vocab_size=31)
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        config = ActivationCheckpointConfig(mode="memory_budget", memory_budget=budget)
        model = FAMILIES["llama3"].build(sizes)
        set_memory_budget(config)
        compile_blocks(
            model.layers, CompileConfig(enable=True, backend="aot_eager_decomp_partition")
        )
        compute_loss = partial(model, tokens, labels=tokens)
        compute_loss()  # compiles
        _, saved_bytes[budget] = measure_allocations(compute_loss)
    set_memory_budget(ActivationCheckpointConfig(mode="none"))
    print({budget: f"{size / 2**20:.2f} MiB" for budget, size in saved_bytes.items()})  # pytest -rP
    assert saved_bytes[0.0] < saved_bytes[0.5] < saved_bytes[1.0]


def test_compiled_code_is_cached_on_this_machine_unless_the_user_set_a_folder(
    monkeypatch, tmp_path, caplog
):
    key, triton_key = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the home folder may be shared
    monkeypatch.setenv("HOME", "/shared")
    monkeypatch.delenv(key, raising=False)
    monkeypatch.delenv(triton_key, raising=False)
    cache_dir()  # as torch does when its pipelining package is imported
    assert Path(os.environ[key]).name.startswith("torchinductor_")
    with caplog.at_level(logging.INFO, "titanlite"):
        prepare_compiler(torch.device("cuda", 3))
    own_folder = tmp_path / f"titanlite_{os.getuid()}"
    assert os.environ[key] == str(own_folder / "inductor")
    assert os.environ[triton_key] == str(own_folder / "inductor" / "triton" / "3")
    assert f"compile cache  {own_folder}/inductor (set {key}" in caplog.text
    monkeypatch.setenv(key, "/elsewhere")
    monkeypatch.setenv(triton_key, "/triton")
    prepare_compiler(torch.device("cuda", 3))
    assert (os.environ[key], os.environ[triton_key]) == ("/elsewhere", "/triton")


def test_code_is_not_loaded_from_a_folder_that_others_can_write_to(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = tmp_path / f"titanlite_{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to it"):
        prepare_compiler(torch.device("cpu"))
    folder.chmod(0o700)
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="other users can write to it"):
        prepare_compiler(torch.device("cpu"))


def test_a_missing_compiler_is_reported_before_anything_is_compiled(monkeypatch, tmp_path):
    def problems(device_type: str, optimizer: bool = True, **config) -> list[str]:
        return [str(e) for e in check_compiler(CompileConfig(**config), optimizer, device_type)]

    python_headers = tmp_path / "Python.h"
    python_headers.touch()
    for name in ("gcc", "clang", "g++", "cc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert problems("cuda") == problems("cpu") == []
    (tmp_path / "gcc").unlink()
    assert problems("cuda") == []  # clang
    (tmp_path / "clang").unlink()
    [problem] = problems("cuda", enable=True)
    assert problem.startswith(
        "gcc or clang not found: a C compiler for Triton, which torch.compile"
    )
    assert "Install gcc, set CC to a compiler, or set compile.enable = false" in problem
    monkeypatch.setenv("CC", "cc")
    assert problems("cuda") == []
    python_headers.unlink()
    assert "Python.h not found: a header for Triton" in problems("cuda")[0]
    assert problems("cpu") == []
    (tmp_path / "g++").unlink()
    assert problems("cpu")[0].startswith("g++ not found: a C++ compiler, which torch.compile")
    assert problems("cpu", enable=True, backend="aot_eager")  # the optimizer is by inductor
    assert problems("cpu", optimizer=False, enable=True)
    assert problems("cpu", optimizer=False, enable=True, backend="aot_eager") == []
    assert problems("cpu", optimizer=False) == []


def test_cpu_vector_isas_are_probed_without_subprocesses(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    prepare_compiler(torch.device("cpu"))
    started = []
    monkeypatch.setattr(subprocess, "run", lambda *command, **_: started.append(command))
    isa = cpu_vec_isa.VecAVX2()
    extension = next(Path(torch.__file__).parent.glob("_C.*"))
    assert isa._probe_load(str(extension))
    (tmp_path / "truncated.so").write_bytes(extension.read_bytes()[:100])
    assert not isa._probe_load(str(tmp_path / "truncated.so"))
    assert not started
