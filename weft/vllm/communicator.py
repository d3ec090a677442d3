"""vLLM's device communicator on weft: the collectives and messages of one of its groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from weft.kernels.weights import FLOAT8
from weft.ops.all_gather import all_gather
from weft.ops.reduce_scatter import reduce_scatter
from weft.process_group import collectives
from weft.process_group.worlds import operations_of
from weft.vllm import operators
from weft.vllm.row_shard import whole

_SUM = dist.ReduceOp.SUM


class Communicator(CpuCommunicator):  # type: ignore[misc]
    """The communicator of a vLLM group whose process group is weft's, of any number of ranks, on
    any number of hosts.

    Results have equal bits on all ranks, sums are in rank order. A lost, late or disagreeing peer
    is an error that names it (`weft.PeerLost`, `PeerTimeout`, `MismatchError`), and closes the
    group. `dst` and `src` are ranks of the group. Graphs call `operators` instead of the methods.
    """

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        # not CpuCommunicator's, which sets up vLLM's shared memory
        DeviceCommunicatorBase.__init__(
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all
        )
        if (operations := operations_of(device_group)) is None:
            raise ValueError(
                f"weft's communicator needs a group of backend weft; group {unique_name!r} has "
                f"{device_group and dist.get_backend(device_group)}"
            )
        self.operations = operations
        self.world = operations.world
        self.supports_tensor_dict = True
        operators.communicators[unique_name] = self
        if self.use_all2all:
            self.all2all_manager = AgRsAll2AllManager(cpu_group)

    # Collectives

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place."""
        if torch.compiler.is_compiling():
            operators.all_reduce(input_, self.unique_name)
        else:
            self.operations.queue.run(collectives.all_reduce, self.world, input_, _SUM)
        return input_

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """The tensors of all ranks, of one shape, joined along `dim`."""
        gathered: Tensor = self.all_gatherv(input_, dim)
        return gathered

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        """The tensors of all ranks joined along `dim`, of which rank p has ``sizes[p]`` (default:
        all ranks as many); of a list, each.
        """
        if isinstance(input_, list):
            return [self.all_gatherv(tensor, dim, sizes) for tensor in input_]
        dim %= input_.dim()
        sizes = sizes or [input_.shape[dim]] * self.world_size
        if torch.compiler.is_compiling():
            return operators.all_gather(input_, dim, sizes, self.unique_name)
        return self.gathered(input_, dim, sizes)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """This rank's part, of equal parts along `dim`, of the sum of all ranks' tensors."""
        return self.reduce_scatterv(input_, dim)

    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' tensors; rank p has ``sizes[p]``
        (default: equal parts).
        """
        dim %= input_.dim()
        if sizes is None:
            size = input_.shape[dim] // self.world_size
            if size * self.world_size != input_.shape[dim]:
                raise ValueError(
                    f"dimension {dim} of {tuple(input_.shape)} does not divide evenly over "
                    f"{self.world_size} ranks: give sizes"
                )
            sizes = [size] * self.world_size
        if torch.compiler.is_compiling():
            rank, group = self.rank_in_group, self.unique_name
            scattered: Tensor = operators.reduce_scatter(input_, dim, sizes, rank, group)
            return scattered
        return self.scattered(input_, dim, sizes)

    def gathered(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """`all_gatherv` outside graphs."""
        here = tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor
        uneven = {"shard_rows": sizes} if len({*sizes}) > 1 else {}
        result = self.run(all_gather, here, dim=dim, **uneven)
        return result.view(tensor.dtype)

    def scattered(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """`reduce_scatterv` outside graphs."""
        uneven = {"shard_rows": sizes} if len({*sizes}) > 1 else {}
        return self.run(reduce_scatter, tensor, dim=dim, **uneven)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """The tensors of all ranks, of one shape, joined along `dim` on rank `dst`, else None."""
        mine = self.rank_in_group == dst
        outs = [torch.empty_like(input_) for _ in range(self.world_size)] if mine else []
        self.operations.queue.run(collectives.gather, self.world, outs, input_, dst)
        return torch.cat(outs, dim) if mine else None

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite the tensor with that of rank `src`."""
        self.operations.queue.run(collectives.broadcast, self.world, tensor, src)
        return tensor

    def all_to_all(
        self, input_: Tensor, output_sizes: Sequence[int] = (), input_sizes: Sequence[int] = ()
    ) -> Tensor:
        """Send ``input_sizes[p]`` rows to rank p, and receive ``output_sizes[p]`` from it, in rank
        order; equal parts without sizes.
        """
        rows = sum(output_sizes) if output_sizes else len(input_)
        out = input_.new_empty(rows, *input_.shape[1:])
        self.operations.queue.run(
            collectives.all_to_all_single, self.world, out, input_, output_sizes, input_sizes
        )
        return out

    def run(self, operator: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
        """The result of an operator of weft on the group's world, after all earlier operations of
        the group.
        """
        results: list[Tensor] = []
        self.operations.queue.run(
            lambda: results.append(operator(*args, world=self.world, **options))
        )
        return results[0]

    # Messages

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send a tensor to a rank, the next one by default."""
        to = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self.operations.messages.send(whole(tensor), to).wait()

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor of this shape from a rank, the previous one by default."""
        source = (self.rank_in_group - 1) % self.world_size if src is None else src
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self.operations.messages.receive(tensor, source).wait()
        return tensor

    def send_tensor_dict(self, tensor_dict: dict[str, Tensor], dst: int) -> None:
        """Send named tensors to a rank, which calls `recv_tensor_dict`."""
        for key, value in tensor_dict.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"only tensors are sent; {key!r} is a {type(value).__name__}")
        tensor_dict = {key: whole(tensor) for key, tensor in tensor_dict.items()}
        described = [
            [key, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]]
            for key, tensor in tensor_dict.items()
        ]
        header = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
        sent = [torch.tensor([len(header)], device="cpu"), header, *tensor_dict.values()]
        works = [self.operations.messages.send(tensor, dst) for tensor in sent if tensor.numel()]
        for work in works:
            work.wait()

    def recv_tensor_dict(self, src: int) -> dict[str, Tensor]:
        """Receive the tensors that a rank sends by `send_tensor_dict`."""
        (length,) = self.recv(torch.Size([1]), torch.int64, src).tolist()
        header = self.recv(torch.Size([length]), torch.uint8, src)
        tensors = {
            key: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            for key, dtype, shape in json.loads(bytes(header.tolist()))
        }
        works = [
            self.operations.messages.receive(part, src) for part in tensors.values() if part.numel()
        ]
        for work in works:
            work.wait()
        return tensors

    def batch_isend_irecv(self, p2p_ops: list[dist.P2POp]) -> None:
        """Run sends and receipts between ranks, in any order, to their end."""
        for work in dist.batch_isend_irecv(p2p_ops):
            work.wait()
