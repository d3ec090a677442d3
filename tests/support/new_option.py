"""A program that uses an option of `matmul_all_reduce` that only a copy of weft has."""

from __future__ import annotations

import json

import torch

import weft


def compute():
    world = weft.init(timeout=20)
    a, b = torch.ones(1, 2), torch.ones(2, 1)
    double = torch.compile(
        lambda a, b: weft.matmul_all_reduce(a, b, negated=True), fullgraph=True, backend="eager"
    )
    recorded = weft.matmul_all_reduce(a, b.requires_grad_(), negated=True)
    b = b.detach()
    sums = [
        weft.matmul_all_reduce(a, b, negated=True),
        weft.matmul_all_reduce(a, b),
        recorded,
        double(a, b),
    ]
    explained = weft.explain(a, b, operator="matmul_all_reduce", negated=True, world=world)
    return [each.item() for each in sums], explained


def print_findings():
    with weft.local_world(2) as local:
        found = local.run(compute)
    print(json.dumps({"sums": [sums for sums, _ in found], "explained": found[0][1]}))
