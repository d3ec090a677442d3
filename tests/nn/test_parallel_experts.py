"""Layers of experts on several ranks: their parameters, what they load, and their results."""

from __future__ import annotations

import copy

import pytest
import torch
from support.checks.autograd import assert_same
from support.mixture import defined, random
from support.ranks import everyones, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import weft
import weft.nn

EXPERTS, WIDTH, INNER, TOP = 5, 12, 10, 2


class Experts(nn.Module):
    """As Mixtral's and Qwen-MoE's in transformers."""

    def __init__(self, activation=None):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH).double())
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER).double())
        self.act_fn = activation or nn.SiLU()

    def forward(self, tokens, chosen, scores):
        return defined(tokens, chosen, scores, self.gate_up_proj, self.down_proj)


def operands():
    mixture = random(7, WIDTH, INNER, EXPERTS, TOP, torch.float64, seed=3)
    return mixture.x.requires_grad_(), mixture.chosen, mixture.scores.double().requires_grad_()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def divided(world):
    torch.manual_seed(1)
    theirs = Experts()
    mesh = init_device_mesh("cpu", (world.ranks,))
    model = nn.ModuleDict({"experts": copy.deepcopy(theirs)})
    parallelize_module(model, mesh, {"experts": weft.nn.ExpertParallel()})
    ours = model["experts"]
    assert isinstance(ours, Experts)
    assert isinstance(ours, weft.nn.ParallelExperts)
    gradients = []
    for layer in (ours, theirs):
        x, chosen, scores = operands()
        y = layer(x, chosen, scores)
        y.sin().sum().backward()
        of_weights = [whole(parameter.grad) for parameter in layer.parameters()]
        gradients.append([y, x.grad, scores.grad, *of_weights])
    assert_same(*gradients)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        assert_same([ours(*operands())], [theirs(*operands())])
    _frozen(model, theirs)
    twin = copy.deepcopy(ours)
    assert twin.world is world or twin.world is ours.world
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    return weft.nn.explain(model)


@torch.no_grad()
def _frozen(model, theirs):
    expected = theirs(*operands())
    weft.nn.freeze(model.eval())
    assert "; frozen" in weft.nn.explain(model)
    torch.testing.assert_close(model["experts"](*operands()), expected)
    for layer in (model["experts"], theirs):
        layer.down_proj.mul_(2)
    with pytest.raises(ValueError, match="call it again after every change"):
        model["experts"](*operands())
    weft.nn.freeze(model)
    torch.testing.assert_close(model["experts"](*operands()), 2 * expected)


@pytest.mark.data
@pytest.mark.parametrize("ranks", [2, 4])  # the last of four has none
def test_experts_are_divided(ranks):
    for rank, text in enumerate(on_ranks(divided, ranks)):
        own = min(-(-EXPERTS // ranks), max(0, EXPERTS - rank * -(-EXPERTS // ranks)))
        assert text.startswith(f"experts  weft: moe, {own} of {EXPERTS} experts on this rank")


def refused(world):
    mesh = init_device_mesh("cpu", (1,))
    other, biased = Experts(nn.Tanh()), Experts()
    biased.gate_up_proj_bias = nn.Parameter(torch.ones(1))
    for layer, words in (
        (other, "weft has no activation Tanh"),
        (biased, "it has gate_up_proj, down_proj, gate_up_proj_bias"),
        (nn.Linear(2, 2), "cannot divide Linear: its parameters must be"),
    ):
        with pytest.raises(ValueError, match=words):
            parallelize_module(layer, mesh, weft.nn.ExpertParallel())


def test_other_modules_are_refused():
    on_ranks(refused, 1)


def mixtral():
    """The state dict of a layer in one process as transformers has it, and as checkpoints do."""
    generator = torch.Generator().manual_seed(2)
    gate, up = (torch.randn(EXPERTS, INNER, WIDTH, generator=generator) for _ in range(2))
    down = torch.randn(EXPERTS, WIDTH, INNER, generator=generator)
    router = {"gate.weight": torch.randn(EXPERTS, WIDTH, generator=generator)}
    whole = {"experts.gate_up_proj": torch.cat((gate, up), 1), "experts.down_proj": down}
    yield router | whole
    for names in (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")):
        yield router | {
            f"experts.{number}.{name}.weight": part[number].clone()
            for name, part in zip(names, (gate, up, down), strict=True)
            for number in range(EXPERTS)
        }


def loaded(world):
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(4))
    for normalize in (True, False):
        layer = weft.nn.MoE(EXPERTS, WIDTH, INNER, TOP, normalize=normalize)
        for state in mixtral():
            layer.load_state_dict(state)
            first, stop = (state["gate.weight"] @ x.view(-1, WIDTH).t()).softmax(0).topk(TOP, 0)
            scores = first / first.sum(0) if normalize else first
            given = next(iter(mixtral()))
            expected = defined(
                x.view(-1, WIDTH),
                stop.t(),
                scores.t(),
                given["experts.gate_up_proj"],
                given["experts.down_proj"],
            )
            found = layer(x)
            assert found.shape == x.shape
            torch.testing.assert_close(
                found.view(-1, WIDTH).double(), expected, rtol=1e-4, atol=1e-4
            )
            assert all(torch.equal(found.detach(), other) for other in everyones(found))
        broken = dict(state)
        del broken["experts.0.gate_proj.weight"]
        if len(layer.experts.gate_up_proj) and not layer.experts.first:
            with pytest.raises(RuntimeError, match="gate_up_proj"):
                layer.load_state_dict(broken)
        layer.load_state_dict(layer.state_dict())


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_dicts_as_they_are(ranks):
    on_ranks(loaded, ranks)


def stacks(numbers, first=None, of=None):
    """A state dict of experts that are full of their numbers."""
    full = torch.tensor([*numbers]).float().view(-1, 1, 1)
    part = {} if first is None else {"_extra_state": torch.tensor([first, of])}
    return part | {"gate_up_proj": full.expand(-1, 4, 3), "down_proj": full.expand(-1, 3, 2)}


def single(numbers):
    shapes = {"gate_proj": (2, 3), "up_proj": (2, 3), "down_proj": (3, 2)}
    return {
        f"{number}.{name}.weight": torch.full(shape, float(number))
        for number in numbers
        for name, shape in shapes.items()
    }


def of_another_layer(world):
    layer = weft.nn.ParallelExperts(8, 3, 2)
    own = [*range(layer.first, layer.first + len(layer.gate_up_proj))]
    for state in (
        stacks(range(8)),
        single(range(8)),
        single(own),
        stacks(own, layer.first, 8),
        stacks(range(1, 8) if layer.first else range(8), min(layer.first, 1), 8),
    ):
        torch.nn.init.constant_(layer.gate_up_proj, -1)
        layer.load_state_dict(state)
        for parameter in layer.parameters():
            assert parameter[:, 0, 0].tolist() == own
    torch.nn.init.constant_(layer.gate_up_proj, -1)
    alone = layer.number == len(own)
    for state, words in (
        (stacks(range(16)), "given are 16 experts, and this rank has those from number"),
        (single(range(16)), "given are experts up to number 15, and the layer has 8"),
        (stacks(range(7)), "given are 7 experts"),
        (stacks(range(4), 0, 16), "given are 4 experts, from number 0 of 16 on"),
        (stacks(range(3), 2, 8), "given are 3 experts, from number 2 of 8 on"),
        *([] if alone else [(stacks(own), f"given are {len(own)} experts, and this rank")]),
        (stacks(own) | {"_extra_state": 1}, "_extra_state must be a tensor of two numbers"),
    ):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=words):
                layer.load_state_dict(state, strict=strict)
        assert (layer.gate_up_proj == -1).all()
    model = nn.ModuleDict({"experts": layer})
    saved = get_model_state_dict(model)
    assert ("experts._extra_state" in saved) != alone
    set_model_state_dict(model, saved)
    with pytest.raises(RuntimeError, match=r"experts: given are 1 experts"):
        model.load_state_dict({f"experts.{k}": v for k, v in stacks([0]).items()})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_experts_of_another_layer_are_refused(ranks):
    on_ranks(of_another_layer, ranks)


def test_top_is_checked():
    with weft.local_world(1) as local, pytest.raises(ValueError, match="top must be 1 to 5"):
        local.run(lambda: weft.nn.MoE(EXPERTS, WIDTH, INNER, 6))


def own_tokens(world):
    """A layer whose ranks have other tokens, also none, against the layer in one process."""
    state = {name: tensor.double() for name, tensor in next(mixtral()).items()}
    whole = Experts()
    whole.load_state_dict({name: state[f"experts.{name}"] for name in whole.state_dict()})
    layer = weft.nn.MoE(EXPERTS, WIDTH, INNER, TOP, own_tokens=True, dtype=torch.float64)
    layer.load_state_dict(state)
    gate = nn.Parameter(state["gate.weight"])
    generator = torch.Generator().manual_seed(5)
    every = [torch.randn(4 * r, WIDTH, generator=generator).double() for r in range(world.ranks)]

    def expected(x):
        likely = (x @ gate.t()).softmax(-1, dtype=torch.float32)
        scores, chosen = likely.topk(TOP, dim=-1)
        return whole(x, chosen, scores / scores.sum(-1, keepdim=True))

    x, other = every[world.rank].clone().requires_grad_(), every[world.rank].requires_grad_()
    y = layer(x)
    y.sin().sum().backward()
    sum(expected(each).sin().sum() for each in every).backward()
    of_gate = weft.all_reduce(layer.gate.weight.grad)
    first, own = layer.experts.first, len(layer.experts.gate_up_proj)
    found = [y, x.grad, of_gate, *(each.grad for each in layer.experts.parameters())]
    wanted = [expected(other), other.grad, gate.grad]
    wanted += [each.grad[first : first + own] for each in whole.parameters()]
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)  # scores are float32
    with torch.no_grad():
        weft.nn.freeze(layer.eval())
        torch.testing.assert_close(layer(x), y, rtol=1e-6, atol=1e-6)
    return weft.nn.explain(layer)


@pytest.mark.data
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_tokens_of_their_own(ranks):
    for text in on_ranks(own_tokens, ranks):
        assert text.endswith("on this rank, tokens of its own; frozen")
