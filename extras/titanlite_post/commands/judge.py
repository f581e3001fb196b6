"""Mean reward of a checkpoint's answers: titanlite judge --checkpoint RUN --prompts FILE.jsonl

The prompts and rewards are those of `titanlite grpo`; answer prompts that it did not train on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

from titanlite.distributed.process_group import choose_device
from titanlite.errors import EXIT_DONE, ConfigError
from titanlite.files import write_file_atomically
from titanlite.log import configure_log, log_waiting
from titanlite.storage import StorageFolder
from titanlite_lab.checkpoints import find_newest_checkpoint
from titanlite_lab.generate import Sampling, generate, load_generator
from titanlite_post.prompts import PromptEncoder, PromptFile
from titanlite_post.rewards import REWARDS, RewardProcesses, RewardTask


def judge_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="a step-N folder, or that of a run")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="as for titanlite grpo")
    parser.add_argument("--reward", default="exact_match", help=f"{', '.join(REWARDS)}")
    parser.add_argument("--template", help="of prompts with messages: llama3, chatml, or a path")
    parser.add_argument("--bos", action="store_true", help="begin other prompts with BOS")
    parser.add_argument("--limit", type=int, default=0, help="the first prompts only; 0: all")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="default: 0, the most likely token"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument("--timeout-seconds", type=float, default=10.0, help="of a reward")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write the answers, too")
    parser.add_argument("--tokenizer", help="needed if the checkpoint has no copy of it")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args(argv)


def answer_prompts(args: argparse.Namespace, file: PromptFile) -> list[RewardTask]:
    """The checkpoint's answer to each prompt."""
    checkpoint = find_newest_checkpoint(StorageFolder(args.checkpoint))
    generator = load_generator(checkpoint, choose_device(args.device), args.tokenizer)
    prompts = PromptEncoder(generator.tokenizer, args.template, args.bos)
    tasks = []
    for number in range(min(args.limit or len(file), len(file))):
        record = file.record_at(number)
        ids = generate(
            generator.model,
            prompts.encode(record, f"{file.path}, line {number + 1}"),
            args.max_new_tokens,
            Sampling(args.temperature, seed=args.seed + number),
            ends=prompts.ends | generator.end_ids,
            vocab_size=generator.tokenizer.vocab_size,
        )
        tasks.append(RewardTask(prompts.decode([*ids]), record))
    return tasks


def main(argv: list[str]) -> int:
    configure_log()
    args = judge_arguments(argv)
    if args.reward not in REWARDS:
        raise ConfigError(f"--reward {args.reward}: must be one of {', '.join(REWARDS)}.")
    try:
        file = PromptFile(args.prompts)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--prompts {args.prompts}: cannot be read ({reason}).") from None
    with log_waiting("answering"):
        tasks = answer_prompts(args, file)
        rewards = RewardProcesses(args.reward, 2, args.timeout_seconds).compute(tasks)
    if args.out:
        answers = zip(tasks, rewards, strict=True)
        lines = [{**t.record, "completion": t.completion, "reward": r} for t, r in answers]
        write_file_atomically(args.out, "".join(f"{json.dumps(x)}\n" for x in lines).encode())
    known = [reward for reward in rewards if not isinstance(reward, str)]
    failed = [reward for reward in rewards if isinstance(reward, str)]
    if failed:
        print(f"{len(failed)} rewards failed; the first one {failed[0]}")
    if known:
        of_mean = stdev(known) / len(known) ** 0.5 if len(known) > 1 else 0.0
        print(f"reward {fmean(known):.4f}, standard error {of_mean:.4f}, of {len(known)} answers")
    return EXIT_DONE
