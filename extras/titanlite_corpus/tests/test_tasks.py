"""Tasks: a result is made once, appears as a whole, and depends on what it was made of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from titanlite.errors import DataError
from titanlite_corpus.documents import build_table, read_tables, text_bytes, write_tables
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.task import Task, WorkFolder, execute_task, remove_other_work, run_tasks

ONE = LocalEngine(workers=1)


def write_word(out: Path, inputs: list[Path], arguments: dict) -> dict:
    read = [(folder / "word").read_text() for folder in inputs]
    (out / "word").write_text(" ".join([*read, arguments["word"]]))
    with open(arguments["log"], "a") as log:
        log.write(arguments["word"] + "\n")
    return {"words": len(read) + 1}


def fail_on_disk(out: Path, inputs: list[Path], arguments: dict) -> dict:
    (out / "half").write_text("half")
    raise OSError(arguments["errno"], os.strerror(arguments["errno"]))


@pytest.fixture
def plan(tmp_path):
    """Tasks: two words, and their sentence; `plan(b="x")` changes the second word."""

    def make(b: str = "b") -> list[Task]:
        log = str(tmp_path / "log")
        words = [Task("word", write_word, {"word": w, "log": log}) for w in ("a", b)]
        keys = tuple(task.key for task in words)
        return [*words, Task("join", write_word, {"word": ".", "log": log}, keys)]

    return make


def ran(tmp_path: Path) -> list[str]:
    """The words of the tasks that ran since the last call."""
    words = (tmp_path / "log").read_text().split() if (tmp_path / "log").exists() else []
    (tmp_path / "log").unlink(missing_ok=True)
    return words


def test_only_missing_and_changed_tasks_run(plan, tmp_path):
    work = tmp_path / "work"
    tasks = plan()
    assert [counts["words"] for counts in run_tasks(tasks, work, ONE)] == [1, 1, 3]
    assert (work / tasks[2].key / "word").read_text() == "a b ." and ran(tmp_path) == [
        "a",
        "b",
        ".",
    ]
    assert run_tasks(plan(), work, ONE)[2]["words"] == 3 and ran(tmp_path) == []
    changed = plan(b="c")
    run_tasks(changed, work, ONE)
    assert ran(tmp_path) == ["c", "."] and changed[0].key == tasks[0].key
    remove_other_work(work, changed)
    run_tasks(changed, work, ONE)
    assert ran(tmp_path) == []
    assert not (work / tasks[1].key).exists() and not (work / tasks[2].key).exists()


def test_what_a_key_depends_on(plan):
    base = Task("s", write_word, {"n": 1}, ("a", "b"))
    others = [
        Task("s", write_word, {"n": 1}, ("b", "a")),
        Task("s", write_word, {"n": 2}, ("a", "b")),
        Task("s", fail_on_disk, {"n": 1}, ("a", "b")),
        Task("s", write_word, {"n": 1}, ("a", "b"), version=2),
    ]
    assert base.key == Task("s", write_word, {"n": 1}, ("a", "b")).key
    assert len({task.key for task in [base, *others]}) == 5


@pytest.mark.parametrize("damage", ["truncated", "no record", "broken record"])
def test_a_damaged_result_is_made_again(plan, tmp_path, damage):
    work, tasks = tmp_path / "work", plan()
    run_tasks(tasks, work, ONE)
    ran(tmp_path)
    folder = work / tasks[1].key
    if damage == "truncated":
        (folder / "word").write_text("")
    else:
        (folder / "done.json").write_text("{") if damage[0] == "b" else os.remove(
            folder / "done.json"
        )
    run_tasks(tasks, work, ONE)
    assert ran(tmp_path) == ["b"] and (folder / "word").read_text() == "b"


@pytest.mark.parametrize("number", [28, 27, 122])  # no space left, file too large, quota
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, number):
    task = Task("stage", fail_on_disk, {"errno": number})
    with pytest.raises(DataError, match="cannot be written in stage stage") as refusal:
        run_tasks([task], tmp_path / "work", ONE)
    assert "Free space" in refusal.value.fix
    assert not list((tmp_path / "work").rglob("half"))


def test_a_task_that_two_processes_run_is_committed_once(plan, tmp_path, monkeypatch):
    (task, *_), work = plan(), tmp_path / "work"
    with monkeypatch.context() as patch:  # both begin before one is finished
        patch.setattr("titanlite_corpus.task.read_counts", lambda folder: None)
        for _ in range(2):
            assert execute_task(task, str(work))["words"] == 1
    assert ran(tmp_path) == ["a", "a"]
    assert execute_task(task, str(work))["words"] == 1 and ran(tmp_path) == []
    assert json.loads((work / task.key / "done.json").read_text())["counts"]["words"] == 1
    assert not list((work / ".uncommitted").iterdir())


def test_a_second_command_is_refused_while_one_works(plan, tmp_path):
    with WorkFolder(tmp_path / "work", ONE) as run:
        assert run(plan())[2]["words"] == 3
        with (
            pytest.raises(DataError, match="another process is working there"),
            WorkFolder(tmp_path / "work", ONE),
        ):
            pass
    with WorkFolder(tmp_path / "work", ONE):
        pass


def test_tables_are_read_one_by_one_and_damage_is_found(tmp_path):
    tables = [build_table([f"text {i} ß"] * i, "web", ["f:1"] * i) for i in (3, 0, 5)]
    write_tables(tmp_path, tables)
    read = list(read_tables(tmp_path))
    assert read == [tables[0], tables[2]]
    assert text_bytes(tables[0]) == 3 * len("text 3 ß".encode()) and text_bytes(tables[1]) == 0
    content = bytearray((tmp_path / "documents.parquet").read_bytes())
    content[40] ^= 1
    (tmp_path / "documents.parquet").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        list(read_tables(tmp_path))
