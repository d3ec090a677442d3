"""The public operators: checks, a plan for the sizes at hand, and its execution."""

from weft.ops import autograd, operator
from weft.schedules.operators import OPERATORS

for name in OPERATORS:  # all of them, since backward formulas use one another
    autograd.register(operator.find(name))
