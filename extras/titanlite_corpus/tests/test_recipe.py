"""A recipe gives the same shards whatever the workers, kills and restarts; errors are readable."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models

from conftest import HANG_SECONDS
from titanlite.data.text import Document
from titanlite.errors import ConfigError, DataError, UserError, format_error
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.pipeline import make_corpus
from titanlite_corpus.publish import _write_published
from titanlite_corpus.read import _build_tables
from titanlite_corpus.recipe import load_recipe
from titanlite_corpus.shuffle import document_keys
from titanlite_corpus.tests.synthetic_corpus import write_corpus
from titanlite_corpus.tests.test_prepare import (
    content_of,
    documents_in,
    group_exists,
    texts,
    wait_until,
)

ROOT = Path(__file__).parents[3]
ONE = LocalEngine(workers=1)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """No test here fails the power, and a busy disk needs a second for each flush."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write_jsonl(path: Path, content: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in content))


@pytest.fixture
def write_recipe(tmp_path):
    """Writes a recipe of two sources, 300 documents, as many tables of a few kB."""
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", texts(120))
    write_jsonl(tmp_path / "in/b.jsonl", [*texts(79, 1), ""])
    for number, text in enumerate(texts(100, 2)):
        (tmp_path / f"in/{number:03}.txt").write_bytes(text.encode())

    def write(out: str = "out", more: str = "[shuffle]", **values) -> Path:
        lines = {
            "out": str(tmp_path / out),
            "tokenizer": "bytes",
            "validation_share": 0.2,
            **values,
        }
        sources = [("web", ["a.jsonl", "b.jsonl"]), ("books", ["*.txt"])]
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
        for name, files in sources:
            inputs = json.dumps([str(tmp_path / "in" / file) for file in files])
            text += f'[[sources]]\nname = "{name}"\ninputs = {inputs}\n'
        (tmp_path / f"{out}.toml").write_text(text + more + "\n")
        return tmp_path / f"{out}.toml"

    return write


def shards_in(out: Path) -> dict[str, bytes]:
    """Name and content of all files but the work."""
    return {k: v for k, v in content_of(out).items() if not k.startswith(".work")}


def set_table_bytes(monkeypatch, size: int = 5000) -> None:
    """Make tables small, so that there are several tasks."""
    monkeypatch.setattr("titanlite_corpus.read.TABLE_BYTES", size)


def test_every_document_is_in_one_shard_once_in_an_order_of_the_seed(
    write_recipe, tmp_path, monkeypatch
):
    set_table_bytes(monkeypatch)
    orders = {}
    for seed in (None, 0, 1):
        more = "" if seed is None else f"[shuffle]\nseed = {seed}"
        result = make_corpus(load_recipe(write_recipe(f"out{seed}", more)), ONE)
        out = tmp_path / f"out{seed}"
        orders[seed] = {
            source: [documents_in(out / source / side) for side in ("train", "validation")]
            for source in ("web", "books")
        }
        assert result.tasks > 20 and sum(side.documents for side in result.published.sides) == 299
    for source, expected in (("web", texts(120) + texts(79, 1)), ("books", texts(100, 2))):
        train, held_out = orders[None][source]
        places = {text: place for place, text in enumerate(expected)}
        assert sorted(train + held_out) == sorted(expected) and 10 < len(held_out) < 80
        for side in (0, 1):
            unshuffled = orders[None][source][side]
            assert unshuffled == sorted(unshuffled, key=places.__getitem__)
            shuffled = [orders[seed][source][side] for seed in (0, 1)]
            assert shuffled[0] != shuffled[1] != unshuffled != shuffled[0]
            assert all(sorted(order) == sorted(unshuffled) for order in shuffled)


def test_shards_are_divided_by_size_without_changing_the_order(write_recipe, tmp_path, monkeypatch):
    set_table_bytes(monkeypatch)
    make_corpus(load_recipe(write_recipe("whole")), ONE)
    for more in ("[shuffle]", ""):
        make_corpus(load_recipe(write_recipe(f"whole{len(more)}", more)), ONE)
        monkeypatch.setattr("titanlite_corpus.pipeline.MIB", 4000)
        result = make_corpus(load_recipe(write_recipe(f"parts{len(more)}", more, shard_mib=1)), ONE)
        monkeypatch.setattr("titanlite_corpus.pipeline.MIB", 1 << 20)
        assert result.published.sides[0].shards > 3
        whole, parts = (tmp_path / f"{name}{len(more)}/web/train" for name in ("whole", "parts"))
        assert documents_in(parts) == documents_in(whole)


def test_keys_order_documents_evenly():
    keys = document_keys(0, (1, 0, 3), 100_000)
    assert len(set(keys.tolist())) == len(keys)
    counts = np.histogram((keys >> np.uint64(32)).astype(float), 50, (0, 2**32))[0]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_square < 100  # 49 degrees of freedom: mean 49, deviation 10
    others = [
        document_keys(*place, 5) for place in ((0, (1, 0, 4)), (1, (1, 0, 3)), (0, (0, 1, 3)))
    ]
    assert all((keys[:5] != other).all() for other in others)


# Pauses when this many files match a pattern, so that the run cannot end before the kill.
RUN = """
import os, sys, time
from pathlib import Path
import titanlite_corpus.read
from titanlite_corpus.commands import prepare
from titanlite_corpus.progress_bars import StageBars
os.fsync = lambda descriptor: None
titanlite_corpus.read.TABLE_BYTES = 5000
recipe, workers, pattern, count = sys.argv[1:]
def wait(bars, update):
    if pattern and len(list(Path().glob(pattern))) >= int(count):
        time.sleep(1e6)
if __name__ == "__main__":
    StageBars.__call__ = wait
    sys.exit(prepare.main(["--recipe", recipe, "--workers", workers]))
"""


def start(
    tmp_path: Path, recipe: Path, workers: int, wait_at: tuple[str, int] = ("", 0), **options
) -> subprocess.Popen:
    """`wait_at`: a pattern of files within `tmp_path`, and how many of them."""
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'extras'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "run.py", str(recipe), str(workers), *map(str, wait_at)]
    options = {"cwd": tmp_path, "start_new_session": True, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, **options)


def kill_at(
    tmp_path: Path,
    recipe: Path,
    workers: int,
    wait_at: tuple[str, int],
    number: signal.Signals = signal.SIGKILL,
) -> tuple[int, str]:
    """Start the recipe, and send a signal when so many files match; returns exit code, stderr."""
    pattern, count = wait_at
    child = start(tmp_path, recipe, workers, wait_at)
    wait_until(lambda: len(list(tmp_path.glob(pattern))) >= count)
    os.kill(child.pid, number)
    _, errors = child.communicate()
    wait_until(lambda: not group_exists(child.pid))  # its workers end too
    return child.returncode, errors.decode()


@pytest.mark.slow
def test_kills_and_workers_change_no_byte(write_recipe, tmp_path, monkeypatch):
    """Killed in one stage and asked to end in another, with 2 workers, then completed."""
    set_table_bytes(monkeypatch)
    undisturbed = make_corpus(load_recipe(write_recipe("undisturbed")), ONE)
    recipe = write_recipe("out")
    files, tasks = "out/.work/[!.]*/*/done.json", undisturbed.tasks
    kill_at(tmp_path, recipe, 2, (files, tasks // 5))  # in stage "read"
    code, errors = kill_at(tmp_path, recipe, 2, (files, tasks * 7 // 10), signal.SIGTERM)  # shuffle
    assert code == 130 and "run the same command again" in errors and "Traceback" not in errors
    assert not (tmp_path / "out/corpus.json").exists()
    resumed = make_corpus(load_recipe(recipe), ONE)
    assert 0 < resumed.reused_tasks < resumed.tasks == undisturbed.tasks
    first, second = (shards_in(tmp_path / out) for out in ("undisturbed", "out"))
    assert first == second and len(first) == 13
    assert not list((tmp_path / "out/.work").glob(".uncommitted/*"))


@pytest.mark.slow
def test_a_synthetic_corpus_is_the_same_with_1_2_and_4_workers_and_after_a_kill(
    tmp_path, monkeypatch
):
    """Killed among the filters with 4 workers, then completed with 2; all stages, four formats."""
    set_table_bytes(monkeypatch)
    counts = write_corpus(tmp_path / "in", 8)
    assert len(counts) == 8  # all kinds

    def write(out: str) -> Path:
        (tmp_path / f"{out}.toml").write_text(
            f'out = "{tmp_path / out}"\ntokenizer = "bytes"\nvalidation_share = 0.1\n'
            f'[[sources]]\nname = "web"\ninputs = ["{tmp_path / "in"}"]\n'
            '[filter]\nrules = ["gopher_quality", "gopher_repetition", "personal_data"]\n'
            "[deduplicate]\n[shuffle]\n"
        )
        return tmp_path / f"{out}.toml"

    undisturbed = make_corpus(load_recipe(write("undisturbed")), ONE)
    removed = undisturbed.stages["duplicates"]["removed"]
    assert removed["exact"]["documents"] and removed["near"]["documents"]
    assert undisturbed.stages["filter"]["changed"]["personal_data.mail"]["documents"]
    kill_at(tmp_path, recipe := write("out"), 4, ("out/.work/filter/*/done.json", 1))
    assert not (tmp_path / "out/.work/shards").exists()
    child = start(tmp_path, recipe, 2)
    assert child.communicate(timeout=HANG_SECONDS)[1] == b"" and child.returncode == 0
    first, second = (shards_in(tmp_path / out) for out in ("undisturbed", "out"))
    del second["report.html"]  # which the command adds
    assert first == second and len(first) == 7


def count_finished(out: Path) -> int:
    return len(list(out.glob(".work/*/*/done.json")))


def test_a_changed_setting_reruns_only_what_depends_on_it(write_recipe, tmp_path):
    make_corpus(load_recipe(write_recipe()), ONE)
    again = make_corpus(load_recipe(write_recipe()), ONE)
    assert again.stages == {}
    changed = load_recipe(write_recipe(more="[shuffle]\nseed = 1"))
    with pytest.raises(DataError, match="already has a corpus") as refusal:
        make_corpus(changed, ONE)
    assert "--replace" in refusal.value.fix
    before = shards_in(tmp_path / "out")
    ran: list[str] = []
    result = make_corpus(changed, ONE, lambda u: ran.append(u.stage) if u.counts else None, True)
    assert set(ran) == {"shuffle", "shards"} and result.reused_tasks == result.tasks - len(ran)
    after = shards_in(tmp_path / "out")
    assert (
        after.keys() == before.keys()
        and after["web/train/000000.bin"] != before["web/train/000000.bin"]
    )
    # the work of the old seed is removed, so a third recipe does not add to the disk space
    assert count_finished(tmp_path / "out") == result.tasks


@pytest.mark.parametrize("state", ["before the renames", "between them", "before the record"])
def test_a_kill_while_shards_are_published_is_completed(write_recipe, tmp_path, state, monkeypatch):
    recipe = load_recipe(write_recipe())
    make_corpus(recipe, ONE)
    expected = shards_in(tmp_path / "out")
    (tmp_path / "out/corpus.json").unlink()
    for name in ("web", "books"):
        os.rename(tmp_path / "out" / name, tmp_path / name)
    steps = ["before the renames", "between them", "before the record"].index(state)
    calls = []

    class Killed(Exception):
        pass

    def kill_after_steps(function):
        def call(*arguments):
            calls.append(arguments)
            if len(calls) > steps:
                raise Killed
            function(*arguments)

        return call

    def write_record(out, record):
        (kill_after_steps if record.complete else lambda real: real)(_write_published)(out, record)

    with monkeypatch.context() as patch:
        patch.setattr("titanlite_corpus.publish.os.rename", kill_after_steps(os.rename))
        patch.setattr("titanlite_corpus.publish._write_published", write_record)
        with pytest.raises(Killed):
            make_corpus(recipe, ONE)
    assert not json.loads((tmp_path / "out/corpus.json").read_text())["complete"]
    make_corpus(recipe, ONE)
    assert shards_in(tmp_path / "out") == expected


@pytest.mark.parametrize("stage", ["read", "tokenise", "shuffle", "shards"])
def test_a_full_disk_is_named_and_nothing_half_written_is_read(write_recipe, tmp_path, stage):
    make_corpus(load_recipe(write_recipe("undisturbed")), ONE)
    recipe = load_recipe(write_recipe())
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(update):
        if update.stage == stage:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))

    try:
        with pytest.raises(DataError, match=f"cannot be written in stage {stage}") as refusal:
            make_corpus(recipe, ONE, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "Free space" in refusal.value.fix and not (tmp_path / "out/web").exists()
    make_corpus(recipe, ONE)
    assert shards_in(tmp_path / "out") == shards_in(tmp_path / "undisturbed")


@pytest.mark.parametrize("text", ["", "x"])
def test_many_short_texts_need_the_memory_of_one_table(text):
    def peak(documents: int) -> int:
        tracemalloc.start()
        rows = (Document(text, f"a.parquet:{n}") for n in range(documents))
        assert sum(table.num_rows for table in _build_tables(rows, "a", 1 << 19)) == documents
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)  # imports and caches
    assert peak(40_000) < 2 * peak(10_000)


def test_what_cannot_be_read_is_refused_or_counted(write_recipe, tmp_path):
    with open(tmp_path / "in/a.jsonl", "a") as file:
        file.write('{"text": broken\n{"text": 7}\n')
    (tmp_path / "in/050.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="050.txt, line 1: the byte 0xff|a.jsonl, line 121"):
        make_corpus(load_recipe(write_recipe()), ONE)
    result = make_corpus(load_recipe(write_recipe(more='[read]\non_error = "skip"')), ONE)
    assert result.stages["read"]["skipped"] == {"not_json": 2, "not_utf8": 1}
    assert result.stages["read"]["documents_out"] == 298
    assert result.stages["read"]["removed"] == {"read.empty": {"documents": 1, "bytes": 0}}


@pytest.mark.parametrize(
    "values, more, problems",
    [
        ({"tokeniser": "x"}, "", ["tokeniser", "tokenizer"]),
        ({"shard_mib": 0}, "[read]\non_error = 1", ["shard_mib", "on_error"]),
        ({}, '[[sources]]\nname = "web"\ninputs = []', ['2 sources have the name "web"', "inputs"]),
        ({}, '[[sources]]\nname = "../x"\ninputs = ["a"]', ['name = "../x"']),
        ({}, '[[sources]]\nname = "x"\ninputs = ["no/such"]', ["no/such: no such file"]),
        ({"tokenizer": "no.model"}, "", ['tokenizer "no.model"']),
        ({"nonsense": 1}, "", ["nonsense = 1: unknown key", "See docs/reference/recipe.md"]),
        ({"bos": True, "validation_share": 0.9}, "", ["validation_share"]),
        # what one section has wrong does not hide what is wrong in others
        (
            {"bos": 1},
            '[shuffle]\nxyz = 1\n[filter]\nrules = ["no", "no2"]',
            [
                "4 problems",
                "1. bos",
                "2. shuffle.xyz",
                '3. filter.rules contains "no"',
            ],
        ),
        (
            {},
            '[filter]\nrules = 1\nsources = ["x"]\n[deduplicate]\nbands = 9999',
            ["3 problems", "filter.rules = 1", '"x"', "9999"],
        ),
        (
            {},
            '[[sources]]\nname = "x"\n[filter]\nrules = ["no"]\nsources = ["y"]',
            ["2 problems", "inputs: is missing", '"no"'],
        ),
        (
            {"tokenizer": "no.model"},
            '[[sources]]\nname = "x"\ninputs = ["no/such"]',
            ["no.model", "no/such"],
        ),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_keys(write_recipe, values, more, problems):
    with pytest.raises(UserError) as refusal:
        make_corpus(load_recipe(write_recipe(more=more, **values)), ONE)
    text = format_error(refusal.value)
    assert all(problem in text for problem in problems), text


def test_text_that_a_tokenizer_refuses_is_shown_with_its_file_and_line(write_recipe, tmp_path):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((chr(n), -3.0) for n in range(32, 127))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "</s>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "in/a.jsonl", ["one", "two", f"{'far ' * 99}before </s> after"])
    recipe = write_recipe(tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"in/a.jsonl:3: .*before </s> after") as refusal:
        make_corpus(load_recipe(recipe), ONE)
    assert len(str(refusal.value)) < 400


def test_a_document_above_the_limit_is_refused_with_the_key_of_a_recipe(write_recipe, tmp_path):
    (tmp_path / "in/000.txt").write_text("a" * (1 << 20) + "a")
    with pytest.raises(DataError, match="000.txt: contains a document of more than 1 MiB") as error:
        make_corpus(load_recipe(write_recipe(more="[read]\ndocument_mib = 1")), ONE)
    assert "read.document_mib" in error.value.fix


@pytest.mark.slow
def test_the_script_makes_goes_on_and_cleans(python, write_recipe, tmp_path):
    recipe = write_recipe()
    command = [python, "scripts/prepare_data.py", "--recipe", str(recipe)]
    done = subprocess.run([*command, "--workers", "2", "--clean"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert b"read.empty 1" in done.stdout and b"web/train" in done.stdout
    text, tokens = (sum(len(t) + more for t in texts(100, 2)) for more in (0, 1))  # EOS
    assert f"bytes per token: books {text / tokens:.2f}, web 0.9" in done.stdout.decode()
    assert not (tmp_path / "out/.work").exists() and (tmp_path / "out/web/train").exists()
    (tmp_path / "in/a.jsonl").write_text("{}")
    refused = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert refused.returncode == 2 and b"--replace" in refused.stderr
    assert b"Traceback" not in refused.stderr


def test_code_that_a_recipe_names_runs_only_if_the_command_line_allows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    marker = tmp_path / "imported"
    code = f"open({str(marker)!r}, 'w').close()\ndef keep(text):\n    return True\n"
    (tmp_path / "code_of_a_stranger.py").write_text(code)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'out = "out"\ntokenizer = "bytes"\n[[sources]]\nname = "a"\ninputs = ["a.txt"]\n'
        '[filter]\nrules = ["os:system", "code_of_a_stranger:keep"]\n'
    )
    with pytest.raises(ConfigError, match="os:system, code_of_a_stranger:keep") as refusal:
        load_recipe(recipe)
    assert "--allow-code" in refusal.value.fix and not marker.exists()
    load_recipe(recipe, allow_code=True)
    assert marker.exists()
