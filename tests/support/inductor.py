"""Inductor as tests use it: options with which there are no kernels to build, where it has such
(torch 2.9 has not).
"""

from torch._inductor import config

QUICK = {"pattern_matcher": False} | (
    {"fallback_by_default": True} if hasattr(config, "fallback_by_default") else {}
)
