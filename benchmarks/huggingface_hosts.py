"""A causal language model of Hugging Face over hosts, as one variant of `examples/huggingface.py`.

``benchmarks/two_hosts.sh 0 benchmarks/huggingface_hosts.py gloo`` measures it between two network
namespaces, and then ``weft`` and ``enabled``; any launcher serves on real hosts.
"""

from __future__ import annotations

import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from huggingface import Found, Task, ask, by_plan, enabled, make

Variant = StrEnum("Variant", ("gloo", "weft", "enabled"))


def measured(variant: Variant, hidden: int, layers: int, prompt: int) -> Found:
    """What the ranks of a launcher take for a Llama in bfloat16 of this variant."""
    with tempfile.TemporaryDirectory() as folder:
        make(
            Path(folder),
            torch.bfloat16,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=8192,
        )
        dist.init_process_group("gloo" if variant == Variant.gloo else "weft")
        model = (enabled if variant == Variant.enabled else by_plan)(folder)
    found = ask(model, Task(prompt, generated=16, runs=5))
    dist.destroy_process_group()
    return found


def main(
    variant: Variant,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 512,
    layers: int = 4,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 128,
) -> None:
    """Print the median milliseconds of a prompt, and of a token after it."""
    found = measured(variant, hidden, layers, prompt)
    print(f"{variant}: prompt {found.prefill:.1f} ms, token {found.decode:.2f} ms")


if __name__ == "__main__":
    typer.run(main)
