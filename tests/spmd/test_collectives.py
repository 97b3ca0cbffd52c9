"""The typed operators: what is refused, dims, dtypes, second derivatives, threads, conversion between all types."""

from __future__ import annotations

import inspect
import re
import threading
from itertools import product
from typing import Any

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from neuronx_dist.spmd.rows import ROWS
from tests.support.conformance import CONFORMANCE, EXPERT, TP2
from tests.support.paths import DOCS
from tests.support.pool import processes

ALL_TYPES = [R, I, V, P, S(0), S(1)]
OPERATORS = [
    spmd.all_reduce,
    spmd.all_gather,
    spmd.reduce_scatter,
    spmd.all_to_all,
    spmd.convert,
    spmd.reinterpret,
]


def is_legal(operator: Any, src: Any, dst: Any) -> bool:
    if (operator.__name__, src.letter, dst.letter) in ROWS:
        return True
    if operator is spmd.reinterpret:
        return src == dst
    if operator is spmd.convert:
        return src == dst or {src.letter, dst.letter} == {"V", "S"}
    return False


@pytest.mark.parametrize(
    "operator, src, dst, meant",
    [
        (spmd.all_reduce, R, I, "drop it"),
        (spmd.all_reduce, I, R, "drop it"),
        (spmd.all_reduce, P, V, "reduce_scatter(x, axis, dst=V)"),
        (spmd.all_reduce, P, S(0), "reduce_scatter(x, axis, dst=S(0))"),
        (spmd.all_gather, P, R, "all_reduce(x, axis, dst=R)"),
        (spmd.reduce_scatter, P, R, "all_reduce(x, axis, dst=R)"),
        (spmd.convert, P, R, "all_reduce(x, axis, dst=R)"),
        (spmd.convert, P, V, "reduce_scatter(x, axis, dst=V)"),
        (spmd.convert, S(0), S(1), "all_to_all(x, axis, src=S(0), dst=S(1))"),
        (spmd.convert, V, R, "all_gather(x, axis, src=V, dst=R)"),
        (spmd.reinterpret, V, R, "all_gather(x, axis, src=V, dst=R)"),
        (spmd.reinterpret, P, R, "all_reduce(x, axis, dst=R)"),
        (spmd.reinterpret, R, S(0), "convert(x, axis, src=R, dst=S(0))"),
        (spmd.reinterpret, S(0), P, "convert(x, axis, src=S(0), dst=P, expert_mode=True)"),
    ],
)
def test_what_is_meant(operator, src, dst, meant):
    with comm.as_rank(TP2, 0), pytest.raises(SpmdTypeError, match=re.escape(meant)):
        operator(torch.ones(2, 2), "tp", src=src, dst=dst)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.expert], ids=lambda row: "-".join(row.key))
def test_rarely_meant_pairs_need_expert_mode(row):
    name, src, dst = row.key
    types = {"R": R, "I": I, "V": V, "P": P, "S": S(0)}
    with comm.as_rank(TP2, 0):
        with pytest.raises(SpmdTypeError, match="expert_mode=True") as error:
            getattr(spmd, name)(torch.ones(2, 2), "tp", src=types[src], dst=types[dst])
        assert row.instead in str(error.value) and row.instead
        getattr(spmd, name)(torch.ones(2, 2), "tp", src=types[src], dst=types[dst], expert_mode=True)


def test_wrong_shapes_and_types():
    with comm.as_rank(TP2, 0):
        for call, parts in [
            (lambda: spmd.convert(torch.ones(3), "tp", src=R, dst=S(0)), ["2 partitions", "dim 0", "(3,)", "over tp"]),
            (lambda: spmd.reduce_scatter(torch.ones(4), "tp", dst=V), ["unbound from dim 0", "(2)", "(4,)", "S(0)"]),
            (lambda: spmd.all_to_all(torch.ones(4), "tp"), ["unbound", "(4,)"]),
            (lambda: spmd.convert(torch.ones(()), "tp", src=R, dst=V), ["unbound"]),
            (lambda: spmd.all_gather(torch.ones(4), "tp", src=S(1), dst=R), ["S(1)", "[4]"]),
            (lambda: spmd.all_gather(torch.ones(4), "tp", src=S(-2), dst=R), ["S(-2)", "[4]"]),
            (lambda: spmd.all_gather(torch.ones(4), "tp", src="V", dst=R), ["'V'", "R, I, V, P or S(dim)"]),
        ]:
            with pytest.raises(ValueError) as error:
                call()
            assert all(part in str(error.value) for part in parts), str(error.value)


def negative_dims() -> None:
    x = torch.arange(16.0).view(2, 2, 4)
    for dim in range(-3, 3):
        assert torch.equal(spmd.all_gather(x, "tp", src=S(dim), dst=R), torch.cat([x, x], dim))
        assert torch.equal(spmd.convert(x, "tp", src=R, dst=S(dim)), x.chunk(2, dim)[comm.rank("tp")])
        assert torch.equal(spmd.reduce_scatter(x, "tp", dst=S(dim)), 2 * x.chunk(2, dim)[comm.rank("tp")])
        leaf = x.clone().requires_grad_()
        spmd.all_gather(leaf, "tp", src=S(dim), dst=R).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(x, 2.0))
    for dim in range(-4, 4):
        assert torch.equal(spmd.all_gather(x, "tp", dst=R, gather_dim=dim), torch.stack([x, x], dim))
    mine = x.chunk(2, -1)[comm.rank("tp")]
    assert torch.equal(spmd.all_to_all(x, "tp", src=S(-3), dst=S(-1)), torch.cat([mine, mine], 0))


def test_negative_dims():
    threads.run(TP2, negative_dims)


def test_axes_of_one_rank_do_nothing():
    x = torch.arange(4.0).view(1, 4).requires_grad_()
    with comm.as_rank(Mesh(1), 0), comm.record() as calls:
        for operator, src, dst in product(OPERATORS, ALL_TYPES, ALL_TYPES):
            options = EXPERT if operator in (spmd.convert, spmd.reinterpret) else {}
            if not is_legal(operator, src, dst):
                with pytest.raises(SpmdTypeError):  # a mistake is one at any size
                    operator(x, "tp", src=src, dst=dst, **options)
                continue
            result = operator(x, "tp", src=src, dst=dst, **options)
            assert torch.equal(result.reshape(-1), x.reshape(-1))
            if "V" not in (src.letter, dst.letter):
                assert result is x, (operator, src, dst)
        # V comes and goes with a dim of its own
        assert spmd.all_gather(x, "tp", src=V, dst=R).shape == (1, 1, 4)
        assert spmd.all_gather(x, "tp", src=V, dst=R, gather_dim=1).shape == (1, 1, 4)
        assert spmd.reduce_scatter(x, "tp", src=P, dst=V).shape == (4,)
        assert spmd.convert(x, "tp", src=R, dst=V).shape == (4,)
    assert not calls


def gradients_of_a_sum() -> None:
    """The gradient of a sum is an expanded scalar: not contiguous, zero strides."""
    for _, operator, src, dst, options, x, *_ in CONFORMANCE:
        leaf = torch.tensor(x[comm.rank("tp")], dtype=torch.float32, requires_grad=True)
        operator(leaf, "tp", src=src, dst=dst, **options).sum().backward()
        explicit = leaf.detach().clone().requires_grad_()
        result = operator(explicit, "tp", src=src, dst=dst, **options)
        result.backward(torch.ones_like(result))
        assert torch.equal(leaf.grad, explicit.grad)


def test_gradients_that_are_not_contiguous():
    threads.run(TP2, gradients_of_a_sum)
    processes(2).run(gradients_of_a_sum, mesh=dict(tp=2))


def numeric_gradients() -> None:
    """A backward can be differentiated: the derivative of <cotangent, gradient> along a direction, found by a second
    backward, is what finite differences of the gradient give. The function is sin of the operator's result.
    """
    rank = comm.rank("tp")
    for _, operator, src, dst, options, x, y, *_ in CONFORMANCE:
        generator = torch.Generator().manual_seed(3)
        draw = torch.rand(2, *torch.tensor(y[rank]).shape, generator=generator, dtype=torch.float64)
        weight = draw[0 if dst in (I, P) else rank]  # the gradient of I is I, that of P is R
        leaf = torch.tensor(x[rank], dtype=torch.float64, requires_grad=True)

        def loss(value):
            return (torch.sin(operator(value, "tp", src=src, dst=dst, **options)) * weight).sum()  # noqa: B023

        (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        direction, cotangent = (  # both have the type of x: the same on all ranks for R and I
            torch.rand(2, *leaf.shape, generator=generator, dtype=torch.float64)[0 if src in (I, R) else rank]
            for _ in range(2)
        )
        (second,) = torch.autograd.grad(grad, leaf, cotangent, create_graph=True)
        eps = 1e-6
        ahead, behind = (
            torch.autograd.grad(loss(moved), moved)[0]
            for moved in ((leaf + sign * eps * direction).detach().requires_grad_() for sign in (1, -1))
        )
        numeric = (ahead - behind) / (2 * eps)
        assert comm.all_reduce(numeric.abs().max(), "tp", op="max") > 1e-3
        found, wanted = pairing(second.detach(), direction, src), pairing(numeric, cotangent, src)
        assert abs(found - wanted) < 1e-7, (operator.__name__, src, dst, found, wanted)


def pairing(grad: torch.Tensor, value: torch.Tensor, type_: Any) -> float:
    """<gradient, value> over all ranks: R (sum g)·x, I g·x, V sum g·x, P g·(sum x)."""
    if type_ == I:
        return float((grad * value).sum())
    return float(comm.all_reduce((grad * value).sum(), "tp"))


def test_gradients_of_gradients():
    threads.run(TP2, numeric_gradients)


def backward_in_another_thread() -> torch.Tensor:
    """The communicator is the forward's, wherever the backward runs: that thread has no context (or another one)."""
    rank = comm.rank("tp")
    x = torch.tensor([1.0 + rank], requires_grad=True)
    y = spmd.convert(spmd.all_reduce(x, "tp", dst=I), "tp", src=I, dst=R) * (rank + 1)
    failures: list[BaseException] = []

    def backward() -> None:
        try:
            with comm.as_rank(Mesh(4, tp=4), 0):
                y.sum().backward()
        except BaseException as error:  # noqa: B902
            failures.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failures, failures
    return x.grad


def test_backward_in_another_thread():
    assert [grad.item() for grad in threads.run(TP2, backward_in_another_thread)] == [3.0, 3.0]
    assert [grad.item() for grad in processes(2).run(backward_in_another_thread, mesh=dict(tp=2))] == [3.0, 3.0]


def meaning(x: torch.Tensor, type_: Any) -> torch.Tensor:
    """The global value that all ranks' tensors of a type stand for; V stands for the stack."""
    if type_ == P:
        return comm.all_reduce(x, "tp")
    if type_ == V:
        return comm.all_gather(x.unsqueeze(0), "tp")
    if type_.letter == "S":
        return comm.all_gather(x, "tp", dim=type_.dim)
    gathered = comm.all_gather(x.unsqueeze(0), "tp")
    assert (gathered == gathered[0]).all()
    return x


def every_redistribution() -> None:
    """All pairs: the value stays what it was, and the gradient of <w, value> is w in the dual's terms."""
    rank, size = comm.rank("tp"), comm.size("tp")
    whole = torch.arange(float(size * size * 2)).view(size, size, 2) + 1

    def local(type_):
        if type_ in (R, I):
            return whole.clone()
        if type_ == P:
            return whole * (rank + 1)
        return whole.chunk(size, type_.dim)[rank].clone() if type_.letter == "S" else whole[rank].clone()

    for src, dst in product(ALL_TYPES, ALL_TYPES):
        x = local(src).requires_grad_()
        y = spmd.redistribute(x, "tp", src=src, dst=dst)
        if src == dst or {src.letter, dst.letter} == {"V", "S"}:
            assert y is x
            continue
        assert torch.equal(meaning(y.detach(), dst), meaning(x.detach(), src)), (src, dst)
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        # <1, y> over the meaning: each element of the value counts once for I, V and P, on every rank for R
        expected = torch.full_like(whole, float(size) if dst == R else 1.0)
        gradient = {"R": P, "P": R}.get(src.letter, src)
        assert torch.equal(meaning(x.grad, gradient), expected[..., : meaning(x.grad, gradient).shape[-1]]), (src, dst)


def test_redistribute_between_all_pairs():
    threads.run(TP2, every_redistribution)
    threads.run(Mesh(4, tp=4), every_redistribution)
    processes(2).run(every_redistribution, mesh=dict(tp=2))


def reduce_dtype() -> None:
    x = torch.full((2,), 256.0 if comm.rank("tp") == 0 else 1.0, dtype=torch.bfloat16, requires_grad=True)
    with comm.record() as calls:
        y = spmd.all_reduce(x, "tp", dst=R, reduce_dtype=torch.float32)
        y.sum().backward()
        spmd.convert(x, "tp", src=I, dst=R, reduce_dtype=torch.float32).sum().backward()
        spmd.all_gather(x, "tp", src=S(0), dst=R, reduce_dtype=torch.float32).sum().backward()
        spmd.reduce_scatter(x, "tp", dst=S(0), reduce_dtype=torch.float32).sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    verbs = [(call.verb, call.dtype) for call in calls]
    sums = [dtype for verb, dtype in verbs if verb != "all_gather"]
    assert sums == [torch.float32] * 5 and [verb for verb, _ in verbs].count("all_gather") == 2


def test_reduce_dtype_holds_forward_and_backward():
    threads.run(TP2, reduce_dtype)


def in_place() -> None:
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * (comm.rank("tp") + 1)
    y = spmd.all_reduce(x, "tp", dst=I, inplace=True)
    assert y.data_ptr() == x.data_ptr() and y.tolist() == [3.0] * 3
    y.sum().backward()
    assert leaf.grad.tolist() == [comm.rank("tp") + 1.0] * 3


def test_all_reduce_in_place():
    threads.run(TP2, in_place)
    processes(2).run(in_place, mesh=dict(tp=2))


def test_a_torch_function_mode_sees_the_operator_and_not_its_inside():
    from torch.overrides import TorchFunctionMode

    seen = []

    class See(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append((getattr(function, "__name__", str(function)), kwargs))
            return function(*args, **(kwargs or {}))

    x = torch.ones(2, 2, requires_grad=True)
    with comm.as_rank(TP2, 0):
        for _, operator, src, dst, options, value, *_ in CONFORMANCE:
            x = torch.tensor(value[0], dtype=torch.float32)
            if "reduce_dtype" in inspect.signature(operator).parameters:
                options = {**options, "reduce_dtype": torch.float64}
            expected = operator(x, "tp", src=src, dst=dst, **options)
            seen.clear()
            with See():
                found = operator(x, "tp", src=src, dst=dst, **options)
            names = [name for name, _ in seen if name in {o.__name__ for o in OPERATORS}]
            assert names == [operator.__name__] and torch.equal(found, expected)
            assert {"src": src, "dst": dst, **options}.items() <= seen[0][1].items()


def test_the_table_of_the_documentation():
    """docs/architecture.md shows `spmd.table()`, row for row."""
    text = (DOCS / "architecture.md").read_text()
    shown = [tuple(re.split(r" {2,}", line)) for line in text.splitlines() if re.match(r"[RIVPS] -> [RIVPS] ", line)]
    assert shown == spmd.table()
