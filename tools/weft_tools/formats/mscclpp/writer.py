"""Writes a plan as an execution plan of MSCCL++: one that `reader` reads as an equal plan.

Between operations that the plan orders the threads of a block meet, at a ``nop``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from weft.plan import Copy, Instruction, Notify, Plan, Reduce, Region, Wait, reads, writes
from weft_tools.formats.mscclpp.collectives import INPUT, OUTPUT, SCRATCH

Json = dict[str, Any]

OPERATIONS, CHANNELS, TOGETHER = 64, 16, 8
"""The most operations of a thread block that the executor has room for, the most channels, and the
most channels of an operation.
"""


def write(plan: Plan) -> Json:
    """The execution plan of a plan in its words (`weft_tools.formats.mscclpp.exported.exported`),
    which JSON can hold.

    Raises `ValueError` for a plan for which the executor has no room.
    """
    gpus = [_Gpu(plan, rank).json() for rank in range(plan.ranks)]
    scratch = plan.buffers.get(SCRATCH)
    return {
        "name": plan.algorithm,
        "collective": plan.operator,
        "protocol": "Simple",
        "inplace": False,
        "reuse_resources": False,
        "gpus": gpus,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": scratch is not None and scratch.copies == 2,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": 2**64 - 1,
    }


class _Gpu:
    """A rank while it is written."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        # the channels to each peer: as many as the most signals of either direction have numbers
        many: dict[int, int] = {}
        self.semaphores = 0
        for at, instruction in plan.instructions():
            if not isinstance(instruction, Notify):
                continue
            number = int(instruction.signal.name.split()[1]) + 1
            ends = {at, instruction.rank}
            if ends == {rank}:
                self.semaphores = max(self.semaphores, number)
            elif rank in ends:
                (peer,) = ends - {rank}
                many[peer] = max(many.get(peer, 0), number)
        self.channels = [(peer, at) for peer in sorted(many) for at in range(many[peer])]
        remote = {
            (region.rank, region.buffer)
            for at, instruction in plan.instructions()
            if at == rank
            for region in (*reads(instruction), *writes(instruction))
            if region.rank != rank
        }
        self.remote = sorted(remote)

    def json(self) -> Json:
        rank, buffers = self.rank, self.plan.buffers
        scratch = buffers[SCRATCH].rows[rank] if SCRATCH in buffers else 0
        blocks = [
            _Block(self, number, lane).json()
            for number, lane in enumerate(self.plan.lanes[rank].values())
        ]
        peers = [peer for peer, _ in self.channels]
        return {
            "id": rank,
            "input_chunks": buffers[INPUT].rows[rank],
            "output_chunks": buffers[OUTPUT].rows[rank],
            "scratch_chunks": scratch,
            "threadblocks": blocks,
            "channels": [{"channel_type": "memory", "connected_to": peers}] if peers else [],
            "remote_buffers": [
                {"rank": peer, "type": letter, "access_channel_types": ["memory"]}
                for peer, letter in self.remote
            ],
            "semaphores": [{"init_value": 0}] * self.semaphores,
        }


class _Block:
    """A thread block while it is written."""

    def __init__(self, gpu: _Gpu, number: int, lane: Sequence[Instruction]) -> None:
        self.gpu, self.number = gpu, number
        self.channels: list[int] = []
        self.remote: list[int] = []
        self.ops: list[Json] = []
        # since the threads last met
        self.moves: list[Copy | Reduce] = []
        self.waits = False
        for instruction in lane:
            self.add(instruction)

    def json(self) -> Json:
        """The thread block. Raises `ValueError` if the executor has no room for it."""
        for what, many, most in (
            ("operations", len(self.ops), OPERATIONS),
            ("channels", len(self.channels), CHANNELS),
            ("buffers of peers", len(self.remote), CHANNELS),
        ):
            if many > most:
                raise ValueError(
                    f"thread block {self.number} of rank {self.gpu.rank} would have {many} {what}; "
                    f"the executor has room for {most}"
                )
        kind = {"channel_type": "memory", "channel_ids": self.channels}
        refs = {"access_channel_type": "memory", "remote_buffer_ids": self.remote}
        return {
            "id": self.number,
            "ops": self.ops,
            "channels": [kind] if self.channels else [],
            "remote_buffer_refs": [refs] if self.remote else [],
        }

    def add(self, instruction: Instruction) -> None:
        match instruction:
            case Notify(peer, signal, relaxed):
                if not relaxed and (self.moves or self.waits):
                    self.meet()
                self.signal("signal", "sem_release", peer, signal.name, relaxed)
            case Wait(signal, count):
                relaxed = self.relaxed(instruction)
                self.signal("wait", "sem_acquire", signal.source, signal.name, relaxed)
                self.waits = True
                assert count
            case Copy(compress="") | Reduce():
                if self.waits or any(self.conflicts(instruction)):
                    self.meet()
                self.ops.append(self.move(instruction))
                self.moves.append(instruction)
            case _:
                raise ValueError(f"an execution plan has no words for {instruction}")

    def meet(self) -> None:
        self.ops.append({"name": "nop"})
        self.moves.clear()
        self.waits = False

    def conflicts(self, instruction: Copy | Reduce) -> Iterator[bool]:
        for other in self.moves:
            for one in writes(instruction):
                yield from (one.overlaps(two) for two in (*reads(other), *writes(other)))
            for one in reads(instruction):
                yield from (one.overlaps(two) for two in writes(other))

    def relaxed(self, wait: Wait) -> bool:
        """Whether the notify that a wait is for is relaxed."""
        lanes = self.gpu.plan.lanes[wait.signal.source].values()
        notifies = [
            each
            for lane in lanes
            for each in lane
            if isinstance(each, Notify) and (each.rank, each.signal) == (self.gpu.rank, wait.signal)
        ]
        return notifies[wait.count - 1].relaxed

    def signal(self, remote: str, own: str, peer: int, name: str, relaxed: bool) -> None:
        """A signal or a wait: by the operation before, if that is one too, and not of this channel
        or semaphore.
        """
        number = int(name.split()[1])
        if peer == self.gpu.rank:
            self.together({"name": own}, "semaphore_ids", number)
        else:
            channel = self.index(self.channels, self.gpu.channels.index((peer, number)))
            made = {"name": f"rlx{remote}" if relaxed else remote, "channel_type": "memory"}
            self.together(made, "channel_ids", channel)

    def together(self, operation: Json, key: str, number: int) -> None:
        last = self.ops[-1] if self.ops else {}
        joins = last.get("name") == operation["name"] and len(last[key]) < TOGETHER
        if joins and number not in last[key]:
            last[key].append(number)
        else:
            self.ops.append({**operation, key: [number]})

    def index(self, among: list[int], number: int) -> int:
        """The index of a channel or a buffer among those of this thread block."""
        if number not in among:
            among.append(number)
        return among.index(number)

    def buffer(self, region: Region) -> Json:
        rows = {"index": region.start, "size": region.rows}
        if region.rank == self.gpu.rank:
            return {"type": region.buffer, **rows}
        at = self.gpu.remote.index((region.rank, region.buffer))
        return {"buffer_id": self.index(self.remote, at), **rows}

    def move(self, instruction: Copy | Reduce) -> Json:
        rank = self.gpu.rank
        far = [r for r in (*reads(instruction), *writes(instruction)) if r.rank != rank]
        match instruction:
            case Copy(_, dst):
                name = "copy" if not far else "put" if dst.rank != rank else "get"
            case Reduce():
                name = "rre" if far else "re"
        made: Json = {
            "name": name,
            "src_buff": [*map(self.buffer, reads(instruction))],
            "dst_buff": [*map(self.buffer, writes(instruction))],
        }
        made |= {"channel_type": "memory"} if far else {}
        return made | ({"reduce_op": instruction.op} if isinstance(instruction, Reduce) else {})


def crossed(file: Json) -> Iterator[str]:
    """The gets of a plan of rows that have another offset at the peer. MSCCL++'s executor takes the
    offset of the one for the other (at 1f5f065, by its source), so they would copy other rows.
    """
    for gpu in file["gpus"]:
        for block in gpu["threadblocks"]:
            for number, operation in enumerate(block["ops"]):
                pairs = zip(
                    operation.get("src_buff", ()), operation.get("dst_buff", ()), strict=False
                )
                if operation["name"] == "get" and any(a["index"] != b["index"] for a, b in pairs):
                    yield f"rank {gpu['id']}, thread block {block['id']}, operation {number}"
