"""One-sided calls compared with a simple model of memory: after any calls of real ranks, in any
order, their memories equal the model's tensors.
"""

from __future__ import annotations

import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.ranks import on_ranks

import weft

RANKS, BYTES, COUNTERS = 3, 1536, 6
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex128,
)
COMPARE = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}


def view(memory, dtype, shape, strides, offset):
    """Elements of a tensor of bytes."""
    return memory.view(dtype).as_strided(shape, strides, offset)


class Model:
    """A rank's memories and counters, as plain tensors and numbers."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(rank)
        self.memories = {  # zeroes and ones, so that every byte is also a valid bool
            name: torch.randint(2, (BYTES,), dtype=torch.uint8, generator=generator)
            for name in ("symmetric", "local")
        }
        self.counters = [0] * COUNTERS


def obey(world, address):
    """Execute the commands of the test, and send it the contents of the memories."""
    memories = {
        "symmetric": world.empty(BYTES, dtype=torch.uint8),
        "local": torch.empty(BYTES, dtype=torch.uint8),
    }
    signals = world.signals(COUNTERS)

    def reset():
        for name, memory in Model(world.rank).memories.items():
            memories[name].copy_(memory)
        weft.notify(signals, slice(None), world.rank, "set", 0)

    def move(kind, moves):
        handles = []
        for dst, dst_view, src, src_view, peer in moves:
            call = getattr(weft, kind)
            handles.append(
                call(view(memories[dst], *dst_view), view(memories[src], *src_view), peer)
            )
        if kind.endswith("async"):
            handles[-1].wait()
            assert all(transfer.done() for transfer in handles)

    def compare(index, cmp, value):
        satisfied = weft.test(signals, index, cmp, value)
        if satisfied:
            weft.wait(signals, index, cmp, value)
        return satisfied

    actions = {
        "reset": reset,
        "move": move,
        "notify": lambda *arguments: weft.notify(signals, *arguments),
        "compare": compare,
        "counters": lambda: signals[:],
        "memories": lambda: {name: memory.numpy().tobytes() for name, memory in memories.items()},
    }
    with Client(address) as test:
        test.send(world.rank)
        while (command := test.recv()) is not None:
            action, *arguments = command
            test.send(actions[action](*arguments))


@st.composite
def views(draw):
    """A dtype, a shape, and two layouts in a memory, without overlapping elements."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    elements = BYTES // dtype.itemsize

    def layout():
        strides, stride = [0] * len(shape), draw(st.integers(1, 2))
        for dimension in draw(st.permutations(range(len(shape)))):
            strides[dimension] = stride
            stride = stride * max(shape[dimension], 1) + draw(st.sampled_from([0, 0, 1, 3]))
        last = (
            sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
            if all(shape)
            else 0
        )
        if last >= elements:
            return None
        return dtype, tuple(shape), tuple(strides), draw(st.integers(0, elements - 1 - last))

    one, other = layout(), layout()
    return None if one is None or other is None else (one, other)


MOVES = st.lists(
    st.tuples(
        views().filter(bool), st.integers(0, RANKS - 1), st.sampled_from(["symmetric", "local"])
    ),
    min_size=1,
    max_size=12,
)
VALUES = st.one_of(st.integers(0, 6), st.integers(0, 2**40))


@st.composite
def indices(draw):
    start, stop = sorted(draw(st.tuples(st.integers(0, COUNTERS), st.integers(0, COUNTERS))))
    index = slice(start, stop, draw(st.integers(1, 3)))
    return draw(st.sampled_from([index, min(start, COUNTERS - 1)]))


def machine(ranks):
    """The state machine over these connections to ranks."""

    def ask(rank, *command):
        ranks[rank].send(command)
        return ranks[rank].recv()

    class Memory(RuleBasedStateMachine):
        @initialize()
        def begin(self):
            self.models = [Model(rank) for rank in range(RANKS)]
            for rank in range(RANKS):
                ask(rank, "reset")

        @rule(
            rank=st.integers(0, RANKS - 1),
            kind=st.sampled_from(["put", "get", "put_async", "get_async"]),
            moves=MOVES,
        )
        def move(self, rank, kind, moves):
            is_put, orders = kind.startswith("put"), []
            for (one, other), peer, name in moves:
                dst, src = ("symmetric", name) if is_put else (name, "symmetric")
                orders.append((dst, one, src, other, peer))
                target = self.models[peer if is_put else rank].memories[dst]
                source = self.models[rank if is_put else peer].memories[src]
                view(target, *one).copy_(view(source, *other).clone())
            ask(rank, "move", kind, orders)
            self.look()

        def look(self):
            for rank, model in enumerate(self.models):
                for name, memory in ask(rank, "memories").items():
                    assert memory == model.memories[name].numpy().tobytes(), (
                        f"the {name} memory of rank {rank}"
                    )

        @rule(
            rank=st.integers(0, RANKS - 1),
            peer=st.integers(0, RANKS - 1),
            index=indices(),
            add=st.booleans(),
            value=VALUES,
        )
        def notify(self, rank, peer, index, add, value):
            ask(rank, "notify", index, peer, "add" if add else "set", value)
            counters = self.models[peer].counters
            for i in range(COUNTERS)[index] if isinstance(index, slice) else [index]:
                counters[i] = counters[i] * add + value
            assert ask(peer, "counters") == counters

        @rule(
            rank=st.integers(0, RANKS - 1),
            index=indices(),
            cmp=st.sampled_from(list(COMPARE)),
            value=VALUES,
        )
        def compare(self, rank, index, cmp, value):
            counters = self.models[rank].counters
            chosen = counters[index] if isinstance(index, slice) else [counters[index]]
            assert ask(rank, "compare", index, cmp, value) == all(
                COMPARE[cmp](counter, value) for counter in chosen
            )

    return Memory


@pytest.mark.data
def test_memory_equals_the_model():
    """Thousands of copies of random views, synchronous and asynchronous, and of notifies, on three
    ranks that the test directs.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        listener = stack.enter_context(Listener(os.path.join(folder, "test")))
        finished = stack.enter_context(ThreadPoolExecutor()).submit(
            on_ranks, obey, RANKS, listener.address
        )
        connected = [stack.enter_context(listener.accept()) for _ in range(RANKS)]
        ranks = {connection.recv(): connection for connection in connected}
        chosen = settings(
            max_examples=50,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(machine(ranks), settings=chosen)
        finally:
            for connection in connected:
                connection.send(None)
        finished.result()


def exchange(world, steps):
    """In each step every rank sends a random view to another rank, or to itself, through one of two
    slots, and checks the view it receives.
    """
    words = 4096
    slots = world.empty(world.ranks, 2, words, dtype=torch.int32)
    full, free = world.signals(2 * world.ranks, "full"), world.signals(2 * world.ranks, "free")
    choose = random.Random(7)
    sent = {(source, target): 0 for source in range(world.ranks) for target in range(world.ranks)}
    for step in range(steps):
        targets = choose.sample(range(world.ranks), world.ranks)
        rows, columns = choose.randint(0, 60), choose.randint(1, 60)
        gap, transposed, begin = choose.randint(0, 4), choose.random() < 0.5, choose.randint(0, 9)
        how = choose.choice(["put_notify", "put", "put_async"])

        def place(source, slot, shape=(rows, columns), gap=gap, begin=begin, transposed=transposed):
            layout = slots[source, slot].as_strided(
                shape, (shape[1] + gap, 1), int(slots[source, slot].storage_offset()) + begin
            )
            return layout.t() if transposed else layout

        def payload(source, shape=(rows, columns), step=step, transposed=transposed):
            numbers = (
                torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
                + 10_000 * step
                + 1000 * source
            )
            return numbers.t() if transposed else numbers

        target, source = targets[world.rank], targets.index(world.rank)
        round_of_slot, slot = divmod(sent[world.rank, target], 2)
        weft.wait(free, 2 * target + slot, ">=", round_of_slot)
        if how == "put_notify":
            weft.put_notify(
                place(world.rank, slot), payload(world.rank), full, 2 * world.rank + slot, target
            )
        else:
            handle = getattr(weft, how)(place(world.rank, slot), payload(world.rank), target)
            if handle is not None:
                handle.wait()
            weft.notify(full, 2 * world.rank + slot, target)
        round_of_slot, slot = divmod(sent[source, world.rank], 2)
        weft.wait(full, 2 * source + slot, ">=", round_of_slot + 1)
        assert torch.equal(place(source, slot), payload(source)), step
        slots[source, slot] = -1
        weft.notify(free, 2 * world.rank + slot, source)
        for rank, other in enumerate(targets):
            sent[rank, other] += 1


@pytest.mark.data
@pytest.mark.parametrize("ranks", [2, 4])
def test_thousands_of_messages_between_unsynchronized_ranks(ranks):
    on_ranks(exchange, ranks, 2000)
