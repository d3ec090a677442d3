"""Measurements of this machine: `calibrate` for predictions, `tune` for ``algorithm="auto"``, and
the `timing` that they share with benchmarks.
"""
