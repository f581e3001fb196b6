"""Invalid settings are refused, all together, each with a fix."""

from __future__ import annotations

import datetime
import os
import pickle
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import pytest

from titanlite.config_reference import help_text, list_sections
from titanlite.errors import ConfigError, UserErrors
from titanlite.files import parse_toml
from titanlite.optim import OptimizerConfig
from titanlite.settings import (
    KeyedSection,
    Positive,
    Range,
    all_keys,
    build_dataclass,
    load_config,
    merge_tables,
    raise_together,
    read_toml,
    sources,
    to_toml,
)
from titanlite.settings.output import CommandLineText


@dataclass(frozen=True)
class Source:
    name: str
    weight: Annotated[float, Range(0)] = 1.0


@dataclass(frozen=True)
class TrainSection:
    """[train] Optimisation."""

    steps: Positive = 10  # number of
    # updates
    rate: Annotated[float, Range(0, 1, also=(-1,))] = 0.5
    mode: Literal["fast", "exact"] = "exact"  # kind of computation
    limit: int | None = None
    kind: Literal["a", "b"] | None = None
    names: list[str] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    on: bool = False
    text: str = ""


@dataclass(frozen=True)
class JobSection:
    config_file: str | None = None


@dataclass(frozen=True)
class NestedSection:
    train: TrainSection = field(default_factory=TrainSection)


@dataclass(frozen=True)
class Schema:
    job: JobSection = field(default_factory=JobSection)
    train: TrainSection = field(default_factory=TrainSection)
    nested: NestedSection = field(default_factory=NestedSection)


@dataclass(frozen=True, kw_only=True)
class RequiredKey(Schema):
    needed: int


def problems_of(**train) -> list[str]:
    return [str(problem) for problem in build_dataclass(Schema, {"train": train})[1]]


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("steps", "10", "must be an integer of at least 1"),
        ("steps", True, "must be an integer"),
        ("steps", 1.0, "must be an integer"),
        ("steps", 0, "must be at least 1"),
        ("steps", 10**30, "at most 64 bits"),
        pytest.param("rate", 16**5000, "at most 64 bits", id="huge"),
        pytest.param("stepz", 16**5000, "unknown key", id="huge and unknown"),
        ("steps", datetime.date(2020, 1, 1), "must be an integer"),
        ("rate", 2, "must be at least 0 and at most 1, or -1"),
        ("rate", float("nan"), "must be a number"),
        ("rate", float("inf"), "must be a number"),
        ("rate", True, "must be a number"),
        ("mode", "fsat", 'Did you mean "fast"'),
        ("mode", "EXACT", 'Did you mean "exact"'),
        ("mode", True, "must be"),
        ("limit", "x", "must be an integer or none"),
        ("kind", "x", 'must be "a" | "b" or none'),
        ("names", "a", "must be a list"),
        ("names", ["a", 1], "entry 1 (1)"),
        ("sources", [{"name": "a", "weigth": 1}], "Did you mean weight"),
        ("sources", [{"weight": 1}], "name: is missing"),
        ("sources", [{"name": "a", "weight": -1}], "at least 0"),
        ("on", 1, "must be true or false"),
        ("text", 3, "must be a string"),
        ("text", 10**30, "must be a string"),
        ("stepz", 3, "Did you mean train.steps"),
        ("config_file", "a", "Did you mean job.config_file"),  # the same name in another section
    ],
)
def test_an_invalid_value_is_refused_with_the_allowed_values(key, value, message):
    (problem,) = problems_of(**{key: value})
    assert message in problem and f"train.{key}" in problem


def test_all_problems_of_all_entries_are_reported():
    sources = [{"name": "a", "weigth": 1, "weight": -1}, {"name": 3}, 5]
    _, problems = build_dataclass(Schema, {"train": {"sources": sources, "names": ["a", 1, 2]}})
    assert sorted(
        str(problem).partition(" must")[0].partition(" unknown")[0] for problem in problems
    ) == [
        "train.names, entry 1 (1):",
        "train.names, entry 2 (2):",
        "train.sources, entry 0, weight = -1:",
        "train.sources, entry 0, weigth = 1:",
        "train.sources, entry 1, name = 3:",
        "train.sources, entry 2 (5):",
    ]


@pytest.mark.parametrize("value", [-1, 1, 0.25])
def test_an_integer_is_accepted_for_a_float(value):
    schema, problems = build_dataclass(Schema, {"train": {"rate": value}})
    assert not problems and schema.train.rate == value and type(schema.train.rate) is float


def test_all_problems_are_reported_together_and_valid_keys_are_used():
    table = {
        "train": {"steps": 0, "mode": "x", "limit": 3},
        "trian": {},
        "nested": {"train": {"o": 1}},
    }
    job, problems = build_dataclass(Schema, table)
    assert len(problems) == 4 and job.train.limit == 3 and job.train.steps == 10
    with pytest.raises(UserErrors) as raised:
        raise_together(problems)
    assert len(raised.value.problems) == 4
    assert any("[trian]" in str(p) and "Did you mean train" in str(p) for p in problems)


def test_a_key_that_moved_is_refused_with_its_replacement():
    moved = {"train.speed": "is now train.rate.", "old": "was removed."}
    _, problems = build_dataclass(Schema, {"train": {"speed": 1}, "old": {"a": 1}}, moved)
    assert [str(p) for p in problems] == [
        "train.speed = 1: is now train.rate.",
        "[old]: was removed.",
    ]


def test_the_command_line_overrides_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[train]\nsteps = 3\nmode = "fast"\n')
    argv = ["--job.config_file", str(path), "--train.steps=5", "--train.on", "true"]
    argv += ["--train.names", "a,b", "--train.limit", "none", "--nested.train.rate", "-1"]
    job, problems = load_config(Schema, argv)
    assert not problems
    assert (job.train.steps, job.train.mode, job.train.on) == (5, "fast", True)
    assert job.train.names == ["a", "b"] and job.train.limit is None and job.nested.train.rate == -1


@pytest.mark.parametrize(
    "argv, message",
    [
        (["train.steps", "3"], "expected --section.key"),
        (["run.toml"], "Use --job.config_file run.toml"),
        (["--train.on"], "has no value"),
        (["--train.on", "yes"], "must be true or false"),
        (["--train.names", "[1"], "written as in TOML"),
        (["--train.names", "[" * 100_000], "written as in TOML"),
        (["--train.steps", "three"], "must be an integer"),
        (["--nonsense", "1"], "unknown key"),
        (["--train.on.x", "1", "--train.on", "true"], "one key has a value and keys"),
        (["--train.on", "true", "--train.on.x", "1"], "one key has a value and keys"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported(argv, message):
    assert any(message in problem for problem in load_problems(argv))


def test_an_unknown_key_of_a_table_in_a_list_is_reported_with_the_allowed_ones():
    _, (error,) = build_dataclass(OptimizerConfig, {"groups": [{"match": ["*"], "lr": 0.5}]})
    assert "lr = 0.5: unknown key. Allowed keys: match, lr_factor, name," in str(error)


def load_problems(argv: list[str]) -> list[str]:
    try:
        return [str(problem) for problem in load_config(RequiredKey, argv)[1]]
    except ConfigError as error:
        return [str(error)]
    except UserErrors as errors:
        return [str(problem) for problem in errors.problems]


def test_a_config_file_that_cannot_be_read_is_the_only_problem_reported(tmp_path):
    """Else every setting without a default would be reported as missing too."""
    assert any("needed: is missing" in problem for problem in load_problems([]))
    (problem,) = load_problems(["--job.config_file", "nowhere.toml", "--train.stepz", "1"])
    assert "nowhere.toml" in problem and "cannot be read (No such file" in problem
    assert "Names: debug_model, " in problem
    (problem,) = load_problems(["nowhere.toml"])
    assert "Use --job.config_file nowhere.toml" in problem
    (tmp_path / "run.toml").write_text("a =")
    (problem,) = load_problems(["--job.config_file", str(tmp_path / "run.toml")])
    assert problem.startswith("job.config_file = ") and "not valid TOML" in problem


def test_an_error_in_an_included_file_names_both_files(tmp_path):
    top, base = tmp_path / "top.toml", tmp_path / "base.toml"
    top.write_text('include = ["base.toml"]')
    for content, reason in ((None, "cannot be read (No such file"), ("a =", "not valid TOML")):
        if content is not None:
            base.write_text(content)
        (problem,) = load_problems(["--job.config_file", str(top)])
        assert problem.startswith(f'include = "{base}" ({top}): {reason}')


def test_a_list_of_tables_can_be_given_on_the_command_line():
    job, problems = load_config(Schema, ["--train.sources", '[{ name = "a", weight = 2 }]'])
    assert not problems and job.train.sources == [Source("a", 2.0)]


def test_a_file_overrides_what_it_includes_and_circular_includes_are_refused(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.toml").write_text("[train]\nsteps = 1\nrate = 0.1\n")
    (tmp_path / "sub" / "more.toml").write_text('include = ["../base.toml"]\n[train]\nsteps = 2\n')
    top = tmp_path / "top.toml"
    top.write_text('include = ["base.toml", "sub/more.toml"]\n[train]\ntext = "x"\n')
    assert read_toml(top) == {"train": {"steps": 2, "rate": 0.1, "text": "x"}}
    (tmp_path / "base.toml").write_text('include = ["top.toml"]\n')
    with pytest.raises(ConfigError, match="circular include: top.toml -> base.toml -> top.toml"):
        read_toml(top)


def test_a_shipped_toml_is_found_by_its_name_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = read_toml("llama3_8b")
    assert shipped["model"]["flavor"] == "8B" and "data" in shipped  # of what it includes
    top = tmp_path / "top.toml"
    top.write_text('include = ["llama3_8b"]\n[model]\nn_layers = 2\n')
    assert read_toml(top)["model"] == {**shipped["model"], "n_layers": 2}
    (tmp_path / "llama3_8b").write_text("[train]\nsteps = 7\n")
    assert read_toml("llama3_8b") == {"train": {"steps": 7}}


def test_a_file_that_is_included_repeatedly_is_read_once(tmp_path, monkeypatch):
    """When each file includes the next one twice, the work must not double with every file."""
    for number in range(40):
        text = f'include = ["{number + 1}.toml", "{number + 1}.toml"]\n'
        (tmp_path / f"{number}.toml").write_text(text)
    (tmp_path / "40.toml").write_text("[train]\nsteps = 7\n")
    parsed: list[str] = []
    parse = sources.parse_toml
    monkeypatch.setattr(sources, "parse_toml", lambda text: parsed.append(text) or parse(text))
    assert read_toml(tmp_path / "0.toml") == {"train": {"steps": 7}}
    assert len(parsed) == 41
    (tmp_path / "41.toml").write_text(f"include = {['40.toml'] * 101}\n")
    with pytest.raises(ConfigError, match="more than 100 includes"):
        read_toml(tmp_path / "41.toml")


@pytest.mark.parametrize(
    "content, message",
    [
        pytest.param("a = " + "[" * 100_000, "nested too deeply", id="100,000 levels"),
        ("a" + ".a" * 90 + " = 1" + "\n[" + "b." * 101 + "b]", "more than 100 parts"),
        pytest.param(
            ".".join(["'a b'"] * 6000) + " = 1",
            "more than 100 parts",
            id="a key that needed 150 MB",
        ),
        ("a = " + "[" * 101 + "]" * 101, "nested too deeply"),
        ('include = ["a\\u0000b"]', "must be a list of paths"),
        (None, "not a regular file"),
        pytest.param("#" * (5 << 20), "more than 4,194,304 bytes", id="5 MiB"),
    ],
)
def test_a_toml_that_would_block_or_exhaust_the_reader_is_refused(tmp_path, content, message):
    path = tmp_path / "run.toml"
    os.mkfifo(path) if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_toml(path)


def test_invalid_toml_is_reported_with_file_and_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = \n")
    with pytest.raises(ConfigError, match="run.toml.*line 2"):
        read_toml(path)


def test_the_written_config_reads_back_as_the_same_job(tmp_path):
    text = "a\nb\\c\x01\x7f"  # TOML escapes DEL, JSON does not
    train = {"names": ["é", 'quo"te'], "rate": 1, "sources": [{"name": "a"}], "text": text}
    job, problems = build_dataclass(Schema, {"train": train})
    assert not problems
    path = tmp_path / "written.toml"
    path.write_text(to_toml(job), encoding="utf-8")
    assert build_dataclass(Schema, read_toml(path)) == (job, [])


@pytest.mark.parametrize("argv", [["--train.text=a\udcff"], ["--train.text", "a\udcff"]])
def test_a_value_that_is_not_utf8_is_refused_before_the_run_builds_anything(argv):
    """Python reads bytes of the command line that are not UTF-8 as surrogates."""
    table, problems = sources.parse_overrides(argv)
    assert not table
    assert ["the value of --train.text is not UTF-8" in str(p) for p in problems] == [True]


def test_merging_replaces_lists_and_merges_tables():
    assert merge_tables({"a": {"b": 1, "c": [1]}}, {"a": {"c": [2]}}) == {"a": {"b": 1, "c": [2]}}


def test_help_lists_every_key_with_its_comment():
    text = "\n".join(help_text(Schema))
    assert all(f"--{key} " in text for key in all_keys(Schema))
    assert "number of updates" in text and '"fast" | "exact"' in text
    with pytest.raises(ConfigError, match=r"--help tran: there is no section \[tran\]"):
        list(help_text(Schema, ["tran"]))
    of_train = "\n".join(help_text(Schema, ["train"]))
    assert all((f"--{key} " in of_train) == key.startswith("train.") for key in all_keys(Schema))
    section = list_sections(Schema)[1]
    assert section.summary == "Optimisation." and section.keys[1].meaning == ""


@dataclass(frozen=True)
class Square:
    side: Annotated[int, Range(1), "length of a side"] = 1


@dataclass(frozen=True)
class Circle:
    radius: Annotated[float, Range(0), "half of the width"] = 1.0


@dataclass(frozen=True)
class ShapeSection(KeyedSection):
    """[shape] What is drawn."""

    KEY: ClassVar[str] = "kind"
    UNSET: ClassVar[str] = "1"
    kind: Literal["square", "circle"] = "square"
    colour: str = "red"

    @classmethod
    def choices(cls):
        return {"square": Square, "circle": Circle}


@dataclass(frozen=True)
class Drawing:
    shape: ShapeSection = field(default_factory=ShapeSection)


def draw(**shape):
    drawing, problems = build_dataclass(Drawing, {"shape": shape})
    return drawing.shape, [str(problem) for problem in problems]


def test_a_section_has_the_keys_of_the_value_of_its_key():
    shape, problems = draw(kind=CommandLineText("circle"), radius=2, colour="blue")
    assert not problems and (shape.kind, shape.radius, shape.colour) == ("circle", 2.0, "blue")
    assert draw()[0].side is None  # the default kind
    assert pickle.loads(pickle.dumps(shape)) == shape
    assert parse_toml(to_toml(Drawing(shape))) == {
        "shape": {"kind": "circle", "radius": 2.0, "colour": "blue"}
    }


def test_a_key_of_another_value_is_refused_with_the_values_that_have_it():
    _, (problem,) = draw(side=2, kind="circle")
    assert problem == (
        'shape.side = 2: is not a key of shape.kind = "circle". Remove it; this kind has radius.'
        " Those with side: square."
    )
    assert "must be at least 0" in draw(kind="circle", radius=-1)[1][0]
    assert "Did you mean shape.radius?" in draw(kind="circle", radus=1)[1][0]
    assert len(draw(kind="oval", side=2)[1]) == 1  # the kind: its keys are not known
    assert len(draw(kind=["oval"], radius=2)[1]) == 1


def test_help_shows_further_keys_with_their_value():
    text = "\n".join(help_text(Drawing, ["shape"]))
    assert '[shape] with kind = "circle"' in text
    assert "--shape.radius  (a number of at least 0; default 1)\n      half of the width" in text
    assert {"shape.side", "shape.radius"} <= set(all_keys(Drawing))
