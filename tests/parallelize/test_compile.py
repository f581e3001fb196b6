"""Compiled blocks are compiled once, whole, and stay what they were."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tests.distributed.oracle import SGD, Layout, batch_at, deepened, sharded
from tests.distributed.ranks import run_on_ranks
from tests.parallelize.memory import taken
from titanlite.models import FAMILIES, Llama3Sizes, valid_tokens
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    set_memory_budget,
)
from titanlite.parallelize.compile import (
    CompileConfig,
    compile_blocks,
    compiled_so_far,
    prepare_compiler,
)

BLOCKS = 4


def each_that_compiles(layouts) -> list[tuple[int, int, str, bool]]:
    found = []
    for layout in layouts:
        torch._dynamo.reset()
        counters.clear()
        found.append(steps_that_compile(replace(layout, compile="aot_eager")))
    return found


def steps_that_compile(layout) -> tuple[int, int, str, bool]:
    """(graphs after two steps, after four, what is said of them, whether names are plain)."""
    recipe = deepened(SGD, layout)
    model, mesh, engine = sharded(layout, recipe)
    rows = recipe.batch // mesh.degrees.data
    mine = slice(mesh.batch_rank * rows, (mesh.batch_rank + 1) * rows)
    graphs = []
    for stance in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            for step in (0, 1):
                inputs, labels = (part[mine] for part in batch_at(step, recipe))
                engine.forward_backward(inputs, labels, valid_tokens(labels))
        graphs.append(counters["stats"]["unique_graphs"])
    plain = {name for name, _ in FAMILIES["llama3"].build(recipe.shape).named_parameters()}
    return *graphs, compiled_so_far(), {name for name, _ in model.named_parameters()} <= plain


@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(), Layout(recompute="op"), Layout(recompute="full")],
        [
            Layout(shard=2, accumulate=3),
            Layout(shard=2, offload_activations=True),
            Layout(pipeline=2, microbatch=9),
        ],
    ],
    ids=["one", "two"],
)
def test_one_graph_serves_all_blocks_and_nothing_is_compiled_after_the_second_step(layouts):
    for of_rank in run_on_ranks(each_that_compiles, layouts[0].degrees.ranks, layouts):
        for graphs, later, said, plain in of_rank:
            assert later == graphs <= 3  # a block, and the two of the loss
            assert said.startswith(f"compiled {graphs} graphs in ")
            assert plain


def test_a_budget_of_the_compiler_is_kept_to():
    held = {}
    shape = Llama3Sizes(64, 2, 4, 4, 256, vocab_size=31)
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        config = ActivationCheckpointConfig(mode="memory_budget", memory_budget=budget)
        model = FAMILIES["llama3"].build(shape)
        set_memory_budget(config)
        compile_blocks(
            model.layers, CompileConfig(enable=True, backend="aot_eager_decomp_partition")
        )
        tokens = torch.zeros(2, 128, dtype=torch.int64)
        model(tokens, labels=tokens)
        _, held[budget] = taken(lambda: model(tokens, labels=tokens))
    set_memory_budget(ActivationCheckpointConfig(mode="none"))
    print({budget: f"{size / 2**20:.2f} MiB" for budget, size in held.items()})  # pytest -rP
    assert held[0.0] < held[0.5] < held[1.0]


def test_compiled_code_is_kept_among_the_users_caches_unless_they_said_where(monkeypatch):
    key, device = "TORCHINDUCTOR_CACHE_DIR", torch.device("cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv(key, raising=False)
    cache_dir()  # as torch does while its pipelines are imported
    assert Path(os.environ[key]).name.startswith("torchinductor_")
    prepare_compiler(device)
    assert os.environ[key] == "/somewhere/titanlite/inductor"
    monkeypatch.setenv(key, "/elsewhere")
    prepare_compiler(device)
    assert os.environ[key] == "/elsewhere"


def test_what_vectors_there_are_is_asked_without_a_process_each(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    prepare_compiler(torch.device("cpu"))
    started = []
    monkeypatch.setattr(subprocess, "run", lambda *words, **_: started.append(words))
    isa = cpu_vec_isa.VecAVX2()
    extension = next(Path(torch.__file__).parent.glob("_C.*"))
    assert isa._probe_load(str(extension))
    (tmp_path / "torn.so").write_bytes(extension.read_bytes()[:100])
    assert not isa._probe_load(str(tmp_path / "torn.so"))
    assert not started
