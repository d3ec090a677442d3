"""The folders of native/ and their order."""

import re
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "native"
ORDER = ["kernels", "memory", "hosts", "execute", "python"]


def test_each_folder_includes_only_earlier_folders():
    assert sorted(path.name for path in NATIVE.iterdir() if path.is_dir()) == sorted(
        [*ORDER, "tests"]
    )
    for number, folder in enumerate(ORDER):
        for path in (NATIVE / folder).iterdir():
            text = path.read_text()
            included = re.findall(r'#include "(\w+)/', text)
            assert set(included) <= {*ORDER[: number + 1]}, path
            assert "#include <nanobind" not in text or folder == "python", path
