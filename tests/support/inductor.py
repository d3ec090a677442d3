"""Options of Inductor for tests, by which no kernels are built, if this torch has them (torch 2.9
does not).
"""

from torch._inductor import config

QUICK = {"pattern_matcher": False} | (
    {"fallback_by_default": True} if hasattr(config, "fallback_by_default") else {}
)
