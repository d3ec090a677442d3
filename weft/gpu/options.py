"""What a rank's device can honour of `DeviceOptions`, and what the fastest ones depend on."""

from __future__ import annotations

import os

import torch

from weft.gpu.driver import QUEUES
from weft.schedules.device_options import DeviceOptions
from weft.world import World

# of a rank on a GPU: the compute lane, the caller's, and that of one-sided transfers; and one for
# each link
_STREAMS = 3


def check_options(world: World, options: DeviceOptions) -> None:
    """Raise `ValueError` for options that the device of this rank cannot honour: it has not the
    streams, the SMs or the registers.
    """
    if world.device.type == "cuda" and options.links > 1:
        check_queues(world.backend.ranks_per_device, options.links)
    if world.backend.products == "triton":
        from weft.gpu.kernels.all_gather_matmul import blocks

        for tile in (options.tile, options.own_tile):
            blocks(tile, world.device)
    programs(world, options)


def programs(world: World, options: DeviceOptions) -> int:
    """The most programs of a product kernel, one per SM. Raises `ValueError` if the device has not
    that number of SMs beside those of copies and signals.
    """
    if world.backend.products != "triton" and not options.comm_sms:
        return 0
    from weft.gpu.kernels import symmetric

    ranks = world.backend.ranks_per_device
    copies = options.comm_sms * options.links
    reserved = copies + (1 if options.compute_sms else symmetric.RESERVED_SMS)
    most = symmetric.max_programs(ranks, world.device, reserved)
    if options.compute_sms is None:
        return most
    if world.device.type == "cuda" and options.compute_sms > most:
        raise ValueError(
            f"{options.compute_sms} programs of products on each of {ranks} ranks that share a GPU "
            f"leave no SM for {copies} programs of copies and for signals: use at most {most}"
        )
    return options.compute_sms


def hardware(world: World) -> str:
    """What the fastest options depend on, apart from the workload: the device, the number of ranks
    that share it, and the versions of the software that makes kernels.
    """
    device = "threads of a CPU"
    if world.device.type == "cuda":
        found = torch.cuda.get_device_properties(world.device)
        device = f"{found.name} with {found.multi_processor_count} SMs"
    versions = f"torch {torch.__version__}"
    if world.backend.products == "triton":
        import triton

        versions += f", triton {triton.__version__}"
    shared = f"{world.backend.ranks_per_device} ranks on each"
    return f"{device}, {shared}, products by {world.backend.products}, {versions}"


def check_queues(ranks: int, links: int) -> None:
    """Raise `ValueError` unless each stream of the ranks that share a GPU gets a hardware queue of
    its own: streams that share one wait for each other, and would deadlock.
    """
    queues = int(os.environ.get(QUEUES, "8"))
    if ranks * (streams := _STREAMS + links) > queues:
        fewer = f"at most {queues // streams} ranks" + (", or fewer links" if links > 1 else "")
        raise ValueError(
            f"{ranks} ranks need {ranks * streams} concurrent streams, and there are {queues}: "
            f"use {fewer}, or set {QUEUES} (at most 32) before CUDA is first used"
        )
