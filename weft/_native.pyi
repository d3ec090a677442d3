from collections.abc import Sequence
import enum
from typing import Annotated, Final, overload

import torch


class Dtype(enum.Enum):
    float16 = 0

    bfloat16 = 1

    float32 = 2

    float64 = 3

    int8 = 4

    int16 = 5

    int32 = 6

    int64 = 7

    uint8 = 8

    bool = 9

class Combine(enum.Enum):
    sum = 0

    avg = 1

    max = 2

    min = 3

class WaitStatus(enum.Enum):
    none = 0

    timeout = 1

    failed = 2

    left = 3

    mismatch = 4

    interrupted = 5

    lane = 6

class TensorSnapshot:
    def __init__(self, tensor: object, api: object | None) -> None: ...

    def matches(self, tensor: object | None) -> bool: ...

class Mapping:
    @property
    def base(self) -> int: ...

def create_mapping(arg: int, /) -> tuple[Mapping, int]: ...

def attach_mapping(arg0: int, arg1: int, /) -> Mapping: ...

class Segment:
    def __init__(self, arg0: Sequence[Mapping], arg1: int, arg2: int, arg3: int, /) -> None: ...

    @property
    def world(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def size(self) -> int: ...

    def base(self, arg: int, /) -> int: ...

    def bytes(self, arg: int, /) -> Annotated[torch.Tensor, dict(dtype='uint8')]: ...

class Mesh:
    def __init__(self, arg0: int, arg1: Sequence[int], /) -> None: ...

    def send(self, arg0: int, arg1: str, arg2: int, /) -> None: ...

    def receive(self, arg0: int, arg1: float, /) -> tuple[str, int]: ...

    def abort(self, arg0: str, arg1: int, arg2: str, /) -> None: ...

    def leave(self) -> None: ...

    def left(self, arg: int, /) -> bool: ...

    def failure(self) -> tuple[str, int, str]: ...

class Compiled:
    def __init__(self, arg0: str, arg1: int, arg2: Sequence[int], arg3: Sequence[tuple[int, int]], arg4: int, /) -> None: ...

    def copy(self, arg0: int, arg1: tuple[int, int, int], arg2: tuple[int, int, int], arg3: int, arg4: int, arg5: int, arg6: bool, /) -> None: ...

    def reduce(self, arg0: int, arg1: Sequence[tuple[int, int, int]], arg2: Sequence[Dtype], arg3: int, arg4: int, arg5: int, arg6: Combine, /) -> None: ...

    def notify(self, arg0: int, arg1: Executor, arg2: int, arg3: int, /) -> None: ...

    def wait(self, arg0: int, arg1: Executor, arg2: int, arg3: int, arg4: int, arg5: int, /) -> None: ...

    def pause(self, arg: int, /) -> None: ...

    def set_base(self, arg0: int, arg1: int, /) -> None: ...

    @property
    def call(self) -> int: ...

    @property
    def digest(self) -> int: ...

    def set_span(self, arg0: int, arg1: int, arg2: int, arg3: int, /) -> None: ...

    def spans(self, arg: int, /) -> list[tuple[int, int]]: ...

    @property
    def stopped(self) -> int: ...

    def wait_failure(self, arg: int, /) -> tuple[WaitStatus, int, int, int, int]: ...

class Executor:
    def __init__(self, arg0: Mesh, arg1: Segment, arg2: int, /) -> None: ...

    @staticmethod
    def control_bytes(arg: int, /) -> int: ...

    max_names: Final[int] = ...
    """(arg: object, /) -> int"""

    @property
    def calls(self) -> int: ...

    def begin(self, arg0: Compiled, arg1: float, /) -> None: ...

    def run(self, arg0: Compiled, arg1: int, arg2: int, /) -> int: ...

    def start(self, arg0: Compiled, arg1: int, /) -> None: ...

    @overload
    def join(self) -> None: ...

    @overload
    def join(self, arg0: Compiled, arg1: float, /) -> bool: ...

    @property
    def busy(self) -> bool: ...

    def execute(self, arg0: Compiled, arg1: float, /) -> bool: ...

    def repeat(self, compiled: Compiled, a: TensorSnapshot, out: TensorSnapshot, now_a: object | None, now_out: object | None, timeout: float) -> object: ...

    def mismatch(self, arg0: Compiled, arg1: int, /) -> bool: ...

    def peer_call(self, arg0: int, arg1: int, /) -> str: ...

    def note_call(self, arg0: int, arg1: int, arg2: int, arg3: str, /) -> None: ...

    def emulate_link(self, arg0: float, arg1: float, /) -> None: ...

    def trace(self, arg: bool, /) -> None: ...

class Compare(enum.Enum):
    equal = 0

    not_equal = 1

    greater = 2

    greater_equal = 3

    less = 4

    less_equal = 5

class SignalArray:
    def __init__(self, arg0: Mesh, arg1: Segment, arg2: int, /) -> None: ...

    def add(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, /) -> bool: ...

    def set(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, /) -> bool: ...

    def values(self, arg0: int, arg1: int, arg2: int, /) -> list[int]: ...

    def test(self, arg0: int, arg1: int, arg2: int, arg3: Compare, arg4: int, /) -> bool: ...

    @property
    def failed(self) -> bool: ...

    def wait(self, arg0: int, arg1: int, arg2: int, arg3: Compare, arg4: int, arg5: float, /) -> tuple[WaitStatus, int, int]: ...

class StridedCopy:
    pass

def one_sided(arg0: bool, arg1: Segment, arg2: int, arg3: int, arg4: int, arg5: int, arg6: Sequence[int], arg7: Sequence[int], arg8: Sequence[int], /) -> StridedCopy: ...

class Transfers:
    def __init__(self, arg0: Mesh, arg1: int, /) -> None: ...

    max_outstanding: Final[int] = ...
    """(arg: object, /) -> int"""

    def copy(self, arg: StridedCopy, /) -> bool: ...

    def repeat(self, copy: StridedCopy, remote: TensorSnapshot, local: TensorSnapshot, now_remote: object | None, now_local: object | None) -> object: ...

    def submit(self, arg0: object, arg1: StridedCopy, /) -> int: ...

    def done(self, arg: int, /) -> bool: ...

    def wait(self, arg0: int, arg1: float, /) -> bool: ...

    def refused(self, arg: int, /) -> bool: ...

    def finish(self) -> None: ...

def cycles() -> int: ...

def now() -> int: ...
