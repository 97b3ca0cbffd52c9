"""The exchange of a plan: values, gradients of every order, bytes; every rank takes part, and none waits for ever."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuronx_dist import comm
from neuronx_dist.comm import CommError
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor.moves.exchange import exchange, planned_bytes, start, take
from neuronx_dist.shard_tensor.moves.intervals import FILL, ExchangePlan, Run, repartition, virtual_runs
from neuronx_dist.shard_tensor.windows.index_maps import Sliding, plan_windows
from tests.shard_tensor.sharding import SPLITS, assert_close, split_of
from tests.support.pool import processes

N = 16
F64 = torch.float64


def whole_result(x: torch.Tensor, runs: Any, dim: int, fill: float) -> torch.Tensor:
    """`x` at the positions of runs."""
    parts = []
    for begin, step, length in runs:
        if begin == FILL:
            parts.append(torch.full_like(x.narrow(dim, 0, 1), fill).repeat_interleave(length, dim))
        else:
            parts.append(x.index_select(dim, torch.tensor([begin + i * step for i in range(length)], dtype=torch.long)))
    return torch.cat([x.narrow(dim, 0, 0), *parts], dim)


def compare(plan: ExchangePlan, needs: Any, dim: int, fill: float) -> None:
    """One rank's part: value, gradient, gradient of the gradient, and what is recorded."""
    rank = comm.rank("tp")
    shape = [3, 2]
    shape.insert(dim, plan.bounds[-1])
    x = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    bounds, total = plan.bounds, x.clone().requires_grad_()
    results = [whole_result(total, runs, dim, fill) for runs in needs]
    weights = [
        torch.randn(y.shape, dtype=F64, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(results)
    ]
    cubes = sum((y**3 * w).sum() for y, w in zip(results, weights))
    (gradient,) = torch.autograd.grad(cubes, total, create_graph=True)  # type: ignore[arg-type]
    (second,) = torch.autograd.grad((gradient**2).sum(), total)
    own = slice(bounds[rank], bounds[rank + 1])
    mine = x[(slice(None),) * dim + (own,)].clone().requires_grad_()
    with comm.record() as calls:
        result = exchange(mine, plan, "tp", dim, fill)
    assert_close(result, results[rank].detach(), "value")
    begun = start(mine, plan, "tp", dim)
    assert_close(exchange(mine, plan, "tp", dim, fill, started=begun), result.detach(), "started before")
    loss = (result**3 * weights[rank]).sum()
    with comm.record() as back:
        (grad,) = torch.autograd.grad(loss, mine, create_graph=True)
    assert_close(grad, gradient.detach()[(slice(None),) * dim + (own,)], "gradient")
    (grad2,) = torch.autograd.grad((grad**2).sum(), mine)
    assert_close(grad2, second[(slice(None),) * dim + (own,)], "second")
    planned = [] if plan.is_local else [planned_bytes(mine, plan, rank, dim)]
    assert [call.bytes for call in calls] == [call.bytes for call in back] == planned
    assert {call.verb for call in (*calls, *back)} <= {"exchange"}


@st.composite
def needs_of_ranks(draw: st.DrawFn) -> Any:
    ranks = draw(st.integers(2, 4))
    n = draw(st.integers(1, 9))
    bounds = split_of(n, draw(st.lists(st.floats(0, 1), min_size=ranks - 1, max_size=ranks - 1)))
    run = st.tuples(st.integers(-1, n - 1), st.integers(-3, 3), st.integers(1, 5))
    needs = []
    for wanted in draw(st.lists(st.lists(run, max_size=3), min_size=ranks, max_size=ranks)):
        needs.append([Run(a, s, k) for a, s, k in wanted if a == FILL or 0 <= a + s * (k - 1) < n])
    return bounds, needs


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(needs_of_ranks(), st.integers(0, 2), st.sampled_from([0.0, -2.5]))
def test_any_plan(case: Any, dim: int, fill: float) -> None:
    bounds, needs = case
    ranks = len(needs)
    threads.run(Mesh(ranks, tp=ranks), compare, ExchangePlan(bounds, needs), needs, dim, fill, timeout=60.0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(needs_of_ranks())
def test_the_gradient_is_the_adjoint(case: Any) -> None:
    """<A x, y> = <x, A' y>, summed over all ranks."""
    bounds, needs = case
    ranks = len(needs)
    plan = ExchangePlan(bounds, needs)

    def products() -> tuple[float, float]:
        own = plan.of(comm.rank("tp"))
        x = torch.randn(own.size, 2, dtype=F64, requires_grad=True)
        y = torch.randn(own.length, 2, dtype=F64)
        result = exchange(x, plan, "tp", 0)
        (grad,) = torch.autograd.grad((result * y).sum(), x)
        return float((result.detach() * y).sum()), float((x.detach() * grad).sum())

    forward, backward = zip(*threads.run(Mesh(ranks, tp=ranks), products, timeout=60.0))
    assert abs(sum(forward) - sum(backward)) < 1e-10


@pytest.mark.parametrize("sizes", [sizes for of_ranks in SPLITS.values() for sizes in of_ranks])
def test_repartition_to_every_other_split(sizes: tuple[int, ...]) -> None:
    bounds = (0, *itertools.accumulate(sizes))
    for other in SPLITS[len(sizes)]:
        out = (0, *itertools.accumulate(other))
        needs = [[Run(a, 1, b - a)] for a, b in itertools.pairwise(out)]
        threads.run(Mesh(len(sizes), tp=len(sizes)), compare, repartition(bounds, out), needs, 1, 0.0)


def halo_on_processes() -> None:
    windows = Sliding(N, 3, 1, 1, 1)
    plan = plan_windows(windows, (0, 11, N)).plan
    needs = [virtual_runs(low, high, N) for low, high in plan_windows(windows, (0, 11, N)).windows]
    compare(plan, needs, 1, 0.0)


def test_a_halo_on_processes() -> None:
    processes(2).run(halo_on_processes, mesh=dict(tp=2))


def test_a_convolution_moves_two_halos() -> None:
    """The reference's example: (1, 8, 1024, 1024), kernel 3, 8 ranks: an inner rank sends 65.5 KB."""
    plan = plan_windows(Sliding(1024, 3, 1, 1, 1), tuple(range(0, 1025, 128))).plan
    shard = torch.empty(1, 8, 128, 1024, device="meta")
    assert [planned_bytes(shard, plan, rank, 2) for rank in (0, 3, 7)] == [32768, 65536, 32768]


def test_equal_layouts_cost_nothing() -> None:
    def rank_main() -> None:
        x = torch.randn(8, requires_grad=True)
        with comm.record() as calls:
            assert exchange(x, repartition((0, 8, 16), (0, 8, 16)), "tp", 0) is x
        assert not calls

    threads.run(Mesh(2, tp=2), rank_main)


def test_take_is_local() -> None:
    x = torch.arange(4.0).requires_grad_()
    result = take(x, ExchangePlan((0, 4), [[Run(FILL, 0, 1), Run(3, -1, 2), Run(0, 0, 2)]]), 0, 9)
    assert result.tolist() == [9, 3, 2, 0, 0]
    (grad,) = torch.autograd.grad((result * torch.arange(5.0)).sum(), x)
    assert grad.tolist() == [7, 0, 2, 1]
    assert take(x, ExchangePlan((0, 4), [[Run(0, 1, 4)]]), 0) is x


def test_a_shard_that_does_not_fit_is_refused_on_all_ranks() -> None:
    def rank_main() -> None:
        with pytest.raises(
            ValueError, match=r"a shard of shape \(3, 2\) does not match the plan, which has 8 positions"
        ):
            exchange(torch.zeros(3, 2), repartition((0, 8, 16), (0, 7, 16)), "tp", 0)

    threads.run(Mesh(2, tp=2), rank_main, timeout=60.0)


def test_a_rank_that_stays_away_is_an_error() -> None:
    def rank_main() -> None:
        if comm.rank("tp"):
            exchange(torch.zeros(8), repartition((0, 8, 16), (0, 7, 16)), "tp", 0)

    with pytest.raises(CommError, match="rank 0 has ended\n  rank 1 waits in exchange of 2 tensors"):
        threads.run(Mesh(2, tp=2), rank_main)
