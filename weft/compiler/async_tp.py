"""An Inductor pass that replaces collectives and the products next to them by weft's operators, and
the function that enables it.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config, custom_graph_pass
from torch.distributed import distributed_c10d
from torch.fx import Graph

from weft.bootstrap.rendezvous import member
from weft.compiler import operators, patterns, rewrite
from weft.ops import operator
from weft.process_group import worlds
from weft.schedules.operators import OPERATORS

_log = logging.getLogger("weft")
_Pass: Any = getattr(
    custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass
)


def enable_async_tp(group: dist.ProcessGroup | None = None, *, enable: bool = True) -> None:
    """Let `torch.compile` replace gathers before products, and sums of products over ranks, by
    weft's operators, which overlap communication with compute.

    Programs that Inductor compiles after this call, forward and backward, have `all_gather_matmul`
    in place of an all-gather and the products of its result, and `matmul_reduce_scatter` or
    `matmul_all_reduce` in place of a product and its reduce-scatter or all-reduce. So tensor
    parallelism by DTensor or functional collectives overlaps without a changed line. Results differ
    only by the order of sums. Programs compiled before this call do not change until
    ``torch.compiler.reset()``.

    The operators need a world. A process group of the backend ``weft`` has one. For a group of
    another backend, pass it as `group`, on all of its ranks: its world is made here. Collectives of
    a group without a world are not replaced, which the log ``weft`` reports once. All ranks must
    compile the same program, as for functional collectives.
    ``torch._dynamo.utils.counters["weft"]`` counts the inserted operators.

    A custom pass (`torch._inductor.config.post_grad_custom_post_pass`) that is already set runs
    first. A second call changes nothing.

    Args:
        group: a process group for which a world is made, unless it has one.
        enable: False removes the pass, and restores the pass that was set before it.

    Raises:
        TypeError: `group` is no process group; before anything is sent.
        PeerLost, PeerTimeout, SymmetricMemoryError, WeftError: as `weft.init`, if a world is made.

    Examples:
        >>> weft.enable_async_tp()  # then compile: model = torch.compile(model)
        >>> weft.enable_async_tp(enable=False)
    """
    if group is not None and enable and worlds.find(member(group)) is None:
        worlds.make(group)
    now = config.post_grad_custom_post_pass
    if enable and not isinstance(now, AsyncTensorParallel):
        config.post_grad_custom_post_pass = AsyncTensorParallel(now)
    elif not enable and isinstance(now, AsyncTensorParallel):
        config.post_grad_custom_post_pass = now.earlier


class AsyncTensorParallel(_Pass):  # type: ignore[misc]
    """The pass; `earlier` is the pass, or list of passes, that was set before, which runs first."""

    def __init__(self, earlier: Any = None) -> None:
        self.earlier = earlier
        records = (inspect.getfile(operator.find(name).check) for name in OPERATORS)
        files = sorted([*map(str, Path(__file__).parent.glob("*.py")), *records])
        self.source = custom_graph_pass.get_hash_for_files(tuple(files))
        self.warned: set[str] = set()

    def uuid(self) -> Any:
        """The part of the key of compiled graphs that is due to the pass: its source code and that
        of the operators, the groups that have a world, and the earlier passes.
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

    def __call__(self, graph: Graph, **options: Any) -> None:
        for one in self._others():
            one(graph, **(options if isinstance(one, _Pass) else {}))
        rewrite.drop_waits(graph)
        rewrite.share_gathers(graph, _has_world)
        for node in list(graph.nodes):
            found = patterns.found(node)
            if found is None:
                continue
            if not _has_world(found.group):
                self._warn(found.group)
            elif isinstance(found, patterns.GatherPattern):
                rewrite.insert_gather(graph, found)
            else:
                rewrite.insert_sum(graph, found)
        rewrite.join_sums(graph)
        if counts := rewrite.chain(graph):
            counters["weft"].update(counts)
            _log.info(
                "torch.compile: inserted %s",
                ", ".join(f"{count} {name}" for name, count in counts.items()),
            )

    def _warn(self, name: str) -> None:
        group = operators.group_of(name)
        if name not in self.warned and group is not None and group.rank() == 0:
            _log.warning(
                "torch.compile: the collectives of process group %r are not replaced, since it has "
                "no world; weft.enable_async_tp(group) makes one",
                name,
            )
        self.warned.add(name)


def _has_world(name: str) -> bool:
    group = operators.group_of(name)
    return group is not None and worlds.find(group) is not None
