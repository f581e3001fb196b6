"""The oracle in low precision: the error of each gradient against fp32, on trained weights.

Rounding is not a bug, so the reference is the error of one process in the same precision. Weights
are trained, because at initial weights the gradients of queries and keys are almost zero, and their
errors mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed.oracle import (
    DOCUMENT_END,
    SEED,
    SGD,
    Layout,
    Recipe,
    family_of,
    hooks_of,
    merge_parts,
    own_batch,
    reference_outputs,
    shard_and_offset,
    start_run,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.checkpoint import model_and_optimizer_state
from titanlite.distributed.collectives import all_reduce_sum
from titanlite.labels import IGNORE_INDEX
from titanlite.models import Llama3Sizes, ModelSizes, valid_tokens
from titanlite.optim import LossScale, OptimizerInBackward
from titanlite.parallelize.float8 import Float8Config
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.step import StepSettings, take_step

# At least 32 values in every vector: the error of fewer varies too much by chance.
SIZES = Llama3Sizes(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    hidden_dim=88,
    vocab_size=509,
    rope_theta=1e4,
    qk_norm=True,
)
RECIPE = replace(SGD, sizes=SIZES, batch=12)
LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)
FIRST_TRAINING_BATCH = 100  # batches before it are for measuring
TRAINING_STEPS, TRAINING_SEQUENCES = 150, 4
PERIOD = 16  # tokens after which a sequence repeats, which only attention can predict
MAX_ERROR_RATIO = 1.5  # of a layout's error to that of one process

Weights = dict[str, numpy.ndarray]


@dataclass(frozen=True)
class PrecisionCase:
    """One layout in one precision."""

    layout: Layout
    recipe: Recipe = RECIPE
    compute: torch.dtype = torch.bfloat16
    float8: str = ""  # recipe
    batches: int = 3  # whose median error is compared

    @property
    def on_one_process(self) -> PrecisionCase:
        """The same precision on one process, with no options."""
        return replace(self, layout=Layout())

    @property
    def float8_config(self) -> Float8Config:
        if not self.float8:
            return Float8Config()
        gathered = self.float8 == "tensorwise" and self.layout.shard > 1
        options = {"emulate": True, "enable_fsdp_float8_all_gather": gathered}
        return Float8Config(recipe_name=self.float8, **options)

    def __str__(self) -> str:
        recipe = "".join(
            f",{name}" for name in ("documents", "z_loss") if getattr(self.recipe, name)
        )
        precision = self.float8 or str(self.compute).removeprefix("torch.")
        return f"{self.layout}{recipe} in {precision}"


@dataclass
class RankResult:
    """Losses and gradients of one rank."""

    losses: list[float]  # of each batch
    gradients: list[dict[str, tuple]]  # its shards, of each batch
    evaluation_loss: float  # of the last batch, without gradients


def read_batch(number: int, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """A global batch [B, T] of learnable tokens; sequences ignore different numbers of labels."""
    size, generator = recipe.sizes.vocab_size, torch.Generator().manual_seed(SEED)
    followers = torch.randint(
        1, size, (size, 4), generator=generator
    )  # per id; none is DOCUMENT_END
    generator.manual_seed(1000 + number)
    ids = torch.randint(1, size, (recipe.batch, recipe.seq_len + 1), generator=generator)
    choices = torch.randint(0, 4, ids.shape, generator=generator)
    for n in range(1, recipe.seq_len + 1):
        sampled = followers[ids[:, n - 1], choices[:, n]]
        ids[:, n] = sampled if n < PERIOD else ids[:, n - PERIOD]
    if recipe.documents:
        ids[torch.rand(ids.shape, generator=generator) < 1 / PERIOD] = DOCUMENT_END
    inputs, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
    for row in range(len(labels)):
        labels[row, : row * 7 % (recipe.seq_len + 1)] = IGNORE_INDEX
    return inputs, labels


@cache
def train_weights(sizes: ModelSizes) -> Weights:
    """Weights of a model trained in fp32 on one process."""
    family, recipe = family_of(sizes), replace(RECIPE, sizes=sizes, batch=TRAINING_SEQUENCES)
    model = family.build(sizes)
    init_weights(model, family, sizes, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(TRAINING_STEPS):
        inputs, labels = read_batch(FIRST_TRAINING_BATCH + step, recipe)
        loss = F.cross_entropy(
            model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().numpy() for name, weight in model.state_dict().items()}


@cache
def compute_in_fp32(recipe: Recipe, batches: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    """(losses, gradients) of each batch, by an unparallelized model."""
    model, losses, gradients = recipe.spec.build(recipe.sizes), [], []
    weights = train_weights(recipe.sizes).items()
    model.load_state_dict({n: torch.from_numpy(w) for n, w in weights})
    for number in range(batches):
        inputs, labels = read_batch(number, recipe)
        logits, further, *_ = reference_outputs(model, inputs, recipe, labels)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        losses.append(loss.item())  # the reported loss excludes the z-loss
        loss = loss + recipe.z_loss * logits.logsumexp(-1)[labels != IGNORE_INDEX].square().mean()
        (loss + further).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()  # drops the references; the stored gradients stay
    return losses, gradients


def run_cases(cases: Sequence[PrecisionCase]) -> list[list[RankResult]]:
    """Run cases with equal numbers of ranks; the results [rank][case]."""
    weights = {case.recipe.sizes: train_weights(case.recipe.sizes) for case in cases}
    return run_on_ranks(_run_cases_on_rank, cases[0].layout.degrees.ranks, cases, weights)


def _run_cases_on_rank(
    cases: Sequence[PrecisionCase], weights: dict[ModelSizes, Weights]
) -> list[RankResult]:
    return [_run_case(case, weights[case.recipe.sizes]) for case in cases]


def _run_case(case: PrecisionCase, weights: Weights) -> RankResult:
    scale = LossScale(4096.0, growth_steps=100) if case.compute == torch.float16 else None
    options = {"dtype": case.compute, "float8": case.float8_config}
    recipe = replace(case.recipe, lr=0.0)
    state, engine, mesh = start_run(case.layout, recipe, scale, **options)
    load_trained(state.model, weights)
    in_backward = OptimizerInBackward(state.model, state.optimizer) if case.layout.early else None
    result = RankResult([], [], 0.0)
    with _recorded_gradients(state) as gradients:
        for number in range(case.batches):
            batch = own_batch(engine, mesh, 0, *read_batch(number, case.recipe))
            settings = StepSettings(mesh, 0.0, in_backward, hooks=hooks_of(state, engine))
            step = take_step(state, engine, batch, settings=settings)
            result.losses.append(step.loss.item())
            result.gradients.append(dict(gradients))
            gradients.clear()
    count = all_reduce_sum(mesh.batch, valid_tokens(batch.labels))
    evaluation_loss = engine.evaluate(batch.inputs, batch.labels)
    evaluation_loss = all_reduce_sum(mesh.loss, evaluation_loss) / count
    result.evaluation_loss = evaluation_loss.item()
    return result


@torch.no_grad()
def load_trained(model, weights: Weights) -> None:
    for name, tensor in model_and_optimizer_state(model)["model"].items():
        shape, offset, _ = shard_and_offset(tensor)
        assert shape == weights[name].shape
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        index = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
        local.copy_(torch.from_numpy(weights[name][index]))


@contextmanager
def _recorded_gradients(state):
    """A dict to which every optimizer step adds this rank's shards of the gradients."""
    recorded: dict[str, tuple] = {}
    named = list(state.model.named_parameters())

    def record(*_) -> None:
        gradients = {name: shard_and_offset(p.grad) for name, p in named if p.grad is not None}
        assert all(local.dtype == torch.float32 for *_, local in gradients.values())
        recorded.update(gradients)

    # after the step, because a fused kernel divides the gradients by the loss scale
    hooks = [optimizer.register_step_post_hook(record) for optimizer in state.optimizer]
    yield recorded
    for hook in hooks:
        hook.remove()


def gradient_errors(case: PrecisionCase, ranks: Sequence[RankResult]) -> list[dict[str, float]]:
    """Relative error in the 2-norm of each tensor's gradient against fp32, for each batch."""
    _, expected = compute_in_fp32(case.recipe, case.batches)
    return [
        {name: ((actual[name] - e).norm() / e.norm()).item() for name, e in exact.items()}
        for actual, exact in zip(joined_gradients(ranks), expected, strict=True)
    ]


def joined_gradients(ranks: Sequence[RankResult]) -> list[dict[str, Tensor]]:
    """Full gradients of each batch, from the shards of all ranks; replicas must be equal."""
    return [merge_parts(parts) for parts in zip(*(rank.gradients for rank in ranks), strict=True)]


_errors_of_one_process: dict[PrecisionCase, list[dict[str, float]]] = {}


def measure_one_process(cases: Sequence[PrecisionCase]) -> None:
    """Add the errors of what has not run yet to `_errors_of_one_process`."""
    known = _errors_of_one_process
    new = list(dict.fromkeys(c.on_one_process for c in cases if c.on_one_process not in known))
    for case, result in zip(new, run_cases(new)[0] if new else [], strict=True):
        known[case] = gradient_errors(case, [result])


def check_cases(cases: Sequence[PrecisionCase], limit: float = MAX_ERROR_RATIO) -> None:
    """Run cases with equal numbers of ranks, and check gradients and losses.

    A gradient's error may be `limit` times that of one process; losses are compared with fp32.
    """
    measure_one_process(cases)
    for case, *ranks in zip(cases, *run_cases(cases), strict=True):
        ratios = error_ratios(
            gradient_errors(case, ranks), _errors_of_one_process[case.on_one_process]
        )
        worst = max(ratios, key=ratios.get)
        print(f"{case}: {worst} {ratios[worst]:.2f} times the error of one process")  # pytest -rP
        too_large = {name: round(ratio, 2) for name, ratio in ratios.items() if not ratio <= limit}
        assert not too_large, (str(case), too_large)
        _check_losses(case, ranks)


def error_ratios(
    actual: list[dict[str, float]], expected: list[dict[str, float]]
) -> dict[str, float]:
    """Ratio of each tensor's error to that of one process, median over batches.

    Not the mean: a deep model amplifies rounding errors, in about one batch of twelve to 40 times
    the usual error, and by chance one side has more such batches.
    """
    # A tensor whose error on one process happens to be small is not a reference.
    floors = [median(errors.values()) / 2 for errors in expected]
    return {
        name: median(
            a[name] / max(e[name], floor)
            for a, e, floor in zip(actual, expected, floors, strict=True)
        )
        for name in expected[0]
    }


def _check_losses(case: PrecisionCase, ranks: list[RankResult]) -> None:
    first, (expected, _) = ranks[0], compute_in_fp32(case.recipe, case.batches)
    for rank in ranks:
        assert rank.losses == first.losses and rank.evaluation_loss == first.evaluation_loss
    errors = [abs(a / b - 1) for a, b in zip(first.losses, expected, strict=True)]
    errors.append(abs(first.evaluation_loss / expected[-1] - 1))
    limit = 3e-4 if case.compute == torch.float16 else 2e-3
    limit = 5e-2 if case.float8 else limit
    print(f"    relative error of the losses: {max(errors):.1e}")
    assert max(errors) <= limit, (str(case), errors)
