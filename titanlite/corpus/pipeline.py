"""Make a corpus from a recipe: plan the tasks of all stages, run them, publish the shards.

How many shards there are follows from the tokens of the stage before, so the plan is made in steps.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from titanlite.corpus.engine import LocalEngine, TaskEngine
from titanlite.corpus.prepare import TRAIN, VALIDATION
from titanlite.corpus.publish import PublishedCorpus, find_published, publish
from titanlite.corpus.read import CorpusSource, plan_reading
from titanlite.corpus.recipe import Recipe, RecipeFile
from titanlite.corpus.shuffle import plan_ordered_shards, plan_shuffle, plan_shuffled_shards
from titanlite.corpus.task import (
    Counts,
    Task,
    TaskProgress,
    WorkFolder,
    no_progress,
    readable_disk_errors,
)
from titanlite.corpus.tokenise import plan_tokenising
from titanlite.data.manifest import ShardRecord
from titanlite.data.shards import id_type_of
from titanlite.data.tokenizer import Tokenizer, open_tokenizer
from titanlite.errors import ConfigError, DataError, UserError
from titanlite.log import logger
from titanlite.settings import raise_together

MIB = 1 << 20
_FORMAT = 1  # part of every plan; increase it when the shards change


@dataclass(frozen=True)
class CorpusResult:
    """What `make_corpus` did."""

    out: Path
    published: PublishedCorpus
    seconds: float
    stages: dict[str, Counts] = field(default_factory=dict)  # of this run; empty: nothing to do
    tasks: int = 0
    reused_tasks: int = 0


@dataclass(frozen=True)
class _Source:
    """A source, and its tasks of one stage."""

    source: CorpusSource
    tasks: list[Task]


def make_corpus(
    file: RecipeFile,
    engine: TaskEngine | None = None,
    progress: TaskProgress = no_progress,
    replace_other: bool = False,
) -> CorpusResult:
    """Make the corpus of a recipe, or go on where a run was stopped; raises UserError.

    A corpus in `out` that another recipe made is refused unless `replace_other`.
    """
    started, recipe, out = time.monotonic(), file.recipe, Path(file.recipe.out)
    tokenizer = _open_tokenizer(recipe)
    sources = _plan_reading(recipe)
    plan = _digest([_FORMAT, _describe_stages(file, tokenizer), *map(_keys, sources)])
    with readable_disk_errors(out):
        names = [source.name for source in recipe.sources]
        if published := find_published(out, plan, names, replace_other):
            return CorpusResult(out, published, time.monotonic() - started)
        with WorkFolder(file.work, engine or LocalEngine(), progress) as run:
            sources = _run_document_stages(file, sources, run)
            shards = _make_shards(file, sources, tokenizer, run)
            published = publish(out, file.work, plan, shards, (tokenizer, recipe.bos))
            run.remove_other_work()
    seconds = time.monotonic() - started
    return CorpusResult(out, published, seconds, run.counts, len(run.tasks), run.reused_tasks)


def _open_tokenizer(recipe: Recipe) -> Tokenizer:
    tokenizer = open_tokenizer(recipe.tokenizer)
    if recipe.bos and not tokenizer.has_bos:
        raise ConfigError(
            f'bos = true, but the tokenizer "{tokenizer.name}" has no BOS of its own, only an EOS.',
            fix="Leave it out; each document then follows the EOS of the one before.",
        )
    return tokenizer


def _plan_reading(recipe: Recipe) -> list[_Source]:
    """The read tasks of all sources; raises the problems of all sources together."""
    sources: list[_Source] = []
    problems: list[UserError] = []
    for source in recipe.sources:
        try:
            sources.append(_Source(source, plan_reading(source, recipe.read)))
        except UserError as error:
            problems.append(error)
    raise_together(problems)
    return sources


def _describe_stages(file: RecipeFile, tokenizer: Tokenizer) -> dict:
    """All that the shards depend on, besides what is read."""
    recipe = file.recipe
    values: dict = {section: asdict(getattr(recipe, section)) for section in file.sections}
    values |= {"tokenizer": tokenizer.fingerprint, "bos": recipe.bos}
    values |= {"validation_share": recipe.validation_share, "shard_mib": recipe.shard_mib}
    return values


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _keys(source: _Source) -> list[str]:
    return [source.source.name, *(task.key for task in source.tasks)]


# --- stages --------------------------------------------------------------------------------------


def _run_document_stages(
    file: RecipeFile, sources: list[_Source], run: WorkFolder
) -> list[_Source]:
    """Run the stages whose results are tables; returns the tasks of the last one."""
    run([task for source in sources for task in source.tasks])
    return sources


def _make_shards(
    file: RecipeFile, sources: list[_Source], tokenizer: Tokenizer, run: WorkFolder
) -> dict[tuple[str, str], list[tuple[Path, ShardRecord]]]:
    """Run the stages whose results are token ids; returns the shards by (source, side)."""
    recipe = file.recipe
    sources = [
        replace(s, tasks=plan_tokenising(s.tasks, tokenizer, recipe.validation_share, recipe.bos))
        for s in sources
    ]
    run([task for source in sources for task in source.tasks])
    chunks = sources
    if "shuffle" in file.sections:
        chunks = [
            replace(s, tasks=plan_shuffle(s.tasks, recipe.shuffle, tokenizer.vocab_size))
            for s in sources
        ]
        run([task for source in chunks for task in source.tasks])
    plans: dict[tuple[str, str], list[Task]] = {}
    for source, sorted_source in zip(sources, chunks, strict=True):
        for side in (TRAIN, VALIDATION):
            plan = _plan_shards(file, source, sorted_source, (side, tokenizer.vocab_size), run)
            if plan:
                plans[source.source.name, side] = plan
    run([task for tasks in plans.values() for task in tasks])
    return {
        place: [(run.path / task.key, _shard_record(run.counts_of(task))) for task in tasks]
        for place, tasks in plans.items()
    }


def _plan_shards(
    file: RecipeFile, tokenised: _Source, chunks: _Source, side_and_size: tuple[str, int], run
) -> list[Task]:
    """Tasks of the shards of one side of a source; none if it has no documents."""
    (side, vocab_size), name = side_and_size, tokenised.source.name
    counts = [run.counts_of(task)["sides"].get(side, {}) for task in tokenised.tasks]
    sizes = [count.get("tokens", 0) for count in counts]
    if not sum(sizes):
        _report_empty(name, side, file.recipe.validation_share)
        return []
    id_bytes = id_type_of(vocab_size).itemsize
    shards = -(-sum(sizes) * id_bytes // (file.recipe.shard_mib * MIB))
    if "shuffle" in file.sections:
        return plan_shuffled_shards(chunks.tasks, side, shards, vocab_size)
    return plan_ordered_shards(chunks.tasks, sizes, side, shards, vocab_size)


def _report_empty(name: str, side: str, validation_share: float) -> None:
    if side == TRAIN:
        raise DataError(
            f'sources: "{name}" has no documents for training.',
            fix="Give inputs that contain text, or filters that leave some.",
        )
    if validation_share > 0:
        logger.warning(
            'sources: "%s" has no documents for validation: validation_share = %g of few documents',
            name,
            validation_share,
        )


def _shard_record(counts: Counts) -> ShardRecord:
    return ShardRecord(**counts["shard"])
