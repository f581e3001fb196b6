"""The balancing of experts as a formula, on a plain model that sees the whole global batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanlite.models import LoadBalancing, Router


class ReferenceBalancing:
    """Records what the routers of a model do in forward, by hooks, and balances them.

    None of it is titanlite's own balancing: routers only compute and select.
    """

    def __init__(self, model: nn.Module, balancing: LoadBalancing):
        self._balancing = balancing
        self._routers = {n: m for n, m in model.named_modules() if isinstance(m, Router)}
        self._logits: dict[str, list[Tensor]] = {name: [] for name in self._routers}
        self._selected: dict[str, list[Tensor]] = {name: [] for name in self._routers}
        self._fractions = {
            n: torch.full((r.sizes.count,), 1 / r.sizes.count) for n, r in self._routers.items()
        }
        self.loads: list[list[float]] = []  # of each step: as `LoadStatistics`
        self._losses: list[list[float]] = []  # of each router: entropy and the two losses
        self.closest = 1.0  # smallest distance of a selected score from one that is not selected
        for name, router in self._routers.items():
            router.gate.register_forward_hook(lambda _, __, out, n=name: self._add_logits(n, out))
            router.register_forward_hook(lambda _, __, out, n=name: self._add_selection(n, out[0]))

    def _add_logits(self, name: str, logits: Tensor) -> None:
        if torch.is_grad_enabled():
            self._logits[name].append(logits)

    def _add_selection(self, name: str, indices: Tensor) -> None:
        if torch.is_grad_enabled():
            self._selected[name].append(indices)

    def loss(self) -> Tensor | float:
        """The balancing losses of the last forward, with their coefficients."""
        return sum(map(self._loss_of, self._routers))

    def loss_of_extra_forward(self) -> Tensor | float:
        """`loss` of a forward that is not part of a step; forgets it."""
        loss = self.loss()
        for name in self._routers:
            self._logits[name], self._selected[name] = [], []
        self._losses = []
        return loss

    def _loss_of(self, name: str) -> Tensor:
        logits, sizes = torch.cat(self._logits[name]), self._routers[name].sizes
        scores = logits.sigmoid() if sizes.score == "sigmoid" else logits.softmax(-1)
        self._measure_distance(scores.detach(), self._routers[name])
        probabilities = scores / scores.sum(-1, keepdim=True)
        mean = probabilities.mean(0)
        aux_loss = sizes.count * (self._fractions[name] * mean).sum()
        z_loss = logits.exp().sum(-1).log().square().mean()
        aux_loss = self._balancing.aux_loss_coef * aux_loss
        z_loss = self._balancing.z_loss_coef * z_loss
        entropy = -(probabilities * probabilities.log()).sum(-1).mean()
        self._losses.append([entropy.item(), aux_loss.item(), z_loss.item()])
        return aux_loss + z_loss

    def _measure_distance(self, scores: Tensor, router: Router) -> None:
        if router.expert_bias is not None:
            scores = scores + router.expert_bias
        ordered = scores.sort(dim=-1, descending=True).values
        k = router.sizes.active
        self.closest = min(self.closest, (ordered[:, k - 1] - ordered[:, k]).min().item())

    @torch.no_grad()
    def finish_step(self) -> None:
        """Update the biases, record the loads, and forget the forward."""
        relative = []
        for name, router in self._routers.items():
            selected = torch.cat(self._selected[name]).flatten()
            counts = torch.bincount(selected, minlength=router.sizes.count).float()
            self._fractions[name] = counts / len(selected)
            relative.append(counts / counts.mean())
            if router.expert_bias is not None:
                step = (counts < counts.mean()).float() - (counts > counts.mean()).float()
                router.expert_bias += self._balancing.bias_update_rate * step
            self._logits[name], self._selected[name] = [], []
        if relative:
            entropy, aux_loss, z_loss = torch.tensor(self._losses, dtype=torch.float64).sum(0)
            largest = max(load.max().item() for load in relative)
            variation = max(load.std(correction=0).item() for load in relative)
            mean_entropy = entropy.item() / len(relative)
            self.loads.append([largest, variation, mean_entropy, aux_loss.item(), z_loss.item(), 0])
        self._losses = []
