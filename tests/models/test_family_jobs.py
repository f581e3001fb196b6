"""Jobs of families: torchtitan's TOMLs of Qwen3, and learned positions."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite.errors import ConfigError, UserError, format_error
from titanlite.generate import check_length
from titanlite.job import read_job
from titanlite.models import FAMILIES

CONFIGS = Path(__file__).parents[2] / "train_configs"
# torchtitan/models/qwen3/train_configs/qwen3_0.6b.toml of v0.2.2, with [data] instead of
# model.hf_assets_path and training.dataset
TORCHTITAN = """
[job]
dump_folder = "./outputs"
description = "Qwen 3 0.6B training"
[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
profile_freq = 100
[metrics]
log_freq = 1
enable_tensorboard = false
save_tb_folder = "tb"
[model]
name = "qwen3"
flavor = "0.6B"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 2
[training]
local_batch_size = 4
seq_len = 4096
max_norm = 1.0
steps = 10
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = false
export_dtype = "float16"
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
"""


def read_on_8_ranks(path, corpus, *argv: str):
    """The job of a TOML, with a corpus of bytes that exists."""
    source = f'[{{ name = "code", path = "{corpus}/%s" }}]'
    data = ["--data.tokenizer", "bytes", "--data.sources", source % "train"]
    data += ["--data.validation", source % "validation"]
    return read_job(["--job.config_file", str(path), "--job.device", "cpu", *data, *argv], 8)


@pytest.mark.parametrize("flavor", ["0.6B", "1.7B", "32B"])
def test_a_toml_of_torchtitan_is_accepted_once_its_data_is_moved(tmp_path, corpus, flavor):
    path = tmp_path / "qwen3.toml"
    path.write_text(TORCHTITAN.replace("0.6B", flavor))
    job = read_on_8_ranks(path, corpus)
    assert job.sizes == FAMILIES["qwen3"].flavors[flavor]


def test_sequences_that_are_longer_than_the_learned_positions_are_refused(corpus):
    arguments = ["--model.vocab_size", "258", "--training.seq_len", "65"]
    with pytest.raises(UserError) as raised:
        read_on_8_ranks(CONFIGS / "gpt2_characters.toml", corpus, *arguments)
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
