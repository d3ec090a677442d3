"""Traces that profilers of a device have written: kinds of kernels, and the part of copying that is
hidden.
"""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from weft.cli import app
from weft_tools.bench.device_traces import kind_of, read

PRODUCT = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"
DIRECT = "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda>"
WORK = [  # device, stream, name, start and stop in milliseconds
    (0, 7, PRODUCT, 0, 10),
    (0, 20, "memcpy", 4, 8),  # hidden
    (0, 20, "copy_vectors_kernel", 8, 12),  # half hidden
    (0, 20, "wait_kernel", 12, 13),
    (1, 7, PRODUCT, 0, 5),
    (1, 7, "ncclDevKernel_AllGather_RING_LL", 5, 9),  # not hidden
    (1, 9, "memcpy HtoD", 0, 4),  # between host and GPU: no communication, and nothing computes
    (1, 7, DIRECT, 9, 10),  # no computation either: hides nothing
]
MEMCPY = {
    "memcpy": "Memcpy DtoD (Device -> Device)",
    "memcpy HtoD": "Memcpy HtoD (Pinned -> Device)",
}


def of_torch(file: Path) -> None:
    events = [
        {
            "ph": "X",
            "cat": "gpu_memcpy" if name in MEMCPY else "kernel",
            "name": MEMCPY.get(name, name),
            "ts": 1e6 + 1e3 * start,
            "dur": 1e3 * (stop - start),
            "args": {"device": device, "stream": stream},
        }
        for device, stream, name, start, stop in WORK
    ]
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9.9, "args": {}}
    file.write_text(json.dumps({"deviceProperties": [], "traceEvents": [host, *events]}))


def of_nsight(file: Path) -> None:
    names = sorted({name for _, _, name, _, _ in WORK})
    columns = "deviceId INT, streamId INT, start INT, end INT"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE StringIds (id INT, value TEXT)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns}, shortName INT)")
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({columns}, copyKind INT)")
        for device, stream, name, start, stop in WORK:
            row = [device, stream, 10**6 * start, 10**6 * stop]
            kind = "MEMCPY" if name in MEMCPY else "KERNEL"
            row += [1 if "HtoD" in name else 8] if kind == "MEMCPY" else [names.index(name)]
            places = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{kind} VALUES ({places})", row)


@pytest.mark.parametrize("write", [of_torch, of_nsight])
def test_the_part_of_copying_that_is_hidden(write, tmp_path):
    write(file := tmp_path / "trace")
    shown = CliRunner().invoke(app, ["show", str(file), "--plot", str(tmp_path / "t.png")])
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["device", "stream", "launches", "matmul", "copy", "host", "wait"] in rows
    assert ["0", "20", "3", "-", "8.000", "-", "1.000"] in rows
    assert ["1", "7", "3", "5.000", "5.000", "-", "-"] in rows
    assert ["1", "9", "1", "-", "-", "4.000", "-"] in rows
    assert "device 0: 75 % of copying is hidden behind computations" in shown.stdout
    assert "device 1: 0 % of copying is hidden" in shown.stdout
    assert "13.000 ms" in shown.stdout
    assert (tmp_path / "t.png").stat().st_size > 0


def test_a_trace_of_each_rank(tmp_path):
    of_torch(tmp_path / "[rank0].json")
    packed = tmp_path / "rank1.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "[rank0].json").read_bytes()))
    files = [str(tmp_path / "[rank0].json"), str(packed)]
    shown = CliRunner().invoke(app, ["show", *files, "--plot", str(tmp_path / "t.png")])
    assert shown.exit_code == 0, shown.output
    assert "[rank0].json: 13.000 ms" in shown.stdout
    assert shown.stdout.count("device 0: 75 % of copying is hidden behind computations") == 2
    (tmp_path / "result.json").write_text('{"benchmark": "p2p"}')
    shown = CliRunner().invoke(app, ["show", files[0], str(tmp_path / "result.json")])
    assert "some are traces and some are results" in " ".join(shown.output.split())


def test_a_kernel_that_also_waits_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.WORK", [(0, 7, "all_gather_matmul_kernel", 0, 5), *WORK])
    of_torch(tmp_path / "trace.json")
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "trace.json")])
    assert "waits for rows that have not arrived: all of its time" in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (PRODUCT, "matmul"),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
            "matmul",
        ),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x64_MI32x32x8x1", "matmul"),
        ("all_gather_matmul_kernel", "matmul"),
        ("_put_to_all", "copy"),
        ("copy_words_kernel", "copy"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "copy"),
        ("two_shot_all_reduce_kernel", "copy"),
        ("multimem_all_gather_kernel", "copy"),
        ("sum_in_rank_order_kernel", "reduce"),
        ("wait_kernel", "wait"),
        ("raise_kernel", "notify"),
        (DIRECT, "copy"),
        ("void at::native::CatArrayBatchedCopy<float, unsigned int, 2, 64, 64>", "copy"),
        ("Memcpy DtoH (Device -> Pageable)", "host"),
        ("vectorized_elementwise_kernel", "other"),
        ("reduce_kernel", "other"),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


def test_a_trace_without_a_gpu_is_refused(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(8, 8) @ torch.ones(8, 8)
    found.export_chrome_trace(str(tmp_path / "cpu.json"))
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "cpu.json")])
    assert shown.exit_code == 2
    assert "has no work of a GPU: profile with ProfilerActivity.CUDA" in " ".join(
        shown.output.split()
    )


def test_other_files_are_refused(tmp_path):
    for name, content, why in (
        ("some.json", '{"a": 1}', "is no result of weft bench"),
        ("no.json", "text", "is not JSON"),
    ):
        (tmp_path / name).write_text(content)
        shown = CliRunner().invoke(app, ["show", str(tmp_path / name)])
        assert shown.exit_code == 2
        assert why in " ".join(shown.output.split())
    of_nsight(file := tmp_path / "old.sqlite")
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("DROP TABLE StringIds")
    assert "is no export of Nsight Systems" in " ".join(
        CliRunner().invoke(app, ["show", str(file)]).output.split()
    )


def test_a_trace_is_parsed_once_and_another_file_is_none(tmp_path, monkeypatch):
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    of_torch(tmp_path / "trace.json")
    assert len(read(tmp_path / "trace.json").spans) == len(WORK)
    assert len(parsed) == 1
    for name, text in (("result.json", '{"benchmark": "p2p"}'), ("text.json", "no JSON")):
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name) is None
    assert read(tmp_path / "absent.json") is None
