"""Benchmarks of weft's fused operators and collectives, for ``weft bench``.

`settings` are the options of the commands. `harness` has the parts that all benchmarks share:
verification before and after timing, progress, and the description of the machine. `fused` measures
an operator that overlaps a collective with a product: its `subjects` are the tensors of each
operator, `ablation` the steps from the cascade to the operator, and `report` the result. `sweep`
measures the `collectives` over message size. `baselines` are the same work without weft, `alone` by
one process with all cores; `neighbours` are busy processes beside the ranks. `tables` and `plots`
show results; `page` makes a page of saved ones, from what is `captured` of their tables, their
`limit`, and the commands that `repeat` them. `repository` finds the further benchmarks that only
the repository has: one-sided copies, independent overlap, serving, other systems and GPUs.

Timing and verification are in `weft.measure`, pictures of lanes over time in `weft.pictures`, the
commands in `weft.cli`.
"""
