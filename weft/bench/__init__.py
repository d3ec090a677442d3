"""What is measured and how it is shown.

`timing` measures on all ranks, `verification` says what must come out, `baselines` what to compare with, `figures` what the times
mean; `fused` puts them together for operators that overlap a collective with a product. `report` prints results and writes them
as JSON, `plots` and `timeline` draw them.
"""
