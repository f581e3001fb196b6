"""The recipe of a corpus: a TOML file, read into dataclasses; every problem is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated

from titanlite.errors import ConfigError
from titanlite.settings import Positive, Range, build_dataclass, raise_together, read_toml
from titanlite_corpus.deduplicate import DeduplicateConfig, check_deduplicate
from titanlite_corpus.filters import FilterConfig, check_filter
from titanlite_corpus.packing.stage import PackConfig
from titanlite_corpus.read import CorpusSource, ReadConfig
from titanlite_corpus.shuffle import ShuffleConfig

WORK = ".work"  # folder of unfinished and reusable work, in `out`
_KEY_LIST = "docs/reference/recipe.md"


@dataclass(frozen=True)
class Recipe:
    """What a corpus is made of, and how. A stage is left out unless the recipe has its section."""

    out: str  # folder that gets a folder of shards for each source
    tokenizer: str  # a file of tiktoken ranks, a tokenizer.json, or "bytes"
    sources: list[CorpusSource]  # [[sources]]: in the order of the corpus
    validation_share: Annotated[float, Range(0, 0.5)] = 0.01
    # fraction of the documents that goes to validation, chosen by a hash of the text: of few
    # documents it varies (0.05 of 200 can be 4 or 19)
    bos: bool = False  # begin each document with the tokenizer's BOS
    shard_mib: Positive = 256  # size of a shard; a worker needs about 4 times as much memory
    read: ReadConfig = field(default_factory=ReadConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    deduplicate: DeduplicateConfig = field(default_factory=DeduplicateConfig)
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    pack: PackConfig = field(default_factory=PackConfig)


@dataclass(frozen=True)
class RecipeFile:
    """A recipe, and the sections that its file has."""

    recipe: Recipe
    sections: frozenset[str]

    @property
    def work(self) -> Path:
        """The folder of all work."""
        return Path(self.recipe.out, WORK)


def load_recipe(path: str | Path, allow_code: bool = False) -> RecipeFile:
    """Read a recipe; raises ConfigError with every problem.

    Without `allow_code`, functions of `filter.rules` are refused, and their modules not imported.
    """
    table = read_toml(path, key="--recipe", shipped=Path(__file__).with_name("recipes"))
    recipe, refused = build_dataclass(Recipe, table, key_list=_KEY_LIST)
    sections = {f.name for f in fields(recipe) if is_dataclass(getattr(recipe, f.name))}
    file = RecipeFile(recipe, frozenset(sections & table.keys()))
    refused_keys = {key for problem in refused for key in problem.keys}
    # A refused key has its default value now, so further problems of that key mean nothing.
    problems = [p for p in _check_stages(file, allow_code) if not refused_keys.intersection(p.keys)]
    raise_together([*refused, *problems])
    return file


def _check_stages(file: RecipeFile, allow_code: bool) -> list[ConfigError]:
    """Problems that the types of the settings do not exclude."""
    recipe, sources = file.recipe, file.recipe.sources
    problems = [] if sources is None else _check_sources(sources)  # None if they were refused
    if "filter" in file.sections:
        problems += check_filter(recipe.filter, allow_code)
        if sources is not None:
            names = {source.name for source in sources}
            problems += _check_filtered_sources(recipe.filter, names)
    if "deduplicate" in file.sections:
        problems += check_deduplicate(recipe.deduplicate)
    return [*problems, *_check_chats(file, sources or [])]


def _check_filtered_sources(config: FilterConfig, known: set[str]) -> list[ConfigError]:
    return [
        ConfigError(
            f'filter.sources: "{name}" is not the name of a source.',
            fix=f"Sources are {', '.join(sorted(known))}.",
        )
        for name in config.sources
        if name not in known
    ]


def _check_chats(file: RecipeFile, sources: Sequence[CorpusSource]) -> list[ConfigError]:
    """What sources of conversations need, and exclude."""
    problems: list[ConfigError] = []
    for source in (s for s in sources if s.kind != "text"):
        label = f'sources: "{source.name}" has kind = "{source.kind}"'
        if file.recipe.pack.mode != "best_fit":
            problems.append(
                ConfigError(
                    f"{label}, but conversations cannot be concatenated: labels outside of the"
                    " answers are marked in packed windows only.",
                    fix='Set pack.mode = "best_fit" and pack.seq_len = that of the run.',
                )
            )
        for section in sorted({"filter", "deduplicate"} & file.sections):
            problems.append(
                ConfigError(
                    f"{label}, and [{section}] is for text.",
                    fix="Make conversations with a recipe of their own.",
                )
            )
    return problems


def _check_sources(sources: Sequence[CorpusSource]) -> list[ConfigError]:
    problems: list[ConfigError] = []
    if not sources:
        fix = "Add [[sources]] with inputs."
        problems.append(ConfigError("sources: is empty.", fix=fix))
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            problems.append(ConfigError(f'sources: {count} sources have the name "{name}".'))
        if not name or name.startswith(".") or "/" in name or "\\" in name:
            problems.append(
                ConfigError(
                    f'sources: name = "{name}": is the name of a folder in `out`.',
                    fix='Use a name such as "web".',
                )
            )
    for source in sources:
        if not source.inputs:
            problems.append(ConfigError(f'sources: "{source.name}" has no inputs.'))
    return problems
