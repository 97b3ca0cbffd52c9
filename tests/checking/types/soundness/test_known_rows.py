"""Programs that the published checker lets through, refuses wrongly or crashes on (reference 1.3 and 2), row by row."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V

MESH = Mesh(2, tp=2)
REFUSED = "refused"


def x(kind, *shape: int, grad: bool = False) -> torch.Tensor:
    """A tensor that was made outside, and declared."""
    with torch._C.DisableTorchFunction():
        x = torch.randn(*shape or (4,), requires_grad=grad)
    return spmd.assert_type(x, {"tp": kind})


def outcome(function):
    """The type on tp of what a function gives under a mode, or REFUSED."""
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        try:
            result = function()
            if isinstance(result, torch.Tensor):
                return spmd.get_local_type(result).get("tp", R)
        except SpmdTypeError:
            return REFUSED
        return result


def parametrized(rows):
    return pytest.mark.parametrize("function, expected", [pytest.param(f, e, id=n) for n, (f, e) in rows.items()])


# --- what it lets through ---


def _written(kind, write, grad=False):
    def function():
        target = x(kind, 2, 2, grad=grad) * 1.0 if grad else x(kind, 2, 2)
        write(target)
        return target

    return function


def _set(index, value):
    def write(target):
        target[index] = value()

    return write


LEAVES = {
    "item": lambda t: t.item(),
    "bool": lambda t: bool(t),
    "float": lambda t: float(t),
    "int": lambda t: int(t),
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
    "if": lambda t: 1 if t else 2,
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "comparison": lambda t: bool((t > 0).all()),
}

UNSOUND_THERE = {
    "R[0] = V": (_written(R, _set(0, lambda: x(V, 2))), V),
    "R[0, 0] = V": (_written(R, _set((0, 0), lambda: x(V, 1)[0])), V),
    "R.view().add_(V)": (_written(R, lambda t: t.view(4).add_(x(V, 4))), V),
    "R.t().mul_(V)": (_written(R, lambda t: t.t().mul_(x(V, 2, 2))), V),
    "R[0].copy_(V)": (_written(R, lambda t: t[0].copy_(x(V, 2))), V),
    "R.view().add_(V), with gradient": (_written(R, lambda t: t.view(4).add_(x(V, 4)), True), REFUSED),
    "V[0].copy_(R): the rest varies still": (_written(V, lambda t: t[0].copy_(x(R, 2))), V),
    "V.copy_(R): all of it is R": (_written(V, lambda t: t.copy_(x(R, 2, 2))), R),
    "S(0)[:, 0].zero_(): as sharded as before": (_written(S(0), lambda t: t[:, 0].zero_()), S(0)),
    "P[0].copy_(R): neither": (_written(P, lambda t: t[0].copy_(x(R, 2))), REFUSED),
    "another view of it is what it became": (lambda: _aliased(R, lambda t: t.add_(x(V, 2, 2))), V),
    "reinterpret shares memory": (lambda: _recast(), REFUSED),
    ".data.add_": (lambda: x(R).data.add_(1), REFUSED),
    ".data.view().add_": (lambda: x(R).data.view(2, 2).add_(1), REFUSED),
    "dropout of R over a stream that is R on tp": (lambda: F.dropout(x(R), 0.5), R),
    "MAX of P": (lambda: comm.all_reduce(x(P), "tp", op="max"), REFUSED),
    "AVG of P": (lambda: comm.all_reduce(x(P), "tp", op="avg"), REFUSED),
    "cat of two constants is no constant": (
        lambda: torch.cat([torch.ones(2, 2), torch.zeros(2, 2)], 1) * x(S(1), 2, 4), REFUSED),
    "convert(V, P) of a constant is no constant": (
        lambda: spmd.convert(torch.ones(2), "tp", src=S(0), dst=P, expert_mode=True) + torch.zeros(4), P),
    "autograd.grad of a loss that is I": (lambda: _gradient(I), I),
    "autograd.grad of a loss that is R": (lambda: _gradient(R), REFUSED),
    **{f"{name} of {kind}": ((lambda f=f, kind=kind: f(x(kind, 1))), REFUSED)
       for name, f in LEAVES.items() for kind in (V, P, S(0))},
}  # fmt: skip


def _aliased(kind, write):
    target = x(kind, 2, 2)
    other = target.view(4)
    write(target)
    return other


def _recast():
    value = x(R, 2)
    spmd.reinterpret(value, "tp", src=R, dst=P, expert_mode=True).add_(x(P, 2))
    return value * 1.0 + x(R, 2)


def _gradient(kind):
    leaf = x(kind, 4, grad=True)
    return torch.autograd.grad(leaf.pow(2).sum(), leaf)[0]


@parametrized(UNSOUND_THERE)
def test_what_the_published_checker_lets_through(function, expected):
    assert outcome(function) == expected


def test_random_numbers_are_what_their_stream_is():
    with comm.as_rank(Mesh(4, tp=2), 0), spmd.SpmdTypeMode():
        with torch._C.DisableTorchFunction():
            x = torch.rand(4)
        x = spmd.assert_type(x, {"dp": R, "tp": R})
        for drawn in (torch.rand_like(x), F.dropout(x, 0.5), torch.bernoulli(x)):
            assert spmd.get_local_type(drawn) == {"dp": V} or spmd.get_local_type(drawn) == {"dp": V, "tp": R}


def test_a_gather_of_the_outer_of_two_axes_leaves_blocks():
    """A dim sharded over two axes is cut by the first one first: put together over that, the other has strides."""
    with comm.as_rank(Mesh(4, tp=2), 0), spmd.SpmdTypeMode():
        with torch._C.DisableTorchFunction():
            x = torch.rand(4)
        x = spmd.assert_type(x, {"dp": S(0), "tp": S(0)})
        assert spmd.get_local_type(spmd.all_gather(x, "tp", src=S(0), dst=R)) == {"dp": S(0), "tp": R}
        blocks = spmd.all_gather(x, "dp", src=S(0), dst=R)
        assert spmd.get_local_type(blocks) == {"dp": R, "tp": S(0, 2)}
        with pytest.raises(SpmdTypeError, match="blocks"):
            spmd.all_gather(blocks, "tp", src=S(0), dst=R)
        cut = spmd.assert_type(blocks.detach().clone(), {})
        assert spmd.get_local_type(spmd.convert(cut, "dp", src=R, dst=S(0))) == {"dp": S(0), "tp": S(0)}


# --- raw collectives ---

RAW = {
    "all_reduce": lambda t: dist.all_reduce(t),
    "all_reduce MAX": lambda t: dist.all_reduce(t, dist.ReduceOp.MAX),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "all_gather": lambda t: dist.all_gather([torch.empty(4)], t),
    "all_to_all_single": lambda t: dist.all_to_all_single(torch.empty(4), t),
    "send": lambda t: dist.send(t, 0),
    "isend": lambda t: dist.isend(t, 0),
    "reduce": lambda t: dist.reduce(t, 0),
    "functional all_reduce": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD),
}


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("kind", [P, R, V])
def test_raw_collectives_of_typed_tensors_name_the_verb(name, kind, group):
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        value = x(kind)
        with pytest.raises(SpmdTypeError) as error:
            RAW[name](value)
    verb = name.replace("functional ", "").replace("isend", "send").split(" ")[0].removesuffix("_single")
    verb = {"reduce": "all_reduce"}.get(verb, verb)
    assert f'comm.{verb}(t, "world"' in error.value.repairs[0]  # without a group it is that of all ranks
    assert "[4]" in str(error.value) and f"tp: {kind}" in str(error.value)


def test_raw_collectives_pass_where_types_are_not_checked(group):
    imported = dist.all_reduce
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        value = x(P)
        with pytest.raises(SpmdTypeError):
            imported(value)
        with spmd.no_typecheck():
            imported(value)
    imported(value)
    assert "guarded" not in repr(dist.ProcessGroup.allreduce), "it is left behind"


# --- what it refuses wrongly ---


def _p(*shape):
    return x(P, *shape)


def _r(*shape):
    return x(R, *shape)


PARTIAL = {
    "F.linear": lambda: F.linear(_p(2, 4), _r(3, 4)),
    "to": lambda: _p(2).to(torch.bfloat16),
    "float": lambda: _p(2).float(),
    "type": lambda: _p(2).type(torch.float64),
    "x[0]": lambda: _p(2, 3)[0],
    "slice": lambda: _p(2, 3)[:, 1:],
    "index_select": lambda: _p(3, 3).index_select(0, torch.tensor([0, 2])),
    "gather": lambda: _p(2, 2).gather(0, torch.tensor([[0, 1]])),
    "embedding": lambda: F.embedding(torch.tensor([0]), _p(2, 3)),
    "tensordot": lambda: torch.tensordot(_p(2, 3), _r(3, 2), 1),
    "outer": lambda: torch.outer(_p(2), _r(2)),
    "inner": lambda: torch.inner(_p(2), _r(2)),
    "kron": lambda: torch.kron(_p(2), _r(2)),
    "einsum": lambda: torch.einsum("ij,jk->ik", _p(2, 2), _r(2, 2)),
    "pad": lambda: F.pad(_p(2), (1, 1)),
    "tril": lambda: _p(2, 2).tril(),
    "conj": lambda: _p(2).conj(),
    "masked_fill 0": lambda: _p(2).masked_fill(_r(2) > 0, 0.0),
    "where 0": lambda: torch.where(_r(2) > 0, _p(2), 0.0),
    "zeros + P": lambda: torch.zeros_like(_p(2)) + _p(2),
    "zero_ and P": lambda: _p(2).zero_() + _p(2),
    "P + 0": lambda: _p(2) + 0,
    "copy_": lambda: _r(2).copy_(_p(2)),
    "expand": lambda: _p(1, 2).expand(3, 2),
    "dropout in evaluation": lambda: F.dropout(_p(2), 0.5, training=False),
    "addmm": lambda: torch.addmm(_p(2, 2), _p(2, 3), _r(3, 2)),
    "cumsum": lambda: _p(3).cumsum(0),
    "mean": lambda: _p(3).mean(),
}
NOT_PARTIAL = {
    "masked_fill 1": lambda: _p(2).masked_fill(_r(2) > 0, 1.0),
    "pad with 1": lambda: F.pad(_p(2), (1, 1), value=1.0),
    "P + 1": lambda: _p(2) + 1,
    "P * P": lambda: _p(2) * _p(2),
    "P * V": lambda: _p(2) * x(V, 2),
    "P + V": lambda: _p(2) + x(V, 2),
    "P + R": lambda: _p(2) + _r(2),
    "relu": lambda: _p(2).relu(),
    "where(R, P, R)": lambda: torch.where(_r(2) > 0, _p(2), _r(2)),
    "a mask that varies": lambda: _p(2).masked_fill(x(V, 2) > 0, 0.0),
    "1 / P": lambda: 1 / _p(2),
    "F.linear with a bias that is R": lambda: F.linear(_p(2, 4), _r(3, 4), _r(3)),
    "to integers": lambda: _p(2).to(torch.int64),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_linear_functions_keep_partial_sums(name):
    assert outcome(PARTIAL[name]) is P


@pytest.mark.parametrize("name", NOT_PARTIAL)
def test_other_functions_take_no_partial_sums(name):
    assert outcome(NOT_PARTIAL[name]) == REFUSED


# --- what it crashes on, and where it loses types ---


def _module():
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(x(R, 2, 2))
    return copy.deepcopy(module).weight


def _checkpointed(reentrant):
    value, up, down = x(R, 3, 2, grad=True), x(S(0), 4, 2, grad=True), x(S(1), 2, 4, grad=True)

    def block(value, up, down):
        return spmd.all_reduce(F.linear(F.linear(value, up).relu(), down), "tp", dst=I)

    result = checkpoint(block, value, up, down, use_reentrant=reentrant)
    result.sum().backward()
    assert spmd.get_local_type(up.grad) == {"tp": S(0)} and spmd.get_local_type(value.grad) == {"tp": P}
    return result


def _optimized(name, **options):
    module = nn.Linear(2, 2)
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.1, **options)
    for _ in range(2):
        optimizer.zero_grad()
        module(x(I, 3, 2)).pow(2).sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return module.weight


SURVIVES = {
    "deepcopy of a tensor": (lambda: copy.deepcopy(x(V, 2)), V),
    "deepcopy of a leaf": (lambda: copy.deepcopy(x(I, 2, grad=True)), I),
    "deepcopy of a module": (_module, R),
    "nn.Parameter(t)": (lambda: nn.Parameter(x(V, 2)), V),
    "nn.Parameter(shard)": (lambda: nn.Parameter(x(S(0), 2)), S(0)),
    "nn.Parameter of new memory is what its layout says": (lambda: nn.Parameter(torch.empty(2)) * 1.0, I),
    "functional_call": (
        lambda: torch.func.functional_call(nn.Linear(2, 2, bias=False), {"weight": x(S(0), 2, 2)}, (x(R, 3, 2),)),
        S(1),
    ),
    "checkpoint": (lambda: _checkpointed(False), I),
    "reentrant checkpoint": (lambda: _checkpointed(True), I),
    "nn.Linear under a mode": (lambda: nn.Linear(2, 2)(x(I, 3, 2)), I),
    "AdamW and clip_grad_norm_": (lambda: _optimized("AdamW"), I),
    "AdamW, one tensor at a time": (lambda: _optimized("AdamW", foreach=False), I),
    "fused AdamW": (lambda: _optimized("AdamW", fused=True), I),
    "SGD with momentum": (lambda: _optimized("SGD", momentum=0.9, nesterov=True), I),
    "load_state_dict": (lambda: _loaded(), I),
    "backward of an expanded gradient": (lambda: _expanded(), P),
}  # fmt: skip


def _loaded():
    module = nn.Linear(2, 2, bias=False)
    module.load_state_dict({"weight": torch.zeros(2, 2)})
    return module.weight


def _expanded():
    value = x(R, 4, grad=True)
    total = spmd.all_reduce(spmd.convert(value, "tp", src=R, dst=P), "tp", dst=R)
    spmd.convert(total.sum(), "tp", src=R, dst=P).backward()
    return value.grad


@parametrized(SURVIVES)
def test_types_survive(function, expected):
    assert outcome(function) == expected


def test_nothing_is_left_in_torch():
    before = nn.Parameter.__new__, torch.autograd.Function.__dict__["apply"]
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        assert nn.Parameter.__new__ is not before[0]
        with spmd.SpmdTypeMode():
            pass
        assert nn.Parameter.__new__ is not before[0]
    assert before == (nn.Parameter.__new__, torch.autograd.Function.__dict__["apply"])


@pytest.mark.parametrize("inside", [True, False])
def test_annotated_tensors_are_saved_without_types(inside):
    def saved():
        value = x(S(0), 2)
        buffer = io.BytesIO()
        torch.save({"x": value, "p": nn.Parameter(value.detach())}, buffer)
        return buffer, value

    with comm.as_rank(MESH, 0):
        if inside:
            with spmd.SpmdTypeMode():
                buffer, value = saved()
        else:
            buffer, value = saved()
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    assert torch.equal(found["x"], value) and torch.equal(found["p"], value)
    assert not spmd.has_local_type(found["x"])
    with spmd.SpmdTypeMode(), pytest.raises(SpmdTypeError, match="no type"):
        found["x"] * 2


def test_a_saved_tensor_is_read_where_nobody_knows_of_types(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(spmd.assert_type(torch.arange(3.0), {"tp": S(0)}), path)
    code = f"import sys, torch; x = torch.load({str(path)!r}, weights_only=True); assert x.tolist() == [0, 1, 2]; "
    code += "assert not any(name.startswith('neuronx_dist') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_compiled_functions_run_with_and_without_a_mode():
    compiled = torch.compile(lambda value: value * 2 + 1, backend="eager")
    with torch._C.DisableTorchFunction():
        value = torch.randn(4)
    plain = compiled(value)
    annotated = spmd.assert_type(value.clone(), {"tp": R})
    assert torch.equal(compiled(annotated), plain)
    with comm.as_rank(MESH, 0), spmd.SpmdTypeMode():
        result = compiled(annotated)
        assert spmd.get_local_type(result) == {"tp": R}
        with pytest.raises(SpmdTypeError, match="partial sum"):
            compiled(spmd.assert_type(x(P, 4), {}))
    assert torch.equal(result, plain) and torch.equal(compiled(value), plain)
