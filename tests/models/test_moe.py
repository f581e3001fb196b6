"""Mixture of experts: against plain loops over tokens and experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from titanlite.distributed.mesh import ParallelismConfig
from titanlite.job import JobConfig
from titanlite.job.read import check_job
from titanlite.kernels.grouped import (
    Float8Cast,
    RowGroups,
    grouped_matmul,
    grouped_matmuls,
    has_grouped_kernel,
    row_groups,
)
from titanlite.models import (
    FAMILIES,
    LLAMA3,
    ExpertSizes,
    LoadBalancing,
    MixtureOfExperts,
    ModelConfig,
    Router,
)
from titanlite.models.mup import BaseWidths, MupConfig, width_scales
from titanlite.models.router import check_expert_sizes, stable_top_k
from titanlite.optim import OptimizerConfig
from titanlite.optim.muon import Muon
from titanlite.optim.recipe import MatrixFacts
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    checkpoint_blocks,
)
from titanlite_planner.model_shape import shape_of

SIZES = ExpertSizes(count=8, active=2, hidden_dim=24, shared_dim=16)
GROUPED = ExpertSizes(
    count=8,
    active=3,
    hidden_dim=24,
    score="sigmoid",
    route_scale=2.5,
    groups=4,
    active_groups=2,
    selection_bias=True,
)


def build(sizes: ExpertSizes, seed: int = 0) -> MixtureOfExperts:
    torch.manual_seed(seed)
    moe = MixtureOfExperts(16, sizes)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if moe.router.expert_bias is not None:
        moe.router.expert_bias.normal_(std=0.2)
    return moe


def select(scores: list[float], bias: list[float], sizes: ExpertSizes) -> list[int]:
    """The experts of one token, by the definition in DeepSeek-V3's report."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    width = sizes.count // sizes.groups
    groups = [biased[g * width : (g + 1) * width] for g in range(sizes.groups)]
    best = sorted(range(sizes.groups), key=lambda g: (-sum(sorted(groups[g])[-2:]), g))
    allowed = [e for e in range(sizes.count) if e // width in best[: sizes.active_groups]]
    return sorted(allowed, key=lambda e: (-biased[e], e))[: sizes.active]


def reference(moe: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    sizes, router, experts, outs = moe.sizes, moe.router, moe.experts, []
    bias = [0.0] * sizes.count if router.expert_bias is None else router.expert_bias.tolist()
    for token in x.flatten(0, 1):
        logits = router.gate.weight @ token
        scores = logits.softmax(-1) if sizes.score == "softmax" else logits.sigmoid()
        chosen = select(scores.tolist(), bias, sizes)
        normalize = sizes.normalize and sizes.active > 1
        weights = scores[chosen] / (scores[chosen].sum() if normalize else 1.0)
        outs.append(
            sum(
                weight
                * sizes.route_scale
                * (experts.w2[e] @ (F.silu(experts.w1[e] @ token) * (experts.w3[e] @ token)))
                for e, weight in zip(chosen, weights, strict=True)
            )
        )
    out = torch.stack(outs)
    if moe.shared_experts is not None:
        shared = moe.shared_experts
        tokens = x.flatten(0, 1)
        hidden = F.silu(tokens @ shared.w1.weight.T) * (tokens @ shared.w3.weight.T)
        out = out + hidden @ shared.w2.weight.T
    return out.view_as(x)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, active=1), GROUPED], ids=["a", "b", "c"])
def test_the_output_and_every_gradient_are_those_of_a_loop_over_tokens(sizes, compiled):
    moe, x = build(sizes), torch.randn(2, 7, 16, requires_grad=True)
    moe.router.set_balancing(LoadBalancing(z_loss_coef=1e-30))  # its graph, without an effect
    if compiled:
        moe.compile_functions("aot_eager")
    grad, inputs = torch.randn(2, 7, 16), [x, *moe.parameters()]
    for actual, expected in zip(
        torch.autograd.grad(moe(x), inputs, grad),
        torch.autograd.grad(reference(moe, x), inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_experts_without_tokens_have_a_zero_gradient():
    moe, x = build(replace(SIZES, active=1)), torch.randn(1, 3, 16)
    moe(x).sum().backward()
    empty = moe.router.counts == 0
    assert empty.sum() >= 5  # three tokens for eight experts
    for weight in (moe.experts.w1, moe.experts.w2, moe.experts.w3):
        assert weight.grad[empty].eq(0).all() and weight.grad[~empty].ne(0).any(-1).any()


def test_the_grouped_matmul_is_exact_for_uneven_groups():
    """Sizes that no grouped kernel accepts, the first and the last group empty."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 5, 1, 0, 7, 0])
    x = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, 5, dtype=torch.float64, requires_grad=True)
    groups = row_groups(counts, x, weight)
    expert = torch.repeat_interleave(torch.arange(6), counts)
    expected = torch.einsum("mk,mnk->mn", x, weight[expert])
    torch.testing.assert_close(grouped_matmul(x, weight, groups), expected)
    assert torch.autograd.gradcheck(lambda *a: grouped_matmul(*a, groups), (x, weight))


def test_the_grouped_matmul_of_rounded_groups_is_that_of_each_expert():
    """In bfloat16 on a CPU it computes more rows than a group has: none may reach another group."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 5, 33, 1, 0, 16, 70, 3, 0])
    x = torch.randn(int(counts.sum()), 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9, 24, 32, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(len(x), 24, dtype=torch.bfloat16)
    out = grouped_matmul(x, weight, row_groups(counts, x, weight))
    x_grad, weight_grad = torch.autograd.grad(out, (x, weight), grad)
    # rounded to bfloat16 once: half of the last bit
    close = partial(torch.testing.assert_close, rtol=2**-8, atol=1e-4)
    groups = [each.split(counts.tolist()) for each in (x, out, grad, x_grad)]
    for expert, rows in enumerate(zip(*groups, strict=True)):
        own_x, own_out, own_grad, own_x_grad = (each.float() for each in rows)
        close(own_out, own_x @ weight[expert].float().T)
        close(own_x_grad, own_grad @ weight[expert].float())
        close(weight_grad[expert].float(), own_grad.T @ own_x)


def round_to_float8(rows: torch.Tensor) -> torch.Tensor:
    """Each row [..., K] with the smallest power of two that brings it into the range of e4m3."""
    rounded = []
    for row in rows.flatten(0, -2):
        scale = 2.0**-40
        while row.abs().max() / scale > 448:
            scale *= 2
        rounded.append((row / scale).to(torch.float8_e4m3fn).to(row.dtype) * scale)
    return torch.stack(rounded).view(rows.shape)


def spread(*shape: int) -> torch.Tensor:
    """Magnitudes that vary by columns and by rows: with another scale the smallest are zero."""
    columns = torch.logspace(-3, 3, shape[-1])
    return torch.randn(shape) * columns * columns[torch.randint(shape[-1], (*shape[:-1], 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_emulated_float8_rounds_each_row_along_the_summed_dimension(dtype):
    """The rows and weights of forward; of backward the gradients, and columns of the weights."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 5, 1, 0, 40])
    x, *weights = (
        spread(*s).to(dtype).requires_grad_() for s in [(46, 64), (5, 32, 64), (5, 24, 64)]
    )
    grads = [spread(46, n).to(dtype) for n in (32, 24)]
    groups = row_groups(counts, x, *weights)
    outs = grouped_matmuls(x, tuple(weights), groups, Float8Cast(emulate=True))
    x_grad, *weight_grads = torch.autograd.grad(outs, (x, *weights), grads)
    exact = [grouped_matmul(x, weight, groups) for weight in weights]
    exact_x_grad, *exact_weight_grads = torch.autograd.grad(exact, (x, *weights), grads)
    assert all(map(torch.equal, weight_grads, exact_weight_grads))  # in high precision
    assert 0.01 < (x_grad - exact_x_grad).norm() / exact_x_grad.norm() < 0.06
    expected_x_grad = torch.zeros_like(x_grad)
    for out, weight, grad in zip(outs, weights, grads, strict=True):
        by_row, by_column = round_to_float8(weight.detach()), round_to_float8(weight.detach().mT)
        assert torch.equal(out, grouped_matmul(round_to_float8(x.detach()), by_row, groups))
        expected_x_grad += grouped_matmul(round_to_float8(grad), by_column, groups)
    assert torch.equal(x_grad, expected_x_grad)


def test_an_inf_or_nan_stays_one_in_float8():
    x = torch.ones(3, 16)
    x[0, 3], x[1, 5] = torch.inf, torch.nan
    rounded = Float8Cast(emulate=True)(x)
    assert rounded[:2].isnan().any(-1).all() and torch.equal(rounded[2], x[2])


def test_the_float8_kernel_gets_the_strides_and_scales_that_torch_requires(monkeypatch):
    """By the checks of the operator that has them without a GPU. Without rows it is not called."""
    calls = []

    def kernel(a, b, a_scale, a_recipe, b_scale, b_recipe, *, offs, use_fast_accum):
        assert a_recipe == b_recipe == F.ScalingType.RowWise
        calls.append((*a.shape, b.shape[-1], use_fast_accum))
        return torch.ops.aten._scaled_grouped_mm(a, b, a_scale, b_scale, offs)

    monkeypatch.setattr(F, "scaled_grouped_mm", kernel)
    on_meta = partial(torch.empty, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ends = torch.empty(8, dtype=torch.int32, device="meta")
    groups = RowGroups(None, ends, torch.empty(8, dtype=torch.bool, device="meta"))
    weights = on_meta(8, 32, 64), on_meta(8, 48, 64)
    no_rows = groups._replace(on_host=torch.zeros(8, dtype=torch.int64))
    for x, of_rows in ((on_meta(40, 64), groups), (on_meta(0, 64), no_rows)):
        outs = grouped_matmuls(x, weights, of_rows, Float8Cast(emulate=False))
        grads = torch.autograd.grad([out.sum() for out in outs], (x, *weights))
        assert [g.shape for g in grads] == [x.shape, *(w.shape for w in weights)]
    forward, backward = ((40, 64, 32), (40, 64, 48)), ((40, 32, 64), (40, 48, 64))
    fast = [(*sizes, True) for sizes in forward]
    assert calls == fast + [(*sizes, False) for sizes in backward]


def test_casts_are_compiled_once_for_each_width_not_for_each_number_of_rows():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    cast = Float8Cast(emulate=False)
    cast.compile(partial(torch.compile, backend=backend, fullgraph=True))
    weight = torch.randn(4, 32, 64)
    for rows in (7, 9, 30):
        for operand in (torch.randn(rows, 64), torch.randn(rows, 32), weight, weight.mT):
            data, scales = cast(operand)
            assert data.is_contiguous() and scales.shape == operand.shape[:-1]
    assert len(graphs) == 4


@pytest.mark.parametrize(
    "capability, experts, dtype, width, expected",
    [
        ((9, 0), 8, torch.bfloat16, 64, True),
        ((10, 3), 1023, torch.bfloat16, 64, True),
        ((8, 0), 8, torch.bfloat16, 64, False),  # torch's own loop, which waits at every call
        ((12, 0), 8, torch.bfloat16, 64, False),
        ((9, 0), 1024, torch.bfloat16, 64, False),  # torch raises an error
        ((9, 0), 8, torch.float32, 64, False),
        ((9, 0), 8, torch.bfloat16, 60, False),
    ],
)
def test_the_grouped_kernel_is_used_where_torch_has_one(
    capability, experts, dtype, width, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        x = torch.empty(16, 64, dtype=dtype, device="cuda")
        weight = torch.empty(experts, width, 64, dtype=dtype, device="cuda")
    assert has_grouped_kernel(x, weight) is expected


def test_ties_are_broken_by_index():
    scores = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert stable_top_k(scores, 4).tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_only_ties_change_the_selection_when_rounding_changes():
    """Layouts sum the same products in another order; here pairs of experts are nearly tied."""
    torch.manual_seed(0)
    router = Router(64, ExpertSizes(count=16, active=3, hidden_dim=8))
    x, half, order = torch.randn(4096, 64), torch.randn(8, 64) * 0.3, torch.randperm(64)
    weight = torch.cat([half, half + 1e-7 * torch.randn(8, 64)])
    with torch.no_grad():
        router.gate.weight.copy_(weight)
        selected, _ = router(x)
        router.gate.weight.copy_(weight[:, order])
        reordered, _ = router(x[:, order])
    flipped = selected != reordered
    assert 0 < flipped.any(-1).sum() < 2000
    scores = (x.double() @ weight.double().T).softmax(-1)
    distance = (scores.gather(1, selected) - scores.gather(1, reordered)).abs()[flipped]
    assert distance.max() < 1e-6, "a difference larger than rounding changed an expert"


def test_the_router_computes_in_fp32_in_every_dtype():
    """Two experts whose logits differ by less than the rounding of bfloat16."""
    router = Router(8, ExpertSizes(count=2, active=1, hidden_dim=8)).to(torch.bfloat16)
    with torch.no_grad():
        router.gate.weight.fill_(1.0)
        router.gate.weight[1, 0] += 2**-7
    x = torch.full((1, 8), 32.0, dtype=torch.bfloat16)
    indices, weights = router(x)  # logits 256 and 256.25, which bfloat16 cannot tell apart
    assert indices.item() == 1 and weights.dtype == torch.float32
    assert router.previous_load.dtype == torch.float32


def test_a_recomputed_forward_and_validation_are_not_counted():
    moe, x = build(SIZES), torch.randn(2, 7, 16, requires_grad=True)
    select = moe.router._select = Mock(side_effect=moe.router._select)
    moe.router.begin_step(1.0)
    with torch.no_grad():
        moe(x)
    assert moe.router.counts.sum() == 0
    checkpoint_blocks(torch.nn.ModuleDict({"0": moe}), ActivationCheckpointConfig(mode="full"))
    moe(x).sum().backward()
    assert moe.router.counts.sum() == 2 * 7 * SIZES.active
    assert select.call_count == 2, "a recomputation does not select again"


def test_a_step_that_is_not_accepted_changes_no_balance():
    router = build(GROUPED).router
    router.set_balancing(LoadBalancing(bias_update_rate=0.5))
    before = (router.expert_bias.clone(), router.previous_load.clone())
    counts = torch.arange(8)
    router.finish_step(counts, torch.tensor(False))
    assert torch.equal(router.expert_bias, before[0])
    assert torch.equal(router.previous_load, before[1])
    router.finish_step(counts, torch.tensor(True))
    step = torch.tensor([0.5] * 4 + [-0.5] * 4)  # the mean is 3.5
    torch.testing.assert_close(router.expert_bias, before[0] + step)
    torch.testing.assert_close(router.previous_load, counts / counts.sum())


def test_muon_orthogonalizes_each_expert_by_itself():
    torch.manual_seed(0)
    assert MatrixFacts(LLAMA3, LLAMA3.flavors["8B"]).is_hidden("layers.0.moe.experts.w1", (3, 4, 6))
    start, grad = (
        torch.randn(3, 4, 6),
        torch.randn(3, 4, 6) * torch.tensor([1e-3, 1, 50])[:, None, None],
    )
    stack = torch.nn.Parameter(start.clone())
    experts = [torch.nn.Parameter(matrix.clone()) for matrix in start]
    for parameter, gradient in zip([stack, *experts], [grad, *grad], strict=True):
        parameter.grad = gradient.clone()
    Muon([{"params": [stack]}], lr=0.1).step()
    Muon([{"params": experts}], lr=0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([e.detach() for e in experts]))
    assert (stack.detach() - start).abs().amin((1, 2)).min() > 0


def test_biases_of_experts_are_vectors_to_muon_and_mup():
    """They are stored as matrices of one column, which Muon would replace by their direction."""
    spec = FAMILIES["gpt_oss"]
    sizes = spec.flavors["debugmodel"]
    facts, stack = MatrixFacts(spec, sizes), "layers.0.moe.experts"
    assert facts.is_hidden(f"{stack}.w1", (8, 192, 256))
    assert not facts.is_hidden(f"{stack}.b1", (8, 192, 1))
    base = BaseWidths(dim=64, n_heads=2, n_kv_heads=1, expert_hidden_dim=24)
    scales = width_scales(MupConfig(base), spec, sizes)
    widths = [scales[f"{stack}.{name}"].fan_out for name in ("b1", "b2", "b3")]
    assert widths == [192 / 24, 256 / 64, 192 / 24]


def test_sizes_that_do_not_fit_are_refused():
    (problem,) = check_expert_sizes(replace(GROUPED, active=5))
    assert "at most 4 experts in 2 of 4 groups" in str(problem)
    (problem,) = check_expert_sizes(replace(GROUPED, count=6))
    assert "not a multiple of its 4 groups" in str(problem)
    (problem,) = check_expert_sizes(replace(GROUPED, active_groups=5))
    assert "model.n_active_groups = 5" in str(problem)
    assert not list(check_expert_sizes(GROUPED))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_job_with_more_active_experts_than_experts_or_an_untrained_router_is_refused(name):
    flavor = next(iter(FAMILIES[name].flavors))
    config = JobConfig(model=ModelConfig.of(name=name, flavor=flavor, n_active_experts=17))
    problems = check_job(config, 1)[1]
    assert {"model.n_experts", "model.n_active_experts"} in [problem.keys for problem in problems]
    single = replace(config, model=ModelConfig.of(name=name, flavor=flavor, n_active_experts=1))
    untrained = [
        p for p in check_job(single, 1)[1] if p.message.startswith("model.n_active_experts")
    ]
    assert len(untrained) == (name == "mixtral")


@pytest.mark.parametrize(("name", "flavor"), [("mixtral", "8x7B"), ("qwen3_moe", "30B-A3B")])
def test_the_default_auxiliary_loss_has_the_gradient_of_transformers(name, flavor):
    """Where all blocks have the same load; with another, transformers pools it."""
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    family = FAMILIES[name]
    sizes, published = family.flavors[flavor], {"mixtral": 0.02, "qwen3_moe": 0.001}[name]
    torch.manual_seed(0)
    router = Router(16, sizes.experts)
    torch.nn.init.normal_(router.gate.weight)
    router.set_balancing(family.load_balancing(sizes))
    x = torch.randn(64, 16)
    logits = router.gate(x)
    theirs = module.load_balancing_loss_func(
        (logits,) * sizes.n_layers, sizes.n_experts, sizes.n_active_experts
    )
    (expected,) = torch.autograd.grad(published * theirs / sizes.n_layers, router.gate.weight)
    indices, _ = router(x)
    counts = indices.flatten().bincount(minlength=sizes.n_experts)
    router.set_previous_load(counts / counts.sum())
    router.begin_step(len(x))
    _, weights = router(x)
    (weights * 0).sum().backward()
    assert expected.abs().max() > 1e-7
    torch.testing.assert_close(router.gate.weight.grad, expected, rtol=1e-4, atol=1e-9)


def test_experts_that_are_not_sharded_may_have_a_width_that_tensor_parallel_does_not_divide():
    config = JobConfig(
        model=ModelConfig.of(name="mixtral", expert_hidden_dim=33),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, expert_parallel_degree=2),
    )
    keys = {key for problem in check_job(config, 2)[1] for key in problem.keys}
    assert not {key for key in keys if key.startswith(("model.", "parallelism."))}
    without = replace(config, parallelism=ParallelismConfig(tensor_parallel_degree=2))
    problems = [str(problem) for problem in check_job(without, 2)[1]]
    assert any("does not divide the hidden width of an expert, 33" in text for text in problems)
    assert not any("model.hidden_dim" in text for text in problems)  # mixtral has no such key


NARROW = {"expert_hidden_dim": 96}
TENSOR, BORROWED = {"tensor": 2}, {"tensor": 2, "expert": 2}  # parallel degrees
SHARED = "shared_experts.w2.weight by columns: a rank has 48 of 96"


@pytest.mark.parametrize(
    "name, sizes, degrees, ranks, shard",
    [  # expert parallel leaves whole experts, but shares the shared ones among the tensor ranks
        ("mixtral", NARROW, TENSOR, 2, "experts.w2 by columns: a rank has 48 of 96"),
        ("mixtral", NARROW, BORROWED, 2, None),
        ("deepseek_v3", {**NARROW, "n_shared_experts": 1}, BORROWED, 2, SHARED),
        # FSDP shards the columns, as 4 ranks divide neither 3 experts nor 129 rows
        ("mixtral", {"n_experts": 3, "expert_hidden_dim": 129}, {}, 4, "a rank has 64 of 256"),
        ("mixtral", {"expert_hidden_dim": 512}, TENSOR, 4, None),
    ],
)
def test_a_layout_that_splits_quantisation_blocks_of_experts_is_refused(
    name, sizes, degrees, ranks, shard
):
    config = JobConfig(
        model=ModelConfig.of(name=name, flavor=next(iter(FAMILIES[name].flavors)), **sizes),
        optimizer=OptimizerConfig.of(state_dtype="8bit"),
        parallelism=ParallelismConfig(**{f"{k}_parallel_degree": v for k, v in degrees.items()}),
    )
    found = [str(p) for p in check_job(config, ranks)[1] if "optimizer.state_dtype" in p.keys]
    assert len(found) == (shard is not None)
    assert shard is None or shard in found[0]


def test_a_model_of_dense_layers_only_has_no_experts():
    """So nothing measures their load."""
    family = FAMILIES["deepseek_v3"]
    sizes = family.flavors["tiny"]
    assert family.experts(sizes) is not None
    dense = replace(sizes, n_dense_layers=sizes.n_layers)
    assert family.experts(dense) is None and shape_of(family, dense).experts is None
