"""A checkpoint or Hugging Face folder from somebody else: it runs nothing, reads nothing outside
of its folder, and takes no more memory than its files have bytes."""

from __future__ import annotations

import io
import json
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.checkpoint.saving import bits, load, open_checkpointer
from tests.checkpoint.test_checkpointer import save_two, spoil
from tests.distributed.oracle import ADAMW, Layout, start
from tests.distributed.ranks import run_on_ranks
from titanlite.checkpoint import (
    describe_saved_model,
    model_and_optimizer_state,
    read_checkpoint_manifest,
    read_tensors,
    shard_files,
)
from titanlite.checkpoint.chunks import Chunk, read_chunks
from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.checkpoint.manifest import FileRecord, manifest_hash
from titanlite.errors import CheckpointError
from titanlite.runtime.lease import parse_holder
from titanlite.runtime.start_log import last_step, read_starts
from titanlite.storage import StorageFolder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run's folder with steps 1 and 2, written by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(save_two, 2, str(folder))
    return folder


def sign_again(step: Path, /, **changes) -> None:
    """Make the manifest true of files that were changed."""
    body = json.loads((step / "manifest.json").read_text()) | changes
    body.pop("hash", None)
    if "files" not in changes:
        there = [path for path in step.iterdir() if path.name != "manifest.json"]
        hashes = {path.name: StorageFolder(step).hash_of(path.name) for path in there}
        body["files"] = {
            path.name: asdict(FileRecord(path.stat().st_size, hashes[path.name])) for path in there
        }
    (step / "manifest.json").write_text(json.dumps({**body, "hash": manifest_hash(body)}))


def make_old(step: Path) -> None:
    """As titanlite wrote it before chunks.json."""
    (step / "chunks.json").unlink()
    sign_again(step, format=2)


# --- no code -------------------------------------------------------------------------------------


class Malice:
    """Executes a command when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


def archive_of(proof: Path) -> bytes:
    payload = io.BytesIO()
    torch.save(Malice(proof), payload)
    return payload.getvalue()


def replace_shards(step: Path, archive: bytes) -> None:
    """Let every chunk be in an archive at the beginning of a file of the same size."""
    for shard in step.glob("*.distcp"):
        shard.write_bytes(archive + bytes(max(0, shard.stat().st_size - len(archive))))
    table = json.loads((step / "chunks.json").read_text())
    tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    for name, flat in table["chunks"].items():
        stride = 3 + 2 * len(tensors[name]["shape"])
        for at in range(0, len(flat), stride):
            flat[at + 1 : at + 3] = [0, len(archive)]
    (step / "chunks.json").write_text(json.dumps(table))
    sign_again(step)


def old_bad_metadata(step: Path, proof: Path) -> None:
    (step / ".metadata").write_bytes(pickle.dumps(Malice(proof)))
    make_old(step)


def old_bad_kind(step: Path, proof: Path) -> None:
    """Tensors that say they are plain bytes, which DCP unpickles without a question."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for name in metadata.state_dict_metadata:
        metadata.state_dict_metadata[name] = dcp_metadata.BytesStorageMetadata()
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    make_old(step)


def old_patched_classes(step: Path, proof: Path) -> None:
    """Every class is one that DCP's metadata needs; BUILD on the classes themselves makes
    `isinstance` say tensor and bytes of one entry, which DCP then unpickles."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    payload = archive_of(proof)
    replace_shards(step, payload)
    names = list(metadata.state_dict_metadata)
    sizes = {tuple(about.size) for about in metadata.state_dict_metadata.values()}
    blank = {name: object.__new__(dcp_metadata.TensorStorageMetadata) for name in names}
    info = _StorageInfo("__0_0.distcp", 0, len(payload))
    index = {dcp_metadata.MetadataIndex(name): info for name in names}
    never = object.__new__(dcp_metadata.StorageMeta)
    table = {"__class__": dcp_metadata.BytesStorageMetadata, "size": never}
    table |= {torch.Size(size): False for size in sizes}

    def part(value) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    def named(kind: type) -> bytes:
        return f"c{kind.__module__}\n{kind.__qualname__}\n".encode()

    def patch(kind: type, key: str, value: bytes) -> bytes:
        return named(kind) + b"N}" + part(key) + value + b"s\x86b0"

    encoding, tensor = dcp_metadata._MEM_FORMAT_ENCODING, dcp_metadata.TensorStorageMetadata
    content = b"\x80\x02" + part(dcp_metadata.Metadata(blank, storage_data=index))
    content += patch(encoding, "_value2member_map_", part(table))
    content += patch(dcp_metadata.StorageMeta, "__ne__", named(encoding))
    content += patch(tensor, "__getattribute__", named(encoding)) + b"."
    (step / ".metadata").write_bytes(content)
    make_old(step)


def bad_shards(step: Path, proof: Path) -> None:
    """Each chunk's place holds a pickle that torch.load would run, if it were let to."""
    replace_shards(step, archive_of(proof))


def compressed(step: Path, proof: Path) -> None:
    """A shard of 1 MB whose elements would take 0.3 GiB."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data/0", "w", force_zip64=True) as elements:
            for _ in range(20):
                elements.write(bytes(1 << 24))
        archive.writestr("archive/data.pkl", "")
    raw = content.getvalue()[:-22]
    end = struct.unpack("<4s4H2IH", content.getvalue()[-22:])
    raw += struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, end[3], end[4], *end[5:7])
    raw += struct.pack("<4sIQI", b"PK\x06\x07", 0, len(raw) - 56, 1) + content.getvalue()[-22:]
    replace_shards(step, raw)


def old_memo(step: Path, proof: Path) -> None:
    """Nine bytes that make Python's unpickler allocate 2 GiB."""
    (step / ".metadata").write_bytes(b"\x80\x02Nr" + struct.pack("<I", 1 << 27) + b".")
    make_old(step)


def deep_manifest(step: Path, proof: Path) -> None:
    (step / "manifest.json").write_text("[" * 200_000)


def deep_chunks(step: Path, proof: Path) -> None:
    (step / "chunks.json").write_text("[" * 200_000)
    sign_again(step)


def large_tensor(step: Path, proof: Path) -> None:
    tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    tensors["model.norm.weight"]["shape"] = [1 << 40]
    sign_again(step, tensors=tensors)


def file_outside(step: Path, proof: Path) -> None:
    sign_again(step, files={"../../secret": {"bytes": 3, "hash": "0"}})


def linked_shard(step: Path, proof: Path) -> None:
    shard = step / "__1_0.distcp"
    shard.rename(step.parent / "outside")
    shard.symlink_to(step.parent / "outside")


REFUSED = {
    old_bad_metadata: "a pathlib.Path.touch",
    old_bad_kind: "BytesStorageMetadata instead of a TensorStorageMetadata",
    old_patched_classes: ".metadata is not valid",
    old_memo: "memo has gaps",
    bad_shards: "not exactly one uncompressed entry",
    compressed: "not exactly one uncompressed entry",
    deep_manifest: "nested too deeply",
    deep_chunks: "more lists than tensors",
    large_tensor: "its tensors have 4,398,",
    file_outside: "'../../secret' is not a name of a file in its folder",
    linked_shard: "__1_0.distcp is missing",
}


def limit_memory(more: int) -> None:
    """No more than it has by now, and `more` bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def load_each(folders) -> list[str]:
    said = []
    state, _, _ = start(Layout(), ADAMW)
    limit_memory(1 << 28)
    for folder in folders:
        place = StorageFolder(folder) / "step-2"
        try:
            read_checkpoint_manifest(place)
            read_tensors(
                place, model_and_optimizer_state(state.model, state.optimizer), no_dist=True
            )
            said.append("loaded")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_a_hostile_checkpoint_runs_nothing_and_is_refused_in_little_memory(saved, tmp_path):
    folders, proof = [], tmp_path / "executed"
    for malice in REFUSED:
        folders.append(str(tmp_path / malice.__name__))
        (tmp_path / malice.__name__).mkdir()
        step = shutil.copytree(saved / "step-2", tmp_path / malice.__name__ / "step-2")
        malice(Path(step), proof)
    said = run_on_ranks(load_each, 1, folders)[0]
    assert not proof.exists()
    for words, found in zip(REFUSED.values(), said, strict=True):
        assert words in found and "step-2: is damaged" in found, found


def test_no_pickle_has_an_effect(request):
    count = request.config.getoption("--pickles")
    words = [sys.executable, "-m", "tests.checkpoint.pickles", str(count), "1"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and "refused" in run.stdout, run.stderr


# --- what is true is read ------------------------------------------------------------------------


def load_old_and_new(folders) -> list[bool]:
    """Whether each folder, and what DCP reads of the first, has the bits of the first."""
    state, _, _ = start(Layout(), ADAMW)
    found = []
    for folder in folders:
        load(open_checkpointer(folder), state)
        found.append(bits(state))
        spoil(state)
    dcp.load(
        model_and_optimizer_state(state.model, state.optimizer),
        checkpoint_id=f"{folders[0]}/step-2",
    )
    found.append(bits(state))
    return [one == found[0] for one in found]


def test_a_checkpoint_of_before_chunks_json_loads_and_dcp_reads_ours(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "old")
    for step in ("step-1", "step-2"):
        make_old(tmp_path / "old" / step)
    answers = run_on_ranks(load_old_and_new, 1, [str(saved), str(tmp_path / "old")])[0]
    assert answers == [True] * 3


PARTS = [  # shape, offsets, lengths
    ((), (), ()),
    ((7,), (0,), (7,)),
    ((7,), (2,), (3,)),
    ((50, 6), (11, 0), (20, 6)),
    ((50, 6), (11, 2), (20, 3)),
    ((5, 4, 3), (1, 1, 1), (4, 2, 2)),
    ((1, 90), (0, 30), (1, 60)),
]


@pytest.mark.parametrize("saved_as, wanted", [("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("shape, offsets, lengths", PARTS)
def test_any_part_of_a_chunk_is_read(shape, offsets, lengths, saved_as, wanted, monkeypatch):
    monkeypatch.setattr(shard_files, "BUFFER_BYTES", 64)
    whole = torch.randn(shape).to(getattr(torch, saved_as))
    content = io.BytesIO(b"before")
    content.seek(6)
    torch.save(whole, content)
    chunk = Chunk(shape, "", 6, content.tell() - 6)
    content.write(b"behind")
    columns = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    for target in (torch.empty(lengths), torch.empty((*lengths, 2))[..., 0]):
        target = target.to(getattr(torch, wanted))
        shard_files.read_part_of_chunk(content, chunk, whole.dtype, offsets, target)
        assert torch.equal(target, whole[columns].to(target.dtype))


def test_an_archive_above_four_gib_is_read(monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # as if it were: numbers go to zip64's fields
    whole, content = torch.arange(90.0), io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/byteorder", "little")
        with archive.open("archive/data/0", "w", force_zip64=True) as elements:
            elements.write(whole.numpy().tobytes())
    target = torch.empty(90)
    chunk = Chunk((90,), "", 0, len(content.getvalue()))
    shard_files.read_part_of_chunk(content, chunk, torch.float32, (0,), target)
    assert torch.equal(target, whole)


# --- chunks.json ---------------------------------------------------------------------------------

NAME = "model.norm.weight"  # [32], in two chunks: file, start, length, offset, size

WRONG_CHUNKS = {
    "another file's number": (lambda flat: [99, *flat[1:]], "file number 99"),
    "a negative file number": (lambda flat: [-1, *flat[1:]], "file number -1"),
    "before its file": (lambda flat: [flat[0], -1, *flat[2:]], "not inside a file"),
    "behind its file": (lambda flat: [flat[0], 1 << 40, *flat[2:]], "not inside a file"),
    "longer than its file": (lambda flat: [*flat[:2], 1 << 40, *flat[3:]], "not inside a file"),
    "no length": (lambda flat: [*flat[:2], 0, *flat[3:]], "not inside a file"),
    "outside the tensor": (lambda flat: [*flat[:3], 30, *flat[4:]], "in a tensor of [32]"),
    "negative": (lambda flat: [*flat[:3], -1, *flat[4:]], "in a tensor of [32]"),
    "twice": (lambda flat: flat[:5] * 2, "twice"),
    "half": (lambda flat: flat[:5], "32 elements, its chunks 16"),
    "a fraction": (lambda flat: [*flat[:1], 0.5, *flat[2:]], "not rows of 5 integers"),
    "a truth": (lambda flat: [True, *flat[1:]], "not rows of 5 integers"),
    "too few numbers": (lambda flat: flat[:-1], "not rows of 5 integers"),
    "no list": (lambda flat: "0", "a str instead of a list"),
    "no tensor": (lambda flat: None, "a NoneType instead of a list"),
}


@pytest.mark.parametrize("change, words", WRONG_CHUNKS.values(), ids=WRONG_CHUNKS)
def test_chunks_that_cannot_be_are_refused(saved, tmp_path, change, words):
    step = Path(shutil.copytree(saved / "step-1", tmp_path / "step-1"))
    table = json.loads((step / "chunks.json").read_text())
    table["chunks"][NAME] = change(table["chunks"][NAME])
    (step / "chunks.json").write_text(json.dumps(table))
    sign_again(step)
    place = StorageFolder(step)
    with pytest.raises(CheckpointError, match="chunks.json is not valid") as refused:
        read_chunks(place, read_checkpoint_manifest(place), [NAME])
    assert words in str(refused.value)


def test_a_changed_chunks_json_is_found_without_full_verification(saved, tmp_path):
    step = Path(shutil.copytree(saved / "step-1", tmp_path / "step-1"))
    content = (step / "chunks.json").read_bytes()
    (step / "chunks.json").write_bytes(content[:-3] + b"9" + content[-2:])
    with pytest.raises(CheckpointError, match="its hash differs"):
        read_tensors(StorageFolder(step), {"model": {"norm.weight": torch.empty(32)}}, no_dist=True)


# --- manifests and configs -----------------------------------------------------------------------

WRONG_MANIFESTS = {
    "step": -1,
    "progress": [],
    "progress ": {"step": 1, "position": "1", "tokens": 0},
    "layout": 7,
    "files": {".metadata": {"bytes": -1, "hash": ""}},
    "tensors": {"a": {"shape": [-1], "dtype": "float32", "hash": ""}},
    "tensors ": {"a": {"shape": [2**63 - 1] * 50_000, "dtype": "float32", "hash": ""}},
    "job": None,
    "format": "3",
    "seconds": "1",
    "surprise": 1,
}


@pytest.mark.parametrize("key", WRONG_MANIFESTS)
def test_a_manifest_of_other_types_is_refused(saved, tmp_path, key):
    step = Path(shutil.copytree(saved / "step-1", tmp_path / "step-1"))
    sign_again(step, **{key.strip(): WRONG_MANIFESTS[key]})
    began = time.process_time()
    with pytest.raises(CheckpointError):
        read_checkpoint_manifest(StorageFolder(step))
    assert time.process_time() - began < 5  # the product of 50,000 sizes took a minute


@pytest.mark.parametrize(
    "model, words",
    [
        (None, "it has no model section"),
        ({"name": "nobody"}, "model"),
        ({"dim": "32"}, "dim"),
        ({"n_layers": 10**9}, "1.0e+09 layers"),
        ({"n_layers": 999}, "999 layers, but contains"),
        ({"dim": 10**30}, "at most 64 bits"),
        ({"dim": 10**17}, "parameters"),
        ({"vocab_size": 7}, "have another shape"),
    ],
)
def test_a_model_that_the_tensors_are_not_of_is_not_built(saved, tmp_path, model, words):
    step = Path(shutil.copytree(saved / "step-1", tmp_path / "step-1"))
    sign_again(step, job={"model": model})
    with pytest.raises(CheckpointError) as refused:
        describe_saved_model(StorageFolder(step), read_checkpoint_manifest(StorageFolder(step)))
    assert words in str(refused.value)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
DEEP = "[" * 200_000
HUGGING_FACE = {  # file -> content, and what is said
    "a thousand million layers": ("config.json", LLAMA | {"num_hidden_layers": 10**9}, "1.0e+09"),
    "more layers than tensors": ("config.json", LLAMA | {"num_hidden_layers": 99}, "only 1 tens"),
    "a width of 10^30": ("config.json", LLAMA | {"hidden_size": 10**30}, "hidden_size = 1000000"),
    "a width of 1e30": ("config.json", LLAMA | {"hidden_size": 1e30}, "hidden_size = 1e+30"),
    "a width of 400 digits": ("config.json", LLAMA | {"hidden_size": 10**400}, "hidden_size"),
    "many parameters": ("config.json", LLAMA | {"hidden_size": 1 << 40}, "parameters"),
    "infinity": ("config.json", LLAMA | {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    "a list": ("config.json", LLAMA | {"architectures": [["a"]]}, "architectures"),
    "a deep config": ("config.json", DEEP, "nested too deeply"),
    "a deep index": ("model.safetensors.index.json", DEEP, "nested too deeply"),
    "a deep header": ("model.safetensors", '{"a":' + DEEP, "recursion limit"),
    "a header of 2^40 bytes": ("model.safetensors", 1 << 40, "header too large"),
    "overlapping": (
        "model.safetensors",
        {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"},
        "invalid offset",
    ),
    "a shape of 2^124": (
        "model.safetensors",
        {"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}},
        "overflow",
    ),
    "a negative shape": (
        "model.safetensors",
        {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        "invalid value",
    ),
    "bytes that are not those of its type": (
        "model.safetensors",
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2]}},
        "damaged",
    ),
    "an index that leads outside": (
        "model.safetensors.index.json",
        {"weight_map": {"a": "../other.safetensors", "b": "/etc/passwd"}},
        "are missing: ../other.safetensors, /etc/passwd",
    ),
}


def open_each(folders) -> list[str]:
    said = []
    limit_memory(1 << 28)
    for folder in folders:
        try:
            open_hugging_face(StorageFolder(folder))
            said.append("opened")
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_a_hostile_hugging_face_folder_is_refused_in_little_memory(tmp_path):
    folders = []
    for name, (file, content, _) in HUGGING_FACE.items():
        folder = tmp_path / name
        folder.mkdir()
        folders.append(str(folder))
        (folder / "config.json").write_text(json.dumps(LLAMA))
        if "index" not in file:
            save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
        raw = (content if isinstance(content, str) else json.dumps(content)).encode()
        if file == "model.safetensors":
            size = content if isinstance(content, int) else len(raw)
            raw = struct.pack("<Q", size) + raw + bytes(4)
        (folder / file).write_bytes(raw)
    for found, (_, _, words) in zip(
        run_on_ranks(open_each, 1, folders)[0], HUGGING_FACE.values(), strict=True
    ):
        assert words in found and len(found) < 1000, found


def test_a_hugging_face_folder_of_links_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "blob").write_text(json.dumps(LLAMA))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to("../blob")
    with pytest.raises(CheckpointError, match="config.json is a link, .* cp -rL"):
        open_hugging_face(StorageFolder(tmp_path / "snapshot"))


def test_deep_json_in_the_small_files_of_a_run_is_passed_over():
    deep = DEEP.encode()
    assert read_starts(deep) == [] and last_step(deep) == 0 and parse_holder(deep) is None
