"""Batches of completions, which are generated and judged when their step begins."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.data import SampleStream
from titanlite.data.order import rank_slices
from titanlite.distributed.collectives import (
    all_reduce_sum,
    gather_from_all_ranks,
    run_on_all_ranks,
    run_on_rank_0,
)
from titanlite.errors import ConfigError, DataError
from titanlite.files import parse_json, write_file_atomically
from titanlite.job import RunParts
from titanlite.training.batch import Batch
from titanlite.training.engine import Engine
from titanlite.training.run import Run
from titanlite_post.generation import Generation
from titanlite_post.grpo import (
    Completions,
    Generator,
    GroupTensors,
    GRPOSection,
    RolloutData,
    place_group,
)
from titanlite_post.prompts import PromptEncoder, PromptSamples
from titanlite_post.rewards import RewardProcesses, RewardTask


def check_prompts(
    section: GRPOSection, stream: SampleStream, prompts: PromptEncoder, rank: int, ranks: int
) -> None:
    """Refuse prompts that cannot be encoded, or that are too long; a collective."""
    room = stream.seq_len // section.group_size - section.max_new_tokens

    def check() -> None:
        for source in stream.sources:
            if not isinstance(source, PromptSamples):
                raise DataError(
                    f'source "{source.name}": has format "{source.config.format}".',
                    fix='grpo trains on prompts: set format = "prompts".',
                )
            for number in range(rank, len(source.source), ranks):
                origin = f"{source.path}, line {number + 1}"
                length = len(prompts.encode(source.source.record_at(number), origin))
                if not 0 < length <= room:
                    raise DataError(
                        f"{origin}: has {length} tokens; 1 to {room} fit, because a sequence has"
                        f" grpo.group_size = {section.group_size} times the prompt and"
                        f" grpo.max_new_tokens = {section.max_new_tokens}.",
                        fix="Remove it, or raise training.seq_len to at least"
                        f" {section.group_size * (length + section.max_new_tokens)}.",
                    )

    run_on_all_ranks(check)


@dataclass(frozen=True)
class RolloutTools:
    """What completions are made with."""

    section: GRPOSection
    generator: Generator
    prompts: PromptEncoder
    rewards: RewardProcesses
    reference: Engine | None  # with the initial weights; None: kl_weight = 0


class Rollouts:
    """The batches of a run, from the prompts of its stream.

    The files `completions/step-N.jsonl` in the run's folder have the completions of steps that are
    logged; and those of all steps if several steps are taken on them, to resume between two.
    """

    def __init__(self, tools: RolloutTools, run: Run, parts: RunParts):
        self._tools, self._section, self._run, self._parts = tools, tools.section, run, parts
        self._stream, self._mesh = parts.stream, parts.layout.mesh
        self._sources = {s.name: s for s in parts.stream.sources}
        self._folder = parts.job.folder / "completions"
        self.data: RolloutData | None = None  # of the batch that was yielded last
        self.statistics: dict[str, float] = {}  # of the last rollout

    def is_logged(self, step: int) -> bool:
        """Whether a step, counted from 1, has a step line."""
        freq, steps = self._parts.job.config.metrics.log_freq, self._run.training.steps
        return step == 1 or step % freq == 0 or step == steps

    def batches(self) -> Iterator[Batch]:
        """This rank's batches from the position of the run on; begins each with collectives."""
        state, batch = self._run.state, self._mesh.batch
        sizes = self._parts.job.batches.batches_from(state.counters.tokens)
        windows = state.counters.windows
        slices = rank_slices(state.position, sizes, self._mesh.batch_rank, batch.size(), windows)
        steps = self._section.steps_per_rollout
        while True:
            taken = state.step % steps  # not 0: the run resumed between the steps of a rollout
            first_step = state.step - taken + 1
            own = [range(at, at + count) for at, count in islice(slices, steps - taken)]
            groups = self._read(first_step) if taken else self._roll_out(list(chain(*own)))
            shared = self._mesh.batch_rank, None, batch.size()  # a file has those of all ranks
            self._summarize([*groups.values()][slice(*shared) if taken else slice(None)])
            built = [self._build([groups[position] for position in rows]) for rows in own]
            if steps > 1 and not taken:
                built = [self._with_old(*each) for each in built]
                for rows, (_, data) in zip(own, built, strict=True):
                    groups |= self._read_old(groups, rows, data)
            if not taken and (steps > 1 or self.is_logged(first_step)):
                self._write(first_step, groups)
            for each, data in built:
                self.data = self._with_reference(each, data)
                yield each

    def _set_phase(self, phase: str) -> None:
        self._run.watchdog.set_phase(self._run.state.step + 1, phase)

    def _prompts_at(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """The lines of the prompts at positions."""
        records = []
        for position in positions:
            (place,) = self._stream.locate(position, 1)
            source = self._sources[place["source"]]
            assert isinstance(source, PromptSamples)
            records.append(source.source.record_at(place["sample"]))
        return records

    def _roll_out(self, positions: list[int]) -> dict[int, Completions]:
        """The judged completions of this rank's prompts; a collective."""
        section, records = self._section, self._prompts_at(positions)
        prompts = [self._tools.prompts.encode(r, "a prompt") for r in records]
        copies = range(section.group_size)
        ids = [prompt for prompt in prompts for _ in copies]
        numbers = [position * section.group_size + n for position in positions for n in copies]
        generated: list[Generation] = []
        together = section.generation_batch or len(ids)
        generates = partial(self._set_phase, "generate")  # the watchdog waits for a few tokens
        for first in range(0, len(ids), together):  # as many on all ranks, of equal batches
            generates()
            part = slice(first, first + together)
            generated += self._tools.generator.generate(
                ids[part], numbers[part], section.max_new_tokens, generates
            )
        rewards = self._judge(generated, [record for record in records for _ in copies])
        groups = {}
        for row, position in enumerate(positions):
            part = slice(row * section.group_size, (row + 1) * section.group_size)
            groups[position] = Completions(
                prompts[row],
                [each.ids for each in generated[part]],
                [each.log_probs for each in generated[part]],
                rewards[part],
            )
        return groups

    def _judge(
        self, generated: list[Generation], records: list[dict[str, Any]]
    ) -> list[float | None]:
        """The reward of each completion. One rank of those with the same completions computes them:
        a function of the user may not return the same twice."""
        mesh, section = self._mesh, self._section
        judges = not any(m.get_local_rank() for m in (mesh.tp, mesh.cp, mesh.pp))
        texts = [self._tools.prompts.decode(each.ids) for each in generated]
        tasks = [RewardTask(*pair) for pair in zip(texts, records, strict=True)]
        # Between two collectives, the watchdog must not run out even if every reward hangs.
        limit = self._parts.job.config.comm.train_timeout_seconds / 2
        together = section.reward_processes * max(1, int(limit / section.reward_timeout_seconds))
        own: list[float | None] = []
        for first in range(0, len(tasks), together):
            self._set_phase("rewards")
            part = tasks[first : first + together]
            results = self._tools.rewards.compute(part) if judges else None
            own += self._share(results)
        return own

    def _share(self, results: list[float | str] | None) -> list[float | None]:
        """The rewards that were computed for this rank's completions; None: failed."""
        gathered = gather_from_all_ranks((self._mesh.batch_rank, results))
        of_rank = {rank: found for rank, found in gathered if found is not None}
        failed = [r for found in of_rank.values() for r in found if isinstance(r, str)]
        if failed and self._section.failed_reward == "stop":
            raise ConfigError(
                f'grpo.reward = "{self._section.reward}": {len(failed)} rewards failed;'
                f" the first one {failed[0]}.",
                fix='Correct the function, or set grpo.failed_reward = "skip" to leave such'
                " completions out.",
            ).mark_on_all_ranks()
        return [None if isinstance(r, str) else r for r in of_rank[self._mesh.batch_rank]]

    def _summarize(self, groups: Sequence[Completions]) -> None:
        """Set `statistics`, of all ranks; `groups`: this rank's."""
        rewards = [r for group in groups for r in group.rewards]
        completions = [ids for group in groups for ids in group.ids]
        known = [reward for reward in rewards if reward is not None]
        own = {
            "completions": len(rewards),
            "failed": len(rewards) - len(known),
            "reward": sum(known),
            "reward_squares": sum(reward**2 for reward in known),
            "equal_groups": sum(len(set(group.rewards)) == 1 for group in groups),
            "groups": len(groups),
            "completion_tokens": sum(map(len, completions)),
            "ended": sum(ids[-1] in self._tools.prompts.ends for ids in completions),
        }
        values = torch.tensor([*own.values()], dtype=torch.float64)
        total = dict(zip(own, self._sum(values).tolist(), strict=True))
        judged = max(1, total["completions"] - total["failed"])
        mean = total["reward"] / judged
        self.statistics = {
            "reward": mean,
            "reward_std": max(0.0, total["reward_squares"] / judged - mean**2) ** 0.5,
            "equal_groups": total["equal_groups"] / total["groups"],
            "completion_tokens": total["completion_tokens"] / total["completions"],
            "ended": total["ended"] / total["completions"],
            "failed_rewards": total["failed"],
        }

    def _sum(self, values: Tensor) -> Tensor:
        return all_reduce_sum(self._mesh.batch, values.to(self._run.device))

    def _build(self, groups: Sequence[Completions]) -> tuple[Batch, RolloutData]:
        """The batch of some prompts on the device."""
        by_std = self._section.advantage == "std"
        rows = [place_group(group, self._stream.seq_len, by_std) for group in groups]
        columns = GroupTensors(*map(torch.stack, zip(*rows, strict=True)))
        batch = self._run.engine.prepare(columns.inputs, columns.labels)
        batch = dataclasses.replace(batch, weights=columns.advantages).to(self._run.device)
        old = None if groups[0].old is None else columns.old.to(self._run.device)
        return batch, RolloutData(columns.sampled.to(self._run.device), old, None)

    def _with_old(self, batch: Batch, data: RolloutData) -> tuple[Batch, RolloutData]:
        self._set_phase("log-probabilities")
        old = -self._run.engine.token_losses(batch)
        return batch, dataclasses.replace(data, old=old)

    def _with_reference(self, batch: Batch, data: RolloutData) -> RolloutData:
        if self._tools.reference is None:
            return data
        self._set_phase("reference")
        return dataclasses.replace(data, reference=-self._tools.reference.token_losses(batch))

    def _read_old(
        self, groups: dict[int, Completions], rows: range, data: RolloutData
    ) -> dict[int, Completions]:
        """The groups at positions `rows` with their old log-probabilities."""
        assert data.old is not None
        found = {}
        for position, values in zip(rows, data.old.tolist(), strict=True):
            group = groups[position]
            old = [values[first:end] for first, end in group.spans()]
            found[position] = group._replace(old=old)
        return found

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}.jsonl"

    def _write(self, step: int, groups: dict[int, Completions]) -> None:
        """Write the completions of all ranks."""
        gathered = gather_from_all_ranks([[position, *group] for position, group in groups.items()])
        merged = {position: Completions(*group) for part in gathered for position, *group in part}
        decode = self._tools.prompts.tokenizer.decode

        def write() -> None:
            lines = []
            for position, group in sorted(merged.items()):
                texts = {"prompt_text": decode(group.prompt), "texts": [*map(decode, group.ids)]}
                lines.append(json.dumps({"position": position, **texts, **group._asdict()}))
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file_atomically(self._path(step), "".join(f"{x}\n" for x in lines).encode())

        run_on_rank_0(write)

    def _read(self, step: int) -> dict[int, Completions]:
        """The completions that the steps from `step` on, counted from 1, are taken on."""

        def read() -> dict[int, Completions]:
            path = self._path(step)
            try:
                lines = [parse_json(line) for line in path.read_text("utf-8").splitlines()]
                return {
                    line["position"]: Completions(*(line[name] for name in Completions._fields))
                    for line in lines
                }
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"{path}: cannot be read ({error!r:.100}). The run resumes between two of the"
                    f" {self._section.steps_per_rollout} steps on these completions.",
                    fix="Restore the file, or load an earlier checkpoint (checkpoint.load_step).",
                ) from None

        return run_on_all_ranks(read)
