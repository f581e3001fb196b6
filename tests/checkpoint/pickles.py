"""Fuzz the reader of DCP's `.metadata`: python -m tests.checkpoint.pickles COUNT SEED

Reads COUNT pickles that are mutated or composed from a seed, and prints how many were accepted and
refused. Exits with an error if one raises anything but ValueError, causes an audit event (import,
file, socket, process, code), or exceeds the limits on memory and CPU time.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import resource
import struct
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from titanlite.checkpoint.chunks import _check_chunks, _rows_of_pickle
from titanlite.checkpoint.manifest import CheckpointManifest, FileRecord, TensorRecord

MEMORY_BYTES = 1 << 28  # above the memory of the process at its start
CPU_SECONDS = 60  # plus 10 ms for each pickle

SHAPES = {"model.a": [4, 6], "model.b": [], "optimizer.state.c": [300]}
FILES = {"__0_0.distcp": FileRecord(4000, ""), "__1_0.distcp": FileRecord(70_000, "")}
TENSORS = {name: TensorRecord(shape, "float32", "") for name, shape in SHAPES.items()}
MANIFEST = CheckpointManifest(1, {}, {}, {}, "", {}, 0.0, FILES, TENSORS, format=2)

HOSTILE = [  # opcodes that import, call, or ask for much memory
    b"cos\nsystem\n",
    b"cbuiltins\nexec\n",
    b"cbuiltins\n__import__\n",
    b"ctorch\nload\n",
    b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
    b"\x8c\x02os\x8c\x06system\x93",
    b"cos\nsystem\n\x8c\x0eecho fuzz > /fz\x85R",
    b"(\x8c\x0eecho fuzz > /fzios\nsystem\n",
    b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\nN}\x8c\x10__getattribute__cos"
    b"\nsystem\ns\x86b",
    b"r\xff\xff\xff\x0f",
    b"\x8d" + struct.pack("<Q", 1 << 60),
    b"\x8a\xff",
    b"\x8b" + struct.pack("<I", 1 << 30),
    b"Pabc\n",
    b"\x82\x01",
    b"\x85" * 40,
    b"\x94h\x00h\x00\x86" * 40,
    b"]\x94h\x00a",
    b"(" * 60,
]


def valid_pickles() -> list[bytes]:
    """Pickles as DCP writes them, in every protocol that it may have used."""
    tensors, locations = {}, {}
    for name, shape in SHAPES.items():
        half = shape[0] // 2 if shape else 0
        parts = [(0, half), (half, shape[0] - half)] if shape else [(None, None)]
        chunks = []
        for number, (start, size) in enumerate(parts):
            offsets = torch.Size([start, *[0] * (len(shape) - 1)] if shape else [])
            sizes = torch.Size([size, *shape[1:]] if shape else [])
            chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
            index = dcp.MetadataIndex(name, offsets, number)
            locations[index] = _StorageInfo(f"__{number}_0.distcp", 100 * number, 1500)
        properties = dcp.TensorProperties(torch.float32)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    meta = dcp.StorageMeta(checkpoint_id="/somewhere", save_id="1")
    paths = {name: tuple(name.split(".")) for name in SHAPES}
    metadata = dcp.Metadata(tensors, paths, locations, meta)
    return [pickle.dumps(metadata, protocol) for protocol in (2, 3, 4, 5)]


def split_at_opcodes(content: bytes) -> list[bytes]:
    """A pickle as a list of opcodes, without frames, whose length a mutation would invalidate."""
    starts = [(op.name, position) for op, _, position in pickletools.genops(content)]
    ends = [*(start for _, start in starts[1:]), len(content)]
    return [
        content[start:end]
        for (name, start), end in zip(starts, ends, strict=True)
        if name != "FRAME"
    ]


def mutate_pickle(draw: random.Random, corpus: list[list[bytes]]) -> bytes:
    parts = list(draw.choice(corpus))
    if draw.random() < 0.2:  # composed of random opcodes
        opcodes = [opcode for parts in corpus for opcode in parts] + HOSTILE
        parts = [*draw.choices(opcodes, k=draw.randrange(1, 60)), b"."]
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        action, at = draw.randrange(6), draw.randrange(len(parts))
        if action == 0:
            del parts[at : at + draw.choice((1, 1, 2, 10))]
        elif action == 1:
            parts.insert(at, draw.choice(HOSTILE))
        elif action == 2:
            parts.insert(at, draw.choice(draw.choice(corpus)))
        elif action == 3:
            parts[at:at] = parts[at : at + draw.randrange(40)] * draw.choice((1, 2, 50))
        elif action == 4:
            parts[at] = bytes([draw.randrange(256)]) + parts[at][1:]
        else:
            part = bytearray(parts[at])
            part[draw.randrange(len(part))] ^= 1 << draw.randrange(8)
            parts[at] = bytes(part)
        parts = parts or [b"."]
    return b"".join(parts)


def is_accepted(content: bytes) -> bool:
    try:
        for name, rows in _rows_of_pickle(content, list(SHAPES)):
            _check_chunks(name, TENSORS[name], rows, MANIFEST)
    except ValueError:
        return False
    return True


def forbid_audit_events() -> None:
    """Exit at any audit event from now on; reading a pickle must cause none."""

    def hook(event: str, arguments: tuple) -> None:
        os.write(2, f"audit event {event} {arguments}\n"[:500].encode())
        os._exit(99)

    sys.addaudithook(hook)


def main(count: int, seed: int) -> None:
    draw, accepted = random.Random(seed), 0
    corpus = [split_at_opcodes(content) for content in valid_pickles()]
    assert all(
        is_accepted(content) and is_accepted(b"".join(split_at_opcodes(content)))
        for content in valid_pickles()
    )
    assert not any(is_accepted(part + b".") for part in HOSTILE)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    seconds = int(CPU_SECONDS + count / 100)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    forbid_audit_events()
    for number in range(count):
        content = mutate_pickle(draw, corpus)
        try:
            accepted += is_accepted(content)
        except BaseException as error:
            os.write(2, f"pickle {number} of seed {seed}: {error!r}: {content!r:.3000}\n".encode())
            os._exit(98)
    os.write(1, f"{accepted} accepted, {count - accepted} refused\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
