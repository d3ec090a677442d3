"""The benchmark of serving: steps of continuous batching through one tensor-parallel transformer
block, each step by three implementations.

Each step has a token for every sequence that is being decoded, and a piece of a prompt. No two
steps have the same number of tokens, so every shape is new when it is timed. Attention itself is
left out, as no cache of keys and values is kept: an elementwise mix of q, k and v is in its place.

The implementations have the same weights and take the same tokens, one after the other: torch's
tensor-parallel styles on gloo, the same plan of styles with those of `weft.nn`, and rank 0 alone
with the cores and threads of all ranks, while the other ranks sleep.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor.parallel as torch_styles
import torch.nn.functional as F
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft.nn
from weft.measure.progress import progress
from weft.measure.timing import Stopwatch, largest, per_call, race
from weft.world import World
from weft_tools.bench import tables
from weft_tools.bench.alone import ALONE, all_cores
from weft_tools.bench.between_ranks import session
from weft_tools.bench.harness import environment, verified, worst
from weft_tools.bench.neighbours import neighbours
from weft_tools.bench.pictures import COLOURS, picture
from weft_tools.bench.settings.serving import ServingSettings
from weft_tools.bench.verification import RUNS, Check, compare

TORCH, WEFT = "torch on gloo", "weft.nn"
IMPLEMENTATIONS = (ALONE, TORCH, WEFT)

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""The largest error of an element relative to the largest element of its step: sums are rounded in
different orders.
"""


class Step(NamedTuple):
    """The tokens of one step: of sequences that are decoded, and of a prompt."""

    decode: int
    prefill: int


def stream(settings: ServingSettings) -> list[Step]:
    """The steps, beginning with those of the warm-up: all numbers of tokens differ, and small
    numbers are more likely than large ones.
    """
    draw = random.Random(settings.seed)
    most = settings.decode + settings.prefill
    # the first is n with probability ~ 1/n
    late = {tokens: draw.expovariate(1 / tokens) for tokens in range(2, most + 1)}
    totals = sorted(late, key=late.__getitem__)[: settings.warmup + settings.steps]
    draw.shuffle(totals)
    decoded = [
        draw.randint(max(1, tokens - settings.prefill), min(settings.decode, tokens - 1))
        for tokens in totals
    ]
    return [Step(decode, tokens - decode) for decode, tokens in zip(decoded, totals, strict=True)]


class Block(nn.Module):
    """A transformer's block: (tokens, hidden) to the same, with an elementwise mix in place of
    attention.
    """

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.q, self.k, self.v, self.o = (linear(hidden, hidden) for _ in range(4))
        self.gate = linear(hidden, intermediate)
        self.up = linear(hidden, intermediate)
        self.down = linear(intermediate, hidden)
        for layer in (self.q, self.k, self.v, self.o, self.gate, self.up, self.down):
            # so that every layer contributes to the result
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.o(F.silu(self.q(y)) * self.k(y) + self.v(y))
        y = self.mlp_norm(x)
        return torch.add(x, self.down(F.silu(self.gate(y)) * self.up(y)))


class Serving:
    """The tokens of one rank, the implementations by name, and the last result of each."""

    def __init__(self, settings: ServingSettings, world: World) -> None:
        self.settings = settings
        self.world = world
        self.stopwatch = Stopwatch(world)
        self.most = settings.decode + settings.prefill
        dtype = getattr(torch, settings.dtype)
        torch.manual_seed(settings.seed)
        whole = Block(settings.hidden, settings.intermediate).to(dtype).eval()
        self.everything = torch.randn(
            self.most + 1 + max(RUNS, settings.warmup + settings.steps), settings.hidden
        ).to(dtype)
        self.exact = deepcopy(whole).double()
        self.implementations: dict[str, Callable[[Tensor], Tensor | None]] = {
            ALONE: whole if world.rank == 0 else lambda _: None,
            TORCH: self._parallel(whole, torch_styles),
            WEFT: self._parallel(whole, weft.nn),
        }
        self.x = self.everything  # during the race, the tokens of the step
        self.made: dict[str, Tensor | None] = {}
        # elements that differ from the reference implementation's, in the race
        self.mismatches = dict.fromkeys(IMPLEMENTATIONS, 0)

    def _parallel(self, whole: Block, styles: ModuleType) -> nn.Module:
        plan = {name: styles.ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {name: styles.RowwiseParallel() for name in ("o", "down")}
        block = torch_styles.parallelize_module(
            deepcopy(whole), init_device_mesh("cpu", (self.world.ranks,)), plan
        )
        if styles is weft.nn:
            weft.nn.freeze(block)
        return block

    def verify(self, name: str, run: int) -> Check:
        """Compare the result of an implementation, on every rank that has one, with the exact
        block; the worst of all ranks.
        """
        x = self.everything[run : run + self.most + 1]  # more tokens than any step has
        self.time(name, x)
        return worst(self.world, self._compare(self.made.pop(name), self.exact(x.double())))

    def time(self, name: str, x: Tensor) -> float:
        """This rank's seconds for one step; the result is left in `made`."""

        def call() -> None:
            self.made[name] = self.implementations[name](x)

        with all_cores(self.world) if name == ALONE else nullcontext():
            return self.stopwatch.time(call)

    def race(self) -> dict[str, list[float]]:
        """Seconds of each measured step by implementation; all run each step, one after the other,
        and their results are compared.
        """
        steps = stream(self.settings)
        calls = [lambda name=name: self.time(name, self.x) for name in IMPLEMENTATIONS]
        rounds = enumerate(steps)
        iterations = self.settings.steps
        with progress("measuring", len(steps), shown=self.world.rank == 0) as advance:

            def next_step() -> None:
                self.compare_results()
                number, step = next(rounds)
                self.x = self.everything[number : number + sum(step)]
                advance()

            found = race(
                calls,
                [iterations] * len(IMPLEMENTATIONS),
                self.settings.warmup,
                iterations,
                next_step,
            )
            self.compare_results()
        return {
            name: largest(self.world, seconds)
            for name, seconds in zip(IMPLEMENTATIONS, found, strict=True)
        }

    def compare_results(self) -> None:
        """Count the elements in which results of the last step differ from the first result on this
        rank.
        """
        results = [
            (name, y) for name in IMPLEMENTATIONS if (y := self.made.pop(name, None)) is not None
        ]
        for name, y in results[1:]:
            self.mismatches[name] += self._compare(y, results[0][1].double()).wrong

    def _compare(self, y: Tensor | None, expected: Tensor) -> Check:
        return (
            Check(0)
            if y is None
            else compare(y, expected, TOLERANCE[self.settings.dtype] * expected.abs().max())
        )


def measure(settings: ServingSettings) -> dict[str, Any]:
    """Measure on this rank, collectively; the result as a JSON object.

    For each implementation, `time_us` summarizes the steps, `steps_us` lists them in the order of
    `steps`, each on the slowest rank; `tokens_per_s` is the tokens of all steps over their total
    time.
    """
    alone = (
        "one process cannot have the cores of several: run weft bench serving without a "
        "launcher there"
    )
    with session(settings.threads, alone) as world, neighbours(world, settings.neighbours):
        serving = Serving(settings, world)
        seconds, checks = verified(IMPLEMENTATIONS, serving.verify, serving.race)
        mismatches = largest(world, [*serving.mismatches.values()])
        wrong = {
            name: check.wrong + int(more)
            for name, check, more in zip(IMPLEMENTATIONS, checks, mismatches, strict=True)
        }
        tokens = sum(map(sum, steps := stream(settings)[settings.warmup :]))
        return {
            "benchmark": "serving",
            "ranks": world.ranks,
            **{
                name: getattr(settings, name)
                for name in ("hidden", "intermediate", "decode", "prefill", "dtype")
            },
            "neighbours": settings.neighbours,
            "tolerance": TOLERANCE[settings.dtype],
            "steps": [step._asdict() for step in steps],
            "ways": {
                name: {
                    "tokens_per_s": tokens / sum(seconds[name]),
                    "time_us": per_call(seconds[name])._asdict(),
                    "steps_us": [1e6 * step for step in seconds[name]],
                    "wrong": wrong[name],
                }
                for name in IMPLEMENTATIONS
            },
            "verified": not any(wrong.values()),
            **environment(world, settings),
        }


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the figures of each implementation, and notes on how to read them."""
    console.print(Text(title(result), "bold"), soft_wrap=True)
    table = tables.table(("", "tokens/s", "p50 ms", "p99 ms", "weft"))
    for name, figures in result["ways"].items():
        weft_is = (
            Text()
            if name == WEFT
            else tables.ratio_in(
                result, result["ways"][WEFT]["tokens_per_s"] / figures["tokens_per_s"]
            )
        )
        times = (f"{figures['time_us'][key] / 1e3:.2f}" for key in ("median", "p99"))
        table.add_row(
            tables.named(name, figures["wrong"]), f"{figures['tokens_per_s']:,.0f}", *times, weft_is
        )
    console.print(table)
    tokens = _tokens(result)
    alone = result["ranks"] * result["machine"]["threads_per_rank"]
    tables.print_notes(
        console,
        f"{len(tokens)} steps of {min(tokens)} to {max(tokens)} tokens, no two of the same number; "
        "p50, p99: of a step. "
        "weft: how many times as many tokens/s.",
        "One block without attention itself; an elementwise mix is in its place. One process: "
        f"rank 0 with {alone} threads.",
        tables.verdict(
            result,
            "float64 before and after timing, and every step one implementation against "
            "another; at most "
            f"{result['tolerance']:g} of the "
            "largest element off.",
        ),
        *tables.disturbed(result),
        tables.machine(result),
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the time of each step over its tokens, and the distribution of the times, into a PNG or
    SVG file.
    """
    with picture(path, 11, 4.4, title(result), verified=result["verified"]) as figure:
        over, shares = figure.subplots(1, 2)
        for name, figures in result["ways"].items():
            times = [time / 1e3 for time in figures["steps_us"]]
            over.scatter(_tokens(result), times, s=9, color=COLOURS[name], label=name)
            shares.ecdf(times, color=COLOURS[name])
        over.set(title="milliseconds of a step", xlabel="tokens of the step", ylim=(0, None))
        shares.set(
            title="share of the steps within a time",
            xlabel="milliseconds of a step",
            xscale="log",
        )
        figure.legend(loc="outside lower center", ncols=len(IMPLEMENTATIONS))


def title(result: dict[str, Any]) -> str:
    """The ranks, the sizes of the block and the dtype."""
    return (
        f"serving: {result['ranks']} ranks, a block of {result['hidden']} and "
        f"{result['intermediate']}, {result['dtype']}{tables.loaded(result)}"
    )


def _tokens(result: dict[str, Any]) -> list[int]:
    return [step["decode"] + step["prefill"] for step in result["steps"]]
