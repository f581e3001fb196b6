"""Filters of users: a function by its import path, `"my_package.my_filters:keep"`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs

from titanlite.data.manifest import hash_file
from titanlite.errors import ConfigError
from titanlite_corpus.engine import report_progress
from titanlite_corpus.filters.rule import Check, RuleResult, TextChange
from titanlite_corpus.filters.text_block import TextBlock

UserFunction = Callable[[str], "bool | str"]


class UserFunctionRule:
    """A function that takes the text of a document.

    It returns True to keep the document, False to remove it, or a new text. It has to be a pure
    function: the result must depend on the text alone.
    """

    def __init__(self, path: str):
        self._path, self._function = path, import_function(path)

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Call the function with each document that is kept."""
        removed, changed = np.zeros(len(block), bool), np.zeros(len(block), bool)
        texts = block.texts.to_pylist()
        for number in np.flatnonzero(kept):
            report_progress()  # the function may take long
            result = self._function(texts[number])
            if isinstance(result, str):
                changed[number] = result != texts[number]
                texts[number] = result
            elif isinstance(result, bool | np.bool_):
                removed[number] = not result
            else:
                raise ConfigError(
                    f'filter.rules contains "{self._path}": it returned {result!r:.60}.',
                    fix="It must return True (keep), False (remove) or a string (the new text).",
                )
        check = Check("removed", [""] * len(block), removed)
        if not changed.any():
            return RuleResult([check])
        change = TextChange("changed", changed.astype(np.int64), lambda number: texts[number])
        return RuleResult([check], pa.array(texts, pa.large_string()), [change])


def import_function(path: str) -> UserFunction:
    """Import "module:function", also from the working directory; raises ConfigError."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f'filter.rules contains "{path}": cannot be imported ({error}).',
            fix='Write it as "package.module:function", of a module that is installed or in the'
            " working directory.",
        ) from None
    if not callable(function):
        raise ConfigError(
            f'filter.rules contains "{path}": is {type(function).__name__}, not a function.'
        )
    return function


def hash_module(path: str) -> str:
    """Hash of the file that a function is in; "" if it is not in a file."""
    module = importlib.import_module(path.partition(":")[0])
    file = getattr(module, "__file__", None)
    return hash_file(Path(file)) if file else ""
