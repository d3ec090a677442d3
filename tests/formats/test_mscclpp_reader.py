"""Execution plans of MSCCL++ as plans: what the proof finds in them, in the words of the file, and
that what it accepts computes what the collective promises.
"""

from __future__ import annotations

import glob
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support import execution_plans
from tests.support.execution_plans import NOP, local, op, over, packets, posts, puts, remote
from weft.cli import app
from weft.plan.proof import problems
from weft_tools.formats.mscclpp.reader import read
from weft_tools.formats.ordinary import ordinary
from weft_tools.laboratory.counting import counts_agree, found
from weft_tools.laboratory.imported import differs_in_orders, differs_on_threads


def found_in(file, **more):
    """What is wrong with a plan."""
    plan = read(file, **more)
    return [*plan.defects, *problems(plan.plan, where=plan.where)]


def both(block, **more):
    return execution_plans.plan([block(0)], [block(1)], **more)


def without(block, *operations):
    return lambda rank: [each for at, each in enumerate(block(rank)) if at not in operations]


def barriers(rank):
    """Two thread blocks: the second one copies half of what the first one has received."""
    come = op("barrier", barrier_id=0, num_threadblocks=2)
    chunk = local("s", 0)
    first = [
        over("rlxsignal"),
        over("rlxwait"),
        NOP,
        op("put", local("o", rank), remote("s", 0), channel_type="memory"),
        NOP,
        over("signal"),
        over("wait"),
        come,
    ]
    half = [{"tb_id": tb, "tbg_size": 2} for tb in range(2)]
    copies = [op("copy", chunk, local("o", 1 - rank), tbg_info=half[tb]) for tb in range(2)]
    return [[*first, copies[0], come], [come, copies[1], come]]


RIGHT = {
    "puts": both(puts),
    "packets": both(packets, protocol="LL", use_double_scratch_buffer=True),
    "ports": both(posts),
    "sums": both(execution_plans.added, collective="allreduce"),
    "thread blocks": execution_plans.plan(barriers(0), barriers(1)),
}


@pytest.mark.parametrize("file", RIGHT.values(), ids=RIGHT)
def test_a_right_plan_is_proved_and_computes_what_it_promises(file):
    plan = read(file)
    assert found_in(file) == []
    made = ordinary(plan.plan)
    assert problems(made) == []
    assert ordinary(made) is made
    assert differs_in_orders(made) == ""
    assert differs_on_threads(made) == ""


RELAXED = without(puts, 5)
WRONG = {
    "no wait before the put": (
        both(without(puts, 1)),
        "race on io@1[0:1]: rank 0, thread block 0, operation 2",
    ),
    "no nop before the signal": (both(without(puts, 4)), "rank 1, thread block 0, operation 3"),
    "no nop after the wait": (both(without(puts, 2)), "rank 0, thread block 0, operation 2"),
    "nothing tells that rows are there": (
        both(lambda rank: [*RELAXED(rank)[:5], over("rlxsignal"), *RELAXED(rank)[5:]]),
        "rank 1 (the caller's use) is not ordered after rank 0, thread block 0, operation 3",
    ),
    "a signal too few": (both(without(puts, 0)), "what is left over ends a wait"),
    "packets over packets": (
        both(packets, protocol="LL"),
        "waits for s@1[0:1], which a later execution has overwritten",
    ),
    "no flush": (
        both(lambda rank: posts(rank, "pws")),
        "(the caller's use) is not ordered after rank 1, port channel 0, posted by operation 3",
    ),
    "too few at a barrier": (
        execution_plans.plan([barriers(0)[0]], [barriers(1)[0]]),
        "barrier 0 is of 2 thread blocks, but 1 come to it",
    ),
    "two operations at once": (
        both(
            lambda rank: [
                *puts(rank)[:3],
                op("copy", local("o", 1 - rank), local("o", rank)),
                *puts(rank)[3:],
            ]
        ),
        "its threads do not meet between them",
    ),
    "another order": (
        both(lambda rank: [*puts(rank)[6:], *puts(rank)[:6]]),
        "deadlock: rank 0, thread block 0, operation 0 waits for 1 of memory 0<1, 0 arrive",
    ),
}


@pytest.mark.parametrize(("file", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_plan_is_rejected_in_the_words_of_its_file(file, words):
    assert words in "\n".join(found_in(file))


REFUSED = {
    "multicast": ({"ops": [op("gstore")]}, "stores to several ranks"),
    "a pipeline": ({"ops": [op("pipeline", ops=[])]}, "overlap in units"),
    "an unknown operation": ({"ops": [op("hop")]}, "does not know the operation 'hop'"),
    "packets beside a wait": (
        {"ops": [over("wait"), *packets(0)]},
        "some still wait while others send packets",
    ),
    "rows beside a wait and a signal": (
        {"ops": [over("wait"), over("signal"), op("copy", local("o", 0), local("o", 1))]},
        "some still wait",
    ),
    "packets as rows": (
        {"ops": [*packets(0), op("copy", local("s", 0), local("o", 0))]},
        "both as packets and as rows",
    ),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_weft_has_no_words_for_is_refused_by_name(change, words):
    file = both(packets, protocol="LL")
    file["gpus"][0]["threadblocks"][0] |= change
    with pytest.raises(ValueError, match=words):
        read(file)


COPY = op("copy", local("o", 0), local("o", 1))
SEVERAL = [local("o", 0), local("o", 1)]
MISGIVEN = {
    **{
        f"{name} of two {key}": (
            COPY | {"name": name, key: SEVERAL},
            rf"operation 0 \({name}\) has . sources for . destinations",
        )
        for name in ("copy", "get")
        for key in ("src_buff", "dst_buff")
    },
    **{
        f"{name} of two {key}": (
            op(name, local(src, 0), local(dst, 0)) | {key: [local(of, 0), local(of, 1)]},
            rf"operation 0 \({name}\) has . sources for . destinations",
        )
        for name, src, dst in (("cpkt", "o", "s"), ("upkt", "s", "o"))
        for key, of in (("src_buff", src), ("dst_buff", dst))
    },
    "rppkt of two sources": (
        op("rppkt", channel_type="memory")
        | {"src_buff": [local("s", 0), local("s", 1)], "dst_buff": [remote("s", 0)]},
        "2 sources for 1 packet",
    ),
    **{
        f"{name} of a destination too many": (
            op(name, local("i", 0), reduce_op="sum") | {"dst_buff": [local("o", 0)] * (stores + 1)},
            f"{stores + 1} destinations for {stores} stores",
        )
        for name, stores in (("re", 1), ("rre", 1), ("repkt", 1), ("recpkt", 2))
    },
    "a channel too many": (
        op("put", local("o", 0), remote("o", 0), channel_type="port", channel_ids=[0, 0]),
        "2 channels for 1 puts",
    ),
    "the last channel": (over("wait", "memory", -1), "the number of a memory channel is -1, no"),
    "no such channel": (over("wait", "memory", 1), "is 1, no whole number of .* less than 1"),
    "a channel of no type": (over("wait", "none"), "the number of a none channel is 0, no"),
    "the last semaphore": (op("sem_acquire", semaphore_ids=[-1]), "of a semaphore is -1, no"),
    "no such semaphore": (op("sem_release", semaphore_ids=[1]), "of a semaphore is 1, no"),
    "the last remote buffer": (
        op("get", remote("o", 0) | {"buffer_id": -1}, local("o", 0), channel_type="memory"),
        "the number of a remote buffer is -1, no",
    ),
    "a half barrier": (op("barrier", barrier_id=0.5, num_threadblocks=1), "a barrier is 0.5, no"),
    "a size of no rows": (COPY | {"src_buff": [local("o", 0, 0)]}, "size of a buffer is 0, no"),
    "a size of floats": (COPY | {"src_buff": [local("o", 0, 1.0)]}, r"a buffer is 1\.0, no"),
    "a negative index": (COPY | {"src_buff": [local("o", -1)]}, "index of a buffer is -1, no"),
    "a group of none": (
        COPY | {"tbg_info": {"tb_id": 0, "tbg_size": 0}},
        r"rank 0, thread block 0, operation 0 \(copy\): the size of a group is 0, no",
    ),
    "a part beside the group": (
        COPY | {"tbg_info": {"tb_id": 2, "tbg_size": 2}},
        "the part of a thread block is 2, no whole number of at least 0 and less than 2",
    ),
}


@pytest.mark.parametrize(("operation", "words"), MISGIVEN.values(), ids=MISGIVEN)
def test_numbers_that_an_operation_cannot_have_are_refused(operation, words):
    with pytest.raises(ValueError, match=words):
        read(execution_plans.plan([[operation]], [puts(1)]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_chunks": 1.5}, "rank 0: input_chunks is 1.5"),
        ({"output_chunks": -2}, "rank 0: output_chunks is -2"),
        ({"scratch_chunks": -1}, "rank 0: scratch_chunks is -1"),
        (
            {"channels": [{"channel_type": "memory", "connected_to": [2]}]},
            "the peer of a channel is 2",
        ),
        ({"threadblocks": [{"id": -1, "ops": []}]}, "a thread block of rank 0 is -1"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_numbers_that_a_rank_cannot_have_are_refused(change, words):
    file = both(puts)
    file["gpus"][0] |= change
    with pytest.raises(ValueError, match=words):
        read(file)


@pytest.mark.parametrize("file", [{}, [], 3, None, {"gpus": [{"id": 1}]}])
def test_other_files_are_refused(file):
    with pytest.raises(ValueError, match=r"no execution plan|not numbered"):
        read(file)


def test_two_waiters_of_one_channel_are_refused():
    file = execution_plans.plan([puts(0), puts(0)], [puts(1), puts(1)])
    for gpu in file["gpus"]:
        gpu["threadblocks"][1]["channels"] = gpu["threadblocks"][0]["channels"]
    with pytest.raises(ValueError, match="which of them a signal lets go"):
        read(file)


def test_a_collective_that_is_not_named_is_asked_for():
    file = both(puts, collective="allgather") | {"collective": "custom"}
    with pytest.raises(ValueError, match="does not say what 'custom' promises"):
        read(file)
    assert found_in(file, collective="allgather") == []
    assert "instead of" in found_in(both(puts, collective="alltoall"))[0]


def test_relaxed_signals_say_only_that_a_rank_has_begun():
    """A rank reads its peer's rows; before the peer's caller may write to them it needs a release."""

    def reads(last):
        return lambda rank: [
            over("rlxsignal"),
            over("rlxwait"),
            NOP,
            op("get", remote("o", 1 - rank), local("o", 1 - rank), channel_type="memory"),
            NOP,
            over(last),
            over(last.replace("signal", "wait")),
        ]

    assert found_in(both(reads("signal"))) == []
    assert (
        "ordered after rank 0, thread block 0, operation 3" in found_in(both(reads("rlxsignal")))[0]
    )


def test_counting_finds_a_part_of_what_the_proof_rejects():
    plan = read(RIGHT["puts"]).plan
    scores = found(plan)
    assert scores["deleted"].mutants == scores["deleted"].rejected == 10
    assert scores["deleted"].counted == 8  # all but the two puts
    assert scores["moved"].counted == 0 < scores["moved"].rejected
    assert counts_agree(plan)


def run(*arguments):
    done = CliRunner().invoke(app, ["plan", "import", *map(str, arguments)], terminal_width=300)
    return done.exit_code, done.output


def test_the_command_proves_shows_executes_predicts_and_mutates(tmp_path):
    file = tmp_path / "gather.json"
    file.write_text(json.dumps(RIGHT["puts"]))
    code, said = run(file, "--show", "--execute", "--machine", "h100-nvlink-8", "--mutants")
    assert code == 0, said
    for words in (
        "allgather on 2 ranks, at most 1 thread blocks each, 14 operations",
        "begun  memory 0<0 on 1",
        "verified: no race",
        "in adversarial orders: the bits that it promises",
        "by a thread for each lane: the bits that it promises",
        "predicted on h100-nvlink-8, chunks of 65536 bytes",
        "counting signals and waits finds",
    ):
        assert words in said
    file.write_text(json.dumps(WRONG["no flush"][0]))
    code, said = run(file)
    assert code == 1
    assert "NOT VERIFIED: 2 problem(s)" in said
    file.write_text("{}")
    assert run(file)[0] == 2
    assert run(tmp_path / "none")[0] == 2
    assert run(file, "--chunk-bytes", 64)[0] == 2


def examples():
    """The schedules of MSCCL++'s own examples, of the clone that MSCCLPP names."""
    folder = os.environ.get("MSCCLPP")
    tests = Path(folder or "") / "python/mscclpp/language/tests"
    return (
        [
            path
            for kind in ("single_node", "multi_node")
            for path in sorted(glob.glob(f"{tests}/{kind}/**/*.py", recursive=True))
        ]
        if folder
        else []
    )


@pytest.mark.skipif("MSCCLPP" not in os.environ, reason="MSCCLPP names no clone of MSCCL++")
def test_their_own_examples_are_proved_or_rejected(tmp_path):
    package = tmp_path / "mscclpp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "language").symlink_to(Path(os.environ["MSCCLPP"]) / "python/mscclpp/language")
    options = {"--num_gpus": 4, "--nnodes": 2, "--gpus_per_node": 2, "--tbg_size": 2}
    verdicts = {"proved": 0, "rejected": 0, "unsupported": 0}
    for path in examples():
        text = Path(path).read_text()
        given = [
            str(each)
            for name, value in options.items()
            if f'"{name}"' in text
            for each in (name, value)
        ]
        made = subprocess.run(
            [sys.executable, path, "--name", Path(path).stem, *given],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            check=False,
            timeout=60,
        )
        if made.returncode:
            continue  # two of them are broken
        file = json.loads(made.stdout)
        try:
            plan = read(file)
        except ValueError:
            verdicts["unsupported"] += 1
            continue
        if [*plan.defects, *problems(plan.plan, where=plan.where)]:
            verdicts["rejected"] += 1
            continue
        verdicts["proved"] += 1
        if sum(1 for _ in plan.plan.instructions()) < 1000:
            assert differs_in_orders(ordinary(plan.plan), random.randrange(1000)) == "", path
    assert verdicts == {"proved": 15, "rejected": 2, "unsupported": 5}
