"""[metrics], and its validation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.errors import ConfigError
from titanlite.settings import NotNegative, Positive


@dataclass(frozen=True)
class MetricsConfig:
    """[metrics] How often metrics are recorded, and where they are written."""

    log_freq: Positive = 10  # steps between two step records
    enable_tensorboard: bool = False  # also write TensorBoard event files
    disable_color_printing: bool = False  # print without colors
    save_tb_folder: str = "tb"  # TensorBoard's folder, under job.dump_folder
    enable_wandb: bool = False  # also send the records to Weights & Biases
    layer_norms_freq: NotNegative = 0
    # steps between two records of each layer's gradient, weight and update norm; 0: none
    noise_scale_freq: NotNegative = 0
    # steps between two measurements of the gradient noise scale, which cost a forward and backward
    # each; 0: none
    source_loss_freq: NotNegative = 100
    # steps between two records of each source's loss, tokens and epochs; 0: none; with one source
    # there are none


def check_metrics_config(config: MetricsConfig) -> Iterator[ConfigError]:
    """Reject optional packages that are enabled but not installed."""
    for package, is_enabled, command in (
        ("tensorboard", config.enable_tensorboard, "pip install tensorboard"),
        ("wandb", config.enable_wandb, "pip install 'titanlite[wandb]'"),
    ):
        if is_enabled and not _is_installed(package):
            key = f"metrics.enable_{package}"
            problem = f"{key} = true, but {package} is not installed."
            yield ConfigError(problem, fix=command, keys=(key,))


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a mere folder has no origin
