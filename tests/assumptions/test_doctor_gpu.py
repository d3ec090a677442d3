"""The report and the JSON of `weft doctor --gpu`, from questions that need no GPU; and refusals."""

import json
import re
from io import StringIO

import pytest

pytest.importorskip("triton", "3.6")
import torch
from rich.console import Console
from support import fake_questions as fake
from typer.testing import CliRunner

from weft.cli import app
from weft.gpu import backend
from weft_tools.assumptions import asking
from weft_tools.assumptions import report as doctor
from weft_tools.assumptions.asking import Reply

FACTS = fake.machine()
FINE = Reply("fake/good", 0.1, answer={"right": True})
BAD = Reply("fake/bad", 0.2, answer={"right": False})
UNDECIDED = Reply("fake/undecided", 0.3, answer={"right": None})
FAILED = Reply("fake/fails", 0.4, error="ValueError: no [such] stream")
HUNG = Reply("fake/hangs", 1.0, error="the process that asked gave no answer within 1 s")
NOT_ASKED = Reply("fake/crashes", 0.0, not_asked="no time was left: 80 s have passed")


def diagnosed(monkeypatch, file, *replies):
    """Whether all is well, the lines of the report, and what the file had after each reply."""
    written = []

    def ask(questions, begin, seconds):
        yield FACTS
        for reply in replies:
            written.append(json.loads(file.read_text()))
            yield reply
        written.append(json.loads(file.read_text()))

    monkeypatch.setattr(asking, "ask", ask)
    questions = [fake.question(getattr(fake, reply.name[5:])) for reply in replies]
    console = Console(width=160, record=True, file=StringIO(), soft_wrap=True)
    fine = doctor.diagnose(console, questions, file)
    return fine, console.export_text().splitlines(), written


def test_answers_are_written_as_they_come(monkeypatch, tmp_path):
    file = tmp_path / "assumptions.json"
    *_, written = diagnosed(monkeypatch, file, FINE, FAILED, NOT_ASKED)
    assert [[*each["questions"]] for each in written] == [
        [],
        ["fake/good"],
        ["fake/good", "fake/fails"],
        ["fake/good", "fake/fails", "fake/crashes"],
    ]
    assert (
        written[-1]
        == json.loads(file.read_text())
        == {
            "machine": FACTS,
            "questions": {
                "fake/good": {
                    "answer": {"right": True},
                    "verdict": "fine",
                    "seconds": 0.1,
                    "means": "the answer is True",
                },
                "fake/fails": {
                    "answer": None,
                    "verdict": "error",
                    "seconds": 0.4,
                    "means": "ValueError: no [such] stream",
                },
                "fake/crashes": {
                    "answer": None,
                    "verdict": "unknown",
                    "seconds": 0.0,
                    "means": "not asked: no time was left: 80 s have passed",
                },
            },
        }
    )
    assert [path.name for path in tmp_path.iterdir()] == ["assumptions.json"]


def test_a_report_of_good_answers(monkeypatch, tmp_path):
    fine, lines, _ = diagnosed(monkeypatch, tmp_path / "x.json", FINE, UNDECIDED, NOT_ASKED)
    assert fine
    assert lines[0] == (
        "a GPU of threads with 4 SMs and 1.0 GiB, torch 2, CUDA 13, driver for 13.1, Triton 3.6. "
        "CUDA_MODULE_LOADING=EAGER, CUDA_DEVICE_MAX_CONNECTIONS=32 (CUDA_MODULE_LOADING set after "
        "torch.cuda.is_available); kernels are loaded: LAZY."
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│ fake/" in line]
    assert rows == [
        ["fake/good", "It good.", "fine", "the answer is True"],
        ["fake/undecided", "It undecided.", "unknown", "the answer is None"],
        ["fake/crashes", "It crashes.", "unknown", f"not asked: {NOT_ASKED.not_asked}"],
    ]
    assert lines[-1] == "Nothing wrong was found: of 3 questions 1 fine, 2 unknown."


def test_a_report_of_bad_answers_has_remedies(monkeypatch, tmp_path):
    fine, lines, _ = diagnosed(monkeypatch, tmp_path / "x.json", BAD, FINE, FAILED, HUNG)
    assert not fine
    assert [line for line in lines if re.match("wrong|no answer", line)] == [
        "wrong: fake/bad (a.py): the answer is False. Repair [it].",
        "no answer: fake/fails (a.py): ValueError: no [such] stream.",
        "no answer: fake/hangs (a.py): the process that asked gave no answer within 1 s.",
    ]
    assert lines[-1] == "Something wrong was found: of 4 questions 1 fine, 1 bad, 2 error."


def test_questions_are_asked_in_another_process():
    console = Console(width=160, record=True, file=StringIO(), soft_wrap=True)
    questions = [fake.question(each) for each in (fake.good, fake.bad)]
    assert not doctor.diagnose(console, questions, begin=fake.machine)
    assert "of 2 questions 1 fine, 1 bad." in console.export_text()


def refusal(*words):
    done = CliRunner().invoke(app, ["doctor", *words], terminal_width=300)
    assert done.exit_code == 2, done.output
    return " ".join(done.output.replace("│", "").split())


def test_without_a_gpu_it_refuses(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "Invalid value for --gpu: torch finds no GPU here" in refusal("--gpu")
    assert "--json: it belongs to --gpu" in refusal("--json", str(tmp_path / "x.json"))
    assert "--only: it belongs to --gpu" in refusal("--only", "queues")
    assert "--verbose: it has no effect with --flight" in refusal("--verbose", "--gpu")


def test_what_cannot_be_asked_is_refused_before_a_gpu_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "--only: queue is no question" in refusal("--gpu", "--only", "queue")
    missing = tmp_path / "missing" / "x.json"
    assert "--json: the directory of" in refusal("--gpu", "--json", str(missing))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "--gpu: the questions are for GPUs of NVIDIA" in refusal("--gpu")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert "--gpu: GPUs need Triton 3.6 or newer, and there is none: pip" in refusal("--gpu")
