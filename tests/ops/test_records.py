"""The options of an operator stand in its record and in its own file, and nowhere else."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from support.copied_weft import programs

import weft
from weft.ops import operator
from weft.schedules.operators import OPERATORS

OPERANDS = {"a", "b", "bias", "out", "scale_a", "scale_b", "world", "timeout"}
NAMED = {"return_gathered": "keep"}
OF_CALLERS_OF_TORCH = {"keep", "own_bias"}
"""Options of the operators of torch, for gradients and compiled graphs."""


@pytest.mark.parametrize("name", OPERATORS)
def test_a_record_has_the_options_of_the_public_function(name):
    public = inspect.signature(operator.function(name)).parameters
    options = {NAMED.get(each, each) for each in public} - OPERANDS - {"return_split_sizes"}
    record = operator.find(name).options
    assert options <= {*record._fields}
    assert {*record._fields} - options <= OF_CALLERS_OF_TORCH
    for each in options & public.keys():
        assert public[each].default == record._field_defaults[each]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operator_of_torch_has_the_options_of_the_record(name):
    if operator.find(name).fake is None:
        return
    arguments = getattr(torch.ops.weft, name).default._schema.arguments
    options = operator.find(name).options._fields
    assert [each.name for each in arguments] == [
        *("a", "weights", "biases"),
        *options,
        *("timeout", "world"),
    ]


def replaced(path, *changes):
    text = (Path(weft.__file__).parents[1] / path).read_text()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return {path: text}


def with_a_new_option():
    """weft with `negated` of `matmul_all_reduce`: the sum of -a @ b."""
    last = "    chunk_rows: int | None = None\n    own_bias: bool = False\n"
    record = replaced(
        "weft/ops/records.py", (last, f"{last}    negated: bool = False\n\n# of another\n")
    )
    return record | replaced(
        "weft/ops/matmul_all_reduce.py",
        ('    op: str = "sum",\n', '    op: str = "sum",\n    negated: bool = False,\n'),
        ("chunk_rows, False\n", "chunk_rows, False, negated\n"),
        (
            "    a, (b,), (bias,), (out,) = operands\n",
            "    a, (b,), (bias,), (out,) = operands\n"
            "    a = -a if options.negated else a\n"
            "    operands = operands._replace(a=a)\n",
        ),
    )


@pytest.mark.slow
def test_a_new_option_is_two_files(tmp_path):
    """It is called, recorded, compiled and explained."""
    files = with_a_new_option()
    assert [*files] == ["weft/ops/records.py", "weft/ops/matmul_all_reduce.py"]
    found = programs(tmp_path, files)("new_option", "print_findings")
    assert found["sums"] == [[-4.0, 4.0, -4.0, -4.0]] * 2
    assert found["explained"].startswith("matmul_all_reduce over 2 ranks: ")
