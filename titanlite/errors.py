"""What a person must change, said so that they can: what happened, the values, the way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

EXIT_DONE = 0
EXIT_RANK_LOST = 1  # another rank ended first, and says why
EXIT_DIVERGED = 3  # a loss, gradient or weight was inf or NaN; nothing of it was saved
EXIT_STOPPED = 75  # asked to stop, with a checkpoint written: the same command goes on
EXIT_INTERRUPTED = 130  # Ctrl-C without saving, as shells count it
EXIT_USER_ERROR = 2  # config, data or checkpoint: the user must change something


class UserError(Exception):
    """Something the user can mend; printed as one line, never as a traceback."""

    code = EXIT_USER_ERROR

    def __init__(self, message: str, fix: str = "", keys: tuple[str, ...] = ()):
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.keys = (
            keys  # the settings it is about: a rule stays silent about a key already refused
        )
        self.on_all_ranks = False  # every rank has it, so one of them is enough to print it
        self.printed = False  # it is printed

    def __str__(self) -> str:
        return f"{self.message} {self.fix}".strip()

    def mark_on_all_ranks(self) -> UserError:
        """This error, marked as raised on every rank."""
        self.on_all_ranks = True
        return self


class ConfigError(UserError):
    """A setting, or a combination of settings, that cannot be."""


class DataError(UserError):
    """A tokenizer, corpus or shard that is missing, foreign or damaged."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or does not fit the job."""


class TrainingDiverged(UserError):
    """Training that went to inf or NaN."""

    code = EXIT_DIVERGED


class RankLostError(Exception):
    """Another rank died, left or hangs, and it has been said which."""


class UserErrors(UserError):
    """Everything that is wrong, at once."""

    def __init__(self, problems: Iterable[UserError]):
        self.problems = list(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


def error_to_dict(error: UserError) -> dict[str, Any]:
    """An error as JSON has it, to be sent to other ranks."""
    data: dict[str, Any] = {"kind": type(error).__name__, "message": error.message}
    data |= {"fix": error.fix, "keys": list(error.keys)}
    if isinstance(error, UserErrors):
        data["problems"] = [error_to_dict(problem) for problem in error.problems]
    return data


def error_from_dict(data: dict[str, Any]) -> UserError:
    """The error that `error_to_dict` described; of a kind that is known here, else a UserError."""
    kind = {kind.__name__: kind for kind in _kinds(UserError)}.get(data["kind"], UserError)
    error = kind.__new__(kind)
    UserError.__init__(error, data["message"], data["fix"], tuple(data["keys"]))
    if isinstance(error, UserErrors):
        error.problems = [error_from_dict(problem) for problem in data["problems"]]
    return error


def _kinds(kind: type[UserError]) -> Iterator[type[UserError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


def format_error(error: UserError) -> str:
    """The text for stderr: one line a problem, under a count where there are several."""
    problems = error.problems if isinstance(error, UserErrors) else [error]
    if len(problems) == 1:
        return f"titanlite: {problems[0]}"
    lines = [f"titanlite: {len(problems)} problems"]
    return "\n".join(lines + [f"  {number}. {p}" for number, p in enumerate(problems, 1)])
