"""Values exchanged between ranks arrive unchanged, and nothing in them is executed."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from conftest import ROOT
from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.collectives import (
    broadcast_from_rank_0,
    gather_from_all_ranks,
    gather_problems,
    run_on_rank_0,
)
from titanlite.distributed.rank_tree import RankTree
from titanlite.errors import ConfigError, DataError, UserError, UserErrors, format_error


class TouchesWhenUnpickled:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def receive_a_pickle(path: str) -> str:
    """Rank 0 sends a pickle; rank 1 reads it as a value."""
    if dist.get_rank() == 0:
        RankTree().broadcast(pickle.dumps(TouchesWhenUnpickled(path)))
        return ""
    try:
        return repr(broadcast_from_rank_0(None))
    except ValueError as error:
        return f"refused: {type(error).__name__}"


@pytest.mark.slow
def test_a_pickle_that_another_rank_sends_is_not_executed(tmp_path):
    path = tmp_path / "executed"
    assert run_on_ranks(receive_a_pickle, 2, str(path))[1].startswith("refused")
    assert not path.exists()


def test_the_package_uses_no_collective_that_pickles():
    for file in (ROOT / "titanlite").rglob("*.py"):
        assert not re.search(r"(gather|scatter|broadcast|send|recv)_object", file.read_text()), file


def exchange_all_kinds() -> list:
    rank = dist.get_rank()
    received = [
        broadcast_from_rank_0({"steps": [4, 8], "of": rank}),
        gather_from_all_ranks([rank] * (1 + 100 * rank)),
    ]
    received += [
        gather_from_all_ranks(None),
        gather_problems(""),
        gather_problems("full" if rank else ""),
    ]
    try:
        run_on_rank_0(raise_errors)
    except UserError as error:
        kinds = [type(problem).__name__ for problem in error.problems]
        received.append([type(error).__name__, kinds, format_error(error), error.on_all_ranks])
    return received


def raise_errors() -> None:
    raise UserErrors([ConfigError("a = 1.", fix="Use 2."), DataError("b é\n.")])


def test_values_problems_and_errors_are_the_same_on_every_rank():
    received = run_on_ranks(exchange_all_kinds, 2)
    assert (
        received[0]
        == received[1]
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
        ]
    )


@pytest.mark.parametrize(
    "error", [ConfigError("a", fix="b"), UserErrors([DataError("d", fix="e")])]
)
def test_an_error_of_a_worker_process_is_unchanged_by_pickling(error):
    """Workers of `prepare_data.py` and torch's checkpoints send errors as pickles."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), format_error(copy)) == (type(error), format_error(error))
