"""Execution plans in the format of MSCCL++, as data of tests: two ranks that gather or exchange."""

from __future__ import annotations

import json
from typing import Any

Op = dict[str, Any]

LETTERS = "ios"


def local(letter: str, index: int, size: int = 1) -> Op:
    return {"type": letter, "index": index, "size": size}


def remote(letter: str, index: int, size: int = 1) -> Op:
    """Rows of the only peer."""
    return {"buffer_id": LETTERS.index(letter), "index": index, "size": size}


def op(name: str, src: Op | None = None, dst: Op | None = None, **more: Any) -> Op:
    found = {"name": name, **more}
    found |= {"src_buff": [src]} if src else {}
    return found | ({"dst_buff": [dst]} if dst else {})


def over(name: str, kind: str = "memory", *channels: int) -> Op:
    """A signal, a wait or a flush over channels."""
    return op(name, channel_ids=list(channels or (0,)), channel_type=kind)


NOP = op("nop")


def plan(
    *blocks: list[list[Op]], collective: str = "allgather", chunks: int = 2, **more: Any
) -> dict[str, Any]:
    """A plan of two ranks, each with its thread blocks, and with a memory and a port channel to the
    other for each of its thread blocks.
    """
    gpus = []
    for rank, own in enumerate(blocks):
        peer = 1 - rank
        buffers = [
            {"rank": peer, "type": letter, "access_channel_types": ["memory", "port"]}
            for letter in LETTERS
        ]
        kinds = ("memory", "port")
        gpus.append(
            {
                "id": rank,
                "input_chunks": chunks // 2 if collective == "allgather" else chunks,
                "output_chunks": chunks,
                "scratch_chunks": 2,
                "channels": [
                    {"channel_type": kind, "connected_to": [peer] * len(own)} for kind in kinds
                ],
                "remote_buffers": buffers,
                "semaphores": [{"init_value": 0}],
                "threadblocks": [
                    {
                        "id": number,
                        "ops": ops,
                        "channels": [
                            {"channel_type": kind, "channel_ids": [number]} for kind in kinds
                        ],
                        "remote_buffer_refs": [
                            {"access_channel_type": kind, "remote_buffer_ids": [0, 1, 2]}
                            for kind in kinds
                        ],
                    }
                    for number, ops in enumerate(own)
                ],
            }
        )
    file = {
        "name": "made for a test",
        "collective": collective,
        "protocol": "Simple",
        "inplace": True,
        "reuse_resources": False,
        "gpus": gpus,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": 2**64 - 1,
    }
    return json.loads(json.dumps(file | more))


def puts(rank: int) -> list[Op]:
    """A rank's thread block of an all-gather: ready, put, done."""
    return [
        over("rlxsignal"),
        over("rlxwait"),
        NOP,
        op("put", local("o", rank), remote("o", rank), channel_type="memory"),
        NOP,
        over("signal"),
        over("wait"),
    ]


def packets(rank: int) -> list[Op]:
    """A rank's thread block of an all-gather by packets."""
    peer = 1 - rank
    return [
        op("ppkt", local("o", rank), remote("s", rank), channel_type="memory"),
        op("upkt", local("s", peer), local("o", peer)),
    ]


def posts(rank: int, put: str = "pwsf") -> list[Op]:
    """A rank's thread block of an all-gather over ports."""
    return [
        over("signal", "port"),
        over("wait", "port"),
        NOP,
        op(put, local("o", rank), remote("o", rank), channel_type="port", channel_ids=[0]),
        over("wait", "port"),
    ]


def added(rank: int) -> list[Op]:
    """A rank's thread block of an all-reduce: it adds its half and puts the sum."""
    half = local("i", rank)
    return [
        over("rlxsignal"),
        over("rlxwait"),
        NOP,
        op("rres", half, half, channel_type="memory", reduce_op="sum")
        | {
            "src_buff": [half, remote("i", rank)],
            "dst_buff": [half, remote("i", rank)],
        },
        NOP,
        over("signal"),
        over("wait"),
    ]
