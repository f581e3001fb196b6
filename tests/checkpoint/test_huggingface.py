"""A model is the same model in a Hugging Face folder, whichever side wrote it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.data.test_tokenizer import ODD_TEXTS, hugging_face
from tests.distributed.oracle import ADAMW, SHAPE, Layout, deepened, start, whole
from tests.distributed.ranks import run_on_ranks
from titanlite.checkpoint import model_and_optimizer_state
from titanlite.checkpoint.huggingface import HuggingFaceFolder, open_hugging_face
from titanlite.checkpoint.huggingface_export import ModelToExport, write_hugging_face
from titanlite.checkpoint.model_size import parameter_shapes
from titanlite.data import open_tokenizer
from titanlite.data.bpe import train_bpe
from titanlite.data.tokenizer_json import to_tokenizer_json
from titanlite.errors import CheckpointError
from titanlite.models import FAMILIES
from titanlite.storage import StorageFolder

FAMILY = FAMILIES["llama3"]
UNTIED = replace(SHAPE, rope_theta=500_000.0, rope_scaling_factor=8.0)
TIED = replace(SHAPE, rope_theta=10_000.0, tied_embeddings=True, head_dim=16)
TOKENS = torch.arange(2 * 96).view(2, 96) * 37 % SHAPE.vocab_size


def built(shape, seed: int = 0):
    """A model whose logits depend on everything in it."""
    torch.manual_seed(seed)
    model = FAMILY.build(shape).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, parameter.dim() == 1, 0.2)
    return model


def write(folder, model, **changes) -> StorageFolder:
    place, state = StorageFolder(folder), model.state_dict()
    fields = {"load": lambda names: {name: state[name] for name in names}}
    fields |= {"seq_len": 48, "tokenizer": None}
    fields |= {key: changes.pop(key) for key in ("load", "tokenizer", "bos") if key in changes}
    write_hugging_face(place, ModelToExport(FAMILY, model.sizes, **fields), **changes)
    return place


def read(place: StorageFolder):
    """The plain module of a folder."""
    folder = open_hugging_face(place)
    model = FAMILY.build(folder.sizes).eval()
    model.load_state_dict({name: folder.read(name) for name in folder.tensors})
    return model


@torch.no_grad()
def logits(model):
    found = model(TOKENS)
    return found if isinstance(found, torch.Tensor) else found.logits


def edit(place: StorageFolder, name: str, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(place.read(name)) | changes
    content = {key: value for key, value in content.items() if value is not None}
    with place.open_for_writing(name) as stream:
        stream.write(json.dumps(content).encode())


# --- transformers is the judge -------------------------------------------------------------------


def theirs(folder, shape, dtype, most: str):
    """A model of transformers, described in its own words and saved by it."""
    transformers = pytest.importorskip("transformers")
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if shape.head_dim else None,
        rms_norm_eps=1e-5,
        rope_theta=shape.rope_theta,
        rope_scaling=scaling if shape.rope_scaling_factor == 8 else None,
        max_position_embeddings=65_536,
        tie_word_embeddings=shape.tied_embeddings,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, parameter.dim() == 1, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=most)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("most", ["5GB", "40KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [UNTIED, TIED], ids=["untied", "tied"])
def test_a_model_of_theirs_computes_the_same_here(tmp_path, shape, dtype, most):
    right = theirs(tmp_path, shape, dtype, most)
    model = read(StorageFolder(tmp_path))
    assert model.sizes == shape
    assert ("model.safetensors.index.json" in StorageFolder(tmp_path).sizes()) == (most == "40KB")
    assert torch.allclose(logits(model), logits(right), rtol=0, atol=1e-5)


@pytest.mark.parametrize("most", [5_000_000_000, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [UNTIED, TIED], ids=["untied", "tied"])
def test_a_model_of_ours_computes_the_same_there(tmp_path, shape, dtype, most):
    transformers = pytest.importorskip("transformers")
    model = built(shape).to(dtype).float()  # what dtype can say
    write(tmp_path, model, dtype=dtype, max_shard_bytes=most, tokenizer=open_tokenizer("bytes"))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert found.dtype == transformers.AutoConfig.from_pretrained(tmp_path).dtype == dtype
    assert found.generation_config.eos_token_id == open_tokenizer("bytes").eos_id
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.allclose(logits(found.eval()), logits(model), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_bpe(ODD_TEXTS * 9, 400, folder / "t.model")
    plain = open_tokenizer(str(folder / "t.model"))
    (folder / "llama.json").write_bytes(to_tokenizer_json(plain, bos=True))
    return {
        "ranks": str(folder / "t.model"),
        "tokenizer.json": hugging_face(folder),
        "bytes": "bytes",
        "Llama's tokenizer.json": str(folder / "llama.json"),
    }


@pytest.mark.parametrize("bos", [False, True], ids=["no BOS", "BOS"])
@pytest.mark.parametrize("kind", ["ranks", "tokenizer.json", "bytes", "Llama's tokenizer.json"])
def test_their_tokenizer_gives_the_ids_it_was_trained_on(tmp_path, tokenizers, kind, bos):
    transformers = pytest.importorskip("transformers")
    ours = open_tokenizer(tokenizers[kind])
    begin = ours.bos_id if bos else ours.eos_id  # what stood before a document in training
    assert ours.adds_bos == kind.startswith("Llama")
    write(tmp_path, built(SHAPE), tokenizer=ours, bos=bos)
    there = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (there.bos_token_id, there.eos_token_id) == (begin, ours.eos_id)
    assert transformers.AutoConfig.from_pretrained(tmp_path).bos_token_id == begin
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).adds_bos == (bos and ours.has_bos)
    assert len(there) == ours.vocab_size
    for text in ODD_TEXTS[:-1]:  # in the last, some look special: text here, tokens over there
        ids = ours.encode(text)
        assert there(text).input_ids == [begin] * bos + ids
        assert there.decode(ids) == ours.decode(ids)


# --- without it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("most", [10**9, 40_000], ids=["one file", "shards"])
def test_what_was_written_is_read_bit_for_bit_whole_and_in_parts(tmp_path, shape, most):
    model = built(shape)
    folder = open_hugging_face(write(tmp_path, model, max_shard_bytes=most))
    assert folder.sizes == shape
    assert (
        folder.tensors.keys() == model.state_dict().keys() == parameter_shapes(FAMILY, shape).keys()
    )
    for name, right in model.state_dict().items():
        assert torch.equal(folder.read(name), right)
    part = folder.read("layers.1.feed_forward.w2.weight", (5, 30), (7, 41))
    right = model.state_dict()["layers.1.feed_forward.w2.weight"][5:12, 30:71]
    assert torch.equal(part, right)
    assert part.untyped_storage().nbytes() == part.nbytes  # the rest of the file is let go


def test_every_flavor_is_itself_again_from_its_config():
    for name, shape in FAMILY.flavors.items():
        config = json.loads(json.dumps(FAMILY.hugging_face.to_config(shape, 8192)))
        assert FAMILY.hugging_face.from_config(config) == shape, name


def test_only_one_shard_is_in_memory_while_writing(tmp_path):
    model, most, asked = built(TIED), 40_000, []
    state = model.state_dict()

    def load(names):
        asked.append(list(names))
        return {name: state[name] for name in names}

    place = write(tmp_path, model, max_shard_bytes=most, load=load)
    sizes = [sum(state[name].nbytes for name in names) for names in asked]
    assert len(asked) > 4 and all(
        s <= most or len(n) == 1 for s, n in zip(sizes, asked, strict=True)
    )
    named = [name for names in asked for name in names]
    assert sorted(named) == sorted({*state} - {"output.weight"})
    files = [file for file in place.sizes() if file.endswith(".safetensors")]
    assert min(files) == f"model-00001-of-{len(asked):05}.safetensors"
    index = json.loads(place.read("model.safetensors.index.json"))
    assert index["metadata"]["total_size"] == sum(sizes)
    for file in files:
        with safe_open(place.path_of(file), "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == {n for n, f in index["weight_map"].items() if f == file}


def read_under(layout, recipe, folders) -> int:
    """Load each folder into a layout, compare what is there with a plain read; bytes read by DCP."""
    state, _, _ = start(layout, recipe)
    plain, read = HuggingFaceFolder.read, 0

    def counted(*args):
        nonlocal read
        part = plain(*args)
        read += part.numel()
        return part

    for path in folders:
        folder = open_hugging_face(StorageFolder(path))
        HuggingFaceFolder.read = counted
        dcp.load(model_and_optimizer_state(state.model), storage_reader=folder.storage_reader())
        HuggingFaceFolder.read = plain
        for name, parameter in state.model.named_parameters():
            assert torch.equal(whole(parameter), folder.read(name).float()), name
    held = sum(getattr(p, "_local_tensor", p).numel() for p in state.model.parameters())
    # a tied parameter has two names and is read for each
    assert read <= len(folders) * (held + recipe.shape.tied_embeddings * held)
    return held


@pytest.mark.parametrize(
    "layout, tied",
    [
        (Layout(shard=3), True),  # 509 rows over 3 ranks
        (Layout(shard=2, tensor=2), True),
        (Layout(pipeline=2, tensor=2, microbatch=3), False),
    ],
    ids=str,
)
def test_every_layout_reads_the_bits_of_a_plain_read(tmp_path, layout, tied):
    recipe = deepened(replace(ADAMW, batch=12, seq_len=24), layout)
    shape = replace(recipe.shape, tied_embeddings=tied)
    folders = []
    for number, dtype in enumerate([torch.float32, torch.bfloat16]):
        folders.append(str(tmp_path / str(dtype)))
        write(folders[-1], built(shape, number), dtype=dtype, max_shard_bytes=40_000)
    ranks = layout.degrees.data * layout.tensor * layout.pipeline
    held = run_on_ranks(read_under, ranks, layout, replace(recipe, shape=shape), folders)
    assert max(held) < FAMILY.count_parameters(shape)


# --- what is refused -----------------------------------------------------------------------------

FIVE = {  # what transformers 5 writes
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rope_theta": None,
    "rope_scaling": None,
}


@pytest.mark.parametrize(
    "changes, shape",
    [
        ({}, SHAPE),
        (FIVE, SHAPE),
        ({"head_dim": None, "num_key_value_heads": 2}, SHAPE),
        ({"rope_theta": None, "rms_norm_eps": None}, replace(SHAPE, norm_eps=1e-6)),
        ({"rope_scaling": {"type": "default"}, "some_later_key": 3}, SHAPE),
    ],
)
def test_what_a_config_leaves_out_is_as_transformers_has_it(tmp_path, changes, shape):
    place = write(tmp_path, built(SHAPE))
    edit(place, "config.json", **changes)
    assert open_hugging_face(place).sizes == shape


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"architectures": ["MistralForCausalLM"]}, ["MistralForCausalLM", "LlamaForCausalLM"]),
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
        ({"sliding_window": 4096, "auto_map": {"A": "b"}}, ["sliding_window = 4096", "auto_map"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"vocab_size": None, "rms_norm_eps": True}, ["vocab_size = null", "rms_norm_eps = true"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads = 4, num_key_value_heads = 3"]),
        ({"head_dim": 7}, ["head_dim = 7"]),
        (
            {"head_dim": None, "num_attention_heads": 6},
            ["hidden_size = 32, num_attention_heads = 6"],
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ['rope_type = "linear"']),
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
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, ["rope_theta"]),
    ],
    ids=lambda value: ",".join(value)[:40],
)
def test_a_config_that_is_not_understood_is_refused_with_all_that_is_wrong(tmp_path, changes, said):
    place = write(tmp_path, built(SHAPE))
    edit(place, "config.json", **changes)
    with pytest.raises(CheckpointError) as refused:
        open_hugging_face(place)
    assert str(refused.value).startswith(f"{tmp_path}: ")
    for words in said:
        assert words in str(refused.value)


def change_tensors(place: StorageFolder, change, file: str = "model.safetensors") -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(place.path_of(file)).items()}
    change(tensors)
    save_file(tensors, place.path_of(file))


def test_all_that_is_wrong_with_the_tensors_is_said_at_once(tmp_path):
    place = write(tmp_path, built(SHAPE))

    def break_them(tensors):
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(88, 31)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 88, dtype=torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # no harm

    change_tensors(place, break_them)
    with pytest.raises(CheckpointError) as refused:
        open_hugging_face(place)
    assert str(refused.value) == (
        f"{tmp_path}: the tensors are not those of the model in config.json:"
        " 2 tensors are missing: lm_head.weight, model.norm.weight;"
        " 1 tensors are not part of the model: model.layers.0.self_attn.q_proj.bias;"
        " 1 tensors have another shape: model.layers.1.mlp.up_proj.weight [88, 31], not [88, 32];"
        " 1 tensors have an unsupported dtype: model.layers.1.mlp.down_proj.weight I8."
    )


def test_all_that_is_wrong_with_the_files_is_said_at_once(tmp_path):
    place = write(tmp_path, built(SHAPE), max_shard_bytes=30_000)
    files = sorted(name for name in place.sizes() if name.endswith(".safetensors"))
    place.delete(files[0])
    with open(place.path_of(files[1]), "r+b") as cut:
        cut.truncate(place.sizes()[files[1]] - 1)
    weights = json.loads(place.read("model.safetensors.index.json"))["weight_map"]
    moved, gone = [name for name, file in weights.items() if file == files[2]][:2]
    weights |= {moved: "../" + files[3], "promised": files[2]}
    del weights[gone]
    edit(place, "model.safetensors.index.json", weight_map=weights)
    with pytest.raises(CheckpointError) as refused:
        open_hugging_face(place)
    for words in (
        f"{files[1]} is damaged or truncated",
        f"2 files in the index are missing: ../{files[3]}, {files[0]}",
        "1 tensors are not in the file that the index gives: promised",
        "2 tensors are not in the index: ",
        gone,
    ):
        assert words in str(refused.value)


@pytest.mark.parametrize("equal", [True, False])
def test_an_output_that_is_said_to_be_tied_must_be(tmp_path, equal):
    place = write(tmp_path, built(TIED))

    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][3, 4] += 0 if equal else 1e-3

    change_tensors(place, untie)
    if equal:
        assert read(place).sizes == TIED
    else:
        with pytest.raises(
            CheckpointError, match=r"lm_head.weight differs from model.embed_tokens"
        ):
            open_hugging_face(place)


def test_what_is_no_hugging_face_folder_is_refused_for_its_reason(tmp_path):
    with pytest.raises(CheckpointError, match="not a complete Hugging Face folder"):
        open_hugging_face(StorageFolder(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="from local disks"):
        open_hugging_face(StorageFolder("memory://somewhere"))
    place = write(tmp_path, built(SHAPE))
    place.delete("model.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle"):
        open_hugging_face(place)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        open_hugging_face(place)


def test_an_export_that_was_cut_short_does_not_load_and_is_not_written_over(tmp_path):
    model = built(SHAPE)
    calls = iter([None, None])

    def load(names):
        next(calls)
        return {name: model.state_dict()[name] for name in names}

    with pytest.raises(StopIteration):
        write(tmp_path, model, max_shard_bytes=20_000, load=load)
    place, left = StorageFolder(tmp_path), StorageFolder(tmp_path).sizes()
    assert left and "config.json" not in left
    with pytest.raises(CheckpointError, match="not a complete Hugging Face folder"):
        open_hugging_face(place)
    with pytest.raises(CheckpointError, match="not empty"):
        write(tmp_path, model)
    assert place.sizes() == left


def test_an_export_goes_wherever_a_checkpoint_goes(tmp_path):
    place = write("memory://exported", built(SHAPE), tokenizer=open_tokenizer("bytes"))
    (tmp_path / "here").mkdir()
    for name in place.sizes():
        (tmp_path / "here" / name).write_bytes(place.read(name))
    assert torch.equal(logits(read(StorageFolder(tmp_path / "here"))), logits(built(SHAPE)))


def test_what_their_architecture_or_number_type_cannot_say_is_not_exported(tmp_path):
    with pytest.raises(CheckpointError, match="qk_norm"):
        write(tmp_path, built(replace(SHAPE, qk_norm=True)))
    assert not StorageFolder(tmp_path).sizes()
    model = built(SHAPE)
    model.norm.weight.data[3] = 1e5
    with pytest.raises(
        CheckpointError, match=r"norm.weight: has the value 1e\+05, which overflows torch.float16"
    ):
        write(tmp_path, model, dtype=torch.float16)
