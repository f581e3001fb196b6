"""torch.compile, block by block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from titanlite.settings import Built


@dataclass(frozen=True)
class CompileConfig:
    """[compile] torch.compile, block by block."""

    enable: Annotated[bool, Built((False,), "Compiling")] = False  # compile what `components` names
    components: Annotated[list[str], Built((["model", "loss"],), "Compiling")] = field(
        default_factory=lambda: ["model", "loss"]
    )  # what is compiled
    backend: Annotated[str, Built(("inductor",), "Compiling")] = "inductor"  # by which compiler
