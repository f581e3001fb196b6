"""The bare loop: all that a person would write for one process, and nothing else.

python -m benchmarks.baseline_loop TASK CORPUS free|keep   prints the moments at which its steps ended
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.corpus import open_ids
from benchmarks.processes import Task
from titanlite.distributed.process_group import disable_malloc_trim
from titanlite.models import FAMILIES


def bare_loop(task: Task, corpus: Path, keep: bool) -> list[float]:
    """The same model, optimizer, precision and batch.

    With `keep`, freed memory stays with the process, as train.py does it on a CPU.
    """
    if keep:
        disable_malloc_trim()
    torch.manual_seed(0)
    spec, device = FAMILIES["llama3"], torch.device(task.device)
    with device:
        model = spec.build(spec.flavors[task.flavor])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    spared = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, chance, moments = open_ids(corpus), np.random.default_rng(0), []
    half = torch.autocast(device.type, torch.bfloat16, enabled=task.dtype == "bfloat16")
    for _ in range(task.steps):
        starts = chance.integers(0, len(tokens) - task.seq_len - 1, task.batch)
        rows = np.stack([tokens[s : s + task.seq_len + 1] for s in starts]).astype(np.int64)
        ids = torch.from_numpy(rows).to(device)
        with half:
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        moments.append(time.perf_counter())
    return moments


if __name__ == "__main__":
    task, corpus, freed = sys.argv[1:]
    print(json.dumps(bare_loop(Task(**json.loads(task)), Path(corpus), freed == "keep")))
