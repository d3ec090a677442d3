"""A GPU for each rank of a launcher, or the CPU where there is none: a tensor-parallel product.

    torchrun --nproc-per-node 8 examples/gpu_per_rank.py
    weft run -n 2 examples/gpu_per_rank.py

Launchers pass the number of a rank among those of its host as LOCAL_RANK; with more ranks than
GPUs the ranks share them in turn.
"""

import os

import torch

import weft

local_rank = int(os.environ.get("LOCAL_RANK", "0"))
if gpus := torch.cuda.device_count():
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    world = weft.init(device=f"cuda:{local_rank % gpus}")  # also the current GPU from here on
else:
    world = weft.init()

rows = world.empty(512, 1024)  # this rank's rows, which peers read
rows.fill_(world.rank + 1)
weight = torch.full((1024, 256), 1 / 1024, device=world.device)  # this rank's columns
result = weft.all_gather_matmul(rows, weight)  # the rows of all ranks times the columns
expected = torch.arange(1, world.ranks + 1, device=world.device).repeat_interleave(512)
assert torch.equal(result, expected[:, None].expand(-1, 256).to(result.dtype))
if world.device.type == "cuda":  # an all-gather by copy engines, and by a kernel on 16 SMs
    gathered = world.empty(512 * world.ranks, 1024)
    by_kernel = weft.Launch(comm_sms=16, gluon=True)
    for algorithm, launch in (("auto", None), ("kernel", by_kernel)):
        weft.all_gather(rows, out=gathered, algorithm=algorithm, launch=launch)
        assert torch.equal(gathered[:, 0], expected.to(gathered.dtype))
if world.rank == 0:
    print(f"{world.ranks} rank(s) on {world.device.type}: {tuple(result.shape)}, as expected")
