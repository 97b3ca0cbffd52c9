"""Column- and row-parallel linear layers are one linear layer: outputs and all gradients, whatever the options."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.parallel_layers.layers import linear_with_async_allreduce
from neuronx_dist.spmd import spec_of
from tests.parallel_layers.layer_parity import (
    F64,
    IN,
    OUT,
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
from tests.support.pool import processes

SHAPES = {2: (4,), 3: (4, 8), 4: (4, 8, 4)}  # leading dims of inputs with 2, 3, 4 dims


def sequence_dim(options):
    return (options.get("sequence_dimension") or 0) if options.get("sequence_parallel_enabled") else None


def step(layer, given, grad):
    """Output, input gradient and gradients of the parameters; a bias that is left to the caller is added."""
    given = given.clone().requires_grad_()
    out = layer(given)
    if layer.skip_bias_add:
        out, bias = out
        assert bias is layer.bias
        out = out + bias if bias is not None else out
    out.backward(grad)
    return out.detach(), given.grad, gradients(layer)


def references(options, full):
    """x, g, and output, dX and gradients of one process, for every number of dims that has the sequence dim."""
    dim = sequence_dim(options)
    for dims, lead in SHAPES.items():
        if dim is None or -dims <= dim < dims - 1:
            x, g = draw(*lead, IN, seed=2), draw(*lead, OUT, seed=3)
            yield x, g, *linear_reference(x, full, g, options.get("bias", True))


def close_gradients(ranks, want):
    found = whole_gradients(ranks)
    assert set(found) == set(want)
    for name in want:
        close(found[name], want[name], name)


def column_case(tp, options, x, g, full):
    """On one rank, of a column layer whose output's gradient is this rank's part of g."""
    rank, dim = comm.rank("tp"), sequence_dim(options)
    layer = ColumnParallelLinear(IN, OUT, dtype=F64, **options)
    load(layer, full)
    grad = g if options.get("gather_output", True) else split_features(g, options.get("stride", 1), tp, rank)
    return step(layer, x if dim is None else x.chunk(tp, dim)[rank], grad)


COLUMN = [
    *(dict(gather_output=a, bias=b, stride=s) for a, b, s in product([True, False], [True, False], [1, 2])),
    dict(skip_bias_add=True),
    dict(skip_bias_add=True, gather_output=False, stride=2),
    dict(gather_output=False, reduce_dtype=None),
    dict(gather_output=False, input_is_replicated=True),
    dict(gather_output=False, keep_master_weight=True),
]
DIMS: list = [(None, {}), (0, {}), (1, {}), (2, {}), (-2, {})]
COLUMN_SP = [
    dict(gather_output=False, sequence_parallel_enabled=True, sequence_dimension=d, **more)
    for d, more in [*DIMS, (1, dict(bias=False, stride=2)), (1, dict(skip_bias_add=True))]
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("options", COLUMN + COLUMN_SP, ids=str)
def test_column_is_one_linear_layer(tp, options):
    full, dim = full_parameters(), sequence_dim(options)
    for x, g, want_out, want_x, want in references(options, full):
        outs, xs, grads = zip(*threads.run(tp_mesh(tp), column_case, tp, options, x, g, full))
        if options.get("gather_output", True):
            for out in outs:
                close(out, want_out, "output")
        else:
            close(join_features(outs, options.get("stride", 1)), want_out, "output")
        if dim is not None:
            close(torch.cat(xs, dim), want_x, "dX")
        elif options.get("input_is_replicated"):
            close(torch.stack(xs).sum(0), want_x, "dX")
        else:
            for dx in xs:
                close(dx, want_x, "dX")
        close_gradients(grads, want)


def row_case(tp, options, x, g, full):
    rank, dim = comm.rank("tp"), sequence_dim(options)
    layer = RowParallelLinear(IN, OUT, dtype=F64, **options)
    load(layer, full)
    parallel = options.get("input_is_parallel", False)
    given = split_features(x, options.get("stride", 1), tp, rank) if parallel else x
    return step(layer, given, g if dim is None else g.chunk(tp, dim)[rank])


ROW = [
    *(dict(input_is_parallel=a, bias=b, stride=s) for a, b, s in product([True, False], [True, False], [1, 2])),
    dict(skip_bias_add=True),
    dict(reduce_output=False),
    dict(reduce_output=False, input_is_parallel=True, bias=False),
    dict(input_is_parallel=True, reduce_dtype=None),
    dict(input_is_parallel=True, keep_master_weight=True),
]
ROW_SP = [
    dict(input_is_parallel=True, sequence_parallel_enabled=True, sequence_dimension=d, **more)
    for d, more in [*DIMS, (1, dict(bias=False)), (1, dict(skip_bias_add=True))]
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("options", ROW + ROW_SP, ids=str)
def test_row_is_one_linear_layer(tp, options):
    full, dim = full_parameters(), sequence_dim(options)
    for x, g, want_out, want_x, want in references(options, full):
        outs, xs, grads = zip(*threads.run(tp_mesh(tp), row_case, tp, options, x, g, full))
        if dim is not None:
            close(torch.cat(outs, dim), want_out, "output")
        elif not options.get("reduce_output", True):
            close(torch.stack(outs).sum(0), want_out, "output")
        else:
            for out in outs:
                close(out, want_out, "output")
        if options.get("input_is_parallel"):
            close(join_features(xs, options.get("stride", 1)), want_x, "dX")
        else:
            for dx in xs:
                close(dx, want_x, "dX")
        close_gradients(grads, want)


def test_a_single_vector_is_an_input_too():
    full, x, g = full_parameters(), draw(IN, seed=2), draw(OUT, seed=3)
    want_out, want_x, _ = linear_reference(x, full, g)
    for case in (column_case, row_case):
        for out, dx, _ in threads.run(tp_mesh(2), case, 2, {}, x, g, full):
            close(out, want_out)
            close(dx, want_x)


def test_on_real_processes():
    full, x, g = full_parameters(), draw(4, 8, IN, seed=2), draw(4, 8, OUT, seed=3)
    want_out, want_x, want = linear_reference(x, full, g)
    for options in (dict(gather_output=False, stride=2), COLUMN_SP[2]):
        outs, xs, grads = zip(*processes(2).run(column_case, 2, options, x, g, full, mesh=dict(tp=2)))
        close(join_features(outs, options.get("stride", 1)), want_out)
        close(torch.cat(xs, 1) if "sequence_dimension" in options else xs[1], want_x)
        close_gradients(grads, want)
    for options in (dict(input_is_parallel=True), ROW_SP[2]):
        outs, xs, grads = zip(*processes(2).run(row_case, 2, options, x, g, full, mesh=dict(tp=2)))
        close(torch.cat(outs, 1) if "sequence_dimension" in options else outs[1], want_out)
        close(join_features(xs, 1), want_x)
        close_gradients(grads, want)


# --- dtypes ---


def test_bf16_is_summed_in_fp32():
    """256 + 1 is 256 in bf16, unless the sum is done in fp32 and is rounded once."""

    def work(reduce_dtype):
        options = dict(bias=False, dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        row = RowParallelLinear(2, 1, input_is_parallel=True, **options)
        column = ColumnParallelLinear(1, 2, gather_output=False, **options)
        value = [256.0, 3.0][comm.rank("tp")]
        with torch.no_grad():
            row.weight.fill_(value)
            column.weight.fill_(value)
        x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
        with comm.record() as calls:
            out = row(x.detach())
            column(x).sum().backward()
        assert out.dtype == x.grad.dtype == torch.bfloat16
        return out.item(), x.grad.item(), {call.dtype for call in calls}

    assert threads.run(tp_mesh(2), work, torch.float32)[0] == (260.0, 260.0, {torch.float32})
    assert threads.run(tp_mesh(2), work, None)[0][2] == {torch.bfloat16}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast(sequence_parallel):
    full = {name: value.float() for name, value in full_parameters().items()}
    x, g = draw(4, 8, IN, seed=2).float(), draw(4, 8, OUT, seed=3).bfloat16()
    given = x.clone().requires_grad_()
    whole = nn.Linear(IN, OUT)
    whole.load_state_dict(full)
    with torch.autocast("cpu", torch.bfloat16):
        want = whole(given)
    want.backward(g)
    options = dict(sequence_parallel_enabled=sequence_parallel, sequence_dimension=1)

    def work(kind):
        rank = comm.rank("tp")
        if kind == "column":
            layer = ColumnParallelLinear(IN, OUT, gather_output=False, **options)
        else:
            layer = RowParallelLinear(IN, OUT, input_is_parallel=True, **options)
        load(layer, full)
        mine, grad = x, g
        if kind == "column":
            mine, grad = (x.chunk(2, 1)[rank] if sequence_parallel else x), split_features(g, 1, 2, rank)
        else:
            mine, grad = split_features(x, 1, 2, rank), (g.chunk(2, 1)[rank] if sequence_parallel else g)
        mine = mine.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(mine)
        assert out.dtype == torch.bfloat16
        out.backward(grad)
        assert mine.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
        return out.detach(), mine.grad, gradients(layer)

    for kind in ("column", "row"):
        outs, xs, grads = zip(*threads.run(tp_mesh(2), work, kind))
        if kind == "column":
            out, dx = join_features(outs, 1), (torch.cat(xs, 1) if sequence_parallel else xs[0])
        else:
            out, dx = (torch.cat(outs, 1) if sequence_parallel else outs[0]), join_features(xs, 1)
        close(out, want, "output", tolerance=1e-2)
        close(dx, given.grad, "dX", tolerance=1e-2)
        found = whole_gradients(grads)
        close(found["weight"], whole.weight.grad, "dW", tolerance=1e-2)
        close(found["bias"], whole.bias.grad, "db", tolerance=1e-2)


# --- groups and errors ---


def test_another_axis_or_group_is_used_where_one_is_given():
    full, x = full_parameters(), draw(3, IN, seed=2)

    def work():
        outs = []
        for group in ("cp", comm.communicator("cp"), comm.new_group([[0, 1]], "mine")):
            layer = ColumnParallelLinear(IN, OUT, dtype=F64, tensor_model_parallel_group=group)
            with torch.no_grad():
                for name, param in layer.named_parameters():
                    param.copy_(spec_of(param).local_slice(full[name], comm.rank("cp")))
            outs.append(layer(x))
        return outs

    for outs in threads.run(Mesh(2, cp=2), work):
        for out in outs:
            close(out.detach(), F.linear(x, full["weight"], full["bias"]))


def test_functional_form():
    full, x, g = full_parameters(), draw(3, IN, seed=2), draw(3, OUT, seed=3)
    want_out, want_x, _ = linear_reference(x, full, g)

    def work(tp):
        rank = comm.rank("tp")
        given = x.clone().requires_grad_()
        out = linear_with_async_allreduce(given, full["weight"].chunk(tp)[rank], full["bias"].chunk(tp)[rank])
        out.backward(g.chunk(tp, -1)[rank])
        return out.detach(), given.grad

    for tp in (1, 2):
        outs, xs = zip(*threads.run(tp_mesh(tp), work, tp))
        close(torch.cat(outs, -1), want_out)
        close(xs[0], want_x)


@pytest.mark.parametrize(
    "build, parts",
    [
        (lambda: ColumnParallelLinear(8, 6, stride=2), ["ColumnParallelLinear", "output_size 6", "size 2", "2 fused"]),
        (lambda: ColumnParallelLinear(8, 7), ["output_size 7", "2"]),
        (lambda: RowParallelLinear(7, 8), ["RowParallelLinear", "input_size 7", "2"]),
        (lambda: ColumnParallelLinear(8, 8, sequence_parallel_enabled=True), ["gather_output=False"]),
        (lambda: RowParallelLinear(8, 8, sequence_parallel_enabled=True), ["input_is_parallel=True"]),
    ],
)
def test_impossible_layers_are_refused(build, parts):
    with comm.as_rank(tp_mesh(2), 0), pytest.raises(ValueError) as error:
        build()
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_without_a_mesh_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        ColumnParallelLinear(8, 8)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_an_output_may_be_written_in_place(bias, shape):
    """A bias and three dims give `F.linear` a view, which torch forbids to write as a function's output."""

    def rank_main():
        layer = ColumnParallelLinear(4, 8, bias=bias, gather_output=False, dtype=torch.float64)
        x = draw(*shape, seed=1).requires_grad_()
        out = layer(x)
        expected = torch.autograd.grad(F.relu(layer(x)).sum(), (x, layer.weight))
        return [a - b for a, b in zip(torch.autograd.grad(F.relu_(out).sum(), (x, layer.weight)), expected)]

    for differences in threads.run(tp_mesh(2), rank_main):
        assert not any(difference.any() for difference in differences)
