"""The local product by a weight as it is, compared with the same by a packed weight.

``python benchmarks/frozen_weights.py [ROUNDS]``, by default 9: one thread, weights (N, K) of
2048 x 2048 as in `nn.Linear`, several in turn so that no cache holds one. Both ways alternate;
a figure is the median ratio of the times, above 1 packing is faster.
"""

import sys
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median

import torch

import weft
from weft.kernels.products import multiply
from weft.kernels.weights import Weight

WIDTH = 2048
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
WEIGHTS_MIB = 64  # of all weights
SECONDS = 0.02  # of a measurement, about


def product(weights: list[Weight], rows: int, dtype: torch.dtype) -> Callable[[], None]:
    """The product of `rows` rows by the next of the weights."""
    x = torch.randn(rows, WIDTH).to(dtype)
    out = torch.empty(rows, WIDTH)
    following = cycle(weights)
    out = out.to(dtype)
    return lambda: multiply(x, next(following), out)


def seconds(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def ratio(plain: Callable[[], None], packed: Callable[[], None], rounds: int, warm: int) -> float:
    for call in plain, packed:
        seconds(call, warm)
    calls = max(2, int(SECONDS / seconds(packed, 2)))
    return median(seconds(plain, calls) / seconds(packed, calls) for _ in range(rounds))


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    torch.set_num_threads(1)
    print("rows    ", *(f"{rows:5}" for rows in ROWS))
    for dtype in (torch.float32, torch.bfloat16):
        count = (WEIGHTS_MIB << 20) // (WIDTH * WIDTH * dtype.itemsize)
        plain = [torch.randn(WIDTH, WIDTH).to(dtype).t() for _ in range(count)]
        packed = [weft.pack(weight) for weight in plain]
        ratios = [
            ratio(product(plain, rows, dtype), product(packed, rows, dtype), rounds, count)
            for rows in ROWS
        ]
        print(f"{str(dtype)[6:]:8}", *(f"{each:5.2f}" for each in ratios))
