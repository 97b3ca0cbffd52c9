"""Types of autograd functions: of their outputs, of saved tensors, and of the results of their backward."""

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V, convert
from tests.checking.types.typed_tensors import checked, typed, types


@pytest.fixture
def mode():
    with checked() as mode:
        yield mode


class Fused(torch.autograd.Function):
    """A row-parallel product; what its parts communicate is up to the test."""

    forward_sum, backward_sum = True, False

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        out = F.linear(x, w)
        return comm.all_reduce(out, "tp") if Fused.forward_sum else out

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad_x = grad @ w
        return comm.all_reduce(grad_x, "tp") if Fused.backward_sum else grad_x, grad.flatten(0, -2).t() @ x.flatten(
            0, -2
        )


class Doubled(torch.autograd.Function):
    """Writes its operand."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_inside_of_a_checkpoint_what_writes_its_operand_writes_it_once(mode):
    """The call that is made first, to learn of types by trial, is made on copies."""
    x = typed(4, 4, grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: Doubled.apply(x + 0), x, use_reentrant=False)
    assert torch.equal(y, 2 * x)


class Scaled(torch.autograd.Function):
    """Takes a list, as functions of `torch.library` do."""

    @staticmethod
    def forward(ctx, x, factors):
        ctx.factors = factors
        return x * factors[0]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factors[0], None


def test_inside_of_a_checkpoint_an_argument_may_be_a_list(mode):
    x = typed(4, 4, grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: Scaled.apply(x, [3.0, [None]]), x, use_reentrant=False)
    assert torch.equal(y, 3 * x)


def test_inside_of_a_checkpoint_an_argument_may_have_no_hash(mode):
    x = typed(4, 4, grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: Scaled.apply(x, {0: 3.0}), x, use_reentrant=False)
    assert torch.equal(y, 3 * x)


def test_inside_of_a_checkpoint_a_decomposed_call_saves_its_tensors_once(mode):
    """The types of `index_add` are those of a sum, which is computed for them alone."""
    x, index = typed(4, 4, grad=True, dp=S(0), tp=I), typed(4, tp=I).clamp(0, 3).long()
    y = torch.utils.checkpoint.checkpoint(lambda x: x.exp().index_add(1, index, x * x), x, use_reentrant=False)
    (grad,) = torch.autograd.grad(y.sum(), (x,))
    assert types(grad) == (S(0), I)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class ProductInTwoParts(Product):
    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


@pytest.mark.parametrize("function", [Product, ProductInTwoParts])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_a_function_saves_keeps_its_type(mode, function, checkpointed):
    """Hooks on saved tensors, as a checkpoint's, lose what is written on tensors."""
    x, w = typed(4, 8, grad=True, dp=S(0), tp=I), typed(8, 8, grad=True, dp=R, tp=I)

    def forward(x, w):
        return function.apply(x * 1, w * 1)

    y = torch.utils.checkpoint.checkpoint(forward, x, w, use_reentrant=False) if checkpointed else forward(x, w)
    grad_x, grad_w = torch.autograd.grad(y.sum(), (x, w))
    assert types(grad_x) == (S(0), I) and types(grad_w)[0] is P and types(grad_w)[1] is I
    assert not mode.assumed


class Buffered(torch.autograd.Function):
    """Adds to the gradients that other uses of its operand have, where torch offers a buffer (torch 2.15)."""

    returned = 2.0

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        (buffer,) = getattr(ctx, "input_grad_buffers", (None,))
        if buffer is None:
            return Buffered.returned * grad
        buffer.add_(2 * grad)
        return None


def test_a_function_that_adds_to_buffers_is_checked_by_what_it_else_returns(mode, monkeypatch):
    x = typed(4, 8, grad=True, dp=S(0), tp=I)
    shared = x * 1
    (Buffered.apply(shared).sum() + (3 * shared).sum()).backward()
    assert types(x.grad) == (S(0), I)
    with spmd.no_typecheck():
        assert torch.equal(x.grad, torch.full_like(x, 5))
    offered = hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers")
    assert [text for text, _ in mode.assumed] == offered * [
        "Buffered.backward: what it adds to input_grad_buffers is what it else returns"
    ]
    monkeypatch.setattr(Buffered, "returned", typed(8, tp=V, dp=R))
    shared = x * 1
    with pytest.raises(SpmdTypeError, match="Buffered.backward"):
        Buffered.apply(shared).sum().backward()


@pytest.fixture
def fused(monkeypatch):
    return lambda **options: [monkeypatch.setattr(Fused, name, value) for name, value in options.items()]


def test_an_output_that_a_collective_made_equal_is_what_its_backward_is_right_for(mode):
    x, w = typed(2, 4, 8, grad=True, tp=S(2), dp=S(0)), typed(16, 8, grad=True, tp=S(1))
    y = Fused.apply(x, w)
    assert types(y) == (S(0), I)
    y.sum().backward()
    assert types(x.grad) == (S(0), S(2))
    assert types(w.grad) == (P, S(1))


def test_a_sum_too_many_in_a_backward_is_found(mode, fused):
    fused(backward_sum=True)
    x, w = typed(2, 4, 8, grad=True, tp=S(2), dp=S(0)), typed(16, 8, grad=True, tp=S(1))
    with pytest.raises(SpmdTypeError, match=r"added up|multiplies it"):
        Fused.apply(x, w).sum().backward()


def test_a_missing_sum_in_a_forward_is_found_where_the_result_is_used(mode, fused):
    fused(forward_sum=False)
    x, w = typed(2, 4, 8, grad=True, tp=S(2), dp=S(0)), typed(16, 8, grad=True, tp=S(1))
    y = Fused.apply(x, w)
    assert types(y) == (S(0), P)
    with pytest.raises(SpmdTypeError, match="not linear"):
        F.silu(y)


class Composed(Fused):
    """The function of `Fused`, with a statement of what it does."""

    @staticmethod
    def composition(x, w):
        return spmd.all_reduce(F.linear(x, w), "tp", dst=I)


@pytest.mark.parametrize("what", ["neither", "forward", "backward"])
def test_a_composition_is_compared_with_the_body(mode, monkeypatch, what):
    if what == "forward":  # of twice the size: nothing that types see
        monkeypatch.setattr(
            Composed, "composition", lambda x, w: spmd.all_reduce(torch.cat([F.linear(x, w)] * 2), "tp", dst=I)[:2]
        )
    if what == "backward":
        monkeypatch.setattr(
            Composed, "composition",
            lambda x, w: spmd.all_reduce(F.linear(convert(convert(x, "tp", src=S(2), dst=V), "tp", src=V, dst=S(2)), w),
                                         "tp", dst=R),
        )  # fmt: skip
    x, w = typed(2, 4, 8, grad=True, tp=S(2), dp=S(0)), typed(16, 8, grad=True, tp=S(1))
    if what == "neither":
        Composed.apply(x, w)
        assert [event.verb for event in comm.current().backend.events] == ["all_reduce"]  # the body's alone
    else:
        with pytest.raises(SpmdTypeError, match="composition"):
            Composed.apply(x, w)


def test_the_package_states_what_it_fuses():
    from neuronx_dist.parallel_layers import autograd_linear

    assert callable(autograd_linear.ColumnLinear.composition) and callable(autograd_linear.RowLinear.composition)
