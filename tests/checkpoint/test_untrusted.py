"""A checkpoint or Hugging Face folder from a stranger runs no code, reads no file outside its
folder, and takes little more memory than its files have bytes."""

from __future__ import annotations

import io
import json
import pickle
import resource
import shutil
import struct
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.checkpoint.saving import bits, load, open_checkpointer
from tests.checkpoint.test_checkpointer import modify, save_two_steps
from tests.distributed.oracle import ADAMW, Layout, start_run
from tests.distributed.ranks import run_on_ranks
from titanlite.checkpoint import (
    describe_saved_model,
    model_and_optimizer_state,
    read_checkpoint_manifest,
    read_tensors,
    tensor_reader,
)
from titanlite.checkpoint.chunks import Chunk, read_chunks
from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.checkpoint.manifest import FileRecord, manifest_hash
from titanlite.errors import CheckpointError
from titanlite.runtime.lease import parse_holder
from titanlite.runtime.start_log import read_starts
from titanlite.storage import StorageFolder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run's folder with steps 1 and 2, written by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(save_two_steps, 2, str(folder))
    return folder


def update_manifest(step: Path, /, **changes) -> None:
    """Change keys of the manifest, and update all hashes to those of the present files."""
    body = json.loads((step / "manifest.json").read_text()) | changes
    body.pop("hash", None)
    if "files" not in changes:
        paths = [path for path in step.iterdir() if path.name != "manifest.json"]
        hashes = {path.name: StorageFolder(step).hash_of(path.name) for path in paths}
        body["files"] = {
            path.name: asdict(FileRecord(path.stat().st_size, hashes[path.name])) for path in paths
        }
    (step / "manifest.json").write_text(json.dumps({**body, "hash": manifest_hash(body)}))


# --- code execution ------------------------------------------------------------------------------


class MaliciousObject:
    """Creates the file `proof` when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


def malicious_archive(proof: Path) -> bytes:
    payload = io.BytesIO()
    torch.save(MaliciousObject(proof), payload)
    return payload.getvalue()


def replace_shards(step: Path, archive: bytes) -> None:
    """Write an archive to the beginning of every shard file, and point every chunk to it."""
    for shard in step.glob("*.distcp"):
        shard.write_bytes(archive + bytes(max(0, shard.stat().st_size - len(archive))))
    table = json.loads((step / "chunks.json").read_text())
    tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    for name, flat in table["chunks"].items():
        stride = 3 + 2 * len(tensors[name]["shape"])
        for at in range(0, len(flat), stride):
            flat[at + 1 : at + 3] = [0, len(archive)]
    (step / "chunks.json").write_text(json.dumps(table))
    update_manifest(step)


def malicious_shards(step: Path, proof: Path) -> None:
    """Chunks are archives with a pickle that torch.load(weights_only=False) would execute."""
    replace_shards(step, malicious_archive(proof))


def compressed_shards(step: Path, proof: Path) -> None:
    """A shard of 1 MB that decompresses to 0.3 GiB."""
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


def deeply_nested_manifest(step: Path, proof: Path) -> None:
    (step / "manifest.json").write_text("[" * 200_000)


def deeply_nested_chunks(step: Path, proof: Path) -> None:
    (step / "chunks.json").write_text("[" * 200_000)
    update_manifest(step)


def huge_tensor(step: Path, proof: Path) -> None:
    tensors = json.loads((step / "manifest.json").read_text())["tensors"]
    tensors["model.norm.weight"]["shape"] = [1 << 40]
    update_manifest(step, tensors=tensors)


def file_outside(step: Path, proof: Path) -> None:
    update_manifest(step, files={"../../secret": {"bytes": 3, "hash": "0"}})


def linked_shard(step: Path, proof: Path) -> None:
    shard = step / "__1_0.distcp"
    shard.rename(step.parent / "outside")
    shard.symlink_to(step.parent / "outside")


ATTACKS = {  # attack -> part of the error
    malicious_shards: "needs exactly one uncompressed data/ entry",
    compressed_shards: "needs exactly one uncompressed data/ entry",
    deeply_nested_manifest: "nested too deeply",
    deeply_nested_chunks: "more lists than tensors",
    huge_tensor: "its tensors have 4,398,",
    file_outside: "'../../secret' is not a name of a file in its folder",
    linked_shard: "__1_0.distcp is missing",
}


def limit_memory(extra_bytes: int) -> None:
    """Limit this process to its present memory and `extra_bytes`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, used + extra_bytes))


def load_each(folders) -> list[str]:
    results = []
    state, _, _ = start_run(Layout(), ADAMW)
    limit_memory(1 << 28)
    for folder in folders:
        step_folder = StorageFolder(folder) / "step-2"
        try:
            read_checkpoint_manifest(step_folder)
            tensors = model_and_optimizer_state(state.model, state.optimizer)
            read_tensors(step_folder, tensors, no_dist=True)
            results.append("loaded")
        except CheckpointError as error:
            results.append(str(error))
    return results


@pytest.mark.slow
def test_the_pickle_that_dcp_reads_is_never_opened(saved, tmp_path):
    step, proof = (
        Path(shutil.copytree(saved / "step-2", tmp_path / "step-2")),
        tmp_path / "executed",
    )
    (step / ".metadata").write_bytes(pickle.dumps(MaliciousObject(proof)))
    update_manifest(step)
    assert run_on_ranks(load_each, 1, [str(tmp_path)])[0] == ["loaded"]
    assert not proof.exists()


def test_a_malicious_checkpoint_runs_no_code_and_is_refused_in_little_memory(saved, tmp_path):
    folders, proof = [], tmp_path / "executed"
    for attack in ATTACKS:
        folders.append(str(tmp_path / attack.__name__))
        (tmp_path / attack.__name__).mkdir()
        step = shutil.copytree(saved / "step-2", tmp_path / attack.__name__ / "step-2")
        attack(Path(step), proof)
    errors = run_on_ranks(load_each, 1, folders)[0]
    assert not proof.exists()
    for expected, error in zip(ATTACKS.values(), errors, strict=True):
        assert expected in error and "step-2: is damaged" in error, error


# --- valid checkpoints ---------------------------------------------------------------------------


def load_by_both(folder) -> bool:
    """Whether a load of a checkpoint, and a load of it by DCP itself, give equal bits."""
    state, _, _ = start_run(Layout(), ADAMW)
    load(open_checkpointer(folder), state)
    loaded = bits(state)
    modify(state)
    tensors = model_and_optimizer_state(state.model, state.optimizer)
    dcp.load(tensors, checkpoint_id=f"{folder}/step-2")
    return bits(state) == loaded


def test_dcp_reads_a_checkpoint(saved):
    assert run_on_ranks(load_by_both, 1, str(saved))[0]


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
def test_any_part_of_a_chunk_can_be_read(shape, offsets, lengths, saved_as, wanted, monkeypatch):
    monkeypatch.setattr(tensor_reader, "BUFFER_BYTES", 64)
    tensor = torch.randn(shape).to(getattr(torch, saved_as))
    content = io.BytesIO(b"before")
    content.seek(6)
    torch.save(tensor, content)
    chunk = Chunk(shape, "", 6, content.tell() - 6)
    content.write(b"behind")
    columns = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    for target in (torch.empty(lengths), torch.empty((*lengths, 2))[..., 0]):
        target = target.to(getattr(torch, wanted))
        tensor_reader.read_part_of_chunk(content, chunk, tensor.dtype, offsets, target)
        assert torch.equal(target, tensor[columns].to(target.dtype))


def test_an_archive_above_four_gib_can_be_read(monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # write zip64 fields as if it were larger
    tensor, content = torch.arange(90.0), io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/byteorder", "little")
        with archive.open("archive/data/0", "w", force_zip64=True) as elements:
            elements.write(tensor.numpy().tobytes())
    target = torch.empty(90)
    chunk = Chunk((90,), "", 0, len(content.getvalue()))
    tensor_reader.read_part_of_chunk(content, chunk, torch.float32, (0,), target)
    assert torch.equal(target, tensor)


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
    "half": (lambda flat: flat[:5], "32 elements, but its chunks 16"),
    "a fraction": (lambda flat: [*flat[:1], 0.5, *flat[2:]], "not rows of 5 integers"),
    "a boolean": (lambda flat: [True, *flat[1:]], "not rows of 5 integers"),
    "too few numbers": (lambda flat: flat[:-1], "not rows of 5 integers"),
    "no list": (lambda flat: "0", "a str instead of a list"),
    "no tensor": (lambda flat: None, "a NoneType instead of a list"),
}


@pytest.mark.parametrize("change, expected", WRONG_CHUNKS.values(), ids=WRONG_CHUNKS)
def test_invalid_chunks_are_refused(saved, tmp_path, change, expected):
    step = Path(shutil.copytree(saved / "step-1", tmp_path / "step-1"))
    table = json.loads((step / "chunks.json").read_text())
    table["chunks"][NAME] = change(table["chunks"][NAME])
    (step / "chunks.json").write_text(json.dumps(table))
    update_manifest(step)
    folder = StorageFolder(step)
    with pytest.raises(CheckpointError, match="chunks.json is not valid") as refused:
        read_chunks(folder, read_checkpoint_manifest(folder), [NAME])
    assert expected in str(refused.value)


def test_a_modified_chunks_json_is_detected_even_without_full_verification(saved, tmp_path):
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
def test_a_manifest_with_wrong_types_is_refused(saved, tmp_path, key):
    step = Path(shutil.copytree(saved / "step-1", tmp_path / "step-1"))
    update_manifest(step, **{key.strip(): WRONG_MANIFESTS[key]})
    began = time.process_time()
    with pytest.raises(CheckpointError):
        read_checkpoint_manifest(StorageFolder(step))
    assert time.process_time() - began < 5  # the product of 50,000 sizes took a minute


@pytest.mark.parametrize(
    "model, expected",
    [
        (None, "it has no model section"),
        ({"name": "unknown"}, "model"),
        ({"dim": "32"}, "dim"),
        ({"n_layers": 10**9}, "at most 1000"),
        ({"n_layers": 999}, "999 layers, but contains"),
        ({"dim": 10**30}, "at most 64 bits"),
        ({"dim": 10**17}, "parameters"),
        ({"vocab_size": 7}, "have another shape"),
    ],
)
def test_a_model_that_does_not_match_its_tensors_is_not_built(saved, tmp_path, model, expected):
    step = Path(shutil.copytree(saved / "step-1", tmp_path / "step-1"))
    update_manifest(step, job={"model": model})
    with pytest.raises(CheckpointError) as refused:
        describe_saved_model(StorageFolder(step), read_checkpoint_manifest(StorageFolder(step)))
    assert expected in str(refused.value)


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
HUGGING_FACE = {  # name -> file, its content, part of the error
    "a thousand million layers": (
        "config.json",
        LLAMA | {"num_hidden_layers": 10**9},
        "layers = 1000000000",
    ),
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
    "an index of files outside the folder": (
        "model.safetensors.index.json",
        {"weight_map": {"a": "../other.safetensors", "b": "/etc/passwd"}},
        "are missing: ../other.safetensors, /etc/passwd",
    ),
}


def open_each(folders) -> list[str]:
    results = []
    limit_memory(1 << 28)
    for folder in folders:
        try:
            open_hugging_face(StorageFolder(folder))
            results.append("opened")
        except CheckpointError as error:
            results.append(str(error))
    return results


def test_a_malicious_hugging_face_folder_is_refused_in_little_memory(tmp_path):
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
    errors = run_on_ranks(open_each, 1, folders)[0]
    for error, (_, _, expected) in zip(errors, HUGGING_FACE.values(), strict=True):
        assert expected in error and len(error) < 1000, error


def test_a_hugging_face_folder_of_links_is_refused_with_the_fix(tmp_path):
    (tmp_path / "blob").write_text(json.dumps(LLAMA))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to("../blob")
    with pytest.raises(CheckpointError, match="config.json is a link; .* cp -rL"):
        open_hugging_face(StorageFolder(tmp_path / "snapshot"))


def test_deeply_nested_json_in_the_start_log_and_lease_is_ignored():
    deep = DEEP.encode()
    assert read_starts(deep) == [] and parse_holder(deep) is None
