"""Layers of experts that are on several ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.experts.moe import moe
from weft.experts.weights import Experts
from weft.nn.frozen import FrozenExperts
from weft.nn.layers import autocasts, note
from weft.nn.layout import chunk_sizes, local
from weft.world import World, current


class ParallelExperts(nn.Module):
    """The experts of a mixture, of which each rank has some (`weft.moe`). Tokens are on all ranks,
    or each rank has its own.

    Parameters are those of Mixtral's and Qwen-MoE's experts in transformers, this rank's experts of
    them: ``gate_up_proj`` (experts, 2 I, K), the rows of the gate before those of up, and
    ``down_proj`` (experts, K, I). `load_state_dict` also takes those of all experts, of which each
    rank keeps its own, and the weights of one expert after the other, as checkpoints have them:
    ``N.gate_proj.weight``, ``N.up_proj.weight`` and ``N.down_proj.weight``, or Mixtral's ``N.w1``,
    ``N.w3`` and ``N.w2``.

    A call multiplies by the parameters as they are, unless they were frozen (`weft.nn.freeze`).

    Args:
        experts: the number of all ranks' experts. A rank's part of them has the size that
            `torch.chunk` gives it; it may be empty.
        width: the features of a token, K.
        inner: the features between the products of an expert, I.
        activation: as of `weft.Experts`.
        own_tokens: whether each rank has its own tokens, which travel to the experts and back.
        world: by default the world made by ``weft.init()``.

    Every rank initializes its own experts, with the seed that it has.

    Without a style the state dict has this rank's experts as plain tensors, which
    `torch.distributed.checkpoint` takes for equal on all ranks: it keeps one rank's. Save a file
    for each rank, or use `ExpertParallel`. The entry ``_extra_state`` of such a file says which
    experts they are, the first one's number and that of all: a rank loads it if its own are among
    them. Other experts, or a part without this entry, are a `RuntimeError`.
    """

    world: World
    first: int
    number: int
    """Of the experts of all ranks."""
    sizes: list[int] | None
    """The experts of all ranks, if each rank has its own tokens."""
    activation: str
    frozen: FrozenExperts | None

    def __init__(
        self,
        experts: int,
        width: int,
        inner: int,
        *,
        activation: str = "silu",
        own_tokens: bool = False,
        world: World | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        world = current(world)
        sizes = chunk_sizes(experts, world.ranks)
        own = sizes[world.rank]
        self.gate_up_proj = nn.Parameter(
            torch.empty(own, 2 * inner, width, device=device, dtype=dtype)
        )
        self.down_proj = nn.Parameter(torch.empty(own, width, inner, device=device, dtype=dtype))
        self.reset_parameters()
        self._connect(world, sum(sizes[: world.rank]), activation, experts, own_tokens)

    def reset_parameters(self) -> None:
        """Initialize each matrix as `nn.Linear` does."""
        for parameter in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(parameter, *_bounds(parameter))

    def _connect(
        self, world: World, first: int, activation: str, experts: int, own_tokens: bool = False
    ) -> None:
        """Set the world and the numbers of this rank's experts, of so many on all ranks."""
        self.world, self.first, self.activation, self.frozen = world, first, activation, None
        self.number = experts
        self.sizes = chunk_sizes(experts, world.ranks) if own_tokens else None
        own = len(local(self.gate_up_proj))
        whose = ", tokens of its own" if own_tokens else ""
        note(self, f"weft: moe, {own} of {experts} experts on this rank{whose}")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Each token's weighted sum of its experts' results.

        Tokens are (T, K), the chosen experts and their factors (T, top); all ranks pass the same,
        or each its own.
        """
        if autocasts(hidden_states):
            hidden_states = hidden_states.to(torch.get_autocast_dtype("cpu"))
        return moe(
            hidden_states,
            top_k_index,
            top_k_weights,
            self._experts(),
            experts_of_ranks=self.sizes,
            world=self.world,
        )

    def _experts(self) -> Experts:
        """The weights in the dtype of the products, packed if they are frozen."""
        frozen = self.frozen
        if frozen is not None and not (
            torch.is_autocast_enabled("cpu")
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
        ):
            if frozen.changed(self.gate_up_proj, self.down_proj):
                error = ValueError(
                    f"{type(self).__name__}: the weights were changed after "
                    "weft.nn.freeze(model); call it again after every change"
                )
                self.world.failure.reject(error)
                raise error
            return frozen.packed
        gate_up, down = local(self.gate_up_proj), local(self.down_proj)
        if autocasts(gate_up):
            dtype = torch.get_autocast_dtype("cpu")
            gate_up, down = gate_up.to(dtype), down.to(dtype)
        return Experts(gate_up, down, first=self.first, activation=self.activation)

    def freeze(self) -> None:
        """Lay out the weights once, by the promise of `weft.nn.freeze`."""
        self.frozen = FrozenExperts(
            self.gate_up_proj, self.down_proj, first=self.first, activation=self.activation
        )

    def train(self, mode: bool = True) -> ParallelExperts:
        if mode:
            self.frozen = None
        return super().train(mode)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._has_part:
            destination[prefix + _PART] = torch.tensor([self.first, self.number], device="cpu")

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        try:
            self._select(state_dict, prefix)
        except ValueError as error:
            error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @property
    def _has_part(self) -> bool:
        """Whether a parameter is a plain tensor of some of the experts, which does not tell
        which.
        """
        plain = not isinstance(self.gate_up_proj, DTensor)
        return plain and len(self.gate_up_proj) != self.number

    def _select(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Leave this rank's experts of those in a state dict, as its parameters have them. Raises
        `ValueError` for experts of another layer, and for a part that does not say which they are.
        """
        part, of_each = state_dict.pop(prefix + _PART, None), _of_each(state_dict, prefix)
        if part is not None and (not isinstance(part, Tensor) or part.shape != (2,)):
            raise ValueError(
                f"its {_PART} must be a tensor of two numbers, those of the first of its experts "
                f"and of all; got {type(part).__name__}"
            )
        if any(number >= self.number for number, _ in of_each):
            raise ValueError(
                f"given are experts up to number {max(of_each)[0]}, and the layer has "
                f"{self.number}: load the state dict of a layer with as many"
            )
        for name, parts in _PARTS.items():
            parameter = self._parameters[name]
            assert parameter is not None
            own = range(self.first, self.first + len(local(parameter)))
            given = state_dict.get(prefix + name)
            plain = not isinstance(parameter, DTensor) and not isinstance(given, DTensor)
            if of_each:
                made = [
                    torch.cat([of_each[number, each] for each in parts])
                    for number in own
                    if all((number, each) in of_each for each in parts)
                ]
                if len(made) == len(own) > 0:
                    state_dict[prefix + name] = torch.stack(made)
                elif not own:
                    state_dict[prefix + name] = parameter.detach()
            elif plain and isinstance(given, Tensor) and given.dim() == 3:
                state_dict[prefix + name] = self._own(given, own, part)

    def _own(self, given: Tensor, own: range, part: Tensor | None) -> Tensor:
        """The experts `own` of a stack of all, or of the part that `part` tells."""
        first, number = (0, len(given)) if part is None else part.tolist()
        if number == self.number and first <= own.start and own.stop <= first + len(given):
            return given[own.start - first : own.stop - first]
        which = "" if part is None else f", from number {first} of {number} on"
        of_own = f", or this rank's own with the entry {_PART} that its state dict has"
        raise ValueError(
            f"given are {len(given)} experts{which}, and this rank has those from number "
            f"{own.start} to before {own.stop} of {self.number}: load the state dict of all "
            f"{self.number}{of_own if self._has_part else ''}"
        )


_PART = "_extra_state"
"""The entry of a state dict that says which experts it has: the first number, and that of all."""
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_NAMES = {
    **{f"{part}_proj": part for part in ("gate", "up", "down")},
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


def _of_each(state_dict: dict[str, Any], prefix: str) -> dict[tuple[int, str], Tensor]:
    """The weights of single experts in a state dict, by number and part; they are taken out."""
    found = {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        number, _, rest = key.removeprefix(prefix).partition(".")
        name, _, kind = rest.partition(".")
        if number.isdecimal() and kind == "weight" and name in _NAMES:
            found[int(number), _NAMES[name]] = state_dict.pop(key)
    return found


def _bounds(parameter: Tensor) -> tuple[float, float]:
    most = 1 / math.sqrt(max(parameter.shape[-1], 1))
    return -most, most


class MoE(nn.Module):
    """A mixture of experts: a router, and experts of which each rank has some (`ParallelExperts`).
    Tokens are on all ranks, and so is the result, or each rank has its own.

    The router takes the softmax of a linear layer without bias over all experts, in float32, and
    the `top` largest of it. Parameters are those of Mixtral's and Qwen-MoE's layers in
    transformers: ``gate.weight`` (experts, K), on every rank, and ``experts.…``; `load_state_dict`
    takes their state dicts, and those of their checkpoints, without a shared expert.

    Args:
        experts: the number of all ranks' experts, shared as in `ParallelExperts`.
        width: the features of a token, K.
        inner: the features between the products of an expert, I.
        top: the number of experts that a token chooses.
        normalize: whether a token's `top` factors are divided by their sum, as by Mixtral and, if
            its ``norm_topk_prob`` says so, Qwen-MoE.
        activation: as of `weft.Experts`.
        own_tokens: whether each rank has its own tokens, as in data parallelism: other numbers of
            them, also none. The gradient of the router is then that of these tokens, to be summed
            over the ranks like those of other layers; those of experts are complete.
        world: by default the world made by ``weft.init()``.

    All ranks must use the same seed, or load a state dict, as the router is on each. Input and
    output: (…, width), the same on every rank, or its own.
    """

    def __init__(
        self,
        experts: int,
        width: int,
        inner: int,
        top: int,
        *,
        normalize: bool = True,
        activation: str = "silu",
        own_tokens: bool = False,
        world: World | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top <= experts:
            raise ValueError(f"top must be 1 to {experts}, the number of experts; got {top}")
        self.top, self.normalize = top, normalize
        self.gate = nn.Linear(width, experts, bias=False, device=device, dtype=dtype)
        self.experts = ParallelExperts(
            experts,
            width,
            inner,
            activation=activation,
            own_tokens=own_tokens,
            world=world,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        likely = self.gate(tokens).softmax(-1, dtype=torch.float32)
        scores, chosen = likely.topk(self.top, dim=-1)
        if self.normalize:
            scores = scores / scores.sum(-1, keepdim=True)
        y: Tensor = self.experts(tokens, chosen, scores)
        return y.view(x.shape)
