"""The calls that `make speed` times, in groups; public names only, so that earlier versions of weft
run them too.

``weft run -n 2 benchmarks/calls.py GROUP [ROUNDS]`` prints the microseconds of each as JSON:
medians of rank 0's rounds.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from messages import ring, round_trip
from rounds import Call, alternating, seconds

import weft

Calls = Iterator[tuple[str, Call]]
SIZES = {
    "8 B": 8,
    "512 B": 512,
    "4 KiB": 4 << 10,
    "32 KiB": 32 << 10,
    "256 KiB": 256 << 10,
    "2 MiB": 2 << 20,
    "16 MiB": 16 << 20,
}
SETTLED = 130  # calls after which `auto` has chosen
ROUNDS = 9
ROUND_BYTES = 2 << 20  # moved by a round, at least: short calls are repeated
MOST_CALLS = 200  # in a round
FIRST_ROWS = range(1, 65)


def repeated(calls: Calls, size: int, rounds: int) -> dict[str, float]:
    """The microseconds of calls that move `size` bytes; they alternate in every round."""
    every = dict(calls)
    number = max(1, min(MOST_CALLS, ROUND_BYTES // max(size, 1)))
    return medians(every, number, rounds, SETTLED)


def medians(calls: dict[str, Call], number: int, rounds: int, settled: int) -> dict[str, float]:
    """The microseconds of calls, after `settled` ones, each made `number` times in a round."""
    for call in calls.values():
        seconds(call, settled)
    times = alternating(calls, dict.fromkeys(calls, number), rounds)
    return {name: 1e6 * median(each) for name, each in times.items()}


def of_sizes(calls: Callable[[str, int], Calls], rounds: int) -> dict[str, float]:
    """The times of calls of each size, given by its name and its number of floats."""
    found = {}
    for name, size in SIZES.items():
        found |= repeated(calls(name, size // 4), size, rounds)
    return found


def collectives(name: str, n: int) -> Calls:
    """Of ordinary tensors, with results that the caller passes."""
    ranks = weft.init().ranks
    x, out, gathered = torch.randn(n), torch.empty(n), torch.empty(ranks * n)
    part = torch.empty(n // ranks)
    yield f"all_reduce {name}", lambda: weft.all_reduce(x, out=out)
    yield f"all_gather {name}", lambda: weft.all_gather(x, out=gathered)
    yield f"reduce_scatter {name}", lambda: weft.reduce_scatter(x, out=part)
    yield f"broadcast {name}", lambda: weft.broadcast(x, 0)
    yield f"all_to_all {name}", lambda: weft.all_to_all(x, out=out)


def symmetric(name: str, n: int) -> Calls:
    """Of symmetric tensors."""
    world = weft.init()
    x, out, gathered = world.empty(n).fill_(1), world.empty(n), world.empty(world.ranks * n)
    yield f"all_reduce {name}", lambda: weft.all_reduce(x, out=out)
    yield f"all_gather {name}", lambda: weft.all_gather(x, out=gathered)
    yield f"reduce_scatter {name}", lambda: weft.reduce_scatter(x, out=out[: n // world.ranks])
    yield f"broadcast {name}", lambda: weft.broadcast(x, 0)
    yield f"all_to_all {name}", lambda: weft.all_to_all(x, out=out)


def in_place(name: str, n: int) -> Calls:
    """Of ordinary tensors whose result lies where the operand is."""
    world = weft.init()
    x = torch.zeros(n)  # sums of zeros stay finite
    gathered, part = torch.zeros(world.ranks * n), slice(world.rank * n, (world.rank + 1) * n)
    own = slice(world.rank * (n // world.ranks), (world.rank + 1) * (n // world.ranks))
    yield f"all_reduce {name}", lambda: weft.all_reduce(x, out=x)
    yield f"all_gather {name}", lambda: weft.all_gather(gathered[part], out=gathered)
    yield f"reduce_scatter {name}", lambda: weft.reduce_scatter(x, out=x[own])


def through_torch(name: str, n: int) -> Calls:
    """Through torch.distributed, by weft's backend and by gloo."""
    x = torch.zeros(n)
    gathered = torch.zeros(dist.get_world_size() * n)
    for backend in ("weft", "gloo"):
        group = dist.new_group(backend=backend)
        yield f"{backend} all_reduce {name}", lambda group=group: dist.all_reduce(x, group=group)
        yield (
            f"{backend} all_gather {name}",
            lambda group=group: dist.all_gather_into_tensor(gathered, x, group=group),
        )


def messages(name: str, n: int) -> Calls:
    """Messages of torch.distributed between two ranks, by weft's backend and by gloo."""
    if dist.get_world_size() != 2:
        return
    tensors = [torch.ones(n), torch.ones(n)]
    for backend in ("weft", "gloo"):
        group = dist.new_group(backend=backend)
        yield f"{backend} ring {name}", partial(ring, group, tensors)
        yield f"{backend} there and back {name}", partial(round_trip, group, tensors)


def training(rounds: int) -> dict[str, float]:
    """Training steps through torch.distributed of each of examples/torch_distributed.py."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import torch_distributed as example

    found = {}
    with torch.inference_mode(False):
        ranks = dist.get_world_size()
        tokens = torch.randint(example.VOCABULARY, (2 * ranks, 8))
        dist.broadcast(tokens, 0)
        groups = {backend: dist.new_group(backend=backend) for backend in example.BACKENDS}
        for name, made in example.VARIANTS.items():
            calls = {
                f"{backend} {name}": partial(
                    made(example.transformer(256, 2 * ranks, 4), group), tokens
                )
                for backend, group in groups.items()
            }
            found |= medians(calls, 1, rounds, 3)
    return found


def few_rows(rounds: int) -> dict[str, float]:
    """Few rows of 256 columns of each rank, as in decoding, and the parts of a fused call."""
    found = repeated(iter([("barrier", weft.barrier)]), 0, rounds)
    weight = torch.randn(256, 256)
    packed, ranks = weft.pack(weight), weft.init().ranks
    for rows in (1, 2, 8):
        a, y = torch.randn(rows, 256), torch.empty(rows, 256)
        gathered, every = torch.empty(ranks * rows, 256), torch.randn(ranks * rows, 256)

        def parts_of_gather(a: torch.Tensor = a, gathered: torch.Tensor = gathered) -> object:
            return torch.mm(weft.all_gather(a, out=gathered), weight)

        def parts_of_reduce(a: torch.Tensor = a, y: torch.Tensor = y) -> object:
            return weft.all_reduce(torch.mm(a, weight, out=y), out=y)

        calls: dict[str, Call] = {
            "torch.mm": lambda a=a, y=y: torch.mm(a, weight, out=y),
            "all_gather_matmul": lambda a=a: weft.all_gather_matmul(a, weight),
            "all_gather_matmul, packed": lambda a=a: weft.all_gather_matmul(a, packed),
            "all_gather, torch.mm": parts_of_gather,
            "matmul_all_reduce": lambda a=a: weft.matmul_all_reduce(a, weight),
            "matmul_all_reduce, packed": lambda a=a: weft.matmul_all_reduce(a, packed),
            "torch.mm, all_reduce": parts_of_reduce,
            "matmul_reduce_scatter": lambda a=every: weft.matmul_reduce_scatter(a, weight),
            "matmul_reduce_scatter, packed": lambda a=every: weft.matmul_reduce_scatter(a, packed),
        }
        size = f"{rows} row{'s' if rows > 1 else ''}"
        named = ((f"{name}, {size}", call) for name, call in calls.items())
        found |= repeated(named, 0, rounds)
    return found


def first_calls(rounds: int) -> dict[str, float]:
    """The first calls of numbers of rows after others have chosen, and repeated ones."""
    weight, ranks, found = torch.randn(256, 256), weft.init().ranks, {}
    operators: dict[str, Callable[[torch.Tensor], object]] = {
        "all_gather_matmul": lambda a: weft.all_gather_matmul(a, weight),
        "matmul_all_reduce": lambda a: weft.matmul_all_reduce(a, weight),
        "matmul_reduce_scatter": lambda a: weft.matmul_reduce_scatter(a, weight),
        "all_reduce": weft.all_reduce,
        "all_gather": weft.all_gather,
    }
    for name, operator in operators.items():
        shares = ranks if name == "matmul_reduce_scatter" else 1
        operator(torch.randn(100 * shares, 256))
        first, again = [], []
        for rows in random.Random(0).sample(FIRST_ROWS, len(FIRST_ROWS)):
            call = partial(operator, torch.randn(rows * shares, 256))
            first.append(seconds(call, 1))
            again.append(median(seconds(call, 1) for _ in range(rounds)))
        found[f"{name}, first"] = 1e6 * median(first)
        found[f"{name}, repeated"] = 1e6 * median(again)
        found[f"{name}, longest first"] = 1e6 * max(first)
    return found


def products(rounds: int) -> dict[str, float]:
    """Fused operators of 1024 cubed by weights that are packed or not, by dtype."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(512, 1024).to(dtype), torch.randn(1024, 512).to(dtype)
        packed, name = weft.pack(b), str(dtype).removeprefix("torch.")
        calls: dict[str, Call] = {
            f"all_gather_matmul {name}": lambda a=a, b=b: weft.all_gather_matmul(a, b),
            f"all_gather_matmul {name}, packed": lambda a=a, b=packed: weft.all_gather_matmul(a, b),
        }
        found |= medians(calls, 1, rounds, 5)
    return found


GROUPS: dict[str, Callable[[int], dict[str, float]]] = {
    "collectives": lambda rounds: of_sizes(collectives, rounds),
    "symmetric": lambda rounds: of_sizes(symmetric, rounds),
    "in place": lambda rounds: of_sizes(in_place, rounds),
    "torch.distributed": lambda rounds: of_sizes(through_torch, rounds),
    "messages": lambda rounds: of_sizes(messages, rounds),
    "training": training,
    "few rows": few_rows,
    "first calls": first_calls,
    "products": products,
}


def main(group: str, rounds: int = ROUNDS) -> None:
    """Print the times of a group on rank 0."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WEFT_CACHE"] = folder  # without what another run has measured
        dist.init_process_group("gloo")
        with weft.init() as world, torch.inference_mode():
            found = GROUPS[group](rounds)
            if world.rank == 0:
                print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
