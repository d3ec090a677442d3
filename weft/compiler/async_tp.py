"""A pass of Inductor that puts weft's operators in the place of collectives and the products beside
them, and its switch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config, custom_graph_pass
from torch.distributed import distributed_c10d
from torch.fx import Graph

from weft.compiler import operators, patterns, rewrite
from weft.process_group import worlds

_log = logging.getLogger("weft")
_Pass: Any = getattr(
    custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass
)


def enable_async_tp(group: dist.ProcessGroup | None = None, *, enable: bool = True) -> None:
    """Let `torch.compile` overlap: weft's operators where a program gathers and multiplies, or
    multiplies and sums over ranks.

    From now on what Inductor compiles, forward and backward, has `all_gather_matmul` in the place
    of an all-gather and the products of what is gathered, and `matmul_reduce_scatter` or
    `matmul_all_reduce` in that of a product and its reduce-scatter or all-reduce. So tensor
    parallelism by DTensor or functional collectives overlaps without a changed line. Results are
    the same but for the order of sums. What was compiled before stays as it is, until
    ``torch.compiler.reset()``.

    A process group of the backend ``weft`` has the world that this needs. For a group of another
    backend, pass it as `group`, on all of its ranks: its world is made here. A group without one is
    left as it is, which is said once in the log ``weft``. All ranks must compile the same program,
    as for functional collectives. ``torch._dynamo.utils.counters["weft"]`` counts what was put
    there.

    A custom pass (`torch._inductor.config.post_grad_custom_post_pass`) that is set already goes
    first. Twice is as once.

    Args:
        group: a process group for which a world is made, unless it has one.
        enable: False takes the pass away again, and leaves the one that was set before it.

    Raises:
        PeerLost, PeerTimeout, SymmetricMemoryError, WeftError: as `weft.init`, where a world is
        made.
    """
    if group is not None and enable and worlds.find(group) is None:
        worlds.make(group)
    now = config.post_grad_custom_post_pass
    if enable and not isinstance(now, AsyncTensorParallel):
        config.post_grad_custom_post_pass = AsyncTensorParallel(now)
    elif not enable and isinstance(now, AsyncTensorParallel):
        config.post_grad_custom_post_pass = now.earlier


class AsyncTensorParallel(_Pass):  # type: ignore[misc]
    """The pass; `earlier` is what was there before, which it runs first."""

    def __init__(self, earlier: Any = None) -> None:
        self.earlier = earlier
        self.source = custom_graph_pass.get_hash_for_files(
            tuple(map(str, sorted(Path(__file__).parent.glob("*.py"))))
        )
        self.told: set[str] = set()

    def uuid(self) -> Any:
        """What compiled graphs are kept by: this code, the groups that have a world, and the
        earlier passes.
        """
        names = sorted(
            name
            for group, name in distributed_c10d._world.pg_names.items()
            if worlds.find(group) is not None
        )
        others = [getattr(one, "uuid", lambda: None)() for one in self._others()]
        return None if None in others else (self.source, tuple(names), tuple(others))

    def _others(self) -> list[Any]:
        if self.earlier is None:
            return []
        return [*self.earlier] if isinstance(self.earlier, list | tuple) else [self.earlier]

    def __call__(self, graph: Graph, **known: Any) -> None:
        for one in self._others():
            one(graph, **(known if isinstance(one, _Pass) else {}))
        rewrite.share_gathers(graph, _has_world)
        for node in list(graph.nodes):
            found = patterns.found(node)
            if found is None:
                continue
            if not _has_world(found.group):
                self._tell(found.group)
            elif isinstance(found, patterns.Gather):
                rewrite.insert_gather(graph, found)
            else:
                rewrite.insert_sum(graph, found)
        rewrite.join_sums(graph)
        if made := rewrite.chain(graph):
            counters["weft"].update(made)
            _log.info(
                "torch.compile: %s", ", ".join(f"{number} {name}" for name, number in made.items())
            )

    def _tell(self, name: str) -> None:
        group = operators.group_of(name)
        if name not in self.told and group is not None and group.rank() == 0:
            _log.warning(
                "torch.compile leaves process group %r as it is; weft.enable_async_tp(group) makes "
                "a world for it",
                name,
            )
        self.told.add(name)


def _has_world(name: str) -> bool:
    group = operators.group_of(name)
    return group is not None and worlds.find(group) is not None
