"""A hook of mkdocs: the site also has pages of files outside docs/, and links to these files lead
there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    pages = {name: (ROOT / name).read_text() for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
    for path in sorted((ROOT / "examples").glob("*.py")):
        pages[f"examples/{path.stem}.md"] = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
    for path in sorted((ROOT / "examples/kubernetes").glob("*.yaml")):
        pages[f"examples/{path.stem}.md"] = f"# {path.name}\n\n```yaml\n{path.read_text()}```\n"
    pages["reference/command-line.md"] = command_line()
    pages["examples/notebook.md"] = notebook(ROOT / "examples/notebook.ipynb")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def command_line() -> str:
    """The Markdown of every command with its options."""
    import typer
    from typer.cli import get_docs_for_click

    from weft.cli import app

    command = typer.main.get_command(app)
    with command.make_context("weft", [], resilient_parsing=True) as context:
        return str(get_docs_for_click(obj=command, ctx=context, name="weft", title="Command line"))


def notebook(path: Path) -> str:
    """The Markdown of a notebook: its cells, with the text and the pictures they have printed."""
    import nbformat

    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            parts.append(shown(output.get("data", {"text/plain": output.get("text", "")})))
    return "\n\n".join(parts).replace("](../docs/", "](../")


def shown(data: dict[str, Any]) -> str:
    """One output of a cell."""
    if "image/png" in data:
        return f"![Output](data:image/png;base64,{''.join(data['image/png'].split())})"
    return f"```text\n{data['text/plain']}\n```"


def wrapped(block: re.Match[str]) -> str:
    """A block of commands, whose lines style.css breaks on every screen; others have columns."""
    language, text = block.groups()
    if language or re.search(r"\S {2,}\S|[─-▟]", text):
        return block[0]
    return f"``` {{ .text .wrapped }}\n{text}```"


def drawn(block: re.Match[str]) -> str:
    """A Mermaid diagram as SVG: browsers draw one only with a script from a network."""
    import mermaidx

    return f"<div>{mermaidx.render(block[1]).svg()}</div>\n"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links from docs/ to files outside it, and from these to docs/, as links between pages."""
    if page.file.src_uri.startswith(("reference/", "examples/")):
        return markdown
    markdown = re.sub(r"^```mermaid\n(.*?)^```$", drawn, markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = re.sub(r"^```(\w*)\n(.*?)^```$", wrapped, markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = re.sub(r"\]\(\.\./README\.md", "](index.md", markdown)
    markdown = re.sub(
        r"\]\(\.\./examples/(?:kubernetes/)?(\w+)\.(?:py|ipynb|yaml)", r"](examples/\1.md", markdown
    )
    return re.sub(r"\]\((?:\.\./|docs/)", "](", markdown)
