"""Options of the operators: dtypes of each direction, unequal pieces; values, gradients, collectives and verdicts."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from tests.support.pool import processes

TP2, TP3 = Mesh(2, tp=2), Mesh(3, tp=3)
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SIZES = [3, 0, 2]  # of three ranks' pieces
ROUTES = [[1, 0, 2], [0, 2, 1], [1, 1, 0]]  # rows that rank i sends to rank j


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def piece(x: torch.Tensor, sizes: list[int], dim: int) -> torch.Tensor:
    return x.split(sizes, dim)[comm.rank("tp")].clone().requires_grad_()


# --- unequal pieces against one process


def check_gathered_pieces(dim, dst):
    def rank():
        x = piece(whole(5, 5), SIZES, dim)
        with comm.record() as calls:
            y = spmd.all_gather(x, "tp", src=S(dim), dst=dst, split_sizes=SIZES)
            y.backward(whole(5, 5, seed=1 + (comm.rank("tp") if dst is R else 0)))
        return y.detach(), x.grad, [call.verb for call in calls]

    upstream = sum(whole(5, 5, seed=1 + r) for r in range(3)) if dst is R else whole(5, 5, seed=1)
    for index, (y, grad, verbs) in enumerate(threads.run(TP3, rank, timeout=20.0)):
        assert torch.equal(y, whole(5, 5))
        assert torch.allclose(grad, upstream.split(SIZES, dim)[index], rtol=1e-12)
        assert verbs == (["all_gather", "reduce_scatter"] if dst is R else ["all_gather"])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dst", [R, I], ids=str)
def test_unequal_pieces_are_gathered(dim, dst):
    check_gathered_pieces(dim, dst)


@pytest.mark.parametrize("dim", [0, 1])
def test_unequal_pieces_of_a_sum(dim):
    def rank():
        x = whole(5, 5, seed=comm.rank("tp")).requires_grad_()
        with comm.record() as calls:
            y = spmd.reduce_scatter(x, "tp", dst=S(dim), split_sizes=SIZES)
            y.backward(whole(5, 5, seed=9).split(SIZES, dim)[comm.rank("tp")])
        return y.detach(), x.grad, [call.verb for call in calls]

    total = sum(whole(5, 5, seed=r) for r in range(3))
    for index, (y, grad, verbs) in enumerate(threads.run(TP3, rank)):
        assert torch.allclose(y, total.split(SIZES, dim)[index], rtol=1e-12)
        assert torch.equal(grad, whole(5, 5, seed=9))
        assert verbs == ["reduce_scatter", "all_gather"]


def routed():
    """Rows of three ranks are sent by `ROUTES`; returns rows, gradient and collectives."""
    me = comm.rank("tp")
    sent, received = ROUTES[me], [row[me] for row in ROUTES]
    x = whole(sum(sent), 4, seed=me).requires_grad_()
    with comm.record() as calls:
        y = spmd.all_to_all(x, "tp", src=S(0), dst=S(0), input_split_sizes=sent, output_split_sizes=received)
        (y * whole(sum(received), 4, seed=10 + me)).sum().backward()
    return y.detach(), x.grad, [call.verb for call in calls]


def check_routed(results):
    rows = [whole(sum(ROUTES[r]), 4, seed=r).split(ROUTES[r]) for r in range(3)]
    grads = [whole(sum(row[r] for row in ROUTES), 4, seed=10 + r).split([row[r] for row in ROUTES]) for r in range(3)]
    for me, (y, grad, verbs) in enumerate(results):
        assert torch.equal(y, torch.cat([rows[source][me] for source in range(3)]))
        assert torch.equal(grad, torch.cat([grads[target][me] for target in range(3)]))
        assert verbs == ["exchange", "exchange"]


def test_rows_are_routed():
    check_routed(threads.run(TP3, routed, timeout=20.0))


@pytest.mark.process
@pytest.mark.slow
def test_rows_are_routed_between_processes():
    check_routed(processes(3).run(routed, mesh=dict(tp=3)))


def test_second_derivatives_go_the_same_way():
    def rank():
        x = piece(whole(5, 2), SIZES, 0)
        y = spmd.all_gather(x, "tp", src=S(0), dst=R, split_sizes=SIZES)
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        grad.sum().backward()
        return x.grad

    for index, grad in enumerate(threads.run(TP3, rank)):  # three ranks' loss each, and d(sum of 3 * 3x^2)
        assert torch.allclose(grad, 18 * whole(5, 2).split(SIZES)[index], rtol=1e-12)


# --- dtypes


def test_a_sum_is_in_the_op_dtype_and_travels_in_it():
    """1 + 2^-9 twice: its sum needs more than bf16 has, before the result is rounded."""

    def rank():
        x = torch.tensor([1.0 if comm.rank("tp") else 2.0**-8 + 2.0**-9], dtype=F32)
        with comm.record() as calls:
            sums = [
                spmd.all_reduce(x, "tp", dst=R),
                spmd.all_reduce(x, "tp", dst=R, op_dtype=BF16),
                spmd.all_reduce(x, "tp", dst=R, op_dtype=BF16, out_dtype=F32),
                spmd.all_reduce(x.to(BF16), "tp", dst=R, op_dtype=F32, out_dtype=BF16),
                spmd.reduce_scatter(torch.stack([x, x]), "tp", dst=V, out_dtype=F64),
                spmd.all_gather(x, "tp", src=V, dst=R, out_dtype=BF16),
                spmd.all_gather(x, "tp", src=V, dst=R, out_dtype=F64),
            ]
        return [y.dtype for y in sums], [call.dtype for call in calls], sums[0].item(), sums[2].item()

    (dtypes, wires, exact, rounded), _ = threads.run(TP2, rank)
    assert dtypes == [F32, BF16, F32, BF16, F64, BF16, F64]
    assert wires == [F32, BF16, BF16, F32, F32, BF16, F32]  # the smaller dtype travels, but sums keep theirs
    assert exact == 1 + 2**-8 + 2**-9 and rounded != exact


@pytest.mark.parametrize("operator", ["all_gather", "all_reduce", "convert"])
def test_the_backward_has_dtypes_of_its_own(operator):
    """FSDP's pattern: bf16 forward, the gradient summed in fp32."""
    types = {"all_gather": dict(src=S(0), dst=R), "all_reduce": dict(dst=R), "convert": dict(src=I, dst=R)}[operator]

    def rank():
        x = torch.ones(2, dtype=F32, requires_grad=True)
        with comm.record() as calls:
            y = getattr(spmd, operator)(x, "tp", **types, op_dtype=BF16, backward_options={"op_dtype": F32})
            y.sum().backward()
        return y.dtype, x.grad.dtype, [call.dtype for call in calls]

    (result, grad, wires), _ = threads.run(TP2, rank)
    assert (result, grad) == (BF16, F32)
    assert wires[-1] == F32 and (operator == "convert" or wires[0] == BF16)


def test_values_in_fp64_are_those_without_options():
    def rank():
        x = whole(4, 4, seed=comm.rank("tp")).requires_grad_()
        results = []
        for options in ({}, dict(op_dtype=F64, async_op=True, backward_options={"op_dtype": F64, "async_op": True})):
            x.grad = None
            y = spmd.redistribute(x, "tp", src=P, dst=S(1), **options)
            y = spmd.redistribute(y, "tp", src=S(1), dst=S(0), **options)
            y = spmd.redistribute(y, "tp", src=S(0), dst=R, **options)
            y.square().sum().backward()
            results.append((y.detach(), x.grad))
        return results

    for plain, with_options in threads.run(TP2, rank):
        assert all(torch.equal(a, b) for a, b in zip(plain, with_options))


def test_an_axis_of_one_rank_casts_and_does_not_communicate():
    with comm.as_rank(Mesh(1), 0), comm.record() as calls:
        x = torch.ones(3, requires_grad=True)
        assert spmd.all_reduce(x, "tp", dst=R, op_dtype=F64, out_dtype=BF16).dtype == BF16
        assert spmd.convert(x, "tp", src=R, dst=R, out_dtype=BF16).dtype == BF16
    assert calls == []


# --- all_to_all of stacked values


@pytest.mark.parametrize("split, concat", [(0, 1), (1, 0), (1, 2)])
def test_stacked_values_change_places_with_any_dim(split, concat):
    def rank():
        shape = [4, 5, 6]
        shape[split] = 2
        x = whole(*shape, seed=comm.rank("tp")).requires_grad_()
        y = spmd.all_to_all(x, "tp", src=V, dst=V, split_dim=split, concat_dim=concat)
        y.backward(y.detach())
        return x.detach(), y.detach(), x.grad

    ranks = threads.run(TP2, rank)
    for me, (x, y, grad) in enumerate(ranks):
        assert torch.equal(y, torch.stack([other.select(split, me) for other, _, _ in ranks], concat))
        assert torch.equal(grad, x), "the transpose of the transpose"


# --- what is refused


def test_what_does_not_fit_is_refused():
    with comm.as_rank(TP2, 0):
        x = torch.ones(4, 4)
        for call, words in {
            lambda: spmd.all_reduce(x, "tp", dst=R, split_sizes=[1, 3]): "takes no split_sizes",
            lambda: spmd.all_reduce(x, "tp", dst=R, backward_options={"dtype": F32}): "no dtype in backward_options",
            lambda: spmd.all_gather(x, "tp", dst=R, split_sizes=[1, 3]): "only pieces of a dim have sizes",
            lambda: spmd.all_gather(x, "tp", src=S(0), dst=R, split_sizes=[1, 3]): "x has 4 positions",
            lambda: spmd.all_gather(x, "tp", src=S(0), dst=R, split_sizes=[4]): "1 sizes [4] for 2 ranks",
            lambda: spmd.reduce_scatter(x, "tp", dst=S(0), split_sizes=[1, 2]): "has 3",
            lambda: spmd.all_to_all(x, "tp", input_split_sizes=[1, 3]): "passed together",
            lambda: spmd.all_to_all(x, "tp", input_split_sizes=[1, 1], output_split_sizes=[1, 1]): "x has 4",
            lambda: spmd.all_to_all(x, "tp", src=S(0), dst=S(1), split_dim=0): "split_dim is 1",
        }.items():
            with pytest.raises((SpmdTypeError, TypeError)) as error:
                call()
            assert words in str(error.value), error.value


# --- verdicts


def test_the_checker_follows_options():
    with comm.as_rank(Mesh(4, tp=2), 0), spmd.SpmdTypeMode():
        shard = spmd.assert_type(torch.randn(3, 4), {"dp": S(0), "tp": S(1)})
        gathered = spmd.all_gather(shard, "tp", src=S(1), dst=R, split_sizes=[4, 4], op_dtype=BF16)
        assert spmd.get_axis_local_type(gathered, "tp") is R and spmd.get_axis_local_type(gathered, "dp") == S(0)
        with pytest.raises(SpmdTypeError, match="gathered is R, the same on all ranks, not P"):
            spmd.all_reduce(gathered, "tp", dst=R, op_dtype=F32)
        rows = spmd.all_to_all(shard, "tp", src=S(0), dst=S(0), input_split_sizes=[1, 2], output_split_sizes=[1, 3])
        assert spmd.get_axis_local_type(rows, "tp") is V, "rows that were routed are no shard"
        assert spmd.get_axis_local_type(rows, "dp") is V
        with pytest.raises(SpmdTypeError, match="gathered is R"):
            spmd.all_to_all(gathered, "tp", input_split_sizes=[1, 2], output_split_sizes=[1, 3])
