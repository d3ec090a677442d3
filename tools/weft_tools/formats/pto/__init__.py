"""Programs of PTO, the tile instructions of Ascend: `writer` makes the kernels of one of a plan."""
