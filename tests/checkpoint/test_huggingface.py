"""Hugging Face folders: models of transformers load here, and exported models load there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.data.test_tokenizer import ODD_TEXTS, write_tokenizer_json
from tests.distributed.oracle import ADAMW, SIZES, Layout, full_value, start_run, with_enough_blocks
from tests.distributed.ranks import run_on_ranks
from titanlite.checkpoint import model_and_optimizer_state
from titanlite.checkpoint.convert import to_hugging_face
from titanlite.checkpoint.huggingface import (
    HuggingFaceFolder,
    HuggingFaceReader,
    open_hugging_face,
)
from titanlite.checkpoint.huggingface_export import ModelToExport, write_hugging_face
from titanlite.checkpoint.saved_model import parameter_shapes
from titanlite.data import open_tokenizer
from titanlite.data.tokenizer_json import to_tokenizer_json
from titanlite.errors import CheckpointError
from titanlite.job.config import JobConfig
from titanlite.job.torchtitan_keys import MOVED, complete_table
from titanlite.models import FAMILIES
from titanlite.settings import load_config
from titanlite.storage import StorageFolder
from titanlite_corpus.bpe import train_bpe
from titanlite_lab.checkpoints import from_hugging_face

FAMILY = FAMILIES["llama3"]
UNTIED = replace(SIZES, rope_theta=500_000.0, rope_scaling_factor=8.0)
TIED = replace(SIZES, rope_theta=10_000.0, tied_embeddings=True, head_dim=16)
TOKENS = torch.arange(2 * 96).view(2, 96) * 37 % SIZES.vocab_size


def random_model(sizes, seed: int = 0):
    """A model whose logits depend on all parameters."""
    torch.manual_seed(seed)
    model = FAMILY.build(sizes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, parameter.dim() == 1, 0.2)
    return model


def export(folder, model, **changes) -> StorageFolder:
    """Write a model; `changes` are fields of ModelToExport or options of write_hugging_face."""
    target, state = StorageFolder(folder), model.state_dict()
    fields = {"load": lambda names: {name: state[name] for name in names}}
    fields |= {"seq_len": 48, "tokenizer": None}
    fields |= {
        key: changes.pop(key) for key in ("load", "tokenizer", "bos", "published") if key in changes
    }
    write_hugging_face(target, ModelToExport(FAMILY, model.sizes, **fields), **changes)
    return target


def load_model(folder: StorageFolder):
    """The plain module of a Hugging Face folder."""
    source = open_hugging_face(folder)
    model = FAMILY.build(source.sizes).eval()
    model.load_state_dict({name: source.read(name) for name in source.tensors})
    return model


@torch.no_grad()
def logits(model):
    output = model(TOKENS)
    return output if isinstance(output, torch.Tensor) else output.logits


def edit_json(folder: StorageFolder, name: str, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(folder.read(name)) | changes
    content = {key: value for key, value in content.items() if value is not None}
    with folder.open_for_writing(name) as stream:
        stream.write(json.dumps(content).encode())


# --- compared with transformers -------------------------------------------------------------------


def transformers_model(folder, sizes, dtype, max_shard_size: str):
    """A model configured and saved by transformers."""
    transformers = pytest.importorskip("transformers")
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.dim,
        intermediate_size=sizes.hidden_dim,
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if sizes.head_dim else None,
        rms_norm_eps=1e-5,
        rope_theta=sizes.rope_theta,
        rope_scaling=scaling if sizes.rope_scaling_factor == 8 else None,
        max_position_embeddings=65_536,
        tie_word_embeddings=sizes.tied_embeddings,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, parameter.dim() == 1, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [UNTIED, TIED], ids=["untied", "tied"])
def test_a_model_of_transformers_gives_the_same_logits_here(tmp_path, sizes, dtype, max_shard_size):
    expected = transformers_model(tmp_path, sizes, dtype, max_shard_size)
    model = load_model(StorageFolder(tmp_path))
    assert model.sizes == sizes
    assert ("model.safetensors.index.json" in StorageFolder(tmp_path).sizes()) == (
        max_shard_size == "40KB"
    )
    assert torch.allclose(logits(model), logits(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [UNTIED, TIED], ids=["untied", "tied"])
def test_an_exported_model_gives_the_same_logits_in_transformers(
    tmp_path, sizes, dtype, max_shard_bytes
):
    transformers = pytest.importorskip("transformers")
    model = random_model(sizes).to(dtype).float()  # rounded to dtype
    export(
        tmp_path,
        model,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        tokenizer=open_tokenizer("bytes"),
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == transformers.AutoConfig.from_pretrained(tmp_path).dtype == dtype
    assert loaded.generation_config.eos_token_id == open_tokenizer("bytes").eos_id
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.allclose(logits(loaded.eval()), logits(model), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_bpe(ODD_TEXTS * 9, 400, folder / "t.model")
    plain = open_tokenizer(str(folder / "t.model"))
    (folder / "llama.json").write_bytes(to_tokenizer_json(plain, bos=True))
    return {
        "ranks": str(folder / "t.model"),
        "tokenizer.json": write_tokenizer_json(folder),
        "bytes": "bytes",
        "Llama's tokenizer.json": str(folder / "llama.json"),
    }


@pytest.mark.parametrize("bos", [False, True], ids=["no BOS", "BOS"])
@pytest.mark.parametrize("kind", ["ranks", "tokenizer.json", "bytes", "Llama's tokenizer.json"])
def test_an_exported_tokenizer_gives_the_ids_of_training_in_transformers(
    tmp_path, tokenizers, kind, bos
):
    transformers = pytest.importorskip("transformers")
    tokenizer = open_tokenizer(tokenizers[kind])
    begin = tokenizer.bos_id if bos else tokenizer.eos_id  # the token before a document in training
    assert tokenizer.adds_bos == kind.startswith("Llama")
    export(tmp_path, random_model(SIZES), tokenizer=tokenizer, bos=bos)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (exported.bos_token_id, exported.eos_token_id) == (begin, tokenizer.eos_id)
    assert transformers.AutoConfig.from_pretrained(tmp_path).bos_token_id == begin
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).adds_bos == (bos and tokenizer.has_bos)
    assert len(exported) == tokenizer.vocab_size
    for text in ODD_TEXTS[:-1]:  # the last has texts that transformers parses as special tokens
        ids = tokenizer.encode(text)
        assert exported(text).input_ids == [begin] * bos + ids
        assert exported.decode(ids) == tokenizer.decode(ids)


# --- without transformers -------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 40_000], ids=["one file", "shards"])
def test_exported_tensors_are_read_bit_equal_in_full_and_in_parts(tmp_path, sizes, max_shard_bytes):
    model = random_model(sizes)
    folder = open_hugging_face(export(tmp_path, model, max_shard_bytes=max_shard_bytes))
    assert folder.sizes == sizes
    assert (
        folder.tensors.keys() == model.state_dict().keys() == parameter_shapes(FAMILY, sizes).keys()
    )
    for name, expected in model.state_dict().items():
        assert torch.equal(folder.read(name), expected)
    part = folder.read("layers.1.feed_forward.w2.weight", (5, 30), (7, 41))
    expected = model.state_dict()["layers.1.feed_forward.w2.weight"][5:12, 30:71]
    assert torch.equal(part, expected)
    assert part.untyped_storage().nbytes() == part.nbytes  # not a view of the mapped file


def test_every_flavor_is_restored_from_its_config_json():
    for name, sizes in FAMILY.flavors.items():
        config = json.loads(json.dumps(FAMILY.hugging_face.to_config(sizes, 8192)))
        assert FAMILY.hugging_face.from_config(config) == sizes, name


def test_only_one_shard_is_in_memory_while_writing(tmp_path):
    model, max_shard_bytes, requested = random_model(TIED), 40_000, []
    state = model.state_dict()

    def load(names):
        requested.append(list(names))
        return {name: state[name] for name in names}

    folder = export(tmp_path, model, max_shard_bytes=max_shard_bytes, load=load)
    sizes = [sum(state[name].nbytes for name in names) for names in requested]
    assert len(requested) > 4
    assert all(
        size <= max_shard_bytes or len(names) == 1
        for size, names in zip(sizes, requested, strict=True)
    )
    requested_names = [name for names in requested for name in names]
    assert sorted(requested_names) == sorted({*state} - {"output.weight"})
    files = [file for file in folder.sizes() if file.endswith(".safetensors")]
    assert min(files) == f"model-00001-of-{len(requested):05}.safetensors"
    index = json.loads(folder.read("model.safetensors.index.json"))
    assert index["metadata"]["total_size"] == sum(sizes)
    for file in files:
        with safe_open(folder.path_of(file), "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == {n for n, f in index["weight_map"].items() if f == file}


def load_into_layout(layout, recipe, folders) -> int:
    """Load each folder into a layout, and compare with an unsharded read.

    Returns the number of elements on this rank, which bounds how many DCP may read.
    """
    state, _, _ = start_run(layout, recipe)
    original_read, elements_read = HuggingFaceFolder.read, 0

    def counting_read(*args):
        nonlocal elements_read
        part = original_read(*args)
        elements_read += part.numel()
        return part

    for path in folders:
        folder = open_hugging_face(StorageFolder(path))
        HuggingFaceFolder.read = counting_read
        dcp.load(model_and_optimizer_state(state.model), storage_reader=HuggingFaceReader(folder))
        HuggingFaceFolder.read = original_read
        for name, parameter in state.model.named_parameters():
            assert torch.equal(full_value(parameter), folder.read(name).float()), name
    local = sum(getattr(p, "_local_tensor", p).numel() for p in state.model.parameters())
    # a tied parameter has two names and is read for each
    assert elements_read <= len(folders) * (local + recipe.sizes.tied_embeddings * local)
    return local


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, tied",
    [
        (Layout(shard=3), True),  # 509 rows over 3 ranks
        (Layout(shard=2, tensor=2), True),
        (Layout(pipeline=2, tensor=2, microbatch=3), False),
        (Layout(pipeline=2, shard=2, microbatch=3), True),
    ],
    ids=str,
)
def test_every_layout_loads_the_same_bits_as_one_process(tmp_path, layout, tied):
    recipe = with_enough_blocks(replace(ADAMW, batch=12, seq_len=24), layout)
    sizes = replace(recipe.sizes, tied_embeddings=tied)
    folders = []
    for number, dtype in enumerate([torch.float32, torch.bfloat16]):
        folders.append(str(tmp_path / str(dtype)))
        export(folders[-1], random_model(sizes, number), dtype=dtype, max_shard_bytes=40_000)
    ranks = layout.degrees.batch * layout.tensor * layout.pipeline
    recipe = replace(recipe, sizes=sizes)
    local = run_on_ranks(load_into_layout, ranks, layout, recipe, folders)
    assert max(local) < FAMILY.count_parameters(sizes)


# --- invalid folders -----------------------------------------------------------------------------

TRANSFORMERS_5 = {  # how transformers 5 writes RoPE settings
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rope_theta": None,
    "rope_scaling": None,
}


@pytest.mark.parametrize(
    "changes, sizes",
    [
        ({}, SIZES),
        (TRANSFORMERS_5, SIZES),
        ({"head_dim": None, "num_key_value_heads": 2}, SIZES),
        ({"rope_theta": None, "rms_norm_eps": None}, replace(SIZES, norm_eps=1e-6)),
        ({"rope_scaling": {"type": "default"}, "some_later_key": 3}, SIZES),
    ],
)
def test_missing_keys_of_config_json_have_the_defaults_of_transformers(tmp_path, changes, sizes):
    folder = export(tmp_path, random_model(SIZES))
    edit_json(folder, "config.json", **changes)
    assert open_hugging_face(folder).sizes == sizes


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "changes, reported",
    [
        ({"architectures": ["Phi3ForCausalLM"]}, ["Phi3ForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architectures = null"]),
        (
            {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "hidden_size": "32"},
            [
                "attention_bias",
                "mlp_bias",
                'hidden_act = "gelu" (only "silu"',
                'hidden_size = "32"',
            ],
        ),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"sliding_window": 4096, "auto_map": {"A": "b"}}, ["sliding_window = 4096"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"vocab_size": None, "rms_norm_eps": True}, ["vocab_size = null", "rms_norm_eps = true"]),
        ({"num_key_value_heads": 3}, ["model.n_kv_heads = 3: does not divide model.n_heads = 4"]),
        ({"head_dim": 7}, ["model.head_dim = 7"]),
        (
            {"head_dim": None, "num_attention_heads": 6},
            ["model.dim = 32: is not a multiple of model.n_heads = 6"],
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ['rope_type = "linear" (only "default" or "llama3" is'],
        ),
        ({"rope_scaling": [1]}, ["rope_scaling = [1]"]),
        ({"rope_scaling": LLAMA3}, ["original_max_position_embeddings = null (only 8192"]),
        (
            {
                "rope_scaling": {
                    **LLAMA3,
                    "low_freq_factor": 2.0,
                    "original_max_position_embeddings": 4096,
                    "factor": None,
                }
            },
            ["low_freq_factor = 2.0", "original_max_position_embeddings = 4096", "factor = null"],
        ),
        ({"rope_parameters": {"full": {"rope_theta": 1e4}}}, ["full"]),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
            ["rope_theta = 10000.0 and", "500000.0"],
        ),
    ],
    ids=lambda value: ",".join(value)[:40],
)
def test_an_unsupported_config_json_is_refused_with_all_problems(tmp_path, changes, reported):
    folder = export(tmp_path, random_model(SIZES))
    edit_json(folder, "config.json", **changes)
    with pytest.raises(CheckpointError) as refused:
        open_hugging_face(folder)
    assert str(refused.value).startswith(f"{tmp_path}: ")
    for text in reported:
        assert text in str(refused.value)


def change_tensors(folder: StorageFolder, change, file: str = "model.safetensors") -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder.path_of(file)).items()}
    change(tensors)
    save_file(tensors, folder.path_of(file))


def test_all_problems_of_the_tensors_are_reported_together(tmp_path):
    folder = export(tmp_path, random_model(SIZES))

    def break_them(tensors):
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(88, 31)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 88, dtype=torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # ignored

    change_tensors(folder, break_them)
    with pytest.raises(CheckpointError) as refused:
        open_hugging_face(folder)
    assert str(refused.value) == (
        f"{tmp_path}: the tensors are not those of the model in config.json:"
        " 2 tensors are missing: lm_head.weight, model.norm.weight;"
        " 1 tensors are not part of the model: model.layers.0.self_attn.q_proj.bias;"
        " 1 tensors have another shape: model.layers.1.mlp.up_proj.weight [88, 31], not [88, 32];"
        " 1 tensors have an unsupported dtype: model.layers.1.mlp.down_proj.weight I8."
    )


def test_all_problems_of_the_files_are_reported_together(tmp_path):
    folder = export(tmp_path, random_model(SIZES), max_shard_bytes=30_000)
    files = sorted(name for name in folder.sizes() if name.endswith(".safetensors"))
    folder.delete(files[0])
    with open(folder.path_of(files[1]), "r+b") as file:
        file.truncate(folder.sizes()[files[1]] - 1)
    weights = json.loads(folder.read("model.safetensors.index.json"))["weight_map"]
    moved, removed = [name for name, file in weights.items() if file == files[2]][:2]
    save_file({}, folder.path_of("empty.safetensors"))
    weights |= {moved: "../" + files[3], "promised": files[2], "lost": "empty.safetensors"}
    del weights[removed]
    edit_json(folder, "model.safetensors.index.json", weight_map=weights)
    with pytest.raises(CheckpointError) as refused:
        open_hugging_face(folder)
    for text in (
        f"{files[1]} is damaged or truncated",
        f"2 files in the index are missing: ../{files[3]}, {files[0]}",
        "2 tensors are not in the file that the index gives: lost, promised",
        "2 tensors are not in the index: ",
        removed,
    ):
        assert text in str(refused.value)


def test_a_file_that_cannot_be_opened_is_not_reported_as_damaged(tmp_path):
    source = open_hugging_face(export(tmp_path, random_model(SIZES)))
    source.folder.delete("model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read: No such file"):
        source.read("norm.weight")


@pytest.mark.parametrize("equal", [True, False])
def test_tied_embeddings_with_different_output_weights_are_refused(tmp_path, equal):
    folder = export(tmp_path, random_model(TIED))

    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][3, 4] += 0 if equal else 1e-3

    change_tensors(folder, untie)
    if equal:
        assert load_model(folder).sizes == TIED
    else:
        with pytest.raises(
            CheckpointError, match=r"lm_head.weight differs from model.embed_tokens"
        ):
            open_hugging_face(folder)


def test_a_folder_that_is_not_a_hugging_face_export_is_refused_with_the_reason(tmp_path):
    with pytest.raises(CheckpointError, match="not a complete Hugging Face folder"):
        open_hugging_face(StorageFolder(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="from local disks"):
        open_hugging_face(StorageFolder("memory://somewhere"))
    folder = export(tmp_path, random_model(SIZES))
    folder.delete("model.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle"):
        open_hugging_face(folder)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        open_hugging_face(folder)


def test_an_interrupted_export_does_not_load_and_is_not_overwritten(tmp_path):
    model = random_model(SIZES)
    calls = iter([None, None])

    def load(names):
        next(calls)
        return {name: model.state_dict()[name] for name in names}

    with pytest.raises(StopIteration):
        export(tmp_path, model, max_shard_bytes=20_000, load=load)
    folder, files = StorageFolder(tmp_path), StorageFolder(tmp_path).sizes()
    assert files and "config.json" not in files
    with pytest.raises(CheckpointError, match="not a complete Hugging Face folder"):
        open_hugging_face(folder)
    with pytest.raises(CheckpointError, match="not empty"):
        export(tmp_path, model)
    assert folder.sizes() == files


def test_an_export_can_be_written_to_a_url(tmp_path):
    folder = export("memory://exported", random_model(SIZES), tokenizer=open_tokenizer("bytes"))
    (tmp_path / "here").mkdir()
    for name in folder.sizes():
        (tmp_path / "here" / name).write_bytes(folder.read(name))
    assert torch.equal(
        logits(load_model(StorageFolder(tmp_path / "here"))), logits(random_model(SIZES))
    )


def test_a_model_that_the_architecture_or_dtype_cannot_represent_is_not_exported(tmp_path):
    with pytest.raises(CheckpointError, match="qk_norm"):
        export(tmp_path, random_model(replace(SIZES, qk_norm=True)))
    assert not StorageFolder(tmp_path).sizes()
    model = random_model(SIZES)
    model.norm.weight.data[3] = 1e5
    with pytest.raises(
        CheckpointError, match=r"norm.weight: has the value 1e\+05, which overflows torch.float16"
    ):
        export(tmp_path, model, dtype=torch.float16)
    with pytest.raises(CheckpointError, match="overflows torch.float16"):
        export(tmp_path / "from bf16", model.bfloat16(), dtype=torch.float16)


def convert_and_list_opened(folder: str, out: str) -> set[str]:
    """The files of a folder that Python opens while it is converted."""
    opened = set()

    def record(event, args) -> None:
        if event == "open" and str(args[0]).startswith(f"{folder}/"):
            opened.add(str(args[0]).removeprefix(f"{folder}/"))

    sys.addaudithook(record)
    from_hugging_face(StorageFolder(folder), StorageFolder(out))
    return opened


def test_other_files_of_a_hugging_face_folder_are_never_opened(tmp_path):
    folder = export(tmp_path / "hf", random_model(SIZES))
    read = {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"}
    for name in read - {"config.json"}:
        (tmp_path / "hf" / name).write_text("{}")
    for name in ("pytorch_model.bin", "modeling_llama.py", "vocab.json", "special_tokens_map.json"):
        (tmp_path / "hf" / name).write_text("{}")
    out = str(tmp_path / "converted")
    (opened,) = run_on_ranks(convert_and_list_opened, 1, folder.path, out)
    assert opened - {"model.safetensors"} == read


def test_model_from_takes_the_sizes_of_a_folder_and_explicit_keys_win(tmp_path):
    path = tmp_path / "hf"
    folder = export(path, random_model(SIZES))
    argv = ["--model.from", str(path), "--model.norm_eps", "0.5"]
    config, problems = load_config(JobConfig, argv, MOVED, complete_table)
    assert not problems and FAMILIES["llama3"].sizes_of(config.model) == replace(
        SIZES, norm_eps=0.5
    )
    for more, message in (
        (["--model.name", "gpt2"], "is a LlamaForCausalLM, which is not of the family gpt2"),
        (["--model.from", str(tmp_path / "missing")], "it has no config.json"),
    ):
        problems = load_config(JobConfig, [*argv, *more], MOVED, complete_table)[1]
        assert message in str(problems[0])
    folder = export(tmp_path / "step", random_model(SIZES))
    edit_json(folder, "config.json", max_position_embeddings=4096)
    from_hugging_face(folder, StorageFolder(tmp_path / "long"))
    to_hugging_face(StorageFolder(tmp_path / "long"), StorageFolder(tmp_path / "back"))
    config = json.loads((tmp_path / "back" / "config.json").read_bytes())
    assert config["max_position_embeddings"] == 4096


def test_a_pointer_an_adapter_and_a_link_are_named(tmp_path):
    folder = export(tmp_path / "lfs", random_model(SIZES))
    weights = tmp_path / "lfs" / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_hugging_face(folder)
    weights.unlink()
    weights.symlink_to("../blob")
    with pytest.raises(CheckpointError, match="model.safetensors is a link"):
        open_hugging_face(folder)
    (tmp_path / "lfs" / "config.json").unlink()
    (tmp_path / "lfs" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA adapter"):
        open_hugging_face(folder)
