"""The versions that results depend on."""

from __future__ import annotations

import platform

import torch

from weft.version import __version__


def versions(device: str = "cpu") -> dict[str, str]:
    """The versions of weft, torch and Python, and of all that results on a GPU depend on."""
    found = {
        "weft": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        import triton

        found |= {
            "triton": triton.__version__,
            "cuda": torch.version.cuda or f"rocm {torch.version.hip}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found
