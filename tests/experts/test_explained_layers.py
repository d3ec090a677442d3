"""`weft.explain` of layers of experts."""

from __future__ import annotations

import re

import pytest
from support.mixture import part, random
from support.ranks import on_ranks

import weft
from weft.engines import engine
from weft.ops.call import Selection


def explained(world):
    mixture = random(300, 8, 6, 4, 2)
    experts = part(mixture, (2, 2), world.rank)
    routing = {"chosen": mixture.chosen, "scores": mixture.scores}
    text = weft.explain(mixture.x, experts, operator="moe", algorithm="ring", **routing)
    assert text.startswith("moe, by matmul_all_reduce, over 2 ranks: ring, at most")
    assert text.endswith("b is experts")
    assert "over 2 ranks" in weft.explain(mixture.x, experts, operator="moe", **routing)
    with pytest.raises(TypeError, match="scores"):
        weft.explain(mixture.x, experts, operator="moe", chosen=mixture.chosen)
    with pytest.raises(ValueError, match=r"x must be tokens \(T, 8\)"):
        weft.explain(mixture.x[:, :5], experts, operator="moe", **routing)


def test_a_layer_of_tokens_that_every_rank_has():
    on_ranks(explained, 2)


def of_own_tokens(world):
    """The text on a class of calls, before ``auto`` has measured its variants and after it, and on
    each algorithm.
    """
    sizes = [4] * world.ranks
    mixture = random(400, 33, 20, 4 * world.ranks, 2)
    experts, (x, chosen, scores, *_) = part(mixture, sizes, world.rank), mixture
    options = {"chosen": chosen, "scores": scores, "experts_of_ranks": sizes}

    def text(**others):
        return weft.explain(x, experts, operator="moe", **options, **others)

    first, selections = text(), engine(world).selections
    assert not selections, "nothing was sent"
    weft.moe(x, chosen, scores, experts, experts_of_ranks=sizes)
    during = text()
    for _ in range(200):
        if isinstance(*selections.values(), Selection):
            break
        weft.moe(x, chosen, scores, experts, experts_of_ranks=sizes)
    (selection,) = selections.values()
    asked = [text(algorithm=name) for name in ("sequential", "shared")]
    with pytest.raises(
        ValueError, match="there is no algorithm 'ring'; choose auto or one of push"
    ):
        text(algorithm="ring")
    with pytest.raises(ValueError, match=r"gives rank . 0 experts|must be"):
        weft.explain(
            x, experts, operator="moe", **options | {"experts_of_ranks": [0] * world.ranks}
        )
    return first, during, text(), asked, selection.variant.algorithm


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 1, 1)], ids=str)
def test_a_layer_of_tokens_that_each_rank_has(hosts):
    """All ranks have as many rows here, so the text is on the class of their calls."""
    with weft.local_world(len(hosts), hosts=hosts, timeout=100) as local:
        texts = local.run(lambda: of_own_tokens(weft.init()))
    start = rf"moe, if all ranks have as many rows as this one, over {len(hosts)} ranks: rows are dispatched to "
    to_ranks, to_hosts = "each rank, all_to_all_matmul_all", "each host, all_gather_matmul_reduce"
    for first, during, after, (sequential, shared), algorithm in texts:
        assert re.match(f"{start}{to_ranks}.* by .*, at most .* rows per transfer: ", first)
        assert "one of the first calls, which measure the candidates" in during
        of = to_hosts if algorithm in ("shared", "gathered") else to_ranks
        assert re.match(f"{start}{of}\\w+ by {algorithm}.*: it was the fastest in the first", after)
        line, measured, *others = after.splitlines()
        assert line.endswith("b is experts")
        assert measured == "measured:"
        for way in (to_ranks, to_hosts):
            assert any(
                re.match(rf" +[\d.]+ ms  rows are dispatched to {way}", each) for each in others
            )
        assert re.match(f"{start}{to_ranks}.* by sequential, .*: as asked for", sequential)
        assert re.match(f"{start}{to_hosts}.* by shared, .*: as asked for", shared)
