"""The assumptions of the device engine about a GPU: what answers mean, the kernels that ask,
compiled, and that a question that fails, hangs or crashes does not stop the others. No GPU has been
asked.
"""

import os
import pickle
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", "3.6")
import torch
from support import fake_questions as fake
from support.compiled import build

from weft_tools.assumptions import asking, kernels, machine
from weft_tools.assumptions.asking import Reply
from weft_tools.assumptions.table import QUESTIONS, selected

ROOT = Path(__file__).parent.parent.parent
BY_NAME = {question.name: question for question in QUESTIONS}

STREAMS = {"streams": 32, "held_up": {}, "host_held_up_by": None}
HELD_UP = {"streams": 32, "held_up": {"3": [7, 11], "4": [8]}, "host_held_up_by": 5}
HOST_HELD_UP = {"streams": 32, "held_up": {}, "host_held_up_by": 5}
AT_ONCE = {"ms": 0.1, "waited": False}
AFTER_THE_WAIT = {"ms": 1500.3, "waited": True}


def copies(control=False, full=True, **ended):
    """An answer on what ended while SMs were held."""
    return {
        "works": {
            name.replace("_", " "): {"full": full, "ended": each, "ms": 1.0}
            for name, each in {"a_kernel": control, **ended}.items()
        }
    }


ANSWERS = [
    ("machine/loading", {"mode": "EAGER"}, "fine", "loaded when it is"),
    ("machine/loading", {"mode": "LAZY"}, "bad", "the mode is LAZY"),
    ("memory/clock", {"step_ns": 32, "clock_ns": 990, "events_ns": 1000}, "fine", "of 32 ns"),
    ("memory/clock", {"step_ns": 10**6, "clock_ns": 990, "events_ns": 1000}, "bad", "1000000 ns"),
    ("memory/clock", {"step_ns": 10**18, "clock_ns": 0, "events_ns": 1000}, "bad", "0 ns in 1000"),
    ("memory/polls", {"device, 1 warps": 0.6, "host, 1 warps": 9.0}, "fine", "host, 1 warps 9.0"),
    ("memory/polls", {"device, 1 warps": 0.6, "device, 8 warps": 2.1}, "bad", "8 warps 2.1 us"),
    ("memory/swap", {"seen": [[7, 0], [7, 7]]}, "fine", "the first of two"),
    ("memory/swap", {"seen": [[7, 0], [9, 7]]}, "bad", r"were \[\[7, 0\], \[9, 7\]\] after"),
    ("memory/peers", {"gpus": 2, "no_access": [], "no_atomics": []}, "fine", "all of 2 GPUs"),
    ("memory/peers", {"gpus": 1, "no_access": [], "no_atomics": []}, "unknown", "has one GPU"),
    (
        "memory/peers",
        {"gpus": 2, "no_access": [], "no_atomics": [[0, 1], [1, 0]]},
        "bad",
        "GPUs 0 and 1, 1 and 0 have no atomics",
    ),
    (
        "memory/peers",
        {"gpus": 2, "no_access": [[0, 1]], "no_atomics": [[0, 1]]},
        "bad",
        "GPUs 0 and 1 cannot access",
    ),
    *(
        each
        for name in ("kernels", "copies-on-device", "copies-from-host", "priorities")
        for each in (
            (f"queues/{name}", STREAMS, "fine", "any of 32 streams"),
            (f"queues/{name}", HELD_UP, "bad", "2 of 32 .* stream 3 those numbered 7, 11"),
            (f"queues/{name}", HOST_HELD_UP, "bad", "while stream 5 waited"),
        )
    ),
    ("queues/last", {"begun": True, "waiting": 31, "streams": 32}, "fine", "31 kernels waited"),
    ("queues/last", {"begun": False, "waiting": 31, "streams": 32}, "bad", "31 began.* did not"),
    ("queues/last", {"begun": True, "waiting": 7, "streams": 32}, "bad", "7 began.* did:"),
    ("queues/overtaking", {"kernel": 80.0, "least": 80.1, "greatest": 30.2}, "fine", "30.2 ms"),
    ("queues/overtaking", {"kernel": 80.0, "least": 80.1, "greatest": 80.2}, "bad", "80.2 ms"),
    ("blocking/synchronize", AFTER_THE_WAIT, "fine", "other answers of this group count"),
    ("blocking/synchronize", AT_ONCE, "unknown", "say nothing"),
    *(
        (f"blocking/{name}", answer, "fine", text)
        for name in ("load-by-triton", "free")
        for answer, text in ((AFTER_THE_WAIT, "weft expects"), (AT_ONCE, "does not need"))
    ),
    *(
        each
        for name in BY_NAME
        if name.startswith("blocking/") and not re.search("synchronize|load-by|free", name)
        for each in (
            (name, AT_ONCE, "fine", "0.1 ms while a kernel waited"),
            (name, AFTER_THE_WAIT, "bad", "after 1500.3 ms"),
        )
    ),
    ("copies/on-device", copies(big=True, rows_with_gaps=True), "fine", "big, rows with gaps"),
    ("copies/on-device", copies(big=True, rows_with_gaps=False), "fine", "all but rows with gaps"),
    ("copies/on-device", copies(big=False, small=True), "bad", "SMs make the copies: big. "),
    ("copies/on-device", copies(big=True, control=True), "unknown", "not all SMs"),
    ("copies/on-device", copies(big=True, full=False), "unknown", "not all SMs"),
    ("copies/with-host", copies(there=True), "fine", "there"),
    ("copies/with-host", copies(there=False), "bad", "there"),
    ("speeds/copy", {"gpu": "NVIDIA H100 80GB HBM3", "gbs": 1400.0}, "fine", "predictions assume"),
    ("speeds/copy", {"gpu": "NVIDIA H100 80GB HBM3", "gbs": 400.0}, "bad", "400 GB/s"),
    ("speeds/copy", {"gpu": "NVIDIA A100", "gbs": 1400.0}, "unknown", "no profile"),
    ("speeds/product", {"gpu": "NVIDIA H200", "tflops": 700.0}, "fine", "predictions assume"),
    ("speeds/product", {"gpu": "NVIDIA H200", "tflops": 300.0}, "bad", "300 TFLOP/s"),
    *(
        each
        for name in ("branches", "two-graphs")
        for each in (
            (f"graphs/{name}", {"ms": [1.0], "replays": 3, "timed_out": 0}, "fine", "at once"),
            (f"graphs/{name}", {"ms": [500.0], "replays": 3, "timed_out": 2}, "bad", "2 of 3"),
        )
    ),
    ("graphs/capture-beside-others", {"capture": "ended", "other": []}, "fine", "not disturb"),
    ("graphs/capture-beside-others", {"capture": "error 900", "other": []}, "bad", "error 900"),
    ("graphs/capture-beside-others", {"capture": "ended", "other": ["error 1"]}, "bad", "error 1"),
]


@pytest.mark.parametrize(("name", "answer", "verdict", "means"), ANSWERS)
def test_answers_are_judged(name, answer, verdict, means):
    found = BY_NAME[name].verdict(answer)
    assert found.verdict == verdict
    assert re.search(means, found.means)


def test_every_question_is_judged_both_ways():
    """But those whose answer only tells whether others count, or whether something is needed."""
    verdicts = {name: {each[2] for each in ANSWERS if each[0] == name} for name in BY_NAME}
    informative = {"blocking/load-by-triton": {"fine"}, "blocking/free": {"fine"}}
    control = {"blocking/synchronize": {"fine", "unknown"}}
    for name, found in verdicts.items():
        expected = {**informative, **control}.get(name, {"fine", "bad"})
        assert found >= expected, name
        assert bool(BY_NAME[name].remedy) == ("bad" in found), name


def test_questions_name_files_of_weft_and_can_be_asked_in_another_process():
    for question in QUESTIONS:
        files = [ROOT / package / question.where for package in ("weft", "tools/weft_tools")]
        assert question.where == "programs" or any(file.is_file() for file in files)
        assert pickle.loads(pickle.dumps(question.ask))


def test_questions_are_selected_by_name_and_by_group():
    assert selected([]) == [*QUESTIONS]
    names = [question.name for question in selected(["graphs/branches", "queues"])]
    assert names[-1] == "graphs/branches"
    assert {name.partition("/")[0] for name in names[:-1]} == {"queues"}
    with pytest.raises(ValueError, match=r"queue is no question .*: use machine, memory, queues"):
        selected(["queue"])


def answered(*asks, begin=fake.machine, seconds=100.0):
    """The facts of the processes that were asked, and the replies by the name of the function."""
    questions = [fake.question(ask, 1.0 if ask is fake.hangs else 60.0) for ask in asks]
    found = [*asking.ask(questions, begin, seconds)]
    replies = {reply.name[5:]: reply for reply in found if isinstance(reply, Reply)}
    assert list(replies) == [ask.__name__ for ask in asks]
    return [facts["pid"] for facts in found if isinstance(facts, dict)], replies


def test_a_question_that_fails_hangs_or_crashes_does_not_stop_the_others():
    asks = fake.good, fake.fails, fake.bad, fake.hangs, fake.crashes, fake.undecided
    pids, replies = answered(*asks)
    assert len({*pids}) == 3
    assert os.getpid() not in pids
    assert replies["good"].answer == {"right": True, "pid": pids[0]}
    assert replies["fails"].error == "ValueError: no such stream"
    # in the same process, which still works
    assert replies["bad"].answer == {"right": False, "pid": pids[0]}
    assert replies["hangs"].error == "the process that asked gave no answer within 1 s"
    assert replies["crashes"].error == "the process that asked ended, with status -11"
    assert replies["undecided"].answer == {"right": None}


def test_after_an_error_that_breaks_the_process_another_one_is_asked():
    pids, replies = answered(fake.breaks, fake.good, begin=fake.machine_until_broken)
    assert replies["breaks"].error == "ValueError: an illegal address"
    assert replies["good"].answer == {"right": True, "pid": pids[1]}


def test_without_a_gpu_that_works_nothing_is_asked():
    pids, replies = answered(fake.good, fake.bad, begin=fake.no_machine)
    assert pids == []
    assert replies["good"].error == "the GPU cannot be used: RuntimeError: no such GPU"
    assert replies["bad"].not_asked == "the GPU cannot be used"


def test_without_time_nothing_is_asked():
    pids, replies = answered(fake.good, seconds=0.0)
    assert pids == []
    assert replies["good"].not_asked == "no time was left: 0 s have passed"


def test_variables_are_set_after_the_driver_may_have_begun(monkeypatch):
    """As in a program that asks for a GPU before it makes a world."""
    found = []

    def note(*_):
        found.append([os.environ.get(name) for name in machine.VARIABLES])
        return torch.device("cuda", 0)

    def stop(*_, **__):
        raise RuntimeError("the rest needs a GPU")

    for name in machine.VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(machine, "check_device", note)
    monkeypatch.setattr(torch.cuda, "set_device", note)
    monkeypatch.setattr(torch, "zeros", stop)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        machine.begin()
    assert found == [[None, None], ["32", "EAGER"]]


TARGETS = pytest.mark.parametrize("target", ["sm_90", "sm_100"])


def compiled(monkeypatch, folder, target, kernel, signature, **options):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    constants = {"VALUE": 1} if kernel is kernels.constant_kernel else {}
    unaligned = ("flag", "state", "target")
    made = build(kernel, signature, constants, target, unaligned=unaligned, **options)
    assert made.spills == 0
    return made.assembly


@TARGETS
def test_kernels_that_wait_end_by_the_clock(target, monkeypatch, tmp_path):
    """The loop reads the clock each time, and compares it with the limit."""
    signature = {"flag": "*i32", "state": "*i32", "nanoseconds": "i64"}
    wait = compiled(monkeypatch, tmp_path, target, kernels.wait_kernel, signature, num_warps=1)
    signature = {"begun": "*i32", "nanoseconds": "i64"}
    options = {"num_warps": kernels.HOLDING_WARPS, "maxnreg": 32}
    hold = compiled(monkeypatch, tmp_path, target, kernels.hold_kernel, signature, **options)
    for assembly in (wait, hold):
        [loop] = re.findall(r"^(\$L__BB0_\d+):(.*?)bra \s*\1;", assembly, re.DOTALL | re.MULTILINE)
        assert "%globaltimer" in loop[1]
        assert re.search(r"setp\.(?:lt|ge)\.s64", loop[1])
        # the host sees that the kernel has begun
        begun = assembly[: assembly.index(loop[0] + ":")]
        assert "st.global.wt.b32" in begun
    [polled] = re.findall(r"^(\$L__BB0_\d+):(.*?)bra \s*\1;", wait, re.DOTALL | re.MULTILINE)
    assert "ld.global.sys.acquire.b32" in polled[1]
    # atomics may not work in the host's memory
    assert not re.search(r"\b(?:atom|red)\.", wait)


@TARGETS
@pytest.mark.parametrize(
    ("kernel", "signature", "expected"),
    [
        (kernels.mark_kernel, {"target": "*i32"}, r"st\.global\.wt\.b32"),
        (kernels.constant_kernel, {"target": "*i32"}, r"st\.global\.b32"),
        (
            kernels.swap_kernel,
            {"target": "*i64", "value": "i64", "old": "*i64"},
            r"atom\.global\.relaxed\.sys\.cas\.b64",
        ),
        (
            kernels.poll_kernel,
            {"counter": "*i64", "number": "i32"},
            r"ld\.global\.sys\.acquire\.b64(?s:.*)ld\.global\.sys\.acquire\.b64",
        ),
        (
            kernels.clock_kernel,
            {"times": "*i64", "number": "i32"},
            r"%globaltimer(?s:.*)%globaltimer(?s:.*)min\.s64",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_other_kernels_do_what_they_ask(target, kernel, signature, expected, monkeypatch, tmp_path):
    assembly = compiled(monkeypatch, tmp_path, target, kernel, signature, num_warps=1)
    assert re.search(expected, assembly)
