"""A checkpoint as a language model of lm-eval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn
from tqdm import tqdm

from titanlite.checkpoint import SavedModel
from titanlite.data import Tokenizer
from titanlite.errors import CheckpointError, DataError
from titanlite_lab.generate import Sampling, generate

DEFAULT_LENGTH = 2048  # context of a model that does not state one; as in lm-eval's "hf"
MAX_NEW_TOKENS = 256  # where the task sets no limit; as in lm-eval's "hf"

TokenRequest = tuple[Any, list[int], list[int]]  # (texts, ids of the context, ids to score)


class CheckpointLM(TemplateLM):
    """Scores and generates text with a model on one device.

    It splits, truncates and begins texts as lm-eval's model "hf" does with the same model exported,
    so that both give the same results.
    """

    def __init__(self, saved: SavedModel, model: nn.Module, batch_size: int):
        super().__init__()
        assert saved.tokenizer is not None, "checked by the caller"
        self.model, self.batch_size = model, batch_size
        self.titanlite_tokenizer: Tokenizer = saved.tokenizer
        self.bos = saved.bos  # every training document began with BOS
        self.max_length = context_length(saved)
        self._device = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.titanlite_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        tokenizer = self.titanlite_tokenizer
        return tokenizer.bos_id if self.bos else tokenizer.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """The ids of a text, with BOS in front if training documents began with BOS.

        `add_special_tokens`: True adds it, False does not, None does unless the text has it.
        """
        tokenizer = self.titanlite_tokenizer
        ids, begin = tokenizer.encode(string), tokenizer.special_token_name(tokenizer.bos_id)
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(begin)
        return [tokenizer.bos_id, *ids] if self.bos and add_special_tokens else ids

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts, in windows of `max_length` tokens."""
        windows: list[TokenRequest] = []
        counts: list[int] = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            own = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows, counts = [*windows, *own], [*counts, len(own)]
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood of the ids to score, whether greedy decoding gives these ids)."""
        for texts, context, scored in requests:
            if not context or not 0 < len(scored) <= self.max_length:
                raise DataError(
                    f"a task asks for the probability of {len(scored)} tokens after a context of"
                    f" {len(context)} tokens; supported are 1 to {self.max_length} tokens after a"
                    f" context of at least 1: {texts!s:.200}",
                    fix="If the tokenizer merges the end of the context with the continuation, move"
                    " the last characters of the context to the continuation.",
                )
        longest_first = sorted(
            range(len(requests)), key=lambda n: -len(requests[n][1]) - len(requests[n][2])
        )
        scores: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm or None) as bar:
            for start in range(0, len(requests), self.batch_size):
                numbers = longest_first[start : start + self.batch_size]
                batch = [requests[number] for number in numbers]
                scores |= zip(numbers, self._score(batch), strict=True)
                bar.update(len(numbers))
        return [scores[number] for number in range(len(requests))]

    @torch.inference_mode()
    def _score(self, batch: Sequence[TokenRequest]) -> Iterator[tuple[float, bool]]:
        """Scores of one batch, whose rows are padded on the right: attention is causal."""
        rows = [(context + scored)[-self.max_length - 1 :][:-1] for _, context, scored in batch]
        inputs = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for ids, row in zip(inputs, rows, strict=True):
            ids[: len(row)] = torch.tensor(row)
        all_logits = self.model(inputs.to(self._device))
        results = []
        for logits, row, (_, _, scored) in zip(all_logits, rows, batch, strict=True):
            labels = torch.tensor(scored, device=self._device)
            own = logits[len(row) - len(scored) : len(row)]
            results.append(_score_labels(own.log_softmax(-1), labels))
        return iter(results)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop text or a number of tokens."""
        return [self._complete(*request.args) for request in tqdm(requests, disable=disable_tqdm)]

    def _complete(self, context: str, options: dict[str, Any]) -> str:
        tokenizer = self.titanlite_tokenizer
        settings: dict[str, Any] = {**normalize_gen_kwargs(options, MAX_NEW_TOKENS)}
        limit = settings["max_gen_toks"]
        stops = handle_stop_sequences(
            settings.get("until"), tokenizer.special_token_name(tokenizer.eos_id)
        )
        longest_prompt = self.max_length - limit
        if longest_prompt < 1:
            raise CheckpointError(
                f"a task generates {limit} tokens; the model's context is {self.max_length}."
            )
        prompt = self.tok_encode(context)[-longest_prompt:] or [self.prefix_token_id]
        sampling = Sampling(temperature=0)
        if settings.get("do_sample"):
            temperature = float(settings.get("temperature") or 1.0)
            top_k, top_p = int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0))
            sampling = Sampling(temperature, top_k, top_p)
        ids: list[int] = []
        for id in generate(self.model, prompt, limit, sampling, ends=[tokenizer.eos_id]):
            ids.append(id)
            if any(stop and stop in tokenizer.decode(ids) for stop in stops):
                break
        return postprocess_generated_text(tokenizer.decode(ids), stops, None)


def _score_labels(log_probabilities: Tensor, labels: Tensor) -> tuple[float, bool]:
    """(sum of the log-probabilities of the labels, whether each label is the most likely id).

    `log_probabilities` is [T, V], `labels` [T].
    """
    greedy = bool((log_probabilities.argmax(-1) == labels).all())
    return float(log_probabilities.gather(-1, labels.unsqueeze(-1)).sum()), greedy


def context_length(saved: SavedModel) -> int:
    """Tokens of the context: learned positions, or tokens of a training sequence, or of the RoPE
    scaling if that is longer."""
    if positions := getattr(saved.sizes, "positions", 0):
        return positions
    try:
        config = saved.spec.hugging_face.to_config(saved.sizes, saved.seq_len)
        return int(config["max_position_embeddings"]) or DEFAULT_LENGTH
    except CheckpointError:  # this architecture cannot be exported
        return saved.seq_len or DEFAULT_LENGTH
