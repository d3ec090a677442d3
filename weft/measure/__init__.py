"""Measurements of this machine: `calibrate` for predictions, and `tune` for ``algorithm="auto"``;
the `timing` that they share with benchmarks, and the `versions` of results; the proof's score,
`mutation`, and its test by random plans, `fuzz`.
"""
