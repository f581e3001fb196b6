"""Workloads of published measurements: rows of a CSV file, in the schema of
`benchmarks/published_runs.csv`.

A row that lacks what is needed gives a note instead of a workload. What a framework does in all of
its runs, and a row does not say, is in FRAMEWORKS, with its source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from titanlite.errors import UserError
from titanlite.files import parse_toml
from titanlite_planner.accuracy.published_experts import (
    MissingFact,
    published_exchange,
    published_expert_tensor,
)
from titanlite_planner.hardware import Cluster, find_cluster
from titanlite_planner.model_shape import Experts, LatentAttention, ModelShape, block_matmul_weights
from titanlite_planner.workload import (
    ExpertExchange,
    Layout,
    MatmulPrecision,
    Numerics,
    Overlap,
    Recompute,
    Workload,
)

Row = Mapping[str, str]


class PublishedRun(NamedTuple):
    """A row as a workload on a cluster, with notes on what was assumed."""

    workload: Workload
    cluster: Cluster
    notes: list[str]
    untimed: str = ""  # why its seconds cannot be compared; its memory can


@dataclass(frozen=True)
class FrameworkFacts:
    """What a framework does in all of its published runs."""

    fused: bool  # norms, activations and position embeddings in few kernels
    attention: Literal["stored", "flash1", "flash2", "native"]
    sharded: Any = "optimizer"
    overlap: Overlap = field(default_factory=Overlap)
    reduce_bytes: float = 4
    gradient_bytes: float = 4
    weights_quantized_once: bool = False
    blocking_launches: bool = False
    fused_sums: bool = False
    loss: Literal["pytorch", "megatron", "flash"] = "megatron"
    reported_memory: float = 1.0  # divided by the memory of its tensors at the peak
    process_gib: float = 0.0  # added to it
    reported_rank: Literal["worst", "last"] = "worst"  # in the pipeline
    stages_by_cost: bool = False  # blocks are divided by their matmul weights
    gather_buffer: bool = False  # for the input of the output layer; stays allocated after a step


# torchtitan and nanotron report what the allocator has reserved, BLOOM's log what nvidia-smi shows.
# This factor is calibrated: it halves the error of BLOOM's and nanotron's rows.
RESERVED = 1.2
ROWWISE_BYTES = 10.0  # to quantize an element in both layouts, before torch 2.13 and CUDA 12.9
# nvidia-smi shows, beside that, CUDA's context with all kernels and NCCL's buffers. Calibrated on
# BLOOM's rows, whatever their size.
PROCESS_GIB = 4.0
EARLY_MEGATRON = FrameworkFacts(False, "stored", "nothing", Overlap(data=False))
# Megatron-Core's gradient_accumulation_fusion is on by default
NEMO = FrameworkFacts(
    True,
    "native",
    overlap=Overlap(tensor=True, pipeline=True),
    weights_quantized_once=True,
    fused_sums=True,
)
# by the beginning of a framework's name; the first that matches counts
FRAMEWORKS = {
    # arXiv 2104.04473: no overlap of gradients; softmax, bias and GELU are fused (section 4.2), but
    # norms are not fused with residual sums, so the traffic is nearer to that of eager blocks
    "Megatron-LM 2021": EARLY_MEGATRON,
    "Megatron-LM 2022": EARLY_MEGATRON,
    # arXiv 2201.11990, and bigscience's fork: DeepSpeed's pipeline reduces after the last backward
    # BLOOM ran with CUDA_LAUNCH_BLOCKING=1, against hangs (chronicles-prequel.md)
    "Megatron-DeepSpeed (ZeRO-1": replace(
        EARLY_MEGATRON,
        sharded="optimizer",
        blocking_launches=True,
        reported_memory=RESERVED,
        process_gib=PROCESS_GIB,
    ),
    "Megatron-DeepSpeed": replace(EARLY_MEGATRON, sharded="optimizer"),
    # SimuMax docs/b200/b200_real_repro_guide.md: overlap is switched off
    "Megatron-LM 0.14": FrameworkFacts(
        True, "native", overlap=Overlap(data=False), fused_sums=True
    ),
    # the last rank logs (megatron/training/global_vars.py);
    # Transformer Engine casts weights to Float8 in the first micro-batch of a step only;
    # LinearWithGradAccumulationAndAsyncCommunication gathers into the global memory buffer
    "Megatron-Core": FrameworkFacts(
        True,
        "native",
        weights_quantized_once=True,
        fused_sums=True,
        reported_rank="last",
        gather_buffer=True,
    ),
    # performance recipes: tp_comm_overlap, overlap_grad_reduce, overlap_param_gather and overlapped
    # transfers of the interleaved schedule (Megatron-Bridge docs/performance-guide.md); its recipes
    # set grad_reduce_in_fp32 = False
    "Megatron-Bridge": replace(NEMO, reduce_bytes=2, gradient_bytes=2),
    "NeMo 24": NEMO,
    "NeMo AutoModel": FrameworkFacts(True, "native", "parameters", loss="pytorch"),
    # PyTorch eager, FSDP1 with mixed_precision PURE: gradients are reduced in bf16
    # and its recipes of 2023 have attn_impl: triton (scripts/train/yamls/pretrain)
    # MPT's default loss_fn is fused_crossentropy (llmfoundry/models/mpt/modeling_mpt.py)
    "llm-foundry": FrameworkFacts(False, "flash1", "parameters", reduce_bytes=2, loss="flash"),
    "torchtitan": FrameworkFacts(
        True, "flash2", "parameters", loss="pytorch", reported_memory=RESERVED
    ),
    # its pipeline: build_model in src/nanotron/models/base.py
    "nanotron": FrameworkFacts(
        False,
        "flash2",
        "optimizer",
        Overlap(data=True),
        reported_memory=RESERVED,
        stages_by_cost=True,
    ),
}

# what recent trainers have in common: fused kernels, and the GPU generation's own attention kernel
UNKNOWN_FRAMEWORK = FrameworkFacts(True, "native")
UNKNOWN_DEFAULTS = (
    "fused kernels, the GPU's own flash attention, sharded optimizer state, gradients in fp32 and"
    " overlapped, TP communication not overlapped are assumed"
)

# a pattern in the cell `hardware` in lower case, and the machine; the first that matches
MACHINES = (
    ("jean zay", "jean-zay-a100"),
    (r"a100.{0,12}(?<!\d)40 ?gb", "dgx-a100-40gb"),
    ("a100", "dgx-a100"),
    (r"h100.{0,12}(?<!\d)96 ?gb", "grand-teton-h100-96gb"),
    ("gb300", "gb300-nvl72"),
    ("gb200", "gb200-nvl72"),
    ("b300", "dgx-b300"),
    ("b200", "dgx-b200"),
    ("h200", "dgx-h200"),
    ("h100", "dgx-h100"),
)
UNMODELLED = {
    "deepseekv4": "sparse attention",
    "nemotron_3": "Mamba layers",
    "nemotron v3": "Mamba layers",
}
ZERO_STAGES = {
    "ZeRO-0": "nothing",
    "ZeRO-1": "optimizer",
    "ZeRO-2": "gradients",
    "ZeRO-3": "parameters",
}
BLOOM_HEADS = 64  # "all NHEADS=64 (above too)", bigscience chronicles-prequel.md, line 677


@cache
def published_models() -> dict[str, dict[str, Any]]:
    """Published sizes by the name of a model in lower case."""
    text = files("titanlite_planner.accuracy").joinpath("published_models.toml").read_text("utf-8")
    models = {}
    for name, table in parse_toml(text)["models"].items():
        sizes = {key: value for key, value in table.items() if key not in ("names", "source")}
        for alias in (name, *table.get("names", ())):
            models[alias.lower()] = sizes
    return models


def read_row(row: Row) -> PublishedRun | str:
    """The workload of a row, or a note that says what is missing."""
    try:
        return _read_row(_with_simumax_cells(row))
    except MissingFact as missing:
        return str(missing)
    except UserError as error:
        return error.message


def _read_row(row: Row) -> PublishedRun:
    facts, notes = framework_facts(row), list[str]()
    if facts is UNKNOWN_FRAMEWORK:
        notes.append(f'framework "{row["framework"]}" is not known: {UNKNOWN_DEFAULTS}')
    model = _row_model(row, notes)
    layout = _row_layout(row, facts, notes)
    if (stages := layout.pipeline * layout.stages_per_rank) > model.n_layers + 2:
        raise MissingFact(f"pp x vp = {stages} stages, but {model.n_layers} layers")
    single = layout.stages_per_rank == 1  # the blocks of a rank are those of its stage
    if single and "Rebalancing layers" in row["note"]:
        layout = replace(layout, stage_blocks=_balanced_with_embeddings(model, layout))
    if single and facts.stages_by_cost and layout.pipeline > 1:
        layout = replace(layout, stage_blocks=_divided_by_cost(model, layout.pipeline))
    if layout.stages_per_rank > 1:
        layout = replace(layout, schedule="Interleaved1F1B")
    if model.experts:
        layout = replace(layout, expert_tensor=published_expert_tensor(row))
    cluster = _row_cluster(row, layout)
    recompute = _row_recompute(row, notes)
    eager = "eager" in row["precision"]
    note = row["note"].lower()
    overlap = facts.overlap
    if "async tp" in note or "asynctp" in note:
        overlap = replace(overlap, tensor=True)
    numerics = _row_numerics(row, facts)
    workload = Workload(
        model,
        layout,
        _row_number(row, "seq"),
        numerics,
        recompute,
        compiled=facts.fused and not eager,
        fused_attention=facts.attention != "stored",
        attention_kernel="native" if facts.attention == "stored" else facts.attention,
        loss=facts.loss,
        blocking_launches=facts.blocking_launches,
        fused_sums=facts.fused_sums,
        overlap=overlap,
        exchange=published_exchange(row, cluster.gpu.name) if model.experts else ExpertExchange(),
    )
    slow = "slow (network)" in note and layout.gpus > cluster.machine.link_domain
    untimed = "only memory: the network of this run was slow" if slow else ""
    if "26.06.01" in row["source"] and "gpt oss" in row["model"].lower():  # says its table
        untimed = "only memory: a known regression of this release"
    return PublishedRun(workload, cluster, notes, untimed)


def framework_facts(row: Row) -> FrameworkFacts:
    """What the row's framework does; UNKNOWN_FRAMEWORK for one that is not known."""
    return next(
        (facts for name, facts in FRAMEWORKS.items() if row["framework"].startswith(name)),
        UNKNOWN_FRAMEWORK,
    )


# of cells that an estimate has a loop over; of the other cells 10^9
_LIMITS = {"layers": 10_000, "pp": 10_000, "vp": 10_000, "gpus": 10_000_000}


def _row_number(row: Row, key: str) -> int:
    """A positive whole number that is not too large to be estimated."""
    text = row[key].strip()
    try:
        number = float(text)
    except ValueError:
        raise MissingFact(f"{key} is {'not a number' if text else 'not published'}") from None
    if number > (limit := _LIMITS.get(key, 10**9)):
        raise MissingFact(f"{key} = {text} is more than {limit:,}")
    if number < 1:
        raise MissingFact(f"{key} = {text} is not 1 or more")
    if number % 1:  # or not a number
        raise MissingFact(f"{key} = {text} is not a whole number")
    return int(number)


def _degree(row: Row, key: str) -> int:
    """A degree of parallelism, 1 if it is not published."""
    return _row_number(row, key) if row[key].strip() else 1


def _row_model(row: Row, notes: list[str]) -> ModelShape:
    name = row["model"]
    for part, what in UNMODELLED.items():
        if part in name.lower():
            raise MissingFact(f"{what} of {name} is not modelled")
    base = re.sub(r"\s*\(.*\)$", "", name.lower())
    sizes = dict(published_models().get(base, {}))
    cells = {"n_layers": "layers", "dim": "hidden", "n_heads": "heads", "n_kv_heads": "kv_heads"}
    cells |= {"hidden_dim": "ffn", "vocab_size": "vocab"}
    sizes |= {key: _row_number(row, cell) for key, cell in cells.items() if row[cell].strip()}
    if "bigscience" in row["source"]:
        sizes.setdefault("n_heads", BLOOM_HEADS)
    sizes.setdefault("n_kv_heads", sizes.get("n_heads"))
    llama = bool(re.search("llama|mixtral|qwen|oss|deepseek|kimi", base))
    sizes.setdefault("gated", llama)
    missing = [cell for key, cell in cells.items() if not sizes.get(key)]
    if missing:
        raise MissingFact(f"not published: {', '.join(missing)}")
    if not llama and "8t_release" not in base:  # GPT and MPT: tied embeddings, learned positions
        sizes.setdefault("tied_embeddings", True)
        # BLOOM's ALiBi has no table (setup-test-n2.slurm); 0 would stand for rotary embeddings
        alibi = "bigscience" in row["source"]
        sizes.setdefault("positions", 1 if alibi else _row_number(row, "seq"))
    if sizes["n_heads"] > sizes["dim"]:
        raise MissingFact(f"heads = {sizes['n_heads']} is more than hidden = {sizes['dim']}")
    if "experts" in sizes and not row["ep"].strip():
        raise MissingFact("ep is not published")
    if ("moe" in base or "mixtral" in base) and "experts" not in sizes:
        raise MissingFact("not published: experts")
    if _predicts_two_tokens(row, base):
        sizes["n_layers"] += 1
        notes.append("the module that predicts a second token: estimated as one more block")
    experts, latent = sizes.pop("experts", None), sizes.pop("latent", None)
    head_dim = sizes.pop("head_dim", None) or sizes["dim"] // sizes["n_heads"]
    return ModelShape(
        name=name,
        head_dim=head_dim,
        experts=Experts(**experts) if experts else None,
        latent=LatentAttention(**latent) if latent else None,
        **sizes,
    )


def _predicts_two_tokens(row: Row, base: str) -> bool:
    """Whether a run of DeepSeek-V3 has its multi-token prediction: in Megatron-Bridge's recipes
    (mtp_num_layers = 1), unless the row says otherwise."""
    bridge = row["framework"].startswith("Megatron-Bridge")
    return bridge and base == "deepseekv3" and "w/o mtp" not in row["model"].lower()


def _row_layout(row: Row, facts: FrameworkFacts, notes: list[str]) -> Layout:
    gpus, tensor = (_row_number(row, key) for key in ("gpus", "tp"))
    pipeline, context = (_degree(row, key) for key in ("pp", "cp"))
    ranks = tensor * pipeline * context
    if gpus % ranks:
        raise MissingFact(f"{gpus} GPUs are not a multiple of tp x pp x cp = {ranks}")
    data = gpus // ranks
    if row["dp"].strip() and _row_number(row, "dp") not in (data, data * context):
        raise MissingFact(f"dp = {row['dp']}, but gpus / (tp x pp x cp) = {data}")
    micro_batch, micro_batches = _row_batches(row, data, pipeline, notes)
    if pipeline > 1 and not row["vp"].strip():
        notes.append("stages per rank are not published: one assumed")
    sharded, reshard = _row_sharding(row, facts, data * context)
    if tensor > 1 and not row["sp"].strip():
        notes.append("sequence parallelism is not published: assumed")
    sequence_parallel = row["sp"].strip().lower() not in ("no", "false")
    return Layout(
        shard=data,
        context=context,
        tensor=tensor,
        pipeline=pipeline,
        expert=_degree(row, "ep"),
        sequence_parallel=sequence_parallel,
        sharded=sharded,
        reshard_after_forward=reshard,
        stages_per_rank=_degree(row, "vp"),
        micro_batch=micro_batch,
        n_microbatches=micro_batches,
    )


def _row_batches(row: Row, data: int, pipeline: int, notes: list[str]) -> tuple[int, int]:
    """Sequences of a micro-batch, and the micro-batches of a data-parallel rank in one step."""
    batch, global_batch = _row_number(row, "mbs"), _row_number(row, "gbs")
    rank_batch = global_batch / data
    if row.get("microbatches", "").strip():
        number = _row_number(row, "microbatches")
        return max(1, round(rank_batch / number)), number
    of_a_rank = "torchtitan" in row["framework"] or _LOCAL_BATCH.search(row["note"])
    if of_a_rank and pipeline > 1:
        notes.append(
            "mbs is the batch of a rank: micro-batches of one sequence assumed; a column"
            " microbatches gives their number"
        )
        batch = 1
    if round(rank_batch / batch) < 1:
        raise MissingFact(f"gbs = {global_batch} is less than dp x mbs = {data * batch}")
    return batch, round(rank_batch / batch)


_LOCAL_BATCH = re.compile(r"\bmbs\b[^;]*\b(local batch|batch of a rank)", re.IGNORECASE)


def _balanced_with_embeddings(model: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Blocks of each stage if both embeddings count as a block (bigscience, "Rebalancing layers").

    The embedding of 250,000 ids is as large as a block: --pp-partition-method
    "type:transformer|embedding" in chronicles-prequel.md.
    """
    each, rest = divmod(model.n_layers + 2, layout.pipeline)
    if rest:
        return ()
    return (each - 1, *[each] * (layout.pipeline - 2), each - 1)


def _divided_by_cost(model: ModelShape, ranks: int) -> tuple[int, ...]:
    """Blocks of each rank, where a rank takes blocks until it has more than its part of the cost.

    The costs are the weights of matmuls, of a block and of the output layer. So the first ranks
    have a block more than the mean, and the last one may have the output layer alone.
    """
    block = float(block_matmul_weights(model, 0))
    total = model.n_layers * block + model.vocab_size * model.dim
    blocks, rank = [0] * ranks, 0
    for number in range(1, model.n_layers + 1):
        blocks[rank] += 1
        if number * block > total * (rank + 1) / ranks:
            rank += 1
    return tuple(blocks)


def _row_sharding(row: Row, facts: FrameworkFacts, ranks: int) -> tuple[Any, bool]:
    """What is sharded over the data and context ranks, and whether it is gathered again."""
    cell = row["fsdp"].strip()
    if cell == "SHARD_GRAD_OP":
        return "gradients", False
    if "(" in cell:
        raise MissingFact(f'fsdp = "{cell}" is ambiguous')
    if cell.startswith("ZeRO-"):
        if cell not in ZERO_STAGES:
            raise MissingFact(f'fsdp = "{cell}" is not known')
        return ZERO_STAGES[cell], True
    if row["framework"].startswith("Megatron-Bridge"):
        return ("parameters" if cell not in ("", "0") else "optimizer"), True
    return (facts.sharded if ranks > 1 else "nothing"), True


def _row_cluster(row: Row, layout: Layout) -> Cluster:
    hardware = row["hardware"].lower()
    for pattern, machine in MACHINES:
        if re.search(pattern, hardware):
            return find_cluster(machine, layout.gpus)
    raise MissingFact(f'hardware "{row["hardware"]}" is not known')


def _row_recompute(row: Row, notes: list[str]) -> Recompute:
    cell = row["recompute"].strip().lower()
    if not cell:
        if "full recompute" in row["framework"]:
            return "full"
        notes.append("recomputation is not published: none assumed")
        return "none"
    of_torchtitan = row["framework"].startswith("torchtitan")  # whose default option is "op"
    if "per-op" in cell or (cell == "selective" and of_torchtitan):
        return "per_operation"
    if cell.startswith("selective"):
        return "attention"
    if cell in ("none", "full"):
        return cell  # type: ignore[return-value]
    raise MissingFact(f'recompute = "{row["recompute"]}" is not known')


def precision_of(row: Row) -> MatmulPrecision:
    """The precision of a row's matmuls."""
    text = row["precision"].lower()
    if "nvfp4" in text:
        return "float4"
    if "fp8" in text:
        return "float8"
    if "bf16" in text or "fp16" in text:
        return "bfloat16"
    raise MissingFact(f'precision "{row["precision"]}" is not known')


def _row_numerics(row: Row, facts: FrameworkFacts) -> Numerics:
    precision, text = precision_of(row), row["precision"].lower()
    torchtitan_float8 = precision == "float8" and row["framework"].startswith("torchtitan")
    gradients = facts.gradient_bytes
    if "bigscience" in row["source"]:
        # fp16 gradients at first. "Rebalancing layers" begins the runs with a new BF16 optimizer,
        # which sums gradients in fp32 beside those in bf16 (chronicles-prequel.md)
        gradients = 6 if "Rebalancing layers" in row["note"] else 2
    return Numerics(
        matmuls=precision,
        gradient_bytes=gradients,
        reduce_bytes=facts.reduce_bytes,
        float8_gather=torchtitan_float8 and "rowwise" not in text,
        quantize_bytes=ROWWISE_BYTES if "rowwise" in text else 0.0,
        block_scales=precision == "float4" or "mx" in text.split("(")[0],
        weights_quantized_once=facts.weights_quantized_once,
    )


_SIMUMAX = re.compile(r"(?:^|_)(tp|pp|cp|ep|l|seq|mbc)(\d+)")


def _with_simumax_cells(row: Row) -> Row:
    """The cells that a row of SimuMax has only in the name of its case.

    Its strategies have seq_len 4096 and micro_batch_size 1 (configs/strategy), and its guide says
    that ZeRO-1 and sequence parallelism are on.
    """
    if "SimuMax" not in row["source"]:
        return row
    found = dict(_SIMUMAX.findall(row["note"].partition(" ")[0]))
    if missing := {"l", "mbc"} - set(found):
        raise MissingFact(f"the case in the note lacks {' and '.join(sorted(missing))}")
    cells = {cell: found.get(cell, "1") for cell in ("tp", "pp", "cp", "ep")}
    cells |= {"seq": found.get("seq", "4096"), "layers": found["l"]}
    cells |= {"mbs": "1", "vp": "1", "sp": "yes"}
    ranks = math.prod(_row_number(cells, key) for key in ("tp", "pp", "cp"))
    cells["gbs"] = str(_row_number(row, "gpus") // ranks * _row_number(found, "mbc"))
    return {**row, **cells}
