"""What a person asks the planner: a model or a job, a cluster, a batch, and what is fixed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from titanlite.errors import ConfigError, UserError, UserErrors
from titanlite.files import parse_toml
from titanlite.job import MOVED, JobConfig
from titanlite.job.read import resolve_compute_dtype
from titanlite.job.torchtitan_keys import complete_table
from titanlite.models import FAMILIES
from titanlite.optim import check_optimizer_config
from titanlite.parallelize.schedule import SCHEDULES
from titanlite.runtime.out_of_memory import GIB
from titanlite.settings import load_config, raise_together
from titanlite.settings.sources import TRAIN_CONFIGS
from titanlite_planner.hardware import Cluster, parse_gpus
from titanlite_planner.model_shape import shape_of
from titanlite_planner.plan.layout_space import (
    DEGREES,
    MATMUL_CHOICES,
    RECOMPUTES,
    LayoutSpace,
)
from titanlite_planner.plan.planned_job import SEARCHED
from titanlite_planner.plan.search import SearchTarget
from titanlite_planner.time.efficiency import Efficiency

PRECISION_OPTIONS = {"bf16": MATMUL_CHOICES[:1], "float8": MATMUL_CHOICES[1:]}
PRECISION_OPTIONS["any"] = MATMUL_CHOICES
TOKENS_PER_PARAMETER = 20  # arXiv 2203.15556, table 3: about 20 are optimal
FIXABLE: dict[str, Any] = {  # name -> its values, or int for a positive number
    **dict.fromkeys(DEGREES, int),
    "micro_batch": int,
    "schedule": tuple(SCHEDULES),
    "stages_per_rank": int,
    "recompute": tuple(RECOMPUTES),
    "offload_activations": ("no", "yes"),
    "offload_optimizer": ("no", "yes"),
    "reshard": ("no", "yes"),
}
OPTIONS = {  # settings, and the arguments that set them as well
    "training.seq_len": "seq_len",
    "training.global_batch_size": "global_batch",
}
T = TypeVar("T")


@dataclass(frozen=True)
class PlanArguments:
    """The options of titanlite plan as text; None: not given."""

    gpus: str | None = None
    model: str | None = None
    job: str | None = None
    seq_len: str | None = None
    global_batch: str | None = None
    tokens: str | None = None
    precision: str = "bf16"
    reserve: str = "10"
    fix: Sequence[str] = ()
    trusted: bool = False
    hardware: str | None = None
    efficiency: str | None = None
    overrides: Sequence[str] = ()  # --section.key value


@dataclass(frozen=True)
class PlanRequest:
    """A checked request."""

    base: JobConfig  # all settings but those that the search chooses
    cluster: Cluster
    space: LayoutSpace
    tokens: float  # of the whole training
    reserve: float  # fraction of a GPU's memory that stays free
    efficiency: Efficiency | None = None  # None: that of the GPU type
    default_tokens: bool = False  # they follow from the parameters

    @property
    def usable_bytes(self) -> float:
        return self.cluster.gpu.memory_gib * GIB * (1 - self.reserve)

    @property
    def target(self) -> SearchTarget:
        return SearchTarget(self.base, self.cluster, self.usable_bytes, self.efficiency)

    @property
    def tokens_per_step(self) -> int:
        return self.space.global_batch * self.space.seq_len


def read_plan_request(arguments: PlanArguments) -> PlanRequest:
    """Check the arguments; raises all problems together."""
    reader = _ArgumentReader(arguments)
    request = reader.read()
    raise_together(reader.problems)
    assert request is not None, "no problems"
    return request


class _ArgumentReader:
    """Reads the arguments one by one, and collects the problems."""

    def __init__(self, arguments: PlanArguments):
        self.arguments = arguments
        self.problems: list[UserError] = []

    def read(self) -> PlanRequest | None:
        arguments = self.arguments
        cluster = self._cluster()
        seq_len = self._number("--seq-len", arguments.seq_len)
        global_batch = self._number("--global-batch", arguments.global_batch)
        tokens = self._float("--tokens", arguments.tokens, 0.0)
        reserve = self._float("--reserve", arguments.reserve, 0.0, below=100.0) / 100
        precisions = self._choice("--precision", arguments.precision, PRECISION_OPTIONS)
        fixed, efficiency = self._fixed_choices(), self._efficiency()
        base = self._base(seq_len)
        if base is None or cluster is None:
            return None
        batch = global_batch or base.training.global_batch_size
        if arguments.global_batch is None and (not arguments.job or batch == -1):
            self._refuse("--global-batch: is missing.", "Give the sequences of one step.")
        if self.problems:
            return None
        spec = FAMILIES[base.model.name]
        space = LayoutSpace(
            spec,
            spec.sizes_of(base.model),
            cluster.gpus,
            base.training.seq_len,
            batch,
            has_optimizer_offload=_can_offload(base),
            precisions=precisions,
            fixed=fixed,
            trusted=arguments.trusted,
            compiled=base.compile.compiles("model"),
        )
        default = arguments.tokens is None
        if default:
            tokens = float(TOKENS_PER_PARAMETER * spec.count_parameters(space.sizes))
        own_steps = default and arguments.job is not None
        base = _with_length(base, batch, None if own_steps else tokens)
        return PlanRequest(base, cluster, space, tokens, reserve, efficiency, default)

    def _refuse(self, message: str, fix: str = "") -> None:
        self.problems.append(ConfigError(message, fix=fix))

    def _cluster(self) -> Cluster | None:
        if self.arguments.gpus is None:
            self._refuse("--gpus: is missing.", 'Give a number and a GPU, such as "512xH100".')
            return None
        hardware = Path(self.arguments.hardware) if self.arguments.hardware else None
        try:
            return parse_gpus(self.arguments.gpus, hardware)
        except UserError as error:
            self.problems.append(error)
            return None

    def _efficiency(self) -> Efficiency | None:
        """The set in a file that --calibrate wrote."""
        file = self.arguments.efficiency
        if file is None:
            return None
        try:
            table = parse_toml(Path(file).read_text(encoding="utf-8"))
            found = Efficiency(**{key: float(value) for key, value in table.items()})
            if outside := [k for k, v in dataclasses.asdict(found).items() if not 0 < v <= 1]:
                raise ValueError(f"{', '.join(outside)}: must be above 0, and at most 1")
            return found
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            keys = ", ".join(field.name for field in dataclasses.fields(Efficiency))
            self._refuse(
                f"--efficiency {file}: is not a set of efficiencies ({reason}).",
                f"Give a file that --calibrate wrote, with {keys}.",
            )
            return None

    def _number(self, option: str, text: str | None) -> int:
        """A positive integer; 0 if the option is not given or invalid."""
        if text is None:
            return 0
        try:
            number = int(text)
        except ValueError:
            number = 0
        if number < 1:
            self._refuse(f"{option} {text}: must be a positive integer.")
        return number

    def _float(
        self, option: str, text: str | None, default: float, below: float = float("inf")
    ) -> float:
        if text is None:
            return default
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number < below or (number == 0 and below == float("inf")):
            limit = "" if below == float("inf") else f" of at least 0 and below {below:g}"
            self._refuse(f"{option} {text}: must be a {'positive ' * (not limit)}number{limit}.")
            return default
        return number

    def _choice(self, option: str, text: str, choices: dict[str, T]) -> T:
        if text not in choices:
            self._refuse(f"{option} {text}: must be one of {', '.join(choices)}.")
            return next(iter(choices.values()))
        return choices[text]

    def _fixed_choices(self) -> dict[str, Any]:
        """Values of --fix NAME=VALUE, by name."""
        fixed: dict[str, Any] = {}
        for text in self.arguments.fix:
            name, equals, value = text.partition("=")
            allowed = FIXABLE.get(name)
            if allowed is None or not equals:
                self._refuse(
                    f"--fix {text}: is not NAME=VALUE with a name that can be fixed.",
                    f"Names: {', '.join(FIXABLE)}.",
                )
            elif allowed is int:
                fixed[name] = self._number(f"--fix {name}", value)
            elif value not in allowed:
                self._refuse(f"--fix {text}: must be one of {', '.join(allowed)}.")
            else:
                fixed[name] = value == "yes" if "yes" in allowed else value
        return fixed

    def _base(self, seq_len: int) -> JobConfig | None:
        """The job's settings, or those of the shipped TOML that fits the model best."""
        arguments = self.arguments
        if (arguments.model is None) == (arguments.job is None):
            self._refuse(
                "--model, --job: give one of the two.",
                f"A model is one of {', '.join(_model_names())}; a job is a TOML of train.py.",
            )
            return None
        argv = self._model_argv() if arguments.model else ["--job.config_file", arguments.job or ""]
        if argv is None:
            return None
        if seq_len:
            lengths = ("training.seq_len", "validation.seq_len")
            argv += [part for key in lengths for part in (f"--{key}", str(seq_len))]
        elif arguments.model:
            self._refuse("--seq-len: is missing.", "Give the tokens of a sequence.")
        for name in _overridden_keys(arguments.overrides):
            if (option := OPTIONS.get(name)) and getattr(arguments, option) is not None:
                self._refuse(
                    f"--{name}: --{option.replace('_', '-')} sets it, too.", "Give one of the two."
                )
            if fixable := SEARCHED.get(name):
                self._refuse(
                    f"--{name}: is chosen by the search.", f"Use --fix {fixable}=VALUE to fix it."
                )
        try:
            base, refused = load_config(
                JobConfig, [*argv, *arguments.overrides], MOVED, complete_table
            )
            base = resolve_compute_dtype(base, elsewhere=True)
            spec = FAMILIES[base.model.name]
            shape_of(spec, spec.sizes_of(base.model))  # raises for what the planner does not know
        except UserErrors as errors:
            self.problems += errors.problems
            return None
        except UserError as error:
            self.problems.append(error)
            return None
        self.problems += refused
        return base

    def _model_argv(self) -> list[str] | None:
        name, _, flavor = (self.arguments.model or "").partition("/")
        if name not in FAMILIES or flavor not in FAMILIES[name].flavors:
            known = ", ".join(_model_names())
            self._refuse(f"--model {self.arguments.model}: is not a model.", f"Models: {known}.")
            return None
        own = TRAIN_CONFIGS / f"{name}_{flavor.lower()}.toml"
        file = own if own.exists() else TRAIN_CONFIGS / "pretraining.toml"
        model = ["--model.name", name, "--model.flavor", flavor, "--compile.enable", "true"]
        return ["--job.config_file", str(file), *model]


def _model_names() -> list[str]:
    return [f"{name}/{flavor}" for name, spec in FAMILIES.items() for flavor in spec.flavors]


def _overridden_keys(overrides: Iterable[str]) -> list[str]:
    return [text[2:].partition("=")[0] for text in overrides if text.startswith("--")]


def _can_offload(base: JobConfig) -> bool:
    """Whether the optimizer can store its state in host memory, and the GPU updates parameters."""
    optimizer = base.optimizer.replace(offload=True)
    refused = any(True for _ in check_optimizer_config(optimizer, base.training.dtype))
    return optimizer.offload and not refused and not base.training.enable_cpu_offload


def _with_length(base: JobConfig, global_batch: int, tokens: float | None) -> JobConfig:
    """The job with a global batch, and with as many steps as `tokens` take."""
    training = dataclasses.replace(base.training, global_batch_size=global_batch)
    if tokens is not None:
        steps = math.ceil(tokens / (global_batch * training.seq_len))
        training = dataclasses.replace(training, steps=steps)
    return dataclasses.replace(base, training=training)
