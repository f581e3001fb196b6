"""What the weights of labels do not support."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.errors import ConfigError
from titanlite.job import JobConfig
from titanlite.models.sizes import ModelSizes, prediction_layers


def find_weighed_problems(config: JobConfig, documents: str) -> Iterator[ConfigError]:
    """Reject settings whose mathematics is that of the mean cross-entropy of text.

    `documents`: what is packed into one sequence, for messages.
    """
    if config.attention.mask != "document":
        yield ConfigError(
            f'attention.mask = "{config.attention.mask}": {documents} are documents of one'
            " sequence, which must not attend to each other.",
            fix='Set attention.mask = "document".',
        )
    if config.loss.z_loss:
        yield ConfigError(
            f"loss.z_loss = {config.loss.z_loss:g}: is defined for the cross-entropy of text only.",
            fix="Remove it.",
        )
    if config.optimizer.name == "Sophia":
        yield ConfigError(
            'optimizer.name = "Sophia": estimates the Hessian of the cross-entropy of text.',
            fix="Use another optimizer, such as AdamW.",
        )
    if config.metrics.noise_scale_freq:
        yield ConfigError(
            f"metrics.noise_scale_freq = {config.metrics.noise_scale_freq}: measures the"
            " cross-entropy of text.",
            fix="Remove it.",
        )
    for source in config.data.validation if config.validation.enable else ():
        if source.format in ("pairs", "prompts"):
            yield ConfigError(
                f'data.validation {source.name}: has format "{source.format}", of which the loss of'
                " text says nothing.",
                fix="Validate on text or conversations; `titanlite judge` measures rewards.",
            )


def check_prediction_layers(sizes: ModelSizes) -> None:
    """Refuse multi-token prediction; raises ConfigError."""
    if layers := prediction_layers(sizes):
        raise ConfigError(
            f"model.mtp_layers = {layers}: multi-token prediction trains on text.",
            fix="Set model.mtp_layers = 0; the weights of these layers are then not loaded.",
        )
