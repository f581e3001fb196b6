"""A memory checkpoint loads exactly what was saved, under any layout, or it is not used."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from tests.checkpoint.saving import bits, open_checkpointer, save_and_wait
from tests.distributed.oracle import Layout, Record, parse_layouts, run_until, start_run
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_resume import DENSE, EXPERTS, TIED, merge_bits
from titanlite.checkpoint import SaveRequest, memory_save, memory_sets
from titanlite.checkpoint.memory_save import plan_copies
from titanlite.checkpoint.memory_sets import FOLDER_VARIABLE

SMALL = replace(DENSE, batch=4, seq_len=12)
WIDE = replace(DENSE.sizes, head_dim=64, hidden_dim=256)  # whole quantisation blocks under TP
EIGHT_BIT = replace(DENSE, state_dtype="8bit", sizes=WIDE)
MUON = replace(DENSE, optimizer="Muon")


def open_run(folder: str, hosts: str, **config):
    """The checkpointer of a run whose rank i is on host hosts[i], with a memory folder of its own.

    `hosts` has a letter for each rank.
    """
    host = Path(folder) / "memory" / hosts[dist.get_rank()]
    host.mkdir(parents=True, exist_ok=True)
    memory_sets.MESSAGE_BYTES = memory_save.MESSAGE_BYTES = 1000  # so that there are many
    os.environ[FOLDER_VARIABLE] = str(host)
    return open_checkpointer(f"{folder}/run", **{"memory_interval": 1, "interval": 100, **config})


def save_in_memory(checkpointer, state):
    """Save a state in memory; returns the finished save."""
    request = SaveRequest(state.step, state.model, state.optimizer, state.progress())
    checkpointer.save_in_memory(request)
    return checkpointer.memory.take_result(wait=True)


def train_and_save(layout: Layout, recipe, folder: str, hosts: str, steps: int = 1):
    """(sent bytes, bits of this rank) of the last of the steps 1 to `steps`, all saved."""
    state, engine, mesh = start_run(layout, recipe)
    checkpointer = open_run(folder, hosts)
    assert checkpointer.find() is None
    for step in range(1, steps + 1):
        run_until(state, engine, mesh, recipe, Record(), step)
        saved = save_in_memory(checkpointer, state)
        assert not (saved.problem or saved.error), saved.problem or saved.error
    return checkpointer.memory.sent_bytes, bits(state)


def resume(layout: Layout, recipe, folder: str, hosts: str):
    """(step, refused, bits of this rank) after loading the newest checkpoint."""
    state, _, _ = start_run(layout, recipe)
    checkpointer = open_run(folder, hosts)
    found = checkpointer.find()
    assert found.memory
    progress = checkpointer.load(found, state.model, state.optimizer, {})
    return progress["step"], found.refused, bits(state)


HOSTS = [  # recipe, layout, hosts, the lost host, whether anything is sent, later layout, hosts
    (DENSE, "shard=2,tensor=2", "aabb", "a", True, "pipeline=2,microbatch=3", "bc"),
    (TIED, "pipeline=2,microbatch=3", "ab", "b", True, "one", "a"),
]
MORE_HOSTS = [
    (DENSE, "replicate=2,shard=2", "aabb", "a", False, "tensor=2", "bc"),
    (EXPERTS, "pipeline=2,tensor=2,expert=2,microbatch=2", "aabb", "b", True, "shard=2", "ca"),
    (EIGHT_BIT, "shard=2,tensor=2", "aabb", "a", True, "replicate=2,shard=2", "bbcc"),
    (MUON, "shard=2,tensor=2", "aabb", "b", True, "tensor=2", "ca"),
    (DENSE, "shard=3", "aab", "a", True, "shard=2", "bb"),
    (DENSE, "shard=2,context=2", "abcd", "c", True, "shard=3", "abd"),
    (EXPERTS, "shard=4,expert=2", "aabb", "a", True, "tensor=2,shard=2", "bbcc"),
]


def pytest_generate_tests(metafunc) -> None:
    if "lost" in metafunc.fixturenames:
        more = MORE_HOSTS if metafunc.config.getoption("--layouts") > 1 else []
        names = "recipe, before, hosts, lost, sends, after, later_hosts"
        cases = [*HOSTS, *more]
        metafunc.parametrize(names, cases, ids=[f"{c[1]} {c[2]} - {c[3]}" for c in cases])


def test_the_loss_of_any_host_loses_no_bit_under_another_layout(
    recipe, before, hosts, lost, sends, after, later_hosts, tmp_path
):
    (before,), (after,), folder = parse_layouts(before), parse_layouts(after), str(tmp_path)
    saved = run_on_ranks(train_and_save, len(hosts), before, recipe, folder, hosts)
    assert all((sent > 0) == sends for sent, _ in saved)
    shutil.rmtree(tmp_path / "memory" / lost)
    loaded = run_on_ranks(resume, len(later_hosts), after, recipe, folder, later_hosts)
    assert all(step == 1 and not refused for step, refused, _ in loaded)
    assert merge_bits([part for *_, part in loaded]) == merge_bits([part for _, part in saved])


def test_copies_are_on_another_host_and_replicas_are_not_sent():
    assert plan_copies("aabb", "1234") == {0: 2, 1: 3, 2: 0, 3: 1}
    assert plan_copies("aabbb", "12345") == {0: 2, 1: 3, 2: 0, 3: 1, 4: 0}
    assert plan_copies("aabb", "1212") == {0: None, 1: None, 2: None, 3: None}  # HSDP
    assert plan_copies("aabb", "1112") == {0: None, 2: None, 3: 1}  # 2 only on host b
    assert plan_copies("aa", "12") == {0: None, 1: None}
    assert plan_copies("abc", "123") == {0: 1, 1: 2, 2: 0}


# --- damage ---------------------------------------------------------------------------------------


def files_of(folder: Path, step: int, rank: int, hosts: str = "ab") -> list[Path]:
    pattern = f"*/*/*-{step}-{rank}.bin"
    return [path for host in hosts for path in sorted((folder / "memory" / host).glob(pattern))]


def flip(path: Path, at: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


DAMAGE = {  # what happened -> (the change, the step that is found, whether anything is refused)
    "nothing": (lambda f: None, 2, False),
    "a host is lost": (lambda f: shutil.rmtree(f / "memory/b"), 2, False),
    "one copy has a flipped bit": (lambda f: flip(files_of(f, 2, 0, "a")[0]), 2, True),
    "both copies have one": (lambda f: [flip(p) for p in files_of(f, 2, 0)], 1, True),
    "both are torn": (lambda f: [os.truncate(p, 900) for p in files_of(f, 2, 1)], 1, True),
    "both headers are changed": (lambda f: [flip(p, -3000) for p in files_of(f, 2, 0)], 1, True),
    "links": (lambda f: [replace_by_link(p) for p in files_of(f, 2, 0)], 1, True),
    "both steps are damaged": (
        lambda f: [flip(p) for s in (1, 2) for p in files_of(f, s, 0)],
        None,
        False,
    ),
    "both hosts are lost": (lambda f: shutil.rmtree(f / "memory"), None, False),
    "the checkpoint folder is deleted": (lambda f: shutil.rmtree(f / "run"), None, False),
    "another run": (
        lambda f: (f / "run/memory.json").write_text('{"name": "x", "base": null}'),
        None,
        False,
    ),
    "a damaged record": (lambda f: (f / "run/memory.json").write_text("{"), None, False),
}


def find_after_each_damage(folder: str) -> dict[str, tuple]:
    """After each damage: (step that is found or None, whether a file or set was refused)."""
    train_and_save(Layout(shard=2), SMALL, folder, "ab", steps=2)
    root, results = Path(folder), {}
    for name in ("memory", "run"):
        if dist.get_rank() == 0:
            shutil.copytree(root / name, root / f"saved-{name}")
    for name, (change, _, _) in DAMAGE.items():
        if dist.get_rank() == 0:
            for part in ("memory", "run"):
                shutil.rmtree(root / part, ignore_errors=True)
                shutil.copytree(root / f"saved-{part}", root / part)
            change(root)
        dist.barrier()
        found = open_run(folder, "ab").find()
        results[name] = (found and found.step, bool(found and found.refused))
        dist.barrier()
    return results


def test_a_damaged_file_is_never_loaded_and_the_newest_intact_step_is(tmp_path):
    expected = {name: (step, refused) for name, (_, step, refused) in DAMAGE.items()}
    assert run_on_ranks(find_after_each_damage, 2, str(tmp_path)) == [expected, expected]


# --- full memory, histories -----------------------------------------------------------------------


def save_with_full_memory(folder: str) -> list:
    """Problems of three saves, the second with full memory on rank 1; the step found after it."""
    state, engine, mesh = start_run(Layout(shard=2), SMALL)
    checkpointer, results = open_run(folder, "ab"), []
    checkpointer.find()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        run_until(state, engine, mesh, SMALL, Record(), step)
        if step == 2 and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
        results.append(save_in_memory(checkpointer, state).problem)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        left = {path.name.split("-")[1] for path in Path(folder).glob("memory/*/*/*/*.bin")}
        results.append(sorted(left))
        dist.barrier()
    return results


def test_full_memory_is_a_problem_of_one_save_and_keeps_the_set_before(tmp_path):
    results = run_on_ranks(save_with_full_memory, 2, str(tmp_path))
    assert results[0] == results[1]
    assert results[0][:2] == ["", ["1"]] and results[0][4:] == ["", ["1", "3"]]
    problem, left = results[0][2:4]
    assert "rank 1:" in problem and "File too large" in problem and "1" in left


def find_in_other_histories(folder: str) -> dict[str, object]:
    """The checkpoint that a start finds after each event in the life of a run."""
    state, engine, mesh = start_run(Layout(shard=2), SMALL)
    root, found = Path(folder) / "memory", {}

    def start(event: str = "", **config):
        checkpointer = open_run(folder, "ab", **config)
        at = checkpointer.find()
        found[event] = at and ("memory" if at.memory else "disk", at.step)
        return checkpointer

    def save(checkpointer, step: int) -> None:
        state.counters.step = step  # the weights do not matter here
        assert not save_in_memory(checkpointer, state).problem

    def copy_files(source: str, to: str) -> None:
        dist.barrier()  # each rank has removed what its start removes
        if dist.get_rank() == 0:
            for host in "ab":
                shutil.copytree(root / source / host, root / to / host, dirs_exist_ok=True)
        dist.barrier()

    def roll_back(checkpointer) -> None:
        at, _ = checkpointer.find_first_valid([1])
        checkpointer.load(at, state.model, state.optimizer, {}, completely=True)

    checkpointer = start()
    run_until(state, engine, mesh, SMALL, Record(), 1)
    save_and_wait(checkpointer, state)
    save(checkpointer, 2)
    start("after a crash")
    checkpointer = start("after a crash before the first save")
    save(checkpointer, 3)
    copy_files(".", "absent")
    start("under load_step", load_step=1)
    copy_files("absent", ".")
    checkpointer = start("after load_step, when absent hosts return", load_step=1)
    checkpointer.set_aside_later_steps(1)
    save(checkpointer, 2)
    start("after load_step was applied", load_step=1)
    checkpointer = start()
    save(checkpointer, 3)
    copy_files(".", "absent")
    roll_back(checkpointer)
    copy_files("absent", ".")
    checkpointer = start("after a roll-back, when absent hosts return")
    save(checkpointer, 2)
    start(memory_interval=0)
    checkpointer = start("after a start without memory checkpoints")
    save(checkpointer, 2)
    dist.barrier()
    checkpointer.memory.remove()
    dist.barrier()
    found["left at the end"] = [path.name for path in root.glob("[ab]/*/*/*")]
    del found[""]
    return found


def test_no_set_of_another_history_is_loaded(tmp_path):
    for found in run_on_ranks(find_in_other_histories, 2, str(tmp_path)):
        assert found == {
            "after a crash": ("memory", 2),
            "after a crash before the first save": ("memory", 2),
            "under load_step": ("disk", 1),
            "after load_step, when absent hosts return": ("disk", 1),
            "after load_step was applied": ("memory", 2),
            "after a roll-back, when absent hosts return": ("disk", 1),
            "after a start without memory checkpoints": ("disk", 1),
            "left at the end": [],
        }
