"""Flat buffers of tensors of different types: what is done to a buffer is done to its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types.handlers.packing import FOREACH
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import P, R, S, SpmdTypeError, V, get_local_type
from neuronx_dist.spmd.tensor_type import Segments, note_of
from neuronx_dist.spmd.types import scaled


@pytest.fixture
def mode() -> Iterator[spmd.SpmdTypeMode]:
    with comm.as_rank(Mesh(2), 0, CheckBackend()), spmd.SpmdTypeMode() as mode, torch.no_grad():
        yield mode


def declared(kind: Any, *shape: int) -> Tensor:
    with torch._C.DisableTorchFunction():
        x = torch.ones(shape)
    return spmd.assert_type(x, {"dp": kind})


def packed(*kinds: Any) -> Tensor:
    return torch.cat([declared(kind, number) for number, kind in enumerate(kinds, 2)])


def parts(flat: Tensor, dim: int = 0) -> list[Any]:
    """The types of a buffer's parts, by splitting it."""
    segments = note_of(flat).extra  # type: ignore[union-attr]
    assert isinstance(segments, Segments) and segments.dim == dim
    pieces = flat.split([size for size, _, _ in segments.parts], dim)
    return [get_local_type(piece)["dp"] for piece in pieces]


KEPT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "itself": (lambda x: x, lambda kind: kind),
    "mul": (lambda x: x * 2, lambda kind: kind),
    "by a size": (lambda x: x * comm.size("dp"), lambda kind: scaled(kind, 1)),
    "in place by a size": (lambda x: x.div_(comm.size("dp")), lambda kind: scaled(kind, -1)),
    "double": (lambda x: x.double(), lambda kind: kind),
    "clone": (lambda x: x.clone(), lambda kind: kind),
    "neg": (lambda x: -x, lambda kind: kind),
    "view as itself": (lambda x: x.view(5), lambda kind: kind),
    "there and back": (lambda x: x.view(1, 5).reshape(-1), lambda kind: kind),
    "flatten": (lambda x: x.view(1, 5).flatten(), lambda kind: kind),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_keeps_the_parts(mode: spmd.SpmdTypeMode, what: str) -> None:
    function, change = KEPT[what]
    for kinds in ((S(0), R), (P, S(0)), (P, R), (V, P("avg"))):
        assert parts(function(packed(*kinds))) == [change(kind) for kind in kinds]


def test_a_buffer_as_one_row(mode: spmd.SpmdTypeMode) -> None:
    row = packed(S(0), R).view(1, 5)
    assert parts(row, 1) == [S(0), R]
    both = torch.cat([declared(S(0), 3, 2), declared(R, 3, 4)], dim=1)  # of 2 dims along the last
    assert parts(both, 1) == [S(0), R]


VERBS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Any, ...], tuple[Any, ...]]] = {
    "a sum": (lambda x: comm.all_reduce(x, "dp"), (P, P("avg")), (R, scaled(R, 1))),
    "a maximum": (lambda x: comm.all_reduce(x, "dp", op="max"), (V, R), (R, R)),
    "in place": (lambda x: comm.all_reduce(x, "dp", out=x), (P, P("avg")), (R, scaled(R, 1))),
}


@pytest.mark.parametrize("what", VERBS)
def test_collectives(mode: spmd.SpmdTypeMode, what: str) -> None:
    verb, before, after = VERBS[what]
    assert parts(verb(packed(*before))) == list(after)


def test_gathered_rows_are_split_along_their_last_dim(mode: spmd.SpmdTypeMode) -> None:
    gathered = comm.all_gather(packed(V, S(0)), "dp")
    rows = gathered.view(2, 5)
    assert parts(rows, 1) == [R, R]


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a sum over all of it": lambda x: x.sum(),
    "a part of a part": lambda x: x.split([1, 4]),
    "other sizes": lambda x: x.split([3, 2]),
    "another dim": lambda x: x.view(1, 5).split([1], 0),
    "equal pieces": lambda x: x.split(1),
    "another shape": lambda x: x.view(5, 1),
    "a buffer of buffers": lambda x: torch.cat([x, x]),
    "with what differs": lambda x: x * declared(V, 5),
    "added to what has a type": lambda x: declared(R, 5) + x,
    "in a list": lambda x: torch._foreach_mul([x], 2.0),
    "an index": lambda x: x[:2],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_keep_them_apart_is_refused(mode: spmd.SpmdTypeMode, what: str) -> None:
    with pytest.raises(SpmdTypeError):
        REFUSED[what](packed(S(0), R))


def test_what_is_no_buffer(mode: spmd.SpmdTypeMode) -> None:
    for x in (
        torch.cat([declared(R, 2), declared(R, 3)]),  # of one type
        torch.cat([declared(S(1), 2, 2), declared(S(1), 2, 2)]),  # sharded alike along another dim
    ):
        assert not isinstance(note_of(x).extra, Segments)  # type: ignore[union-attr]


def private_form(name: str) -> Any:
    return getattr(torch, f"_foreach_{name}")


def public_form(name: str) -> Any:
    """A function of `torch.foreach`, which torch 2.15 has."""
    return getattr(pytest.importorskip("torch.foreach"), name)


@pytest.mark.parametrize("form", [private_form, public_form])
def test_lists_are_judged_element_by_element(mode: spmd.SpmdTypeMode, form: Callable[[str], Any]) -> None:
    xs = [declared(S(0), 2), declared(R, 3)]
    assert [get_local_type(y)["dp"] for y in form("mul")(xs, 2.0)] == [S(0), R]
    assert [get_local_type(y)["dp"] for y in form("add")(xs, xs)] == [S(0), R]
    assert [get_local_type(y)["dp"] for y in form("norm")([xs[1]])] == [R]
    form("mul_")(xs, [1.0, 2.0])
    assert [get_local_type(x)["dp"] for x in xs] == [S(0), R]
    form("copy_")(xs, [declared(S(0), 2), declared(R, 3)])
    form("zero_")(xs)
    with pytest.raises(SpmdTypeError):
        form("sqrt")([declared(P, 2)])
    assert {form(name) for name in ("norm", "zero_", "copy_")} <= FOREACH.keys()
