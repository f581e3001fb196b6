"""Convert the adapters of LoRA: python -m titanlite_post adapters merge STEP BASE OUT

  merge STEP BASE OUT           write a checkpoint of the base plus what the adapters add to it
  to-peft STEP OUT              write a folder for peft
  from-peft FOLDER BASE OUT     write a checkpoint of the adapters in a folder of peft

STEP: a step-N folder of a run with lora.rank. BASE: the model that it was trained on, as in
checkpoint.initial_load_path. titanlite checkpoint to-hf exports what merge writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from titanlite.errors import EXIT_DONE, UserError
from titanlite.storage import StorageFolder
from titanlite_post.adapters import from_peft, merge, to_peft

CONVERSIONS: dict[str, Callable] = {"merge": merge, "to-peft": to_peft, "from-peft": from_peft}


def main(argv: list[str]) -> int:
    name, *folders = argv or ["-h"]
    if name in ("-h", "--help"):
        print(__doc__)
        return EXIT_DONE
    if name not in CONVERSIONS or len(folders) != (2 if name == "to-peft" else 3):
        raise UserError(f"adapters {' '.join(argv)}: is none of the conversions.", fix=__doc__)
    CONVERSIONS[name](*map(StorageFolder, folders))
    print(f"{folders[-1]}: written", file=sys.stderr)
    return EXIT_DONE
