"""Measurements of this machine: `calibrate` for predictions, and `tune` for ``algorithm="auto"``;
the `timing` and `verification` that they share with benchmarks; and the proof's score, `mutation`.
"""
