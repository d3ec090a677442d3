"""``weft bench p2p``: its options and where its result goes."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli import options
from weft.cli.options import Iterations, Json, Plot, Seed, Threads, Warmup

app = typer.Typer()


@app.command()
def p2p(
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=2, help="Ranks to start; 2 unless a launcher did.")] = None,
    sizes: Annotated[str, typer.Option(metavar="FIRST:LAST:FACTOR,…", help="Bytes of a copy; K, M, G are binary.")] = "4K:64M:4",
    warmup: Warmup = 2,
    iterations: Iterations = 40,
    seed: Seed = 0,
    json_file: Json = None,
    plot: Plot = None,
    threads: Threads = None,
) -> None:
    """One-sided put and get over size, synchronous and asynchronous, beside local copies."""
    from weft.bench import p2p as bench

    joined, ranks = options.world_size(ranks)
    if ranks < 2:
        options.refuse("--ranks", "a single rank has no peer to copy to: use 2 or more")
    options.check_files(json_file, None, plot)
    bytes_of = tuple(options.parse_sizes(sizes, "--sizes"))
    settings = bench.Settings(bytes_of, warmup, iterations, seed, threads=options.threads_for(threads, ranks))
    options.hand_over(bench.measure, settings, joined, ranks, bench.print_tables, bench.draw, json_file, plot)
