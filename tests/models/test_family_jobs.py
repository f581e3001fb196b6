"""Jobs of families: torchtitan's TOMLs of Qwen3, and learned positions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titanlite.errors import ConfigError, UserError, UserErrors, format_error
from titanlite.job import read_job
from titanlite.models import FAMILIES
from titanlite_lab.generate import check_length

CHARACTERS = Path(__file__).parents[2] / "titanlite/train_configs/gpt2_characters.toml"
# The keys and values of torchtitan v0.2.2's language models (torchtitan/models/*/train_configs),
# and of what AWS vendors (awslabs/awsome-distributed-ai, test case torchtitan, slurm/configs): its
# llama3_8b.toml equals torchtitan's, and has no file of its own here.
TORCHTITAN = sorted((Path(__file__).parents[1] / "torchtitan").glob("*.toml"))
OTHER_MODELS = {  # flavors that are not this project's, and what the refusal says
    "deepseek_v3_16b": "moonlight-16B is another model",
    "deepseek_v3_671b": "V3-671B",
    "deepseek_v3_debug_model": "tiny",
    "qwen3_moe_debug": 'Set model.name = "qwen3_moe"',
}


def read_on_8_ranks(path, corpus, *argv: str):
    """The job of a TOML, with a corpus of bytes that exists."""
    source = f'[{{ name = "code", path = "{corpus}/%s" }}]'
    data = ["--data.tokenizer", "bytes", "--data.sources", source % "train"]
    data += ["--data.validation", source % "validation"]
    return read_job(["--job.config_file", str(path), "--job.device", "cpu", *data, *argv], 8)


@pytest.mark.parametrize("path", TORCHTITAN, ids=lambda path: path.stem)
def test_a_toml_of_torchtitan_needs_a_data_override_only(corpus, path):
    if way := OTHER_MODELS.get(path.stem):
        with pytest.raises(ConfigError, match=re.escape(way)):
            read_on_8_ranks(path, corpus)
        return
    job = read_on_8_ranks(path, corpus, "--job.check", "true", "--job.check_ranks", "8")  # of GPUs
    assert job.config.data.tokenizer == "bytes"  # not that of model.hf_assets_path
    converters = job.config.model.converters
    assert bool(job.config.float8.recipe_name) == bool(converters)  # "float8" in 405B
    assert job.config.float8.enable_fsdp_float8_all_gather == bool(converters)
    assert job.config.compile.enable == bool(converters)


def test_a_toml_of_torchtitan_without_data_has_one_error_for_it(tmp_path):
    path = Path(__file__).parents[1] / "torchtitan" / "llama3_8b.toml"
    (tmp_path / "tokenizer.model").write_text("")
    argv = ["--job.config_file", str(path), "--model.hf_assets_path", str(tmp_path)]
    argv += ["--validation.enable", "true", "--model.converters", "float8"]
    with pytest.raises(UserErrors) as raised:
        read_job(argv, 8)
    messages = [str(problem) for problem in raised.value.problems]
    assert any(f"{tmp_path}/tokenizer.model" in message for message in messages)
    assert sum("data.sources" in message for message in messages) == 1
    assert 'training.dataset = "c4" and validation.dataset = "c4_validation"' in messages[0]
    assert "data.sources and data.validation" in messages[0]


def test_sequences_that_are_longer_than_the_learned_positions_are_refused(corpus):
    arguments = ["--model.vocab_size", "258", "--training.seq_len", "65"]
    with pytest.raises(UserError) as raised:
        read_on_8_ranks(CHARACTERS, corpus, *arguments)
    message = format_error(raised.value)
    assert "training.seq_len = 65: the model has learned positions for 64 tokens" in message
    assert "validation.seq_len" not in message


def test_a_text_that_is_longer_than_the_learned_positions_is_refused():
    family = FAMILIES["gpt2"]
    model = family.build(family.flavors["characters"])
    check_length(model, 64)
    with pytest.raises(ConfigError, match="learned positions for 64"):
        check_length(model, 65)
    check_length(FAMILIES["llama3"].build(FAMILIES["llama3"].flavors["quickstart"]), 65)


def test_a_folder_of_assets_beside_data_that_is_no_table_is_a_users_error(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('data = 5\n[model]\nhf_assets_path = "assets"\n')
    with pytest.raises(UserErrors, match="data = 5: must be a table"):
        read_job(["--job.config_file", str(path)], 1)
