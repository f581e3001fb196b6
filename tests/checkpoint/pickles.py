"""Fuzz the reader of DCP's `.metadata`: python -m tests.checkpoint.pickles COUNT SEED

Reads COUNT pickles that were mutated or composed from a seed, and prints how many were accepted
and refused. Ends at once where one raises anything but ValueError, or causes an audit event
(an import, a file, a socket, a process, code), or exceeds the limits on memory and CPU time.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import random
import resource
import struct
import sys

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from titanlite.checkpoint.chunks import _check_chunks, _rows_of_pickle
from titanlite.checkpoint.manifest import CheckpointManifest, FileRecord, TensorRecord

MEMORY_BYTES = 1 << 28  # above what the process has at its start
CPU_SECONDS = 60  # and 10 ms for each pickle

SHAPES = {"model.a": [4, 6], "model.b": [], "optimizer.state.c": [300]}
FILES = {"__0_0.distcp": FileRecord(4000, ""), "__1_0.distcp": FileRecord(70_000, "")}
TENSORS = {name: TensorRecord(shape, "float32", "") for name, shape in SHAPES.items()}
MANIFEST = CheckpointManifest(1, {}, {}, {}, "", {}, 0.0, FILES, TENSORS, format=2)

HOSTILE = [  # names, and calls that would show
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


def originals() -> list[bytes]:
    """Pickles as DCP writes them, of every protocol that it may have used."""
    tensors, places = {}, {}
    for name, shape in SHAPES.items():
        half = shape[0] // 2 if shape else 0
        parts = [(0, half), (half, shape[0] - half)] if shape else [(None, None)]
        chunks = []
        for number, (at, size) in enumerate(parts):
            offsets = torch.Size([at, *[0] * (len(shape) - 1)] if shape else [])
            sizes = torch.Size([size, *shape[1:]] if shape else [])
            chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
            index = dcp.MetadataIndex(name, offsets, number)
            places[index] = _StorageInfo(f"__{number}_0.distcp", 100 * number, 1500)
        properties = dcp.TensorProperties(torch.float32)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    meta = dcp.StorageMeta(checkpoint_id="/somewhere", save_id="1")
    paths = {name: tuple(name.split(".")) for name in SHAPES}
    whole = dcp.Metadata(tensors, paths, places, meta)
    return [pickle.dumps(whole, protocol) for protocol in (2, 3, 4, 5)]


def pieces(content: bytes) -> list[bytes]:
    """A pickle, cut at its opcodes; without frames, whose length a mutation would break."""
    starts = [(op.name, at) for op, _, at in pickletools.genops(content)]
    ends = [at for _, at in starts[1:]] + [len(content)]
    cut = [content[at:end] for (_, at), end in zip(starts, ends, strict=True)]
    return [part for (name, _), part in zip(starts, cut, strict=True) if name != "FRAME"]


def mutate(draw: random.Random, corpus: list[list[bytes]]) -> bytes:
    parts = list(draw.choice(corpus))
    if draw.random() < 0.2:  # composed of nothing but opcodes
        every = [part for one in corpus for part in one] + HOSTILE
        parts = draw.choices(every, k=draw.randrange(1, 60)) + [b"."]
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        act, at = draw.randrange(6), draw.randrange(len(parts))
        if act == 0:
            del parts[at : at + draw.choice((1, 1, 2, 10))]
        elif act == 1:
            parts.insert(at, draw.choice(HOSTILE))
        elif act == 2:
            parts.insert(at, draw.choice(draw.choice(corpus)))
        elif act == 3:
            parts[at:at] = parts[at : at + draw.randrange(40)] * draw.choice((1, 2, 50))
        elif act == 4:
            parts[at] = bytes([draw.randrange(256)]) + parts[at][1:]
        else:
            part = bytearray(parts[at])
            part[draw.randrange(len(part))] ^= 1 << draw.randrange(8)
            parts[at] = bytes(part)
        parts = parts or [b"."]
    return b"".join(parts)


def read(content: bytes) -> bool:
    """Whether a pickle is accepted."""
    try:
        for name, rows in _rows_of_pickle(content, list(SHAPES)):
            _check_chunks(name, TENSORS[name], rows, MANIFEST)
    except ValueError:
        return False
    return True


def forbid_everything() -> None:
    """From here on any audit event ends the process: reading a pickle has none."""

    def hook(event: str, arguments: tuple) -> None:
        os.write(2, f"audit event {event} {arguments}\n"[:500].encode())
        os._exit(99)

    sys.addaudithook(hook)


def main(count: int, seed: int) -> None:
    draw, accepted = random.Random(seed), 0
    corpus = [pieces(content) for content in originals()]
    assert all(read(content) and read(b"".join(pieces(content))) for content in originals())
    assert not any(read(part + b".") for part in HOSTILE)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    seconds = int(CPU_SECONDS + count / 100)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    said = io.StringIO()
    forbid_everything()
    for number in range(count):
        content = mutate(draw, corpus)
        try:
            accepted += read(content)
        except BaseException as error:
            print(f"pickle {number} of seed {seed}: {error!r}: {content!r:.3000}", file=said)
            os.write(2, said.getvalue().encode())
            os._exit(98)
    os.write(1, f"{accepted} accepted, {count - accepted} refused\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
