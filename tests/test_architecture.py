"""The architecture: imports go down the layers, functions are short, names are unique.

The allowlists below need a reason for each entry; an entry that nothing uses any more fails.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titanlite"
# from the lowest; a package imports only from lower layers and from itself
LAYERS = [  # of titanlite/
    {"settings", "config_reference", "errors", "files", "labels", "log", "threads"},
    {"data", "distributed", "kernels", "metrics", "storage"},
    {"models", "elastic"},
    {"parallelize", "optim", "checkpoint", "runtime"},
    {"training"},
    {"guard", "meters"},
    {"job"},
    {"extensions"},
    {"train"},
]
# the others import titanlite_lab, titanlite_post also the chats of titanlite_corpus;
# titanlite_cli imports all of them
EXTRAS = [
    "titanlite_lab",
    "titanlite_corpus",
    "titanlite_planner",
    "titanlite_post",
    "titanlite_cli",
]
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}
FILES = sorted(PACKAGE.rglob("*.py"))
EXTRA_FILES = [p for p in sorted((ROOT / "extras").rglob("*.py")) if "tests" not in p.parts]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
SOURCES = [ROOT / "train.py", *FILES, *EXTRA_FILES, *SCRIPTS]

MAX_LINES, MAX_PARAMETERS = 60, 7  # of a function; self and cls are not counted
MAX_ENTRY_LINES = 80  # of titanlite/train.py
LONG_FUNCTIONS = {
    "titanlite/kernels/documents.py: _document_backward": (
        "a torch.library custom op: its schema needs one parameter per tensor and number"
    ),
    "titanlite/parallelize/context_attention.py: context_parallel_forward": (
        "a torch.library custom op: its schema needs one parameter per tensor and number"
    ),
    "titanlite/parallelize/context_attention.py: context_parallel_backward": (
        "a torch.library custom op: its schema needs one parameter per tensor and number"
    ),
}
THREAD_MODULES = {
    "threading",
    "_thread",
    "concurrent.futures",
    "concurrent",
    "multiprocessing.pool",
}
THREAD_STARTERS = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread"}
SHARED_NAMES = {  # name -> why two modules may both define it
    "main": "the entry of a program",
}
OUTSIDE_ASSIGNMENTS = {
    # settings and objects of other libraries that have no setter
    "extras/titanlite_corpus/bpe.py: tokenizer.pre_tokenizer": "API of Hugging Face tokenizers",
    "titanlite/data/huggingface_tokenizer.py: self._tokenizer.encode_special_tokens": (
        "API of Hugging Face tokenizers"
    ),
    "titanlite/data/tokenizer_json.py: converted.pre_tokenizer": "API of Hugging Face tokenizers",
    "titanlite/data/tokenizer_json.py: converted.decoder": "API of Hugging Face tokenizers",
    "extras/titanlite_planner/dry_run/ranks.py: parameter.grad": "a first update, zero gradients",
    "titanlite/distributed/process_group.py: torch.backends.cudnn.benchmark": "torch setting",
    "titanlite/log.py: logger.propagate": "API of the logging module",
    "titanlite/parallelize/activation_checkpoint.py: "
    "torch._functorch.config.activation_memory_budget": "torch setting",
    "titanlite/parallelize/activation_checkpoint.py: "
    "torch._functorch.config.unsafe_treat_script_objects_as_zero_size": "torch setting",
    "titanlite/parallelize/compile.py: torch._dynamo.config.recompile_limit": "torch setting",
    "titanlite/parallelize/compile.py: torch._inductor.config._micro_pipeline_tp": "torch setting",
    "titanlite/parallelize/compile.py: cpu_vec_isa.VecISA._probe_load": (
        "replaces torch's probe, which starts a process for each instruction set"
    ),
    "titanlite/parallelize/float8.py: float8_ops.addmm_float8_unwrapped": "a function of torchao",
    "titanlite/parallelize/float8.py: new.in_features": "a layer of torchao",
    "titanlite/parallelize/float8.py: new.out_features": "a layer of torchao",
    "titanlite/parallelize/float8.py: new.weight": "a layer of torchao",
    "titanlite/parallelize/float8.py: new.bias": "a layer of torchao",
    "titanlite/parallelize/float8.py: fsdp_utils.hp_tensor_and_scale_to_float8": (
        "replaces torchao's cast, which is not compiled"
    ),
    "titanlite/checkpoint/tensor_writer.py: metadata.storage_data": "field of DCP's metadata",
    # torch.autograd.Function saves non-tensors as attributes of its context
    "titanlite/kernels/documents.py: ctx.options": "autograd context",
    "titanlite/kernels/grouped.py: ctx.cast": "autograd context",
    "titanlite/models/decoder.py: ctx.vocab_size": "autograd context",
    "titanlite/parallelize/token_exchange.py: ctx.exchange": "autograd context",
    "titanlite/models/loss.py: ctx.dtype": "autograd context",
    "titanlite/models/moe.py: ctx.compiled": "autograd context",
    "titanlite/parallelize/lora.py: ctx.quantised": "autograd context",
    "titanlite/parallelize/lora.py: layer.weight": "module transformation",
    "titanlite/parallelize/context_attention.py: ctx.options": "autograd context",
    "titanlite/parallelize/context_delta.py: ctx.group_name": "autograd context",
    # gradients and parameter groups are public attributes of torch tensors and optimizers
    "titanlite/optim/fp32_vectors.py: copy.grad": "gradient of a parameter",
    "titanlite/optim/in_backward.py: parameter.grad": "gradient of a parameter",
    "titanlite/parallelize/fsdp.py: parameter.grad": "gradient of a parameter",
    "titanlite/parallelize/tied.py: self.copy.grad": "gradient of a parameter",
    # module transformations: replace the forward or a part of a model that knows nothing of them
    "titanlite/models/decoder.py: self.output.weight": "ties the output to the embedding",
    "titanlite/parallelize/__init__.py: output.config": "module transformation",
    "titanlite/parallelize/activation_checkpoint.py: block.forward": "module transformation",
    "titanlite/parallelize/activation_offload.py: block.forward": "module transformation",
    "titanlite/parallelize/compile.py: block.forward": "module transformation",
    "titanlite/parallelize/compile.py: module.__class__": "module transformation",
    "titanlite/parallelize/tensor_styles.py: module.vocabulary": "module transformation",
}


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, including lazy imports and imports for types only."""
    modules = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
            if node.module == "titanlite":
                modules.update(f"titanlite.{alias.name}" for alias in node.names)
    return modules


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def may_import(package: str, other: str) -> bool:
    return (
        LAYER_OF[other] < LAYER_OF[package]
        or other == package
        or LAYER_OF[other] == 0 == LAYER_OF[package]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    package = package_of(path)
    if package == "__init__":
        assert not any(name.startswith("titanlite") for name in imported_modules(path))
        return
    assert package in LAYER_OF, f"{package} is a new package: add it to a layer in LAYERS"
    for name in imported_modules(path):
        if name.startswith("titanlite."):
            assert may_import(package, name.split(".")[1]), (
                f"{path.name} of {package} imports {name}"
            )


def test_the_trainer_imports_no_extra():
    for path in [ROOT / "train.py", *FILES]:
        found = [name for name in imported_modules(path) if name.split(".")[0] in EXTRAS]
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize("path", EXTRA_FILES, ids=lambda p: str(p.relative_to(ROOT / "extras")))
def test_extras_import_the_trainer_and_the_lab(path):
    extra = path.relative_to(ROOT / "extras").parts[0]
    further = {"titanlite_cli": EXTRAS, "titanlite_post": ["titanlite_corpus"]}.get(extra, ())
    allowed = {"titanlite", "titanlite_lab", extra, *further}
    ours = {name.split(".")[0] for name in imported_modules(path) if name.startswith("titanlite")}
    assert ours <= allowed, f"{path.name} imports {sorted(ours - allowed)}"


def test_no_module_imports_a_private_name_of_another():
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titanlite"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)} imports {private} of {node.module}"


def test_the_lowest_layer_needs_only_the_standard_library():
    for path in FILES:
        if LAYER_OF.get(package_of(path)) == 0:
            packages = {name.split(".")[0] for name in imported_modules(path)}
            assert packages <= sys.stdlib_module_names | {"titanlite", "tomli", "tomllib"}, path


def test_models_import_nothing_of_torch_distributed():
    for path in (PACKAGE / "models").rglob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imported_modules(path)), (
            path
        )


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_train_py_is_short():
    lines = (PACKAGE / "train.py").read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_ENTRY_LINES, f"titanlite/train.py has {lines} lines"


def test_no_two_module_level_names_are_equal():
    """One name, one class or function: a reader who searches for it finds one definition."""
    files_of: dict[str, set[str]] = defaultdict(set)
    for path in [*FILES, *EXTRA_FILES]:
        for node in parse(path).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                files_of[node.name].add(str(path.relative_to(ROOT)))
    shared = {name: sorted(files) for name, files in files_of.items() if len(files) > 1}
    unlisted = {name: files for name, files in shared.items() if name not in SHARED_NAMES}
    assert not unlisted, "give each a specific name"
    assert not SHARED_NAMES.keys() - shared.keys(), "remove these from the allowlist"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """(qualified name, function) of every function and method below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}{child.name}", child
        named = isinstance(child, (ast.ClassDef, Function))
        yield from functions_in(child, f"{prefix}{child.name}." if named else prefix)


def size_of(function: Function) -> tuple[int, int]:
    """(lines, parameters without self and cls)."""
    parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    counted = [parameter for parameter in parameters if parameter.arg not in ("self", "cls")]
    return function.end_lineno - function.lineno + 1, len(counted)


def test_functions_are_short():
    too_long = {}
    for path in SOURCES:
        for name, function in functions_in(parse(path)):
            lines, parameters = size_of(function)
            if lines > MAX_LINES or parameters > MAX_PARAMETERS:
                where = f"{path.relative_to(ROOT)}: {name}"
                too_long[where] = f"{lines} lines, {parameters} parameters"
    unlisted = {name: size for name, size in too_long.items() if name not in LONG_FUNCTIONS}
    assert not unlisted, "shorten these, or group their parameters"
    assert not LONG_FUNCTIONS.keys() - too_long.keys(), "remove these from the allowlist"


def assigned_attributes(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Targets of assignments, unpacked tuples, `for` and `with` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def test_attributes_are_assigned_inside_their_class():
    outside = set()
    for path in SOURCES:
        for target in assigned_attributes(parse(path)):
            owner = target.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                outside.add(f"{path.relative_to(ROOT)}: {ast.unparse(target)}")
    unlisted = sorted(outside - OUTSIDE_ASSIGNMENTS.keys())
    assert not unlisted, "add a method or an argument instead"
    unused = sorted(OUTSIDE_ASSIGNMENTS.keys() - outside)
    assert not unused, "remove these from the allowlist"


def thread_starters_in(tree: ast.Module) -> Iterator[str]:
    """Names of the standard library that start threads, imported or as `module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in THREAD_MODULES:
            yield from (alias.name for alias in node.names if alias.name in THREAD_STARTERS)
        if isinstance(node, ast.Attribute) and node.attr in THREAD_STARTERS:
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr in ("to_thread", "run_in_executor"):
            yield ast.unparse(node)


def test_all_threads_are_started_by_one_module():
    """A thread that does not select its CUDA device runs on device 0, the GPU of another rank."""
    starters = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in thread_starters_in(parse(path))
        if path != PACKAGE / "threads.py"
    }
    assert not starters, "use titanlite/threads.py"
    assert set(thread_starters_in(parse(PACKAGE / "threads.py"))) == {
        "Thread",
        "ThreadPoolExecutor",
    }
