"""The rest of spmd_types' language: types as values, changes of types, numbers, boundaries, declared functions, log."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, PartitionSpec, R, S, SpmdType, SpmdTypeError, V, rules

MESH = Mesh(4, tp=2)  # dp 2 x tp 2


@pytest.fixture
def mode():
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode() as mode:
        yield mode


def of(dp, tp, *shape, grad=False):
    with spmd.no_typecheck():
        x = torch.ones(shape or (4, 4), requires_grad=grad)
    return spmd.assert_type(x, {"dp": dp, "tp": tp})


def types(x):
    return spmd.get_axis_local_type(x, "dp"), spmd.get_axis_local_type(x, "tp")


# --- types as values


def test_parts_of_a_type_are_merged(mode):
    assert spmd.merge_types(R, {"tp": V}, None) == SpmdType({"tp": V, "dp": R})
    assert spmd.merge_types({"tp": I}, PartitionSpec("dp", None)) == SpmdType({"tp": I}, PartitionSpec("dp", None))
    for wrong in [({"tp": I}, {"tp": R}), (PartitionSpec("dp"), PartitionSpec("tp"))]:
        with pytest.raises(SpmdTypeError):
            spmd.merge_types(*wrong)
    with pytest.raises(TypeError):
        spmd.merge_types(R, V)
    with pytest.raises(SpmdTypeError):
        SpmdType({"tp": R}, PartitionSpec("tp"))
    with pytest.raises(ValueError, match="empty tuple"):
        PartitionSpec((), None)


def test_a_type_is_declared_in_any_form(mode):
    forms = [
        ({"tp": R, "dp": S(0)},),
        ({"tp": R}, PartitionSpec("dp", None)),
        (R, PartitionSpec("dp", None)),
        ({"tp": R, "dp": V}, PartitionSpec("dp", None)),
        (SpmdType({"tp": R}, PartitionSpec("dp", None)),),
    ]
    for form in forms:
        x = spmd.assert_type(torch.randn(4, 4), *form)
        assert types(x) == (S(0), R) and spmd.get_partition_spec(x) == PartitionSpec("dp", None)
        spmd.assert_type(x, {"tp": R}, partition_spec=PartitionSpec("dp", None))
        with pytest.raises(SpmdTypeError, match=r"S\(0\) on dp, not S\(1\)"):
            spmd.assert_type(x, {}, PartitionSpec(None, "dp"))
    two = spmd.assert_type([torch.randn(2), torch.randn(2, 2)], {"tp": V, "dp": R})
    assert [types(x) for x in two] == [(R, V)] * 2
    with pytest.raises(SpmdTypeError, match="1 entries, and the tensor 2 dims"):
        spmd.assert_type(torch.randn(2, 2), {}, PartitionSpec("dp"))
    with pytest.raises(TypeError, match="takes a type"):
        spmd.assert_type(torch.randn(2), PartitionSpec("dp"))
    assert spmd.get_partition_spec(of(R, V)) is None


# --- changes


def test_a_type_is_changed_where_it_is_the_expected_one(mode):
    x = of(R, R)
    assert spmd.mutate_type(x, "tp", src=R, dst=I) is x and types(x) == (R, I)
    spmd.mutate_type(x, src={"dp": R, "tp": I}, dst={"dp": V, "tp": R})
    spmd.mutate_type(x, src=V, dst={"dp": P})
    spmd.mutate_type(x, src={"tp": R}, dst=S(-1))
    assert types(x) == (P, S(1)) and any("mutate_type" in text for text, _ in mode.trusted)
    with pytest.raises(SpmdTypeError, match="it is P, not R"):
        spmd.mutate_type(x, src=R, dst=I)
    assert types(x) == (P, S(1)), "nothing changes where one axis does not fit"
    for wrong in (dict(axis="tp", src={"tp": V}, dst=R), dict(src={"tp": V}, dst={"dp": R})):
        with pytest.raises(SpmdTypeError):
            spmd.mutate_type(x, **wrong)
    y = of(R, R)
    assert types(spmd.reinterpret_no_grad(y, "tp", dst=I)) == (R, I)
    with pytest.raises(ValueError, match="requires a gradient"):
        spmd.reinterpret_no_grad(of(R, R, grad=True), "tp", dst=I)
    with pytest.raises(SpmdTypeError, match="not R or I"):
        spmd.reinterpret_no_grad(of(R, V), "tp", dst=I)


def test_a_type_like_that_of_another_tensor(mode):
    source, group = of(S(0), R), comm.communicator("tp")
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    spmd.assert_type_like(x, source, {group: V})
    spmd.assert_local_type_like(y, source)
    assert (types(x), types(y)) == ((S(0), V), (V, R))
    assert spmd.maybe_get_axis_local_type(x, "pp") is None, "an axis of one rank"
    with spmd.no_typecheck():
        untyped = torch.ones(2)
    with pytest.raises(SpmdTypeError, match="no type on 'tp'"):
        spmd.get_axis_local_type(untyped, "tp")


def test_a_check_is_active_or_not(mode):
    assert spmd.is_type_checking() and bool(spmd.TYPE_CHECKING)
    with spmd.no_typecheck():
        assert not spmd.is_type_checking() and not spmd.TYPE_CHECKING


def test_aliases_are_their_operators():
    def rank():
        x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
        with comm.record() as calls:
            y = spmd.unshard(spmd.shard(x, "tp", src=I, dst=S(0)), "tp", src=S(0), dst=I)
            z = spmd.invariant_to_replicate(y, "tp") * (1 + comm.rank("tp"))
            z.sum().backward()
        return y.detach(), x.grad, [call.verb for call in calls]

    for y, grad, verbs in threads.run(Mesh(2, tp=2), rank):
        assert torch.equal(y, torch.arange(4.0, dtype=torch.float64)) and grad.tolist() == [3.0] * 4
        assert verbs == ["all_gather", "all_reduce", "all_gather"]  # then the sum of f, and shard's gather
    with pytest.raises(SpmdTypeError, match=r"takes S\(dim\) to R or I"):
        spmd.unshard(torch.ones(2), "tp", src=V, dst=R)
    with pytest.raises(SpmdTypeError, match="takes R or I"):
        spmd.shard(torch.ones(2), "tp", src=V, dst=S(0))


# --- numbers


def test_a_number_with_a_type(mode):
    x, n = of(R, R), spmd.Scalar(3, {"dp": R, "tp": V})
    assert types(x * n) == types(n * x) == types(torch.add(x, n)) == (R, V)
    assert (x * n).dtype == x.dtype and (x * n).shape == x.shape
    assert (2 * n - 1).value == 5 and (2 * n - 1).local_type == {"dp": R, "tp": V}
    partial = spmd.Scalar(2.0, {"dp": R, "tp": P})
    assert (partial + partial).local_type["tp"] is P and types(x * partial) == (R, P)
    with pytest.raises(SpmdTypeError):
        x + partial
    with pytest.raises(SpmdTypeError):
        float(n)
    assert float(spmd.Scalar(2.5, {"dp": R, "tp": R})) == 2.5
    with pytest.raises(TypeError, match="is no number"):
        spmd.Scalar(True, {"tp": R})


def test_a_number_with_a_type_is_a_number_outside_of_a_check():
    n = spmd.Scalar(3, {"tp": V})
    assert n + 1 == 4 and 7 // n == 2 and float(n) == 3.0 and torch.equal(torch.ones(2) * n, torch.full((2,), 3.0))


# --- boundaries


def test_local_code_has_no_shards(mode):
    x = of(R, S(0))
    with pytest.raises(SpmdTypeError):
        x[0]
    with spmd.local():
        row = x[0]
        assert types(row) == (R, V)
    assert types(x) == (R, S(0))
    assert any("local" in text for text, _ in mode.trusted)


@pytest.mark.parametrize("boundary", [spmd.local_map, spmd.no_typecheck], ids=["local_map", "no_typecheck"])
def test_declarations_in_trees(mode, boundary):
    @boundary(
        in_types=({"dp": S(0), "tp": V}, [({"tp": V}, PartitionSpec("dp", None)), None]),
        out_types={"sum": PartitionSpec("dp", "tp"), "rest": [({"tp": V}, PartitionSpec("dp"))]},
    )
    def body(x, others):
        return {"sum": x + others[0], "rest": [x.sum(1)] * others[1]}

    x = of(S(0), V)
    result = body(x, [of(S(0), V), 1])
    assert types(result["sum"]) == (S(0), S(1)) and types(result["rest"][0]) == (S(0), V)
    with pytest.raises(ValueError, match="2 values"):
        body(x, [of(S(0), V), 2])
    with pytest.raises(SpmdTypeError, match=r"it is S\(1\) on dp"):
        body(x, [of(S(1), V), 1])
    with pytest.raises(SpmdTypeError, match="Infer stands"):
        boundary(in_types=(spmd.Infer,), out_types=PartitionSpec("dp", None))(lambda x: x)(x)

    inferred = boundary(in_types=spmd.Infer, out_types=PartitionSpec("dp", None))(lambda x: x * 2)
    assert spmd.get_axis_local_type(inferred(of(V, V)), "dp") == S(0)


def test_code_that_is_not_checked(mode):
    @spmd.no_typecheck
    def plain(x):
        return x[0] + torch.ones(4)

    assert not spmd.has_local_type(plain(of(R, S(0))))
    unchecked = spmd.register_no_typecheck(lambda x: x.numpy().sum())
    assert unchecked(of(R, V)) == 16.0
    with spmd.no_typecheck():
        assert not spmd.is_type_checking()


# --- autograd functions


class Fused(torch.autograd.Function):
    """A row-parallel product with its sum, as a kernel that no rule can follow."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        return comm.all_reduce(torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T), group)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, None


def declared(hook):
    return type("Declared", (Fused,), {"spmd_typecheck": staticmethod(hook)})


def test_a_function_that_declares_its_types(mode):
    def by_rules(*, x, weight, group):
        return rules.all_reduce(rules.einsum("bk,nk->bn", x, weight), group, src=P, dst=I)

    def on_outputs(outputs, *, x, weight, group):
        spmd.assert_type(x, {"tp": S(1)})
        rules.ignore(weight)
        spmd.assert_type_like(outputs, x, {group: I})

    x, weight = of(S(0), S(1)), of(R, S(1))
    for hook in (by_rules, on_outputs):
        with comm.record() as calls:
            y = declared(hook).apply(x, weight, "tp")
        assert types(y) == (S(0), I) and len(calls) == 1, "a declaration communicates nothing"
        with pytest.raises(SpmdTypeError):
            declared(hook).apply(of(S(0), R), of(R, R), "tp")
    with pytest.raises(SpmdTypeError, match="does not name the operand weight"):
        declared(lambda *, x: x).apply(x, weight, "tp")
    with pytest.raises(SpmdTypeError, match="gives result 0"):
        declared(lambda outputs, *, x, weight: None).apply(x, weight, "tp")
    assert any("Declared" in text for text, _ in mode.trusted)


def test_the_older_form_calls_the_function(mode):
    @spmd.register_autograd_function
    class Older(Fused):
        @staticmethod
        def typecheck_forward(x, weight, group):
            spmd.assert_type(x, {"tp": S(1)})
            result = Older.apply(x, weight, group)
            return spmd.assert_type(result, {"dp": S(0), "tp": I})

    assert types(Older.apply(of(S(0), S(1)), of(R, S(1)), "tp")) == (S(0), I)
    with pytest.raises(SpmdTypeError, match="it is R on tp"):
        Older.apply(of(S(0), R), of(R, S(1)), "tp")
    for wrong in (Fused, type("Both", (Older,), {"spmd_typecheck": staticmethod(lambda: None)})):
        with pytest.raises(TypeError, match="one static method"):
            spmd.register_autograd_function(wrong)


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return torch.from_numpy(x.detach().numpy() * y.detach().numpy())

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def test_a_function_by_its_decomposition(mode):
    cls = type("Product", (Kernel,), {})
    with pytest.raises(SpmdTypeError):
        cls.apply(of(S(0), R), of(S(0), R))  # the body leaves torch

    @spmd.register_decomposition(cls)
    def product(x, y):
        return x * y

    assert types(cls.apply(of(S(0), R), of(S(0), P))) == (S(0), P)
    with pytest.raises(SpmdTypeError):
        cls.apply(of(S(0), P), of(S(0), P))


def test_a_function_of_one_ranks_values(mode):
    cls = spmd.register_local_autograd_function(type("Pointwise", (Kernel,), {}))
    assert types(cls.apply(of(S(0), R), of(S(0), V))) == (S(0), V)
    assert types(cls.apply(of(R, I), of(R, I))) == (R, I)
    assert types(cls.apply(of(V, R), of(R, R, 1))) == (V, R)
    with pytest.raises(SpmdTypeError):
        cls.apply(of(R, P), of(R, P))
    assert spmd.register_local_backward_hook(product := (lambda grad: grad)) is product


# --- log


def test_calls_are_logged_with_types(mode, monkeypatch):
    x = of(R, S(1))
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("neuronx_dist.spmd.tracing")
    monkeypatch.setattr(logger, "handle", records.append)
    monkeypatch.setattr(logger, "level", logging.INFO)
    with spmd.trace():
        y = F.linear(x, of(R, S(1)))
        spmd.all_reduce(y, "tp", dst=R)
        with spmd.no_typecheck():
            y * 2
    lines = [record.getMessage() for record in records]
    assert [line.split("  ")[1] for line in lines] == [
        "linear({dp: R, tp: S(1)}, {dp: R, tp: S(1)}) -> {dp: R, tp: P}",
        "all_reduce({dp: R, tp: P}) -> {dp: R, tp: R}",
    ]
    assert all("test_retyping.py" in line for line in lines)


def test_what_has_another_place_here_says_where():
    with pytest.raises(NotImplementedError, match="comm.as_rank"):
        spmd.set_dist(None)
    with pytest.raises(NotImplementedError, match="program's line"):
        spmd.traceback_filtering()
