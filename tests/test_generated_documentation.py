"""The tables that `make docs` makes from the source."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def generator(request, monkeypatch):
    """The module of this name in .ci/."""
    spec = importlib.util.spec_from_file_location(request.param, ROOT / f".ci/{request.param}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, request.param, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("generator", ["constants"], indirect=True)
def test_constants_are_listed_with_machine_and_gain(generator):
    source = '''
A = 1 << 4
"""Rows of a piece.

Measured on a 2-core machine: twice
as fast.
"""
B = 2
"""Bytes of a format."""
C = 3
'''
    [constant] = generator.of_python("a.py", source)
    assert constant == (
        "a.py",
        "A",
        "1 << 4",
        "Rows of a piece.",
        "a 2-core machine",
        "twice as fast.",
    )
    source = """
// The most rows.
// Measured on a 2-core machine: twice as fast.
constexpr size_t kA = size_t{8} << 10;
// bytes of a format
constexpr int kB = 2;
"""
    [constant] = generator.of_native("a.hpp", source)
    assert constant == (
        "a.hpp",
        "kA",
        "8 << 10",
        "The most rows.",
        "a 2-core machine",
        "twice as fast.",
    )
    assert {"SHARED_SLOTS", "kShared"} <= {constant.name for constant in generator.constants()}


@pytest.mark.parametrize("generator", ["error_index"], indirect=True)
def test_errors_are_listed_by_class(generator):
    source = """
raise PeerLost(f"rank {rank} failed" if rank else "none")
raise ValueError("a wrong " f"{name}: " + text)
raise error
"""
    assert [*generator.of_module("a.py", source, {"PeerLost"})] == [
        ("PeerLost", "a.py", "rank … failed"),
        ("PeerLost", "a.py", "none"),
        ("ValueError", "a.py", "a wrong …: …"),
    ]
    assert {"PlanError", "PeerTimeout", "ValueError"} <= {
        error.kind for error in generator.errors()
    }


@pytest.mark.parametrize("generator", ["error_index"], indirect=True)
def test_messages_are_found_by_the_search(generator, tmp_path):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="errors.md"), url="errors.html")
    row = "<tr>\n<td><code>a rank &lt;{}&gt;</code></td>\n<td>weft/a.py</td>\n</tr>\n"
    content = "".join(row.format(name) for name in ("…", "…", "one"))
    other = "<tr><td><code>ValueError</code></td><td>wrong arguments</td></tr>"
    made = generator.on_page_content(content + other, page)
    assert [*re.findall(r'<tr id="([^"]*)"', made)] == ["a-rank", "a-rank-", "a-rank-one"]
    assert made.endswith(other)
    (tmp_path / "search").mkdir()
    (tmp_path / "search/search_index.json").write_text('{"docs":[{"title":"first"}]}')
    generator.on_post_build(SimpleNamespace(site_dir=tmp_path))
    text = (tmp_path / "search/search_index.json").read_text()
    _, _, _, last = json.loads(text)["docs"]
    assert last == {
        "location": "errors.html#a-rank-one",
        "title": "a rank &lt;one&gt;",
        "text": "weft/a.py",
    }
    # pages that are opened from a folder cannot load it otherwise
    assert (tmp_path / "search/search_index.js").read_text() == f"var __index = {text}"


@pytest.mark.slow
def test_a_page_from_a_folder_has_a_worker(tmp_path):
    """The search of the site runs in one, and browsers start none for files."""
    playwright = pytest.importorskip("playwright.sync_api")
    shim = ROOT / "docs/javascripts/iframe-worker.js"
    (tmp_path / "shim.js").write_text(shim.read_text())
    (tmp_path / "more.js").write_text("var more = 1;")
    (tmp_path / "worker.js").write_text(
        "const ready = importScripts('more.js');"
        "addEventListener('message', async e => { await ready; postMessage(e.data + more); });"
    )
    (tmp_path / "page.html").write_text(
        "<body><script src=shim.js></script><script>const worker = new Worker('worker.js');"
        "const answer = new Promise(done => worker.addEventListener('message', e => done(e.data)));"
        "worker.postMessage(41);</script></body>"
    )
    with playwright.sync_playwright() as running:
        path = shutil.which("chromium")
        try:
            browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {error}")
        view = browser.new_page()
        view.goto((tmp_path / "page.html").as_uri())
        assert view.evaluate("answer") == 42
        browser.close()


@pytest.mark.parametrize("generator", ["house"], indirect=True)
def test_the_diagram_of_the_packages_is_that_of_today(generator):
    """`make house` writes it."""
    assert generator.diagram() in generator.PAGE.read_text()
