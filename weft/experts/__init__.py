"""Layers of experts, of which each rank has some: each token's weighted sum of the results of those
that it chose.
"""

from weft.experts import moe, recorded, sums

for layer in (sums, moe):
    recorded.register(layer.OPERATOR)
