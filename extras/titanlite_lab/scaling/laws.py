"""Scaling laws: the loss of a model by its parameters N and training tokens D, and its optima."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlite.errors import ConfigError

FLOPS_PER_PARAMETER = 6.0  # of a training token: forward 2, backward 4 (arXiv:2001.08361, 2.1)
INFERENCE_FLOPS_PER_PARAMETER = 2.0  # of an inference token (arXiv:2401.00448, section 2)
PARAMETER_COUNTS = {
    # what N counts; exponents of laws differ between them
    "all": "all parameters, as Hoffmann et al. count",
    "matmul": "the blocks and the output layer, without the input embedding",
    "blocks": "the blocks alone, as Kaplan et al. count",
}

LAW_FIELDS = ("E", "A", "B", "alpha", "beta", "power")


@dataclass(frozen=True)
class ScalingLaw:
    """loss = (E + A / N^alpha + B / D^beta)^power.

    With `power` 1 it is the law of Hoffmann et al. (arXiv:2203.15556, equation 2); with E = 0 and
    beta = 1 that of Kaplan et al. (arXiv:2001.08361, equation 1.5). A power is monotone, so it does
    not change the optima.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    power: float = 1.0
    count: str = "all"  # what N counts: a key of PARAMETER_COUNTS, or a column of a table
    source: str = ""

    def with_values(self, values: Iterable[float]) -> ScalingLaw:
        """The same law with other values of LAW_FIELDS."""
        E, A, B, alpha, beta, power = values
        return ScalingLaw(E, A, B, alpha, beta, power, self.count, self.source)

    @property
    def irreducible(self) -> float:
        """The loss of infinitely many parameters and tokens."""
        return self.E**self.power

    @property
    def exponents(self) -> tuple[float, float]:
        """(a, b): the optimal N grows as FLOPs^a, the optimal D as FLOPs^b."""
        total = self.alpha + self.beta
        return self.beta / total, self.alpha / total

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """Loss of models trained on `tokens`; both may be arrays."""
        reducible = self.A * parameters**-self.alpha + self.B * tokens**-self.beta
        return (self.E + reducible) ** self.power

    def optimum(self, flops: Any) -> tuple[Any, Any]:
        """(N, D) of the lowest loss with 6 N D = `flops` (arXiv:2203.15556, equation 4)."""
        work = flops / FLOPS_PER_PARAMETER
        balance = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = balance * work ** self.exponents[0]
        return parameters, work / parameters

    def tokens_for(self, loss: float, parameters: float) -> float:
        """Tokens with which a model of this size reaches a loss; inf if it never does."""
        left = loss ** (1 / self.power) - self.E - self.A * parameters**-self.alpha
        return (self.B / left) ** (1 / self.beta) if left > 0 else math.inf


def kaplan_law(
    n_c: float, alpha_n: float, d_c: float, alpha_d: float, count: str = "blocks", source: str = ""
) -> ScalingLaw:
    """Equation 1.5 of Kaplan et al.: loss = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D."""
    ratio = alpha_n / alpha_d
    return ScalingLaw(0.0, n_c**ratio, d_c, ratio, 1.0, alpha_d, count, source)


LAWS: dict[str, ScalingLaw] = {
    "hoffmann": ScalingLaw(
        1.69, 406.4, 410.7, 0.34, 0.28, source="Hoffmann et al., arXiv:2203.15556, approach 3"
    ),
    # the minimum of their objective, found here on their 240 points; within one standard error of
    # what they print
    "besiroglu": ScalingLaw(
        1.81722, 477.83, 2143.42, 0.34731, 0.36717,
        source="the 240 points of Besiroglu et al., arXiv:2404.10102",
    ),
    "kaplan": kaplan_law(
        6.4e13, 0.076, 1.8e13, 0.103, source="Kaplan et al., arXiv:2001.08361, table 2"
    ),
}  # fmt: skip


def published_law(name: str) -> ScalingLaw:
    """A published law by its name."""
    if name not in LAWS:
        raise ConfigError(
            f"--law {name}: is not a file, nor a published law.",
            fix=f"Give the file of `fit --out`, or one of {', '.join(LAWS)}.",
        )
    return LAWS[name]


@dataclass(frozen=True)
class Demand:
    """Tokens that a model will read and write in inference, and what their FLOPs cost."""

    tokens: float = 0.0
    flop_cost: float = 1.0  # of an inference FLOP, relative to a training FLOP

    def flops_of(self, parameters: float) -> float:
        """Inference, as training FLOPs of the same cost."""
        return self.flop_cost * INFERENCE_FLOPS_PER_PARAMETER * parameters * self.tokens


@dataclass(frozen=True)
class Allocation:
    """A model's size and its training tokens, with the predicted loss."""

    parameters: float
    tokens: float
    loss: float
    demand: Demand = Demand()

    @property
    def training_flops(self) -> float:
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens

    @property
    def total_flops(self) -> float:
        """Of training and inference, in training FLOPs."""
        return self.training_flops + self.demand.flops_of(self.parameters)


def allocate_budget(law: ScalingLaw, flops: float, demand: Demand | None = None) -> Allocation:
    """The lowest loss for a budget that pays training and inference (arXiv:2401.00448).

    Raises ConfigError if the demand leaves no training.
    """
    demand, parameters = demand or Demand(), law.optimum(flops)[0]

    def tokens_of(parameters: float) -> float:
        return (flops - demand.flops_of(parameters)) / (FLOPS_PER_PARAMETER * parameters)

    def loss_of(log_n: float) -> float:
        tokens = tokens_of(math.exp(log_n))
        return law.loss(math.exp(log_n), tokens) if tokens > 0 else math.inf

    if demand.tokens:
        largest = math.log(min(parameters, flops / demand.flops_of(1.0)))
        if largest <= 0:
            raise ConfigError(
                f"{flops:.3g} FLOPs do not pay for {demand.tokens:.3g} tokens of inference.",
                fix="Raise the budget.",
            )
        parameters = math.exp(_minimize(loss_of, 0.0, largest))
    tokens = tokens_of(parameters)
    return Allocation(parameters, tokens, law.loss(parameters, tokens), demand)


def allocate_for_loss(law: ScalingLaw, loss: float, demand: Demand | None = None) -> Allocation:
    """The cheapest training and inference that reaches a loss (arXiv:2401.00448, equation 3).

    Raises ConfigError for a loss that no model reaches.
    """
    demand = demand or Demand()
    if not loss > law.irreducible:
        raise ConfigError(
            f"--loss {loss:g}: no model reaches it; the law's irreducible loss is"
            f" {law.irreducible:.4g}."
        )
    reducible = loss ** (1 / law.power) - law.E
    smallest = math.log(law.A / reducible) / law.alpha  # it needs infinitely many tokens

    def cost_of(log_n: float) -> float:
        parameters = math.exp(log_n)
        tokens = law.tokens_for(loss, parameters)
        return math.log(FLOPS_PER_PARAMETER * parameters * tokens + demand.flops_of(parameters))

    # without inference, the optimum pays A / N^alpha : B / D^beta = beta : alpha
    share = law.beta / (law.alpha + law.beta)
    largest = math.log(law.A / (share * reducible)) / law.alpha
    log_n = _minimize(cost_of, smallest, largest) if demand.tokens else largest
    parameters = math.exp(log_n)
    return Allocation(parameters, law.tokens_for(loss, parameters), loss, demand)


def overtrained(law: ScalingLaw, optimum: Allocation, factor: float) -> Allocation | None:
    """A model of `factor` times the size of an optimum that reaches its loss; None if none does."""
    parameters = optimum.parameters * factor
    tokens = law.tokens_for(optimum.loss, parameters)
    if not math.isfinite(tokens):
        return None
    return Allocation(parameters, tokens, optimum.loss, optimum.demand)


def _minimize(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimum of a function that falls, then rises, by golden-section search."""
    golden = (math.sqrt(5) - 1) / 2
    inner = [high - golden * (high - low), low + golden * (high - low)]
    values = [function(x) for x in inner]
    for _ in range(80):  # 0.618^80: below the resolution of a float
        if values[0] <= values[1]:
            high, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = high - golden * (high - low)
            values[0] = function(inner[0])
        else:
            low, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = low + golden * (high - low)
            values[1] = function(inner[1])
    return float(np.mean((low, high)))
