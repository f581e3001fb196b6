"""The same training with LlamaForCausalLM and Trainer of transformers, without logging and saving.

python -m benchmarks.hf_trainer TASK CORPUS   prints the end times of the steps
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.corpus import open_ids
from benchmarks.processes import Task
from titanlite.models import FAMILIES


class RandomSamples(Dataset):
    """Samples at random positions of a corpus, the same as those of the baseline loop."""

    def __init__(self, task: Task, corpus: Path):
        self.tokens, self.length = open_ids(corpus), task.seq_len
        generator, count = np.random.default_rng(0), task.steps * task.batch
        self.starts = generator.integers(0, len(self.tokens) - self.length, count)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]
        ids = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def trainer_loop(task: Task, corpus: Path) -> list[float]:
    """Run transformers' Trainer with fused AdamW; returns the end times of its steps."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    spec, end_times = FAMILIES["llama3"], []
    sizes = spec.flavors[task.flavor]
    set_seed(0)
    config = LlamaConfig(**spec.hugging_face.to_config(sizes, task.seq_len), use_cache=False)
    model = LlamaForCausalLM(config)
    assert model.num_parameters() == spec.count_parameters(sizes), "not the same model"

    class StepClock(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            if task.device == "cuda":
                torch.cuda.synchronize()
            end_times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=task.batch,
            max_steps=task.steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            bf16=task.dtype == "bfloat16",
            use_cpu=task.device == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = RandomSamples(task, corpus)
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[StepClock()]).train()
    return end_times


if __name__ == "__main__":
    end_times = trainer_loop(Task(**json.loads(sys.argv[1])), Path(sys.argv[2]))
    print(json.dumps(end_times))
