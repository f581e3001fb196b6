"""From a ladder's TOMLs to the law of its runs, through the script."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from titanlite.job import read_job
from titanlite.models import LLAMA3
from titanlite.settings import to_toml
from titanlite_lab.commands import scaling_laws
from titanlite_lab.scaling.ladder import LadderGrid, LadderSize, plan_ladder, write_ladder
from titanlite_lab.scaling.laws import PARAMETER_COUNTS, ScalingLaw
from titanlite_lab.scaling.runs import count_parameters_by_kind

CHINCHILLA = ROOT / "extras/titanlite_lab/tests/data/chinchilla.csv"
LAW = ScalingLaw(1.2, 60.0, 300.0, 0.3, 0.4)
BASE = """
[data]
sources = [{ name = "text", path = "nowhere" }]
[model]
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
hidden_dim = 192
vocab_size = 258
[training]
seq_len = 128
local_batch_size = 4
global_batch_size = 4
[validation]
enable = true
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def ladder(base, *arguments):
    sizes = ["--sizes", "32,64,96x5,128", *arguments]
    return ["ladder", str(base), "--out", str(base.parent / "runs"), *sizes]


def read_rung(path):
    return read_job([f"--job.config_file={path}"], 1, here=False)


def pretend_run(path, law, count="matmul", final=True):
    """What train.py writes for a rung whose losses follow a law."""
    job = read_rung(path)
    parameters = count_parameters_by_kind(job.spec, job.sizes)[count]
    steps, step_tokens = job.config.training.steps, 4 * 128
    lines = []
    for step in np.unique(np.geomspace(1, steps, 12).astype(int)).tolist():
        tokens = step * step_tokens
        loss = law.loss(parameters, tokens)
        fields = {"tokens": tokens, "loss": loss + 0.01, "step_seconds": 1, "data_seconds": 0}
        lines.append({"step": step, "time": step, **fields})
    if final:
        event = {"event": "validation", "name": "text", "loss": loss}
        lines.append({**event, "step": steps, "time": steps})
    job.folder.mkdir(parents=True)
    (job.folder / "config.toml").write_text(to_toml(job.config))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (job.folder / "metrics.jsonl").write_text(text)


def test_every_rung_passes_the_checks_of_train_py(base, capsys):
    assert scaling_laws.main(ladder(base, "--tokens-per-parameter", "5,20")) == 0
    paths = sorted((base.parent / "runs").glob("*.toml"))
    assert len(paths) == 8
    assert "8 runs" in capsys.readouterr().out
    jobs = [read_rung(path) for path in paths]
    shapes = {(job.sizes.dim, job.sizes.n_layers, job.sizes.n_heads) for job in jobs}
    assert shapes == {(32, 1, 2), (64, 2, 4), (96, 5, 6), (128, 4, 8)}
    for job in jobs:
        assert job.sizes.n_heads == 2 * job.sizes.n_kv_heads
        assert job.sizes.head_width == 16 and job.sizes.hidden_dim == 3 * job.sizes.dim
        assert job.config.lr_scheduler.warmup_steps <= max(1, 0.1 * job.config.training.steps)
        tokens = job.config.training.steps * 4 * 128
        ratio = tokens / LLAMA3.count_parameters(job.sizes)
        assert min(abs(ratio / 5 - 1), abs(ratio / 20 - 1)) < 0.01


def test_experts_and_latent_attention_are_as_wide_for_their_model_in_every_rung(tmp_path):
    argv = ["--model.name=deepseek_v3", "--model.flavor=tiny"]
    job = read_job([*argv, "--training.global_batch_size=8"], 1, here=False)
    sizes = [LadderSize(job.sizes.dim * factor) for factor in (1, 2)]
    runs = plan_ladder(job, LadderGrid(sizes, tokens=[1e6]))
    paths = write_ladder(job, runs, tmp_path / "base.toml", tmp_path / "runs")
    (tmp_path / "base.toml").write_text(to_toml(job.config))
    first, second = (read_rung(path).sizes for path in paths)
    for name in ("expert_hidden_dim", "q_lora_rank", "kv_lora_rank", "n_heads"):
        assert getattr(second, name) == 2 * getattr(first, name), name


def test_equal_flops_are_6_n_d_of_the_chosen_count(base):
    assert scaling_laws.main(ladder(base, "--flops", "1e11,1e12", "--count", "blocks")) == 0
    for path in (base.parent / "runs").glob("*.toml"):
        job = read_rung(path)
        parameters = count_parameters_by_kind(job.spec, job.sizes)["blocks"]
        flops = 6 * parameters * job.config.training.steps * 4 * 128
        assert min(abs(flops / 1e11 - 1), abs(flops / 1e12 - 1)) < 0.03


def test_each_count_leaves_out_what_it_names():
    for name in ("debugmodel", "1B"):  # the second has tied embeddings
        sizes = LLAMA3.flavors[name]
        embedding = sizes.vocab_size * sizes.dim
        counts = count_parameters_by_kind(LLAMA3, sizes)
        assert counts["blocks"] == counts["matmul"] - embedding - sizes.dim
        assert counts["all"] == counts["matmul"] + (0 if sizes.tied_embeddings else embedding)


@pytest.mark.slow
def test_the_law_of_a_ladder_is_found_in_the_folder_of_its_runs(base, capsys):
    assert scaling_laws.main(ladder(base, "--tokens", "1e5,1e6,1e7", "--count", "matmul")) == 0
    for path in (base.parent / "runs").glob("*.toml"):
        pretend_run(path, LAW)
    out, picture = base.parent / "law.json", base.parent / "fit.png"
    fit = ["fit", str(base.parent / "runs"), "--count", "matmul", "--bootstraps", "20"]
    capsys.readouterr()
    assert scaling_laws.main([*fit, "--out", str(out), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "validation set text" in printed and PARAMETER_COUNTS["matmul"] in printed
    found = json.loads(out.read_text())["law"]
    for name in ("E", "A", "B", "alpha", "beta"):
        assert found[name] == pytest.approx(getattr(LAW, name), rel=1e-6), name
    assert found["count"] == "matmul"
    assert picture.stat().st_size > 10_000
    assert scaling_laws.main(["optimum", "--law", str(out), "--flops", "1e14"]) == 0
    printed = capsys.readouterr().out
    assert "extrapolated" in printed and PARAMETER_COUNTS["matmul"] in printed
    assert f"{LAW.optimum(1e14)[0]:.4g}" in printed
    content = json.loads(out.read_text())
    for name, value in (("alpha", -0.1), ("B", 0), ("count", {}), ("A", 1e300)):
        out.write_text(json.dumps({**content, "law": {**content["law"], name: value}}))
        assert scaling_laws.main(["optimum", "--law", str(out), "--flops", "1e14"]) == 2
    table = (Path(__file__).parent / "data" / "gadre_c4.csv").read_text().splitlines()[:12]
    for line, column in ((1, 2), (7, 0)):  # a loss and a size that no float can be fitted to
        cells = table[line].split(",")
        table[line] = ",".join([*cells[:column], "1e308" if column else "4", *cells[column + 1 :]])
    out.with_suffix(".csv").write_text("\n".join(table))
    assert scaling_laws.main(["fit", str(out.with_suffix(".csv")), "--bootstraps", "2"]) == 2


def test_runs_that_do_not_compare_are_refused(base, capsys):
    assert scaling_laws.main(ladder(base, "--tokens", "1e5,1e6,1e7")) == 0
    paths = sorted((base.parent / "runs").glob("*.toml"))
    for path in paths[1:]:
        pretend_run(path, LAW)
    pretend_run(paths[0], LAW, final=False)
    lines = (base.parent / "runs" / paths[0].stem / "metrics.jsonl").read_text().splitlines()
    (base.parent / "runs" / paths[0].stem / "metrics.jsonl").write_text(lines[0] + "\n")
    capsys.readouterr()
    assert scaling_laws.main(["fit", str(base.parent / "runs")]) == 2
    message = capsys.readouterr().err
    assert "did not reach training.steps" in message and paths[0].stem in message
    assert "no set" in message


def test_a_ladder_that_cannot_run_is_refused_with_all_reasons(base, capsys):
    base.write_text(BASE.replace("global_batch_size = 4", "") + "[lr_scheduler]\ntotal_steps = 9\n")
    arguments = ["ladder", str(base), "--out", str(base.parent / "runs"), "--sizes", "40"]
    assert scaling_laws.main([*arguments, "--tokens", "600"]) == 2
    message = capsys.readouterr().err
    for part in (
        "global_batch_size = -1",
        "total_steps",
        "multiple of 16: the model has 4 heads",
        "at least 20",
    ):
        assert part in message, part
    assert not (base.parent / "runs").exists()


def test_a_table_with_other_columns_or_text_is_refused(tmp_path, capsys):
    assert scaling_laws.main(["fit", str(CHINCHILLA)]) == 2
    assert "'tokens'" in (message := capsys.readouterr().err) and "'flops'" in message
    table = tmp_path / "table.csv"
    table.write_text("parameters,tokens,loss\n1e6,1e9,3\n1e6,many,-2\n2e6,0,3\n")
    assert scaling_laws.main(["fit", str(table)]) == 2
    message = capsys.readouterr().err
    assert "line 3: 'many'" in message and "line 4: '0'" in message
    assert scaling_laws.main(["fit", str(table), "--where", "loss=7"]) == 2
    assert "no line has loss = 7" in capsys.readouterr().err


def test_a_budget_in_money_is_that_in_gpu_hours_and_flops(capsys):
    gpu = ["--peak-tflops", "989", "--mfu", "0.4"]
    printed = []
    for budget in (
        ["--money", "2000", "--price", "2", *gpu],
        ["--gpu-hours", "1000", *gpu],
        ["--flops", f"{1000 * 3600 * 989e12 * 0.4}"],
    ):
        assert scaling_laws.main(["optimum", *budget]) == 0
        printed.append(capsys.readouterr().out)
    lines = [[x for x in text.splitlines() if "GPU-hours" not in x] for text in printed]
    assert lines[0] == lines[1] == lines[2]
    assert "2,000 at 2 each" in printed[0]
    assert scaling_laws.main(["optimum", "--money", "2000"]) == 2
    assert "needs --peak-tflops, --mfu, --price" in capsys.readouterr().err


def test_bias_shows_what_parabolas_find(capsys):
    assert scaling_laws.main(["bias"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    ratios = [float(row.split()[-2]) for row in rows]
    assert ratios == sorted(ratios) and ratios[0] == 1.001 and ratios[-1] == 1.054
