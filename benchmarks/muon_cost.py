"""Time of Muon's update beside AdamW's, as a share of a step: python -m benchmarks.muon_cost"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.nn.functional as F

from titanlite.models import LLAMA3, Llama3Sizes
from titanlite.optim import MatrixFacts, OptimizerConfig, build_optimizer
from titanlite.optim.newton_schulz import orthogonalization_flops
from titanlite.parallelize.weight_init import init_weights

CASES = {  # name -> (sizes, sequences of a micro-batch, micro-batches, tokens of a sequence)
    "tiny": (Llama3Sizes(64, 2, 4, 2, 192, vocab_size=512), 8, 4, 128),
    "quickstart": (LLAMA3.flavors["quickstart"], 4, 8, 256),
    "dim 512": (Llama3Sizes(512, 2, 8, 4, 2048, vocab_size=512), 4, 8, 512),
}
STEPS = 3  # measured, after one that is not


def measure_steps(
    name: str, sizes: Llama3Sizes, batch: int, accumulation: int, length: int
) -> Iterator[tuple[float, float]]:
    """(seconds of forward and backward, seconds of the update) of each step."""
    model = LLAMA3.build(sizes)
    init_weights(model, LLAMA3, sizes, seed=0)
    optimizer = build_optimizer(model, OptimizerConfig(name=name), MatrixFacts(LLAMA3, sizes))
    optimizer.set_lr(1e-3)
    ids = torch.randint(sizes.vocab_size, (batch, length + 1))
    for step in range(STEPS + 1):
        began = time.perf_counter()
        for _ in range(accumulation):
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        computed = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        optimizer.zero_grad()
        if step:
            yield computed - began, ended - computed


def main() -> None:
    """Print a Markdown table."""
    print(f"{torch.get_num_threads()} CPU threads, float32, median of {STEPS} steps\n")
    print("| model | tokens a step | AdamW | Muon | more time | more FLOPs |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for case, (sizes, batch, accumulation, length) in CASES.items():
        timed = {}
        for name in ("AdamW", "Muon"):
            steps = list(measure_steps(name, sizes, batch, accumulation, length))
            timed[name] = [median(part) for part in zip(*steps, strict=True)]
        model_seconds = min(model for model, _ in timed.values())
        adamw, muon = (timed[name][1] for name in ("AdamW", "Muon"))
        tokens = batch * accumulation * length
        with torch.device("meta"):
            blocks = LLAMA3.build(sizes).layers.parameters()
        flops = sum(orthogonalization_flops(*p.shape) for p in blocks if p.dim() == 2)
        model_flops = LLAMA3.flops_per_token(sizes, length) * tokens
        print(
            f"| {case} | {tokens:,} | {model_seconds + adamw:.3f} s | {model_seconds + muon:.3f} s"
            f" | {(muon - adamw) / (model_seconds + adamw):.1%} | {flops / model_flops:.1%} |"
        )


if __name__ == "__main__":
    main()
