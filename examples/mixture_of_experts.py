"""A mixture of experts of Hugging Face, a small Mixtral, whose experts are on several ranks: logits
and gradients are compared with one process, and times.

    pip install transformers accelerate
    python examples/mixture_of_experts.py --ranks 2

One process with all cores; transformers' own expert parallelism, by all-to-all and by all-reduce,
on gloo and on weft, which changes one word; and the same after ``weft.huggingface.enable()``, by
which each rank computes its experts in one call and sums are overlapped. Each rank has a part of
the attention heads and of the experts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import weft
import weft.huggingface
import weft.nn

try:
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install transformers accelerate") from None

disable_progress_bar()
VARIANTS = {"gloo": ("all_to_all", "all_reduce"), "weft": ("all_to_all", "all_reduce", "weft")}
"""By the backend, transformers' `ep_implementation`."""


class Task(NamedTuple):
    """A prompt to read, tokens to generate, and the number of runs."""

    prompt: int
    generated: int
    runs: int


class Found(NamedTuple):
    """The logits of the prompt and some gradients, and the median milliseconds of the prompt, of
    each token after it, and of a training step on the prompt.
    """

    logits: Tensor
    gradients: dict[str, Tensor]
    prefill: float
    decode: float
    step: float


def make(folder: Path, dtype: torch.dtype, **sizes: int) -> None:
    """Save a random Mixtral."""
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**sizes)).to(dtype).save_pretrained(folder)


def ask(model: nn.Module, task: Task) -> Found:
    """Read a prompt, generate the likeliest tokens one by one, and train on the prompt."""
    model.eval()
    prompt = torch.randint(
        model.config.vocab_size, (1, task.prompt), generator=torch.Generator().manual_seed(1)
    )
    times: dict[str, list[float]] = {"prefill": [], "decode": [], "step": []}

    def timed(what: str, work: Callable[[], Tensor]) -> Tensor:
        start = time.perf_counter()
        result = work()
        times[what].append(1e3 * (time.perf_counter() - start))
        return result

    def step(ids: Tensor) -> Tensor:
        model.zero_grad()
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    with torch.inference_mode():
        weft_layers = "has no layer" not in weft.nn.explain(model)
        if weft_layers:
            weft.nn.freeze(model)  # until it is trained
        logits = model(input_ids=prompt).logits
        for _ in range(task.runs + 1):
            out = model(input_ids=prompt[:, :1], use_cache=True)
            timed("prefill", lambda: model(input_ids=prompt, logits_to_keep=1).logits)
            for _ in range(task.generated):
                ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

                def token(ids: Tensor = ids, cache: object = cache) -> Tensor:
                    nonlocal out
                    out = model(input_ids=ids, past_key_values=cache, use_cache=True)
                    return out.logits

                timed("decode", token)
    model.train()
    for _ in range(task.runs + 1):
        timed("step", lambda: step(prompt))
    gradients = {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if "layers.0." in name and parameter.grad is not None
    }
    # without the first run, which warms up
    decode = median(times["decode"][task.generated :])
    return Found(logits, gradients, median(times["prefill"][1:]), decode, median(times["step"][1:]))


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def alone(folder: str, task: Task) -> Found:
    return ask(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), task)


def on_ranks(backend: str, folder: str, task: Task) -> dict[str, Found]:
    """Run on each rank."""
    dist.init_process_group(backend)
    ranks, found = dist.get_world_size(), {}
    for implementation in VARIANTS[backend]:
        shown = f"{implementation} on {backend}"
        if implementation == "weft":  # for the models that are made from now on
            weft.huggingface.enable()
            shown = "weft.huggingface.enable()"
        config = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation=implementation)
        load = AutoModelForCausalLM.from_pretrained
        found[shown] = ask(load(folder, dtype="auto", distributed_config=config), task)
    dist.destroy_process_group()
    return found


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((one - other).abs().max() / other.abs().max())


def main(
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="2, 4 or 8.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    intermediate: Annotated[int, typer.Option(help="Width of an expert.")] = 256,
    layers: int = 4,
    experts: int = 8,
    top: Annotated[int, typer.Option(help="Experts of a token.")] = 2,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    generated: Annotated[int, typer.Option(help="Tokens generated after its first.")] = 8,
    runs: int = 7,
) -> None:
    """Run a mixture of experts alone and in parallel, on gloo and on weft, and compare logits,
    gradients and times.
    """
    task, cores = Task(prompt, generated, runs), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        make(
            Path(folder),
            getattr(torch, dtype),
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_local_experts=experts,
            num_experts_per_tok=top,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=1024,
        )
        first = weft.launch(alone, 1, folder, task, threads=cores)[0]
        found = {f"one process, {cores} threads": first}
        for backend in VARIANTS:
            found |= weft.launch(on_ranks, ranks, backend, folder, task)[0]
    table = Table(
        title=f"Mixtral, {layers} layers of width {hidden}, {experts} experts, top {top}, {dtype}, "
        f"{ranks} ranks: ms of a token, of a prompt of {prompt} and of a step on it, medians of "
        f"{runs} runs, and the largest differences"
    )
    for column in ("", "decode", "prefill", "step", "logits", "gradients"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for variant, one in found.items():
        of_gradients = max(
            difference(one.gradients[name], wanted) for name, wanted in first.gradients.items()
        )
        table.add_row(
            variant,
            *(f"{ms:.2f}" for ms in (one.decode, one.prefill, one.step)),
            f"{difference(one.logits, first.logits):.0e}",
            f"{of_gradients:.0e}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
