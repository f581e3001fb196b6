"""Regenerate what the documentation copies from the code: python docs/_make/write_reference.py

- docs/reference/configuration.md, from the schema of the configuration
- docs/reference/recipe.md, from the schema of a recipe of a corpus
- the line counts in README.md
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from titanlite.config_reference import reference_page
from titanlite.job import JobConfig
from titanlite_corpus.read import CorpusSource
from titanlite_corpus.recipe import Recipe

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "docs" / "reference" / "configuration.md"
RECIPE = ROOT / "docs" / "reference" / "recipe.md"
README = ROOT / "README.md"
# each is before and after a part of the README
WEIGHT, PATH, PACKAGES = "<!-- weight -->", "<!-- path -->", "<!-- packages -->"
OPTIONS = [  # of the trainer, in titanlite/: what a job has only if its TOML, a URL or a GPU asks,
    # and what watches a run of several ranks
    *("guard", "meters", "generate.py", "config_reference.py", "models/mup.py", "optim/mup.py"),
    *("job/option_checks.py", "job/torchtitan_keys.py", "training/pipeline_engine.py"),
    *("training/validation.py", "metrics/profiler.py", "metrics/services.py"),
    *("models/deepseek_v3.py", "models/gpt2.py", "models/mistral.py", "models/mixtral.py"),
    *("models/olmo2.py", "models/qwen3.py", "models/qwen3_moe.py", "models/config_json.py"),
    *("models/load_balancing.py", "models/moe.py", "models/router.py"),
    *("kernels/documents.py", "kernels/flash.py", "kernels/grouped.py"),
    *("parallelize/context.py", "parallelize/context_attention.py"),
    *("parallelize/context_tiles.py", "parallelize/kv_exchange.py", "parallelize/expert.py"),
    *("parallelize/token_exchange.py", "parallelize/float8.py", "parallelize/pipeline.py"),
    *("parallelize/pipeline_plan.py", "parallelize/schedule.py", "parallelize/tied.py"),
    *("parallelize/stage_partition.py", "parallelize/activation_offload.py"),
    *("optim/adafactor.py", "optim/elementwise.py", "optim/muon.py", "optim/soap.py"),
    *("optim/owned_matrices.py", "optim/shards.py", "optim/in_backward.py"),
    *("optim/adaptive_clip.py", "optim/loss_scale.py", "optim/fp32_vectors.py"),
    *("optim/low_memory.py", "data/bpe.py", "data/lanes.py", "data/packed.py"),
    *("data/parquet_text.py", "data/remote_shards.py", "data/text.py", "data/text_files.py"),
    *("data/text_source.py", "data/text_units.py", "data/tokenizer_definition.py"),
    *("data/tokenizer_json.py", "data/token_bytes.py", "data/dump.py", "data/urls.py"),
    "data/validation_set.py",
    *("checkpoint/convert.py", "checkpoint/huggingface.py", "checkpoint/huggingface_export.py"),
    *("checkpoint/saved_model.py", "runtime/remote_lease.py", "runtime/watchdog.py"),
    *("runtime/heartbeat.py", "runtime/diagnosis.py", "distributed/flight_recorder.py"),
    *("distributed/host_memory.py", "distributed/time_limit.py", "distributed/error_report.py"),
]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    pages = {
        CONFIGURATION: reference_page(JobConfig),
        RECIPE: reference_page(Recipe, "Recipe", {"sources": CorpusSource}),
        README: update_line_counts(ROOT, README.read_text("utf-8")),
    }
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")


def update_line_counts(root: Path, text: str) -> str:
    """The README with new line counts: of the path, of the whole, and of each package."""
    for marker, digits in ((PACKAGES, -1), (PATH, 0)):
        before, table, after = text.split(marker)
        rows = [_update_row(root, row, digits) for row in table.splitlines(keepends=True)]
        text = f"{before}{marker}{''.join(rows)}{marker}{after}"
    numbers = iter(f"{number:,}" for number in weigh(root, text))
    before, sentence, after = text.split(WEIGHT)
    sentence = re.sub(r"[0-9][0-9,]*", lambda _: next(numbers), sentence)
    return f"{before}{WEIGHT}{sentence}{WEIGHT}{after}"


class Weight(NamedTuple):
    """Lines of Python of the trainer."""

    path: int  # from a TOML to updated weights, as the README lists it
    files: int  # of the path
    base: int  # titanlite/ without OPTIONS
    all: int  # titanlite/


def weigh(root: Path, readme: str) -> Weight:
    """Count the lines of the trainer."""
    path = [root / link for row in readme.split(PATH)[1].splitlines() for link in links_in(row)]
    whole = count_lines(root / "titanlite")
    options = sum(count_lines(root / "titanlite" / option) for option in OPTIONS)
    return Weight(sum(map(count_lines, path)), len(path), whole - options, whole)


def _update_row(root: Path, row: str, digits: int) -> str:
    cells = row.rstrip("\n").split("|")
    if not (links := links_in(row)):
        return row
    cells[-2] = f" {round(sum(count_lines(root / link) for link in links), digits):,} "
    return "|".join(cells) + "\n"


def links_in(row: str) -> list[str]:
    """The paths that the links of a table row lead to."""
    return re.findall(r"\]\(([^)]+)\)", row)


def count_lines(path: Path) -> int:
    """Lines of a Python file, or of all Python files of a folder."""
    files = [path] if path.is_file() else list(path.rglob("*.py"))
    files = [file for file in files if "tests" not in file.parts]
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


if __name__ == "__main__":
    main()
