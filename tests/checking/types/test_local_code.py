"""Code that works on this rank's own part: what is right passes, what looks like it and is wrong does not.

What is said to be right or wrong here is run on ranks, and compared with one process.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.gradients.reduce import reduce_gradients
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from tests.checking.types.local_programs import CASES, experts_of_this_rank
from tests.checking.types.messages.running import backwards, local, mesh_of, parity, values


def check(program):
    """The type of the loss, and what the mode lists."""
    mesh = mesh_of(program.mesh)
    with comm.as_rank(mesh, 0, CheckBackend()):
        with spmd.no_typecheck():
            given = {name: local(program.inputs[name], value) for name, value in values(program).items()}
        with spmd.SpmdTypeMode(mesh) as mode:
            for name, x in given.items():
                spmd.assert_type(x, {**dict.fromkeys(program.mesh, R), **program.inputs[name].types})
            loss = program.body(**given)
            kinds = spmd.get_local_type(loss)
            if not backwards(program):
                loss.backward()
    return kinds, [*mode.assumed, *mode.trusted]


@pytest.mark.parametrize("name", CASES)
def test_local_code(name):
    case = CASES[name]
    if case.refused:
        with pytest.raises(SpmdTypeError) as error:
            check(case.program)
        assert case.refused in str(error.value)
        return
    kinds, listed = check(case.program)
    for words in case.listed:
        lines = [line for text, line in listed if words in text]
        assert lines and all("local_programs.py" in line for line in lines), listed


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_and_what_is_not(name):
    """Run on ranks; a loss that the checker refused to type is summed or equal, whichever is nearer."""
    case = CASES[name]
    kinds = [dict.fromkeys(case.program.mesh, kind) for kind in (P, I)]
    if not case.refused:
        kinds = [check(case.program)[0]]
    off = min(parity(case.program, case.program.body, kind) for kind in kinds)
    assert (off < 1e-9) == case.right, off


# --- the scope itself


TP2 = Mesh(2, tp=2)


@pytest.fixture
def mode():
    with comm.as_rank(TP2, 0, CheckBackend()), spmd.SpmdTypeMode() as mode:
        yield mode


def typed(kind, *shape, grad=True):
    with spmd.no_typecheck():
        return spmd.assert_type(torch.randn(*shape).requires_grad_(grad), {"tp": kind})


def tp(x):
    return spmd.get_local_type(x)["tp"]


def test_without_a_check_it_is_the_function():
    x = torch.ones(2, 3)
    mapped = spmd.local_map(torch.sum, out_types={"tp": P})
    assert mapped(x) == 6 and mapped.__name__ == "sum"
    assert experts_of_this_rank.__name__ == "experts_of_this_rank"


def test_what_is_sharded_varies_inside_and_is_sharded_afterwards(mode):
    x, w = typed(S(0), 4, 3), typed(S(0), 4, 3)
    seen = []

    @spmd.local_map(out_types=[{"tp": S(0)}, {"tp": V}])
    def body(x, *, scale):
        seen.extend([tp(x), tp(w), tp(x * w)])
        seen.append(spmd.local_map(lambda: tp(w[0]), out_types={"tp": V})())
        with pytest.raises(ValueError, match="from inside"):
            spmd.local_map(lambda: exec("raise ValueError('from inside')"), out_types={"tp": V})()
        seen.append(tp(w))
        return x * w[:1] * scale, w[1]

    product, row = body(x, scale=2.0)
    assert seen == [V] * 5
    assert (tp(product), tp(row), tp(x), tp(w)) == (S(0), V, S(0), S(0))
    product.sum().backward()
    assert (tp(x.grad), tp(w.grad)) == (S(0), S(0))


def test_axes_that_the_declarations_do_not_name_are_followed_as_usual():
    with comm.as_rank(Mesh(4, tp=2), 0, CheckBackend()), spmd.SpmdTypeMode():
        with spmd.no_typecheck():
            x = spmd.assert_type(torch.randn(4, 6), {"dp": S(0), "tp": S(1)})
        result = spmd.local_map(lambda x: x[:, :2].sum(0), out_types={"tp": V})(x)
        assert spmd.get_local_type(result) == {"dp": P, "tp": V}


def test_a_result_that_is_an_argument_leaves_the_argument_as_it_is(mode):
    x = typed(V, 3)
    result = spmd.local_map(lambda x: [x, (x,)], out_types={"tp": P})(x)
    assert (tp(result[0]), tp(result[1][0]), tp(x)) == (P, P, V)


def test_declarations_that_do_not_match_the_results_say_how_many_there_are(mode):
    x = typed(V, 3)
    with pytest.raises(ValueError, match=r"local_map of .*: 2 declarations for 1 tensors in the result"):
        spmd.local_map(lambda x: x * 2, out_types=[{"tp": P}, {"tp": P}])(x)
    with pytest.raises(ValueError, match="1 declarations for 2 positional arguments"):
        spmd.local_map(torch.add, out_types={"tp": V}, in_types=[{"tp": V}])(x, x)
    with pytest.raises(SpmdTypeError, match="out of range"):
        spmd.local_map(lambda x: x * 2, out_types={"tp": S(1)})(x)


class Experts(nn.Module):
    """Experts of which each rank of tp holds some."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 4, 4))
        spmd.set_spec(self, "up", spmd.ShardSpec("tp", 0, 1, 2, (4, 4, 4)))

    def forward(self, x):
        x = spmd.convert(x, "tp", src=R, dst=R)
        part = spmd.local_map(self.own, out_types={"tp": P})(x)
        return spmd.all_reduce(part, "tp", dst=I).pow(2).sum()

    def own(self, x):
        first = comm.rank("tp") * len(self.up)
        return sum(torch.tanh(x @ self.up[e]) * (first + e) for e in range(len(self.up)))


def test_a_report_lists_the_line_of_the_call():
    report = spmd.check(Experts, torch.zeros(3, 4), {"tp": 2})
    assert report.ok, str(report)
    assert any("test_local_code.py" in line and "local_map: own computes {'tp': P}" in line for line in report.trusted)


def test_the_repair_of_a_refused_position_is_a_scope(mode):
    weights = typed(S(0), 4, 3)
    for pick in (lambda: weights[1], lambda: weights.unbind(), lambda: weights.narrow(0, 1, 1), lambda: [*weights]):
        with pytest.raises(SpmdTypeError) as error:
            pick()
        assert any("spmd.local_map(" in repair for repair in error.value.repairs)


def test_parts_of_a_batch_over_experts_too():
    """With experts dp is two axes, and both shard the batch."""

    def step(model, optimizer, inputs):
        for part in inputs.chunk(2):
            model(part).pow(2).mean().backward()
        reduce_gradients(model)
        optimizer.step()

    def model_fn():
        model = nn.Linear(4, 4, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    report = spmd.check(model_fn, torch.zeros(8, 4), {"dp": 4, "ep": 2}, step=step)
    assert report.ok, str(report)
    assert any("used in the same way" in line and "test_local_code.py" in line for line in report.assumed)


# --- masks that are put on in other ways


def lookup(weight):
    with spmd.no_typecheck():
        ids = spmd.assert_type(torch.tensor([0, 3, 1]), {"tp": R})
    local = ids - comm.rank("tp") * weight.shape[0]
    outside = (local < 0) | (local >= weight.shape[0])
    return weight[local.masked_fill(outside, 0)], outside


MASKS = {
    "assigned in place": lambda out, outside: out.masked_fill_(outside[:, None], 0.0),
    "through a view": lambda out, outside: (out.view(3, 2, 2).mul_((~outside).float()[:, None, None]), out)[1],
    "of rows": lambda out, outside: torch.zeros(3, 4).index_put((~outside,), out[~outside]),
    "a product with floats": lambda out, outside: out * (1 - outside.to(out.dtype)).unsqueeze(-1),
    "where, with a number": lambda out, outside: out.where(~outside[:, None], 0.0),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_put_on_in_other_ways(name, mode):
    out, outside = lookup(typed(S(0), 2, 4))
    masked = MASKS[name](out * 1.0, outside)
    spmd.all_reduce(masked, "tp", dst=I)


@pytest.mark.parametrize("function", [lambda x: x, lambda x: x.exp(), lambda x: x.t(), lambda x: x + 1.0, torch.clone])
def test_what_nobody_masked_is_not_summed(function, mode):
    out, _ = lookup(typed(S(0), 2, 4))
    with pytest.raises(SpmdTypeError, match="these are not masked") as error:
        comm.all_reduce(function(out), "tp")
    assert "masked_fill" in error.value.repairs[0]


def test_positions_that_are_this_ranks_own_are_another_assumption(mode):
    x = typed(S(1), 3, 8)
    positions = spmd.local_map(lambda x: x.argmax(1, keepdim=True), out_types={"tp": V})(x)
    spmd.all_reduce(x.gather(1, positions).sum(), "tp", dst=I)
    assert any("numeric=True" in text for text, _ in mode.assumed)


def test_positions_that_are_trusted_to_vary_are_offsets_too():
    """Without a check of all ranks a rank is a plain number, and `trust` says that the positions vary."""
    with comm.as_rank(TP2, 1), spmd.SpmdTypeMode():
        weight, ids = typed(S(0), 2, 4), spmd.assert_type(torch.tensor([0, 3, 1]), {"tp": R})
        local = spmd.trust(ids - 2, "tp", V)
        outside = (local < 0) | (local >= 2)
        out = weight[local.masked_fill(outside, 0)]
        with pytest.raises(SpmdTypeError, match="these are not masked"):
            spmd.all_reduce(out, "tp", dst=I)
        spmd.all_reduce(out.masked_fill(outside[:, None], 0.0), "tp", dst=I)
