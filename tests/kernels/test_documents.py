"""Packed documents do not attend to each other: each gives the same result as alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.kernels.backend import set_attention_kernel
from titanlite.kernels.documents import (
    _document_backward,
    _document_forward,
    document_attention,
    document_positions,
    index_documents,
)
from titanlite.labels import IGNORE_INDEX
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.models.rope import rope_cos_sin
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    checkpoint_blocks,
)
from titanlite.parallelize.compile import CompileConfig, compile_blocks
from titanlite.parallelize.context_tiles import SequenceShard
from titanlite.training.batch import Batch, TokenSelector

FAMILY, END = FAMILIES["llama3"], 7
SIZES = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)


def build_model(documents: bool = True):
    torch.manual_seed(0)
    model = FAMILY.build(SIZES)
    set_attention_kernel(model, FAMILY.attention_pattern, "flash", documents)
    return model


def sample_tokens(*ends: tuple[int, ...], length: int = 24) -> torch.Tensor:
    """One sequence for each of `ends`, the indices of end-of-document tokens."""
    generator = torch.Generator().manual_seed(len(ends))
    ids = torch.randint(8, 61, (len(ends), length), generator=generator)
    for row, indices in enumerate(ends):
        ids[row, list(indices)] = END
    return ids


def test_positions_restart_after_each_end_token():
    ids = torch.tensor([[1, END, 1, 1, END, END, 1], [1] * 7, [END, 1, 1, 1, 1, 1, END]])
    assert document_positions(ids, END).tolist() == [
        [0, 1, 0, 1, 2, 0, 0],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 0, 1, 2, 3, 4, 5],
    ]
    documents = index_documents(document_positions(ids, END))
    assert documents.on_host.tolist() == [0, 2, 5, 6, 7, 14, 15, 21]
    assert documents.longest >= 7


def test_no_document_attends_to_another():
    """The gradient of one document's loss is exactly zero at the tokens of the others."""
    model, ids = build_model(), sample_tokens((5, 13), (0, 23))
    embedded = model.tok_embeddings(ids).detach().requires_grad_()
    model.tok_embeddings = None
    positions = document_positions(ids, END)
    logits = model(embedded, positions)
    for row, begin, end in [(0, 0, 6), (0, 6, 14), (0, 14, 24), (1, 0, 1), (1, 1, 24)]:
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[row, begin:end] = ids[row, begin:end]  # any labels would do
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        (gradient,) = torch.autograd.grad(loss, embedded, retain_graph=True)
        own = torch.zeros(ids.shape, dtype=torch.bool)
        own[row, begin:end] = True
        assert torch.equal(gradient[~own], torch.zeros_like(gradient[~own]))
        assert (gradient[own].abs().amax(-1) > 0).all()


def test_a_packed_document_gives_the_same_logits_as_alone():
    model, ids = build_model(), sample_tokens((5, 13), (0, 23))
    packed = model(ids, document_positions(ids, END))
    plain = build_model(documents=False)
    for row, begin, end in [(0, 0, 6), (0, 6, 14), (0, 14, 24), (1, 0, 1), (1, 1, 24)]:
        alone = plain(ids[row : row + 1, begin:end])[0]
        assert (packed[row, begin:end] - alone).abs().max() < 1e-6


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_outputs_and_gradients_match_sdpa_with_an_explicit_mask(n_kv_heads, dtype, tolerance):
    positions = document_positions(sample_tokens((3, 4, 11), (), (22,)), END)
    document = (positions == 0).cumsum(1)
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(3, 24, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, n_kv_heads, n_kv_heads)
    )
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    actual = document_attention(q, k, v, index_documents(positions))
    grad = torch.randn_like(expected)
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v), grad), expected_grads, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < tolerance * b.abs().max()


@pytest.mark.parametrize("window", [0, 5], ids=["no window", "window"])
def test_the_custom_operator_passes_opcheck(window):
    positions = document_positions(sample_tokens((3, 11)), END)
    q, k, v = (torch.randn(1, 24, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    operator = torch.ops.titanlite.attend_in_documents.default
    sinks, boundaries = torch.randn(2, requires_grad=True), index_documents(positions).on_host
    torch.library.opcheck(operator, (q, k, v, sinks, boundaries, window, 24))


def gradients(model, ids) -> list[torch.Tensor]:
    model(ids, document_positions(ids, END)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_activation_checkpointing_gives_the_same_gradients():
    ids, recomputed = sample_tokens((5, 13), (2,)), build_model()
    checkpoint_blocks(recomputed.layers, ActivationCheckpointConfig(mode="full"))
    for a, b in zip(gradients(build_model(), ids), gradients(recomputed, ids), strict=True):
        assert torch.equal(a, b)


def test_blocks_compile_once_for_any_number_of_documents():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, model = CompileCounterWithBackend("aot_eager"), build_model()
    compile_blocks(model.layers, CompileConfig(enable=True, backend=counter))
    for ends in [((5, 13), (2,)), ((), ()), ((1, 2, 3, 9), (0, 1)), ((23,), ())]:
        ids = sample_tokens(*ends)
        for a, b in zip(gradients(build_model(), ids), gradients(model, ids), strict=True):
            assert (a - b).abs().max() < 1e-5 * a.abs().max()
        model.zero_grad()
    assert counter.frame_count == 1


# --- on a GPU: tensors on the meta device have no values, but the same operations ----------------

DEVICE = torch.device("meta")
TOKENS = TokenSelector(SequenceShard(0, 1, balanced=True), END, index_documents)
VALUE_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}


class HostWaits(TorchDispatchMode):
    """Records where the host would wait for the device, and the calls of the varlen kernel."""

    def __init__(self, pinned: set[int]):
        super().__init__()
        self.pinned = pinned  # addresses of pinned memory
        self.waits: list[str] = []
        self.lengths: list[int] = []  # `max_q` of each call
        self.may_be_cudnn = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise nothing is compiled

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, operation.name().partition(".")[0]
        source = args[1] if name == "aten::copy_" else args[0] if args else None
        if name in VALUE_READS and source.device == DEVICE:
            self.waits.append(name)
        result = operation(*args, **kwargs)
        if name in ("aten::copy_", "aten::_to_copy") and source.device != result.device:
            is_pinned = source.device == DEVICE or source.data_ptr() in self.pinned
            if not (kwargs.get("non_blocking") and is_pinned):
                self.waits.append(f"{name} from {source.device}")
        if name == "torch_attn::_varlen_attn":
            self.lengths.append(args[5])
            self.may_be_cudnn |= torch.backends.cuda.cudnn_sdp_enabled()
        return result


@pytest.fixture
def pinned(monkeypatch) -> set[int]:
    """A Hopper GPU; returns the addresses of pinned tensors."""
    kept, addresses = [], set()

    def pin_memory(tensor):
        kept.append(tensor.clone())
        addresses.add(kept[-1].data_ptr())
        return kept[-1]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return addresses


def make_batch(*ends: tuple[int, ...], length: int = 300) -> Batch:
    ids = sample_tokens(*ends, length=length + 1)
    return TOKENS.prepare(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), 2)


def train_on_device(pinned: set[int], batches: list[Batch], backend=None) -> HostWaits:
    """Forward and backward of micro-batches of 2 sequences in bfloat16."""
    model = build_model().to(DEVICE, torch.bfloat16)
    if backend is not None:
        compile_blocks(model.layers, CompileConfig(enable=True, backend=backend))
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    rope_cos_sin(zero, SIZES.head_width, SIZES.rope_theta)  # copies its frequencies once per device
    with HostWaits(pinned) as recorder:
        for batch in batches:
            for part in batch.pin_memory().to(DEVICE).split(2):
                positions, (documents,) = TOKENS.positions(part.inputs), part.documents
                options = {"labels": part.labels, "documents": documents}
                model(part.inputs, positions, **options).backward()
    return recorder


def test_no_forward_waits_for_the_device_to_find_documents(pinned):
    batch = make_batch((5, 13), (2,), (), (1, 4, 200))  # at most 297 and 300 tokens
    recorder = train_on_device(pinned, [batch])
    assert recorder.waits == []
    assert recorder.lengths == [384] * 4  # two layers, two micro-batches
    short = make_batch((100, 200), (100, 200))
    assert train_on_device(pinned, [short]).lengths == [128] * 2
    assert not recorder.may_be_cudnn


def test_a_model_alone_finds_documents_from_positions_on_the_host():
    model, plain = build_model(), build_model()
    ids = sample_tokens((5, 13), (2,))
    positions = document_positions(ids, END)
    expected = plain(ids, positions)
    assert torch.equal(model(ids, positions, documents=index_documents(positions)), expected)


def test_a_device_compiles_once_for_all_numbers_and_lengths_of_documents(pinned):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    ends = [((5, 13), (2,)), ((), ()), ((100, 200), (100, 150, 200)), ((150,), (150,))]
    recorder = train_on_device(pinned, [make_batch(*each) for each in ends], backend=counter)
    assert recorder.waits == []
    assert set(recorder.lengths) == {128, 256, 384}
    assert counter.frame_count == 1


def test_documents_in_fp32_are_sliced_without_waiting_for_the_device(pinned):
    (documents,) = make_batch((5, 13), (2,), length=24).pin_memory().to(DEVICE).documents
    q, k, v, grad = (torch.randn(2, 2, 24, 8, device=DEVICE) for _ in range(4))
    with HostWaits(pinned) as recorder:
        # What the operators run on a GPU; called themselves, they would only allocate.
        out, lse = _document_forward._init_fn(q, k, v, None, documents.on_host, 0, 24)
        _document_backward._init_fn(grad, q, k, v, out, lse, documents.on_host, 0, 24)
    assert recorder.waits == []
