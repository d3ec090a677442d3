"""The public operators: each checks its arguments, selects a plan for their sizes and executes
it.
"""

from weft.ops import autograd, operator
from weft.schedules.operators import OPERATORS

for name in OPERATORS:  # all of them, since backward formulas use one another
    autograd.register(operator.find(name))
