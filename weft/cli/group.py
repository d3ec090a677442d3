"""Groups of commands: weft's own, and those of other distributions, which name them in entry points
as apps of typer. These are imported when they are used.
"""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from weft import installation
from weft.cli.options import plain


class Commands(typer.core.TyperGroup):
    """The group of all commands, which rejects values in the words of users, and recommends no
    command that is not installed.

    Attributes:
        path: the words before its commands.
        first: the commands that help lists first, in this order: groups would come before them.
        of_tools: the commands that the distribution of tools brings.
        entries: the entry points of commands of other distributions.
    """

    path = "weft"
    first: tuple[str, ...] = ("run", "doctor", "bench")
    of_tools: tuple[str, ...] = ("bench", "report", "show", "predict", "calibrate")
    entries = "weft.commands"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if "bench" not in self._others:
            paragraphs = (self.help or "").split("\n\n")
            self.help = "\n\n".join(each for each in paragraphs if "weft bench" not in each)

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in sorted(entry_points(group=self.entries))}

    def list_commands(self, ctx: Any) -> list[str]:
        names = {*super().list_commands(ctx), *self._others}
        first = [name for name in self.first if name in names]
        return [*dict.fromkeys((*first, *super().list_commands(ctx), *self._others))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in self._others:
            found = typer.main.get_command(self._others[cmd_name].load())
            found.name = cmd_name
            self.add_command(found)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.of_tools and args[0] not in self.list_commands(ctx):
            comes = installation.comes_with_tools(f"{self.path} {args[0]}")
            typer.echo(f"weft: {comes}", err=True)
            raise typer.Exit(2)
        if args[0] not in self.commands:  # which is where similar words are looked for
            for name in self._others:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = plain(error.message, error.__cause__)
            raise


class PlanCommands(Commands):
    """The group of the commands of plans."""

    path = "weft plan"
    first = ("show",)
    of_tools = ("import", "export", "fuzz", "mutants")
    entries = "weft.plan.commands"
