"""The gated delta rule (https://arxiv.org/abs/2412.06464), and the short convolution before it.

A head has a state S [K, V], which maps keys to values. Token t changes it and reads it:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T      o_t = S_t^T q_t

Tokens are computed in chunks, by matmuls (section 3.3 of the paper; the inverse in it is solved as
a triangular system). Only the state is passed from chunk to chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.attention import ParametersOfHeads
from titanlite.kernels.documents import DocumentIndex

CHUNK = 64  # tokens; work inside of a chunk grows with it, steps from chunk to chunk get fewer


class DeltaCache:
    """What one layer needs of the tokens so far, so that generation computes each token once."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None  # the last of the convolution, [B, W - 1, D]
        self.state: Tensor | None = None  # [B, H, K, V]

    def shift_inputs(self, before: Tensor, x: Tensor) -> Tensor:
        """The inputs before x [B, T, D], at first `before`; keeps the last ones for next time."""
        before = before if self.inputs is None else self.inputs
        self.inputs = torch.cat([before, x], 1)[:, x.shape[1] :]
        return before

    def keep_state(self, state: Tensor) -> None:
        """Keep the state after the last token."""
        self.state = state


class ShortConvolution(ParametersOfHeads):
    """Depthwise causal convolution over the last W tokens of a document, and SiLU: [B, T, D].

    The channels are those of queries, keys and values side by side, each with all of their heads.
    """

    def __init__(self, keys: int, values: int, width: int):
        super().__init__()
        self.width = width
        self.q = nn.Parameter(torch.empty(keys, width))
        self.k = nn.Parameter(torch.empty(keys, width))
        self.v = nn.Parameter(torch.empty(values, width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(
        self, x: Tensor, documents: DocumentIndex | None = None, cache: DeltaCache | None = None
    ) -> Tensor:
        before = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        if cache is not None:
            before = cache.shift_inputs(before, x)
        return self.convolve(
            x, before, None if documents is None else document_starts(documents, x)
        )

    def convolve(self, x: Tensor, before: Tensor, starts: Tensor | None) -> Tensor:
        """`short_convolution` with this process's part of the weights."""
        weight = torch.cat([self._local(weight) for weight in (self.q, self.k, self.v)])
        return short_convolution(x, weight, before, starts)


class DecayGate(ParametersOfHeads):
    """How much of the state a head keeps at a token: log decay [B, T, H] from `a` [B, T, H]."""

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.ones(heads))

    def forward(self, a: Tensor) -> Tensor:
        rate, bias = self._local(self.A_log).float().exp(), self._local(self.dt_bias).float()
        x = a.float() + bias
        # softplus; F.softplus returns gradients of other strides than the compiler expects (2.13)
        return -rate * torch.logaddexp(x, torch.zeros_like(x))


class DeltaRule(nn.Module):
    """`gated_delta_rule` without parameters; a module, so that parallelism can replace its forward.

    q, k [B, T, Hk, K]; v [B, T, H, V]; log_decay, beta [B, T, H]; returns [B, T, H, V]. A key head
    serves H / Hk consecutive heads. `state_size`: elements of the states of all heads.
    """

    def __init__(self, state_size: int):
        super().__init__()
        self.state_size = state_size

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        documents: DocumentIndex | None = None,
        cache: DeltaCache | None = None,
    ) -> Tensor:
        starts = None if documents is None else document_starts(documents, v)
        before = None if cache is None else cache.state
        out, state = gated_delta_rule(q, k, v, log_decay, beta, starts, before)
        if cache is not None:
            cache.keep_state(state)
        return out


def document_starts(documents: DocumentIndex, x: Tensor) -> Tensor:
    """Whether a document starts at each token of x [B, T, ...]: bool [B, T]."""
    batch, tokens = x.shape[:2]
    boundaries = documents.on_device.long()  # the last one is behind the tokens
    starts = torch.zeros(batch * tokens + 1, dtype=torch.bool, device=x.device)
    return starts.index_fill(0, boundaries, True)[:-1].view(batch, tokens)


def short_convolution(
    x: Tensor, weight: Tensor, before: Tensor, starts: Tensor | None = None
) -> Tensor:
    """SiLU of the causal convolution of x [B, T, D] with the rows of weight [D, W].

    `before` [B, W - 1, D]: the inputs before x. `starts` [B, T]: where documents start.
    """
    inputs, out, tokens = torch.cat([before, x], 1), x * weight[:, -1], x.shape[1]
    hidden = None  # tokens whose document started less than `distance` tokens before
    for distance in range(1, weight.shape[1]):
        earlier = inputs[:, before.shape[1] - distance :][:, :tokens]
        if starts is not None:
            started = F.pad(starts, (distance - 1, 0))[:, :tokens]
            hidden = started if hidden is None else hidden | started
            earlier = earlier.masked_fill(hidden.unsqueeze(-1), 0)
        out = out + earlier * weight[:, -1 - distance]
    return F.silu(out)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, V] and the last state [B, H, K, V] for the inputs of `DeltaRule`.

    `starts` [B, T]: where the state is reset, before that token. `state`: the one before the first
    token; default: zeros. Computes in fp32, or in fp64 if the values are.
    """
    (batch, tokens, heads, _), dtype = v.shape, torch.promote_types(v.dtype, torch.float32)
    shared_by = heads // k.shape[2]
    q, k = (tensor.repeat_interleave(shared_by, 2) for tensor in (q, k))
    if starts is not None:
        log_decay = log_decay.masked_fill(starts.unsqueeze(-1), -torch.inf)
    size = min(CHUNK, tokens)

    def in_chunks(x: Tensor) -> Tensor:
        """[B, T, H, X] -> [N, B*H, C, X]; the tokens at the end have no effect if they are 0."""
        x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, -tokens % size)).unflatten(1, (-1, size))
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()

    q, k, v = in_chunks(q), in_chunks(k), in_chunks(v)
    log_decay, beta = in_chunks(log_decay.unsqueeze(-1)), in_chunks(beta.unsqueeze(-1))
    decays = _decays_between_tokens(log_decay)
    from_start = log_decay.cumsum(2).exp()  # [N, B*H, C, 1]
    # What tokens write depends on what earlier tokens of the chunk wrote: (1 + L) written = ...
    lower = (beta * k @ k.mT * decays).tril(-1)
    known = torch.cat([beta * v, beta * from_start * k], -1)
    solved = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True)
    new, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    if state is None:
        state = v.new_zeros(batch * heads, k.shape[-1], v.shape[-1])
    keys = k * decays[:, :, -1].unsqueeze(-1)  # as they are at the end of the chunk
    written, states, last = scan_chunks(
        new.contiguous(),
        erased.contiguous(),
        keys,
        from_start[:, :, -1:].contiguous(),
        state.to(dtype).reshape(batch * heads, k.shape[-1], v.shape[-1]).contiguous(),
    )
    out = (q * from_start) @ states + (q @ k.mT * decays) @ written
    out = out.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]
    return out, last.unflatten(0, (batch, heads))


def _decays_between_tokens(log_decay: Tensor) -> Tensor:
    """exp of the sum of log_decay [N, H, C, 1] over tokens j + 1 to i, in row i and column j.

    0 above the diagonal. The sums are not differences of sums from the start of the chunk: those
    lose the digits of a small decay behind a large one, and -inf - -inf is NaN.
    """
    size = log_decay.shape[2]
    below = log_decay.expand(-1, -1, -1, size).tril(-1)
    allowed = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    return below.cumsum(2).masked_fill(~allowed, -torch.inf).exp()


# --- from chunk to chunk --------------------------------------------------------------------------
# A custom operator: a graph has one node, however many chunks there are.


@torch.library.custom_op("titanlite::scan_chunks", mutates_args=())
def scan_chunks(
    new: Tensor, erased: Tensor, keys: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pass `state` [H, K, V] through N chunks; returns what their tokens write [N, H, C, V], the
    state before each chunk [N, H, K, V], and the one after the last [H, K, V].

    A chunk writes `new` [N, H, C, V] - `erased` [N, H, C, K] @ state. The state is then multiplied
    by `decay` [N, H, 1, 1], and what its `keys` [N, H, C, K] write is added.
    """
    written, states, state = torch.empty_like(new), _empty_states(erased, new), state.clone()
    for index in range(len(new)):
        states[index] = state
        torch.baddbmm(new[index], erased[index], state, alpha=-1, out=written[index])
        state.mul_(decay[index]).baddbmm_(keys[index].mT, written[index])
    return written, states, state


@torch.library.custom_op("titanlite::scan_chunks_backward", mutates_args=())
def scan_chunks_backward(
    grad_written: Tensor,
    grad_states: Tensor,
    grad_last: Tensor,
    erased: Tensor,
    keys: Tensor,
    decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what is written, of the state after each chunk, and of the first state."""
    totals, after = torch.empty_like(grad_written), torch.empty_like(grad_states)
    grad = grad_last.clone()
    for index in reversed(range(len(erased))):
        after[index] = grad
        torch.baddbmm(grad_written[index], keys[index], grad, out=totals[index])
        grad.mul_(decay[index]).add_(grad_states[index])
        grad.baddbmm_(erased[index].mT, totals[index], alpha=-1)
    return totals, after, grad


def _empty_states(erased: Tensor, new: Tensor) -> Tensor:
    return new.new_empty(*erased.shape[:2], erased.shape[3], new.shape[3])


@scan_chunks.register_fake
def _empty_scan(new, erased, keys, decay, state) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(new), _empty_states(erased, new), torch.empty_like(state)


@scan_chunks_backward.register_fake
def _empty_scan_backward(grad_written, grad_states, grad_last, *_) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (grad_written, grad_states, grad_last)))


def _save_for_scan_backward(ctx, inputs, output) -> None:
    _, erased, keys, decay, _ = inputs
    ctx.save_for_backward(erased, keys, decay, *output[:2])


def _scan_autograd(ctx, grad_written: Tensor, grad_states: Tensor, grad_last: Tensor):
    erased, keys, decay, written, states = ctx.saved_tensors
    grads = [grad.contiguous() for grad in (grad_written, grad_states, grad_last)]
    new, after, first = scan_chunks_backward(*grads, erased, keys, decay)
    decay_grad = (states * after).sum((-2, -1), keepdim=True)
    return new, -new @ states.mT, written @ after.mT, decay_grad, first


scan_chunks.register_autograd(_scan_autograd, setup_context=_save_for_scan_backward)
