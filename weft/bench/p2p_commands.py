"""``weft bench p2p``: its options and where its result goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.bench.collective_commands import _measure, _parse_sizes
from weft.bench.commands import _check_files, _refuse, _world_size

app = typer.Typer()


@app.command()
def p2p(
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=2, help="Ranks to start; 2 unless a launcher did.")] = None,
    sizes: Annotated[str, typer.Option(metavar="FIRST:LAST:FACTOR,…", help="Bytes of a copy; K, M, G are binary.")] = "4K:64M:4",
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.")] = 2,
    iterations: Annotated[int, typer.Option(min=1, help="Rounds measured.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Of the random data.")] = 0,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; -: stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw the bandwidths.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads per rank; by default the cores are shared out.")
    ] = None,
) -> None:
    """One-sided put and get over size, synchronous and asynchronous, beside local copies."""
    from weft.bench import p2p as bench
    from weft.launcher import threads_per_rank

    joined, ranks = _world_size(ranks)
    if ranks < 2:
        _refuse("--ranks", "a single rank has no peer to copy to: use 2 or more")
    _check_files(json_file, None, plot)
    settings = bench.Settings(
        tuple(_parse_sizes(sizes, "--sizes")), warmup, iterations, seed, threads=threads or threads_per_rank(ranks)
    )
    _measure(bench.measure, settings, joined, ranks, bench.print_tables, bench.draw, json_file, plot)
