"""The benchmark of serving: steps of continuous batching through one tensor-parallel transformer
block, step by step three ways.

Each step has a token for every sequence that is being decoded, and a piece of a prompt. All steps
have other numbers of tokens, so every shape is met for the first time when it is timed. Attention
itself is left out, as no cache of keys and values is kept: an elementwise mix of q, k and v is in
its place.

All ways have the same weights and take the same tokens in turn: torch's tensor-parallel styles on
gloo, the same plan of styles with those of `weft.nn`, and rank 0 alone with the cores and threads
of all ranks, while the others sleep.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from time import process_time, sleep
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
from weft.bench import tables
from weft.bench.harness import progress, verified, where, worst
from weft.measure.timing import Stopwatch, largest, per_call, race, session
from weft.measure.verification import RUNS, Check, compare
from weft.pictures import COLOURS, picture
from weft.world import World, placement
from weft_benchmarks.settings import ServingSettings

ALONE, TORCH, WEFT = WAYS = ("one process", "torch on gloo", "weft.nn")

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""How far any element may be off, relative to the largest of its step: rounding, in a different
order of sums.
"""


class Step(NamedTuple):
    """Tokens of one step: of sequences that are decoded, and of a prompt."""

    decode: int
    prefill: int


def stream(settings: ServingSettings) -> list[Step]:
    """The steps, those that warm up first: no two of the same number of tokens, and small numbers
    more likely than large ones.
    """
    draw, most = random.Random(settings.seed), settings.decode + settings.prefill
    late = {
        tokens: draw.expovariate(1 / tokens) for tokens in range(2, most + 1)
    }  # the first to come is n with probability ~ 1/n
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
        self.attention_norm, self.mlp_norm = (
            nn.RMSNorm(hidden, eps=1e-5),
            nn.RMSNorm(hidden, eps=1e-5),
        )
        self.q, self.k, self.v, self.o = (linear(hidden, hidden) for _ in range(4))
        self.gate, self.up, self.down = (
            linear(hidden, intermediate),
            linear(hidden, intermediate),
            linear(intermediate, hidden),
        )
        for layer in (self.q, self.k, self.v, self.o, self.gate, self.up, self.down):
            nn.init.normal_(
                layer.weight, std=layer.in_features**-0.5
            )  # so that every layer matters in the result

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.o(F.silu(self.q(y)) * self.k(y) + self.v(y))
        y = self.mlp_norm(x)
        return torch.add(x, self.down(F.silu(self.gate(y)) * self.up(y)))


class Serving:
    """One rank's tokens, the ways of computing them by name, and what each made of them last."""

    def __init__(self, settings: ServingSettings, world: World) -> None:
        self.settings, self.world, self.stopwatch = settings, world, Stopwatch(world)
        self.most, dtype = settings.decode + settings.prefill, getattr(torch, settings.dtype)
        torch.manual_seed(settings.seed)
        whole = Block(settings.hidden, settings.intermediate).to(dtype).eval()
        self.everything = torch.randn(
            self.most + 1 + max(RUNS, settings.warmup + settings.steps), settings.hidden
        ).to(dtype)
        self.exact = deepcopy(whole).double()
        self.ways: dict[str, Callable[[Tensor], Tensor | None]] = {
            ALONE: whole if world.rank == 0 else lambda _: None,
            TORCH: self._parallel(whole, torch_styles),
            WEFT: self._parallel(whole, weft.nn),
        }
        self.x = self.everything  # in the race the tokens of the step
        self.made: dict[str, Tensor | None] = {}
        self.apart = dict.fromkeys(
            WAYS, 0
        )  # elements that differ from those of another way, in the race

    def _parallel(self, whole: Block, styles: ModuleType) -> nn.Module:
        plan = {name: styles.ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {name: styles.RowwiseParallel() for name in ("o", "down")}
        return torch_styles.parallelize_module(
            deepcopy(whole), init_device_mesh("cpu", (self.world.ranks,)), plan
        )

    def verify(self, way: str, run: int) -> Check:
        """Compare the way's result, on every rank that has one, with the exact block; the worst of
        all ranks.
        """
        x = self.everything[run : run + self.most + 1]  # a number of tokens that no step has
        self.time(way, x)
        return worst(self.world, self._compare(self.made.pop(way), self.exact(x.double())))

    def time(self, way: str, x: Tensor) -> float:
        """This rank's seconds for one step; the result is left in `made`."""

        def call() -> None:
            self.made[way] = self.ways[way](x)

        with nullcontext() if way != ALONE or self.world.rank else self._alone():
            return self.stopwatch.time(call)

    def race(self) -> dict[str, list[float]]:
        """Seconds of each measured step by way; all take each step in turn, and their results are
        compared.
        """
        steps, turns = (
            stream(self.settings),
            [lambda way=way: self.time(way, self.x) for way in WAYS],
        )
        rounds, iterations = enumerate(steps), self.settings.steps
        with progress("measuring", len(steps), shown=self.world.rank == 0) as advance:

            def next_step() -> None:
                self.agree()
                number, step = next(rounds)
                self.x = self.everything[number : number + sum(step)]
                advance()

            found = race(
                turns, [iterations] * len(WAYS), self.settings.warmup, iterations, next_step
            )
            self.agree()
        return {way: largest(self.world, seconds) for way, seconds in zip(WAYS, found, strict=True)}

    def agree(self) -> None:
        """Count where results of the last step differ from those of the first way that has one on
        this rank.
        """
        results = [(way, y) for way in WAYS if (y := self.made.pop(way, None)) is not None]
        for way, y in results[1:]:
            self.apart[way] += self._compare(y, results[0][1].double()).wrong

    def _compare(self, y: Tensor | None, expected: Tensor) -> Check:
        return (
            Check(0)
            if y is None
            else compare(y, expected, TOLERANCE[self.settings.dtype] * expected.abs().max())
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let this rank have the cores and threads of all; afterwards those that it lets go sleep."""
        threads, own = torch.get_num_threads(), os.sched_getaffinity(0)
        placement.bind_threads(frozenset[int]().union(*self.world.cores))
        torch.set_num_threads(threads * self.world.ranks)
        torch.zeros(threads * self.world.ranks << 15).add_(
            1
        )  # the threads are started here, and not when they are timed
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            placement.bind_threads(own)
            _settle()


def measure(settings: ServingSettings) -> dict[str, Any]:
    """Measure on this rank, collectively; the result as a JSON object.

    Of each way `time_us` is of a step, `steps_us` are all of them, in the order of `steps`, each on
    the slowest rank; `tokens_per_s` are those of all steps over the time of all steps.
    """
    alone = "one process cannot have the cores of several: run weft bench serving by itself there"
    with session(settings.threads, alone) as world:
        serving = Serving(settings, world)
        seconds, checks = verified(WAYS, serving.verify, serving.race)
        apart = largest(world, [*serving.apart.values()])
        wrong = {
            way: check.wrong + int(more)
            for way, check, more in zip(WAYS, checks, apart, strict=True)
        }
        tokens = sum(map(sum, steps := stream(settings)[settings.warmup :]))
        return {
            "benchmark": "serving",
            "ranks": world.ranks,
            **{
                name: getattr(settings, name)
                for name in ("hidden", "intermediate", "decode", "prefill", "dtype")
            },
            "tolerance": TOLERANCE[settings.dtype],
            "steps": [step._asdict() for step in steps],
            "ways": {
                way: {
                    "tokens_per_s": tokens / sum(seconds[way]),
                    "time_us": per_call(seconds[way])._asdict(),
                    "steps_us": [1e6 * step for step in seconds[way]],
                    "wrong": wrong[way],
                }
                for way in WAYS
            },
            "verified": not any(wrong.values()),
            **where(world),
        }


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the figures of each way, and what one must know to read them."""
    console.print(Text(title(result), "bold"), soft_wrap=True)
    table = tables.table(("", "tokens/s", "p50 ms", "p99 ms", "weft"))
    for name, way in result["ways"].items():
        weft_is = (
            Text()
            if name == WEFT
            else tables.ratio(result["ways"][WEFT]["tokens_per_s"] / way["tokens_per_s"])
        )
        times = (f"{way['time_us'][key] / 1e3:.2f}" for key in ("median", "p99"))
        table.add_row(
            tables.named(name, way["wrong"]), f"{way['tokens_per_s']:,.0f}", *times, weft_is
        )
    console.print(table)
    tokens, alone = _tokens(result), result["ranks"] * result["machine"]["threads_per_rank"]
    tables.tell(
        console,
        f"{len(tokens)} steps of {min(tokens)} to {max(tokens)} tokens, no two of the same number; "
        "p50, p99: of a step. "
        "weft: how many times as many tokens/s.",
        "One block without attention itself; an elementwise mix is in its place. One process: "
        f"rank 0 with {alone} threads.",
        tables.verdict(
            result,
            "float64 before and after timing, and every step one way against another; at most "
            f"{result['tolerance']:g} of the "
            "largest element apart.",
        ),
        tables.machine(result),
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the time of each step over its tokens, and which part of all steps take at most how
    long, into a PNG or SVG file.
    """
    with picture(path, 11, 4.4, title(result), verified=result["verified"]) as figure:
        over, shares = figure.subplots(1, 2)
        for name, way in result["ways"].items():
            times = [time / 1e3 for time in way["steps_us"]]
            over.scatter(_tokens(result), times, s=9, color=COLOURS[name], label=name)
            shares.ecdf(times, color=COLOURS[name])
        over.set(title="milliseconds of a step", xlabel="tokens of the step", ylim=(0, None))
        shares.set(
            title="part of the steps that take at most so long",
            xlabel="milliseconds of a step",
            xscale="log",
        )
        figure.legend(loc="outside lower center", ncols=len(WAYS))


def title(result: dict[str, Any]) -> str:
    """What was measured."""
    return f"serving: {result['ranks']} ranks, a block of {result['hidden']} and {result['intermediate']}, {result['dtype']}"


def _tokens(result: dict[str, Any]) -> list[int]:
    return [step["decode"] + step["prefill"] for step in result["steps"]]


def _settle() -> None:
    """Wait until this process's other threads sleep: OpenMP's look for work for some milliseconds
    after their last.
    """
    while True:
        before = process_time()
        sleep(1e-3)
        if process_time() - before < 5e-4:
            return
