"""Programs of `support` that run with a copy of weft in which some files are others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import weft
from support.on_path import ONLY_ON_PATH
from weft import _native


def programs(folder: Path, files: Mapping[str, str]) -> Callable[[str, str], Any]:
    """What runs a program of a module of `support` with a copy of weft that has these files, by
    path; it returns what the program prints as JSON.
    """
    shutil.copytree(Path(weft.__file__).parent, folder / "weft")
    shutil.copy(_native.__file__, folder / "weft")
    for path, text in files.items():
        (folder / path).write_text(text)
    (folder / "sitecustomize.py").write_text(ONLY_ON_PATH)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]),
        "WEFT_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # ranks count the graphs that they compile
    }

    def run(module: str, program: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", f"from support.{module} import {program}; {program}()"],
            env=os.environ | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
