"""MSCCL++'s execution plans (JSON): `reader` makes a plan of one, `writer` the reverse.

In such a plan a rank has *thread blocks*, each a list of operations. The threads of a block execute
an operation together, and meet only at a ``nop`` or a barrier. A block signals over *channels* to a
peer; over a *port* puts continue by themselves after they are posted. The rows of *packets* have
flags, which their readers wait for.
"""
