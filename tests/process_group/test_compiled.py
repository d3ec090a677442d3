"""torch.compile breaks its graph at calls of torch.distributed that it does not replace, and
programs compute what they compute without it.
"""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


def asynchronous(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x.sin()
    work.wait()
    [y] = dist.all_reduce(y, op=dist.ReduceOp.MAX, async_op=True).get_future().wait()
    return y + z, work.is_completed()


def rooted(x):
    y = x * 2
    dist.broadcast(y, 1)
    dist.reduce(y, 0)
    dist.barrier()
    ys = [torch.empty_like(y) for _ in range(2)] if dist.get_rank() else None
    dist.gather(y, ys, 1)
    dist.scatter(y, ys, 1)
    return y + 1


def lists(x):
    ys = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(ys, x * 2)
    zs = [torch.empty_like(x) for _ in range(2)]
    dist.all_to_all(zs, ys)
    dist.reduce_scatter(x, zs)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return x + 1


def messages(x):
    y, peer = torch.empty_like(x), 1 - dist.get_rank()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
    )
    for work in works:
        work.wait()
    if peer:
        dist.send(y * 2, peer, tag=3)
    else:
        dist.recv(y, peer, tag=3)
    return y + 1


@pytest.mark.data
def test_programs_equal_themselves_when_compiled():
    on_ranks(_programs, 2, context=group)


def _programs(_):
    warnings.simplefilter("ignore")  # of calls that the compiler does not know
    for program in (asynchronous, rooted, lists, messages):
        compiled = torch.compile(program, backend="eager")
        for start in (0.0, 3.0):
            x = start + torch.arange(12.0).view(4, 3) + 10 * dist.get_rank()
            torch.testing.assert_close(
                compiled(x.clone()),
                program(x.clone()),
                rtol=0,
                atol=0,
                msg=lambda text, program=program: f"{program.__name__}: {text}",
            )


@pytest.mark.data
def test_compiled_ddp_with_buffers_and_hooks():
    on_ranks(_trained, 2, context=group)


def by_python(model):
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def built_in(model):
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def _trained(_):
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    base, x = nn.Sequential(*layers), torch.randn(2, 12, 8)[dist.get_rank()]
    losses = {
        (hook, compiled): _losses(base, x, hook, compiled)
        for hook in (None, by_python, built_in)
        for compiled in (False, True)
    }
    for (hook, _), found in losses.items():
        assert found == pytest.approx(losses[hook, False], rel=1e-5)
    assert losses[by_python, False] == losses[built_in, False]
    assert losses[None, False] == pytest.approx(losses[built_in, False], rel=1e-2)


def _losses(base, x, hook, compiled):
    model = DistributedDataParallel(copy.deepcopy(base))
    if hook is not None:
        hook(model)
    model = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
