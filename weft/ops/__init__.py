"""The public operators: checks, a plan for the sizes at hand, and its execution."""

from weft.ops import autograd as autograd  # what torch records: an operator may need another one's
