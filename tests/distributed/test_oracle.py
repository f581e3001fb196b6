"""Every layout computes the same losses, gradients and weights as one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.oracle import (
    ADAMW,
    DOCUMENT_END,
    SGD,
    SIZES,
    Layout,
    Recipe,
    batch_at,
    build_sharded,
    fit_recipe,
    merge_ranks,
    one_process,
    parse_layouts,
    run_layouts,
    with_enough_blocks,
    with_tied_embeddings,
    worst_error,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import (
    CHANGES,
    FURTHER_TOKENS,
    LINEAR_ATTENTION_ALONE,
    MOE,
    SIGMOID,
    SOFTMAX,
    SPARSE,
    UNPLANNED,
    recipe_of,
    with_adapters,
)
from tests.distributed.resting import estimate_rest
from tests.parallelize.test_schedule import as_csv
from titanlite.labels import DOCUMENT_END as PACKED_END
from titanlite.models.mup import BaseWidths
from titanlite.models.sizes import prediction_layers
from titanlite.parallelize.schedule import build_schedule_order
from titanlite_corpus.packing.windows import PackSettings, pack_shard
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest

LONG = replace(SGD, batch=12, seq_len=24)  # the last step has a larger batch
SHORT = replace(LONG, steps=2)  # the second step depends on the update of the first
CLIPPED = replace(SHORT, max_norm=0.1)  # AdamW would hide a factor, such as that of clipping
MUP = replace(SHORT, mup_base=BaseWidths(dim=8, n_heads=2, hidden_dim=22, n_kv_heads=1), lr=0.1)
QWEN3_MOE = recipe_of("qwen3_moe", optimizer="Muon", lr=1e-2)
MUON = Recipe("Muon", max_norm=0.1, lr=2e-3, batch=12, seq_len=24, compare_tensors=True)
STABLE = ("eps", 1e-3)  # keeps AdamW from dividing rounding errors by gradients of the same size
# With less clipping than usual: it would hide errors of the Hessian.
SOPHIA = replace(
    MUON,
    optimizer="Sophia",
    lr=0.05,
    options=(STABLE, ("gamma", 10.0), ("hessian_frequency", 2), ("beta2", 0.5)),
)
WIDE = replace(SIZES, dim=128, hidden_dim=128)  # two tensor ranks have whole blocks of a scale
RECIPES = {
    "SGD": LONG,
    "AdamW, clipped": replace(ADAMW, batch=12, seq_len=24),
    "short": SHORT,
    "clipped": CLIPPED,
    "one step": replace(SHORT, steps=1),
    "documents": replace(SHORT, documents=True, seq_len=48),
    "tied embeddings": with_tied_embeddings(SHORT),
    "muP": MUP,
    "muP, tied embeddings": with_tied_embeddings(MUP),
    "adaptive clipping": replace(SHORT, adaptive=5e-4),
    "z-loss": replace(SHORT, z_loss=0.01),
    "Muon": replace(MUON, options=(STABLE,)),
    "Muon, per head": replace(MUON, options=(STABLE, ("muon_per_head", True))),
    "Sophia": replace(SOPHIA, z_loss=0.01),
    "Sophia, documents": replace(SOPHIA, documents=True),
    "balancing, Sophia": replace(SOFTMAX, optimizer="Sophia", options=SOPHIA.options, lr=0.01),
    "ragged, Sophia": replace(SOPHIA, batch=9),
    "experts": MOE,
    "balancing, one step": replace(SOFTMAX, steps=1),
    "experts, AdamW, clipped": replace(MOE, optimizer="AdamW", max_norm=0.1, lr=1e-3),
    "experts, adaptive clipping": replace(MOE, adaptive=5e-4),
    "experts, Muon": replace(MOE, optimizer="Muon", lr=1e-3),
    "experts, documents": replace(MOE, documents=True),
    "experts without tokens": SPARSE,
    "balancing, softmax": replace(SOFTMAX, steps=2),
    "balancing, sigmoid": replace(SIGMOID, steps=2),
    "balancing, Muon": replace(SIGMOID, optimizer="Muon", lr=1e-3),
    "balancing, Adafactor": replace(SOFTMAX, optimizer="Adafactor", lr=1e-3),
    "balancing, adaptive clipping": replace(SOFTMAX, adaptive=0.05),
    # Muon makes full-size updates of a gradient that is only rounding
    "a router of one active expert": replace(
        QWEN3_MOE, sizes=replace(QWEN3_MOE.sizes, n_active_experts=1)
    ),
    "window, documents": recipe_of("mistral", documents=True),
    "two windows, documents": recipe_of("gemma3", documents=True),
    "learned positions, documents": recipe_of("gpt2", documents=True),
    "sinks, documents": recipe_of("gpt_oss", documents=True),
    "sinks, one step": recipe_of("gpt_oss", steps=1),
    "sinks, Muon": recipe_of("gpt_oss", optimizer="Muon", lr=1e-3),
    "linear attention, documents": recipe_of("qwen3_next", documents=True, steps=1),
    "linear attention, Muon": recipe_of("qwen3_next", optimizer="Muon", lr=1e-3),
    "linear attention, no experts": recipe_of("qwen3_5", steps=1),
    "linear attention alone": LINEAR_ATTENTION_ALONE,
    "further tokens": FURTHER_TOKENS,
    "adapters": with_adapters(SHORT),
    "adapters, tied embeddings": with_adapters(with_tied_embeddings(CLIPPED)),
    "adapters, experts": with_adapters(SOFTMAX),
    "adapters, Muon": with_adapters(replace(MUON, options=(STABLE,), compare_tensors=False)),
    "adapters, further tokens": with_adapters(FURTHER_TOKENS),
    "bf16 base": replace(with_adapters(SHORT), base_dtype="bfloat16"),
    **{
        f"{name} base": replace(with_adapters(SHORT), base_dtype=name, sizes=WIDE)
        for name in ("nf4", "int4", "float8")
    },
    "nf4 base, biases": replace(
        with_adapters(recipe_of("gpt2")),
        base_dtype="nf4",
        sizes=replace(recipe_of("gpt2").sizes, dim=128, hidden_dim=128),
    ),
    "adapters, gpt_oss": with_adapters(recipe_of("gpt_oss")),
    "adapters, qwen3_next": with_adapters(recipe_of("qwen3_next")),
    # with idle sequences; SGD has 18 sequences in the last step
    "ragged": replace(SGD, batch=9, documents=True),
    "ragged, balancing": replace(SIGMOID, batch=9, steps=2),
    "ragged, further tokens": replace(FURTHER_TOKENS, batch=9),
    **{f"batch of {n}": replace(SIGMOID, batch=n, seq_len=18, steps=2) for n in (7, 24)},
    # What the second step depends on is the same in all families, but for these two.
    **{name: recipe_of(name, steps=1) for name in CHANGES},
    "qwen3_next": recipe_of("qwen3_next"),
    # with 0.2, the parts of the second gradient of a router's bias cancel all but its rounding
    "gpt_oss": recipe_of("gpt_oss", lr=0.1),
}
# Below the names of recipes, each line is one set of processes, which run its layouts one after the
# other; an indented line continues the one above. With "a / b" every recipe has a set of its own,
# with "a + b" they share one, and "[a]" begins the layouts of recipe a. "*" is every schedule; with
# `stages`, every one that leaves their number to the user. Under SGD every gradient and weight is
# compared: Adam and clipping would hide gradients that are wrong by a factor.
# Every setting is here with every kind of parallelism that changes what it does, and every pair of
# kinds. A compiled layout costs as much as 20 others: these take one step on few ranks.
TABLE = """
# SGD
accumulate=3
shard=2,accumulate=3; tensor=2,accumulate=3; context=2,accumulate=3; replicate=2,accumulate=3
    ; context=2,rotate=alltoall,balancer=none,accumulate=3; pipeline=2,microbatch=1,accumulate=3
shard=2,tensor=2,accumulate=3; [short] context=2,tensor=2,balancer=none
    ; context=2,shard=2,rotate=alltoall,accumulate=3
shard=3,accumulate=3; [tied embeddings] shard=3

# short
offload_activations=True; recompute=op; accumulate=3,reduction=last_microbatch,early=True
    ; [adaptive clipping] one; offload=True; [documents] accumulate=3,recompute=full
tensor=2,loss_parallel=False; tensor=2,recompute=op
    ; tensor=2,offload_activations=True,offload_folder=/tmp
    ; shard=2,accumulate=3,reduction=last_microbatch; shard=2,reshard=always; shard=2,reshard=never
    ; shard=2,offload=True; shard=2,recompute=op,offload=True; shard=2,recompute=full,chunk=100
    ; shard=2,reduction=last_microbatch,early=True
    ; context=2,rotate=alltoall,recompute=full; context=2,offload=True
    ; [clipped] shard=2; tensor=2; context=2; [AdamW, clipped] shard=2; tensor=2
    ; [z-loss] tensor=2,chunk=100; tensor=2,loss_parallel=False; context=2,accumulate=2
    ; [muP, tied embeddings] tensor=2
    ; [adaptive clipping] shard=2; replicate=2; tensor=2; context=2
shard=2,tensor=2,accumulate=2,loss_parallel=False,chunk=64,recompute=full
    ,reduction=last_microbatch,reshard=never
    ; tensor=4,chunk=56; replicate=2,tensor=2,offload_activations=True,recompute=selective
    ; replicate=2,shard=2,accumulate=2,reduction=last_microbatch,early=True
    ; replicate=2,context=2; context=4,rotate=alltoall,balancer=none
    ; [clipped] shard=2,tensor=2
pipeline=2,microbatch=2,schedule=*,stages=6
    ; pipeline=2,microbatch=3,reshard=always; pipeline=2,microbatch=3,recompute=full
    ; pipeline=2,microbatch=3,schedule=ZBVZeroBubble,recompute=selective,chunk=50
    ; pipeline=2,microbatch=3,offload=True; pipeline=2,microbatch=3,recompute=op
    ; pipeline=2,microbatch=3,schedule=DualPipeV,recompute=op
    ; pipeline=2,microbatch=3,schedule=ZBVZeroBubble,offload_activations=True,offload_folder=/tmp
    ; [clipped] pipeline=2,microbatch=3; [AdamW, clipped] pipeline=2,microbatch=3
    ; [muP, tied embeddings] pipeline=2,microbatch=3; [muP] pipeline=2,microbatch=3
    ; [adaptive clipping] pipeline=2,microbatch=3; [z-loss] pipeline=2,microbatch=3
    ; [tied embeddings] pipeline=2,microbatch=3; pipeline=2,microbatch=3,schedule=Interleaved1F1B
    ; pipeline=2,microbatch=3,schedule=ZBVZeroBubble
    ; pipeline=2,microbatch=1,accumulate=3,reduction=last_microbatch,schedule=ZBVZeroBubble
pipeline=4,microbatch=3; pipeline=2,tensor=2,microbatch=3,loss_parallel=False
    ; pipeline=2,shard=2,microbatch=3,reshard=always
    ; pipeline=2,shard=2,microbatch=1,accumulate=3,reduction=last_microbatch
    ,schedule=InterleavedZeroBubble
    ; [tied embeddings] pipeline=2,shard=2,microbatch=1,schedule=DualPipeV,reshard=never
    ; pipeline=2,replicate=2,microbatch=3
    ; pipeline=2,context=2,microbatch=3,schedule=Interleaved1F1B
pipeline=2,shard=2,tensor=2,microbatch=3

# one step
tensor=2,loss_parallel=False,chunk=100,compile=aot_eager,recompute=full
    ; [adapters] shard=2,compile=aot_eager,recompute=full
    ; [one step] shard=2,compile=aot_eager,offload_activations=True
    ; context=2,compile=aot_eager,recompute=op
    ; pipeline=2,microbatch=3,schedule=InterleavedZeroBubble,reshard=always,compile=aot_eager
    ; [balancing, one step] shard=2,expert=2,compile=aot_eager,recompute=full

# documents
tensor=2,recompute=full; context=2
    ; pipeline=2,microbatch=3,schedule=ZBVZeroBubble; context=2,rotate=alltoall,balancer=none
    ; [window, documents] context=2; [learned positions, documents] context=2; tensor=2
    ; [experts, documents] tensor=2,expert=2
context=4,rotate=alltoall; pipeline=2,context=2,microbatch=6,rotate=alltoall

# Muon
shard=2; tensor=2; replicate=2; context=2; pipeline=2,microbatch=3
    ; [balancing, Muon + balancing, Adafactor + balancing, adaptive clipping] shard=2
shard=2,tensor=2; [Muon, per head] shard=2,tensor=2
    ; [experts, Muon] shard=2,tensor=2,expert=2,expert_tensor=2

# Sophia
accumulate=3; [Sophia, documents] one
shard=2,accumulate=3; tensor=2; context=2; replicate=2; pipeline=2,microbatch=3
    ; tensor=2,loss_parallel=False,chunk=100; [Sophia, documents] context=2
    ; [ragged, Sophia] shard=2; pipeline=2,microbatch=3,schedule=ZBVZeroBubble
    ; [balancing, Sophia] shard=2,expert=2
shard=2,tensor=2; pipeline=2,tensor=2,microbatch=3; context=2,tensor=2,accumulate=2

# experts
one; [further tokens] accumulate=3,recompute=full,offload_activations=True
    ; [balancing, softmax] accumulate=3,recompute=full; recompute=op
    ; [linear attention, documents] accumulate=3,recompute=op
    ; [balancing, sigmoid] accumulate=3,recompute=full; recompute=op
    ; [linear attention alone] compile=aot_eager
tensor=2; tensor=2,expert=2; context=2,expert=2
    ; shard=2,expert=2,accumulate=3,reduction=last_microbatch,recompute=full
    ; shard=2,expert=2,accumulate=3,reshard=always,recompute=op
    ; shard=2,expert=2,offload=True; shard=2,expert=2,early=True,reduction=last_microbatch
    ; [a router of one active expert] shard=2,expert=2; context=2,expert=2
shard=2,tensor=2,expert=2,expert_tensor=2; replicate=2,shard=2,expert=2
    ; context=2,tensor=2,expert=4,rotate=alltoall,recompute=full
    ; pipeline=2,shard=2,expert=2,microbatch=1,schedule=ZBVZeroBubble
    ; [experts, AdamW, clipped] shard=2,tensor=2,expert=2,expert_tensor=2
    ; pipeline=2,tensor=2,expert=2,microbatch=6
    ; [experts, adaptive clipping] shard=2,tensor=2,expert=2,expert_tensor=2
    ; [experts without tokens] shard=4,expert=4; shard=2,tensor=2,expert=4,recompute=full

# balancing, softmax
shard=2,accumulate=3; context=2; shard=2,expert=2,accumulate=3; tensor=2; tensor=2,expert=2
    ; pipeline=2,microbatch=2; replicate=2
    ; [balancing, sigmoid] context=2; tensor=2
    ; pipeline=2,microbatch=2,schedule=ZBVZeroBubble

# ragged
shard=2; replicate=2; pipeline=2,microbatch=2,accumulate=2; context=2,accumulate=2
    ; [ragged, balancing] tensor=2,expert=2,accumulate=2
    ; pipeline=2,microbatch=2,accumulate=2,schedule=Interleaved1F1B,recompute=full
    ; [ragged, further tokens] shard=2,expert=2; pipeline=2,microbatch=2,accumulate=2

# ragged, balancing
shard=5,recompute=full

# adapters
accumulate=3,recompute=full; early=True,accumulate=3,reduction=last_microbatch; recompute=op
shard=2,accumulate=3; replicate=2; tensor=2; context=2; tensor=2,recompute=full
    ; shard=2,recompute=op,offload=True; shard=2,early=True,reduction=last_microbatch
    ; pipeline=2,microbatch=3; pipeline=2,microbatch=3,schedule=ZBVZeroBubble
    ; pipeline=2,microbatch=3,schedule=Interleaved1F1B,recompute=full
    ; pipeline=2,microbatch=3,schedule=DualPipeV
    ; [adapters, tied embeddings] pipeline=2,microbatch=3; tensor=2
    ; [adapters, experts] shard=2,expert=2; tensor=2,expert=2; context=2,expert=2
    ; [adapters, Muon] shard=2; tensor=2
    ; [bf16 base + nf4 base] shard=2; tensor=2,recompute=full; pipeline=2,microbatch=3
    ; [int4 base + float8 base + nf4 base, biases] tensor=2
    ; [adapters, further tokens] tensor=2; pipeline=2,microbatch=3
    ; [adapters, gpt_oss + adapters, qwen3_next] tensor=2; shard=2; context=2
shard=2,tensor=2; tensor=4; replicate=2,shard=2; pipeline=2,tensor=2,microbatch=3
    ; pipeline=2,shard=2,microbatch=1,schedule=InterleavedZeroBubble
    ; [adapters, experts] shard=2,tensor=2,expert=2,expert_tensor=2

# qwen3 + mistral + gpt2 + olmo2
shard=2; tensor=2; context=2,rotate=alltoall; pipeline=2,microbatch=6

# olmo3 + qwen2 + smollm3 + gemma3
shard=2; tensor=2; context=2,rotate=alltoall; pipeline=2,microbatch=6
    ; [two windows, documents] context=2; [sinks, documents] context=2
    ; shard=2,accumulate=3,recompute=op; tensor=2; pipeline=2,microbatch=3,schedule=ZBVZeroBubble

# gpt_oss
tensor=4; shard=2,tensor=2,expert=2,expert_tensor=2; context=2,tensor=2,expert=2,recompute=full
    ; [gpt2 + deepseek_v3] shard=2,tensor=2; [sinks, Muon] shard=2,tensor=2

# qwen3_next
shard=2; tensor=2; pipeline=2,microbatch=6; shard=2,expert=2; replicate=2
    ; [qwen3_5_moe] tensor=2,expert=2; context=2; [qwen3_5] tensor=2; pipeline=2,microbatch=6
    ; [olmo_hybrid] shard=2; tensor=2; context=2
    ; [qwen3_next] shard=2,recompute=full; shard=2,recompute=op; context=2
    ; [linear attention, documents] tensor=2; pipeline=2,microbatch=6,schedule=ZBVZeroBubble
    ; context=2,recompute=full; context=2,balancer=none
    ; [linear attention, Muon] shard=2; tensor=2
context=4; replicate=2,shard=2; [linear attention, documents] context=4; tensor=2,context=2
    ; pipeline=2,context=2,microbatch=6

# mixtral + qwen3_moe + glm4_moe + gpt_oss
tensor=2; context=2,rotate=alltoall; pipeline=2,microbatch=6; shard=2,expert=2; tensor=2,expert=2
    ; [further tokens] tensor=2,chunk=100; context=2,rotate=alltoall,balancer=none
    ; pipeline=2,microbatch=3; pipeline=2,microbatch=3,accumulate=2,schedule=Interleaved1F1B
    ; pipeline=2,microbatch=6,schedule=ZBVZeroBubble; tensor=2,expert=2
"""
# They run with `--layouts 2`: further combinations of the settings above, whose pairs of kinds of
# parallelism other layouts have.
MORE = """
# SGD
shard=4,accumulate=3; pipeline=4,microbatch=1,accumulate=3,schedule=InterleavedZeroBubble
    ; pipeline=4,microbatch=1,accumulate=3
pipeline=2,microbatch=1,accumulate=3,schedule=*
    ; pipeline=2,microbatch=1,accumulate=3,schedule=*,stages=6
pipeline=2,tensor=2,microbatch=2,accumulate=3
pipeline=2,context=2,microbatch=1,accumulate=3,schedule=Interleaved1F1B

# AdamW, clipped / clipped
shard=2,tensor=2; pipeline=2,tensor=2,microbatch=6; replicate=2,shard=2

# short
shard=2,tensor=2,reduction=last_microbatch,early=True
    ; replicate=2,shard=2,accumulate=2,reduction=last_microbatch; context=4
    ; [clipped] replicate=2,shard=2; [adaptive clipping] shard=2,tensor=2
    ; [tied embeddings] tensor=4; shard=2,tensor=2
    ; pipeline=2,shard=2,microbatch=1,schedule=ZBVZeroBubble,reshard=always,recompute=full
    ; pipeline=2,shard=2,microbatch=1,accumulate=3,reduction=last_microbatch
    ; pipeline=2,tensor=2,microbatch=3,schedule=ZBVZeroBubble
replicate=2,shard=2,tensor=2; pipeline=2,shard=2,tensor=2,microbatch=1,schedule=DualPipeV
    ; pipeline=2,context=2,tensor=2,microbatch=2,rotate=alltoall,schedule=Interleaved1F1B
shard=2,tensor=2,recompute=op; shard=2,tensor=2,offload_activations=True,recompute=selective
    ; tensor=4,loss_parallel=False,chunk=100; context=4,balancer=none
    ; pipeline=2,tensor=2,microbatch=3,schedule=InterleavedZeroBubble,stages=10
    ; pipeline=2,shard=2,microbatch=1,schedule=DualPipeV,reshard=always,recompute=full
    ; pipeline=2,shard=2,microbatch=1,schedule=InterleavedZeroBubble,reshard=always,recompute=full
pipeline=2,microbatch=3,schedule=Interleaved1F1B,stages=10
pipeline=2,replicate=2,shard=2,microbatch=1
pipeline=2,context=2,tensor=2,microbatch=2,rotate=alltoall,accumulate=3
shard=2,tensor=2,compile=aot_eager,recompute=full
tensor=4,loss_parallel=False,chunk=100,compile=aot_eager
shard=2,compile=aot_eager,offload_activations=True; context=2,compile=aot_eager
pipeline=2,shard=2,microbatch=1,schedule=ZBVZeroBubble,reshard=always,compile=aot_eager
    ; pipeline=2,shard=2,microbatch=1,schedule=DualPipeV,reshard=always,compile=aot_eager
    ; pipeline=2,shard=2,microbatch=1,schedule=InterleavedZeroBubble,reshard=always
    ,compile=aot_eager

# one step
pipeline=2,microbatch=3,schedule=DualPipeV,reshard=always,compile=aot_eager
    ; [adapters] tensor=2,compile=aot_eager

# documents
one
shard=2,tensor=2

# sinks, one step
tensor=2,compile=aot_eager,recompute=full
    ; [linear attention, no experts] tensor=2,compile=aot_eager,recompute=full
    ; [linear attention alone] context=2,compile=aot_eager

# tied embeddings
pipeline=2,microbatch=3,schedule=*; pipeline=2,microbatch=3,offload=True,recompute=op
pipeline=2,shard=2,microbatch=2,reshard=always,recompute=full
    ; pipeline=2,shard=2,microbatch=1,accumulate=3,reduction=last_microbatch
    ; pipeline=2,tensor=2,microbatch=6; pipeline=2,replicate=2,microbatch=1,accumulate=3
pipeline=2,microbatch=3,schedule=ZBVZeroBubble,offload=True,recompute=full
pipeline=2,microbatch=3,schedule=Interleaved1F1B,compile=aot_eager

# muP + muP, tied embeddings
shard=2,tensor=2; pipeline=2,microbatch=2,shard=2

# adaptive clipping
replicate=2,shard=2; tensor=4

# Muon
tensor=4; context=2,shard=2; shard=2,tensor=2; replicate=2,shard=2
    ; pipeline=2,tensor=2,microbatch=3,schedule=Interleaved1F1B

# experts
shard=2,expert=2,compile=aot_eager
shard=4,expert=4; shard=2,tensor=2,expert=2; replicate=2,shard=2,expert=2,accumulate=3
    ; pipeline=2,tensor=2,expert=2,microbatch=2,recompute=full
    ; pipeline=2,context=2,expert=2,microbatch=2
    ; pipeline=2,shard=2,expert=2,microbatch=1,schedule=DualPipeV
    ; [experts, adaptive clipping] replicate=2,shard=2,expert=2
    ; [experts, documents] shard=2,tensor=2,expert=2,expert_tensor=2

# balancing, sigmoid
one
shard=2,accumulate=3; tensor=2,expert=2; pipeline=2,microbatch=2
replicate=2,shard=2,expert=2; tensor=2,context=2,expert=2,recompute=full

# batch of 7 + batch of 24
one
shard=2
shard=3
shard=4
shard=5
shard=6
shard=7
shard=8

# olmo2 + qwen2 + gemma3
tensor=4

# balancing, softmax
tensor=2,context=2,expert=2,recompute=full; replicate=2,shard=2,expert=2
    ; [balancing, sigmoid] shard=2,tensor=2,expert=2,expert_tensor=2; replicate=2,shard=2,expert=2
one; compile=aot_eager,recompute=full
pipeline=2,microbatch=2,schedule=ZBVZeroBubble
shard=2,tensor=2,expert=2,expert_tensor=2

# qwen3 / mistral / gpt2 / olmo2 / olmo3 / qwen2 / smollm3 / gemma3
shard=2,tensor=2; replicate=2,shard=2

# mixtral / qwen3_moe / deepseek_v3 / glm4_moe / gpt_oss
shard=2; replicate=2
shard=2,tensor=2; replicate=2,shard=2
"""


def read_table(text: str) -> list[list[tuple[str, str]]]:
    """The (name of a recipe, layout) pairs of each line of a table."""
    rows, names = [], [""]
    for line in text.replace("\n    ", "").splitlines():
        if line.startswith("# "):
            names = line[2:].split(" / ")
        elif line:
            rows += [read_line(f"[{name}] {line}") for name in names]
    return rows


def read_line(line: str) -> list[tuple[str, str]]:
    pairs = []
    for part in line.split("[")[1:]:
        names, _, layouts = part.partition("] ")
        found = layouts.rstrip(" ;").split(";")
        pairs += [(name, layout.strip()) for name in names.split(" + ") for layout in found]
    return pairs


ROWS = read_table(TABLE)


def assert_matches_one_process(cases) -> None:
    """Compare loss, norm and the planner's bytes at rest; under SGD every gradient and weight too.

    AdamW would amplify the rounding of a gradient near zero to a full update.
    """
    by_rank = run_on_ranks(run_layouts, cases[0][0].degrees.ranks, cases)
    wrong = []
    for (layout, recipe), *records in zip(cases, *by_rank, strict=True):
        errors = find_errors(layout, recipe, records, one_process(recipe))
        if errors:
            wrong.append((str(layout), recipe.optimizer, errors))
    assert not wrong


def find_errors(layout, recipe, records, expected) -> dict[str, float]:
    """What differs from the one process by more than rounding; raises AssertionError if ranks
    differ, if the planner's bytes are wrong, or if a weight has no gradient on either side."""
    record = merge_ranks(records)
    is_planned = recipe.spec.name not in UNPLANNED and not prediction_layers(recipe.sizes)
    is_planned = is_planned and not recipe.lora.rank
    if is_planned and not (layout.early or layout.offload):  # else not all there after backward
        ranks_of_stage = layout.degrees.ranks // layout.pipeline
        rest = [record.rest for record in records[::ranks_of_stage]]
        assert rest == estimate_rest(layout, recipe), str(layout)
    steps = expected.gradients
    dead = [name for name in steps[0] if not any(step[name].any() for step in steps)]
    assert not dead, f"gradients of zero on one process: {dead}"  # equal on all, but not trained
    for name in expected.weights if recipe.adapters and recipe.compares_tensors else ():
        is_frozen = not name.endswith(("lora_a", "lora_b", "expert_bias", ".hessian"))
        assert not is_frozen or torch.equal(record.weights[name], expected.weights[name]), name
    errors = worst_error(record, expected, recipe.compares_tensors)
    print(f"{layout} {recipe.optimizer}: at most {max(errors.values()):.1e}")  # pytest -rP
    return {name: error for name, error in errors.items() if not error <= 1e-5}


def name_of(row: list[tuple[str, str]]) -> str:
    (recipe, layout), *others = row
    return f"{recipe}: {layout}" + (f" and {len(others)} more" if others else "")


def pytest_generate_tests(metafunc) -> None:
    if "row" in metafunc.fixturenames:
        rows = ROWS if metafunc.config.getoption("--layouts") == 1 else [*ROWS, *read_table(MORE)]
        metafunc.parametrize("row", rows, ids=name_of)


def test_every_layout_matches_one_process(row):
    assert_matches_one_process(
        [(x, recipe_for(name, x)) for name, layouts in row for x in parse_layouts(layouts)]
    )


def recipe_for(name: str, layout: Layout) -> Recipe:
    """The recipe of a row; a family has a block for each of two stages."""
    return RECIPES[name] if name in CHANGES else fit_recipe(RECIPES[name], layout)


def test_every_recipe_is_in_the_table():
    assert RECIPES.keys() == {name for row in [*ROWS, *read_table(MORE)] for name, _ in row}


def test_a_schedule_from_a_file_matches_one_process(tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text(
        "\n" + as_csv(build_schedule_order("ZBVZeroBubble", ranks=2, stages=4, microbatches=4))
    )
    layout = Layout(pipeline=2, csv=str(file), microbatch=3)
    assert_matches_one_process([(layout, with_enough_blocks(LONG, layout))])


def write_packed(folder: Path, seq_len: int) -> str:
    """Windows packed by best fit; the padding has the id of an end, which ends nothing here."""
    random = np.random.default_rng(0)
    with ShardWriter(folder / "documents", SIZES.vocab_size) as writer:
        for _ in range(400):
            length = int(np.exp(random.normal(2.5, 1.0))) + 1
            writer.add(random.integers(1, SIZES.vocab_size, length))
        writer.close()
    record, _ = pack_shard(
        folder / "documents", folder / "packed/0", PackSettings(seq_len, DOCUMENT_END)
    )
    manifest = {"packed_seq_len": seq_len}
    write_corpus_manifest(folder / "packed", "random", SIZES.vocab_size, [record], **manifest)
    return str(folder / "packed")


def test_packed_windows_match_separate_documents_in_one_process(tmp_path):
    packed = write_packed(tmp_path, SGD.seq_len)
    recipe = replace(SGD, documents=True, packed=packed, batch=8, steps=2)
    marks = [(batch_at(step, recipe)[1] == PACKED_END).sum(1) for step in range(2)]
    assert all(count.sum() >= 5 for count in marks)
    deep = replace(recipe, sizes=replace(SIZES, n_layers=4))
    assert_matches_one_process(
        [
            (Layout(tensor=2), recipe),
            (Layout(context=2), recipe),
            (Layout(pipeline=2, microbatch=4), deep),
        ]
    )


def documents_of_blocks(layout) -> tuple[Counter[int], int, int]:
    """(forwards of blocks by the prepared index that they use, micro-batches, blocks) of a step."""
    recipe = with_enough_blocks(replace(SGD, documents=True, batch=12), layout)
    model, _, engine = build_sharded(layout, recipe)
    batch, used = engine.prepare(*batch_at(0, recipe)), []
    for block in model.layers.values():
        block.register_forward_pre_hook(lambda module, inputs: used.append(inputs[2]))
    engine.forward_backward(batch, torch.tensor(1.0))
    numbers = {id(index): number for number, index in enumerate(batch.documents)}
    return Counter(numbers.get(id(index), -1) for index in used), len(numbers), len(model.layers)


@pytest.mark.parametrize(
    "layout",
    [Layout(pipeline=2, microbatch=3, accumulate=2), Layout(context=2, accumulate=3)],
    ids=str,
)
def test_no_stage_and_no_micro_batch_searches_for_its_documents(layout):
    """Where a prepared index is not handed over, the model finds the documents, and waits."""
    for forwards, microbatches, blocks in run_on_ranks(documents_of_blocks, 2, layout):
        assert microbatches >= 3
        assert forwards == dict.fromkeys(range(microbatches), blocks)


def count_forwards(layout) -> tuple[int, int]:
    """(forwards of a rank's blocks in one step, recomputation included; its blocks)."""
    recipe = with_enough_blocks(SHORT, layout)
    model, _, engine = build_sharded(layout, recipe)
    forwards: list[str] = []
    for name, block in model.layers.items():
        block.ffn_norm.register_forward_pre_hook(lambda *_, name=name: forwards.append(name))
    engine.forward_backward(engine.prepare(*batch_at(0, recipe)), torch.tensor(1.0))
    return len(forwards), len(model.layers)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble"])
def test_a_split_backward_recomputes_each_block_once(schedule):
    layout = Layout(pipeline=2, microbatch=3, schedule=schedule, recompute="full")
    for forwards, blocks in run_on_ranks(count_forwards, 2, layout):
        assert forwards == 2 * blocks * SHORT.batch // layout.microbatch


def test_adaptive_clipping_clips_some_units_and_the_reported_norm_is_of_before():
    clipped, plain = (one_process(replace(SHORT, adaptive=factor)) for factor in (5e-4, 0.0))
    assert clipped.norms[0] == plain.norms[0]
    whole, partly = set(), set()
    for name, gradient in clipped.gradients[0].items():
        same = (gradient == plain.gradients[0][name]).view(len(gradient), -1).all(1)
        whole |= {name} if not same.any() else set()
        partly |= {name} if same.any() and not same.all() else set()
    assert "norm.weight" in whole and "output.weight" not in whole | partly
    assert "layers.0.attention.wq.weight" in partly


def test_the_runs_with_clipping_are_clipped():
    """Otherwise the oracle would not test clipping."""
    for recipe in (ADAMW, CLIPPED):
        assert min(one_process(recipe).norms) > recipe.max_norm


def test_the_model_sizes_do_not_divide_evenly():
    """Otherwise a bug in uneven sharding would not be detected."""
    assert SIZES.vocab_size % 2 and SIZES.hidden_dim % 3
