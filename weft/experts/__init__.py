"""Mixture-of-experts layers whose experts are distributed over the ranks."""

from weft.experts import moe, recorded, sums

for layer in (sums, moe):
    recorded.register(layer.OPERATOR)
