"""Exit codes, and errors that the user can fix: the fact, the values, and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

EXIT_DONE = 0  # training is complete
EXIT_RANK_LOST = 1  # a rank died, exited or hung (the log names it), or the ranks did not connect
EXIT_BUG = 1  # any other error, printed with a traceback; the code that Python itself uses
EXIT_USER_ERROR = 2  # the user must change the config, the data or a checkpoint
EXIT_DIVERGED = 3  # the guard gave up, a weight was inf or NaN, or replicas differ; not saved
EXIT_STOPPED = 75  # stopped by a signal or time limit, and saved after step 1: rerun to resume
EXIT_INTERRUPTED = 130  # Ctrl-C without a checkpoint; the code that shells use for SIGINT


class UserError(Exception):
    """An error the user can fix; printed without a traceback."""

    code = EXIT_USER_ERROR

    def __init__(self, message: str, fix: str = ""):
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.on_all_ranks = False  # raised on every rank, so one of them prints it

    def __str__(self) -> str:
        return f"{self.message} {self.fix}".strip()

    @property
    def keys(self) -> set[str]:
        """The settings that the error names, as `section.key`."""
        return set(re.findall(r"\b[a-z]\w*(?:\.[a-z_]\w*)+", str(self)))

    def mark_on_all_ranks(self) -> UserError:
        """Record that every rank raises this error; returns the error."""
        self.on_all_ranks = True
        return self


class ConfigError(UserError):
    """A setting, or a combination of settings, that is not valid."""


class DataError(UserError):
    """A tokenizer, corpus or shard that is missing, damaged or of an unknown format."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or does not fit the job."""


class TrainingDiverged(UserError):
    """The guard gave up, a weight became inf or NaN, or replicas of the state differ."""

    code = EXIT_DIVERGED


class RendezvousError(UserError):
    """The ranks did not find each other in time; a later start may succeed without a change."""

    code = EXIT_RANK_LOST


class UserErrors(UserError):
    """Several errors, reported together."""

    def __init__(self, problems: Iterable[UserError]):
        self.problems = [part for problem in problems for part in _parts_of(problem)]
        super().__init__("\n".join(str(problem) for problem in self.problems))


def _parts_of(error: UserError) -> list[UserError]:
    return error.problems if isinstance(error, UserErrors) else [error]


class RankLostError(Exception):
    """Another rank died, exited or hangs; the watchdog has already reported which one."""


def error_to_dict(error: UserError) -> dict[str, Any]:
    """An error as a JSON object, to be sent to other ranks."""
    kind = type(error).__name__
    data: dict[str, Any] = {"kind": kind, "message": error.message, "fix": error.fix}
    if isinstance(error, UserErrors):
        data["problems"] = [error_to_dict(problem) for problem in error.problems]
    return data


def error_from_dict(data: dict[str, Any]) -> UserError:
    """The error that `error_to_dict` wrote; a UserError where its class is unknown here."""
    if "problems" in data:
        return UserErrors(error_from_dict(problem) for problem in data["problems"])
    classes = {known.__name__: known for known in _with_subclasses(UserError)}
    error_class = classes.get(data["kind"], UserError)
    error = error_class.__new__(error_class)  # a subclass may have a constructor of its own
    UserError.__init__(error, data["message"], data["fix"])
    return error


def _with_subclasses(error_class: type[UserError]) -> Iterator[type[UserError]]:
    yield error_class
    for subclass in error_class.__subclasses__():
        yield from _with_subclasses(subclass)


def printable(text: str) -> str:
    """A text that is safe to print: that of strangers may have sequences that control terminals."""
    return re.sub(
        r"[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u200e\u200f\u2028-\u202e\u2066-\u2069]",
        lambda match: f"\\x{ord(match[0]):02x}",
        text,
    )


def format_error(error: UserError) -> str:
    """The text for stderr: all problems, numbered if there are several."""
    problems = [printable(str(problem)) for problem in _parts_of(error)]
    if len(problems) == 1:
        return f"titanlite: {problems[0]}"
    lines = [f"titanlite: {len(problems)} problems"]
    return "\n".join(lines + [f"  {number}. {p}" for number, p in enumerate(problems, 1)])
