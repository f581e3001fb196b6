"""The router of a mixture of experts: which experts compute each token, and with which weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.errors import ConfigError


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of the experts of one block, and how tokens are routed to them."""

    count: int  # routed experts
    active: int  # experts that compute a token
    hidden_dim: int  # hidden width of one expert
    shared_dim: int = 0  # hidden width of the experts that compute every token; 0: none
    shared_gate: bool = False  # each token weighs their output by a sigmoid
    score: Literal["softmax", "sigmoid"] = "softmax"  # of the logits of all experts
    normalize: bool = True  # divide the weights of a token by their sum, if they are several
    route_scale: float = 1.0  # factor of the weights, after that
    groups: int = 1  # groups of consecutive experts
    active_groups: int = 1  # groups that a token may select experts from
    selection_bias: bool = False  # select by score + bias; the bias is not part of the weights
    biases: bool = False  # of the linear layers of the experts and the router
    clamped: bool = False  # the activation is `clamped_swiglu`


@dataclass(frozen=True)
class LoadBalancing:
    """How the load of experts is balanced; 0 disables a part."""

    aux_loss_coef: float = 0.0  # of the auxiliary loss E * sum_i f_i P_i
    z_loss_coef: float = 0.0  # of the mean squared log-sum-exp of the router's logits
    bias_update_rate: float = 0.0  # step of the selection bias, without a loss

    def __str__(self) -> str:
        parts = {
            "auxiliary loss": self.aux_loss_coef,
            "z-loss": self.z_loss_coef,
            "bias update": self.bias_update_rate,
        }
        return ", ".join(f"{name} {value:g}" for name, value in parts.items() if value) or "none"


NO_BALANCING = LoadBalancing()


def check_expert_sizes(sizes: ExpertSizes) -> Iterator[ConfigError]:
    """Reject numbers of experts that do not fit together."""
    selectable = sizes.count // sizes.groups * sizes.active_groups
    if sizes.active_groups > sizes.groups:
        yield ConfigError(
            f"model.n_active_groups = {sizes.active_groups}: there are only"
            f" model.n_expert_groups = {sizes.groups}.",
            fix=f"Use at most {sizes.groups}.",
        )
    elif sizes.count % sizes.groups:
        yield ConfigError(
            f"model.n_experts = {sizes.count}: is not a multiple of its {sizes.groups} groups.",
            fix=f"Use a multiple of {sizes.groups}.",
        )
    elif sizes.active > selectable:
        where = f" in {sizes.active_groups} of {sizes.groups} groups" if sizes.groups > 1 else ""
        yield ConfigError(
            f"model.n_active_experts = {sizes.active}: a token can select at most {selectable}"
            f" experts{where} (model.n_experts = {sizes.count}).",
            fix=f"Use at most {selectable}, or more experts.",
        )


class RouterGate(nn.Linear):
    """The linear layer of a router, or of the gate of the shared experts: logits in fp32, whatever
    the dtype of x and of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            x.float(), self.weight.float(), None if self.bias is None else self.bias.float()
        )


class Router(nn.Module):
    """Select experts for each token, and count how many tokens each expert gets.

    The buffers are in fp32 in every precision. The bias that selects is part of the model;
    `previous_load`, the fraction of all selections that each expert had in the previous step, is
    part of the state of a run.
    """

    expert_bias: Tensor | None
    previous_load: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, dim: int, sizes: ExpertSizes):
        super().__init__()
        self.sizes = sizes
        self.gate = RouterGate(dim, sizes.count, bias=sizes.biases)
        bias = torch.zeros(sizes.count) if sizes.selection_bias else None
        self.register_buffer("expert_bias", bias)
        load = torch.full((sizes.count,), 1 / sizes.count)
        self.register_buffer("previous_load", load, persistent=False)
        # Of this step and this rank: selections of each expert; sums of `SUMS` over tokens
        counts, sums = torch.zeros(sizes.count, dtype=torch.int64), torch.zeros(len(SUMS))
        self.register_buffer("counts", counts, persistent=False)
        self.register_buffer("sums", sums, persistent=False)
        self.balancing = NO_BALANCING
        self._divisor: Tensor | float = 1.0  # of the balancing losses
        self.replicas = 1  # ranks that route the same tokens
        self._counted: tuple[int, int] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [N, D] to the indices of their experts [N, k] and fp32 weights [N, k]."""
        logits = self.gate(x)
        scores = logits.softmax(-1) if self.sizes.score == "softmax" else logits.sigmoid()
        # kept: a recomputation whose scores are rounded differently selects the same experts
        indices = keep_for_recompute(lambda: self._select(scores.detach()))
        weights = self._weigh(scores, indices)
        if torch.is_grad_enabled():
            weights = self._observe(logits, scores, indices, weights)
        return indices, weights

    def compile_functions(self, compile: Callable[[Callable], Callable]) -> None:
        """Compile what is computed from the scores; no backward recomputes the selection."""
        for name in ("_select", "_weigh", "_sum_losses"):
            setattr(self, name, compile(getattr(self, name)))

    def _weigh(self, scores: Tensor, indices: Tensor) -> Tensor:
        """The weights [N, k] of the selected experts."""
        weights = scores.gather(-1, indices)
        # One weight divided by itself is 1, and the gate would have no gradient but rounding.
        if self.sizes.normalize and self.sizes.active > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # as DeepSeek-V3's model
        return weights * self.sizes.route_scale

    def _select(self, scores: Tensor) -> Tensor:
        """The experts [N, k] with the largest score + bias, within the best groups."""
        sizes = self.sizes
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if sizes.groups > 1:
            # The score of a group is the sum of its two best (DeepSeek-V3,
            # https://arxiv.org/abs/2412.19437, section 2.1.2, and its published code)
            by_group = scores.unflatten(-1, (sizes.groups, -1))
            best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
            groups = stable_top_k(best, sizes.active_groups)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, groups, True)
            scores = by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        return stable_top_k(scores, sizes.active)

    # --- balancing --------------------------------------------------------------------------------

    def set_balancing(self, balancing: LoadBalancing) -> None:
        """Set the coefficients of the balancing losses."""
        self.balancing = balancing

    def share_tokens(self, ranks: int) -> None:
        """Declare that `ranks` ranks route the same tokens and sum the gradients of this router.

        Each of them then adds its share of the balancing losses' gradient.
        """
        self.replicas = ranks

    def begin_step(self, divisor: Tensor | float) -> None:
        """Forget the counts of the previous step; balancing losses are summed over tokens, and
        their gradients divided by `divisor`: tokens of the global batch / loss scale."""
        self._divisor = divisor
        self.reset_counts()

    def count_only(self, counted: tuple[int, int] | None) -> None:
        """Count and balance the first `counted[0]` of `counted[1]` sequences only; None: all."""
        self._counted = counted

    def reset_counts(self) -> None:
        """Forget what was counted in this step."""
        self.counts.zero_()
        self.sums.zero_()

    @torch.no_grad()
    def finish_step(self, counts: Tensor, accept: Tensor | None) -> None:
        """Update the bias and the load by the selections `counts` [E] of the global batch.

        Unless `accept`, 0-d and bool, is False; the host need not know it.
        """
        counts = counts.float()
        # DeepSeek-V3, section 2.1.2: a bias grows while its expert has less than the mean load
        if self.expert_bias is not None and (rate := self.balancing.bias_update_rate):
            change = rate * (counts.mean() - counts).sign()
            self.expert_bias.copy_(
                _if_accepted(accept, self.expert_bias + change, self.expert_bias)
            )
        load = counts / counts.sum().clamp(min=1)
        self.previous_load.copy_(_if_accepted(accept, load, self.previous_load))

    @torch.no_grad()
    def set_previous_load(self, load: Tensor | None) -> None:
        """Set `previous_load` [E]; None: as before the first step."""
        if load is None:
            self.previous_load.fill_(1 / self.sizes.count)
        else:
            self.previous_load.copy_(load)

    def _observe(self, logits: Tensor, scores: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Count selections, and attach the balancing losses to the weights."""
        has_loss = bool(self.balancing.aux_loss_coef or self.balancing.z_loss_coef)
        with torch.set_grad_enabled(has_loss):
            # kept: a recomputation can come after the forward of a later micro-batch
            counted, real = keep_for_recompute(lambda: self._counted), None
            if counted is not None:  # tokens are in the order of sequences
                tokens = torch.arange(len(logits), device=logits.device)
                real = tokens < len(logits) // counted[1] * counted[0]
            loss, sums = self._sum_losses(logits, scores, real)
        keep_for_recompute(lambda: self._count(indices, sums, real))
        if has_loss:
            factor = torch.ones_like(loss) / (self._divisor * self.replicas)
            weights = _AttachLoss.apply(weights, loss, factor)
        return weights

    def _count(self, indices: Tensor, sums: Tensor, real: Tensor | None) -> None:
        ones = torch.ones_like(indices) if real is None else real.long()[:, None].expand_as(indices)
        self.counts.scatter_add_(0, indices.flatten(), ones.flatten())
        self.sums += sums

    def _sum_losses(
        self, logits: Tensor, scores: Tensor, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The balancing loss, and `SUMS`, of the tokens, or of those [N] that are `real`."""
        probabilities = scores
        if self.sizes.score == "sigmoid":
            probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        log_sums = logits.logsumexp(-1)
        if real is not None:
            probabilities = probabilities.where(real.unsqueeze(-1), 0.0)
            log_sums = log_sums.where(real, 0.0)
        # E * sum_i f_i P_i, summed over tokens; f_i of the previous step's global batch
        aux_loss = (probabilities @ self.previous_load).sum() * self.sizes.count
        z_loss = log_sums.square().sum()
        loss = self.balancing.aux_loss_coef * aux_loss + self.balancing.z_loss_coef * z_loss
        entropy = -torch.special.xlogy(probabilities, probabilities).sum()
        return loss, torch.stack((aux_loss, z_loss, entropy)).detach()

    def init_buffers(self) -> None:
        """Set the state of a new run."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1 / self.sizes.count if name == "previous_load" else 0)

    def move_buffers(self, device: torch.device) -> None:
        """Move the state to `device`: with CPU offload, the weights are elsewhere."""
        for name, buffer in self.named_buffers():
            self._buffers[name] = buffer.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        module = super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():  # `module.to(dtype)` casts buffers
            if buffer is not None and buffer.is_floating_point():
                self._buffers[name] = buffer.float()
        return module


SUMS = ("aux_loss", "z_loss", "entropy")  # what a router sums over tokens, without coefficients


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of a model, or of its part on this rank."""
    return [module for module in model.modules() if isinstance(module, Router)]


def stable_top_k(scores: Tensor, k: int) -> Tensor:
    """The indices [N, k] of the largest scores [N, E] in descending order; ties by index.

    torch.topk does not say which of several equal scores it returns, and a stable sort of all
    scores is three to six times slower on a CPU. argmax returns the first maximum.
    """
    rest, selected = scores.clone(), []
    for _ in range(k):
        index = rest.argmax(-1, keepdim=True)
        selected.append(index)
        if torch.compiler.is_compiling():  # into one kernel: the compiler does not fuse a scatter
            columns = torch.arange(scores.shape[-1], device=scores.device)
            rest = rest.masked_fill(columns == index, -torch.inf)
        else:
            rest.scatter_(-1, index, -torch.inf)
    return torch.cat(selected, -1)


_kept: ContextVar[list[Any] | Iterator[Any] | None] = ContextVar("kept", default=None)


def reuse_in_recomputation(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of one call; later calls, recomputations, reuse results that the first kept."""
    results, recomputations = list[Any](), count()

    @torch.compiler.disable(recursive=False)
    def run(*inputs: Any) -> Any:
        context = copy_context()
        context.run(_kept.set, iter(results) if next(recomputations) else results)
        return context.run(forward, *inputs)

    return run


def keep_for_recompute(compute: Callable[[], Any]) -> Any:
    """The result of `compute`; in a recomputation, that of the forward."""
    kept = _kept.get()
    if isinstance(kept, Iterator):
        return next(kept)
    result = compute()
    if kept is not None:
        kept.append(result)
    return result


def _if_accepted(accept: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if accept is None else torch.where(accept.to(new.device), new, old)


class _AttachLoss(torch.autograd.Function):
    """Return `x`, and in backward give `loss` the gradient `factor`.

    So a loss of a layer needs no path to the model's loss, which may be on another pipeline rank.
    """

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, *ctx.saved_tensors, None
