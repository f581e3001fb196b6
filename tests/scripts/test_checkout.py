"""A script imports the titanlite of its own checkout, not that of the environment it runs in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from conftest import HANG_SECONDS, ROOT


def test_every_script_of_a_second_clone_imports_that_clone(tmp_path):
    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "scripts", clone / "scripts", ignore=ignored)
    extras = [f"extras/{path.parent.name}" for path in ROOT.glob("extras/*/__init__.py")]
    for package in ("titanlite", "benchmarks", *extras):
        (clone / package).mkdir(parents=True)
        (clone / package / "__init__.py").write_text("raise SystemExit('of the clone')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    wrong = {}
    for script in sorted(clone.glob("scripts/*.py")):
        process = subprocess.run(
            [sys.executable, str(script), "--help"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        if process.stderr != "of the clone\n" and script.name != "checkout.py":
            wrong[script.name] = process.stdout + process.stderr
    assert not wrong
