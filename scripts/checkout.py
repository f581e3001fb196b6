"""Imported first by the other scripts: titanlite then comes from the checkout of the script.

Otherwise a script of one clone that runs in the environment of another imports that one's package.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "extras")]
