"""Ways to carry out the calls of a class of sizes: the first calls measure the likely ones, and the
fastest stays.

All ranks make the same calls in the same order, so each knows whose turn it is; after every round
they tell each other when they came and went. A call takes from when the last rank came until the
last one went, whoever was waited for. Clocks of hosts differ: there it is what the host sees whose
last rank came last, so which saw the least.

Ways are only mixed where they give the same bits. Sums are taken in one order by every way, and
torch's products have the same bits in however many rows they are made, except by their kernels for
few rows, and in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.call import Call, Decision
from weft.schedules.workload import FEW_ROWS, Variant

CALLS = 12  # that may measure, of a class
MOST = 4  # ways that take turns
_LIKELY = 1.5  # times the least prediction is not worth trying
_HOPELESS = (
    1.5,
    1.2,
)  # times as slow as the fastest is not tried again, after the first round and after later ones
_BETTER = 0.97  # of the usual way's time is worth leaving it
# seconds on an emulated link: for less, pieces may take twice as long as what they are to hide
_WORTH_TRYING = 1.7e-4
_BITS = 16  # rows from which on the bits of a product do not depend on how many there are
_DTYPES = ("float32", "bfloat16", "float16")


def likely(call: Call, decision: Decision) -> list[Decision]:
    """The ways that are worth measuring for the class of a call, the one decided on first; alone if
    that is known to be best.
    """
    operator, workload, world = call.operator, call.workload, call.world
    times = dict(decision.predicted)
    if (
        decision.sure
        or call.passing < _WORTH_TRYING
        or max(workload.rows) <= FEW_ROWS
        or workload.dtype not in _DTYPES
    ):
        return [decision]
    found, linked = {decision.variant: decision}, not world.remote_reads
    for name in operator.auto_candidates_over_links if linked else operator.auto_candidates:
        for cut in (
            (1, 4)
            if linked and call.options.chunk_rows is None and name not in operator.uncut
            else (1,)
        ):
            variant = call.usual(name).variant
            variant = variant._replace(pieces=max(1, variant.pieces // cut))
            if times.get(variant, 0.0) <= _LIKELY * min(times.values(), default=0.0):
                found.setdefault(variant, Decision(variant, "", decision.predicted))
    return [*found.values()][:MOST]


class Trial:
    """The ways that take turns in the calls of a class, and how long they took; the first is the
    usual one.
    """

    def __init__(self, choices: Sequence[Decision]) -> None:
        self.usual, self.left, self.round, self.remaining = choices[0], list(choices), 0, CALLS
        self.calls: list[
            tuple[int, int, int]
        ] = []  # of this round: when each began and ended, in ns, and the size of its product
        self.least: dict[Variant, float] = {}
        self.shown: dict[Variant, float] = {}

    def includes(self, call: Call) -> bool:
        """Whether all ways would give the call the same bits."""
        return all(min(call.workload.rows) >= _BITS * choice.variant.pieces for choice in self.left)

    def of(self, call: Call) -> Decision:
        """What the next call does: the way whose turn it is, or the usual one."""
        choice = self.left[len(self.calls)] if self.includes(call) else self.usual
        return choice._replace(why="one of the first calls, in which ways are measured")

    def took(self, call: Call, begun: int, ended: int) -> bool:
        """Note when a call began and ended; whether a round is over, of which all ranks are to tell
        each other.
        """
        self.calls.append((begun, ended, sum(call.workload.rows) * max(1, call.workload.n)))
        return len(self.calls) == len(self.left)

    def said(self) -> list[int]:
        """What this rank has to tell of the round."""
        return [number for call in self.calls for number in call]

    def heard(self, call: Call, said: Tensor) -> Decision | None:
        """Take what all ranks say of a round, a row each; the choice, if it is made."""
        every, hosts = said.view(-1, len(self.left), 3), call.world.hosts
        last = [every[[host == one for one in hosts]].amax(0) for host in dict.fromkeys(hosts)]
        took = torch.stack([one[:, 1] - one[:, 0] for one in last]).amin(0).tolist()
        for choice, ns, work in zip(self.left, took, every[0, :, 2].tolist(), strict=True):
            variant = choice.variant
            self.least[variant] = min(self.least.get(variant, float("inf")), ns / work)
            self.shown[variant] = min(self.shown.get(variant, float("inf")), 1e-6 * ns)
        self.calls, self.round, self.remaining = [], self.round + 1, self.remaining - len(self.left)
        bound = _HOPELESS[self.round > 1] * min(self.least.values())
        self.left = [choice for choice in self.left if self.least[choice.variant] <= bound]
        if 1 < len(self.left) <= self.remaining:
            return None
        best = min(
            self.left,
            key=lambda choice: (
                self.least[choice.variant] * (_BETTER if choice == self.usual else 1)
            ),
        )
        measured = tuple(sorted(self.shown.items(), key=lambda one: one[1]))
        return best._replace(
            why="it was the fastest in the first calls of its class", measured=measured
        )
