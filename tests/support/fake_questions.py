"""Questions that no GPU is needed for: they answer, fail, hang or end their process."""

import os
import signal
import threading

from weft_tools.assumptions.question import Finding, Question


def machine():
    """Facts about a machine, as `begin` returns them."""
    return {
        "gpu": "a GPU of threads",
        "sms": 4,
        "memory_gib": 1.0,
        "torch": "2",
        "cuda": "13",
        "driver_cuda": "13.1",
        "triton": "3.6",
        "variables": {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        "variables_at_start": {"CUDA_MODULE_LOADING": None, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        "loading": "LAZY",
        "pid": os.getpid(),
    }


def no_machine():
    raise RuntimeError("no such GPU")


def machine_until_broken():
    """Fails once a question has broken it."""
    if "BROKEN" in os.environ:
        raise RuntimeError("the context is lost")
    return machine()


def good():
    return {"right": True, "pid": os.getpid()}


def bad():
    return {"right": False, "pid": os.getpid()}


def undecided():
    return {"right": None}


def fails():
    raise ValueError("no such stream")


def breaks():
    os.environ["BROKEN"] = "1"
    raise ValueError("an illegal address")


def hangs():
    threading.Event().wait()


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def judged(answer):
    verdict = {True: "fine", False: "bad", None: "unknown"}[answer["right"]]
    return Finding(verdict, f"the answer is {answer['right']}")


def question(ask, seconds=60.0):
    """A question of the group fake, with the name of the function that asks."""
    name = f"fake/{ask.__name__}"
    return Question(name, f"It {ask.__name__}.", "a.py", ask, judged, "Repair [it]", seconds)
