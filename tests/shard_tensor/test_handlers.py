"""Handlers of users, promotion of plain tensors, and functions without a handler."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function

from neuronx_dist import comm, spmd
from neuronx_dist.shard_tensor import (
    Replicate,
    Shard,
    ShardTensor,
    TensorPromotionMode,
    distribute_tensor,
    fallback,
    handlers,
    promotion_mode,
    sharded,
)
from neuronx_dist.shard_tensor.tensor import wrap
from neuronx_dist.spmd import I, P
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs


@pytest.fixture(autouse=True)
def _handlers_as_they_were():
    functions, dispatch = dict(handlers.FUNCTIONS), dict(handlers.DISPATCH)
    yield
    for table, before in ((handlers.FUNCTIONS, functions), (handlers.DISPATCH, dispatch)):
        table.clear()
        table.update(before)


def whole(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def sharded_dot_product(func, types, args, kwargs):
    """The tutorial's, in the form that is differentiable."""

    def extract_args(x, y, *args, **kwargs):
        return x, y

    x, y = extract_args(*args, **kwargs)
    if not x._spec.placements == y._spec.placements:
        raise NotImplementedError("Tensors must be sharded on the same device")
    mesh = x._spec.mesh
    local_dot_product = func(x.to_local(), y.to_local())
    total = spmd.all_reduce(local_dot_product, mesh.communicator(), src=P, dst=I)
    return ShardTensor.from_local(total, mesh, (Replicate(),), sharding_shapes="chunk")


def test_the_tutorials_dot_product():
    ShardTensor.register_function_handler(torch.dot, sharded_dot_product)

    def dot(mesh):
        x = distribute_tensor(whole(16).requires_grad_(), mesh, [Shard(0)], sizes=[(11, 5)], src=None)
        with comm.record() as calls:
            y = torch.dot(x, x)
        assert_close(y.to_local().detach(), whole(16).dot(whole(16)), "value")
        y.backward()
        assert_close(x.grad.full_tensor(), 2 * whole(16), "gradient")
        return [(call.verb, call.bytes) for call in calls]

    assert on_ranks(2, dot) == [[("all_reduce", 8)]] * 2


def scaled_sum(x, y):
    if has_torch_function((x, y)):
        return handle_torch_function(scaled_sum, (x, y), x, y)
    return (x * y).sum()


def test_functions_of_users():
    @sharded(scaled_sum)
    def on_shards(func, types, args, kwargs):
        x, y = args
        local = func(x.to_local(), y.to_local())
        return wrap(
            spmd.all_reduce(local, x.device_mesh.communicator(), src=P, dst=I),
            x._spec.replicated().with_shape(torch.Size()),
        )

    def call(mesh):
        x = distribute_tensor(whole(16).requires_grad_(), mesh, [Shard(0)], src=None)
        y = scaled_sum(x, x)
        y.backward()
        assert_close(x.grad.full_tensor(), 2 * whole(16), "gradient")
        return y.item()

    expected = scaled_sum(whole(16), whole(16)).item()
    assert on_ranks(2, call) == pytest.approx([expected] * 2)


def test_handlers_of_operators():
    calls = []

    def counted(x, *bins):
        calls.append(tuple(x.shape))
        return x.full_tensor().histc(*bins)

    ShardTensor.register_dispatch_handler(torch.ops.aten.histc.default, counted)
    with pytest.raises(TypeError, match="not an operator overload"):
        ShardTensor.register_dispatch_handler(torch.histc, counted)
    with pytest.raises(TypeError, match="must be functions"):
        ShardTensor.register_function_handler("dot", counted)

    def call(mesh):
        x = distribute_tensor(whole(4, 4), mesh, [Shard(0)], src=None)
        return torch.histc(x, 4, -1, 1).tolist()

    assert on_ranks(2, call) == [whole(4, 4).histc(4, -1, 1).tolist()] * 2
    assert calls == [(4, 4)] * 2


def test_handlers_of_named_operators():
    seen = []

    def handler(func, types, args, kwargs):
        seen.append(str(func))
        return func(args[0].full_tensor())

    ShardTensor.register_named_function_handler("aten.trace.default", handler)
    with pytest.raises(ValueError, match="not of the form"):
        ShardTensor.register_named_function_handler("trace", handler)
    try:

        def call(mesh):
            x = distribute_tensor(whole(4, 4), mesh, [Shard(0)], src=None)
            return torch.ops.aten.trace.default(x).item(), torch.ops.aten.trace(x).item()

        assert on_ranks(2, call) == [(whole(4, 4).trace().item(),) * 2] * 2
        assert len(seen) == 4
    finally:
        handlers._NAMED.clear()


def test_operators_are_computed_by_the_handlers_of_their_functions():
    def call(mesh):
        x = distribute_tensor(whole(4, 4), mesh, [Shard(0)], src=None)
        with fallback("error"):
            y = torch.ops.aten.add.Tensor(x, x)
            torch.ops.aten.mul_.Scalar(x, 3.0)
        assert y.placements == (Shard(0),) and torch.equal(y.full_tensor(), whole(4, 4) * 2)
        assert torch.equal(x.full_tensor(), whole(4, 4) * 3)

    on_ranks(2, call)


# --- plain tensors


def test_promotion():
    def meet(mesh):
        x = distribute_tensor(whole(16), mesh, [Shard(0)], src=None)
        assert (x + whole(16)).placements == (Shard(0),)
        with promotion_mode(TensorPromotionMode.DISABLED):
            assert (x * 2).placements == (Shard(0),)
            with pytest.raises(ValueError, match=r"a plain tensor of shape \(16,\) is mixed with a ShardTensor"):
                x + whole(16)
        with promotion_mode("warn"), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", UserWarning)
            x + whole(16)
        return [str(each.message).partition(":")[0] for each in seen]

    assert on_ranks(1, meet) == [["an elementwise function"]]
    with pytest.raises(ValueError, match="'loud' is not one of disabled, warn, silent"), promotion_mode("loud"):
        pass


# --- functions without a handler


def test_what_has_no_handler_is_gathered_and_says_so():
    def call(mesh):
        x = distribute_tensor(whole(16, 4).requires_grad_(), mesh, [Shard(0)], sizes=[(11, 5)], src=None)
        with fallback("error"), pytest.raises(NotImplementedError, match=r"hann.*512 bytes"):
            torch_hann(x)
        with warnings.catch_warnings(record=True) as seen, comm.record() as calls:
            warnings.simplefilter("always", UserWarning)
            for _ in range(2):
                y = torch_hann(x)
        with fallback("gather"):
            torch_hann(x)
        assert y._spec is x._spec, "a result of the same shape is split again"
        y.sum().backward()
        assert_close(x.grad.full_tensor(), torch.full((16, 4), 3.0, dtype=torch.float64), "gradient")
        return len(seen), verbs(calls)

    assert on_ranks(1, lambda mesh: None) == [None]
    (first, second) = on_ranks(2, call)
    assert first[0] + second[0] == 1, "once a call site"
    assert first[1] == second[1] == ["exchange"] * 2
    with pytest.raises(ValueError, match="not one of error, warn, gather"), fallback("loud"):
        pass


def torch_hann(x):
    if has_torch_function((x,)):
        return handle_torch_function(torch_hann, (x,), x)
    return x * 3


def test_writing_functions_without_a_handler_are_refused():
    def call(mesh):
        x = distribute_tensor(whole(16), mesh, [Shard(0)], src=None)
        with pytest.raises(NotImplementedError, match="writes in place"), fallback("gather"):
            x.put_(torch.tensor([0]), whole(1))

    on_ranks(2, call)


# --- other refusals


def test_operands_that_do_not_go_together():
    def call(mesh):
        x = distribute_tensor(whole(16), mesh, [Shard(0)], src=None)
        y = distribute_tensor(whole(16), type(mesh)("cpu", [[0, 1]]), [Replicate(), Shard(0)], src=None)
        with pytest.raises(ValueError, match=r"operands are on .* redistribute\(mesh, placements\)"):
            x + y
        with pytest.raises(IndexError, match="out of bounds"):
            x[16]
        with pytest.raises(IndexError, match="dim 1 is out of range"):
            x.sum(1)

    on_ranks(2, call)


def test_a_second_handler_of_the_package_is_refused_and_a_users_own_takes_the_place():
    def ours(func, types, args, kwargs):
        return "ours"

    ours.__module__ = "neuronx_dist.shard_tensor.ops.another"
    with pytest.raises(
        ValueError, match=r"dot has two handlers, .*ops\.matmul\.matmul and .*ops\.another\..*ours: register"
    ):
        ShardTensor.register_function_handler(torch.dot, ours)
    before = handlers.FUNCTIONS[torch.dot]
    try:
        ShardTensor.register_function_handler(torch.dot, lambda *_: "a user's")
        ShardTensor.register_function_handler(torch.dot, lambda *_: "a later one")
        assert (
            on_ranks(2, lambda mesh: torch.dot(*[distribute_tensor(whole(16), mesh, [Shard(0)], src=None)] * 2))
            == ["a later one"] * 2
        )
    finally:
        handlers.FUNCTIONS[torch.dot] = before


def test_the_promotion_mode_by_physicsnemo_s_accessors():
    def run(mesh):
        x = distribute_tensor(whole(16), mesh, [Shard(0)], src=None)
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
        ShardTensor.set_promotion_mode("disabled")
        with pytest.raises(ValueError, match="a plain tensor of shape .16,. is mixed with a ShardTensor"):
            x + whole(16)
        with ShardTensor.promotion_mode(TensorPromotionMode.SILENT):
            assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
            ShardTensor.set_promotion_mode(TensorPromotionMode.WARN)
            assert ShardTensor.get_promotion_mode() is TensorPromotionMode.WARN
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.DISABLED
        with pytest.raises(ValueError, match="promotion_mode 'loud' is not one of disabled, warn, silent"):
            ShardTensor.set_promotion_mode("loud")
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.DISABLED

    on_ranks(2, run)
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT  # of this thread
