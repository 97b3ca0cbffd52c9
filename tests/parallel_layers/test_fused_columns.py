"""Column layers on one input that share their input-gradient collective."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.parallel_layers import ColumnParallelLinear, fuse_columns
from tests.parallel_layers.layer_parity import (
    F64,
    IN,
    close,
    draw,
    full_parameters,
    gradients,
    join_features,
    linear_reference,
    load,
    split_features,
    tp_mesh,
    whole_gradients,
)


def fused_case(options, x, gs, fulls, order, use):
    tp, rank = comm.size("tp"), comm.rank("tp")
    layers = [ColumnParallelLinear(IN, len(f["bias"]), dtype=F64, gather_output=False, **options) for f in fulls]
    for layer, full in zip(layers, fulls):
        load(layer, full)
    fuse_columns(layers)
    dim = options.get("sequence_dimension") if options.get("sequence_parallel_enabled") else None
    given = (x.chunk(tp, dim)[rank] if dim is not None else x).clone().requires_grad_()
    with torch.no_grad():
        for i in order:  # evaluating in between leaves nothing behind
            layers[i](given)
    outs = {}
    with comm.record() as forward:
        for i in order:
            outs[i] = layers[i](given)
            outs[i] = outs[i][0] + outs[i][1] if options.get("skip_bias_add") else outs[i]
    loss = sum((outs[i] * split_features(gs[i], 1, tp, rank)).sum() for i in use)
    with comm.record() as backward:
        loss.backward()
    counts = [call.verb for call in forward], [call.verb for call in backward]
    return [outs[i].detach() for i in range(len(layers))], given.grad, [gradients(layer) for layer in layers], counts


@pytest.mark.each_pair
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(bias=False),
        dict(skip_bias_add=True),
        dict(sequence_parallel_enabled=True, sequence_dimension=1),
        dict(input_is_replicated=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("order, use", [((0, 1, 2), (0, 1, 2)), ((2, 0, 1), (0, 2)), ((0, 1, 2, 0, 1, 2), (0, 1, 2))])
def test_fused_columns_are_their_layers_with_one_collective(tp, options, order, use):
    sizes = (16, 8, 8)
    fulls = [full_parameters(size, seed=10 * i) for i, size in enumerate(sizes)]
    x, gs = draw(4, 8, IN, seed=2), [draw(4, 8, size, seed=3 + i) for i, size in enumerate(sizes)]
    wants = [linear_reference(x, full, g) for full, g in zip(fulls, gs)]
    outs, xs, grads, counts = zip(*threads.run(tp_mesh(tp), fused_case, options, x, gs, fulls, order, use))
    for i, (want_out, _, want) in enumerate(wants):
        expected = want_out - (fulls[i]["bias"] if options.get("bias") is False else 0)
        close(join_features([out[i] for out in outs], 1), expected, f"output {i}")
        if i in use:
            for name, grad in whole_gradients([rank[i] for rank in grads]).items():
                close(grad, want[name], (i, name))
        else:  # an optimizer would decay a weight whose gradient is zero
            assert all(grad is None for rank in grads for grad in rank[i].values()), i
    want_x = sum(wants[i][1] for i in use)
    if options.get("sequence_parallel_enabled"):
        close(torch.cat(xs, 1), want_x)
    elif options.get("input_is_replicated"):
        close(torch.stack(xs).sum(0), want_x)
    else:
        close(xs[0], want_x)
    if tp > 1 and len(order) == 3:
        expected = ([], ["all_reduce"])
        if options.get("sequence_parallel_enabled"):
            expected = (["all_gather"], ["all_gather", "reduce_scatter"])
        if options.get("input_is_replicated"):
            expected = ([], [])
        assert counts == (expected,) * tp


def test_fused_columns_survive_copies_and_checkpointing():
    from neuronx_dist.parallel_layers.random import checkpoint

    fulls = [full_parameters(8, seed=10 * i) for i in range(2)]
    x = draw(4, IN, seed=2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = ColumnParallelLinear(IN, 8, dtype=F64, gather_output=False)
            self.b = ColumnParallelLinear(IN, 8, dtype=F64, gather_output=False)
            fuse_columns([self.a, self.b])

        def forward(self, x):
            return torch.sigmoid(self.a(x)) * self.b(x)

    def work():
        block = Block()
        load(block.a, fulls[0])
        load(block.b, fulls[1])
        found = []
        for model, run in ((block, lambda m, v: m(v)), (copy.deepcopy(block), checkpoint), (block, checkpoint)):
            model.zero_grad()
            given = x.clone().requires_grad_()
            for _ in range(2):  # two steps
                run(model, given).sum().backward()
            copied = copy.deepcopy(model)  # with whatever the steps left behind
            assert copied.a._siblings is copied.b._siblings and copied.a._siblings.layers[0] is copied.a
            assert copied.a._siblings is not block.a._siblings
            found.append([given.grad, *(param.grad for param in model.parameters())])
        return found

    for found in threads.run(tp_mesh(2), work):
        for other in found[1:]:
            for a, b in zip(found[0], other):
                close(a, b)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_input_of_another_call_has_its_own_outputs(tp):
    """Also where a layer was not called on the input before: its output of that one is not given out."""
    fulls = [full_parameters(8, seed=10 * i) for i in range(2)]
    x, y, g = draw(4, IN, seed=2), draw(4, IN, seed=3), draw(4, 8, seed=4)
    want_out, want_y, want = linear_reference(y, fulls[1], g)

    def work():
        layers = [ColumnParallelLinear(IN, 8, dtype=F64, gather_output=False) for _ in fulls]
        for layer, full in zip(layers, fulls):
            load(layer, full)
        fuse_columns(layers)
        given = y.clone().requires_grad_()
        layers[0](x)  # the second is not called on x
        out = layers[1](given)
        out.backward(split_features(g, 1, tp, comm.rank("tp")))
        return out.detach(), given.grad, gradients(layers[1])

    outs, ys, grads = zip(*threads.run(tp_mesh(tp), work))
    close(join_features(outs, 1), want_out)
    close(ys[0], want_y)
    for name, grad in whole_gradients(grads).items():
        close(grad, want[name], name)


def test_columns_that_cannot_be_fused():
    with comm.as_rank(tp_mesh(2), 0):

        def column(size=8, **options):
            return ColumnParallelLinear(IN, size, **(dict(gather_output=False) | options))

        for layers in (
            [column()],
            [column(), column(bias=False)],
            [column(), column(gather_output=True)],
            [column(), column(sequence_parallel_enabled=True)],
            [column(sequence_parallel_enabled=True, sequence_dimension=dim) for dim in (0, 1)],
            [column(), column(input_is_replicated=True)],
            [column(), column(reduce_dtype=None)],
            [column(), column(tensor_model_parallel_group="cp")],
            [column(), ColumnParallelLinear(2 * IN, 8, gather_output=False)],
        ):
            with pytest.raises(ValueError, match="fuse_columns needs"):
                fuse_columns(layers)


@pytest.mark.parametrize("frozen", [("a",), ("b",), ("a", "b"), ("x",), ("x", "a")], ids=str)
@pytest.mark.parametrize("options", [{}, dict(sequence_parallel_enabled=True, sequence_dimension=0)], ids=str)
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(options, frozen):
    fulls = {"a": full_parameters(8), "b": full_parameters(16, seed=10)}
    x = draw(4, 2, IN, seed=2)

    def work():
        results = []
        for fused in (False, True):
            layers = {
                name: ColumnParallelLinear(IN, len(full["bias"]), dtype=F64, gather_output=False, **options)
                for name, full in fulls.items()
            }
            for name, layer in layers.items():
                load(layer, fulls[name])
                layer.weight.requires_grad_(name not in frozen)
            if fused:
                fuse_columns([*layers.values()])
            given = x.clone().requires_grad_("x" not in frozen)
            sum(layer(given).square().sum() for layer in layers.values()).backward()
            grads = {"x": given.grad, **{name: layer.weight.grad for name, layer in layers.items()}}
            results.append((grads, [layer.bias.grad for layer in layers.values()]))
        return results

    for (grads, biases), (fused_grads, fused_biases) in threads.run(tp_mesh(2), work):
        assert {name for name, grad in fused_grads.items() if grad is None} == set(frozen)
        for name, grad in grads.items():
            if grad is not None:
                close(fused_grads[name], grad, name)
        for one, other in zip(biases, fused_biases):
            close(other, one)
