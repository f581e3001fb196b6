#!/usr/bin/env bash
# Run the tests: scripts/test.sh [--quick] [arguments of pytest]
#   --quick  the fast unit tests and a few distributed tests: less than 3 minutes on 2 cores
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh dev
# The tests start many processes; without its bytecode, each would compile titanlite again.
unset PYTHONDONTWRITEBYTECODE

ORACLE=tests/distributed/test_oracle.py::test_every_layout_matches_one_process
DRY=extras/titanlite_planner/tests/test_dry_run.py  # the cases of one estimate stay
SEARCH=extras/titanlite_planner/tests/test_search.py  # one memory limit of three stays
CORPUS=extras/titanlite_corpus/tests
QUICK=(
  tests/test_architecture.py tests/test_settings.py tests/test_job.py tests/docs/test_pages.py
  tests/models tests/kernels tests/optim tests/metrics
  extras/titanlite_planner/tests --ignore extras/titanlite_planner/tests/test_expert_dry_run.py
  --deselect "$DRY::test_estimates_of_random_layouts_equal_dry_runs"
  --deselect "$DRY::test_micro_batches_need_not_be_a_multiple_of_the_pipeline_ranks"
  --deselect "$DRY::test_the_estimate_has_the_state_of_the_matrices_that_a_rank_owns"
  --deselect "$DRY::test_a_dry_run_equals_a_real_run"
  --deselect "$SEARCH::test_the_best_is_the_best_of_all_candidates[0.02]"
  --deselect "$SEARCH::test_the_best_is_the_best_of_all_candidates[1.0]"
  --deselect "$DRY::test_the_estimate_equals_a_dry_run[PP 2, HSDP without shards]"
  --deselect "$DRY::test_the_estimate_equals_a_dry_run[FSDP 8, TP 2, tied]"
  --deselect "$DRY::test_the_estimate_equals_a_dry_run[PP 2, short sequences]"
  --deselect "$DRY::test_the_estimate_equals_a_dry_run[PP 2, ZBV, split backwards]"
  --ignore extras/titanlite_planner/tests/test_draw_layout.py
  extras/titanlite_lab/tests --ignore extras/titanlite_lab/tests/test_compare.py
  --ignore extras/titanlite_lab/tests/test_generate.py
  --ignore extras/titanlite_lab/tests/test_drill.py
  tests/data $CORPUS --ignore $CORPUS/test_prepare.py --ignore $CORPUS/test_dask_engine.py
  --deselect $CORPUS/test_recipe.py::test_kills_and_workers_change_no_byte
  --deselect
  $CORPUS/test_recipe.py::test_a_synthetic_corpus_is_the_same_with_1_2_and_4_workers_and_after_a_kill
  --deselect $CORPUS/test_recipe.py::test_the_script_makes_goes_on_and_cleans
  --deselect
  "$CORPUS/test_web_and_datasets.py::test_a_hostile_page_is_the_problem_of_its_record[hidden depth]"
  --deselect tests/data/test_formats.py::test_a_run_on_another_format_resumes_exactly
  --deselect tests/data/test_remote_shards.py::test_two_ranks_train_from_s3
  --deselect tests/data/test_stream.py::test_a_disk_that_never_responds_ends_the_run_with_an_error
  tests/parallelize --ignore tests/parallelize/test_compile.py
  tests/runtime/test_start_log.py
  tests/checkpoint/test_retention.py tests/checkpoint/test_untrusted.py
  tests/checkpoint/test_huggingface.py
  tests/distributed/test_mesh.py tests/distributed/test_collectives.py
  tests/distributed/test_initial_weights.py tests/distributed/test_reductions.py
  "$ORACLE[SGD: shard=2,accumulate=3]" "$ORACLE[SGD: tensor=2,accumulate=3]"
  "$ORACLE[SGD: shard=2,tensor=2,accumulate=3]" "$ORACLE[SGD: context=2,accumulate=3]"
  "$ORACLE[SGD: pipeline=2,microbatch=3,accumulate=3]"
)
for argument in "$@"; do
  shift
  if [ "$argument" = --quick ]; then set -- "$@" "${QUICK[@]}"; else set -- "$@" "$argument"; fi
done
# Three workers, because many tests wait for other processes. The tests of a file share
# fixtures, so one worker runs them all. Files start in the order of collection: the last ones are
# small. One thread per process: the tests start several ranks, and more threads than cores are slower.
OMP_NUM_THREADS=1 exec python -m pytest -n 3 --dist loadscope --no-loadscope-reorder "$@"
