"""A Llama-shaped model under torch's tensor parallelism and under weft's, compared in one run.

    python examples/tensor_parallel_transformer.py --ranks 2 --dtype float32

Both apply the same styles to the same random weights; the styles are imported from torch or from
weft, and weft's layers share the gather of a sequence. Logits and gradients are compared first,
then a prompt is read (prefill), tokens are generated one at a time (decode), and the model is
trained with sequence parallelism. Times are medians of interleaved runs, each from a barrier to the
last rank's finish.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
import weft.nn
from weft.measure.progress import progress
from weft.measure.timing import Stopwatch

TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2}
"""The allowed difference of an element from torch's, relative to the largest element of its tensor:
sums are rounded in another order.
"""


class Sizes(NamedTuple):
    """The sizes of the model and of its inputs."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    batch: int
    prompt: int
    generated: int
    dtype: str


class Attention(nn.Module):
    """Causal self-attention with rotary positions and fewer key/value heads than query heads; heads
    are split over ranks.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads
        self.wq = nn.Linear(sizes.dim, sizes.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(sizes.heads * self.head_dim, sizes.dim, bias=False)
        # keys and values (batch, heads, positions, head_dim) of this rank's heads
        self.cache: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, rotation: Tensor, start: int) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k, stop = rotate(q, rotation), rotate(k, rotation), start + k.shape[2]
        if self.cache is not None:
            for cached, new in zip(self.cache, (k, v), strict=True):
                cached[:, :, start:stop] = new
            k, v = (cached[:, :, :stop] for cached in self.cache)
        if q.shape[2] == 1:  # heads that share keys and values are rows of one small product
            y = F.scaled_dot_product_attention(
                q.view(len(q), k.shape[1], -1, self.head_dim), k, v
            ).view(q.shape)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(sizes.dim, eps=1e-5), Attention(sizes)
        self.feed_forward_norm, self.feed_forward = (
            nn.RMSNorm(sizes.dim, eps=1e-5),
            FeedForward(sizes),
        )

    def forward(self, x: Tensor, rotation: Tensor, start: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, start)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        frequencies = 1e4 ** -(
            torch.arange(0, sizes.dim // sizes.heads, 2) / (sizes.dim // sizes.heads)
        )
        angles = torch.outer(torch.arange(sizes.prompt + sizes.generated), frequencies)
        # complex numbers in every dtype of the model
        self.rotation = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """(batch, positions) to logits (batch, positions, vocab), for tokens that begin at position
        `start`.
        """
        rotation = self.rotation[start : start + tokens.shape[1]]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotation, start)
        return self.head(self.norm(x))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of elements of (…, positions, head_dim) by the angles of their position."""
    rotated = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rotation
    return torch.view_as_real(rotated).flatten(-2).type_as(x)


def parallel_model(
    sizes: Sizes, mesh: DeviceMesh, styles: ModuleType, sequence_parallel: bool
) -> Transformer:
    """The model, equal on every call and sharded over `mesh` by the styles of `styles`: torch's or
    weft's.
    """
    torch.manual_seed(0)
    model = Transformer(sizes).to(getattr(torch, sizes.dtype))
    # the placement of activations between the layers that compute with all heads
    rows = Shard(1) if sequence_parallel else Replicate()
    plan = {"head": styles.ColwiseParallel(input_layouts=rows, output_layouts=Replicate())}
    inputs = {"attention": ("wq", "wk", "wv"), "feed_forward": ("w1", "w3")}
    for i, (part, names) in itertools.product(range(sizes.layers), inputs.items()):
        if styles is weft.nn:
            plan[f"blocks.{i}.{part}"] = weft.nn.SharedColwiseParallel(*names, input_layouts=rows)
            continue
        if sequence_parallel:
            layouts = (
                [(rows, None, None), (Replicate(), None, None)]
                if part == "attention"
                else [(rows,), (Replicate(),)]
            )
            plan[f"blocks.{i}.{part}"] = torch_styles.PrepareModuleInput(
                input_layouts=layouts[0], desired_input_layouts=layouts[1]
            )
        for name in names:
            plan[f"blocks.{i}.{part}.{name}"] = styles.ColwiseParallel()
    for i in range(sizes.layers):
        for name in ("attention.wo", "feed_forward.w2"):
            plan[f"blocks.{i}.{name}"] = styles.RowwiseParallel(output_layouts=rows)
        if sequence_parallel:
            for name in ("attention_norm", "feed_forward_norm"):
                plan[f"blocks.{i}.{name}"] = styles.SequenceParallel(use_local_output=True)
    if sequence_parallel:
        plan["norm"] = styles.SequenceParallel(use_local_output=True)
        plan["embed"] = torch_styles.PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=rows
        )
    torch_styles.parallelize_module(model, mesh, plan)
    return model


class Run:
    """The three tasks that are timed, with torch's or weft's styles."""

    def __init__(self, sizes: Sizes, mesh: DeviceMesh, styles: ModuleType) -> None:
        self.sizes = sizes
        self.served = parallel_model(sizes, mesh, styles, sequence_parallel=False).eval()
        if styles is weft.nn:
            weft.nn.freeze(self.served)  # its weights do not change
        self.trained = parallel_model(sizes, mesh, styles, sequence_parallel=True)
        heads, head_dim = sizes.kv_heads // mesh.size(), sizes.dim // sizes.heads
        shape = sizes.batch, heads, sizes.prompt + sizes.generated, head_dim
        for block in self.served.blocks:
            block.attention.cache = tuple(
                torch.zeros(shape, dtype=getattr(torch, sizes.dtype)) for _ in range(2)
            )
        # equal on all ranks, by the seed above
        self.tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.prompt + sizes.generated))

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Logits of the prompt; its keys and values are kept."""
        return self.served(self.tokens[:, : self.sizes.prompt])

    @torch.inference_mode()
    def decode(self) -> Tensor:
        """Logits of tokens that come one at a time, after the prompt."""
        steps = range(self.sizes.prompt, self.sizes.prompt + self.sizes.generated)
        return torch.cat([self.served(self.tokens[:, at : at + 1], at) for at in steps], dim=1)

    def train(self) -> Tensor:
        """The loss of predicting each token of the prompt from earlier tokens; the parameters get
        gradients.
        """
        self.trained.zero_grad()
        logits = self.trained(self.tokens[:, : self.sizes.prompt])
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), self.tokens[:, 1 : self.sizes.prompt].flatten()
        )
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """The unsharded gradient of every parameter, after a training step; collective."""
        gradients = {name: parameter.grad for name, parameter in self.trained.named_parameters()}
        return {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad
            for name, grad in gradients.items()
        }


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> float:
    """The largest difference of any tensor, relative to its largest element; more than `tolerance`
    (or a NaN) is an error.
    """
    worst = 0.0
    for name, expected in theirs.items():
        difference = float(
            (ours[name].float() - expected.float()).abs().max() / expected.float().abs().max()
        )
        if not difference <= tolerance:
            raise AssertionError(
                f"{name} differs by {difference:.2g} of its largest element, more than "
                f"{tolerance:g}"
            )
        worst = max(worst, difference)
    return worst


def measure(sizes: Sizes, iterations: int, show_progress: bool) -> dict[str, Any]:
    """Run on each rank: verify, then time; returns milliseconds by task and by kind of styles,
    and the largest differences.
    """
    dist.init_process_group("gloo")
    with weft.init() as world:
        mesh = init_device_mesh("cpu", (world.ranks,))
        runs = {"torch": Run(sizes, mesh, torch_styles), "weft": Run(sizes, mesh, weft.nn)}
        logits, gradients = {}, {}
        for name, run in runs.items():
            logits[name] = {"prefill": run.prefill(), "decode": run.decode(), "loss": run.train()}
            gradients[name] = run.gradients()
        tolerance = TOLERANCE[sizes.dtype]
        differences = {
            "logits": compare(logits["weft"], logits["torch"], tolerance),
            "gradients": compare(gradients["weft"], gradients["torch"], tolerance),
        }
        del logits, gradients
        times = {}
        with progress(
            "measuring", 3 * (iterations + 1), shown=show_progress and world.rank == 0
        ) as advance:
            for task in ("prefill", "decode", "train"):
                views: dict[str, Callable[[], Tensor]] = {
                    name: getattr(run, task) for name, run in runs.items()
                }
                times[task] = {
                    name: taken.median
                    for name, taken in Stopwatch(world)
                    .interleave(views, 1, iterations, advance)
                    .items()
                }
        layers = {
            "serving": weft.nn.explain(runs["weft"].served),
            "training": weft.nn.explain(runs["weft"].trained),
        }
    dist.destroy_process_group()
    return {"times": times, "differences": differences, "layers": layers}


def main(
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", help="Processes that share the model.")
    ] = 2,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(TOLERANCE)}.")] = "float32",
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 1024,
    layers: int = 4,
    heads: int = 16,
    kv_heads: Annotated[
        int, typer.Option(help="Heads of keys and values; a multiple of the ranks.")
    ] = 4,
    hidden: Annotated[int, typer.Option(help="Width of the feed-forward part.")] = 2816,
    vocab: int = 8192,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    prompt: Annotated[
        int, typer.Option(help="Tokens of each prompt; a multiple of the ranks.")
    ] = 512,
    generated: Annotated[int, typer.Option(help="Tokens decoded one at a time.")] = 16,
    iterations: int = 7,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print the operators of every layer.")
    ] = False,
) -> None:
    """Run a Llama-shaped model under torch's tensor parallelism and under weft's, and compare
    results and times.
    """
    if dtype not in TOLERANCE:
        raise typer.BadParameter(f"choose one of {', '.join(TOLERANCE)}", param_hint="--dtype")
    if dim % heads or heads % kv_heads or kv_heads % ranks or prompt % ranks:
        raise typer.BadParameter(
            "heads divide dim, kv-heads divide heads, and ranks divide kv-heads and prompt"
        )
    sizes = Sizes(dim, layers, heads, kv_heads, hidden, vocab, batch, prompt, generated, dtype)
    console = Console()
    result = weft.launch(measure, ranks, sizes, iterations, Console(stderr=True).is_terminal)[0]
    table = Table(
        title=f"{layers} layers of width {dim}, {dtype}, {ranks} ranks; medians of "
        f"{iterations} runs"
    )
    for column in ("", "torch ms", "weft ms", "torch tokens/s", "weft tokens/s", "ratio"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for task, tokens in {
        "prefill": batch * prompt,
        "decode": batch * generated,
        "train": batch * prompt,
    }.items():
        theirs, ours = (result["times"][task][name] for name in ("torch", "weft"))
        speeds = (f"{1e3 * tokens / time:,.0f}" for time in (theirs, ours))
        table.add_row(
            f"{task}, {tokens} tokens",
            f"{theirs:.1f}",
            f"{ours:.1f}",
            *speeds,
            f"{theirs / ours:.2f}x",
        )
    console.print(table)
    for values, difference in result["differences"].items():
        console.print(
            f"{values} agree: they differ by at most {difference:.1e} of the largest element "
            f"(allowed: {TOLERANCE[dtype]:g})"
        )
    if explain:
        for model, text in result["layers"].items():
            console.print(f"\n{model}\n{text}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
