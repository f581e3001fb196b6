"""Imported first by the other scripts: titanlite then comes from the checkout of the script.

Otherwise a script of one clone that runs in the environment of another imports that one's package.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
