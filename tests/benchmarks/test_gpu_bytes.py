"""The counts of a step on a GPU that this machine does not have."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_bytes.sass import count_instructions
from benchmarks.gpu_bytes.targets import JOBS, read_page
from conftest import HANG_SECONDS, ROOT

DIM, BLOCKS, HEADS, HIDDEN, VOCABULARY, TOKENS = 128, 2, 4, 256, 1024, 512
TINY = {
    "model.dim": DIM,
    "model.n_layers": BLOCKS,
    "model.n_heads": HEADS,
    "model.n_kv_heads": HEADS,
    "model.hidden_dim": HIDDEN,
    "model.vocab_size": VOCABULARY,
    "training.seq_len": TOKENS,
    "training.local_batch_size": 1,
    "training.dtype": "bfloat16",
    "attention.backend": "flash",
    "activation_checkpoint.mode": "none",
    "loss.chunk_tokens": 0,
}
LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R2, R2, 1, RZ ;
        /*0020*/                   ISETP.LT.AND P0, PT, R2, R3, PT ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_2);
        /*0060*/                   NOP ;
"""


def test_a_loop_is_counted_as_often_as_it_runs():
    assert count_instructions(LISTING, 1) == 5
    assert count_instructions(LISTING, 4) == 5 + 3 * 3


def test_no_counted_cost_is_above_its_limit():
    limits = {metric.name: metric.most for metrics in JOBS.values() for metric in metrics}
    page = read_page()
    assert {name: most for name, (_, most) in page.items()} == limits
    assert not {name: row for name, row in page.items() if row[0] > row[1]}


@pytest.mark.slow
def test_the_counts_of_an_eager_step_are_those_of_its_operators(tmp_path):
    if torch.cuda.is_available() or shutil.which("g++") is None:
        pytest.skip("needs a machine without a GPU, and g++")
    counts = tmp_path / "counts.json"
    command = [sys.executable, "-m", "benchmarks.gpu_bytes", "--gpu", "H100", "--json", str(counts)]
    command += [f"--{key}={value}" for key, value in TINY.items()]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0 and "predicted:" in done.stdout
    step = json.loads(counts.read_text())
    parts = step["parts"]
    matrices = BLOCKS * (4 * DIM * DIM + 3 * DIM * HIDDEN)
    attention = BLOCKS * 2 * TOKENS * TOKENS * DIM  # causal
    assert parts["blocks, forward"]["flops"] == 2 * TOKENS * matrices + attention
    assert parts["others, backward"]["flops"] == 4 * TOKENS * matrices + 2.5 * attention
    assert parts["loss"]["flops"] == 3 * 2 * TOKENS * DIM * VOCABULARY
    parameters = matrices + 2 * VOCABULARY * DIM + (2 * BLOCKS + 1) * DIM
    assert parts["clipping"]["read"] == pytest.approx(2 * parameters, rel=0.01)  # the norm
    assert parts["clipping"]["written"] < 0.01 * parameters
    assert parts["optimizer"]["minimum"] == pytest.approx(14 * parameters, rel=0.01)  # of bf16
    assert parts["blocks, forward"]["minimum"] == minimum_of_eager_blocks()
    assert step["waits"] == []


def minimum_of_eager_blocks() -> int:
    """Bytes that the kernels beside matmuls and attention of the tiny blocks must move, forward."""
    wide, hidden = 2 * TOKENS * DIM, 2 * TOKENS * HIDDEN
    # a norm: its result for a matmul; for backward its input and the normalized one in fp32, and
    # the root mean squares; its weights
    norm = wide + 2 * 2 * wide + 4 * TOKENS + 2 * DIM
    rotary = 4 * wide  # queries and keys are read and written
    swiglu = 2 * hidden + 2 * hidden  # with silu(w1 x) for backward
    sums = 2 * wide  # read from two matmuls; their sums are the inputs that the norms save
    ends = 2 * wide + 2 * 4 * TOKENS * DIM // HEADS  # with cosines and sines in fp32
    return ends + BLOCKS * (2 * norm + rotary + swiglu + sums)
