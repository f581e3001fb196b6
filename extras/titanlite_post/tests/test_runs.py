"""`dpo` and `grpo` as programs: killed, and resumed under another layout."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from tests.faults.launch import LaunchedRun, events_of, lines_of
from titanlite_corpus.tests.test_fine_tuning import SEQ_LEN, make
from titanlite_corpus.tests.test_preference_pairs import write_pairs
from titanlite_post.commands import judge

pytestmark = pytest.mark.slow
ONE_PROCESS, FSDP = (1,), (2,)
TENSOR = (2, "--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "4")
PIPELINE = (2, "--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4")
# SGD: AdamW's first steps enlarge rounding, and then another id may be sampled
SGD = ("--optimizer.name", "SGD", "--optimizer.lr", "0.5", "--attention.mask", "document")
REWARD = """
from titanlite_post.rewards import REWARDS

def letters(completion, record):
    return len(set(completion.lower())) / 4 + record["bonus"] * (completion < "g")

REWARDS["letters"] = letters
"""
PROMPTS = 6


def use_command(command: str, kill: tuple[str, int, int] | None) -> None:
    """Let `train.main` be a command of titanlite_post. `kill`: (what, call, rank or -1 for all)"""
    import train

    train.main = import_module(f"titanlite_post.commands.{command}").main
    if kill is None:
        return
    what, call, rank = kill
    module = import_module("titanlite.training.loop")
    target, name = (module, "take_step")
    if what == "generate":
        target, name = import_module("titanlite_post.generation").ShardedGenerator, "generate"
    original, calls = getattr(target, name), []

    def killed(*args, **options):
        calls.append(name)
        if len(calls) == call and rank in (-1, int(os.environ["RANK"])):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(target, name, killed)


def run(command: str, toml: Path, folder: Path, layout: tuple, *argv: str, kill=None) -> tuple:
    """(exit codes, output) of a run."""
    ranks, *degrees = layout
    argv = ("--job.config_file", str(toml), "--job.dump_folder", str(folder), *SGD, *degrees, *argv)
    prepare = partial(use_command, command, kill)
    with LaunchedRun(ranks, folder, *argv, prepare=prepare) as launched:
        return launched.wait(), launched.output


def curve(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(folder) if "event" not in line}


@pytest.fixture
def prompts_toml(run_toml, tmp_path, monkeypatch) -> Path:
    """A job of `grpo` on 6 prompts, 4 of them a step."""
    (tmp_path / "letters.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [{"prompt": "say " + "abcdef"[n:], "bonus": n % 3} for n in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f'{{ name = "p", path = "{tmp_path}/prompts.jsonl", format = "prompts" }}'
    toml = re.sub("sources = .*", f"sources = [{source}]", run_toml.read_text())
    toml = toml.replace("seq_len = 48", "seq_len = 64").replace("batch_size = 8", "batch_size = 4")
    grpo = '[grpo]\nreward = "letters"\ngroup_size = 3\nmax_new_tokens = 6\nclip = 0.01\n'
    run_toml.write_text(toml + grpo)
    return run_toml


@pytest.mark.parametrize(
    ("options", "kill", "after"),
    [
        ((), ("generate", 5, 1), TENSOR),  # the other rank ends, too
        # between the two steps on the completions of step 3, which the checkpoint of step 3 needs
        (
            ("--grpo.steps_per_rollout", "2", "--grpo.kl_weight", "0.5"),
            ("take_step", 4, -1),
            PIPELINE,
        ),
    ],
    ids=["on-policy", "two steps and KL"],
)
def test_a_killed_grpo_run_resumes_under_another_layout(
    prompts_toml, tmp_path, capsys, options, kill, after
):
    """With the same completions, prompts and losses as one process that nobody killed."""
    command = ("--job.import", "letters", *options)
    one, other = tmp_path / "one", tmp_path / "other"
    codes, output = run("grpo", prompts_toml, one, ONE_PROCESS, *command)
    assert codes == [0], output
    codes, output = run("grpo", prompts_toml, other, FSDP, *command, kill=kill)
    assert codes == ([1, -9] if kill[2] == 1 else [-9, -9]), output
    codes, output = run("grpo", prompts_toml, other, after, *command)
    assert codes == [0, 0], output
    assert [event["step"] for event in events_of(other, "resumed")] == [3]

    assert list(curve(one)) == list(curve(other)) == [1, 2, 3, 4, 5, 6]
    assert curve(other) == pytest.approx(curve(one), rel=1e-4, abs=1e-6)
    names = ("reward", "reward_std", "completion_tokens", "kl", "clipped")
    measured = [
        [[event[n] for n in names if n in event] for event in events_of(folder, "rollout")]
        for folder in (one, other)
    ]
    assert measured[1] == [pytest.approx(values, rel=1e-3, abs=1e-6) for values in measured[0]]
    if options:
        assert max(event["kl"] for event in events_of(one, "rollout")) > 1e-4
        assert max(event["clipped"] for event in events_of(one, "rollout")) > 0
    prompts, steps = {}, range(1, 7, 2 if options else 1)
    for step in steps:
        files = [folder / f"completions/step-{step}.jsonl" for folder in (one, other)]
        lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        assert [x["ids"] for x in lines[0]] == [x["ids"] for x in lines[1]]
        prompts |= {x["position"]: x["prompt_text"] for x in lines[1]}
    assert sorted(prompts) == list(range(24))  # four epochs, each of them with all prompts
    for epoch in range(0, 24, PROMPTS):
        assert len({prompts[epoch + n] for n in range(PROMPTS)}) == PROMPTS
    assert [event["step"] for event in events_of(other, "validation")] == [3, 6]
    if not options:
        check_judge(one, tmp_path, capsys)


def check_judge(run: Path, folder: Path, capsys) -> None:
    """`titanlite judge` prints the mean reward of the answers that it writes."""
    letters = import_module("letters").letters
    files = {"--checkpoint": run, "--prompts": folder / "prompts.jsonl", "--out": folder / "judged"}
    options = {**files, "--reward": "letters", "--max-new-tokens": 6, "--device": "cpu"}
    assert judge.main([str(x) for pair in options.items() for x in pair]) == 0
    judged = [json.loads(line) for line in (folder / "judged").read_text().splitlines()]
    assert len(judged) == PROMPTS
    assert [x["reward"] for x in judged] == [letters(x["completion"], x) for x in judged]
    mean = sum(x["reward"] for x in judged) / PROMPTS
    assert f"reward {mean:.4f}, standard error" in capsys.readouterr().out


@pytest.fixture
def pairs_toml(run_toml, tmp_path) -> Path:
    """A job of `dpo`."""
    write_pairs(
        tmp_path,
        [{"prompt": f"{n}?", "chosen": f"{n}", "rejected": "z" * (n % 5 + 1)} for n in range(40)],
    )
    make(tmp_path, kind="pairs")
    source = f'{{ name = "p", path = "{tmp_path}/out/chats/train", format = "pairs" }}'
    toml = re.sub("sources = .*", f"sources = [{source}]", run_toml.read_text())
    toml = re.sub(r"validation = .*|enable = true(?=\n +freq)", "", toml)
    toml = re.sub("tokenizer = .*", f'tokenizer = "{tmp_path}/tokenizer.json"', toml)
    toml = toml.replace("seq_len = 48", f"seq_len = {SEQ_LEN}")
    run_toml.write_text(toml.replace("vocab_size = 258", "vocab_size = 512"))
    return run_toml


def test_a_killed_dpo_run_resumes_under_another_layout_with_its_reference(pairs_toml, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    codes, output = run("dpo", pairs_toml, one, ONE_PROCESS)
    assert codes == [0], output
    codes, output = run("dpo", pairs_toml, other, FSDP, kill=("take_step", 5, -1))
    assert codes == [-9, -9], output
    reference, kept = other / "reference.npz", tmp_path / "kept.npz"
    reference.rename(kept)
    codes, output = run("dpo", pairs_toml, other, TENSOR)
    assert codes == [2, 2] and "reference.npz: cannot be read" in output, output
    kept.rename(reference)
    codes, output = run("dpo", pairs_toml, other, TENSOR)
    assert codes == [0, 0], output
    assert list(curve(one)) == list(curve(other)) == [1, 2, 3, 4, 5, 6]
    assert curve(other) == pytest.approx(curve(one), rel=1e-4)
    assert curve(one)[6] != pytest.approx(curve(one)[1], rel=1e-3)
