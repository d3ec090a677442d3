"""What is known of operators without a tensor: the fused ones by name, and which algorithms need
shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.schedules import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from weft.schedules.workload import Operator

OPERATORS: Mapping[str, Operator] = {
    module.OPERATOR.name: module.OPERATOR
    for module in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
}
"""The fused operators."""

_IN_PLACE = "it reads rows of other hosts where they lie, and hosts can only send each other rows"
_THERE = "it multiplies into the memory of other hosts, and hosts can only send each other rows"

SHARED_MEMORY_ONLY: Mapping[str, str] = {
    "direct": _IN_PLACE,
    "pull": _IN_PLACE,
    "one_shot": _IN_PLACE,
    "put": _THERE,
}
"""Algorithms that ranks on several hosts cannot use, and why not."""
