"""The planner's search: its time for 16,384 GPUs, and its answer against all candidates.

python -m benchmarks.planner_search              # 405B on 16,384 GPUs, 70B on 512
python -m benchmarks.planner_search --all 64     # 8B on 64 GPUs: also estimate every candidate
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from titanlite.errors import UserError
from titanlite_planner.plan.layout_space import LayoutChoice, LayoutSpace
from titanlite_planner.plan.report import describe_choice
from titanlite_planner.plan.request import PlanArguments, PlanRequest, read_plan_request
from titanlite_planner.plan.search import LayoutSearch, PlannedStep

CONFIGS = Path(__file__).parents[1] / "train_configs"
SEARCHES = (("llama3/405B", "16384xH100", "2048"), ("llama3/70B", "512xH100", "1024"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", type=int, metavar="GPUS", help="compare with every candidate")
    arguments = parser.parse_args()
    if arguments.all is None:
        for model, gpus, batch in SEARCHES:
            request = _request(model, gpus, batch)
            _report(f"{model} on {gpus}, searched", *_search(request))
        return
    request = _request("llama3/8B", f"{arguments.all}xH100", str(4 * arguments.all))
    _report("searched", *_search(request))
    began = time.monotonic()
    search = _new_search(request)
    _report("every candidate", fastest_of_all(search), time.monotonic() - began, search)


def _request(model: str, gpus: str, batch: str) -> PlanRequest:
    arguments = PlanArguments(gpus=gpus, model=model, seq_len="8192", global_batch=batch)
    return read_plan_request(arguments, CONFIGS)


def _new_search(request: PlanRequest) -> LayoutSearch:
    return LayoutSearch(request.space, request.target)


def _search(request: PlanRequest) -> tuple[PlannedStep, float, LayoutSearch]:
    began = time.monotonic()
    search = _new_search(request)
    return search.run().best[0], time.monotonic() - began, search


def _report(what: str, best: PlannedStep, seconds: float, search: LayoutSearch) -> None:
    counts = search.counts
    print(
        f"{what}: {seconds:.1f} s, {counts.memory_estimates:,} memory and"
        f" {counts.time_estimates:,} time estimates"
    )
    print(f"  {best.time.total:.6g} s a step: {best.choice.frame.degrees}", end=", ")
    print(f"micro-batch {best.choice.frame.micro_batch}; {describe_choice(best.choice)}")


def all_candidates(space: LayoutSpace) -> Iterator[LayoutChoice]:
    """Every legal candidate."""
    for frame in space.frames():
        for schedule, stages in space.schedules(frame):
            for options in space.options(frame, schedule):
                yield LayoutChoice(frame, schedule, stages, options)


def fastest_of_all(search: LayoutSearch) -> PlannedStep:
    """The fastest candidate that fits and that train.py accepts, without skipping any."""
    fitting = []
    for number, choice in enumerate(all_candidates(search.space)):
        fits_the_gpu = search.needed_bytes(choice) <= search.target.usable_bytes
        if fits_the_gpu and search.fits_the_host(choice):
            fitting.append((search.estimate_time(choice).total, number, choice))
    for _, _, choice in sorted(fitting):
        step = search.checked(choice)
        if step is not None:
            return step
    raise UserError("Nothing fits.")


if __name__ == "__main__":
    main()
