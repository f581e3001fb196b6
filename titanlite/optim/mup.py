"""Learning rates under muP: how the update of each optimizer has to scale with the width.

An update should change the outputs of each matrix as much in a wide model as in a narrow one. With
the update's size for learning rate 1, the spectral condition (https://arxiv.org/abs/2310.17813)
gives the learning rate: an update's spectral norm must be proportional to sqrt(fan-out / fan-in).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from titanlite.errors import ConfigError
from titanlite.models.mup import WidthScale

MupRule = Callable[[WidthScale], float]  # factor of the learning rate of a parameter


def elementwise_update(scale: WidthScale) -> float:
    """Elements of about 1, whatever the gradient's size: spectral norm sqrt(fan-in * fan-out)."""
    return scale.multiplier / scale.fan_in


def gradient_update(scale: WidthScale) -> float:
    """SGD's: the gradient, which already contains the multiplier of the parameter once."""
    return scale.multiplier**2 * scale.fan_out / scale.fan_in


def orthogonal_update(scale: WidthScale) -> float:
    """Muon's: singular values of about the root of the larger side, so that its RMS is Adam's.

    Muon updates every direction, Adam only a few. So the learning rate falls less with the width.
    """
    return scale.multiplier * (scale.fan_out / scale.fan_in / scale.larger_fan) ** 0.5


def check_mup_optimizers(
    rules: Sequence[tuple[str, MupRule | None]], adam_decay: float, max_norm: float
) -> Iterator[ConfigError]:
    """Reject optimizers and options that muP has no rule for.

    `rules`: (name, rule) of [optimizer] and its groups; `adam_decay`: Adam's largest weight decay.
    """
    names = dict.fromkeys(name for name, _ in rules)
    for name in names:
        if (name, None) in rules:
            yield ConfigError(
                f"mup.base: muP has no rule for the learning rate of optimizer.name = {name} with"
                " these settings.",
                fix="Use AdamW, or remove mup.base; Muon needs muon_per_head = false, and Adafactor"
                " scale_parameter = false.",
            )
    if adam_decay:
        yield ConfigError(
            f"mup.base: Adam adds optimizer.weight_decay = {adam_decay:g} times the weights to"
            " the gradient, and their ratio changes with the width.",
            fix="Use AdamW, or set optimizer.weight_decay = 0.",
        )
    if "SGD" in names and max_norm:
        yield ConfigError(
            f"mup.base: training.max_norm = {max_norm:g} scales down the updates of SGD, and the"
            " norm of the whole gradient grows with the width.",
            fix="Set training.max_norm = 0, or use AdamW.",
        )
