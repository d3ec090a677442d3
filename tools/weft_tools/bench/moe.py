"""The benchmark of a mixture of experts: its products and its exchange alone, one after the other,
and overlapped; and the same exchange by torch's collectives.

Tokens of each rank are dispatched to the ranks of their experts, and what these contribute is
summed at home; or all ranks have the same tokens, and sum what their experts contribute.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch import Tensor

from weft.engines import engine
from weft.experts import dispatch
from weft.experts.moe import moe
from weft.experts.packed import pack_experts
from weft.experts.strategies import LAYER
from weft.experts.sums import expert_sums
from weft.measure.timing import Stopwatch, largest
from weft.ops.all_reduce import all_reduce
from weft.ops.all_to_all import all_to_all
from weft.ops.autotune import Class, Trial
from weft.plan.trace import Trace
from weft.schedules.operators import OPERATORS
from weft.world import World
from weft_tools.bench import plots, tables
from weft_tools.bench.between_ranks import session
from weft_tools.bench.harness import environment, link_of, times_ms
from weft_tools.bench.mixtures import Mixture
from weft_tools.bench.neighbours import neighbours
from weft_tools.bench.report import hidden
from weft_tools.bench.settings.moe import MoeSettings
from weft_tools.bench.traces import trace
from weft_tools.bench.verification import Check
from weft_tools.bench.views import View, Views, timed
from weft_tools.predict import figures

_VIEWS = "compute", "communicate", "sequential", "overlapped"
GLOO = "gloo"
"""The baseline: the same experts, and the collectives of gloo."""
_SIZES = "replicated", "routing", "tokens", "experts", "top", "width", "inner", "dtype"


class Layer(Views):
    """One rank's operands, and the views on them by name; `x`, `chosen` and `scores` are those of
    `home`, the rank whose tokens this rank has.
    """

    def __init__(self, settings: MoeSettings, world: World, home: int) -> None:
        self.settings, self.world, self.home = settings, world, home
        self.mixture = mixture = Mixture(settings, world.ranks)
        self.x = mixture.tokens(home, 0).clone()
        self.chosen, self.scores = mixture.chosen[home], mixture.scores[home]
        self.y = torch.empty_like(self.x)
        first = world.rank * settings.experts
        self.own = slice(first, first + settings.experts)
        self.prepare()
        calls: dict[str, Callable[[], object]] = {
            "sequential": partial(self.layer, "sequential"),
            "overlapped": partial(self.layer, "auto"),
        }
        if GLOO in settings.baselines:
            calls[GLOO] = self.by_gloo
        self.views = self.parts() | {
            name: View(call, (self.y,), self._check) for name, call in calls.items()
        }

    def renew(self, run: int) -> None:
        self.x.copy_(self.mixture.tokens(self.home, run))

    def _check(self, run: int) -> Check:
        return self.mixture.check(self.y, self.home, run)

    @abstractmethod
    def prepare(self) -> None:
        """Lay out this rank's weights, and what its calls need."""

    @abstractmethod
    def parts(self) -> dict[str, View]:
        """The views ``compute`` and ``communicate``."""

    @property
    @abstractmethod
    def sent(self) -> int:
        """The bytes that this rank sends to others in a call."""

    @abstractmethod
    def layer(self, algorithm: str) -> None:
        """The layer by weft, into `y`."""

    @abstractmethod
    def by_gloo(self) -> None:
        """The layer with the same products, and collectives of torch, into `y`."""


class Replicated(Layer):
    """Tokens that all ranks have, and the sum of what each rank's experts contribute."""

    def __init__(self, settings: MoeSettings, world: World) -> None:
        super().__init__(settings, world, home=0)

    def prepare(self) -> None:
        mixture, own = self.mixture, self.own
        self.packed = pack_experts(mixture.gate_up[own], mixture.down[own], first=own.start)
        self.part, self.sum = torch.empty_like(self.x), torch.empty_like(self.x)

    def parts(self) -> dict[str, View]:
        return {
            "compute": View(self.contribute, (self.part,), self._check_part),
            "communicate": View(
                partial(all_reduce, self.x, out=self.sum), (self.sum,), self._check_sum
            ),
        }

    @property
    def sent(self) -> int:
        """Each rank sums a part of the rows, and sends the sums."""
        others = self.world.ranks - 1
        return 2 * others * self.x.numel() * self.x.itemsize // self.world.ranks

    def contribute(self) -> None:
        """The contribution of this rank's experts, in `part`."""
        self.part.copy_(expert_sums(self.x, self.chosen, self.scores, self.packed))

    def _check_part(self, run: int) -> Check:
        return self.mixture.check(self.part, self.home, run, self.own)

    def _check_sum(self, run: int) -> Check:
        return self.mixture.compared(self.sum, self.world.ranks * self.x.double())

    def layer(self, algorithm: str) -> None:
        self.y.copy_(moe(self.x, self.chosen, self.scores, self.packed, algorithm=algorithm))

    def by_gloo(self) -> None:
        self.contribute()
        dist.all_reduce(self.part)
        self.y.copy_(self.part)


class OwnTokens(Layer):
    """Tokens of each rank, of which a row travels to every rank whose experts they chose."""

    def __init__(self, settings: MoeSettings, world: World) -> None:
        super().__init__(settings, world, home=world.rank)

    def prepare(self) -> None:
        mixture, rank, own = self.mixture, self.world.rank, self.own
        self.sizes = [self.settings.experts] * self.world.ranks
        self.packed = pack_experts(mixture.gate_up[own], mixture.down[own], first=own.start)
        self.every = [
            dispatch.find(chosen, self.sizes, self.world.hosts) for chosen in mixture.chosen
        ]
        self.received = [each.counts[rank] for each in self.every]
        rows, new = sum(self.received), self.x.new_empty
        self.row = [each.shape[1] * each.itemsize for each in self._carried(0)]
        self.arrived = new((rows, sum(self.row)), dtype=torch.uint8)
        self.results = new(rows, self.settings.width)
        self.back = new(sum(self.every[rank].counts), self.settings.width)

    def parts(self) -> dict[str, View]:
        return {
            "compute": View(self._compute, (self.results,), self._check_products, renew=self._fill),
            "communicate": View(self._communicate, (self.back,), self._check_rows),
        }

    @property
    def sent(self) -> int:
        """Rows, and what this rank's experts contribute to rows of other ranks."""
        rank, counts = self.world.rank, self.every[self.world.rank].counts
        rows, back = (sum(sizes) - sizes[rank] for sizes in (counts, self.received))
        return rows * sum(self.row) + back * self.results.shape[1] * self.x.itemsize

    def layer(self, algorithm: str) -> None:
        operands = self.x, self.chosen, self.scores, self.packed
        self.y.copy_(moe(*operands, experts_of_ranks=self.sizes, algorithm=algorithm))

    def by_gloo(self) -> None:
        """Ranks tell each other the sizes, then rows travel, are multiplied, and return."""
        rows, found = self._rows()
        sent = torch.tensor(found.counts, device="cpu")
        dist.all_to_all_single(received := torch.empty_like(sent), sent)
        from_each = received.tolist()
        dist.all_to_all_single(self.arrived, rows, from_each, found.counts)
        self._multiply()
        dist.all_to_all_single(self.back, self.results, found.counts, from_each)
        self.y.copy_(dispatch.combine(self.back, found))

    def _rows(self) -> tuple[Tensor, dispatch.Dispatch]:
        """The rows of this rank's tokens."""
        found = dispatch.find(self.chosen, self.sizes, self.world.hosts)
        return _rows_of((self.x, self.chosen.int(), self.scores), found.tokens), found

    def _multiply(self) -> None:
        """What this rank's experts contribute to the tokens of the rows that have arrived."""
        x, chosen, scores = self.arrived.split(self.row, 1)
        routing = chosen.view(torch.int32), scores.view(self.scores.dtype)
        self.packed.sums(x.view(self.x.dtype), *routing, self.results)

    def _compute(self) -> None:
        _, found = self._rows()
        self._multiply()
        dispatch.combine(self.back, found)

    def _carried(self, source: int, run: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """What a row of gloo's exchange carries of the tokens of a rank."""
        mixture = self.mixture
        return mixture.tokens(source, run), mixture.chosen[source].int(), mixture.scores[source]

    def _fill(self, run: int) -> None:
        """The rows that arrive in this run."""
        rank = self.world.rank
        self.renew(run)
        parts = [
            _rows_of(self._carried(source, run), found.tokens.split(found.counts)[rank])
            for source, found in enumerate(self.every)
        ]
        torch.cat(parts, out=self.arrived)

    def _check_products(self, run: int) -> Check:
        rank = self.world.rank
        exact = [
            self.mixture.exact(source, run, self.own)[found.tokens.split(found.counts)[rank][:, 0]]
            for source, found in enumerate(self.every)
        ]
        return self.mixture.compared(self.results, torch.cat(exact))

    def _communicate(self) -> None:
        rows, found = self._rows()
        there = all_to_all(rows, input_split_sizes=found.counts)
        contributions = there[:, : self.row[0]].contiguous().view(self.x.dtype)
        all_to_all(
            contributions,
            out=self.back,
            input_split_sizes=self.received,
            output_split_sizes=found.counts,
        )

    def _check_rows(self, run: int) -> Check:
        tokens = self.every[self.world.rank].tokens[:, 0]
        return Check(int((self.back != self.x[tokens]).sum()))


def _rows_of(carried: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The bytes of rows of these tokens: what is carried of each, side by side."""
    return torch.cat([each[tokens[:, 0]].view(torch.uint8) for each in carried], 1)


class Measured(NamedTuple):
    """A result as a JSON object, and the traces of its views."""

    result: dict[str, Any]
    traces: list[Trace]


def measure(settings: MoeSettings) -> Measured:
    """Measure on this rank, collectively. Times are in milliseconds."""
    with session(settings.threads) as world, neighbours(world, settings.neighbours):
        stopwatch = Stopwatch(world)
        layer = (Replicated if settings.replicated else OwnTokens)(settings, world)
        if settings.link_gbps:
            _emulate(settings.link_gbps, world, layer, stopwatch)
        _settle(world, layer.views["overlapped"].call)
        times, checks = timed(layer, stopwatch, settings)
        baselines = {name: time for name, time in times.items() if name == GLOO}
        own = {name: time for name, time in times.items() if name not in baselines}
        names = _VIEWS[2:] if settings.trace or settings.timeline else ()
        traces = [each for name in names if (each := trace(layer.views[name], stopwatch, name))]
        return Measured(
            {
                "benchmark": "moe",
                "ranks": world.ranks,
                "hosts": len(set(world.hosts)),
                **{name: getattr(settings, name) for name in _SIZES},
                "chosen": layer.mixture.chosen_of_ranks(),
                "neighbours": settings.neighbours,
                "algorithm": ", ".join(_selected(world)) or "the rule of each operator",
                "link": link_of(world),
                "times_ms": times_ms(own),
                "baselines_ms": times_ms(baselines),
                **figures.of_overlap(*(own[name].median for name in _VIEWS)),
                "hidden_percent": {each.title: hidden(each) for each in traces},
                "wrong": {name: check.wrong for name, check in checks.items()},
                "verified": not any(check.wrong for check in checks.values()),
                **environment(world, settings),
            },
            traces,
        )


def _emulate(gbps: str, world: World, layer: Layer, stopwatch: Stopwatch) -> None:
    """Emulate a link of so many Gbit/s, or one over which the most bytes that a rank sends take as
    long as the products.
    """
    if gbps == "auto":
        layer.views["compute"].call()
        alone = stopwatch.interleave({"compute": layer.views["compute"].call}, 1, 5)["compute"]
        [most] = largest(world, [layer.sent])
        gbps = f"{8e-6 * most / alone.median:.4g}"
    world.emulate_link(float(gbps))


def _settle(world: World, call: Callable[[], object]) -> None:
    """Repeat a call until ``auto`` has measured its candidates, or does not measure such calls."""
    before: object = None
    call()
    while (state := [(each.round, len(each.calls)) for each in _trials(world)]) and state != before:
        before = state
        call()


def _trials(world: World) -> list[Trial]:
    """The measurements of ``auto`` that have not ended."""
    return [each for each in engine(world).selections.values() if isinstance(each, Trial)]


def _selected(world: World) -> Iterator[str]:
    """What ``auto`` has selected for each operator over the link of now."""
    for key, found in engine(world).selections.items():
        if not isinstance(key, Class) or key.link != world.emulated_link:
            continue
        if key.workload.operator in (*OPERATORS, LAYER):
            variant = found.first if isinstance(found, Trial) else found.variant
            pieces = f" in {variant.pieces} pieces" if variant.pieces > 1 else ""
            yield f"{key.workload.operator} by {variant}{pieces}"


def title(result: dict[str, Any]) -> str:
    """The ranks, the sizes of the layer, the routing, the selection and the link, in one line."""
    link = f", EMULATED LINK of {result['link']['gbps']:.4g} Gbit/s" if result["link"] else ""
    whose = "on all ranks" if result["replicated"] else "of each rank"
    return (
        f"moe: {result['ranks']} ranks, {result['tokens']} tokens {whose}, {result['top']} of "
        f"{result['ranks'] * result['experts']} experts each ({result['routing']}), "
        f"{result['width']} x {result['inner']}, {result['dtype']}{link}{tables.loaded(result)}"
    )


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the times, the figures, and notes on how to read them."""
    console.print(Text(title(result), "bold"), soft_wrap=True)
    baselines = result["baselines_ms"]
    versus = (f"vs {name}" for name in baselines)
    table = tables.table(("", *tables.TIMES.values(), "runs", *versus))
    for name, times in (result["times_ms"] | baselines).items():
        comparable = name not in (*_VIEWS[:2], *baselines)
        table.add_row(
            tables.named(name, result["wrong"][name]),
            *tables.milliseconds(times),
            str(times["runs"]),
            *(
                tables.compared(result, times, other) if comparable else Text()
                for other in baselines.values()
            ),
        )
    gains = tables.table(("", "", ""))
    gains.show_header = False
    meanings = {
        "speedup": "sequential / overlapped",
        "overlap_percent": "of communicate is hidden behind compute",
        "limit_ratio": "overlapped / max(compute, communicate); 1 is the limit",
    }
    for gain in tables.gains(result, meanings):
        gains.add_row(*gain)
    for name, part in result["hidden_percent"].items():
        if part is not None:
            gains.add_row("hidden", f"{part:.0f} %", f"of copying is behind products: {name}")
    tables.print_wide(console, table, gains)
    rows = ", ".join(map(str, result["chosen"]))
    tables.print_notes(
        console,
        f"auto: {result['algorithm']}.",
        f"The experts of rank 0, 1, … are chosen {rows} times, by tokens of all ranks; so the "
        "slowest rank decides compute.",
        *_notes(result),
        *tables.checking(result),
        *tables.noisy(result),
        *tables.cut_short(result),
        tables.verdict(
            result, "on every rank, before and after timing, on new tokens, against float64."
        ),
        *tables.disturbed(result),
        tables.machine(result),
    )


def _notes(result: dict[str, Any]) -> Iterator[str]:
    if result["replicated"]:
        yield "communicate is the sum of the tokens over the ranks."
    else:
        yield (
            "communicate: a row of each token to every rank whose experts it chose, and back. "
            "Sizes are those of the call before; ranks tell each other in every call, for gloo by "
            "one of its own."
        )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the times as a PNG or SVG file."""
    plots.draw_bars(result, path, title(result))
