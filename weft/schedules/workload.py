"""Workloads, variants and requests of fused operators, and the records of operators and collectives
without their tensors.

Each planner has its record, an `Operator` or a `Collective`, in the same file;
`weft.schedules.operators` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from weft.plan import Plan
from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.schedules.levels import Levels
from weft.schedules.peers import Hosts

PIECES = 16
"""Transfers per shard: at best all but one of them are hidden, so 6 % of the communication is not.
Twice as many would hide 3 % more, with twice the signals.
"""

Order = Literal["peer", "interleaved"]
ORDERS: tuple[str, ...] = get_args(Order)
"""The orders in which a push sends chunks: peer after peer, or the first chunk of every peer, then
the second …
"""


READS_PEERS = "it reads rows of other hosts in place, and hosts can only send each other rows"
"""Why ranks on several hosts cannot use an algorithm that reads peers' rows."""
WRITES_PEERS = (
    "it multiplies into the memory of other hosts, and hosts can only send each other rows"
)
"""Why they cannot use an algorithm whose products are made in peers' memory."""
ONE_HOST = "over several hosts two_shot does the same, with one sum from each host"
"""Why they cannot use a push of matmul + all-reduce."""
STORES_TO_PEERS = (
    "its kernel stores to the memory of other hosts, and hosts can only send each other rows"
)
"""Why they cannot use an algorithm that a kernel executes."""


class Workload(NamedTuple):
    """The sizes of a call: `operator` on ranks with these `rows`, each product by (K, N).

    `rows` are the rows of each rank's input (all_gather_matmul) or result. `symmetric`: the input
    is in symmetric memory. `compress`: how rows travel between hosts, as in `weft.plan.Copy`.
    `kernel`: what computes its products, if they are not matrix products.
    """

    operator: str
    rows: tuple[int, ...]
    k: int
    n: int
    dtype: str
    out_dtype: str
    packed: bool = True
    symmetric: bool = True
    compress: str = ""
    kernel: str = ""

    @property
    def ranks(self) -> int:
        return len(self.rows)


def accumulator(dtype: str) -> str:
    """The dtype in which sums of `dtype` are accumulated."""
    return "float64" if dtype == "float64" else "float32"


class Variant(NamedTuple):
    """An algorithm, its number of pieces, the order of a push, and how a device works on it."""

    algorithm: str
    pieces: int = 1
    order: str = "peer"
    device: DeviceOptions = DEFAULT

    def __str__(self) -> str:
        order = " interleaved" if self.order == "interleaved" else ""
        return self.algorithm + order + (f" ({self.device})" if self.device != DEFAULT else "")

    def to_json(self) -> dict[str, Any]:
        """The fields; `device` only if it has options that are no defaults."""
        fields = self._asdict()
        device = fields.pop("device")
        return fields if device == DEFAULT else {**fields, "device": asdict(device)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Variant:
        """The inverse of `to_json`. Raises `ValueError` or `TypeError` for other fields."""
        return Variant(**{**fields, "device": DeviceOptions(**fields.get("device", {}))})


def pieces(rows: int, most: int) -> int:
    """The number of blocks of at most `most` rows each that have `rows` in all: a power of two, so
    that plans are few.
    """
    return 1 << (max(1, -(-rows // most)) - 1).bit_length()


FEW_ROWS = 32
"""The number of rows of a rank up to which one product, which reads the weight once, is faster than
one for each rank or piece.

Measured on a 2-core Zen 4: by a packed weight of 2048 x 2048, two products of 16 rows take 1.14
times as long as one of 32, and two of 128 rows 1.04 times as long as one of 256.
"""


def size_class(rows: int) -> int:
    """The most rows of the size class of `rows`: 32 (`FEW_ROWS`), 48, 64, 96, 128, 192, …"""
    rows = max(rows, FEW_ROWS)
    step = 1 << max(0, rows.bit_length() - 2)
    return -(-rows // step) * step


class Request(NamedTuple):
    """The input of a fused operator's planner, independent of sizes: ranks, and the `pieces` of a
    rank's rows.

    `symmetric`: the input is in symmetric memory, where peers read it in place; else it is staged.
    `hosts`: the host of each rank if there are several. `remote_reads`: products of peers can be
    read in place; else they are moved first. `symmetric_out`: the result is in symmetric memory,
    and a push of sums goes there. A push sends its pieces in an `order` of `ORDERS`, to
    peers in one lane for each of `links`.

    `op` is the reduction of a sum, ``sum`` or ``avg``. A gather multiplies by n `weights`, and may
    have the `gathered` rows as an output too. Of an exchange each of a rank's weights, its
    `experts`, multiplies separate rows: there is a number for each rank, by default one. `uneven`:
    each rank sends each weight a separate number of rows, so that the plan has a shard for each
    pair of a rank and a weight.
    """

    ranks: int
    pieces: int
    algorithm: str
    symmetric: bool = False
    order: str = "peer"
    hosts: Hosts | None = None
    remote_reads: bool = True
    symmetric_out: bool = False
    links: int = 1
    op: str = "sum"
    weights: int = 1
    gathered: bool = False
    experts: tuple[int, ...] = ()
    uneven: bool = False


class Rows(NamedTuple):
    """The columns and the dtype of a buffer's rows."""

    columns: int
    dtype: str


@dataclass(frozen=True)
class Operator:
    """A fused operator without its tensors.

    `plan` makes the plan of a request; `communicate` plans its communication alone, as benchmarks
    measure it. `buffers` gives the columns and dtype of the buffers of its plans.
    """

    name: str
    algorithms: tuple[str, ...]
    plan: Callable[[Request], Plan]
    communicate: Callable[[Request], Plan]
    buffers: Callable[[Workload], Mapping[str, Rows]]
    default_shards: Callable[[int, int], Sequence[int] | None]
    """From a rank's rows and the number of ranks to the default rows of each shard; None if the
    rows do not divide.
    """
    result_rows: Callable[[Sequence[int], int], int]
    """From the rows of each shard and a rank to the rows of its result."""
    uncut: tuple[str, ...] = ("sequential",)
    """Algorithms that do not cut shards into pieces."""
    cuts_all_rows: tuple[str, ...] = ()
    """Algorithms that cut all rows into pieces, instead of the rows of each rank."""
    moves_nothing: tuple[str, ...] = ()
    """Algorithms that move no rows: products and sums work on peers' memory."""
    reads_peers: tuple[str, ...] = ()
    """Algorithms that read peers' rows in place."""
    writes_products: tuple[str, ...] = ()
    """Algorithms whose products are made in peers' memory."""
    one_host: tuple[str, ...] = ()
    """Algorithms of one host, to which another one corresponds over several."""
    ordered: tuple[str, ...] = ()
    """Algorithms that can send their pieces in any of `ORDERS`."""
    baseline: str = "sequential"
    """The algorithm without overlap: first the communication, then one product, or the reverse."""
    exchanges: Literal["a", "out"] = "a"
    """The buffer whose rows ranks exchange: inputs, or sums of products."""
    several_weights: bool = False
    """Whether one call may multiply by several weights."""
    auto_candidates: tuple[str, ...] = ()
    """Algorithms that may be fastest if peers' memory is read as fast as a rank's own."""
    auto_candidates_over_links: tuple[str, ...] = ()
    """Algorithms that may be fastest if rows pass a slower link."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a name that is not one of `algorithms`."""
        for field in fields(self):
            names = getattr(self, field.name)
            for name in names if isinstance(names, tuple) else ():
                if name not in self.algorithms and names != field.default:
                    raise ValueError(f"{self.name}: {field.name} names no algorithm: {name!r}")
        if self.baseline not in self.algorithms:
            raise ValueError(f"{self.name}: baseline names no algorithm: {self.baseline!r}")

    def pieces(self, rows: Sequence[int], algorithm: str, chunk_rows: int) -> int:
        """The number of pieces of an algorithm whose transfers have at most `chunk_rows` rows."""
        return 1 if algorithm in self.uncut else pieces(self._cut_rows(rows, algorithm), chunk_rows)

    def chunk_rows(self, rows: Sequence[int], variant: Variant) -> int:
        """The most rows of a transfer of a variant."""
        return max(1, -(-self._cut_rows(rows, variant.algorithm) // variant.pieces))

    def _cut_rows(self, rows: Sequence[int], algorithm: str) -> int:
        """The rows that an algorithm cuts into pieces."""
        return sum(rows) if algorithm in self.cuts_all_rows else max(rows)

    def request(self, workload: Workload, variant: Variant, **more: Any) -> Request:
        """The request for a variant of a workload."""
        algorithm, pieces, order, device = variant
        more = {"links": device.links, **more}
        return Request(workload.ranks, pieces, algorithm, workload.symmetric, order, **more)

    @property
    def shared_memory_only(self) -> Mapping[str, str]:
        """Algorithms that ranks on several hosts cannot use, each with the reason."""
        return {
            **dict.fromkeys(self.reads_peers, READS_PEERS),
            **dict.fromkeys(self.writes_products, WRITES_PEERS),
            **dict.fromkeys(self.one_host, ONE_HOST),
        }


@dataclass(frozen=True)
class Collective:
    """A collective without its tensors.

    `algorithms` are those that its callers choose from. `plan` makes the plan of a request for
    ranks of one host, `few_rows` the plan for few rows, from the levels by which ranks synchronize.
    """

    name: str
    algorithms: tuple[str, ...]
    plan: Callable[[Request], Plan]
    few_rows: Callable[[Levels], Plan]
    default_shards: Callable[[int, int], Sequence[int]]
    """From the rows of a rank's input and the number of ranks to the default rows of each shard."""
    reduces: bool = False
    """Whether rows are reduced, not only moved."""
    reads_peers: tuple[str, ...] = ()
    """Algorithms that read peers' rows in place."""
    launched: tuple[str, ...] = ()
    """Algorithms that a kernel of a GPU executes."""
    predicted: tuple[str, ...] = ()
    """Algorithms whose time is predicted, besides that for few rows."""
    predicted_over_links: tuple[str, ...] = ()
    """Algorithms that are also predicted on machines whose ranks do not read peers' memory like
    their own: between symmetric tensors, and over all links of a rank at once.
    """
    few_rows_algorithm: str = "eager"
    """The name of the algorithm for few rows."""

    @property
    def shared_memory_only(self) -> Mapping[str, str]:
        """Algorithms that ranks on several hosts cannot use, each with the reason."""
        return {
            **dict.fromkeys(self.reads_peers, READS_PEERS),
            **dict.fromkeys(self.launched, STORES_TO_PEERS),
        }
