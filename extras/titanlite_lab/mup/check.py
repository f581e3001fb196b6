"""Coordinate check of muP: do activations change equally in narrow and in wide models?

Models of several widths train on one small batch. After each step, the check measures how far the
outputs of each module have moved from their initial values. With muP the mean absolute change does
not depend on the width (Tensor Programs V, https://arxiv.org/abs/2203.03466, appendix D).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.job import Job
from titanlite.job.option_checks import check_mup
from titanlite.models import ModelSizes, ModelSpec
from titanlite.models.mup import BaseWidths, MupConfig, base_sizes, width_scales
from titanlite.optim import MatrixFacts, build_optimizer
from titanlite.parallelize.weight_init import init_weights
from titanlite.settings import raise_together

SEQUENCES, TOKENS = 8, 32  # of the batch
MIN_SLOPE, MAX_SLOPE = -0.75, 0.25
# powers of the width; the part of a change that comes from the random initial weights averages out
# as the root of the width, -0.5, and a missing rule is off by 0.5 or 1


@dataclass(frozen=True)
class CoordinateCheck:
    """Which models are trained, and how."""

    job: Job
    factors: Sequence[int]  # multiples of the widths of the base model
    steps: int = 10
    seeds: int = 3
    wider_heads: bool = False  # scale the head width, not the number of heads


@dataclass(frozen=True)
class WidthCurves:
    """Mean absolute change of each module's output, for each model's width and after each step."""

    widths: list[int]  # dim of each model
    change: dict[str, Tensor]  # module -> [width, step]

    def slope(self, module: str) -> float:
        """Power of the width that the change after the last step is proportional to."""
        change = self.change[module][:, -1].double()
        if not torch.isfinite(change).all():
            return math.inf
        x = torch.tensor(self.widths).double().log()
        y = change.clamp(min=1e-30).log()
        return (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()

    def last_change(self) -> dict[str, list[float]]:
        """The change after the last step of each module, at each width."""
        return {module: change[:, -1].tolist() for module, change in self.change.items()}

    @property
    def steep(self) -> list[str]:
        """The modules whose change grows or vanishes with the width."""
        return [m for m in self.change if not MIN_SLOPE <= self.slope(m) <= MAX_SLOPE]


def measure_widths(check: CoordinateCheck, mup: bool) -> WidthCurves:
    """Train every width, with muP or without; returns the mean over the seeds.

    Raises ConfigError for an optimizer that muP has no rule for.
    """
    base, first_seed = base_of(check.job), check.job.config.debug.seed
    config = dataclasses.replace(check.job.config, mup=MupConfig(base))
    raise_together([*check_mup(config, check.job.spec, check.job.sizes)])
    sizes = [scaled_sizes(check, base, factor) for factor in check.factors]
    change: dict[str, list[Tensor]] = {}
    for one in sizes:
        seeds = range(first_seed, first_seed + check.seeds)
        runs = [_train(check, base if mup else None, one, seed) for seed in seeds]
        for module in runs[0]:
            mean = torch.stack([run[module] for run in runs]).mean(0)
            change.setdefault(module, []).append(mean)
    stacked = {module: torch.stack(of_widths) for module, of_widths in change.items()}
    return WidthCurves([one.dim for one in sizes], stacked)


def base_of(job: Job) -> BaseWidths:
    """The base model of a job: mup.base, or without muP the model itself."""
    if job.config.mup.base is not None:
        return job.config.mup.base
    known = {field.name for field in dataclasses.fields(job.sizes)}
    names = [field.name for field in dataclasses.fields(BaseWidths) if field.name in known]
    widths: dict[str, Any] = {name: getattr(job.sizes, name) or None for name in names}
    return BaseWidths(**widths)


def scaled_sizes(check: CoordinateCheck, base: BaseWidths, factor: int) -> ModelSizes:
    """The sizes of the model that is `factor` times as wide as the base model."""
    head_width = base.head_dim or base.dim // base.n_heads
    heads, wider = (1, factor) if check.wider_heads else (factor, 1)
    widths = BaseWidths(
        dim=base.dim * factor,
        n_heads=base.n_heads * heads,
        hidden_dim=base.hidden_dim and base.hidden_dim * factor,
        n_kv_heads=base.n_kv_heads and base.n_kv_heads * heads,
        head_dim=head_width * wider if base.head_dim else None,
        expert_hidden_dim=base.expert_hidden_dim and base.expert_hidden_dim * factor,
    )
    return base_sizes(widths, check.job.sizes)


def _train(
    check: CoordinateCheck, base: BaseWidths | None, sizes: ModelSizes, seed: int
) -> dict[str, Tensor]:
    """Train one model; returns the mean absolute change [step] of each module's output."""
    job = check.job
    widths = width_scales(MupConfig(base), job.spec, sizes)
    model = job.spec.build(sizes)
    init_weights(model, job.spec, sizes, seed, widths)
    facts = MatrixFacts(job.spec, sizes)
    optimizer = build_optimizer(model, job.config.optimizer, facts, widths=widths)
    optimizer.set_lr(job.config.optimizer.lr)
    tokens, labels = small_batch(sizes.vocab_size, seed)
    before = _outputs(model, job.spec, tokens)
    changes: dict[str, list[Tensor]] = {module: [] for module in before}
    for _ in range(check.steps):
        (model(tokens, labels=labels) / labels.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for module, output in _outputs(model, job.spec, tokens).items():
            changes[module].append((output - before[module]).abs().mean())
    return {module: torch.stack(change) for module, change in changes.items()}


def small_batch(vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, T]: each token is followed by one of two others."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.empty(SEQUENCES, TOKENS + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(vocab_size, (SEQUENCES,), generator=generator)
    for position in range(TOKENS):
        branch = torch.randint(2, (SEQUENCES,), generator=generator)
        tokens[:, position + 1] = (tokens[:, position] * 5 + 1 + branch) % vocab_size
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def _outputs(model: nn.Module, spec: ModelSpec[Any], tokens: Tensor) -> dict[str, Tensor]:
    """The outputs of all measured modules, and the attention logits of each block."""
    outputs: dict[str, Tensor] = {}

    def record_output(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[name] = output

    def record_logits(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[name] = _attention_logits(*inputs[:2])

    handles = [
        module.register_forward_hook(partial(record_output, name))
        for name, module in _measured_modules(model, spec)
    ]
    handles += [
        module.register_forward_hook(partial(record_logits, f"{name.rpartition('.')[0]} logits"))
        for name, module in model.named_modules()
        if fnmatchcase(name, spec.attention_pattern)
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    return outputs


def _measured_modules(model: nn.Module, spec: ModelSpec[Any]) -> Iterator[tuple[str, nn.Module]]:
    """Modules outside the blocks, the blocks, and their direct children; no norms."""
    parts = {name: module for name, module in model.named_children() if name != spec.blocks_path}
    for index, block in model.get_submodule(spec.blocks_path).named_children():
        name = f"{spec.blocks_path}.{index}"
        parts[name] = block
        parts |= {f"{name}.{child}": module for child, module in block.named_children()}
    for name, module in parts.items():
        if any(parameter.dim() > 1 for parameter in module.parameters()):
            yield name, module


def _attention_logits(q: Tensor, k: Tensor) -> Tensor:
    """The input of the softmax, from queries [B, H, T, K] and keys [B, G, T, K]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q @ k.mT / math.sqrt(q.shape[-1])
