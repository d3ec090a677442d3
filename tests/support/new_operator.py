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
from weft.ops import fused, operator
from weft.plan.proof import verify
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request

NAME = "matmul_max"
COMMANDS = (
    "plan show matmul-max --rows 4,4,3",
    "predict matmul-max --ranks 4 --shape 8192x4096x512",
    "bench matmul-max --shape 256x32x16 --iterations 2 --warmup 1 --threads 1",
    "tune matmul-max --shape 256x32x16 --iterations 1 --threads 1",
)


def compute(ranks):
    """The calls of a rank, compared with the definition."""
    record = operator.find(NAME)
    drawn = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    weights = [torch.randn(8, 5, generator=each) for each in drawn]
    with weft.init(timeout=20) as world:
        rank = world.rank

        def max_of(rows, **options):
            inputs = [torch.randn(rows, 8, generator=each) for each in drawn]
            found = weft.matmul_max(inputs[rank], weights[rank], **options)
            torch.testing.assert_close(found, record.reference(inputs, weights, ())[rank])

        max_of(0)
        for rows, algorithm in product((1, 7, 600), record.schedule.algorithms):
            max_of(rows, algorithm=algorithm)
            with patch.object(fused, "run", side_effect=AssertionError("it was not cached")):
                max_of(rows, algorithm=algorithm)
        for _ in range(8):  # the first calls measure the candidates
            max_of(600)
        explained = weft.explain(torch.ones(600, 8), weights[rank], operator=NAME)
        if ranks == 2:
            double = torch.compile(
                lambda a, b: 2 * weft.matmul_max(a, b), fullgraph=True, backend="aot_eager"
            )
            a, b = torch.full((64, 8), rank + 1.0), torch.ones(8, 4)
            torch.testing.assert_close(double(a, b), torch.full((64, 4), 32.0))
    return explained


def replace_in_graphs():
    """Compile sums and maxima of products as torch writes them; the operators of weft in the graphs."""
    # loading the compiler takes seconds, also in processes that compile nothing
    from torch._dynamo.utils import counters
    from torch.distributed import _functional_collectives as funcol

    from support.inductor import QUICK

    dist.init_process_group("weft")
    rank, everyone = dist.get_rank(), dist.group.WORLD
    weft.enable_async_tp()

    def program(a, b, op):
        return funcol.all_reduce(a @ b, op, everyone)

    a, b = torch.randn(6, 8) + rank, torch.randn(8, 4)
    for op in ("max", "sum", "min"):
        found = torch.compile(program, fullgraph=True, options=QUICK)(a, b, op)
        torch.testing.assert_close(found, program(a, b, op))
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
