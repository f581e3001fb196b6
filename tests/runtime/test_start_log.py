"""A job in a crash loop is refused with the causes; any other job may start."""

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
    FLAPPING_SECONDS,
    STARTS_FILE,
    StartLog,
    StartRecord,
    consecutive_crashes,
    count_losses,
    read_starts,
)


def start_run(folder, from_step, code=None, step=None, reason="", ranks=8, hosts=()) -> None:
    """Record a start, and its end unless `code` is None, as when it is killed."""
    start_log = StartLog(folder)
    start_log.record_start(ranks, from_step, hosts)
    if code is not None:
        start_log.record_end(code, step, reason)


def start_and_kill(folder, from_step) -> int:
    """Record a start in a process that is then killed; returns its pid."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            StartLog(folder).record_start(8, from_step)
            os.write(write_end, b".")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write_end)
    started = os.read(read_end, 1)
    os.close(read_end)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert started == b"."
    return child


def refusal(folder, from_step, limit) -> str:
    with pytest.raises(CheckpointError) as refused:
        StartLog(folder).check_crash_loop(from_step, limit)
    return str(refused.value)


def test_a_run_that_is_killed_repeatedly_is_refused(tmp_path):
    for crash in range(3):
        StartLog(tmp_path).check_crash_loop(100, limit=3)
        pid = start_and_kill(tmp_path, 100)
        last = json.loads((tmp_path / STARTS_FILE).read_text().splitlines()[-1])
        assert last["event"] == "start" and last["pid"] == pid, crash
    text = refusal(tmp_path, 100, limit=3)
    assert text.count("was killed, or its machine failed") == 3


def test_the_refusal_lists_the_crashes_and_the_fix(tmp_path):
    start_run(
        tmp_path, 100, code=1, step=137, reason="RuntimeError: CUDA error:\n  misaligned address"
    )
    start_run(tmp_path, 100, ranks=16)
    headline, first, second, fix = refusal(tmp_path, 100, limit=2).splitlines()
    today = time.strftime("%Y-%m-%d")
    assert headline == (
        f"{tmp_path}/{STARTS_FILE}: the last 2 starts crashed without a checkpoint newer than step"
        " 100:"
    )
    assert first.startswith(f"    {today} ") and second.startswith(f"    {today} ")
    assert f" on {socket.gethostname()}, 8 ranks, from step 100: " in first
    assert first.endswith("exit code 1 at step 137: RuntimeError: CUDA error: misaligned address")
    assert second.endswith("16 ranks, from step 100: was killed, or its machine failed")
    assert "--job.max_crashes 0" in fix and "delete starts.jsonl" in fix


def test_a_limit_of_zero_refuses_nothing(tmp_path):
    for _ in range(9):
        start_run(tmp_path, 0)
    StartLog(tmp_path).check_crash_loop(0, limit=0)


def test_a_new_folder_is_not_refused(tmp_path):
    StartLog(tmp_path).check_crash_loop(0, limit=1)


def test_a_run_that_makes_progress_is_never_refused(tmp_path):
    for step in range(0, 100, 10):
        StartLog(tmp_path).check_crash_loop(step, limit=2)
        start_run(tmp_path, step)
        StartLog(tmp_path).check_crash_loop(step, limit=2)
        start_run(tmp_path, step)


def test_crashes_of_lost_hosts_are_counted_for_the_host_and_not_for_the_run(tmp_path):
    every, left, moved = ("a", "b", "c"), ("a", "c"), ("d", "e")
    for _ in range(3):
        start_run(tmp_path, 100, code=1, step=120, hosts=every)
        start_run(tmp_path, 100, code=1, step=120, hosts=left)  # a crash, and no host is lost
    log = StartLog(tmp_path)
    log.check_crash_loop(100, limit=4, hosts=left)
    with pytest.raises(CheckpointError, match="the last 3 starts"):
        log.check_crash_loop(100, limit=3, hosts=left)
    start_run(tmp_path, 100, hosts=every)
    with pytest.raises(CheckpointError, match="the last 4 starts"):  # all hosts are new
        log.check_crash_loop(100, limit=4, hosts=moved)
    now = time.time()
    assert count_losses(log.read(), left, now) == {"b": 4}
    assert count_losses(log.read(), left, now + FLAPPING_SECONDS) == {}


def test_a_stop_by_torchrun_because_a_host_joined_or_left_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    start_run(tmp_path, 100, code=75, step=120, hosts=("a", "b"))
    assert StartLog(tmp_path).stopped_in_this_launch(("b", "a"))
    assert not StartLog(tmp_path).stopped_in_this_launch(("a", "b", "c"))
    assert not StartLog(tmp_path).stopped_in_this_launch(("a",))


@pytest.mark.parametrize("code", [0, 2, 75, 130])
def test_an_orderly_exit_is_not_a_crash(tmp_path, code):
    for _ in range(5):
        start_run(tmp_path, 100, code, step=100)
        StartLog(tmp_path).check_crash_loop(100, limit=1)


@pytest.mark.parametrize("code", [1, 3, -9, 134, 137])
def test_every_other_exit_code_is_a_crash(tmp_path, code):
    start_run(tmp_path, 100, code, step=100)
    assert f"exit code {code} " in refusal(tmp_path, 100, limit=1)


def test_a_refusal_is_not_the_end_of_the_run_before(tmp_path):
    start_run(tmp_path, 100)
    start_log = StartLog(tmp_path)
    start_log.record_end(2, 100, "refused")  # as from a caller that records every end
    refusal(tmp_path, 100, limit=1)


def test_only_the_first_end_counts(tmp_path):
    start_log = StartLog(tmp_path)
    start_log.record_start(8, 100)
    start_log.record_end(1, 120, "RuntimeError: out of memory")
    start_log.record_end(0, 120)
    assert "out of memory" in refusal(tmp_path, 100, limit=1)


def test_a_line_cut_off_by_a_crash_does_not_affect_other_lines(tmp_path):
    start_run(tmp_path, 100, code=1, step=110, reason="first")
    complete = (tmp_path / STARTS_FILE).read_bytes()
    line = complete.splitlines(keepends=True)[0]
    for cut in range(1, len(line) - 1, 8):
        (tmp_path / STARTS_FILE).write_bytes(complete + line[:cut])
        assert len(read_starts((tmp_path / STARTS_FILE).read_bytes())) == 1
        start_run(tmp_path, 100, code=1, step=120, reason="second")
        starts = read_starts((tmp_path / STARTS_FILE).read_bytes())
        assert [start.reason for start in starts] == ["first", "second"]
        assert all(start.crashed for start in starts)


START = b'{"event": "start", "host": "h", "pid": 1, "ranks": 2, "from_step": 0, "time": %s}'


@pytest.mark.parametrize(
    "junk",
    [b"\0\0\0", b"[]", b"7", b'{"event": "start"}', b"\xff", b"", START % b'"x"', START % b"1e300"],
)
def test_an_invalid_line_does_not_affect_other_lines(tmp_path, junk):
    start_run(tmp_path, 100, code=1, step=110)
    with (tmp_path / STARTS_FILE).open("ab") as file:
        file.write(junk + b"\n")
    start_run(tmp_path, 100)
    assert len(read_starts((tmp_path / STARTS_FILE).read_bytes())) == 2


def test_a_full_disk_does_not_hide_why_a_run_ends(tmp_path):
    start_log = StartLog(tmp_path)
    start_log.record_start(8, 0)
    (tmp_path / STARTS_FILE).unlink()
    (tmp_path / STARTS_FILE).symlink_to("/dev/full")
    start_log.record_end(1, 7, "the true reason")
    with pytest.raises(CheckpointError, match="No space left"):
        StartLog(tmp_path).record_start(8, 0)


# --- pure functions ------------------------------------------------------------------------------


def history_of(seed: int) -> list[tuple[int, int | None]]:
    """Random starts as (from step, exit code or None for a kill); some make progress."""
    draw, step, starts = random.Random(seed), 0, []
    for _ in range(draw.randrange(12)):
        starts.append((step, draw.choice([None, None, 1, 1, 3, 0, 2, 75])))
        step = draw.choice([step, step, step, step + 10, max(0, step - 10)])
    return starts


def as_lines(starts) -> bytes:
    lines = []
    for number, (from_step, code) in enumerate(starts):
        start = {"time": float(number), "host": "h", "pid": number, "ranks": 1}
        lines.append({"event": "start", **start, "from_step": from_step})
        if code is not None:
            end = {"code": code, "step": from_step + 1, "reason": "r"}
            lines.append({"event": "end", "time": number + 0.5, **end})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_crashes_are_counted_back_to_the_last_orderly_exit_or_other_step():
    for seed in range(300):
        history = history_of(seed)
        starts = read_starts(as_lines(history))
        for from_step in {step for step, _ in history} | {0, 990}:
            crashes = []
            for number, (step, code) in reversed(list(enumerate(history))):
                if step != from_step or code in (0, 2, 75):
                    break
                crashes.insert(0, number)
            assert [s.pid for s in consecutive_crashes(starts, from_step)] == crashes, seed


def test_a_start_log_cut_anywhere_still_has_its_complete_lines():
    for seed in range(6):
        before = b""
        for line in as_lines(history_of(seed)).splitlines(keepends=True):
            for cut in range(1, len(line) - 1):
                assert read_starts(before + line[:cut]) == read_starts(before), seed
            assert read_starts(before + line[:-1]) == read_starts(before + line), seed
            before += line


def test_a_start_from_another_step_resets_the_count():
    starts = [
        StartRecord(0.0, "h", n, 1, from_step=step) for n, step in enumerate([100, 100, 50, 100])
    ]
    assert [start.pid for start in consecutive_crashes(starts, 100)] == [3]
    assert not consecutive_crashes(starts, 50)  # the newest start was from step 100
