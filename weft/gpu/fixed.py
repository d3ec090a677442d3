"""A plan compiled for fixed sizes and layouts of tensors: its steps contain addresses of rows, not
numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft.checks import name as dtype_name
from weft.engines.engine import Engine
from weft.engines.program import Dtypes, Program, Tensors, kinds, moves
from weft.plan import Plan, Region, accesses, writes
from weft.plan.binding import bind
from weft.schedules.device_options import DEFAULT
from weft.world import World, memory


class Geometry(NamedTuple):
    """The layout of a buffer's rows in memory; `place` is ``(segment number, byte offset)`` in
    symmetric memory.
    """

    dtype: torch.dtype
    columns: int
    stride: int  # bytes from the beginning of a row to that of the next
    place: tuple[int, int] | None = None

    @classmethod
    def of(cls, tensor: Tensor, world: World) -> Geometry:
        """The geometry of a tensor. Raises `ValueError` unless it is a matrix with contiguous
        rows.
        """
        if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
            layout = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            raise ValueError(f"a buffer must be a matrix with contiguous rows; got {layout}")
        rows, columns = tensor.shape
        segment = memory.find(tensor)
        place = None
        if segment is not None and segment.world == world.number:
            place = segment.number, memory.offset(tensor, segment, world.rank)
        return cls(
            tensor.dtype,
            columns,
            (tensor.stride(0) if rows > 1 else columns) * tensor.itemsize,
            place,
        )


def _without_empty_moves(plan: Plan) -> Plan:
    """The plan without instructions on zero rows."""
    lanes = tuple(
        {
            name: tuple(i for i in lane if not writes(i) or writes(i)[0].rows)
            for name, lane in lanes.items()
        }
        for lanes in plan.lanes
    )
    return replace(plan, lanes=lanes)


class FixedProgram(Program):
    """A plan compiled for one rank, one set of sizes and one geometry of its tensors."""

    options = DEFAULT

    def __init__(
        self, engine: Engine, plan: Plan, tensors: Tensors, rows: Sequence[int], dtypes: Dtypes
    ) -> None:
        super().__init__(engine, _without_empty_moves(bind(plan, rows)))
        self.geometry = {name: Geometry.of(tensor, self.world) for name, tensor in tensors.items()}
        self.kinds = kinds(moves(plan), {name: t.dtype for name, t in tensors.items()}, dtypes)
        for name, (dtype, like) in self.kinds.items():
            columns = self.geometry[like].columns
            self.geometry.setdefault(name, Geometry(dtype, columns, columns * dtype.itemsize))
        self.check_columns(tensors)
        self.call = self._describe()
        self._check(tensors)
        self.segments = {
            name: segment for name, t in tensors.items() if (segment := memory.find(t)) is not None
        }
        self.workspace = self._reserve()

    def rows_of(self, region: Region) -> tuple[int, int]:
        return region.start, region.stop

    def _describe(self) -> str:
        """A line with the user's call, and a line with the values that must be equal on all ranks:
        rows, dtypes, places in symmetric memory, a digest of the plan, and the options.
        """
        layouts = []
        called = {}
        for name, buffer in self.plan.buffers.items():
            geometry = self.geometry.get(name)
            if geometry is None or name not in self.agreed:
                continue
            place = ""
            if geometry.place and name in self.shared:
                place = (
                    f" in symmetric segment {geometry.place[0]} at byte "
                    f"{geometry.place[1]}, {geometry.stride} bytes a row"
                )
            layouts.append(
                f"{name}={[*buffer.rows]} rows x {geometry.columns} "
                f"{dtype_name(geometry.dtype)}{place}, "
            )
            like = self.kinds[name][1]
            rows = self.plan.buffers[like].rows
            columns = self.geometry[like].columns
            dtype = dtype_name(self.geometry[like].dtype)
            shape = (rows[0], columns) if len({*rows}) == 1 else f"{[*rows]} rows x {columns}"
            called[like] = f"{like}={shape} {dtype}"
        operator, launch = self.plan.operator, self.plan.launch
        call = ", ".join([*called.values(), *([] if launch is None else [str(launch)])])
        plan = f"algorithm={self.plan.algorithm}, plan {self.plan.digest:08x}"
        plan += f", {self.options}" if self.options != DEFAULT else ""
        return f"{operator}({call})\n{operator}({''.join(layouts)}{plan})"

    def _check(self, tensors: Tensors) -> None:
        self.check_tensors(tensors)
        for name, buffer in self.plan.buffers.items():
            if buffer.role == "workspace":
                continue
            if len(tensors[name]) != buffer.rows[self.world.rank]:
                raise ValueError(
                    f"{name!r} has {len(tensors[name])} rows, but this plan needs "
                    f"{buffer.rows[self.world.rank]}"
                )
            if name in self.shared and self.geometry[name].place is None:
                raise ValueError(
                    f"peers access {name!r} in this plan, so it must be symmetric: make it with "
                    "world.empty(...)"
                )

    def _reserve(self) -> dict[str, int]:
        """The offsets of the workspaces that the plan uses, equal on all ranks; grows the engine's
        workspace to hold them.
        """
        used = {region.buffer for _, i in self.plan.instructions() for region in accesses(i)}
        offsets = {}
        size = 0
        for name, buffer in self.plan.buffers.items():
            if buffer.role == "workspace" and name in used:
                offsets[name] = size
                size += -(-max(buffer.rows) * self.geometry[name].stride // 4096) * 4096
        if offsets:
            self.segments["workspace"] = self.engine.reserve(size, self.call)
        return offsets

    def place(self, buffer: str) -> tuple[memory.Segment, int]:
        """The segment of a buffer in symmetric memory, and the byte of it at which rank's part of
        the buffer begins.
        """
        if buffer in self.workspace:
            return self.segments["workspace"], self.workspace[buffer]
        place = self.geometry[buffer].place
        assert place is not None
        return self.segments[buffer], place[1]

    def _rows(self, region: Region) -> Tensor | Region:
        """A tensor for rows whose address is the same in every call; the region itself for rows of
        this rank's own inputs and outputs.
        """
        if region.rank == self.world.rank and region.buffer not in self.workspace:
            return region
        dtype, columns, stride, _ = self.geometry[region.buffer]
        segment, offset = self.place(region.buffer)
        part = memory.numbers(segment, region.rank, dtype)
        step = stride // dtype.itemsize
        return part.as_strided(
            (region.rows, columns), (step, 1), offset // dtype.itemsize + region.start * step
        )
