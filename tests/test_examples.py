"""Examples, and the snippets and commands of documents, run as a reader would run them, so that
none goes stale.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import nbclient
import nbformat
import pytest
import torch
import typer
from support import snippets
from support.ranks import on_ranks
from typer.testing import CliRunner

import weft
from weft.cli import app

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
WEFT = Path(sys.executable).parent / "weft"
DOCUMENTS = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def run(*command, cwd=ROOT):
    """The output of a command, which must succeed."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=100, cwd=cwd
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def as_process(name, *arguments, cwd=ROOT):
    """The output of an example started as a process of its own, as a reader would start it."""
    return run(sys.executable, EXAMPLES / name, *arguments, cwd=cwd)


def example(name, *arguments, cwd=ROOT):
    """The output of an example run as the main program of this process, whose ranks are forked from
    a server that has imported torch.
    """
    script, printed = str(EXAMPLES / name), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [script, *arguments])
        patch.chdir(cwd)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(printed.getvalue()) from end
    return printed.getvalue()


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_calls_of_weft_have_arguments_that_exist(script):
    """Also in parts that no machine without a GPU runs."""
    for call in ast.walk(ast.parse(script.read_text())):
        function = call.func if isinstance(call, ast.Call) else None
        of_weft = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "weft"
        if of_weft and callable(named := getattr(weft, function.attr)):
            known = inspect.signature(named).parameters
            assert {each.arg for each in call.keywords if each.arg} <= {*known}, ast.unparse(call)


@pytest.mark.parametrize(
    ("name", "missing", "remedy"),
    [
        ("custom_schedule.py", "weft_tools.bench.pictures.timeline", "pip install -e ./tools"),
        ("huggingface.py", "transformers", "pip install transformers accelerate"),
        ("mixture_of_experts.py", "transformers", "pip install transformers accelerate"),
        ("ray_train.py", "ray", 'pip install "ray[train]"'),
    ],
)
def test_an_example_says_what_to_install(monkeypatch, name, missing, remedy):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"{missing}.*: {re.escape(remedy)}$"):
        runpy.run_path(str(EXAMPLES / name))
    assert remedy in (EXAMPLES / name).read_text().split('"""')[1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_per_rank():
    printed = as_process("gpu_per_rank.py")
    assert "1 rank(s) on cpu: (512, 256), as expected" in printed


@pytest.mark.data
@pytest.mark.parametrize(
    "name",
    [pytest.param(None, marks=pytest.mark.slow), "picture.png"],
    ids=["default name", "with a name"],
)
def test_custom_schedule(tmp_path, name):
    printed = (
        example("custom_schedule.py", name, cwd=tmp_path)
        if name
        else as_process("custom_schedule.py", cwd=tmp_path)
    )
    assert "all_gather_matmul / doubling on 4 ranks" in printed
    picture = tmp_path / re.search(r"^The picture of its second run: (.*)$", printed, re.M)[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == [name] * bool(name)
    if name is None:
        shutil.rmtree(picture.parent)


@pytest.mark.data
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_tensor_parallel_transformer(dtype):
    sizes = "--dim 64 --layers 2 --heads 4 --kv-heads 2 --hidden 96 --vocab 128 --batch 2 --prompt 16 --generated 3 --iterations 1"
    printed = example(
        "tensor_parallel_transformer.py", *sizes.split(), "--dtype", dtype, "--explain"
    )
    for word in (
        "prefill",
        "decode",
        "train",
        "logits agree",
        "gradients agree",
        "matmul_all_reduce",
        "matmul_reduce_scatter",
    ):
        assert word in printed


@pytest.mark.data
@pytest.mark.skipif(
    torch.__version__ < "2.11",
    reason="this torch's pipelines send an int64 that the receiver takes for a float32",
)
@pytest.mark.slow
def test_torch_distributed():
    """On both backends the losses are the same; the example itself checks that in every step."""
    sizes = "--dim 32 --layers 2 --heads 2 --batch 4 --length 8 --steps 3"
    printed = as_process("torch_distributed.py", *sizes.split())
    for word in (
        "DDP",
        "FSDP2",
        "tensor parallel",
        "pipeline",
        "interleaved pipeline",
        "losses agree in every step",
    ):
        assert word in printed


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_elastic(victim):
    """The example itself compares the losses with those of ranks that were started anew."""
    printed = as_process("elastic.py", "--ranks", 3, "--steps", 8, "--victim", victim, "--at", 3)
    assert "the losses of 5 steps equal those of 2 ranks started anew" in printed


@pytest.mark.data
@pytest.mark.slow
def test_async_tp(tmp_path, monkeypatch):
    """The example itself compares the results of all programs."""
    start = example
    if torch.__version__ < "2.11":  # in this torch, cached graphs do not count their collectives
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        start = as_process  # passes this environment to the ranks
    sizes = "--dim 32 --layers 1 --heads 2 --length 8 --runs 1"
    printed = start("async_tp.py", *sizes.split())
    assert "2 all_gather_matmul, 2 matmul_reduce_scatter in the last program" in printed


@pytest.mark.data
@pytest.mark.slow
def test_huggingface():
    pytest.importorskip("transformers")
    sizes = "--hidden 64 --intermediate 128 --layers 2 --heads 4 --kv-heads 2 --vocabulary 128 --prompt 16 --generated 6 --runs 2"
    # transformers' results are of its own classes
    printed = as_process("huggingface.py", *sizes.split(), "--dtype", "float32")
    assert printed.count("7 of 7") == 5, printed


@pytest.mark.data
@pytest.mark.slow
def test_mixture_of_experts():
    pytest.importorskip("transformers")
    sizes = "--hidden 64 --intermediate 32 --layers 1 --prompt 16 --generated 2 --runs 1"
    printed = as_process("mixture_of_experts.py", *sizes.split())
    assert len(re.findall(r"│ +\de-0[5-9] │ +\de-0[5-9] │$", printed, re.M)) == 5, printed


@pytest.mark.data
@pytest.mark.slow
def test_ray_train():
    """On both backends the losses are the same; the example itself checks that in every step."""
    pytest.importorskip("ray.train.torch")
    printed = as_process("ray_train.py", "--steps", "4")
    assert "2 workers of Ray: losses agree in every step" in printed


@pytest.mark.data
@pytest.mark.slow
def test_notebook(tmp_path):
    """Every cell runs, and the last picture is drawn."""
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=100, resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert "race on inbox@0" in "".join(output.get("text", "") for output in outputs)


def test_every_example_is_tested():
    here = Path(__file__).read_text()
    assert all(
        re.search(rf'(example|as_process|start)\(\s*"{path.name}"', here)
        for path in EXAMPLES.glob("*.py")
    )


class Block(NamedTuple):
    """A fenced block of a document."""

    where: str
    language: str
    text: str

    @property
    def is_program(self):
        """Whether the block is Python that makes a world or a process group by itself, and begins
        with the command that runs it.
        """
        makes = "weft.init(" in self.text or "init_process_group(" in self.text
        return self.language == "python" and makes and self.text.startswith("#")


def blocks(document):
    text = (ROOT / document).read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(f"{document}:{text.count(chr(10), 0, found.start()) + 2}", found[1], found[2])


def docstring_snippets():
    """The indented paragraphs of docstrings that are Python and call something."""
    packages = ROOT / "weft", ROOT / "tools/weft_tools"
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                docstring := ast.get_docstring(node)
            ):
                for found in re.finditer(
                    r"(?<=\n\n)(?: {4}.*(?:\n(?=\n* {4})|\n\n|$))+", docstring + "\n\n"
                ):
                    text = textwrap.dedent(found[0])
                    if is_python(text):
                        yield Block(
                            f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}",
                            "python",
                            text,
                        )


def is_python(text):
    try:
        return any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(text)))
    except SyntaxError:
        return False


ALL = [block for document in DOCUMENTS for block in blocks(document)]
PROGRAMS = [block for block in ALL if block.is_program]
SNIPPETS = [
    block
    for block in (*ALL, *docstring_snippets())
    if block.language == "python" and not block.is_program
]


class Shell(NamedTuple):
    """A command of weft in a document, and the output shown for it."""

    where: str
    words: list[str]
    printed: str


def shell_lines(block):
    """The commands of a block, each with the lines below it up to the next prompt."""
    lines = [re.sub(r"\s+#.*", "", line) for line in block.text.splitlines()]
    starts = [i for i, line in enumerate(lines) if re.match(r"(\w*\$ )?(\.venv/bin/)?weft ", line)]
    for i in starts:
        words = shlex.split(lines[i].removeprefix("$ "))[1:]
        shown = []
        if lines[i].startswith("$ "):
            shown = lines[
                i + 1 : next(
                    (j for j in range(i + 1, len(lines)) if re.match(r"\w*\$ ", lines[j])),
                    len(lines),
                )
            ]
        yield Shell(block.where, words, "\n".join(shown))


COMMANDS = [command for block in ALL if not block.language for command in shell_lines(block)]
MENTIONED = {
    f"{document} {' '.join(words)}": words
    for document in DOCUMENTS
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", (ROOT / document).read_text())
    for part in span.split(";")
    if (words := part.split())[:1] == ["weft"]
}


def resolve(words):
    """The command that words name, the context that its group has parsed, and the remaining words."""
    command, context = typer.main.get_command(app), None
    while hasattr(command, "commands") and words and (found := command.get_command(None, words[0])):
        context = type(command).context_class(command, parent=context, info_name=command.name)
        command, words = found, words[1:]
    return command, context, words


def test_the_documents_have_programs_snippets_and_commands():
    assert PROGRAMS
    assert SNIPPETS
    assert COMMANDS
    assert MENTIONED
    assert any("weft/nn" in block.where for block in SNIPPETS)


@pytest.mark.data
@pytest.mark.parametrize("program", PROGRAMS, ids=[block.where for block in PROGRAMS])
@pytest.mark.slow
def test_programs_run(program, tmp_path):
    script, command = re.match(r"# (\w+\.py): run with\s+(\S+ run .*?\.py)", program.text).groups()
    (tmp_path / script).write_text(program.text)
    words = shlex.split(command)
    assert Path(words[0]).name == "weft"
    assert run(WEFT, *words[1:], cwd=tmp_path)


@pytest.mark.data
def test_snippets_run(tmp_path):
    on_ranks(snippets.run, 2, [(block.where, block.text) for block in SNIPPETS], tmp_path)


@pytest.mark.parametrize(
    "command", COMMANDS, ids=[f"{c.where} weft {' '.join(c.words)}" for c in COMMANDS]
)
def test_commands(command, tmp_path, monkeypatch):
    """The options exist; commands that only plan and predict print the output shown, with any text
    for "…".
    """
    found, group, rest = resolve(command.words)
    found.make_context(found.name, [*rest], parent=group)
    if command.words[0] in ("plan", "predict") and "fuzz" not in command.words:
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(app, command.words)
        assert done.exit_code == 0, done.output
        printed = re.sub(r"\s+", " ", done.stdout)
        for shown in re.split("…|\n", command.printed):
            assert re.sub(r"\s+", " ", shown).strip() in printed


@pytest.mark.parametrize("words", MENTIONED.values(), ids=[*MENTIONED])
def test_mentioned_commands_and_options_exist(words):
    command, _, rest = resolve(words[1:])
    assert not hasattr(command, "commands") or not [
        word for word in rest if not word.startswith("-")
    ]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= options


def test_the_table_of_places_names_existing_definitions():
    """Files and names in the table of docs/design.md exist: "path: name" or "path", from weft/ or
    from the root on.
    """
    design = (ROOT / "docs/design.md").read_text()
    table = design[design.index("### Where do I change") : design.index("**A new collective**")]
    found = re.findall(
        r"`([\w/*-]+\.(?:py|hpp|cpp|toml|mplstyle))(?:: (?:\w+(?:\.|::))?(\w+))?`", table
    )
    assert len(found) > 15
    for path, name in found:
        files = [file for root in (ROOT / "weft", ROOT) for file in root.glob(path)]
        assert files, path
        definition = (
            rf"^\s*(def|class) {name}\b|^{name}\b" if path.endswith(".py") else rf"\b{name}\b"
        )
        assert re.search(definition, files[0].read_text(), re.M), (path, name)
