"""What is known of operators without a tensor: which algorithms they have, and what these need of a machine."""

from __future__ import annotations

from collections.abc import Mapping

_IN_PLACE = "it reads rows of other hosts where they lie, and hosts can only send each other rows"
_THERE = "it multiplies into the memory of other hosts, and hosts can only send each other rows"

SHARED_MEMORY_ONLY: Mapping[str, str] = {"direct": _IN_PLACE, "pull": _IN_PLACE, "one_shot": _IN_PLACE, "put": _THERE}
"""Algorithms that ranks on several hosts cannot use, and why not."""
