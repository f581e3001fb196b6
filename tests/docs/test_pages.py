"""The pages agree with the code: links, names of keys, files and tests, and generated parts."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import subprocess

import pytest

from conftest import ROOT
from tests.docs.pages import anchors, code_blocks, links, list_pages, prose
from titanlite.config_reference import list_sections
from titanlite.job import read_job
from titanlite.job.config import JOB_PROPERTIES, JobConfig
from titanlite.job.torchtitan_keys import ALWAYS, MOVED
from titanlite.settings import load_config
from titanlite.settings.sources import TRAIN_CONFIGS
from titanlite_corpus.read import CorpusSource
from titanlite_corpus.recipe import Recipe, load_recipe
from titanlite_post.commands.dpo import DPOConfig
from titanlite_post.commands.grpo import GRPOConfig

PAGES = list_pages()
README = ROOT / "README.md"
NAME_TESTS = ("SECURITY.md", "docs/reference/faults.md")  # pages whose rows name their tests
OF_POST = {"train-on-preferences": DPOConfig, "train-on-rewards": GRPOConfig}
ALL_SECTIONS = [s for c in (JobConfig, *OF_POST.values()) for s in list_sections(c)]
KEYS = {key.name for section in ALL_SECTIONS for key in section.keys}
# after the first two, which a TOML cannot have, job properties of checkpoints
PLACEHOLDERS = {"section.key", "job.import", "data.bos", "data.content", "data.phases"}
SECTIONS = {section.name for section in ALL_SECTIONS}
FROM_OTHERS = sorted((ROOT / "docs" / "how-to").glob("from-*.md"))
OF_TORCHTITAN = (
    ROOT / "docs" / "reference" / "torchtitan.md"
)  # lists keys that titanlite does not have


def name_of(page) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_and_anchor_leads_somewhere(page):
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_site_shows_what_is_inside_of_a_list_as_github_does(page):
    """Python-Markdown needs four columns for a table, a list or a code block in a list."""
    assert not re.findall(r"^ {1,3}(?:\||```|[-*] |\d+\. ).*", prose(page), re.M)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_key_on_a_page_exists(page):
    """As --section.key in commands, and as `section.key` in text."""
    if page == OF_TORCHTITAN:
        return
    text = page.read_text("utf-8")
    named = set(re.findall(r"--(\w+\.[\w.]*\w)", text))
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        match = re.match(r"([a-z0-9_]+(?:\.[a-z0-9_]+)+)(?= = |=|$)", code)
        if match and match[1].rpartition(".")[0] in SECTIONS:
            named.add(match[1])
    of_code = {name for name in named if name.endswith((".py", ".toml", ".json", ".jsonl", ".md"))}
    unknown = named - of_code - KEYS - PLACEHOLDERS
    unknown -= {*MOVED, *ALWAYS} if page.name == "CHANGELOG.md" else set()
    assert not unknown, sorted(unknown)


@pytest.mark.parametrize("page", FROM_OTHERS, ids=name_of)
def test_settings_that_replace_those_of_another_trainer_are_accepted(page, tmp_path):
    """Keys in the column `here`, with the value beside them, and whole jobs and recipes."""
    setting = re.compile(r"""`(\w+\.[\w.]+)(?: = "?([^`]+?)"?)?`""")
    named, arguments = set(), []
    for row in re.findall(r"^\| .*$", page.read_text("utf-8"), re.M):
        for key, value in setting.findall(row.split("|")[2]):
            named.add(key)
            arguments += [f"--{key}={value}"] if value else []
    assert not named - KEYS
    for argument in arguments:
        assert not load_config(JobConfig, [argument])[1]
    for block in code_blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
            recipe = "[[sources]]" in block.text
            job = ["--job.config_file", str(tmp_path / block.file)]
            assert load_recipe(tmp_path / block.file) if recipe else read_job(job, 8, here=False)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_on_a_page_exists(page):
    """`folder/file.py` is under titanlite/ or the root, and commands run scripts that exist."""
    if page.name == "CHANGELOG.md":  # names what was moved, too
        return
    text = page.read_text("utf-8")
    new = {block.file for block in code_blocks(page)}
    for path in re.findall(r"`([\w./-]+\.(?:py|sh))`", prose(page)):
        packages = (ROOT / "titanlite", *ROOT.glob("extras/*"))
        places = (ROOT, *packages, ROOT / "extras", ROOT / "scripts")
        known = any((place / path).exists() for place in places) or "/" not in path
        assert known or path in new or f"titanlite/{path}" in new, f"{path}: no such file"
    for path in re.findall(r"\b(scripts/[\w.]+\.(?:py|sh))\b", text):
        assert (ROOT / path).exists(), f"{path}: no such file"
    for name in re.findall(r"--job\.config_file ([\w.-]+)(?!/)\b", text):
        known = name.endswith(".toml") or (TRAIN_CONFIGS / f"{name}.toml").exists()
        assert known, f"--job.config_file {name}: no shipped TOML"


@pytest.mark.parametrize("page", NAME_TESTS)
def test_every_test_that_a_page_names_exists(page):
    text = (ROOT / page).read_text("utf-8")
    named = re.findall(r"((?:extras/\w+/)?tests/[\w/]+\.py)::(\w+)", text)
    assert named
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists() or f"def {test}(" not in (ROOT / file).read_text("utf-8")
    ]
    assert not missing, f"{page} names tests that do not exist: {missing}"


@pytest.mark.parametrize("page", NAME_TESTS)
def test_every_claim_of_a_page_names_its_test(page):
    """Each row of a table whose last column is `test`."""
    rows, is_claim = [], False
    for line in (ROOT / page).read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| "):
            is_claim = False
        elif cells[-1] == "test":
            is_claim = True
        elif is_claim and "---" not in cells:
            rows.append(line)
    assert len(rows) > 15
    assert all("::test_" in row for row in rows), [r for r in rows if "::test_" not in r]


def test_the_configuration_reference_is_generated_from_the_schema():
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text("utf-8")
    assert "| `model.from` |" in text  # which is no field of a dataclass
    reference_page = runpy.run_path(str(ROOT / "docs/_make/write_reference.py"))["reference_page"]
    assert text == reference_page(JobConfig), "run python docs/_make/write_reference.py"
    text = (ROOT / "docs" / "reference" / "recipe.md").read_text("utf-8")
    page = reference_page(Recipe, "Recipe", {"sources": CorpusSource})
    assert text == page, "run python docs/_make/write_reference.py"


@pytest.mark.parametrize("page", OF_POST)
def test_the_guide_of_a_command_has_a_toml_of_it_and_lists_its_keys(page, tmp_path):
    path = ROOT / "docs" / "how-to" / f"{page}.md"
    toml = next(block.text for block in code_blocks(path) if block.language == "toml")
    (tmp_path / "job.toml").write_text(toml)
    config, errors = load_config(OF_POST[page], ["--job.config_file", str(tmp_path / "job.toml")])
    assert not [*errors, *config.find_problems()]
    text = path.read_text("utf-8").partition("prints the keys:")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (`.*?`) \|", text, re.M)
    keys = list_sections(OF_POST[page])[-1].keys
    assert listed == [f"`{key.name.partition('.')[2]}`" for key in keys]


def test_every_key_of_the_configuration_has_a_meaning():
    keys = [key for section in list_sections(JobConfig) for key in section.keys]
    missing = [key.name for key in keys if not key.meaning]
    assert not missing, "write a comment beside the field"


def test_the_page_of_the_checkpoint_format_lists_every_job_property():
    page = (ROOT / "docs" / "reference" / "checkpoint-format.md").read_text("utf-8")
    _, properties = page.split("\n## Job properties\n")
    listed = re.findall(r"`([^`]+)`", properties.split("names them:")[1].partition(".\n")[0])
    assert listed == list(JOB_PROPERTIES)


def test_the_readme_counts_the_lines_of_every_package_within_10_percent():
    script = runpy.run_path(str(ROOT / "docs/_make/write_reference.py"))
    _, table, _ = README.read_text("utf-8").split(script["PACKAGES"])
    counts = {}
    for row in table.splitlines():
        for path in script["links_in"](row):
            counts[path] = int(row.split("|")[-2].replace(",", ""))
    inits = [*ROOT.glob("titanlite/*/__init__.py"), *ROOT.glob("extras/*/__init__.py")]
    packages = {str(path.parent.relative_to(ROOT)) for path in inits}
    assert counts.keys() == packages | {"titanlite/train.py"}
    for path, lines in counts.items():
        real = script["count_lines"](ROOT / path)
        assert abs(lines - real) <= 0.1 * real, f"{path}: {lines} in the README, {real} in truth"


# lines; may only fall, but for a model family in "all" and what it needs in "base"
MAX_WEIGHT = {"path": 6500, "base": 16_580, "all": 36_060}


def test_the_trainer_does_not_grow(capsys):
    """Raise no limit without a reason in the commit. `write_reference.py --count` counts again."""
    script = runpy.run_path(str(ROOT / "docs/_make/write_reference.py"))
    text = README.read_text("utf-8")
    weight = script["weigh"](ROOT, text)._asdict()
    with capsys.disabled():
        print(f"\nlines: {weight}")
    assert all(weight[part] <= limit for part, limit in MAX_WEIGHT.items()), weight
    sentence = text.split(script["WEIGHT"])[1]
    stated = [int(number.replace(",", "")) for number in re.findall(r"[0-9][0-9,]*", sentence)]
    assert stated == pytest.approx(list(weight.values()), rel=0.05)


def test_the_readme_has_at_most_170_lines():
    assert len(README.read_text("utf-8").splitlines()) <= 170


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    pages = {page for page in PAGES if page.is_relative_to(index.parent) and page != index}
    assert pages <= listed, sorted(map(name_of, pages - listed))


@pytest.mark.slow
def test_the_planner_gives_the_answers_of_the_faq(python):
    blocks = code_blocks(ROOT / "docs" / "faq.md")
    for command, answer in zip(blocks[::2], blocks[1::2], strict=True):
        _, *arguments = shlex.split(command.text)
        result = subprocess.run([python, *arguments], cwd=ROOT, capture_output=True, text=True)
        missing = set(answer.text.splitlines()) - set(result.stdout.splitlines())
        assert not missing, f"{command.text}{result.stdout}{result.stderr}"


def test_every_picture_is_small_and_drawn_by_a_script():
    pictures = {path.stem: path for path in (ROOT / "docs" / "pictures").glob("*.png")}
    known = set(re.findall(r'"(\w+)": ', (ROOT / "docs/_make/draw_docs.py").read_text("utf-8")))
    shown_by = {  # picture -> its page, and the command in it
        "report": ("how-to/report-a-run.md", "--screenshot=report.png"),
        "corpus_report": ("how-to/prepare-a-corpus.md", "--screenshot=corpus_report.png"),
        "expert_balance": ("explanation/experts.md", "python -m benchmarks.experts balance"),
    }
    assert pictures.keys() - known == {"quickstart", *shown_by}  # the first of quickstart.sh
    for page, command in shown_by.values():
        assert command in (ROOT / "docs" / page).read_text("utf-8")
    for path in pictures.values():
        assert path.stat().st_size <= 150_000, path


def test_the_picture_of_the_losses_shows_what_it_claims():
    """Redraw it with `python docs/_make/draw_docs.py losses` when numerics change."""
    measured = json.loads((ROOT / "docs" / "pictures" / "losses.json").read_text("utf-8"))
    reference, *others = measured.values()
    assert len(others) == 7 and len(reference) >= 30
    assert all(curve == pytest.approx(reference, rel=1e-5) for curve in others)


def test_the_tutorial_states_the_rewards_of_its_picture():
    rewards = json.loads((ROOT / "docs" / "pictures" / "rewards.json").read_text("utf-8"))
    page = (ROOT / "docs" / "tutorial" / "base-to-chat.md").read_text("utf-8")
    first, *_, last = rewards.values()
    assert f"from {first:.2f} in the first step to {last:.2f} in the last one" in page


def test_the_picture_of_the_layers_describes_every_package():
    """Redraw it with `python docs/_make/draw_docs.py layers` when a package is added."""
    tree = ast.parse((ROOT / "docs/_make/pictures/diagrams.py").read_text("utf-8"))
    purpose = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PURPOSE"
    )
    inits = (ROOT / "titanlite").glob("[a-z]*/__init__.py")
    packages = {path.parent.name for path in inits}
    packages |= {path.stem for path in (ROOT / "titanlite").glob("[a-z]*.py")}
    assert packages <= ast.literal_eval(purpose).keys()
