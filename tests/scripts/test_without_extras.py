"""The core alone, without the packages of the extras, prepares text, trains, resumes and converts.

A process of these tests cannot import what `pip install .` does not install.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from conftest import HANG_SECONDS, ROOT

MISSING = ["matplotlib", "pyarrow", "dask", "distributed", "transformers", "datasets", "lm_eval"]
BLOCK = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {[*MISSING, "titanlite_planner"]}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture
def run(python, tmp_path):
    """Runs a command in which the packages of the extras are missing; returns its output."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run_command(*command: object, code: int = 0) -> str:
        done = subprocess.run(
            [python, *map(str, command)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run_command


def test_text_becomes_a_trained_model_that_is_resumed_used_and_converted(run, tmp_path):
    text, out = tmp_path / "text", tmp_path / "out"
    text.mkdir()
    for number, path in enumerate(sorted((ROOT / "titanlite" / "optim").glob("*.py"))):
        (text / f"{number}.txt").write_text(path.read_text("utf-8"))
    tokenizer = tmp_path / "tokenizer.model"
    run("scripts/train_tokenizer.py", text, "--vocab-size", 512, "--out", tokenizer)
    prepare = ("scripts/prepare_data.py", text, "--tokenizer", tokenizer, "--out", tmp_path / "c")
    run(*prepare, "--validation-share", 0.2)
    toml = tmp_path / "run.toml"
    toml.write_text(
        f"""
        [job]
        dump_folder = "{out}"
        [model]
        dim = 32
        n_layers = 2
        n_heads = 4
        n_kv_heads = 4
        hidden_dim = 64
        [data]
        tokenizer = "{tokenizer}"
        sources = [{{ name = "code", path = "{tmp_path}/c/train" }}]
        [training]
        seq_len = 32
        global_batch_size = 2
        local_batch_size = 2
        [checkpoint]
        enable = true
        interval = 1
        """
    )
    train = ("train.py", "--job.config_file", toml, "--job.device", "cpu")
    run(*train, "--training.steps", 1)
    assert "step 2" in run(*train, "--training.steps", 2)
    generate = ("scripts/generate.py", "--checkpoint", out, "--max-new-tokens", 4)
    run(*generate, "--prompt", "def")
    run("scripts/checkpoint.py", "to-hf", out, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()
    # what needs an extra says which
    recipe = run("scripts/prepare_data.py", "--recipe", "recipes/python_library.toml", code=2)
    assert "pip install 'titanlite[corpus]'" in recipe
