"""Every row of the table on an axis of one rank, every pair that there is not in full, and what a mode is handed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from neuronx_dist.spmd.collectives import operator_dims
from neuronx_dist.spmd.rows import ROWS
from tests.support.reviewed import assert_reviewed

X = torch.arange(6.0).view(2, 3)
KINDS = {"R": R, "I": I, "V": V, "P": P, "S": S(1)}
AVERAGE = P("avg")


def refusal(operator: str, src: Any, dst: Any, x: torch.Tensor = X) -> str:
    try:
        with comm.as_rank(Mesh(2, tp=2), 0):
            result = getattr(spmd, operator)(x, "tp", src=src, dst=dst)
    except SpmdTypeError as error:
        return str(error)
    return f"{'x itself' if result is x else list(result.shape)}"


def test_every_pair_in_full() -> None:
    operators = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert", "reinterpret", "redistribute")
    texts = dict.fromkeys(operators, "")
    for operator, src, dst in itertools.product(operators, KINDS.values(), (*KINDS.values(), S(0))):
        text = refusal(operator, src, dst, torch.ones(2, 4))
        if " does not exist: " in text:  # but for what it takes, which is said once
            first, _, takes = text.partition(f". {operator} takes ")
            text = first if takes in texts[operator] else text
        texts[operator] += f"{src} -> {dst}: {text}\n"
    of_reductions = itertools.product(operators, (P, AVERAGE, P("max")), (R, P, AVERAGE, P("max")))
    texts["reductions"] = "\n".join(
        f"{operator}, {src} -> {dst}: {refusal(operator, src, dst).partition('. ')[0]}"
        for operator, src, dst in of_reductions
        if (src, dst) != (P, R)
    )
    texts["other uses"] = "\n".join(
        [
            refusal("all_reduce", AVERAGE, R, torch.ones(2, dtype=torch.int64)),
            refusal("all_reduce", "P", R),
            refusal("convert", None, R),
            refusal("convert", R, S(5)),
            refusal("redistribute", "x", R),
        ]
    )
    assert_reviewed(Path(__file__).with_name("expected_pairs.txt"), texts)


@pytest.mark.parametrize("key", ROWS, ids=" ".join)
def test_on_an_axis_of_one_rank_only_the_dim_of_a_stack_comes_and_goes(key: tuple[str, str, str]) -> None:
    """The values are those of one rank of a group of one: what the kernel of the row gives there."""
    operation, src, dst = key
    operator, more = getattr(spmd, operation), {"expert_mode": True} if operation in ("convert", "reinterpret") else {}
    stacks, unbinds = src == "V" and dst != "V", dst == "V" and src != "V"
    for x in (X, torch.ones(1, 3)):
        with comm.as_rank(Mesh(1), 0):
            if unbinds and operation != "reinterpret" and x.shape[0] != 1:
                continue
            result = operator(x, "tp", src=KINDS[src], dst=KINDS[dst], **more)
        if operation in ("all_reduce", "reinterpret"):
            assert result is x
        elif stacks and operation in ("all_gather", "convert"):
            assert torch.equal(result, x.unsqueeze(0))
        elif unbinds or (operation == "reduce_scatter" and dst == "V"):
            assert torch.equal(result, x.squeeze(0))
        else:
            assert result is x


def test_on_an_axis_of_one_rank_a_stack_may_lie_along_another_dim() -> None:
    with comm.as_rank(Mesh(1), 0):
        assert spmd.all_gather(X, "tp", dst=R, gather_dim=2).shape == (2, 3, 1)
        assert spmd.reduce_scatter(X[:, :1], "tp", scatter_dim=1).shape == (2,)
        assert spmd.all_gather(X, "tp", src=S(1), dst=R) is X and spmd.reduce_scatter(X, "tp", dst=S(1)) is X
        assert spmd.all_reduce(X, "tp", src=AVERAGE, dst=R) is X


USES = {
    "gather V": (spmd.all_gather, V, R, None, (0, 0)),
    "gather V last": (spmd.all_gather, V, R, -1, (2, 2)),
    "gather V first": (spmd.all_gather, V, R, -3, (0, 0)),
    "gather S": (spmd.all_gather, S(-1), R, None, (1, 0)),
    "gather S twice said": (spmd.all_gather, S(-1), R, 1, (1, 1)),
    "scatter V": (spmd.reduce_scatter, P, V, None, (0, 0)),
    "scatter V last": (spmd.reduce_scatter, P, V, -1, (1, 1)),
    "scatter S": (spmd.reduce_scatter, P, S(-2), None, (0, 0)),
    "exchange": (spmd.all_to_all, S(-1), S(0), None, (1, 0)),
}


@pytest.mark.parametrize("name", USES)
def test_dims_are_counted_from_the_front(name: str) -> None:
    function, src, dst, stack_dim, dims = USES[name]
    assert operator_dims(function, X, src, dst, stack_dim) == dims


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs))
        return args[0]


F64 = torch.float64
HANDED = [
    (spmd.all_reduce, dict(dst=R), dict(src=P, dst=R)),
    (spmd.all_reduce, dict(dst=R, reduce_dtype=F64, inplace=True), dict(src=P, dst=R, reduce_dtype=F64, inplace=True)),
    (spmd.all_gather, dict(dst=I), dict(src=V, dst=I)),
    (spmd.all_gather, dict(src=S(0), dst=I, gather_dim=0), dict(src=S(0), dst=I, gather_dim=0)),
    (spmd.all_gather, dict(dst=I, reduce_dtype=F64), dict(src=V, dst=I, reduce_dtype=F64)),
    (spmd.reduce_scatter, {}, dict(src=P, dst=V)),
    (spmd.reduce_scatter, dict(scatter_dim=1, reduce_dtype=F64), dict(src=P, dst=V, scatter_dim=1, reduce_dtype=F64)),
    (spmd.all_to_all, {}, dict(src=V, dst=V)),
    (spmd.convert, dict(src=I, dst=R), dict(src=I, dst=R, expert_mode=False)),
    (spmd.convert, dict(src=R, dst=P, expert_mode=True), dict(src=R, dst=P, expert_mode=True)),
    (spmd.reinterpret, dict(src=V, dst=P), dict(src=V, dst=P, expert_mode=False)),
    (
        spmd.reinterpret,
        dict(src=R, dst=P, expert_mode=True, reduce_dtype=F64),
        dict(src=R, dst=P, expert_mode=True, reduce_dtype=F64),
    ),
]


@pytest.mark.parametrize("operator, given, handed", HANDED)
def test_a_mode_is_handed_the_operator_with_what_is_no_default(operator: Any, given: Any, handed: Any) -> None:
    with Calls() as mode:
        operator(X, "tp", **given)
    ((function, args, keywords),) = mode.calls
    assert function is operator and args[0] is X and args[1:] == ("tp",) and keywords == handed


def test_what_changes_nothing_is_no_call() -> None:
    with Calls() as mode:
        for src, dst in ((R, R), (V, S(0)), (S(1), V), (S(1), S(1)), (P, P)):
            assert spmd.convert(X, "tp", src=src, dst=dst) is X
        for kind in KINDS.values():
            assert spmd.reinterpret(X, "tp", src=kind, dst=kind) is X is spmd.redistribute(X, "tp", src=kind, dst=kind)
        assert spmd.redistribute(X, "tp", src=V, dst=S(1)) is X
    assert mode.calls == []


REDISTRIBUTED = {
    ("P", "R"): "all_reduce", ("P", "I"): "all_reduce", ("P", "V"): "reduce_scatter", ("P", "S"): "reduce_scatter",
    ("V", "R"): "all_gather", ("V", "I"): "all_gather", ("S", "R"): "all_gather", ("S", "I"): "all_gather",
    ("R", "I"): "convert", ("R", "V"): "convert", ("R", "S"): "convert", ("R", "P"): "convert", ("I", "R"): "convert",
    ("I", "P"): "convert", ("I", "S"): "convert", ("I", "V"): "convert", ("V", "P"): "convert", ("S", "P"): "convert",
}  # fmt: skip


@pytest.mark.parametrize("src, dst", REDISTRIBUTED)
def test_the_operator_that_keeps_the_value(src: str, dst: str) -> None:
    with Calls() as mode:
        spmd.redistribute(X, "tp", src=KINDS[src], dst=KINDS[dst])
        spmd.redistribute(X, "tp", src=S(0), dst=S(1))
    (one, _, keywords), (other, *_) = mode.calls
    assert one.__name__ == REDISTRIBUTED[src, dst] and other is spmd.all_to_all
    assert keywords == dict(src=KINDS[src], dst=KINDS[dst]) | ({"expert_mode": True} if one is spmd.convert else {})


def test_what_a_result_is_unbound_from() -> None:
    words = (
        "a V result is unbound from dim 0, which must have the size of axis tp (2); got shape {}. To split a longer "
        "dim use S(0)"
    )
    with comm.as_rank(Mesh(2, tp=2), 0):
        for x in (torch.ones(4, 2), torch.ones(())):
            for call in (
                lambda x=x: spmd.reduce_scatter(x, "tp"),
                lambda x=x: spmd.all_to_all(x, "tp"),
                lambda x=x: spmd.convert(x, "tp", src=R, dst=V),
            ):
                with pytest.raises(ValueError) as error:
                    call()
                assert str(error.value) == words.format(tuple(x.shape))
        with pytest.raises(ValueError) as error:
            spmd.convert(torch.ones(3), "tp", src=R, dst=S(0))
    assert str(error.value) == (
        "convert over tp: unable to create 2 partitions along dim 0 of shape (3,): 3 is not divisible by 2"
    )
