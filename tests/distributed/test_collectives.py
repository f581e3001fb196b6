"""What ranks tell each other is data: it arrives whole, and nothing in it is executed."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import ROOT
from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.collectives import (
    broadcast_from_rank_0,
    gather_from_all_ranks,
    gather_problems,
    run_on_rank_0,
)
from titanlite.errors import ConfigError, DataError, UserError, UserErrors, format_error


class TouchesWhenUnpickled:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def receive_a_pickle(path: str) -> str:
    """Rank 0 sends what torch's `broadcast_object_list` sends; rank 1 takes it for a value."""
    if dist.get_rank() == 0:
        dist.broadcast_object_list([TouchesWhenUnpickled(path)], src=0)
        return ""
    try:
        return repr(broadcast_from_rank_0(None))
    except ValueError as refused:
        return f"refused: {type(refused).__name__}"


def test_a_pickle_that_another_rank_sends_is_not_executed(tmp_path):
    path = tmp_path / "executed"
    assert run_on_ranks(receive_a_pickle, 2, str(path))[1].startswith("refused")
    assert not path.exists()


def test_no_collective_of_ours_pickles():
    for file in (ROOT / "titanlite").rglob("*.py"):
        assert not re.search(r"(gather|scatter|broadcast|send|recv)_object", file.read_text()), file


def say_all_kinds() -> list:
    rank = dist.get_rank()
    heard = [
        broadcast_from_rank_0({"steps": [4, 8], "of": rank}),
        gather_from_all_ranks([rank] * (1 + 100 * rank)),
    ]
    heard += [
        gather_from_all_ranks(None),
        gather_problems(""),
        gather_problems("full" if rank else ""),
    ]
    try:
        run_on_rank_0(refuse)
    except UserError as error:
        kinds = [type(problem).__name__ for problem in error.problems]
        heard.append([type(error).__name__, kinds, format_error(error), error.on_all_ranks])
        heard.append([list(problem.keys) for problem in error.problems])
    return heard


def refuse() -> None:
    raise UserErrors([ConfigError("a = 1.", fix="Use 2.", keys=("a",)), DataError("b é\n.")])


def test_values_problems_and_errors_are_the_same_on_every_rank():
    heard = run_on_ranks(say_all_kinds, 2)
    assert (
        heard[0]
        == heard[1]
        == [
            {"steps": [4, 8], "of": 0},
            [[0], [1] * 101],
            [None, None],
            [],
            ["rank 1: full"],
            [
                "UserErrors",
                ["ConfigError", "DataError"],
                "titanlite: 2 problems\n  1. a = 1. Use 2.\n  2. b é\n.",
                True,
            ],
            [["a"], []],
        ]
    )


@pytest.mark.parametrize(
    "error", [ConfigError("a", fix="b", keys=("c",)), UserErrors([DataError("d", fix="e")])]
)
def test_an_error_of_a_worker_process_keeps_its_words(error):
    """Workers of `prepare_data.py` and torch's checkpoints do send errors as pickles."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), format_error(again), again.keys) == (
        type(error),
        format_error(error),
        error.keys,
    )
