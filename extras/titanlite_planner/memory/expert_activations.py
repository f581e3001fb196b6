"""Bytes of the tensors of a mixture of experts, as `titanlite/models/moe.py` allocates them."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite_planner.workload import Workload

PER_ROW = 32  # bytes that the router saves: three indices in int64, and two weights in fp32
PER_BIAS = 16  # bytes a row for each of three biases: a one, and zeros that align it
GATED = 4  # tensors of the hidden width that are saved: gate, its activation, up and product
CLAMPED = 3  # more of them in gpt-oss: gate and up before they are clamped, and the sigmoid


@dataclass(frozen=True)
class ExpertActivations:
    """Bytes on a rank for one micro-batch. A row is a token for one of its experts."""

    gathers: bool  # the tensor ranks route the same tokens, which they gather before the router
    hidden: float  # hidden states of the tokens that this rank routes
    hidden_fp32: float  # the same in fp32
    rows: float  # a row for each expert of each token
    rows_fp32: float  # the same in fp32
    inner: float  # rows of the experts' hidden width
    saved_inner: int  # how many of them are saved
    shared: float  # tokens of the shared experts' hidden width
    shared_input: float  # tokens that the shared experts compute; 0: there are none
    router: float  # what the router saves, beside its input in fp32
    scores: float  # of every expert for every token, in fp32
    exchanged: bool  # the rows are sent to the experts of other ranks

    @property
    def saved(self) -> float:
        """What forward saves for backward, beside the input of the block's last norm."""
        inner = self.saved_inner * self.inner + GATED * self.shared
        return self.shared_input + self.hidden_fp32 + self.router + 2 * self.rows + inner

    @property
    def saved_operations(self) -> float:
        """Of that, the output of every second matmul but the router's; of exchanged rows, none."""
        rows = 0.0 if self.exchanged else self.inner
        if self.shared:
            return self.shared + self.shared_input + rows
        return rows + (0.0 if self.exchanged else self.rows)


def expert_activations(workload: Workload, tokens: float) -> ExpertActivations:
    """The tensors for the `tokens` of a micro-batch that the tensor ranks compute together.

    Experts that are sharded over the tensor ranks get the tokens of all of them; otherwise each
    rank routes its own.
    """
    model, layout = workload.model, workload.layout
    experts, size = model.experts, workload.numerics.activation_bytes
    assert experts is not None
    split = layout.tensor if layout.expert_tensor_ranks == 1 else 1
    routed = tokens / split
    rows = routed * experts.active
    scores = 4 * routed * experts.count
    per_row = PER_ROW + (3 * PER_BIAS if model.biases in (True, "linear") else 0)
    return ExpertActivations(
        gathers=split == 1,
        hidden=routed * model.dim * size,
        hidden_fp32=routed * model.dim * 4,
        rows=rows * model.dim * size,
        rows_fp32=rows * model.dim * 4,
        inner=rows * experts.hidden_dim / layout.expert_tensor_ranks * size,
        saved_inner=GATED + (CLAMPED if experts.clamped else 0),
        shared=tokens * experts.shared_hidden_dim / layout.tensor * size,
        shared_input=tokens * model.dim * size if experts.shared_hidden_dim else 0.0,
        router=scores + per_row * rows + 4 * experts.count * model.dim,
        scores=scores,
        exchanged=layout.expert > 1,
    )
