"""A job that only dies is stopped, and says what it died of; any other goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time

import pytest

from titanlite.errors import CheckpointError
from titanlite.runtime.start_log import (
    STARTS_FILE,
    StartLog,
    StartRecord,
    consecutive_crashes,
    last_step,
    read_starts,
)


def live(folder, from_step, code=None, step=None, reason="", ranks=8) -> None:
    """One start of a run, and its end unless it is killed."""
    ledger = StartLog(folder)
    ledger.record_start(ranks, from_step)
    if code is not None:
        ledger.record_end(code, step, reason)


def live_until_killed(folder, from_step) -> int:
    """The same in a process that is truly killed; returns its number."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            StartLog(folder).record_start(8, from_step)
            os.write(there, b".")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(there)
    started = os.read(here, 1)
    os.close(here)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert started == b"."
    return child


def refusal(folder, from_step, limit) -> str:
    with pytest.raises(CheckpointError) as refused:
        StartLog(folder).check_crash_loop(from_step, limit)
    return str(refused.value)


def test_a_run_killed_again_and_again_is_refused(tmp_path):
    for death in range(3):
        StartLog(tmp_path).check_crash_loop(100, limit=3)
        pid = live_until_killed(tmp_path, 100)
        last = json.loads((tmp_path / STARTS_FILE).read_text().splitlines()[-1])
        assert last["event"] == "start" and last["pid"] == pid, death
    text = refusal(tmp_path, 100, limit=3)
    assert text.count("was killed, or its machine went away") == 3


def test_the_refusal_names_the_evidence_and_the_way_out(tmp_path):
    live(tmp_path, 100, code=1, step=137, reason="RuntimeError: CUDA error:\n  misaligned address")
    live(tmp_path, 100, ranks=16)
    journal = [{"step": 141, "loss": 2.0}, {"event": "validation", "step": 150}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal))
    headline, first, second, reached, fix = refusal(tmp_path, 100, limit=2).splitlines()
    today = time.strftime("%Y-%m-%d")
    assert headline == (
        f"{tmp_path}/{STARTS_FILE}: the last 2 starts died without a checkpoint newer than step"
        " 100:"
    )
    assert first.startswith(f"    {today} ") and second.startswith(f"    {today} ")
    assert f" on {socket.gethostname()}, 8 ranks, from step 100: " in first
    assert first.endswith("exit code 1 at step 137: RuntimeError: CUDA error: misaligned address")
    assert second.endswith("16 ranks, from step 100: was killed, or its machine went away")
    assert reached == "    metrics.jsonl tells of steps up to 141"
    assert "--job.max_crashes 0" in fix and "delete this file" in fix


def test_a_journal_that_tells_of_nothing_new_is_no_evidence(tmp_path):
    live(tmp_path, 100)
    (tmp_path / "metrics.jsonl").write_text('{"step": 100}\n')
    assert "metrics.jsonl" not in refusal(tmp_path, 100, limit=1)


def test_a_limit_of_zero_refuses_nothing(tmp_path):
    for _ in range(9):
        live(tmp_path, 0)
    StartLog(tmp_path).check_crash_loop(0, limit=0)


def test_a_new_folder_is_not_refused(tmp_path):
    StartLog(tmp_path).check_crash_loop(0, limit=1)


def test_a_run_that_gets_further_each_time_is_never_refused(tmp_path):
    for step in range(0, 100, 10):
        StartLog(tmp_path).check_crash_loop(step, limit=2)
        live(tmp_path, step)
        StartLog(tmp_path).check_crash_loop(step, limit=2)
        live(tmp_path, step)


@pytest.mark.parametrize("code", [0, 2, 75, 130])
def test_an_end_in_order_is_no_death(tmp_path, code):
    for _ in range(5):
        live(tmp_path, 100, code, step=100)
        StartLog(tmp_path).check_crash_loop(100, limit=1)


@pytest.mark.parametrize("code", [1, 3, -9, 134, 137])
def test_every_other_end_is_a_death(tmp_path, code):
    live(tmp_path, 100, code, step=100)
    assert f"exit code {code} " in refusal(tmp_path, 100, limit=1)


def test_a_refusal_is_not_the_end_of_the_run_before(tmp_path):
    live(tmp_path, 100)
    ledger = StartLog(tmp_path)
    ledger.record_end(2, 100, "refused")  # as a caller does that tells of every end
    refusal(tmp_path, 100, limit=1)


def test_only_the_first_end_counts(tmp_path):
    ledger = StartLog(tmp_path)
    ledger.record_start(8, 100)
    ledger.record_end(1, 120, "RuntimeError: out of memory")
    ledger.record_end(0, 120)
    assert "out of memory" in refusal(tmp_path, 100, limit=1)


def test_a_line_torn_by_a_crash_hides_no_other_and_spoils_none(tmp_path):
    live(tmp_path, 100, code=1, step=110, reason="first")
    whole = (tmp_path / STARTS_FILE).read_bytes()
    line = whole.splitlines(keepends=True)[0]
    for cut in range(1, len(line) - 1, 8):
        (tmp_path / STARTS_FILE).write_bytes(whole + line[:cut])
        assert len(read_starts((tmp_path / STARTS_FILE).read_bytes())) == 1
        live(tmp_path, 100, code=1, step=120, reason="second")
        lives = read_starts((tmp_path / STARTS_FILE).read_bytes())
        assert [life.reason for life in lives] == ["first", "second"]
        assert all(life.died for life in lives)


@pytest.mark.parametrize("junk", [b"\0\0\0", b"[]", b"7", b'{"event": "start"}', b"\xff", b""])
def test_a_line_that_is_no_entry_hides_no_other(tmp_path, junk):
    live(tmp_path, 100, code=1, step=110)
    with (tmp_path / STARTS_FILE).open("ab") as file:
        file.write(junk + b"\n")
    live(tmp_path, 100)
    assert len(read_starts((tmp_path / STARTS_FILE).read_bytes())) == 2


def test_a_full_disk_does_not_hide_why_a_run_ends(tmp_path):
    ledger = StartLog(tmp_path)
    ledger.record_start(8, 0)
    (tmp_path / STARTS_FILE).unlink()
    (tmp_path / STARTS_FILE).symlink_to("/dev/full")
    ledger.record_end(1, 7, "the true reason")
    with pytest.raises(CheckpointError, match="No space left"):
        StartLog(tmp_path).record_start(8, 0)


# --- pure ----------------------------------------------------------------------------------------


def history_of(seed: int) -> list[tuple[int, int | None]]:
    """Random lives, as (from step, exit code or None for a kill); they get further at times."""
    draw, step, lives = random.Random(seed), 0, []
    for _ in range(draw.randrange(12)):
        lives.append((step, draw.choice([None, None, 1, 1, 3, 0, 2, 75])))
        step = draw.choice([step, step, step, step + 10, max(0, step - 10)])
    return lives


def as_lines(lives) -> bytes:
    lines = []
    for number, (from_step, code) in enumerate(lives):
        start = {"time": float(number), "host": "h", "pid": number, "ranks": 1}
        lines.append({"event": "start", **start, "from_step": from_step})
        if code is not None:
            end = {"code": code, "step": from_step + 1, "reason": "r"}
            lines.append({"event": "end", "time": number + 0.5, **end})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_deaths_are_counted_from_the_end_back_to_whatever_else_happened():
    for seed in range(300):
        history = history_of(seed)
        lives = read_starts(as_lines(history))
        for from_step in {step for step, _ in history} | {0, 990}:
            row = []
            for number, (step, code) in reversed(list(enumerate(history))):
                if step != from_step or code in (0, 2, 75):
                    break
                row.insert(0, number)
            assert [life.pid for life in consecutive_crashes(lives, from_step)] == row, seed


def test_a_ledger_cut_anywhere_tells_of_what_was_whole():
    for seed in range(6):
        before = b""
        for line in as_lines(history_of(seed)).splitlines(keepends=True):
            for cut in range(1, len(line) - 1):
                assert read_starts(before + line[:cut]) == read_starts(before), seed
            assert read_starts(before + line[:-1]) == read_starts(before + line), seed
            before += line


def test_a_start_from_another_step_begins_a_new_row():
    lives = [
        StartRecord(0.0, "h", n, 1, from_step=step) for n, step in enumerate([100, 100, 50, 100])
    ]
    assert [life.pid for life in consecutive_crashes(lives, 100)] == [3]
    assert not consecutive_crashes(lives, 50)  # the newest start was another's


def test_the_last_step_is_that_of_the_last_whole_step_line():
    assert last_step(b"") == 0
    assert last_step(b'{"step": 5}\n{"event": "x", "step": 9}\n{"step": 6, "lo') == 5
    assert last_step(b'{"event": "x", "step": 9}\n[]\n\xff\n') == 0
