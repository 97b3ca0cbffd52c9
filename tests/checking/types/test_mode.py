"""Types of small programs: the checker's parts, one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types.handlers.operators import _renumbered, cut
from neuronx_dist.checking.types.messages.loss_errors import scale_error
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.gradients.reduce import reduce_gradients
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V, get_local_type, trust, typecheck
from neuronx_dist.spmd.axes import atoms_of, order_of
from neuronx_dist.spmd.types import Shard, repeated
from neuronx_dist.spmd.watching import active, see_through
from tests.checking.types.typed_tensors import MESH, checked, typed, types


@pytest.fixture
def mode():
    with checked() as mode:
        yield mode


# --- the mode


def test_replicas_split_tp_into_two_atoms():
    """A mode takes the parts that the layers of the job have; one that was given a mesh says what is missing."""
    mesh = Mesh(4, tp=4)
    with comm.as_rank(mesh, 0, CheckBackend()):
        layer = ColumnParallelLinear(4, 4, bias=False, gather_output=False, replicas=2)
        with typecheck():
            out = layer(spmd.assert_type(torch.randn(2, 4), {"tp": I}))
            assert get_local_type(out) == {"tp/2": S(1), "tp%2": S(1)}
            assert get_local_type(layer.weight * 1) == {"tp/2": S(0), "tp%2": I}
        with typecheck(Mesh(4, tp=4, tp_replicas=2)):
            assert get_local_type(layer.weight * 1) == {"tp/2": S(0), "tp%2": I}
        layer = ColumnParallelLinear(4, 4, bias=False, gather_output=False, replicas=2)
        with typecheck(mesh), pytest.raises(ValueError, match=r"Mesh\(\.\.\., tp_replicas=2\)"):
            layer.weight * 1
    for axis, atoms in (("tp", ("tp/2", "tp%2")), ("world", ("tp/2", "tp%2")), ("tp%2", ("tp%2",))):
        assert atoms_of(axis, Mesh(4, tp=4, tp_replicas=2)) == atoms
    assert atoms_of("tp", Mesh(4, tp=4, tp_replicas=4)) == ("tp%4",)  # one key/value head: the outer part is one rank
    assert sorted(["tp%2", "dp", "tp/2", "pp"], key=order_of) == ["pp", "dp", "tp/2", "tp%2"]


def test_nothing_is_installed_when_it_is_off():
    before = torch.autograd.Function.__dict__["apply"]
    with typecheck():
        assert torch.autograd.Function.__dict__["apply"] is not before
    assert torch.autograd.Function.__dict__["apply"] is before
    assert active() is None


def test_a_tensor_without_a_type_is_an_error_that_says_how_to_declare_it(mode):
    with spmd.no_typecheck():
        x = torch.randn(3)
    with pytest.raises(SpmdTypeError, match=r"has no type") as error:
        x + 1
    assert error.value.repairs[0].startswith("assert_type(x") or "assert_type(x" in error.value.repairs[0]
    mode.strict = False
    x + 1
    assert any("made before the check" in text for text, _ in mode.assumed)


def test_level_l_forgets_along_which_dim_things_are_sharded():
    with comm.as_rank(MESH, 0), typecheck(level="L"):
        x, w = typed(4, 8, tp=S(1)), typed(16, 8, tp=S(1))
        assert types(x)[1] is V
        assert types(F.linear(x, w))[1] is V


def test_a_contraction_over_a_sharded_dim_is_partial_and_everything_else_follows(mode):
    x, w = typed(4, 8, tp=S(1), dp=S(0)), typed(16, 8, tp=S(1))
    y = F.linear(x, w)
    assert types(y) == (S(0), P)
    with pytest.raises(SpmdTypeError, match="not linear"):
        F.gelu(y)
    with pytest.raises(SpmdTypeError, match="once for each rank"):
        y + typed(4, 16, dp=S(0))
    assert types(spmd.all_reduce(y, "tp", dst=I)) == (S(0), I)
    assert types(x.sum()) == (P, P)
    assert types(x.amax(1)) == (S(0), P("max"))
    assert types(x.mean()) == (P("avg"), P("avg"))
    assert types(x.mean(1)) == (S(0), P("avg"))


def test_no_typecheck_leaves_results_without_types(mode):
    x = typed(3)
    with spmd.no_typecheck():
        y = x * 2
    assert not spmd.has_local_type(y)


# --- losses and gradients


@pytest.mark.parametrize(("kind", "says"), [(R, "every rank counts it"), (V, "summands")])
def test_backward_begins_at_i_or_p_only(mode, kind, says):
    loss = typed(1, grad=True, tp=kind, dp=P)
    with pytest.raises(SpmdTypeError, match=says):
        (loss * 2).sum().backward()


def test_a_loss_that_varies_over_data_is_taken_for_a_summand_and_listed(mode):
    (typed(1, grad=True, tp=I, dp=V) * 2).sum().backward()
    assert any("summands" in text for text, _ in mode.assumed)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = ColumnParallelLinear(8, 16, gather_output=False)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_gradients_have_dual_types_until_they_are_reduced(mode):
    with spmd.no_typecheck():
        model = MLP()
    mode.watch(model)
    model(typed(2, 4, 8, tp=I, dp=S(0))).mean().backward()
    before = {name: types(param.grad) for name, param in model.named_parameters()}
    assert before["norm.weight"] == before["down.bias"] == (P("avg"), I)
    assert before["up.weight"] == (P("avg"), S(0)) and before["down.weight"] == (P("avg"), S(1))
    reduce_gradients(model)
    after = {name: types(param.grad)[0] for name, param in model.named_parameters()}
    assert set(after.values()) == {R}
    assert types(model.up.weight.grad)[1] == S(0)


def test_a_constant_with_a_gradient_is_r_beside_a_value_without(mode):
    weight = torch.ones(2, 4, requires_grad=True)
    product = typed(2, 4, tp=I) * weight
    assert types(product) == (R, R), "the gradient of the weight is a partial sum"
    assert types(typed(2, 4, tp=I) * torch.ones(2, 4)) == (R, I)


def test_backward_after_a_reduction_is_an_accumulation_onto_the_sum(mode):
    with spmd.no_typecheck():
        model = MLP()
    x = typed(2, 4, 8, tp=I, dp=S(0))
    model(x).sum().backward()
    grad = model.norm.weight.grad
    comm.all_reduce(grad, "dp", out=grad)
    model(x).sum().backward()
    with pytest.raises(SpmdTypeError, match="when backward added to it"):
        _ = model.norm.weight.grad


def test_averaged_gradients_may_be_added_to(mode):
    """A value that is equal on all ranks is their mean: a mean plus that value is a mean; but not one of sums."""
    with spmd.no_typecheck():
        model = MLP()
    x = typed(2, 4, 8, tp=I, dp=S(0))
    model(x).mean().backward()
    reduce_gradients(model)
    model(x).mean().backward()
    assert types(model.norm.weight.grad)[0] is P("avg")
    with pytest.raises(SpmdTypeError, match="when backward added to it"):
        model(x).sum().backward()
        _ = model.norm.weight.grad


# --- writes


def test_a_write_through_a_view_changes_the_type_of_all_views(mode):
    x = typed(4, 8)
    row = x[0]
    row.copy_(typed(8, tp=V))
    assert types(row)[1] is V
    assert types(x * 1)[1] is V


def test_writes_through_data_are_refused(mode):
    x = typed(4)
    with pytest.raises(SpmdTypeError, match=r"\.data"):
        x.data.add_(1)


def test_a_write_that_the_checker_did_not_see_is_an_error_at_the_next_use(mode):
    x = typed(4)
    with spmd.no_typecheck():
        x.add_(1)
    with pytest.raises(SpmdTypeError, match="where the checker does not see it"):
        x * 2


# --- ranks as numbers


def test_what_is_computed_from_a_rank_varies(mode):
    rank = comm.rank("tp")
    x = typed(4, 8)
    assert types(x + rank)[1] is V
    assert types(x.narrow(1, rank * 2, 4))[1] is V
    assert types(x[rank])[1] is V
    assert types(torch.tensor(rank) + x)[1] is V
    assert types(x * 2)[1] is R


def test_picking_this_ranks_piece_of_what_is_replicated_shards_it(mode):
    x = typed(4, 8)
    assert types(x.chunk(2, dim=1)[comm.rank("tp")]) == (R, S(1))
    assert types(torch.split(x, 2)[comm.rank("tp")]) == (R, S(0))
    assert types(x.chunk(2, dim=1)[0]) == (R, R)
    rank = comm.rank("tp")
    assert types(x.narrow(1, rank * 4, 4)) == types(x[:, rank * 4 : (rank + 1) * 4]) == (R, S(1))
    assert types(x[rank * 2 : rank * 2 + 2]) == (R, S(0)) and not mode.assumed
    assert types(x[rank : rank + 2]) == types(x[(1 - rank) * 2 : (2 - rank) * 2]) == (R, V)  # not one after the other
    assert any("another part" in text for text, _ in mode.assumed)


# --- helpers


def test_trust_is_listed_and_free_when_off():
    x = torch.zeros(3)
    assert trust(x, "tp", P) is x and not spmd.has_local_type(x)
    with comm.as_rank(MESH, 0), typecheck() as mode:
        y = trust(typed(3, tp=V), "tp", P)
        assert types(y)[1] is P
        assert any("is P on tp" in text for text, _ in mode.trusted)


def test_forget_is_for_block_diagonal_weights(mode):
    x, w = typed(4, 8, tp=S(1)), typed(8, 8, tp=S(0))
    y = F.linear(spmd.forget(x, "tp"), spmd.forget(w, "tp"))
    assert types(y)[1] is V


def test_see_through_follows_the_body_of_a_function_that_hands_itself_to_modes(mode):
    from torch.overrides import handle_torch_function, has_torch_function_unary

    def double(x):
        return handle_torch_function(double, (x,), x) if has_torch_function_unary(x) else body(x)

    def body(x):
        return x + x

    see_through(double, body)
    assert types(double(typed(3, tp=P)))[1] is P


def test_flat_buffers_remember_the_types_of_their_parts(mode):
    a, b = typed(4, tp=S(0), dp=P), typed(3, tp=I, dp=P)
    with torch.no_grad():
        flat = torch.cat([a, b]).mul_(0.5)
        flat = comm.all_reduce(flat, "dp", out=flat)
        first, second = flat.split([4, 3])
    assert types(first) == (R, S(0)) and types(second) == (R, I)
    with torch.no_grad(), pytest.raises(SpmdTypeError, match="split"):
        torch.cat([a, b]).exp()


# --- dims of size 1 on a rank


def test_merged_dims_whose_order_no_type_can_say_leave_one_axis_varying(mode):
    """The first of two axes on one dim has the outer factor in the mesh, here the inner one; both are 1 long."""
    in_order, other_way = typed(1, 1, dp=S(0), tp=S(1)).flatten(), typed(1, 1, tp=S(0), dp=S(1)).flatten()
    assert [str(one) for one in types(in_order)] == ["S(0)", "S(0)"]
    assert [str(one) for one in types(other_way)] == ["V", "S(0)"]


def test_a_dim_of_one_that_does_not_broadcast_is_a_piece_beside_a_whole(mode):
    table = typed(4, 1, tp=S(1))
    index = spmd.assert_type(torch.zeros(2, 1, dtype=torch.long), {"dp": R, "tp": R})
    with pytest.raises(SpmdTypeError, match="a dim of 1 is this rank's piece"):
        torch.gather(table, 0, index)
    assert types(table * typed(4, 1)) == (R, S(1))  # this one broadcasts


# --- writes in place, through views of all of the memory and of a part


def test_a_write_with_a_gradient_makes_the_base_what_was_written(mode):
    held, source = typed(6, tp=I), typed(2, 3, grad=True)
    held.view(2, 3).copy_(source)
    assert types(held) == (R, R) and held.requires_grad
    plain = typed(6, tp=I)
    plain.view(2, 3).copy_(typed(2, 3))  # a value alone: it keeps the dual type that its gradient would have
    assert types(plain) == (R, I)


@pytest.mark.parametrize("kind", [V, S(1), I])
def test_a_part_that_becomes_constant_leaves_the_type(mode, kind):
    x = typed(2, 4, tp=kind) * 2
    x[:1].zero_()
    assert types(x) == (R, kind)
    x[1:].fill_(1.0)
    assert types(x) == (R, kind)


def test_a_write_of_all_memory_makes_a_sum_a_value_and_a_value_a_sum(mode):
    total, value = typed(6, tp=P), typed(6)
    total.view(2, 3).copy_(typed(2, 3))
    value.view(2, 3).copy_(typed(2, 3, tp=P))
    assert types(total) == (R, R) and types(value) == (R, P)


def test_a_write_that_was_written_over_counts_no_more(mode):
    buffer = torch.zeros(4)
    buffer[:2].copy_(typed(2, tp=P))
    assert types(buffer) == (R, P)
    buffer.zero_()
    buffer[2:].copy_(typed(2))
    assert types(buffer) == (R, R)


def test_flat_buffers_that_are_scattered_and_gathered(mode):
    """Each part of a piece varies; gathered again it is what it was, reduced."""
    a, b = typed(4, tp=S(0), dp=P), typed(4, tp=I, dp=P)
    with torch.no_grad():
        mine = comm.reduce_scatter(torch.cat([a, b]), "dp")
        assert [part[1].get("dp") for part in mode.note(mine, "").extra.parts] == [V, V]
        first, second = comm.all_gather(mine, "dp").split([4, 4])
    assert types(first) == (R, S(0)) and types(second) == (R, I)


def test_lists_that_are_written_in_place(mode):
    x, scaled, factor = typed(4, tp=P), typed(4), typed(4, tp=V)
    part = scaled[:2]
    with torch.no_grad():
        torch._foreach_add_([x], [typed(4, tp=P)])
        torch._foreach_mul_([scaled], [factor])
    assert types(x) == (R, P) and types(scaled) == (R, V)
    assert types(part * 1) == (R, V)  # the same memory


def test_forgetting_what_is_not_sharded_assumes_nothing(mode):
    spmd.forget(typed(4), "tp")
    assert not mode.trusted
    spmd.forget(typed(4, tp=S(0)), "tp")
    assert [*mode.trusted] and "sharding over tp is not followed" in str(mode.trusted)


def test_a_loss_that_varies_over_data_may_not_vary_over_tp(mode):
    loss = typed(1, grad=True, dp=V, tp=V).squeeze(0)
    with pytest.raises(SpmdTypeError, match="tp"):
        loss.backward()


@pytest.mark.parametrize(("axis", "over", "stride", "shard"), [
    ("tp", "dp", 2, True),  # one block each: the mesh has dp outside
    ("dp", "tp", 2, False),  # and never inside
    ("dp", "tp", 4, True),  # blocks are left: tp is inside of them
])  # fmt: skip
def test_pieces_of_a_cut_are_shards_in_the_order_of_the_mesh_alone(mode, axis, over, stride, shard):
    others = {axis: Shard(0, stride)}
    assert (cut(others, (over,), 0, 2) is not V) == shard
    assert others == {axis: Shard(0, stride // 2)}


def test_what_varies_may_be_declared_a_shard(mode):
    x = typed(4, tp=V)
    assert types(spmd.assert_type(x, {"tp": S(0)})) == (R, S(0))
    assert types(x) == (R, S(0))


def test_one_loss_or_several_of_another_scale_are_named_as_such(mode):
    one, other = typed(1, grad=True, dp=P), typed(1, grad=True, dp=P("avg"))
    alone, both = str(scale_error(mode, [one], "dp")), str(scale_error(mode, [one, other], "dp"))
    assert "on dp it is P, and its gradients are averaged over dp" in alone and "a loss that is a mean" in alone
    assert 'on dp they are P and P("avg"): gradients of one are to be averaged' in both and "multiply the sum" in both


@pytest.mark.parametrize("name, src, dst, stack, before, after", [
    ("all_gather", V, R, 1, {0, 1, 2}, {0, 2, 3}),  # a new dim 1
    ("all_gather", S(1), R, 0, {0, 1, 2}, {0, 2}),  # the pieces of dim 1 need not be equal
    ("reduce_scatter", P, V, 1, {0, 1, 2}, {0, 1}),  # dim 1 is gone
    ("reduce_scatter", P, S(1), 0, {0, 1, 2}, {0, 2}),  # what other ranks have of dim 1 is no more the same
    ("all_reduce", P, R, 0, {0, 1}, {0, 1}),
])  # fmt: skip
def test_dims_along_which_values_repeat_are_counted_anew(name, src, dst, stack, before, after):
    types = _renumbered({"dp": repeated(frozenset(before))}, src, dst, name, stack, 3)
    assert types == {"dp": repeated(frozenset(after))}


READ = {
    "torch.tensor([[x, 1.0]])": lambda x: torch.tensor([[x, 1.0]]),
    "torch.as_tensor([[1.0, x]])": lambda x: torch.as_tensor([[1.0, x]]),
    "x.new_tensor([[x]])": lambda x: x.new_tensor([[x]]),
    "torch.ones((x,))": lambda x: torch.ones((x.long(),)),
    "torch.rand(2, x)": lambda x: torch.rand(2, x.long()),
    "torch.randint(0, x, (2,))": lambda x: torch.randint(0, 1 + x.long().abs(), (2,)),
    "x.new_zeros(x)": lambda x: x.new_zeros(x.long()),
    "of_all[:, [x, 0]]": lambda x: torch.ones(3, 4)[:, [x.long(), 0]],
    "of_all[:, x:]": lambda x: torch.ones(3, 4)[:, x.long() :],
    "of_all[:, x:] = 0": lambda x: torch.ones(3, 4).__setitem__((0, slice(x.long(), None)), 0.0),
}


@pytest.mark.parametrize("name", READ)
def test_numbers_that_are_read_inside_of_an_argument_are_equal_on_all_ranks(mode, name):
    """Numbers that are no operands: what differs by rank was called equal."""
    READ[name](typed(()) * 0)
    with pytest.raises(SpmdTypeError, match="a Python number made of it would differ between the ranks of tp"):
        READ[name](typed((), tp=V) * 0)


def test_tensors_of_a_list_and_of_full_give_their_type(mode):
    equal, varying, partial = (typed((), tp=type_) for type_ in (R, V, P))
    for make in (
        lambda *xs: torch.tensor([*xs]),
        lambda *xs: equal.new_tensor([*xs]),
        lambda x: torch.full((2,), x),
        lambda x: equal.new_full((2,), x),
        lambda x: torch.full_like(torch.ones(2), x),
    ):
        assert [str(spmd.get_axis_local_type(make(x), "tp")) for x in (equal, varying, partial)] == [*"RVP"]
    for constant in (2.0, equal, varying):
        with pytest.raises(SpmdTypeError, match="adding a constant|plus, a varying value|added once for each"):
            torch.tensor([constant, partial])
    assert spmd.get_axis_local_type(torch.tensor([partial, partial]), "tp") is P
    assert spmd.get_axis_local_type(torch.tensor([equal, varying, 2.0]), "tp") is V
