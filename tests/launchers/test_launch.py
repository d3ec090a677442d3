"""Every launcher of ranks: weft run, torchrun, mpiexec, and weft.launch."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.host import placement
from weft.host.topology import assign
from weft.launchers import launcher

# the cores of two ranks with a thread each
BOUND = assign(placement.host_topology(), os.sched_getaffinity(0), 2, 1)
BIN = Path(sys.executable).parent
SCRIPT = textwrap.dedent(
    """
    import os, sys, torch, weft
    with weft.init() as world:
        a = torch.full((40, 3), float(world.rank))
        y = weft.all_gather_matmul(a, torch.eye(3))
        expected = torch.arange(world.ranks).repeat_interleave(40).float()
        assert torch.equal(y, expected[:, None].expand(-1, 3)), y
        sys.stdout.write(f"rank {world.rank} of {world.ranks} on {sorted(os.sched_getaffinity(0))} {sys.argv[1:]}\\n")
    """
)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*command, cwd=None):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")
    }
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
        cwd=cwd,
    )


def assert_all_ranks(done, ranks, rest=""):
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert len(lines) == ranks
    assert all(
        line.startswith(f"rank {rank} of {ranks} ") and line.endswith(rest)
        for rank, line in enumerate(lines)
    ), lines


def shares(done):
    """The hardware threads of each rank, as seen by the rank."""
    return [
        ast.literal_eval(cpus)
        for _, cpus in sorted(re.findall(r"rank (\d+) of .* on (\[.*?\])", done.stdout))
    ]


@pytest.mark.data
def test_weft_run(script):
    assert_all_ranks(run(BIN / "weft", "run", "-n", 3, script, "--flag", "x"), 3, "['--flag', 'x']")


@pytest.mark.data
@pytest.mark.slow
def test_torchrun(script):
    done = run(BIN / "torchrun", "--standalone", "--nproc-per-node", 2, script)
    assert_all_ranks(done, 2)
    assert shares(done) == [sorted(share) for share in BOUND]


@pytest.mark.slow
def test_ranks_are_not_bound_where_they_must_not_be(script):
    done = run(BIN / "weft", "run", "-n", 2, "--no-bind", script)
    assert_all_ranks(done, 2)
    assert shares(done) == [sorted(os.sched_getaffinity(0))] * 2


@pytest.mark.data
@pytest.mark.slow
def test_mpiexec(script):
    mpiexec = BIN / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec in the folder of this Python")
    assert_all_ranks(run(mpiexec, "-n", 2, sys.executable, script), 2)


FAILING = textwrap.dedent(
    """
    import atexit, os, signal, sys, time, torch, weft
    with weft.init() as world:
        if world.rank == 1:
            atexit.register(time.sleep, 0.4)  # rank 0 could end first
            eval(sys.argv[1])
        weft.barrier()
    """
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
        ("os.kill(os.getpid(), 35)", 163, "was ended by signal 35"),
        ("1 / 0", 1, "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_weft_run_names_the_first_failed_rank_and_exits_with_its_code(how, code, words, tmp_path):
    path = tmp_path / "fail.py"
    path.write_text(FAILING)
    done = run(BIN / "weft", "run", "-n", 2, path, how)
    assert done.returncode == code, done.stderr
    *before, last = done.stderr.splitlines()
    assert re.fullmatch(rf"weft run: first failure: rank 1 \(pid \d+\) {words}", last), done.stderr
    assert sum("Traceback" in line for line in before) == (code == 1), (
        "of the rank that failed first"
    )
    # whether or not rank 0 has noticed before the launcher ends it
    lost = [line.removeprefix("[rank0]: ") for line in before if line.startswith("[rank0]: ")]
    assert re.match(r"PeerLost: rank 1 \(pid \d+\) ", lost[0])
    assert lost[1] == f"  rank 0 is at {path}:7; rank 1 had made no call"
    assert len(lost) == 3, "and the file of the flight recorder"
    assert "elastic" not in done.stderr


def outcome_of(folder, program, code=1):
    """The lines of stderr of a program that fails on 2 ranks, without "[rank…]: "."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    done = run(BIN / "weft", "run", "-n", 2, "program.py", cwd=folder)
    assert done.returncode == code, done.stderr
    return [re.sub(r"^\[rank\d\]: ", "", line) for line in done.stderr.splitlines()]


@pytest.mark.slow
def test_weft_run_shows_different_calls_with_both_places_and_the_cure_once(tmp_path):
    lines = outcome_of(
        tmp_path,
        """
        import torch, weft
        with weft.init() as world:
            if world.rank:
                weft.all_gather(torch.ones(5, 2))
            else:
                weft.all_gather(torch.ones(4, 2))
        """,
    )
    for line in (
        "  rank 0: all_gather((4, 2) float32, dim=0), at program.py:7",
        "  rank 1: all_gather((5, 2) float32, dim=0), at program.py:5",
        "  pass shard_rows=[4, 5] on all ranks, if their rows differ",
        "MismatchError: as on rank 0",
    ):
        assert lines.count(line) == 1, lines
    assert sum("Traceback" in line for line in lines) == 1, "the user's part of it"
    assert not [line for line in lines if "File" in line and "program.py" not in line]
    what = "MismatchError: the ranks do not make the same call: shapes differ"
    pattern = rf"weft run: first failure: rank [01] \(pid \d+\) failed: {what}"
    assert re.fullmatch(pattern, lines[-1])
    assert len(lines) == 10, lines


@pytest.mark.slow
def test_a_rank_that_does_not_wait_reports_a_death_too(tmp_path):
    """The launcher ends it with SIGTERM, which it answers by its error."""
    program = """import os, signal, time, weft
with weft.init() as world:
    weft.barrier()
    if world.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""
    lost, where, record, last = outcome_of(tmp_path, program, 137)
    assert re.fullmatch(r"PeerLost: rank 1 \(pid \d+\) died while rank 0 was not waiting", lost)
    assert where == "  rank 0 is at program.py:6; rank 1 had ended call 1"
    assert record.startswith("  weft doctor --flight ")
    assert last.endswith(" was ended by SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "call"),
    [
        ("with weft.init() as world:", "total = weft.all_reduce(torch.ones(4))"),
        # torch waits for these calls in C++, and has the error as text
        (
            "dist.init_process_group('weft'); model = DDP(torch.nn.Linear(2, 2))\nif True:",
            "model(torch.ones(1, 2)).sum().backward()",
        ),
    ],
    ids=["weft", "DDP"],
)
def test_weft_run_shows_that_a_rank_made_fewer_calls(tmp_path, begin, call):
    program = f"""import os, torch, torch.distributed as dist, weft
from torch.nn.parallel import DistributedDataParallel as DDP
{begin}
    for step in range(5 - int(os.environ["RANK"])):
        {call}
if dist.is_initialized():
    dist.destroy_process_group()
"""
    lost, where, cause, record, last = outcome_of(tmp_path, program)
    made = re.fullmatch(
        r"PeerLost: rank 1 \(pid \d+\) closed its world while rank 0 waited for .* of all_reduce "
        r"call (\d+) \(.*\)",
        lost,
    )
    line = program.splitlines().index(f"        {call}") + 1
    assert where == f"  rank 0 is at program.py:{line}; rank 1 had ended call {int(made[1]) - 1}"
    assert cause.startswith("  likely cause: rank 1 makes fewer calls, as with fewer batches, ")
    assert record.startswith("  weft doctor --flight ")
    pattern = r"weft run: first failure: rank 0 \(pid \d+\) failed: PeerLost, see above"
    assert re.fullmatch(pattern, last)


@pytest.mark.slow
def test_weft_run_exits_with_the_code_of_an_interrupt(tmp_path):
    path = tmp_path / "wait.py"
    path.write_text(
        "import sys, time, "
        "weft\nweft.init()\nsys.stdout.write('there\\n')\nsys.stdout.flush()\ntime.sleep(60)"
    )
    command = [BIN / "weft", "run", "-n", "2", path]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["there\n"] * 2
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert sorted(errors.splitlines()) == [
        "[rank0]: KeyboardInterrupt",
        "[rank1]: KeyboardInterrupt",
        "weft run: stopped by SIGINT",
    ]


@pytest.mark.slow
def test_weft_run_runs_modules(tmp_path):
    (tmp_path / "package.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [BIN / "weft", "run", "-n", "2", "-m", "package", "-x"]
    assert_all_ranks(
        subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment),
        2,
        "['-x']",
    )


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["package"], "there is no file package"),
        (["folder"], "folder is a folder: name a script in it, as folder/train.py"),
    ],
)
def test_weft_run_refuses_what_python_cannot_run(words, answer, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/train.py").touch()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert answer in done.stderr


@pytest.mark.parametrize(
    ("words", "ranks", "note"),
    [
        (["--nproc-per-node", "3", "x.py"], 3, ""),
        (["-n", "3", "x.py", "-n", "4"], 3, ""),
        (
            ["x.py", "-n", "4"],
            2,
            "-n 4 after x.py is the script's; for weft run: weft run -n 4 x.py",
        ),
        (["x.py", "--ranks=4"], 2, "weft run --ranks=4 x.py"),
        (["x.py", "--numbers", "4"], 2, ""),
        (["x.py"], 2, ""),
    ],
)
def test_options_for_the_ranks(words, ranks, note, tmp_path, monkeypatch):
    """torchrun's name is one of weft's; options after the script are the script's, with a note."""
    started = []
    monkeypatch.setattr(launcher, "run", lambda ranks, *_: started.append(ranks) or 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    done = CliRunner().invoke(app, ["run", *words], env={"COLUMNS": "200"})
    assert started == [ranks]
    assert note in done.stderr
    assert bool(note) == bool(done.stderr)


@pytest.mark.slow
def test_launch_requires_a_main_guard(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text("import weft\nweft.launch(print, 1)")
    done = run(sys.executable, path)
    assert done.returncode == 1
    assert done.stderr.startswith(
        'weft.launch: put the main part of the script under  if __name__ == "__main__":\nTraceback'
    ), done.stderr
    assert len(done.stderr.splitlines()) < 10, done.stderr


def square(x):
    with weft.init() as world:
        return world.rank, x * x, torch.get_num_threads(), world.cores


def test_launch_returns_results_in_rank_order():
    everywhere = frozenset(os.sched_getaffinity(0))
    assert weft.launch(square, 3, 7, threads=1, bind=False) == [
        (rank, 49, 1, [everywhere] * 3) for rank in range(3)
    ]


def test_launch_binds_ranks_to_their_shares():
    assert [cores for *_, cores in weft.launch(square, 2, 7, threads=1)] == [BOUND] * 2


def fail():
    with weft.init() as world:
        if world.rank == 1:
            raise ValueError("seven is not eight")
        weft.all_gather_matmul(torch.ones(40, 2), torch.eye(2))


GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] {} "
    "[127.0.0.1]:44224. This is typically caused by a remote worker crashing."
)


@pytest.mark.parametrize("lost", ["Connection closed by peer", "Connection reset by peer"])
def test_a_rank_that_has_lost_a_peer_in_gloo_is_not_the_first(lost, tmp_path):
    """Even if its error is of an earlier second."""
    failures = {}
    for rank, message in enumerate((GLOO.format(lost), "ValueError: the cause")):
        file = tmp_path / f"{rank}.json"
        file.write_text(
            json.dumps({"message": {"message": message, "extraInfo": {"timestamp": rank}}})
        )
        failures[rank] = ProcessFailure(rank, pid=7, exitcode=1, error_file=str(file))
    first, _ = launcher._first(ChildFailedError("ranks", failures))
    assert first == 1


def test_launch_names_the_failed_rank_and_its_error():
    with pytest.raises(RuntimeError, match=r"rank 1 .*failed.* ValueError: seven is not eight"):
        weft.launch(fail, 2)
    with pytest.raises(ValueError, match="at least one rank"):
        weft.launch(fail, 0)


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "1", "WORLD_SIZE": "2"}, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}],
    ids=["torchrun", "mpirun"],
)
def test_a_rank_that_a_launcher_started_launches_none(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(weft.WeftError, match="rank 1 of 2 that a launcher started, and each would"):
        weft.launch(square, 3, 7)
