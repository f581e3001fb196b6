"""The architecture: imports only go down, and models are plain."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titanlite"
LAYERS = [
    {"settings", "config_reference", "errors", "files", "labels", "log"},
    {"data", "distributed", "kernels", "metrics", "storage"},
    {"models"},
    {"parallelize", "optim", "checkpoint", "runtime"},
    {"training"},
    {"job"},
    {"generate", "planning", "plots"},
]
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module a file imports, lazy imports and those only for types included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "titanlite":
                found.update(f"titanlite.{alias.name}" for alias in node.names)
    return found


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def below(other: str, package: str) -> bool:
    return (
        LAYER_OF[other] < LAYER_OF[package]
        or other == package
        or LAYER_OF[other] == 0 == LAYER_OF[package]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    package = package_of(path)
    if package == "__init__":
        assert not any(name.startswith("titanlite") for name in imported(path))
        return
    assert package in LAYER_OF, (
        f"{package} is a new package: give it a layer here and in the README"
    )
    for name in imported(path):
        if name.startswith("titanlite."):
            assert below(name.split(".")[1], package), f"{path.name} of {package} imports {name}"


def test_the_ground_layer_needs_only_the_standard_library():
    for path in FILES:
        if LAYER_OF.get(package_of(path)) == 0:
            tops = {name.split(".")[0] for name in imported(path)}
            assert tops <= sys.stdlib_module_names | {"titanlite", "tomli", "tomllib"}, path


def test_models_are_plain():
    for path in (PACKAGE / "models").rglob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in imported(path)), path
