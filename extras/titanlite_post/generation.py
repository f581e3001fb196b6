"""Generation by the training model itself, in batches, under every layout.

The model gets the sequences of a rank as one, [1, B*T]. Every layer but attention computes each
token by itself; attention, and the convolution and delta rule of linear attention, get [B, T]. So
sequence parallel shards the tokens of all sequences, though a step has one token of each.
Context-parallel ranks have whole sequences, as data-parallel ranks do.

The cached length is the same for all sequences of all ranks. The first forward computes as many
tokens as the shortest prompt has; a longer prompt's next token comes from the prompt, one a step.
Pipeline stages compute one after the other, never at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.distributed.collectives import (
    all_gather_tensor,
    all_reduce_max,
    receive_tensor,
    send_tensor,
)
from titanlite.errors import ConfigError
from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.delta_rule import DeltaCache, DeltaRule, ShortConvolution
from titanlite.kernels.documents import DocumentIndex
from titanlite.models import OutputLayer
from titanlite.models.decoder import build_caches
from titanlite.models.label_sampling import GOLDEN, draw_labels, mix_int64
from titanlite.parallelize import ParallelLayout, ShardedModel
from titanlite.parallelize.compile import replace_forward
from titanlite.training.spmd_engine import reshard
from titanlite_lab.generate import check_length

CHECK_EVERY = 8  # tokens between two questions whether all sequences of all ranks have ended
Prompts = Sequence[Sequence[int]]  # token ids
NO_PROMPT = 2**31  # what a rank without prompts has as the length of its shortest


@dataclass(frozen=True)
class Generation:
    """What follows one prompt."""

    ids: list[int]  # sampled, including the end id if there is one
    log_probs: list[float]  # of each id in fp32, by the forward that sampled it
    ended: bool  # by an end id, not by the number of tokens


class ShardedGenerator:
    """Samples from the softmax of a parallelized model, which trains on as before.

    Build it before the first step, or compiled blocks are compiled again. Generation itself runs
    without compiled code: the length of the cache changes with each token.

    `seed`, the number of a completion and the index of a token decide the noise that samples this
    token, so all layouts sample the same ids but for rounding. `ends`: ids that end a completion.
    `vocab_size`: only smaller ids are sampled, for a model with a padded vocabulary; log-probs are
    those of the model, whose softmax has all ids. `gather_weights`: FSDP gathers the weights once
    for a call, not for each token; every rank then has all layers of its stages in memory.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        layout: ParallelLayout,
        device: torch.device,
        *,
        seed: int,
        ends: Collection[int],
        vocab_size: int,
        gather_weights: bool = True,
    ):
        self._sharded, self._device, self._gather_weights = sharded, device, gather_weights
        self._stages, self._mesh = sharded.stage_modules, layout.mesh
        self._rank_of = layout.plan.rank_of
        self._seed, self._ends, self._vocab_size = seed, frozenset(ends), vocab_size
        self._end_ids = torch.tensor(sorted(self._ends), dtype=torch.int64, device=device)
        for module in (m for stage in self._stages.values() for m in stage.modules()):
            for kind, dim in TOKEN_DIMS.items():
                if isinstance(module, kind):
                    as_trained = type(module).forward
                    replace_forward(module, _compute_unfolded, as_trained, kind.forward, dim)
        if (output := sharded.output) is not None:
            replace_forward(output, _sample_or_train, type(output).forward)

    @torch.no_grad()
    def generate(
        self,
        prompts: Prompts,
        numbers: Sequence[int],
        max_new_tokens: int,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Generation]:
        """The completions of this data-parallel rank's prompts, of at most `max_new_tokens` ids.

        A collective of all ranks, with one `max_new_tokens`; some may have no prompts. Ranks of the
        same data-parallel rank pass the same prompts, and all return all completions of them.
        `numbers` identify each completion in the run; `progress` is called every few tokens.
        Raises ConfigError on all ranks.
        """
        shortest, longest = self._agree_on_lengths(prompts)
        if not longest:
            return []
        capacity, stages = longest + max_new_tokens, list(self._stages.values())
        check_length(stages[0], capacity)
        batch = self._place(prompts, numbers, shortest, capacity)
        self._sharded.update_float8_scales()
        for copy in self._sharded.tied_copies:
            copy.update()
        kept = stages if self._gather_weights else []
        with _keep_gathered(kept), torch.compiler.set_stance("force_eager"):
            self._decode(batch, shortest, max_new_tokens, progress)
        reshard(stages)
        return self._collect(batch, [len(prompt) for prompt in prompts], max_new_tokens)

    def _agree_on_lengths(self, prompts: Prompts) -> tuple[int, int]:
        """Lengths of the shortest and the longest prompt of all ranks; 0 if there is none."""
        lengths = [len(prompt) for prompt in prompts]
        extremes = [-min(lengths, default=NO_PROMPT), max(lengths, default=0)]
        negative, longest = self._max_of_all_ranks(torch.tensor(extremes, device=self._device))
        if not negative:
            raise ConfigError("A prompt has no ids.", fix="Begin it with BOS, or the EOS before.")
        return -negative, longest

    def _max_of_all_ranks(self, values: Tensor) -> list[int]:
        # tensor-parallel ranks, the only ones that are not in this mesh, have the same values
        return all_reduce_max(self._mesh.loss, values).tolist()

    def _place(
        self, prompts: Prompts, numbers: Sequence[int], shortest: int, capacity: int
    ) -> _SequenceBatch:
        """This rank's part of the prompts, which context-parallel ranks divide, and unused
        sequences: their number is a multiple of the tensor-parallel ranks."""
        cp, tp = self._mesh.cp, self._mesh.tp
        rows = max(1, -(-len(prompts) // (cp.size() * tp.size()))) * tp.size()
        first = rows * cp.get_local_rank()
        own = prompts[first : first + rows]
        unused = rows - len(own)
        ids = torch.zeros(rows, capacity, dtype=torch.int64)
        for row, prompt in enumerate(own):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        return _SequenceBatch(
            ids.to(self._device),
            torch.zeros(rows, capacity, device=self._device),
            torch.tensor([*map(len, own), *[shortest] * unused], device=self._device),
            torch.tensor([*numbers[first : first + rows], *[0] * unused], device=self._device),
            torch.tensor([False] * len(own) + [True] * unused, device=self._device),
        )

    def _decode(
        self, batch: _SequenceBatch, shortest: int, max_new_tokens: int, progress: Callable
    ) -> None:
        """Fill the batch; each pass computes one more id of all sequences."""
        rows, capacity = batch.ids.shape
        caches = {
            name: _FoldedCache(rows, cache)
            for stage in self._stages.values()
            for name, cache in build_caches(cast(nn.ModuleDict, stage.layers), capacity).items()
        }
        start = 0
        for end in range(shortest, capacity):
            index = end - batch.lengths  # of the new ids in their completions
            keys = mix_int64(mix_int64(mix_int64(batch.numbers) + self._seed) + index * GOLDEN)
            sampling = _NextToken(keys & (2**63 - 1), self._vocab_size)
            sampled, log_probs = self._forward(batch.ids[:, start:end], start, caches, sampling)
            is_new = index >= 0
            batch.ids[:, end] = torch.where(is_new, sampled, batch.ids[:, end])
            batch.log_probs[:, end] = log_probs
            batch.ended.logical_or_(is_new & torch.isin(sampled, self._end_ids))
            start = end
            if (end - shortest) % CHECK_EVERY == CHECK_EVERY - 1:
                progress()
                unfinished = ~batch.ended & (index + 1 < max_new_tokens)
                if not self._max_of_all_ranks(unfinished.any().long().view(1))[0]:
                    break

    def _forward(
        self, tokens: Tensor, start: int, caches: Mapping[str, _FoldedCache], sampling: _NextToken
    ) -> tuple[Tensor, Tensor]:
        """(ids sampled after tokens [B, T], which begin at position `start`; their log-probs)."""
        pp, rank_of, last = self._mesh.pp, self._rank_of, len(self._rank_of) - 1
        own = pp.get_local_rank()
        positions = torch.arange(start, start + tokens.shape[1], device=self._device)
        shape = (1, tokens.numel() // self._mesh.tp.size(), self._sharded.dim)
        x: Any = tokens.reshape(1, -1)
        for stage, module in sorted(self._stages.items()):
            if stage and (before := rank_of[stage - 1]) != own:
                x = torch.empty(shape, dtype=self._sharded.compute_dtype, device=self._device)
                receive_tensor(pp, x, before)
            options = {"labels": sampling} if stage == last else {}
            x = module(x, positions.repeat(len(tokens)), caches, documents=ONE_DOCUMENT, **options)
            if stage < last and (after := rank_of[stage + 1]) != own:
                send_tensor(pp, x.contiguous(), after)
        if pp.size() == 1:
            return x
        packed = torch.empty(2, len(tokens), dtype=torch.float64, device=self._device)
        if rank_of[last] == own:
            packed = torch.stack([part.double() for part in x])  # exact: an id and fp32
        dist.broadcast(packed, group=pp.get_group(), group_src=rank_of[last])
        return packed[0].long(), packed[1].float()

    def _collect(
        self, batch: _SequenceBatch, lengths: list[int], max_new_tokens: int
    ) -> list[Generation]:
        group, tensors = self._mesh.cp.get_group(), (batch.ids, batch.log_probs)
        ids, log_probs = (all_gather_tensor(group, x).flatten(0, 1) for x in tensors)
        completions = []
        # what context and tensor parallel add to the rows comes after those of the prompts
        for length, row, values in zip(lengths, ids.tolist(), log_probs.tolist(), strict=False):
            new = row[length:][:max_new_tokens]
            end = next((index + 1 for index, id in enumerate(new) if id in self._ends), None)
            new = new[:end]
            completions.append(Generation(new, values[length:][: len(new)], end is not None))
        return completions


@dataclass(frozen=True)
class _SequenceBatch:
    """Sequences of one rank, in tensors that are filled while they are generated."""

    ids: Tensor  # [B, capacity]: the prompt, and what follows it
    log_probs: Tensor  # [B, capacity]: those of sampled ids
    lengths: Tensor  # [B], of the prompts
    numbers: Tensor  # [B], of the completions
    ended: Tensor  # [B]: whether an end id was sampled


@contextmanager
def _keep_gathered(models: list[nn.Module]) -> Iterator[None]:
    """Inside of the block, weights stay gathered after a forward; the caller then frees them."""
    modules = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
    frees = []
    for module in modules:
        state: Any = module._get_fsdp_state()  # private; the groups are a list since torch 2.13
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        frees.append(any(group and group.post_forward_mesh_info for group in groups))
    for module in modules:  # several may have the same groups
        module.set_reshard_after_forward(False, recurse=False)
    yield
    for module, before in zip(modules, frees, strict=True):
        module.set_reshard_after_forward(before, recurse=False)


# --- what the modules of the model do in generation -----------------------------------------------


@dataclass(frozen=True)
class _FoldedCache:
    """The cache of a layer for sequences that the model gets as one."""

    sequences: int
    cache: KeyValueCache | DeltaCache


@dataclass(frozen=True)
class _NextToken:
    """In place of labels: sample an id after the last token of each sequence."""

    keys: Tensor  # [B], see `draw_labels`
    vocab_size: int


# Module -> dimension of the tokens of its inputs and output, whose first dimension is the batch
TOKEN_DIMS: dict[Any, int] = {CausalAttention: 2, ShortConvolution: 1, DeltaRule: 1}
# Attention that unfolds its sequences ignores it; without, the model would compute an index.
ONE_DOCUMENT = DocumentIndex.build(torch.empty(0, dtype=torch.int32))


def _compute_unfolded(
    module: nn.Module, as_trained: Callable, plain: Callable, dim: int, *inputs: Any
) -> Tensor:
    """`plain`, the forward of one process, for each sequence of a folded cache; else `as_trained`.

    The last two inputs are the documents and the cache.
    """
    *tensors, _, folded = inputs
    if not isinstance(folded, _FoldedCache):
        return as_trained(module, *inputs)
    batched = (
        x.squeeze(0).unflatten(dim - 1, (folded.sequences, -1)).movedim(dim - 1, 0) for x in tensors
    )
    out = plain(module, *batched, None, folded.cache)
    return out.movedim(0, dim - 1).flatten(dim - 1, dim).unsqueeze(0)


def _sample_or_train(
    output: OutputLayer, as_trained: Callable, x: Tensor, labels: Any = None, **options: Any
) -> Any:
    """With `_NextToken` as labels: (sampled ids [B], their log-probs [B] in fp32)."""
    if not isinstance(labels, _NextToken):
        return as_trained(output, x, labels, **options)
    vocabulary, sequences = output.vocabulary, len(labels.keys)
    x, weight = vocabulary.local_tensors(x, output.weight)
    logits = F.linear(x.squeeze(0).unflatten(0, (sequences, -1))[:, -1], weight).float()
    ids = torch.arange(logits.shape[-1], device=logits.device) + vocabulary.first_id
    allowed = logits.masked_fill(ids >= labels.vocab_size, -torch.inf)
    sampled = draw_labels(allowed, labels.keys, vocabulary.first_id, vocabulary.reduce_max)
    _, log_sum_exp, logit = vocabulary.log_sum_exp(logits, sampled)
    return sampled, logit - log_sum_exp
