"""Communication of the linear layers, forward and backward, and its order."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.parallel_layers import ColumnParallelLinear, RowParallelLinear, fuse_columns
from tests.parallel_layers.layer_parity import (
    F64,
    IN,
    OUT,
    close,
    draw,
    full_parameters,
    gradients,
    linear_reference,
    load,
    split_features,
    tp_mesh,
    whole_gradients,
)
from tests.support.pool import processes


def collectives(layer, shape, x_needs_grad=True):
    """(forward, backward) collectives of a layer as `verb shape` lists."""
    x = torch.ones(*shape).requires_grad_(x_needs_grad)
    with comm.record() as forward:
        out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    with comm.record() as backward:
        if out.requires_grad:
            out.sum().backward()
    for calls in (forward, backward):
        assert all(call.axis == "tp" and call.dtype == torch.float32 for call in calls)
    return tuple([f"{call.verb} {list(call.shape)}" for call in calls] for calls in (forward, backward))


TABLE = [
    (lambda: ColumnParallelLinear(8, 16, gather_output=False), (3, 8), [], ["all_reduce [3, 8]"]),
    (lambda: ColumnParallelLinear(8, 16), (3, 8), ["all_gather [3, 8]"], ["all_reduce [3, 8]"]),
    (
        lambda: ColumnParallelLinear(8, 16, gather_output=False, sequence_parallel_enabled=True),
        (3, 2, 8),
        ["all_gather [3, 2, 8]"],
        ["all_gather [3, 2, 8]", "reduce_scatter [6, 2, 8]"],
    ),
    (lambda: ColumnParallelLinear(8, 16, gather_output=False, input_is_replicated=True), (3, 8), [], []),
    (lambda: RowParallelLinear(16, 8, input_is_parallel=True), (3, 8), ["all_reduce [3, 8]"], []),
    (lambda: RowParallelLinear(16, 8), (3, 16), ["all_reduce [3, 8]"], ["all_gather [3, 8]"]),
    (lambda: RowParallelLinear(16, 8, input_is_parallel=True, reduce_output=False), (3, 8), [], []),
    (
        lambda: RowParallelLinear(16, 8, input_is_parallel=True, sequence_parallel_enabled=True),
        (4, 2, 8),
        ["reduce_scatter [4, 2, 8]"],
        ["all_gather [2, 2, 8]"],
    ),
]


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_collectives_of_a_layer(number):
    build, shape, forward, backward = TABLE[number]
    assert threads.run(tp_mesh(2), lambda: collectives(build(), shape)) == [(forward, backward)] * 2
    assert threads.run(tp_mesh(1), lambda: collectives(build(), (4, 2, build().input_size))) == [([], [])]


def test_nothing_is_communicated_for_gradients_that_nobody_needs():
    def work():
        column = ColumnParallelLinear(8, 16, gather_output=False)
        sequence = ColumnParallelLinear(8, 16, gather_output=False, sequence_parallel_enabled=True)
        found = [collectives(column, (3, 8), x_needs_grad=False)[1], collectives(sequence, (3, 8), False)[1]]
        assert column.weight.grad is not None and sequence.bias.grad is not None
        for layer in (column, sequence, row := RowParallelLinear(16, 8, input_is_parallel=True)):
            layer.requires_grad_(False)
            found.append(collectives(layer, (3, 8))[1])
            found.append(collectives(layer, (3, 8), False)[1])
            assert layer.weight.grad is None or layer is not row
        return found

    expected = [[], ["all_gather [3, 8]"], ["all_reduce [3, 8]"], [], ["reduce_scatter [6, 8]"], [], [], []]
    assert threads.run(tp_mesh(2), work) == [expected] * 2


def test_frozen_weights_leave_the_other_gradients_as_they_are():
    full, x, g = full_parameters(), draw(4, 8, IN, seed=2), draw(4, 8, OUT, seed=3)
    _, want_x, want = linear_reference(x, full, g)

    def work(frozen, options):
        layer = ColumnParallelLinear(IN, OUT, dtype=F64, gather_output=False, **options)
        load(layer, full)
        for name in frozen:
            getattr(layer, name).requires_grad_(False)
        given = (x.chunk(2, 1)[comm.rank("tp")] if options else x).clone().requires_grad_()
        layer(given).backward(split_features(g, 1, 2, comm.rank("tp")))
        assert all(getattr(layer, name).grad is None for name in frozen)
        return given.grad, gradients(layer)

    for frozen in (["weight"], ["bias"], ["weight", "bias"]):
        for options in ({}, dict(sequence_parallel_enabled=True, sequence_dimension=1)):
            xs, grads = zip(*threads.run(tp_mesh(2), work, frozen, options))
            close(torch.cat(xs, 1) if options else xs[0], want_x)
            for name, grad in whole_gradients(grads).items():
                close(grad, want[name], name)


class Products(TorchDispatchMode):
    """Notes how many collectives had been started or awaited at each matrix product."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.seen = calls, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            self.seen.append((name, tuple(function(*args, **(kwargs or {})).shape), [c.verb for c in self.calls]))
        return function(*args, **(kwargs or {}))


def order_of(layer, x):
    """Operations of backward: matrix products by shape, and between them the starts and waits of collectives."""
    out = layer(x.requires_grad_())
    with comm.record(waits=True) as calls, Products(calls) as products:
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    events, done = [], 0
    for _, shape, verbs in products.seen:
        events += verbs[done:]
        done = len(verbs)
        events.append(shape)
    return events + [call.verb for call in calls][done:]


@pytest.mark.slow
def test_the_input_gradient_is_on_its_way_while_the_weight_gradient_is_computed():
    """By order, not by time: launched before the weight gradient, awaited after it."""

    def column():
        return order_of(ColumnParallelLinear(IN, OUT, gather_output=False), torch.ones(6, IN))

    dx, dw = (6, IN), (OUT // 2, IN)
    assert threads.run(tp_mesh(2), column) == [[dx, "all_reduce", dw, "wait:all_reduce"]] * 2
    assert processes(2).run(column_order, mesh=dict(tp=2)) == [[dx, "all_reduce", dw, "wait:all_reduce"]] * 2

    def sequence():
        layer = ColumnParallelLinear(IN, OUT, gather_output=False, sequence_parallel_enabled=True)
        return order_of(layer, torch.ones(3, IN))

    events = ["all_gather", dx, "reduce_scatter", "wait:all_gather", dw, "wait:reduce_scatter"]
    assert threads.run(tp_mesh(2), sequence) == [events] * 2

    def fused():
        layers = nn.ModuleList(ColumnParallelLinear(IN, OUT, gather_output=False) for _ in range(3))
        fuse_columns(list(layers))
        return order_of(lambda x: sum(layer(x) for layer in layers), torch.ones(6, IN))

    assert threads.run(tp_mesh(2), fused) == [[dx, dx, dx, "all_reduce", dw, dw, dw, "wait:all_reduce"]] * 2


def column_order():
    return order_of(ColumnParallelLinear(IN, OUT, gather_output=False), torch.ones(6, IN))
