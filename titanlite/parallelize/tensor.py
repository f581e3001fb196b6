"""Tensor and sequence parallel: the table from the roles in a model's plan to ParallelStyles.

To add a parallel style: write the class in a file of its own (see `tensor_styles.py`), and add one
line to `TENSOR_PARALLEL_ROLES`. A model family can then use the role in its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from titanlite.distributed.mesh import Degrees
from titanlite.errors import ConfigError
from titanlite.models import ModelSizes, first_match
from titanlite.parallelize import tensor_styles as styles
from titanlite.parallelize.tensor_styles import DEFAULT_STYLES, SEQUENCE_DIM, LinearStyles


@dataclass(frozen=True)
class StyleOptions:
    """Everything that the ParallelStyle of a role may depend on."""

    head_width: int  # features per attention head
    loss_parallel: bool  # compute the loss from sharded logits
    linear: LinearStyles = DEFAULT_STYLES  # torch's styles for linear layers, or those for Float8


@dataclass(frozen=True)
class TensorParallelRole:
    """What tensor parallel does with the modules of one role."""

    style: Callable[[StyleOptions], ParallelStyle]
    sharded_dim: int | None = None
    # of the weight [out, in], or [out] of a norm; None: replicated, or no weight
    whole_heads: bool = False  # replicated unless the ranks divide the number of heads
    gathered_input: bool = False  # its input is all-gathered by the "gather_sequence" parent


# Between modules, activations are plain local tensors: [B, T/tp, D] on the residual stream, and
# full sequences of this rank's heads or hidden features inside attention and feed-forward.
TENSOR_PARALLEL_ROLES: dict[str, TensorParallelRole] = {
    # embedding, sharded by vocabulary; its output becomes sequence-parallel
    "vocab_in": TensorParallelRole(lambda o: styles.VocabularyEmbedding(), sharded_dim=0),
    # norm on the sequence-parallel residual stream
    "sequence": TensorParallelRole(lambda o: styles.LocalForward(styles.normalize_locally)),
    # linear layer on the sequence-parallel residual stream
    "sequence_linear": TensorParallelRole(lambda o: styles.LocalForward(styles.project_locally)),
    # learned positions, added to the sequence-parallel residual stream
    "positions": TensorParallelRole(lambda o: styles.LocalForward(styles.add_own_positions)),
    # module that all-gathers the sequence for its column-parallel layers: attention, feed-forward
    "gather_sequence": TensorParallelRole(lambda o: styles.gather_sequence(o.linear.gather)),
    # column-parallel linear layer
    "colwise": TensorParallelRole(lambda o: o.linear.colwise(), sharded_dim=0, gathered_input=True),
    # column-parallel projection to keys or values
    "colwise_kv": TensorParallelRole(
        lambda o: styles.KeyValueColwise(o.head_width, o.linear.colwise),
        sharded_dim=0,
        whole_heads=True,
        gathered_input=True,
    ),
    # linear layer or norm whose input, weight and output every rank has
    "replicated": TensorParallelRole(lambda o: styles.Replicated(), gathered_input=True),
    # module whose output is used by the heads of every rank
    "shared_by_heads": TensorParallelRole(lambda o: styles.SharedByHeads()),
    # norm of each attention head
    "heads": TensorParallelRole(lambda o: styles.LocalForward(styles.normalize_locally)),
    # numbers for each head: attention sinks, decays, weights of a depthwise convolution
    "per_head": TensorParallelRole(lambda o: styles.PerHead(), sharded_dim=0),
    # norm of the queries or keys of all heads together
    "projection": TensorParallelRole(
        lambda o: styles.ProjectionNorm(o.head_width), sharded_dim=0, whole_heads=True
    ),
    # row-parallel linear layer; its output is reduce-scattered to the residual stream
    "rowwise": TensorParallelRole(
        lambda o: o.linear.rowwise(output_layouts=Shard(SEQUENCE_DIM)), sharded_dim=1
    ),
    # output layer and loss, sharded by vocabulary
    "vocab_out": TensorParallelRole(
        lambda o: styles.OutputLayerColwise(o.loss_parallel), sharded_dim=0
    ),
}


def apply_tensor_parallel(
    model: nn.Module,
    plan: Mapping[str, str],
    tp: DeviceMesh,
    head_width: int,
    loss_parallel: bool,
    linear_styles_of: Callable[[nn.Module], LinearStyles] = lambda layer: DEFAULT_STYLES,
) -> None:
    """Parallelize each module by the first pattern of `plan` (-> role) that matches its name.

    `linear_styles_of` selects the styles of a linear layer. Raises ConfigError for a role that
    `TENSOR_PARALLEL_ROLES` does not have.
    """
    for pattern, planned in plan.items():
        if planned not in TENSOR_PARALLEL_ROLES:
            raise ConfigError(
                f'tensor-parallel plan: "{pattern}" has the unknown role "{planned}".',
                fix=f"Use one of {', '.join(TENSOR_PARALLEL_ROLES)}.",
            )
    if tp.size() == 1:
        return
    roles = {
        name: role
        for name, module in model.named_modules()
        if not isinstance(module, nn.Identity) and (role := first_match(plan, name))
    }
    style_of = {}
    for name, role in roles.items():
        layers = [name]
        if role == "gather_sequence":  # styles of the layers that it gathers for, if they agree
            layers = [
                layer
                for layer, its_role in roles.items()
                if layer.startswith(f"{name}.") and TENSOR_PARALLEL_ROLES[its_role].gathered_input
            ]
        linears = [m for m in map(model.get_submodule, layers) if isinstance(m, nn.Linear)]
        kinds = {linear_styles_of(each) for each in linears}
        linear = kinds.pop() if len(kinds) == 1 else DEFAULT_STYLES
        options = StyleOptions(head_width, loss_parallel, linear)
        style_of[name] = TENSOR_PARALLEL_ROLES[role].style(options)
    parallelize_module(model, tp, style_of)


def weight_shard_size(
    role: str | None, rows: int, columns: int, ranks: int, head_width: int
) -> tuple[int, int]:
    """[rows, columns] of a rank's shard of the weight of a linear layer; the largest, if uneven."""
    entry = TENSOR_PARALLEL_ROLES[role] if role else None
    if entry is None or entry.sharded_dim is None:
        return rows, columns
    if entry.whole_heads and rows // max(1, head_width) % ranks:  # 0: refused elsewhere
        return rows, columns
    return (-(-rows // ranks), columns) if entry.sharded_dim == 0 else (rows, columns // ranks)


def check_tensor_parallel(
    degrees: Degrees, sizes: ModelSizes, seq_len: int, seq_len_key: str
) -> Iterator[ConfigError]:
    """Reject a degree that does not divide the model's sizes, or sequences of `seq_len` tokens."""
    tensor = degrees.tensor
    if tensor == 1:
        return
    key = "parallelism.tensor_parallel_degree"
    for field in ("n_heads", "hidden_dim", "linear_key_heads"):
        if field not in sizes.__dataclass_fields__:
            continue  # of other families; check_expert_parallel checks the width of experts
        size = getattr(sizes, field)
        if size % tensor:
            yield ConfigError(
                f"{key} = {tensor}: does not divide model.{field} = {size}.",
                fix=f"Use a divisor of {size}.",
            )
    kv_heads = sizes.n_kv_heads
    if kv_heads % tensor and tensor % kv_heads:
        yield ConfigError(
            f"{key} = {tensor}: neither divides model.n_kv_heads = {kv_heads} nor is a multiple"
            " of it.",
            fix=f"Use a divisor of {kv_heads}, or a multiple (each head is then replicated).",
        )
    vocabulary = sizes.vocab_size
    if (tensor - 1) * -(-vocabulary // tensor) >= vocabulary:
        yield ConfigError(
            f"{key} = {tensor}: a shard has {-(-vocabulary // tensor)} of model.vocab_size ="
            f" {vocabulary} rows, so the last rank would have none.",
            fix="Use a smaller degree, or a larger model.vocab_size.",
        )
    # Under context parallel, check_context_parallel checks the length of a shard instead.
    if seq_len % tensor and degrees.context == 1:
        yield ConfigError(
            f"{key} = {tensor}: does not divide {seq_len_key} = {seq_len}; sequence parallel shards"
            " the residual stream over the tensor-parallel ranks.",
            fix=f"Set {seq_len_key} to a multiple of {tensor}.",
        )
