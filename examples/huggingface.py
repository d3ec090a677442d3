"""A causal language model of Hugging Face in five variants: tokens are compared and timed.

    pip install transformers accelerate
    python examples/huggingface.py --ranks 2

One process with all cores; transformers' own tensor parallelism (``tp_plan="auto"``) on gloo; the
same on weft, which changes one word; the same after ``weft.huggingface.enable()``, whose layers
overlap communication with the products; and weft's layer styles, applied by hand. The model is a
small random Llama that the example saves in a folder. In bfloat16 its two likeliest tokens may be
so close that a different order of sums selects the other.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

import weft
import weft.huggingface
import weft.nn

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install transformers accelerate") from None

# layers that read the same activations
GATHERED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
SUMMED = ("self_attn.o_proj", "mlp.down_proj")


class Task(NamedTuple):
    """A task for the model: read a prompt, then generate tokens, several times."""

    prompt: int
    generated: int
    runs: int


class Found(NamedTuple):
    """Generated tokens, and the median milliseconds of the prompt and of each token after it."""

    tokens: list[int]
    prefill: float
    decode: float


def make(folder: Path, dtype: torch.dtype, **sizes: int) -> None:
    """Save a random Llama."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).save_pretrained(folder)


def unsharded(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def by_plan(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", tp_plan="auto")


def enabled(folder: str) -> nn.Module:
    weft.huggingface.enable()
    model = by_plan(folder)
    weft.nn.freeze(model)
    return model


def by_styles(folder: str) -> nn.Module:
    model = unsharded(folder)
    plan: dict[str, Any] = {"lm_head": weft.nn.ColwiseParallel(output_layouts=Replicate())}
    for number in range(len(model.model.layers)):
        layer = f"model.layers.{number}"
        plan |= {
            f"{layer}.{part}": weft.nn.SharedColwiseParallel(*names)
            for part, names in GATHERED.items()
        }
        plan |= {f"{layer}.{name}": weft.nn.RowwiseParallel() for name in SUMMED}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    weft.nn.freeze(model)
    return model


disable_progress_bar()
VARIANTS: dict[str, tuple[str, Callable[[str], nn.Module]]] = {
    'tp_plan="auto" on gloo': ("gloo", by_plan),
    'tp_plan="auto" on weft': ("weft", by_plan),
    "... and weft.huggingface.enable()": ("weft", enabled),
    "weft.nn styles": ("weft", by_styles),
}


@torch.inference_mode()
def ask(model: nn.Module, task: Task) -> Found:
    """Read a prompt and generate the likeliest tokens, one by one."""
    model.eval()
    prompt = torch.randint(
        model.config.vocab_size, (1, task.prompt), generator=torch.Generator().manual_seed(1)
    )
    prefill, decode, produced = [], [], []
    for _ in range(task.runs + 1):
        produced, ids, cache = [], prompt, None
        for number in range(task.generated + 1):
            start = time.perf_counter()
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            (decode if number else prefill).append(1e3 * (time.perf_counter() - start))
            produced.append(int(ids))
    # without the first run, which warms up
    return Found(produced, median(prefill[1:]), median(decode[task.generated :]))


def on_ranks(variant: str, folder: str, task: Task) -> Found:
    """Run on each rank."""
    backend, load = VARIANTS[variant]
    dist.init_process_group(backend)
    found = ask(load(folder), task)
    dist.destroy_process_group()
    return found


def alone(folder: str, task: Task) -> Found:
    return ask(unsharded(folder), task)


def main(
    ranks: Annotated[int, typer.Option("--ranks", "-n")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 1024,
    intermediate: Annotated[int, typer.Option(help="Width of the feed-forward part.")] = 2816,
    layers: int = 6,
    heads: int = 16,
    kv_heads: Annotated[
        int, typer.Option(help="Heads of keys and values; a multiple of the ranks.")
    ] = 8,
    vocabulary: int = 8192,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 256,
    generated: Annotated[int, typer.Option(help="Tokens generated after it.")] = 16,
    runs: int = 5,
) -> None:
    """Run a causal language model alone and in parallel, on gloo and on weft, and compare tokens
    and times.
    """
    task, cores = Task(prompt, generated, runs), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        make(
            Path(folder),
            getattr(torch, dtype),
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
        )
        found = {
            f"one process, {cores} threads": weft.launch(alone, 1, folder, task, threads=cores)[0]
        }
        found |= {
            variant: weft.launch(on_ranks, ranks, variant, folder, task)[0] for variant in VARIANTS
        }
    first, *_ = found.values()
    table = Table(
        title=f"Llama, {layers} layers of width {hidden}, {dtype}; {ranks} ranks; medians of "
        f"{runs} runs"
    )
    for column in ("", f"prefill of {prompt}, ms", "decode, ms a token", "the same tokens"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for variant, (tokens, prefill, decode) in found.items():
        equal = sum(one == other for one, other in zip(tokens, first.tokens, strict=True))
        table.add_row(variant, f"{prefill:.1f}", f"{decode:.1f}", f"{equal} of {len(tokens)}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
