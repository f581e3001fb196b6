"""Activation checkpointing recomputes the selected blocks and operations; offload prefetches."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_trace.streams import record_accesses, record_cuda
from tests.parallelize.memory import measure_allocations
from titanlite.distributed import disk_memory
from titanlite.distributed.disk_memory import PAGE
from titanlite.kernels.documents import index_documents
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.parallelize import activation_offload
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    checkpoint_blocks,
    checkpoint_operations,
)

SIZES = Llama3Sizes(dim=16, n_layers=4, n_heads=2, n_kv_heads=2, hidden_dim=32, vocab_size=31)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def build_model(config: ActivationCheckpointConfig, sizes=SIZES):
    torch.manual_seed(0)
    model = FAMILIES["llama3"].build(sizes)
    checkpoint_operations(model.layers, config)
    checkpoint_blocks(model.layers, config)
    if config.offload:
        activation_offload.offload_activations(model.layers, "cpu")
    return model


def backward(model):
    """Run one forward and backward; return the gradients."""
    torch.manual_seed(1)
    tokens = torch.randint(0, SIZES.vocab_size, (2, 8))
    model(tokens, labels=tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "mode, option, forwards",
    [
        ("none", "2", [1, 1, 1, 1]),
        ("full", "2", [2, 2, 2, 2]),
        ("selective", "1", [2, 2, 2, 2]),
        ("selective", "2", [2, 1, 2, 1]),
        ("selective", "3", [2, 1, 1, 2]),
        ("selective", "op", [2, 2, 2, 2]),
    ],
)
def test_exactly_the_selected_blocks_are_recomputed(mode, option, forwards):
    plain = FAMILIES["llama3"].build(SIZES)
    model = build_model(ActivationCheckpointConfig(mode=mode, selective_ac_option=option))
    counts = [0] * SIZES.n_layers
    for name, block in model.layers.items():

        def count(*_, number=int(name)):
            counts[number] += 1

        block.attention.register_forward_hook(count)
    backward(model)
    assert counts == forwards
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()


class OperationCounter(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.name().removeprefix("aten::").partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def count_operations(config) -> Counter[str]:
    """Operations of one forward and backward."""
    model = build_model(config)
    with OperationCounter() as counter:
        backward(model)
    return counter.counts


@pytest.mark.parametrize("names, recomputed_matmuls", [([], 3), (["w1"], 4), (["attention.w"], 5)])
def test_per_operation_recomputes_every_second_matmul_and_not_attention(names, recomputed_matmuls):
    without = count_operations(ActivationCheckpointConfig(mode="none"))
    config = ActivationCheckpointConfig(
        selective_ac_option="op", per_op_sac_force_recompute_mm_shapes_by_fqns=names
    )
    per_operation = count_operations(config)
    assert per_operation["mm"] - without["mm"] == recomputed_matmuls * SIZES.n_layers
    assert per_operation[ATTENTION] == without[ATTENTION] == SIZES.n_layers
    assert per_operation["silu"] - without["silu"] == SIZES.n_layers


@pytest.mark.parametrize("names, recomputed_matmuls", [([], 1), (["0", "2"], 2)])
def test_linear_layers_with_a_bias_are_recomputed_by_their_weight_shape(names, recomputed_matmuls):
    block = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
    config = ActivationCheckpointConfig(
        selective_ac_option="op", per_op_sac_force_recompute_mm_shapes_by_fqns=names
    )
    checkpoint_operations(torch.nn.ModuleDict({"0": block}), config)
    with OperationCounter() as counter:
        block(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert counter.counts["addmm"] == 2 + recomputed_matmuls


def bytes_saved(**config) -> int:
    """Bytes allocated by a forward and not freed at its end."""
    sizes = Llama3Sizes(64, 4, 4, 4, 256, vocab_size=31)
    model = build_model(ActivationCheckpointConfig(**config), sizes)
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    _, saved = measure_allocations(lambda: model(tokens, labels=tokens))
    return saved


def test_each_mode_saves_less_than_the_next_weaker_one():
    saved = {
        "full": bytes_saved(mode="full"),
        "op": bytes_saved(selective_ac_option="op"),
        "every second": bytes_saved(selective_ac_option="2"),
        "none": bytes_saved(mode="none"),
    }
    print({mode: f"{saved[mode] / 2**20:.2f} MiB" for mode in saved})  # pytest -rP
    assert list(saved.values()) == sorted(set(saved.values())), saved


# --- offload -------------------------------------------------------------------------------------


def build_offloaded(mode="none", n_layers=SIZES.n_layers):
    """A model on the CPU whose activations are offloaded as if it were on a GPU."""
    model = build_model(ActivationCheckpointConfig(mode=mode), replace(SIZES, n_layers=n_layers))
    activation_offload.offload_activations(model.layers, "cuda")
    return model


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    with record_cuda() as recorder:
        yield recorder


def copies_by_stream(recorder) -> list[int]:
    """The number of copies to the host, and of those back."""
    counts = Counter(call.stream for call in recorder.calls if call.name == "copy")
    return [counts[stream] for stream in ("stream 1", "stream 2")]


def losses_of(model, microbatches: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    batches = torch.randint(0, SIZES.vocab_size, (microbatches, 2, 8))
    return [model(tokens, labels=tokens) for tokens in batches]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_saved_activations_of_all_but_two_blocks_are_copied_once_each_way(mode, recorder):
    expected = backward(build_model(ActivationCheckpointConfig(mode="none")))
    model = build_offloaded(mode)
    with record_accesses(recorder):
        loss = losses_of(model, 1)[0]
        assert copies_by_stream(recorder)[1] == 0
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    sent, fetched = copies_by_stream(recorder)
    tensors = len(recorder.pinned)
    assert sent == fetched == tensors > 0 and tensors % (SIZES.n_layers - 2) == 0
    assert not recorder.races


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_on_a_disk_give_the_bits_of_those_on_the_device(mode, tmp_path, monkeypatch):
    """In two files of a forward: the last two blocks stay on the device."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    monkeypatch.setattr(disk_memory, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(disk_memory, "measure_gb_per_s", lambda *_: (1.0, 1.0))
    files, open_file = [], activation_offload.DiskFile
    monkeypatch.setattr(
        activation_offload, "DiskFile", lambda *args: files.append(open_file(*args)) or files[-1]
    )
    model = build_model(ActivationCheckpointConfig(mode=mode))
    activation_offload.offload_activations(model.layers, "cpu", str(tmp_path))
    gradients = backward(model)
    for name, expected in backward(build_model(ActivationCheckpointConfig(mode=mode))).items():
        assert torch.equal(gradients[name], expected), name
    assert len(files) == SIZES.n_layers - 2
    assert not any(tmp_path.iterdir())


def test_no_block_waits_for_copies_that_it_does_not_need(recorder):
    """Waits of the compute stream and of the copies back, as (stream, its operations so far).

    The compute stream waits for the copies of a block before it frees them, at the beginning of the
    next block but one; the copies back wait for those of their own block, not of later blocks.
    """
    model = build_offloaded("full", n_layers=5)  # in this mode a block saves one tensor: its input
    with record_accesses(recorder):
        loss = losses_of(model, 1)[0]
        loss.backward()
    waits = [(call.stream, call.detail) for call in recorder.calls if call.name == "wait"]
    sent = [detail for stream, detail in waits if stream == "stream 1"]
    assert [stream for stream, _ in sent] == ["compute"] * 3
    assert [wait for wait in waits if wait[1][0] == "stream 1"] == [
        ("compute", ("stream 1", 1)),
        ("compute", ("stream 1", 2)),
        ("compute", ("stream 1", 3)),
        ("stream 2", ("stream 1", 3)),
        ("stream 2", ("stream 1", 2)),
        ("stream 2", ("stream 1", 1)),
    ]
    assert [wait for wait in dict.fromkeys(waits) if wait[1][0] == "stream 2"] == [
        ("compute", ("stream 2", number)) for number in (1, 2, 3)
    ]


@pytest.mark.parametrize("n_layers", [1, 2, 4])
@pytest.mark.parametrize("order", ["backward as in 1F1B", "all backward at the end", "reverse"])
def test_several_forwards_in_flight_never_share_memory_that_is_being_copied(
    n_layers, order, recorder
):
    plain = build_model(ActivationCheckpointConfig(mode="none"), replace(SIZES, n_layers=n_layers))
    for loss in losses_of(plain, 4):
        loss.backward()
    model = build_offloaded("none", n_layers)
    torch.manual_seed(1)
    batches = torch.randint(0, SIZES.vocab_size, (4, 2, 8))
    with record_accesses(recorder):
        losses = []
        for tokens in batches:
            losses.append(model(tokens, labels=tokens))
            if order == "backward as in 1F1B" and len(losses) == 2:
                losses.pop(0).backward()
        while losses:
            losses.pop(-1 if order == "reverse" else 0).backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    per_block, rest = divmod(len(recorder.pinned), 4 * n_layers - min(2, n_layers))
    assert rest == 0 and per_block > 0  # only the last two blocks of the last forward stay
    assert not recorder.races


def test_what_backward_does_not_need_is_freed_after_its_copies(recorder):
    """A forward without a backward, and a block that is prefetched for a backward that ends."""
    model = build_offloaded()
    with record_accesses(recorder):
        losses = losses_of(model, 2)
        torch.autograd.grad(losses[0], list(model.layers["2"].parameters()))
        del losses
        kind = activation_offload._BlockActivations
        assert not [each for each in gc.get_objects() if type(each) is kind]
        backward(model)
    assert not recorder.races


def test_the_index_of_the_documents_is_not_offloaded(monkeypatch):
    """All blocks use it, so copies of it would free no memory."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    dtypes = []
    model = build_model(ActivationCheckpointConfig(mode="none", offload=True))
    model.use_document_mask(index_documents)
    add = activation_offload._BlockActivations.add

    def record(self, memory_range, tensor):
        dtypes.append(tensor.dtype)
        return add(self, memory_range, tensor)

    monkeypatch.setattr(activation_offload._BlockActivations, "add", record)
    tokens = torch.randint(0, SIZES.vocab_size, (2, 8))
    model(tokens, labels=tokens, positions=torch.arange(8).expand(2, -1) % 3).backward()
    assert set(dtypes) == {torch.float32}


def test_validation_without_gradients_copies_nothing(recorder):
    model = build_offloaded()
    with torch.no_grad(), record_accesses(recorder):
        losses_of(model, 2)
    assert copies_by_stream(recorder) == [0, 0]


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"mode": "none"}, "off; all activations are stored"),
        ({"mode": "full"}, "every block; of it, only the input is stored"),
        ({"selective_ac_option": "1"}, "every block; of it, only the input is stored"),
        ({"selective_ac_option": "2"}, "every 2nd block; of it, only the input is stored"),
        ({"selective_ac_option": "21"}, "every 21-th block; of it, only the input is stored"),
        ({"mode": "memory_budget"}, "norms and activations; more until 0.5 of a block is stored"),
        (
            {"mode": "none", "offload": True},
            "off; all activations are stored; stored activations are in host memory",
        ),
        (
            {"mode": "none", "offload": True, "offload_folder": "/nvme"},
            "off; all activations are stored; stored activations are in /nvme",
        ),
    ],
)
def test_the_start_up_summary_names_what_is_recomputed(settings, text):
    assert str(ActivationCheckpointConfig(**settings)) == text
