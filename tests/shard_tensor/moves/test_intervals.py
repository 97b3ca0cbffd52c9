"""Runs, pieces and plans, against torch's own slices, rolls, flips and pads of a whole tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from neuronx_dist.shard_tensor.moves.intervals import (
    FILL,
    PADDING_MODES,
    ExchangePlan,
    Piece,
    Run,
    bounds_of,
    cut,
    divided,
    flipped,
    part,
    repartition,
    rolled,
    virtual_runs,
)
from neuronx_dist.shard_tensor.spec import chunk_sizes
from tests.shard_tensor.sharding import split_of

quick = settings(max_examples=60, deadline=None, derandomize=True)
sizes = st.integers(1, 12)
cuts = st.lists(st.floats(0, 1), min_size=0, max_size=3)


def positions(runs: Any) -> list[int]:
    return [FILL if start == FILL else start + i * step for start, step, length in runs for i in range(length)]


def of_pieces(pieces: Any, bounds: Any) -> list[int]:
    runs = [Run(FILL if p.owner == FILL else bounds[p.owner] + p.start, p.step, p.length) for p in pieces]
    return positions(runs)


@quick
@given(sizes, cuts, st.integers(-15, 15), st.integers(0, 20), st.sampled_from(PADDING_MODES))
def test_virtual_positions_are_those_of_torch_pad(n: int, places: Any, begin: int, length: int, mode: str) -> None:
    """And pieces are the runs again, each inside of its owner's shard."""
    end = begin + length
    left, right = max(0, -begin), max(0, end - n)
    x = torch.arange(float(n))[None]
    try:
        padded = F.pad(x, (left, right), mode="constant" if mode == "zeros" else mode, value=FILL)[0]
    except RuntimeError:
        return  # too much for torch; what is too much for a reflection is in the test of refusals
    expected = padded[begin + left : end + left].long().tolist() if end + left > 0 else []
    if end <= begin or (mode == "reflect" and n == 1 and (left or right)):
        expected = []
    if begin >= n + right or end <= -left:
        return
    runs = virtual_runs(begin, end, n, mode)
    assert positions(runs) == expected
    bounds = split_of(n, places)
    pieces = cut(runs, bounds)
    assert of_pieces(pieces, bounds) == expected
    for piece in pieces:
        if piece.owner != FILL:
            size = bounds[piece.owner + 1] - bounds[piece.owner]
            assert 0 <= piece.start < size and 0 <= piece.start + (piece.length - 1) * piece.step < size
    assert [piece.offset for piece in pieces] == list(bounds_of(piece.length for piece in pieces)[:-1])


@quick
@given(sizes, st.integers(-20, 20), cuts, cuts)
def test_moves_without_an_operator(n: int, shift: int, places: Any, other: Any) -> None:
    x, bounds, out = torch.arange(n), split_of(n, places), split_of(n, other)
    for runs, expected in ((rolled(n, shift), x.roll(shift)), (flipped(n), x.flip(0))):
        assert positions(runs) == expected.tolist()
        plan = divided(bounds, runs, out)
        assert [of_pieces(pieces, bounds) for pieces in plan.pieces] == [
            expected[a:b].tolist() for a, b in zip(out, out[1:])
        ]
    plan = repartition(bounds, out)
    assert plan is repartition(bounds, out)  # cached
    assert [of_pieces(pieces, bounds) for pieces in plan.pieces] == [list(range(a, b)) for a, b in zip(out, out[1:])]


@quick
@given(sizes, cuts, st.lists(st.tuples(st.integers(0, 11), st.integers(-3, 3), st.integers(0, 6)), max_size=4))
def test_what_one_sends_the_other_receives(n: int, places: Any, wanted: Any) -> None:
    bounds = split_of(n, places)
    runs = [Run(a, step, length) for a, step, length in wanted if 0 <= a < n and 0 <= a + step * (length - 1) < n]
    ranks = range(len(bounds) - 1)
    plan = ExchangePlan(bounds, [runs] * len(ranks))
    for a in ranks:
        for b in ranks:
            assert plan.of(a).sent[b] == plan.of(b).received[a] == sum(piece.rows for piece in plan.of(a).sends[b])
        assert plan.of(a).sent[a] == plan.of(a).received[a] == 0
        assert plan.rows(a) == max(sum(plan.of(a).sent), sum(plan.of(a).received))
        assert plan.of(a).length == sum(run.length for run in runs)
    assert plan.is_local == (not any(sum(plan.of(a).sent) for a in ranks))


def test_part_of_runs() -> None:
    runs = (Run(FILL, 0, 2), Run(3, -1, 3), Run(7, 0, 2))
    assert positions(part(runs, 1, 6)) == positions(runs)[1:6] == [FILL, 3, 2, 1, 7]
    assert part(runs, 2, 2) == ()


def test_empty_shards_own_nothing() -> None:
    assert cut([Run(0, 1, 4)], (0, 0, 3, 3, 4)) == [Piece(1, 0, 1, 3, 0), Piece(3, 0, 1, 1, 3)]


def test_a_run_has_one_piece_for_each_owner() -> None:
    assert cut([Run(7, -2, 4)], (0, 4, 8)) == [Piece(1, 3, -2, 2, 0), Piece(0, 3, -2, 2, 2)]
    assert cut([Run(0, 3, 3)], (0, 4, 8)) == [Piece(0, 0, 3, 2, 0), Piece(1, 2, 3, 1, 2)]


def test_repeated_positions_travel_once() -> None:
    plan = ExchangePlan((0, 2, 4), [[Run(3, 0, 5)], [Run(2, 1, 2)]])
    assert plan.of(1).sent == (1, 0) and plan.of(0).length == 5 and plan.rows(0) == 1


def test_bounds() -> None:
    assert bounds_of([2, 0, 3]) == (0, 2, 2, 5)
    for n in range(12):
        for count in (1, 2, 3, 5):
            chunks = [len(chunk) for chunk in torch.arange(n).chunk(count)] if n else []
            assert chunk_sizes(n, count) == tuple(chunks + [0] * (count - len(chunks)))


@pytest.mark.parametrize("begin, end", [(-4, 2), (2, 8)])
def test_a_reflection_past_the_dim_is_refused(begin: int, end: int) -> None:
    virtual_runs(-3, 7, 4, "reflect")
    with pytest.raises(
        ValueError, match="reflect' of a dim of 4: positions .* are beyond the reflections.*use less padding"
    ):
        virtual_runs(begin, end, 4, "reflect")


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="padding mode 'same': use one of zeros, reflect, replicate, circular"):
        virtual_runs(0, 1, 2, "same")
    for mode in ("reflect", "replicate", "circular"):
        with pytest.raises(ValueError, match=f"{mode}.*needs values to repeat, but the dim is empty"):
            virtual_runs(-1, 1, 0, mode)
    with pytest.raises(ValueError, match="shards with a total of 5 positions cannot hold a dim of 4"):
        repartition((0, 4), (0, 5))
    with pytest.raises(ValueError, match="position 4 is out of range: bounds .* cover 4 positions"):
        cut([Run(4, 1, 1)], (0, 4))
