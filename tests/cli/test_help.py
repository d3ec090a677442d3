"""The help of the command: the first commands first, each in one sentence, with examples."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from weft.cli import app
from weft_tools.predict import machine


def shown(*words):
    done = CliRunner().invoke(app, [*words, "--help"], terminal_width=150)
    assert done.exit_code == 0, done.output
    return done.output


def every_command(command, words=()):
    """All commands, with their words."""
    for name in command.list_commands(None) if hasattr(command, "commands") else ():
        each = command.get_command(None, name)
        if not each.hidden:
            yield [*words, name], each
            yield from every_command(each, (*words, name))


COMMANDS = [*every_command(typer.main.get_command(app))]


def test_help_recommends_no_command_that_is_not_installed(monkeypatch):
    assert "weft bench" in shown()
    monkeypatch.setattr("weft.cli.group.entry_points", lambda group: [])
    assert "weft bench" not in shown()
    assert "weft doctor" in shown()


def test_the_first_commands_come_first():
    listed = re.findall(r"^│ (\w+) {2,}", shown().partition("Commands")[2], re.M)
    assert listed[:3] == ["run", "doctor", "bench"]
    assert len(listed) == len({*listed}) == 9


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS], ids=" ".join)
def test_each_command_is_described_by_a_sentence_of_its_own(words):
    """The list of commands breaks lines where the sentence does."""
    command = next(each for at, each in COMMANDS if at == words)
    first = (command.help or "").strip().partition("\n\n")[0]
    assert first.endswith(".")
    assert "\n" not in first


def test_examples_are_commands():
    examples = [
        example
        for words in ([], *(words for words, _ in COMMANDS))
        for example in re.findall(r"(?:: |^ )(weft [a-z].*?)(?:  |$)", shown(*words), re.M)
    ]
    assert len(examples) > 8
    names = {words[0] for words, _ in COMMANDS}
    assert {shlex.split(example)[1] for example in examples} <= names


def test_machines_are_named():
    text = " ".join(shown("predict").split())
    assert all(re.search(rf"{name[:8]}", text) for name in machine.machines())
    assert {"cpu", "h100-nvlink-8"} < {*machine.machines()}


def test_operators_come_before_other_benchmarks():
    listed = re.findall(r"^│ ([\w-]+) {2,}", shown("bench").partition("Commands")[2], re.M)
    assert listed[0] == "all-gather-matmul"
    assert listed[-3:] == ["moe", "overlap", "p2p"]
