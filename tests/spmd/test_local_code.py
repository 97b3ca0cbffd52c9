"""`local_map` and what it asks of the checker: declarations, their number, and which ones a result may have."""

from __future__ import annotations

import itertools

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from neuronx_dist.spmd.types import PARTIAL_AVG, Shard, scaled

MESH = Mesh(4, tp=2)  # dp 2 x tp 2
MAY_BE = {"V": "VSP", "S": "SV", "R": "RV", "I": "I", "P": "P"}
KINDS = {"R": R, "I": I, "V": V, "P": P, "S": S(0)}


def typed(kind, *shape: int) -> torch.Tensor:
    with spmd.no_typecheck():
        return spmd.assert_type(torch.ones(shape or (2, 4)), {"tp": kind})


@pytest.mark.parametrize("known, declared", [*itertools.product(KINDS, KINDS)])
def test_what_a_result_may_be_declared_as(known: str, declared: str) -> None:
    @spmd.local_map(out_types={"tp": KINDS[declared]})
    def same(x):
        return x + 0

    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode() as mode:
        x = typed(KINDS[known])
        inside = "V" if known == "S" else known  # a shard merely varies there
        if declared in MAY_BE[inside]:
            assert spmd.get_local_type(same(x)) == {"tp": KINDS[declared]}
            assert [text for text, _ in mode.trusted] == [f"local_map: same computes {{'tp': {KINDS[declared]}}}"]
            return
        with pytest.raises(SpmdTypeError) as error:
            same(x)
    assert str(error.value) == (
        f"local_map of same: its result [2, 4]: it is {inside} on tp, and cannot be declared {KINDS[declared]}\n"
        f"  repair: out_types={{'tp': {inside}}}\n"
        f"      or: an operator behind it that makes {KINDS[declared]} of it"
    )
    assert (error.value.axis, error.value.rule) == ("tp", "local_map") and not mode.trusted


@pytest.mark.parametrize(
    "known, declared, fits",
    [
        (scaled(R, 1), R, False),
        (scaled(R, 1), scaled(R, 1), True),
        (scaled(V, 1), P, False),
        (scaled(V, 1), PARTIAL_AVG, True),
        (scaled(V, -1), P, True),
        (V, PARTIAL_AVG, True),
        (V, Shard(0, scale=1), True),
        (P, PARTIAL_AVG, False),
    ],
    ids=str,
)
def test_the_scale_of_what_is_known_is_kept(known, declared, fits) -> None:
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        x, same = typed(known), spmd.local_map(lambda x: x + 0, out_types={"tp": declared})
        if fits:
            same(x)
        else:
            with pytest.raises(SpmdTypeError, match="cannot be declared"):
                same(x)


def test_declarations_for_each_and_for_all() -> None:
    def both(x, y, z=None):
        return [x + 1, (y + 1, 3, "a")]

    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode() as mode:
        x, y = typed(R), typed(V, 3)
        one, (other, *rest) = spmd.local_map(both, out_types={"tp": V}, in_types=[{"tp": R}, None])(x, y)
        assert spmd.get_local_type(one) == {"tp": V} == spmd.get_local_type(other) and rest == [3, "a"]
        function = spmd.local_map(both, out_types=[{"tp": R}, {"tp": S(0)}])
        one, (other, *_) = function(x, y, z=x)
        assert (spmd.get_local_type(one), spmd.get_local_type(other)) == ({"tp": R}, {"tp": S(0)})
        assert [text for text, _ in mode.trusted] == [
            "local_map: both computes {'tp': V}", "local_map: both computes {'tp': R}, {'tp': S(0)}",
        ]  # fmt: skip
        words = "local_map of both: 1 declarations for 2 tensors in the result: [{'tp': R}]"
        with pytest.raises(ValueError) as error:
            spmd.local_map(both, out_types=[{"tp": R}])(x, y)
        assert str(error.value) == words
        with pytest.raises(ValueError, match="1 declarations for 2 positional arguments"):
            spmd.local_map(both, out_types={"tp": V}, in_types=[None])(x, y)
        with pytest.raises(SpmdTypeError, match="it is V on tp, not R"):
            spmd.local_map(both, out_types={"tp": V}, in_types={"tp": R})(x, y)
        everywhere = spmd.local_map(lambda x: x + 0, out_types=R)(spmd.assert_type(torch.ones(2), R))
        assert spmd.get_local_type(everywhere) == {"dp": R, "tp": R}


def test_a_result_that_is_an_argument_is_a_new_tensor_with_a_type_of_its_own() -> None:
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        x, y = typed(R), typed(R)
        given = spmd.local_map(lambda x, y: (x, [y], x + 1), out_types={"tp": V})
        first, (second,), third = given(x, y=y)
        assert first is not x and second is not y and first.data_ptr() == x.data_ptr()
        assert [spmd.get_local_type(function) for function in (first, second, third)] == [{"tp": V}] * 3
        assert spmd.get_local_type(x) == {"tp": R} == spmd.get_local_type(y)


def test_without_a_check_it_is_the_function_itself() -> None:
    @spmd.local_map(out_types=[{"tp": V}] * 7)
    def named(x):
        "Words."
        return x

    x = torch.ones(2)
    assert named(x) is x and (named.__name__, named.__doc__) == ("named", "Words.")

    class Callable:
        def __call__(self, x):
            return x + 0

    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode() as mode:
        spmd.local_map(Callable(), out_types={"tp": V})(typed(V))
        assert [text for text, _ in mode.trusted] == ["local_map: Callable computes {'tp': V}"]


# --- whether a checker is at work


def test_a_checker_is_at_work_inside_of_it_and_not_where_it_is_paused() -> None:
    from neuronx_dist.spmd.watching import active

    assert active() is None
    with spmd.no_typecheck():
        assert active() is None
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode() as outer:
        assert active() is outer
        with spmd.SpmdTypeMode() as inner:
            assert active() is inner
        assert active() is outer
        with spmd.no_typecheck():
            assert active() is None
            x = torch.ones(2) + 1
        assert active() is outer and not spmd.has_local_type(x)
    assert active() is None
