"""``weft doctor --gpu``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from weft.cli import options
from weft.errors import WeftError
from weft.gpu.backend import check_device


def ask(console: Console, only: list[str], file: Path | None) -> bool:
    """Ask the first GPU; ends with exit status 2 without one that can be asked."""
    import torch

    options.need_gpu("--gpu")
    if torch.version.hip is not None:
        options.reject(
            "--gpu", "the questions are for GPUs of NVIDIA, and torch is built for AMD's"
        )
    try:
        check_device("cuda:0")
    except WeftError as error:
        options.reject("--gpu", str(error))

    from weft_tools.assumptions import report, table

    with options.rejecting("--only"):
        questions = table.selected(only)
    if file:
        options.check_writable(file, "--json")
    return report.diagnose(console, questions, file)
