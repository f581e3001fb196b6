"""A minimal training loop for one process, to compare train.py with.

python -m benchmarks.baseline_loop TASK CORPUS trim|no-trim   prints the end times of the steps
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


def baseline_loop(task: Task, corpus: Path, trim: bool) -> list[float]:
    """Train as train.py does (model, optimizer, precision, batch); returns the steps' end times.

    Without `trim`, malloc does not return freed memory to the system; train.py on a CPU runs so.
    """
    if not trim:
        disable_malloc_trim()
    torch.manual_seed(0)
    spec, device = FAMILIES["llama3"], torch.device(task.device)
    with device:
        model = spec.build(spec.flavors[task.flavor])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    undecayed = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, generator, end_times = open_ids(corpus), np.random.default_rng(0), []
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=task.dtype == "bfloat16")
    for _ in range(task.steps):
        starts = generator.integers(0, len(tokens) - task.seq_len - 1, task.batch)
        samples = np.stack([tokens[s : s + task.seq_len + 1] for s in starts]).astype(np.int64)
        ids = torch.from_numpy(samples).to(device)
        with autocast:
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        end_times.append(time.perf_counter())
    return end_times


if __name__ == "__main__":
    task, corpus, malloc = sys.argv[1:]
    end_times = baseline_loop(Task(**json.loads(task)), Path(corpus), malloc == "trim")
    print(json.dumps(end_times))
