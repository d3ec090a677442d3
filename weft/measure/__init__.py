"""Measurements of this machine: `calibrate` for predictions, and `tune` for ``algorithm="auto"``;
and the `timing` and `verification` that they share with benchmarks.
"""
