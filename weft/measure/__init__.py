"""Measurements of this machine: `tune` for ``algorithm="auto"``, the `timing` that it shares with
benchmarks, and the `versions` of results.
"""
