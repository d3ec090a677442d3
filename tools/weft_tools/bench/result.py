"""The result of a benchmark of a fused operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.measure.timing import Statistics
from weft.ops.call import Selection
from weft.plan.trace import Trace
from weft_tools.bench.cascade import Agreement
from weft_tools.bench.settings.fused import FusedSettings
from weft_tools.bench.verification import Check


@dataclass(frozen=True)
class Result:
    """The result of a benchmark.

    Attributes:
        choice: the variant that was executed, and the reason for it.
        chunk_rows: the largest number of rows in one of its transfers.
        times: the times of `VIEWS` and `IN_CHUNKS`; `baselines` and `ablation` are compared with
            them.
        checks: the worst check of each of these, before and after timing, on any rank.
        environment: the ranks, the link, the neighbours (None if not asked for), the machine and
            the versions, as in the JSON.
        notes: further sentences that explain the times.
        multiplied_in: the dtype in which the baselines multiply, "" if it is that of the results.
        slow: then the times of the baselines that multiply in the dtype of the results, scaled to
            all rows.
        measured_rows: the rows on which these were measured.
        streamed: where auto has selected to communicate first, the times of an algorithm that
            multiplies while rows arrive.
        without_gathered: if the calls return the gathered rows, the times of one that does not.
        cascade: then also the comparisons of the fused call with the sequential one, by rank.
    """

    settings: FusedSettings
    choice: Selection
    chunk_rows: int
    times: dict[str, Statistics]
    baselines: dict[str, Statistics]
    ablation: dict[str, Statistics]
    checks: dict[str, Check]
    environment: dict[str, Any]
    traces: list[Trace]
    notes: tuple[str, ...] = ()
    multiplied_in: str = ""
    slow: dict[str, Statistics] = field(default_factory=dict)
    measured_rows: int = 0
    streamed: dict[str, Statistics] = field(default_factory=dict)
    without_gathered: dict[str, Statistics] = field(default_factory=dict)
    cascade: list[Agreement] = field(default_factory=list)
