"""Kernels compiled ahead of time, for GPUs that need not be there."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


SHARED = {"sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
"""The shared memory that a program may have, in bytes."""


class Compiled(NamedTuple):
    """The assembly of a kernel, how many registers it spills to memory, and the bytes of shared
    memory that it takes.
    """

    assembly: str
    spills: int
    shared: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.assembly))


def build(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    even: Sequence[str] = (),
    unaligned: Sequence[str] = (),
    **options: Any,
) -> Compiled:
    """Compile with pointers that begin at multiples of 16 bytes, as all of torch's do but for those
    that are `unaligned`, and `even` arguments that are multiples of 16.

    `signature` gives the types of the arguments that are no `constants`.
    """
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if (kind[0] == "*" and name not in unaligned) or name in even
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, types, dict(constants), aligned
    )
    made = triton.compile(source, target=TARGETS[target], options=options)
    if "ptx" in made.asm:
        return Compiled(made.asm["ptx"], _local_bytes(made.asm["cubin"]), made.metadata.shared)
    assembly = made.asm["amdgcn"]
    # scalar registers are spilled to vector registers
    spills = re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    assert len(spills) == 1
    return Compiled(assembly, int(spills[0]), made.metadata.shared)


def _local_bytes(cubin: bytes) -> int:
    """Bytes of a thread's own memory that the code uses: registers are spilled to it."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True
        ).stdout
    stack, local = re.findall(r"STACK:(\d+)", usage), re.findall(r"LOCAL:(\d+)", usage)
    assert stack
    assert local
    return sum(map(int, stack + local))
