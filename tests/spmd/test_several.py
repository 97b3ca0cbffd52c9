"""`spmd.together` on threads: values, gradients and types of each operator, and one collective in each direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from neuronx_dist import Mesh, comm, spmd
from neuronx_dist.comm import threads
from neuronx_dist.spmd import I, P, R, S, V
from neuronx_dist.spmd.errors import SpmdTypeError

SHAPES = [(4, 6), (8,), (2, 4, 12), ()]
CASES = [
    (spmd.all_reduce, P, R, SHAPES, "all_reduce", "all_reduce"),
    (spmd.all_reduce, P, I, SHAPES, "all_reduce", ""),
    (spmd.convert, I, R, SHAPES, "", "all_reduce"),
    (spmd.all_gather, S(0), R, SHAPES[:3], "all_gather", "reduce_scatter"),
    (spmd.all_gather, (S(1), S(0), S(2)), R, SHAPES[:3], "all_gather", "reduce_scatter"),
    (spmd.all_gather, (S(1), S(0), S(-1)), I, SHAPES[:3], "all_gather", ""),
    (spmd.reduce_scatter, P, (S(0), S(0), S(2)), SHAPES[:3], "reduce_scatter", "all_gather"),
    (spmd.convert, I, (S(0), S(0), S(1)), SHAPES[:3], "", "all_gather"),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("operator", "src", "dst", "shapes", "forward", "backward"), CASES)
def test_several_tensors_are_one_collective_with_the_results_of_one_by_one(
    operator: Any, src: Any, dst: Any, shapes: Any, forward: str, backward: str, size: int
) -> None:
    def run(together: bool) -> tuple[list[Tensor], list[Any], list[Any]]:
        torch.manual_seed(int(comm.rank("tp")))
        xs = [torch.randn([4 * n for n in shape], dtype=torch.float64, requires_grad=True) for shape in shapes]
        sources, targets = (list(t) if isinstance(t, tuple) else [t] * len(xs) for t in (src, dst))
        with comm.record() as there:
            if together:
                ys = spmd.together(operator, xs, "tp", src=src, dst=dst)
            else:
                ys = tuple(operator(x, "tp", src=a, dst=b) for x, a, b in zip(xs, sources, targets, strict=True))
        loss = sum((y * torch.arange(y.numel()).view(y.shape)).sum() for y in ys)
        with comm.record() as back:
            grads = torch.autograd.grad(loss, xs)
        assert all(y.is_contiguous() for y in ys) or not together
        return [*ys, *grads], there, back

    def rank() -> None:
        results, there, back = run(True)
        wanted, there_apart, back_apart = run(False)
        for result, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, other, rtol=1e-12, atol=1e-12)
        for calls, apart, verb in ((there, there_apart, forward), (back, back_apart, backward)):
            assert [call.verb for call in calls] == [verb] * bool(verb)
            assert [call.verb for call in apart] == [verb] * (len(shapes) if verb else 0)
            assert sum(call.bytes for call in calls) == sum(call.bytes for call in apart)

    threads.run(Mesh(size, tp=size), rank)


def test_tensors_without_a_gradient_take_no_part_in_backward() -> None:
    def rank() -> None:
        a, b, c = (torch.ones(n, requires_grad=n > 1) for n in (1, 2, 3))
        _, y, _ = spmd.together(spmd.convert, [a, b, c], "tp", src=I, dst=R)
        with comm.record() as calls:
            y.sum().backward()
        assert [call.shape for call in calls] == [(2,)]
        assert a.grad is c.grad is None
        assert torch.equal(b.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]

    threads.run(Mesh(2, tp=2), rank)


def test_gradients_of_gradients_and_one_rank_and_no_tensor() -> None:
    def rank() -> None:
        x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        (y, z) = spmd.together(spmd.all_reduce, [x, 2 * x], "tp", src=P, dst=R)
        (grad,) = torch.autograd.grad((y**2 * z).sum(), x, create_graph=True)
        single, double = (spmd.all_reduce(w, "tp", src=P, dst=R) for w in (x, 2 * x))
        (wanted,) = torch.autograd.grad((single**2 * double).sum(), x, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(grad.sum(), x), torch.autograd.grad(wanted.sum(), x))
        assert spmd.together(spmd.all_reduce, [], "tp", src=P, dst=R) == ()
        assert spmd.together(spmd.all_reduce, [x], "dp", src=P, dst=R)[0] is x

    threads.run(Mesh(2, tp=2), rank)


@pytest.mark.parametrize(
    ("operator", "src", "dst"),
    [
        (spmd.all_to_all, S(0), S(1)),
        (spmd.all_gather, V, R),
        (spmd.all_gather, (S(0), R), R),
        (spmd.all_reduce, P("avg"), R),
        (spmd.convert, I, P),
    ],
)
def test_other_operators_and_types_are_refused(operator: Any, src: Any, dst: Any) -> None:
    def rank() -> None:
        with pytest.raises(SpmdTypeError, match=rf"together\({operator.__name__}.*call the operator for each tensor"):
            spmd.together(operator, [torch.ones(4, 4)] * 2, "tp", src=src, dst=dst)

    threads.run(Mesh(2, tp=2), rank)


def test_a_checker_judges_each_tensor() -> None:
    def step(second: Any) -> None:
        with spmd.SpmdTypeMode({"tp": 2}):
            a, b = (spmd.convert(torch.ones(4), "tp", src=R, dst=P) for _ in range(2))
            b = b if second is P else spmd.all_reduce(b, "tp", src=P, dst=second)
            y, z = spmd.together(spmd.all_reduce, [a, b], "tp", src=P, dst=I)
            assert spmd.get_local_type(y) == spmd.get_local_type(z) == {"tp": I}

    threads.run(Mesh(2, tp=2), lambda: step(P))
    with pytest.raises(SpmdTypeError, match="b is R, the same on all ranks, not P"):
        threads.run(Mesh(2, tp=2), lambda: step(R))
