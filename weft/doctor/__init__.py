"""``weft doctor``: the state of a job's ranks, their hosts and the network, and what is wrong."""
