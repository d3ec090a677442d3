"""The commands of ``weft bench`` beside those of operators. Importing them does not load torch."""

from __future__ import annotations

from typing import Any

from weft.cli import options
from weft.cli.options import refuse
from weft.cli.values import parse_sizes
from weft_bench.cli import running
from weft_bench.further_settings import WAYS, CopySettings, OverlapSettings, ServingSettings
from weft_bench.settings import LIBRARIES


def overlap(settings: OverlapSettings) -> None:
    from weft_bench import overlap, plots

    if len(parse_sizes(settings.size)) > 1:
        refuse("--size", f"expected one size; got {settings.size!r}")
    _check_elements("--size", settings.size, settings.dtype)
    running.check_baselines(settings, LIBRARIES)
    _check_gathers(settings)
    settings = running.placed(settings)
    running.run_benchmark(settings, overlap.measure, overlap.print_tables, plots.draw_times)


def _check_gathers(settings: OverlapSettings) -> None:
    """End with exit status 2 if this device has no such way to gather."""
    on_gpu = settings.device == "cuda"
    for way in settings.gathers:
        if way not in WAYS:
            refuse("--gather", f"there is no way {way!r}: use {', '.join(WAYS)}")
        if way == "kernel" and not on_gpu and settings.engine != "interpreter":
            instead = "use --device cuda, or --engine interpreter"
            refuse("--gather", f"a kernel runs on a GPU, or in an interpreter: {instead}")
        if way in ("multicast", "nccl-zero-cta"):
            if not on_gpu:
                refuse("--gather", f"{way} needs NVIDIA's GPUs: use --device cuda")
            if settings.plain_out:
                refuse("--plain-out", f"{way} gathers into memory of its own: omit one of them")


def p2p(settings: CopySettings) -> None:
    from weft_bench import p2p

    _check_copies(settings)
    settings = running.placed(settings)
    running.run_benchmark(
        settings, p2p.measure, p2p.print_tables, p2p.draw, alone=options.SINGLE_RANK
    )


def _check_copies(settings: CopySettings) -> None:
    """End with exit status 2 if these settings cannot be measured."""
    if settings.engine in ("reference", "triton"):
        why = f"one-sided calls have no plan and no product for the engine {settings.engine}"
        refuse("--engine", f"{why}: use streams, or on a CPU host or interpreter")
    if settings.tile and len(parse_sizes(settings.tile)) > 1:
        refuse("--tile", f"expected one size; got {settings.tile!r}")
    for option, text in (("--sizes", settings.sizes), ("--tile", settings.tile)):
        if text:
            _check_elements(option, text, settings.dtype)


def _check_elements(option: str, sizes: str, dtype: str) -> None:
    """Refuse sizes that are no whole numbers of elements."""
    itemsize = int("".join(filter(str.isdecimal, dtype))) // 8
    for size in parse_sizes(sizes):
        if size % itemsize:
            why = f"{size} bytes are no whole number of elements of {dtype}"
            refuse(option, f"{why}: use multiples of {itemsize}, or another --dtype")


def serving(settings: ServingSettings) -> None:
    from weft_bench import serving

    _, ranks = options.world_size(settings.ranks)
    for name in ("hidden", "intermediate"):
        if (width := getattr(settings, name)) % ranks:
            uneven = f"{ranks} ranks cannot share {width} evenly: use a multiple of {ranks}"
            refuse(f"--{name}", uneven)
    if (most := settings.decode + settings.prefill - 1) < settings.warmup + settings.steps:
        few = f"there are {most} numbers of tokens, and each step has its own"
        refuse("--steps", f"{few}: fewer steps, or more --prefill")
    running.run_benchmark(
        settings, serving.measure, serving.print_tables, serving.draw, alone=options.SINGLE_RANK
    )


COMMANDS: dict[str, tuple[type[Any], Any]] = {
    "overlap": (OverlapSettings, overlap),
    "p2p": (CopySettings, p2p),
    "serving": (ServingSettings, serving),
}
