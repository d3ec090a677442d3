"""The machine that answers: its software, its GPU, and settings of the driver."""

from __future__ import annotations

import os
import platform
import time

import torch
import triton

from weft.gpu import driver
from weft.gpu.backend import check_device
from weft_tools.assumptions import attributes
from weft_tools.assumptions.question import Answer, Finding, Question

VARIABLES = driver.QUEUES, driver.LOADING
"""Variables that the driver reads at its start."""


def begin() -> Answer:
    """Use the first GPU, and return facts about it.

    Variables that are not set are set after `torch.cuda.is_available`, as in a program that asks
    for a GPU before it makes a world: the driver may have begun by then, and not see them.

    Raises `WeftError` without a GPU, `RuntimeError` if it does not work (any more).
    """
    begun = time.perf_counter()
    before = {name: os.environ.get(name) for name in VARIABLES}
    device = check_device("cuda:0")
    driver.set_variables(shared=True)
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, memory = torch.cuda.mem_get_info()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "driver_cuda": attributes.version(),
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "sms": properties.multi_processor_count,
        "memory_gib": round(memory / 2**30, 1),
        "used_gib": round((memory - free) / 2**30, 1),
        "loading": driver.loading_mode(),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "variables_at_start": before,
        "start_seconds": round(time.perf_counter() - begun, 2),
        **attributes.attributes(),
    }


def loading() -> Answer:
    """The driver loads the kernels of a library when the library is loaded.

    Else the first launch of a kernel of torch loads it, and may wait for kernels of other ranks.
    """
    return {"mode": driver.loading_mode()}


def loaded_eagerly(answer: Answer) -> Finding:
    """What the driver's mode of loading means."""
    if answer["mode"] == "EAGER":
        return Finding("fine", "the kernels of torch are loaded when it is")
    return Finding(
        "bad",
        f"the mode is {answer['mode']}: a kernel of torch is loaded at its first launch, which may "
        "wait for kernels that wait",
    )


LOADING = Question(
    "machine/loading",
    "The driver loads all kernels of torch before the first call.",
    "gpu/driver.py",
    loading,
    loaded_eagerly,
    "Set CUDA_MODULE_LOADING=EAGER before Python starts",
)
