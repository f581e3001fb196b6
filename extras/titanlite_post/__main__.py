"""Post-training: torchrun --nproc_per_node N -m titanlite_post COMMAND --job.config_file a.toml"""

from __future__ import annotations

import sys

from titanlite_lab.dispatch import run_command

COMMANDS = {
    "dpo": "train on pairs of answers, of which one is preferred: DPO, IPO, SimPO",
    "grpo": "train on prompts by rewards of the model's own answers",
    "judge": "the mean reward of a checkpoint's answers to prompts",
    "adapters": "merge the adapters of LoRA, and convert them to and from peft",
}

if __name__ == "__main__":
    sys.exit(run_command("titanlite_post", COMMANDS, sys.argv[1:]))
