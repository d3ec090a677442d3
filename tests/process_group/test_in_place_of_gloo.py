"""Programs that say "gloo", or name no backend, on weft by the variable WEFT_REPLACES_GLOO."""

import contextlib
import logging
import os
import resource
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import free_port, group, on_ranks, start
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.doctor.checks import _gloo
from weft.process_group import in_place_of_gloo, worlds
from weft.process_group.in_place_of_gloo import VARIABLE


@contextlib.contextmanager
def replaced(backend):
    """The default process group of ranks that have the variable."""
    os.environ[VARIABLE] = "1"
    in_place_of_gloo.replace()
    with group(backend) as made:
        yield made


def gloo():
    return replaced("gloo")


def unnamed():
    return replaced(None)


def for_all_devices():
    return replaced("cpu:gloo,cuda:gloo")


def every_endpoint(world_group, name):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    groups = [
        world_group,
        dist.new_group(),
        dist.new_group(backend="gloo", pg_options=dist.ProcessGroupGloo._Options()),
        dist.new_group(backend="cpu:gloo"),
        mesh.get_group("all"),
    ]
    for each in groups:
        assert worlds.find(each).ranks == 2
        x = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(x, group=each)
        assert x.item() == 3.0
    assert [dist.get_backend(each) for each in groups] == [name, name, "gloo", "cpu:gloo", name]
    assert dist.get_backend_config(groups[2]) == "cpu:gloo,cuda:gloo", "as torch says of gloo"
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    other = dist.new_group(backend="weft")
    assert dist.get_backend(other) == "weft"
    dist.destroy_process_group(groups[1])


@pytest.mark.parametrize(
    ("context", "name"),
    [(gloo, "gloo"), (unnamed, "undefined"), (for_all_devices, "cpu:gloo,cuda:gloo")],
)
def test_groups_are_wefts_and_keep_the_name_that_was_given(context, name):
    on_ranks(every_endpoint, 2, name, context=context)


def switched_off(_):
    os.environ[VARIABLE] = "0"
    own = dist.new_group(backend="gloo")
    assert worlds.find(own) is None
    x = torch.ones(1)
    dist.all_reduce(x, group=own)
    assert x.item() == 2.0
    assert not in_place_of_gloo.in_force()


def test_the_variable_counts_when_a_group_is_made():
    on_ranks(switched_off, 2, context=gloo)


def without_memory(_):
    """Rank 1 alone may not make files, and memory, of the size that a world needs."""
    log = logging.getLogger("weft")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    own = dist.new_group(backend="gloo")
    assert worlds.find(own) is None
    x = torch.ones(1)
    dist.all_reduce(x, group=own)
    with pytest.raises(weft.SymmetricMemoryError, match=r"rank 1: \w+: .* no memory"):
        dist.new_group(backend="weft")
    return x.item()


def test_gloo_keeps_a_group_for_which_a_rank_lacks_memory():
    for outcome in start(without_memory, 3, context=gloo):
        assert outcome.result == 3.0, outcome.trace
    said = "gloo keeps a group of 3 ranks: a group of 3 ranks cannot be made: rank 1: Symmetric"
    assert outcome.printed.count(said) == 3


def without_descriptors(_, spare):
    if dist.get_rank() == 1:
        free = os.dup(0)
        os.close(free)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, limits[1]))
    try:
        dist.new_group(backend="gloo", timeout=timedelta(seconds=1000))
    finally:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("spare", [0, 1, 2, 6])
def test_all_ranks_raise_soon_if_one_lacks_descriptors(spare):
    first, second = start(without_descriptors, 2, spare, context=gloo)
    assert isinstance(second.error, OSError | weft.SymmetricMemoryError), second
    assert isinstance(first.error, weft.PeerLost), first
    assert "rank 1: " in str(first.error)
    for outcome in first, second:
        assert "Too many open files" in str(outcome.error)


def test_a_wrong_value_is_refused_where_a_group_is_made(monkeypatch):
    monkeypatch.setattr(distributed_c10d, in_place_of_gloo._MAKER, made_by_torch())
    monkeypatch.setenv(VARIABLE, "yes")
    in_place_of_gloo.replace()
    with pytest.raises(ValueError, match=f"{VARIABLE} is 0 or 1; got 'yes'"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def made_by_torch():
    """torch's own function that makes groups."""
    maker = getattr(distributed_c10d, in_place_of_gloo._MAKER)
    return getattr(maker, "of_torch", maker)


def test_another_torch_is_named_and_left_as_it_is(monkeypatch, caplog):
    def make_group(ranks, backend):
        raise AssertionError

    monkeypatch.setattr(distributed_c10d, in_place_of_gloo._MAKER, make_group)
    monkeypatch.setenv(VARIABLE, "1")
    in_place_of_gloo.replace()
    assert getattr(distributed_c10d, in_place_of_gloo._MAKER) is make_group
    assert f"{VARIABLE} has no effect: torch {torch.__version__} makes" in caplog.text


@pytest.mark.parametrize(
    ("asked", "here", "made"),
    [
        ("gloo", None, "weft"),
        ("undefined", None, "weft"),
        ("cpu:gloo,cuda:gloo", None, "weft"),
        ("cpu:gloo,cuda:nccl", None, "cpu:weft,cuda:nccl"),
        ("xpu:xccl,cpu:gloo", None, "xpu:xccl,cpu:weft"),
        ("gloo", "cuda", "cpu:weft,cuda:gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu:weft,cuda:nccl"),
        ("nccl", "cuda", None),
        ("cuda:gloo", "cuda", None),
        ("weft", None, None),
    ],
)
def test_tensors_of_other_devices_keep_their_backends(monkeypatch, asked, here, made):
    device = here and torch.device(here)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    assert in_place_of_gloo._renamed(asked) == made


def error_of(spec):
    """The error of a default group of one rank, which is made by no other."""
    try:
        dist.init_process_group(spec, store=dist.HashStore(), rank=0, world_size=1)
    except Exception as error:
        return type(error), str(error)
    dist.destroy_process_group()
    return None


@pytest.mark.parametrize("spec", ["cpu:gloo,cuda:nccl", "cpu:gloo,xpu:mpi"])
def test_backends_that_torch_does_not_have_are_its_own_errors(monkeypatch, spec):
    own = error_of(spec)
    monkeypatch.setattr(distributed_c10d, in_place_of_gloo._MAKER, made_by_torch())
    monkeypatch.setenv(VARIABLE, "1")
    in_place_of_gloo.replace()
    assert error_of(spec) == own
    assert own is not None
    assert error_of("cpu:gloo") is None
    kind, text = error_of("cpu:gloo,cuda:nosuch")
    assert issubclass(kind, RuntimeError)
    assert text.startswith("there is no backend 'nosuch' for cuda; torch.distributed knows ")
    assert "gloo" in text


def test_the_doctor_tells_where_it_is_in_force():
    groups = "Process groups that programs ask for as gloo's"
    assert _gloo([True, True]) == f"{groups} are weft's ({VARIABLE}=1)."
    assert _gloo([False]) == f"{groups} are gloo's; {VARIABLE}=1 makes them weft's."
    assert _gloo([False, True]).startswith(f"{groups} are weft's on rank(s) 1 alone: set ")


PROGRAM = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def rank(index):
    assert "weft.world" not in sys.modules
    os.environ.update(RANK=str(index), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo")
    x = torch.ones(3) * (index + 1)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3 and dist.get_backend() == "gloo"
    dist.destroy_process_group()
    if "weft.world" not in sys.modules:
        raise SystemExit("gloo itself")

if __name__ == "__main__":
    for method in sys.argv[1:]:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        mp.start_processes(rank, nprocs=2, start_method=method)
    print("weft in all")
"""


def test_a_program_changes_nothing_but_its_environment(tmp_path):
    """In children of each kind: torch loads weft where it is imported."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, script, "fork", "spawn"],
        env=os.environ | {VARIABLE: "1", "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "weft in all\n", done.stderr


LAUNCHED = r"""
import sys, torch, torch.distributed as dist
dist.init_process_group()
x = torch.ones(1)
dist.all_reduce(x)
from weft.process_group import worlds
sys.stdout.write(f"{worlds.find(dist.group.WORLD).failure.maker.split('(')[0]} {x.item()}\n")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_weft_run_replaces_gloo(tmp_path):
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    command = [sys.executable, "-m", "weft", "run", "-n", "2", "--replace-gloo", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.count("init_process_group 2.0") == 2, done.stdout + done.stderr
