"""Make a corpus from a recipe: plan the tasks of all stages, run them, publish the shards.

How many shards there are follows from the tokens of the stage before, so the plan is made in steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from titanlite.data.manifest import ShardRecord
from titanlite.data.open_tokenizer import open_tokenizer
from titanlite.data.shards import id_type_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import ConfigError, DataError, UserError
from titanlite.log import logger
from titanlite.settings import raise_together
from titanlite_corpus.chat.encode import ENTRY_RANGE, ChatEncoder
from titanlite_corpus.chat.template import ChatTemplate, open_chat_template
from titanlite_corpus.counts import merge_counts
from titanlite_corpus.deduplicate import deduplicate, hash_benchmark_files
from titanlite_corpus.engine import LocalEngine, TaskEngine
from titanlite_corpus.filters import filter_arguments, filter_documents
from titanlite_corpus.hashing import hash_json
from titanlite_corpus.packing.stage import plan_counting, plan_packing
from titanlite_corpus.packing.windows import PackSettings
from titanlite_corpus.publish import PublishedCorpus, SideShards, find_published, publish
from titanlite_corpus.read import CorpusSource, count_unread, plan_reading
from titanlite_corpus.recipe import Recipe, RecipeFile
from titanlite_corpus.shuffle import plan_ordered_shards, plan_shuffle, plan_shuffled_shards
from titanlite_corpus.sides import TRAIN, VALIDATION
from titanlite_corpus.task import (
    Counts,
    Task,
    TaskProgress,
    WorkFolder,
    no_progress,
    readable_disk_errors,
)
from titanlite_corpus.tokenise import TokeniseSettings, plan_tokenising

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
    """A source, and its tasks in one stage."""

    source: CorpusSource
    tasks: list[Task]
    template: ChatTemplate | None = None  # of a source of chats
    unread: list[Path] = field(default_factory=list)  # files in its folders that are not read

    def id_range(self, tokenizer: Tokenizer) -> int:
        """Upper bound (exclusive) of the ids, or of the entries of chats, before packing."""
        return tokenizer.vocab_size if self.template is None else ENTRY_RANGE

    @property
    def settings_hash(self) -> str:
        """Hash of what its ids depend on, besides its tables and the recipe."""
        keys = f"{self.source.kind} {self.source.answers} "
        return keys + self.template.fingerprint if self.template else ""


def make_corpus(
    file: RecipeFile,
    engine: TaskEngine | None = None,
    progress: TaskProgress = no_progress,
    replace_other: bool = False,
    report: Callable[[dict[str, Counts]], None] = lambda stages: None,
) -> CorpusResult:
    """Make the corpus of a recipe, or resume where a run was stopped; raises UserError.

    A corpus in `out` that another recipe made is refused unless `replace_other`. `report` is called
    with the counts of all stages before the corpus is published, so that no kill can skip it.
    """
    started, recipe, out = time.monotonic(), file.recipe, Path(file.recipe.out)
    tokenizer, sources = _open_inputs(recipe)
    plan = hash_json([_FORMAT, _describe_stages(file, tokenizer), *map(_keys, sources)])
    with readable_disk_errors(out):
        names = [source.name for source in recipe.sources]
        if published := find_published(out, plan, names, replace_other):
            return CorpusResult(out, published, time.monotonic() - started)
        with WorkFolder(file.work, engine or LocalEngine(), progress) as run:
            sources = _run_document_stages(file, sources, run)
            shards = _make_shards(file, sources, tokenizer, run)
            report(run.counts)
            published = publish(out, file.work, plan, shards, tokenizer)
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


def _open_inputs(recipe: Recipe) -> tuple[Tokenizer, list[_Source]]:
    """The tokenizer, and the read tasks of all sources; raises all their problems together."""
    sources: list[_Source] = []
    problems: list[UserError] = []
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = _open_tokenizer(recipe)
    except UserError as error:
        problems.append(error)
    for source in recipe.sources:
        try:
            unread: list[Path] = []
            tasks, template = plan_reading(source, recipe.read, unread), None
            if source.kind != "text" and tokenizer is not None:
                template = open_chat_template(source.template, tokenizer)
            sources.append(_Source(source, tasks, template, unread))
        except UserError as error:
            problems.append(error)
    raise_together(problems)
    assert tokenizer is not None
    return tokenizer, sources


def _describe_stages(file: RecipeFile, tokenizer: Tokenizer) -> dict:
    """All that the shards depend on, besides what is read."""
    recipe = file.recipe
    values: dict = {section: asdict(getattr(recipe, section)) for section in file.sections}
    values |= {"tokenizer": tokenizer.fingerprint, "bos": recipe.bos}
    values |= {"validation_share": recipe.validation_share, "shard_mib": recipe.shard_mib}
    if "filter" in file.sections:
        values["filter"] = filter_arguments(recipe.filter)
    if "deduplicate" in file.sections:
        values["benchmarks"] = hash_benchmark_files(recipe.deduplicate.benchmarks)
    return values


def _keys(source: _Source) -> list[str]:
    return [source.source.name, source.settings_hash, *(task.key for task in source.tasks)]


# --- stages --------------------------------------------------------------------------------------


def _run_document_stages(
    file: RecipeFile, sources: list[_Source], run: WorkFolder
) -> list[_Source]:
    """Run the stages whose results are tables; returns the tasks of the last one."""
    recipe, tables = file.recipe, [task for source in sources for task in source.tasks]
    run(tables)
    unread = [file for source in sources for file in source.unread]
    run.counts["read"] = merge_counts([run.counts["read"], count_unread(unread)])
    if "filter" in file.sections:
        arguments = filter_arguments(recipe.filter)
        tables = [Task("filter", filter_documents, arguments, (t.key,)) for t in tables]
        run(tables)
    if "deduplicate" in file.sections:
        tables = deduplicate(tables, recipe.deduplicate, run)
    remaining = iter(tables)  # a stage has one task for each task of the stage before, in order
    return [replace(s, tasks=[next(remaining) for _ in s.tasks]) for s in sources]


def _make_shards(
    file: RecipeFile, sources: list[_Source], tokenizer: Tokenizer, run: WorkFolder
) -> dict[tuple[str, str], SideShards]:
    """Run the stages whose results are token ids; returns the shards by (source, side)."""
    recipe = file.recipe

    def settings(source: _Source) -> TokeniseSettings:
        return TokeniseSettings(
            recipe.validation_share,
            recipe.bos,
            source.template,
            last_only=source.source.answers == "last",
            pair_window=recipe.pack.seq_len + 1 if source.source.kind == "pairs" else 0,
        )

    sources = [replace(s, tasks=plan_tokenising(s.tasks, tokenizer, settings(s))) for s in sources]
    run([task for source in sources for task in source.tasks])
    chunks = sources
    if "shuffle" in file.sections:
        chunks = [
            replace(s, tasks=plan_shuffle(s.tasks, recipe.shuffle, s.id_range(tokenizer)))
            for s in sources
        ]
        run([task for source in chunks for task in source.tasks])
    plans: dict[tuple[str, str], list[Task]] = {}
    for source, ordered in zip(sources, chunks, strict=True):
        for side in (TRAIN, VALIDATION):
            sizes = _count_tokens(source, side, run)
            if sum(sizes):
                id_range = source.id_range(tokenizer)
                plan = _plan_shards(file, ordered.tasks, sizes, side, id_range)
                plans[source.source.name, side] = plan
            elif side == TRAIN or recipe.validation_share > 0:
                name = source.source.name
                logger.warning('sources: "%s" has no documents left for %s', name, side)
    if not any(side == TRAIN for _, side in plans):
        raise DataError(
            "no source has a document left for training.",
            fix="Give inputs that contain text, or filters that leave some.",
        )
    run([task for tasks in plans.values() for task in tasks])
    if "pack" in file.sections:
        return _pack_shards(file, sources, plans, tokenizer, run)
    return {place: _finished(tasks, run, recipe.bos) for place, tasks in plans.items()}


def _pack_shards(
    file: RecipeFile,
    sources: list[_Source],
    plans: dict[tuple[str, str], list[Task]],
    tokenizer: Tokenizer,
    run: WorkFolder,
) -> dict[tuple[str, str], SideShards]:
    """Pack training data by best fit, or count what concatenation truncates.

    Validation data stay concatenated, except chats, so the loss covers every token at any seq_len.
    """
    recipe, seq_len = file.recipe, file.recipe.pack.seq_len
    templates = {source.source.name: source.template for source in sources}
    pairs = {source.source.name for source in sources if source.source.kind == "pairs"}
    packed: dict[tuple[str, str], list[Task]] = {}
    counting: list[Task] = []
    for (name, side), tasks in plans.items():
        is_chat = templates[name] is not None
        if recipe.pack.mode == "concatenate":
            sizes = [run.counts_of(task)["tokens_out"] for task in tasks]
            counting += plan_counting(tasks, sizes, seq_len) if side == TRAIN else []
        elif side == TRAIN or is_chat:
            # the rest of a long conversation would be answers without their questions
            settings = PackSettings(seq_len, tokenizer.eos_id, split=not is_chat)
            packed[name, side] = plan_packing(tasks, settings)
    run([*counting, *(task for tasks in packed.values() for task in tasks)])
    shards = {}
    for (name, side), tasks in plans.items():
        template = templates[name]
        bos = ChatEncoder(tokenizer, template).begins_with_bos if template else recipe.bos
        windows = packed.get((name, side))
        finished = _finished(windows or tasks, run, bos, seq_len if windows else 0)
        shards[name, side] = replace(finished, pairs=name in pairs)
    return shards


def _finished(tasks: list[Task], run: WorkFolder, bos: bool, packed_seq_len: int = 0) -> SideShards:
    """The shards that tasks wrote."""
    shards = [(run.path / t.key, ShardRecord(**run.counts_of(t)["shard"])) for t in tasks]
    return SideShards(shards, bos, packed_seq_len)


def _count_tokens(tokenised: _Source, side: str, run: WorkFolder) -> list[int]:
    """Tokens of one side in the result of each tokenise task."""
    counts = [run.counts_of(task)["sides"].get(side, {}) for task in tokenised.tasks]
    return [count.get("tokens", 0) for count in counts]


def _plan_shards(
    file: RecipeFile, chunks: list[Task], sizes: list[int], side: str, id_range: int
) -> list[Task]:
    """Tasks of the shards of one side of a source; `sizes`: tokens of each chunk task."""
    id_bytes = id_type_of(id_range).itemsize
    shards = -(-sum(sizes) * id_bytes // (file.recipe.shard_mib * MIB))
    if "shuffle" in file.sections:
        return plan_shuffled_shards(chunks, side, shards, id_range)
    return plan_ordered_shards(chunks, sizes, side, shards, id_range)
