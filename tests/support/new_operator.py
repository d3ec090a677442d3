"""Programs that use the operator of docs/new-operator.md, in a copy of weft that has its two files,
and print their findings as JSON.
"""

from __future__ import annotations

import json
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.ops import driver, operator
from weft.plan.proof import verify
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request

NAME = "matmul_exchange"
COMMANDS = (
    "plan show matmul-exchange -n 3",
    "predict matmul-exchange --ranks 4 --shape 8192x4096x512",
    "bench matmul-exchange --shape 256x32x16 --iterations 2 --warmup 1 --threads 1",
    "tune matmul-exchange --shape 256x32x16 --iterations 1 --threads 1",
)


def compute(ranks):
    """The calls of a rank, compared with the definition."""
    record = operator.find(NAME)
    drawn = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    weights = [torch.randn(8, 5, generator=each) for each in drawn]
    with weft.init(timeout=20) as world:
        rank = world.rank

        def compare(rows, **options):
            """Each rank sends `rows` rows to each rank, and one more to rank 0."""
            parts = [rows + 1, *[rows] * (ranks - 1)]
            inputs = [torch.randn(sum(parts), 8, generator=each) for each in drawn]
            found = weft.matmul_exchange(inputs[rank], weights[rank], shard_rows=parts, **options)
            kept = [part * ranks for part in parts]
            torch.testing.assert_close(found, record.reference(inputs, weights, kept)[rank])

        compare(0)
        for rows, algorithm in product((1, 7, 600), record.schedule.algorithms):
            compare(rows, algorithm=algorithm)
            with patch.object(driver, "run", side_effect=AssertionError("it was not cached")):
                compare(rows, algorithm=algorithm)
        for _ in range(20):  # the first calls measure the candidates, on busy cores twice
            compare(600)
        rows = [601, *[600] * (ranks - 1)]
        a = torch.ones(sum(rows), 8)
        explained = weft.explain(a, weights[rank], operator=NAME, shard_rows=rows)
        if ranks == 2:
            double = torch.compile(
                lambda a, b: 2 * weft.matmul_exchange(a, b), fullgraph=True, backend="aot_eager"
            )
            a, b = torch.full((64, 8), rank + 1.0), torch.ones(8, 4)
            expected = torch.tensor([16.0, 32.0]).repeat_interleave(32)[:, None].expand(64, 4)
            torch.testing.assert_close(double(a, b), expected)
    return explained


def replace_in_graphs():
    """Compile all-to-alls of products as torch writes them; the operators of weft in the graphs."""
    # loading the compiler takes seconds, also in processes that compile nothing
    from torch._dynamo.utils import counters
    from torch.distributed import _functional_collectives as funcol

    from support.inductor import QUICK

    dist.init_process_group("weft")
    rank, everyone = dist.get_rank(), dist.group.WORLD
    weft.enable_async_tp()

    def program(a, b):
        """All-to-alls of equal parts, of other parts, and along another dimension than the first."""
        columns = torch.cat((a @ (b + 2)).chunk(2, 1))
        return [
            funcol.all_to_all_single(a @ b, None, None, everyone),
            funcol.all_to_all_single(a @ (b + 1), [2 + 2 * rank] * 2, [2, 4], everyone),
            funcol.all_to_all_single(columns, None, None, everyone),
        ]

    a, b = torch.randn(6, 8) + rank, torch.randn(8, 4)
    found = torch.compile(program, fullgraph=True, options=QUICK)(a, b)
    torch.testing.assert_close(found, program(a, b))
    dist.destroy_process_group()
    return dict(counters["weft"])


def print_graphs():
    """Print the operators of weft in the compiled graphs of each rank."""
    print(json.dumps(weft.launch(replace_in_graphs, 2, threads=1)))


def print_findings():
    """Print the findings of all but compiled graphs."""
    record = OPERATORS[NAME]
    for algorithm, ranks, pieces in product(record.algorithms, (1, 2, 3, 4), (1, 3)):
        verify(record.plan(Request(ranks, pieces, algorithm)))
    explained = {ranks: weft.launch(compute, ranks, ranks, threads=1)[0] for ranks in (2, 3)}
    printed = {}
    for command in COMMANDS:
        done = CliRunner().invoke(app, command.split())
        if done.exception and done.exit_code == 1:
            raise AssertionError(f"{command}: {done.output}") from done.exception
        printed[command.split()[0]] = (done.exit_code, done.output)
    found = {"public": NAME in dir(weft), "explained": explained, "printed": printed}
    print(json.dumps(found))
