"""The kernel that is asked for is the one that runs, and all compute the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.errors import ConfigError
from titanlite.kernels.backend import (
    KERNELS,
    ON_CPU,
    AttentionConfig,
    AttentionShape,
    activate_flash_package,
    choose_kernel,
    set_attention_kernel,
)
from titanlite.kernels.backend import _Trial as Trial
from titanlite.models import FAMILIES, Llama3Sizes

FAMILY, CPU = FAMILIES["llama3"], torch.device("cpu")
SHAPE = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)
SIZES = AttentionShape(rows=2, heads=4, key_heads=2, tokens=16, width=8)
FLASH, SOFTMAX = "_scaled_dot_product_flash_attention_for_cpu", "_softmax"
SEEN = {"flash": {FLASH}, "math": {SOFTMAX}}


class Operations(TorchDispatchMode):
    """Which of attention's operations run."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        self.names |= {name.replace("_safe", "")} & {FLASH, SOFTMAX}
        return function(*args, **(kwargs or {}))


def model_by(kernel: str | None):
    torch.manual_seed(0)
    model = FAMILY.build(SHAPE)
    set_attention_kernel(model, FAMILY.attention_pattern, kernel, documents=False)
    return model


def learned(kernel: str | None) -> list[torch.Tensor]:
    model = model_by(kernel)
    model(torch.arange(48).view(2, 24)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kernel", ON_CPU)
def test_the_kernel_that_is_asked_for_is_the_one_that_runs(kernel):
    with Operations() as seen:
        learned(kernel)
    assert seen.names == SEEN[kernel]


def test_every_kernel_computes_the_same():
    for kernel in ON_CPU:
        for found, right in zip(learned(kernel), learned(None), strict=True):
            assert (found - right).abs().max() < 1e-5 * right.abs().max()


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_compiled_block_runs_the_kernel_that_is_asked_for(kernel):
    """As one graph; what is outside of it keeps its own choice."""
    model = model_by(kernel)
    for block in model.layers.values():
        block.compile(fullgraph=True, backend="aot_eager")
    run = partial(model, torch.arange(48).view(2, 24))
    run()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    names = {event.key.removeprefix("aten::") for event in trace.key_averages()}
    assert names & {FLASH, SOFTMAX} == SEEN[kernel]
    with Operations() as seen:
        learned(None)
    assert seen.names == SEEN["flash"]


def chosen(dtype: torch.dtype = torch.float32, in_parts: bool = False, **section) -> str | None:
    return choose_kernel(AttentionConfig(**section), SIZES, dtype, CPU, in_parts=in_parts)


def test_on_a_cpu_nothing_is_measured():
    """So that a run that is started again computes the same bits, by the kernel that SDPA takes."""
    assert chosen() is chosen(torch.bfloat16) is chosen(in_parts=True) is chosen(mask="document")
    assert chosen() is None


def test_a_kernel_that_can_run_is_taken_at_its_word():
    assert [chosen(backend=name) for name in ON_CPU] == list(ON_CPU)


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - set(ON_CPU)))
def test_a_kernel_that_cannot_run_here_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError) as refused:
        chosen(backend=name)
    said = str(refused.value)
    assert f'attention.backend = "{name}": cannot run on cpu in torch.float32 with 4 heads' in said
    reason = {"fa3": "flash_attn_interface", "fa4": "flash_attn"}.get(name, "No viable backend")
    assert reason in said
    assert chosen() is None  # a refused one leaves nothing behind


def test_what_can_run_is_measured_and_what_cannot_is_passed_over():
    """Among all kernels, as on a GPU, that a CPU knows of."""
    trial = Trial(SIZES, torch.float32, CPU, documents=False)
    measured = trial.measure(list(KERNELS), first=False)
    assert measured.keys() == set(ON_CPU) and min(measured.values()) > 0
    assert trial.measure(["cudnn", "math", "flash"], first=True) == {"math": 0.0}


def test_activating_what_comes_with_torch_does_nothing():
    for name in ("flash", "math", None):
        activate_flash_package(name)
