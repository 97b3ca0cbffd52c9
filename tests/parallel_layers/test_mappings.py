"""The region functions do what Megatron's and NxD's do, forward and backward: on rank-valued tensors, by hand."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import mappings
from tests.parallel_layers.layer_parity import tp_mesh
from tests.support.pool import processes

TP = 2


def value(rank, *shape):
    count = torch.Size(shape).numel()
    return torch.arange(1.0, count + 1).view(shape) * 10**rank


def total(values):
    return torch.stack(list(values)).sum(0)


# name, arguments, shape of x, what y is, shape of y, what gx is; x and g are `value(rank, ..)`, all = every rank's
PAIRS = {
    "copy": ("identity", "sum"),
    "reduce": ("sum", "identity"),
    "scatter": ("own", "gather"),
    "gather": ("gather", "own"),
    "gather_reduce": ("gather", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter", "gather"),
}
TABLE = [
    ("copy_to_tensor_model_parallel_region", {}, "copy", -1),
    ("reduce_from_tensor_model_parallel_region", {}, "reduce", -1),
    ("scatter_to_tensor_model_parallel_region", {}, "scatter", -1),
    ("gather_from_tensor_model_parallel_region", {}, "gather", -1),
    ("scatter_to_sequence_parallel_region", {}, "scatter", 0),
    ("scatter_to_sequence_parallel_region", dict(sequence_dimension=1), "scatter", 1),
    ("gather_from_sequence_parallel_region", {}, "gather_reduce", 0),
    ("gather_from_sequence_parallel_region", dict(sequence_dimension=1, tile_cc=False), "gather_reduce", 1),
    ("gather_from_sequence_parallel_region", dict(to_model_parallel=False), "gather", 0),
    ("gather_from_sequence_parallel_region", dict(sequence_dimension=-2, to_model_parallel=False), "gather", -2),
    ("reduce_scatter_to_sequence_parallel_region", {}, "reduce_scatter", 0),
    ("reduce_scatter_to_sequence_parallel_region", dict(sequence_dimension=1), "reduce_scatter", 1),
    ("reduce_scatter_to_tensor_model_parallel_region_with_dim", dict(partition_dim=1), "reduce_scatter", 1),
    ("gather_from_tensor_model_parallel_region_with_dim", dict(gather_dim=1), "gather", 1),
    ("scatter_input_channels_to_tensor_model_parallel_region", {}, "scatter", 1),
    ("all_gather_last_dim_from_tensor_parallel_region", {}, "gather_reduce", -1),
    ("reduce_scatter_last_dim_to_tensor_parallel_region", {}, "reduce_scatter", -1),
    ("reduce_from_context_model_parallel_region", dict(process_group="tp"), "reduce", -1),
]
SHAPE = (2, 4, 6)


def apply(kind, values, dim, rank):
    if kind == "identity":
        return values[rank]
    if kind == "sum":
        return total(values)
    if kind == "own":
        return values[rank].chunk(TP, dim)[rank]
    if kind == "gather":
        return torch.cat(values, dim)
    return total(values).chunk(TP, dim)[rank]


def check(name, options, pair, dim):
    forward, backward = PAIRS[pair]
    rank = comm.rank("tp")
    xs = [value(r, *SHAPE) for r in range(TP)]
    want = apply(forward, xs, dim, rank)
    gs = [value(r, *want.shape) + 1 for r in range(TP)]
    x = xs[rank].clone().requires_grad_()
    y = getattr(mappings, name)(x, **options)
    assert torch.equal(y.detach(), want)
    y.backward(gs[rank])
    assert torch.equal(x.grad, apply(backward, gs, dim, rank))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_regions(row):
    threads.run(tp_mesh(TP), check, *row)


def check_all():
    for row in TABLE:
        check(*row)


def test_regions_on_real_processes():
    processes(2).run(check_all, mesh=dict(tp=2))


def test_every_region_function_is_covered():
    names = {name for name in vars(mappings) if name.endswith(("_region", "_region_with_dim"))}
    assert names - {name for name, *_ in TABLE} == {"enter_expert_parallel_region", "exit_expert_parallel_region"}


def test_b16_the_groups_argument_is_used_in_backward_too():
    """Upstream B16: with to_model_parallel=False the gradient is split over the default tensor-parallel group."""

    def work():
        rank = comm.rank("tp")  # of 4; the group has 2
        pair = comm.new_group([[0, 2], [1, 3]], "pair")
        x = value(rank, 2, 3).requires_grad_()
        y = mappings.gather_from_sequence_parallel_region(x, to_model_parallel=False, process_group=pair)
        assert y.shape == (4, 3)
        g = value(rank, 4, 3)
        y.backward(g)
        assert torch.equal(x.grad, g.chunk(2)[pair.rank])
        for name, *rest in TABLE:  # every function takes it, except the one that NxD gives none
            if "input_channels" not in name:
                options, dim = rest[0] | dict(process_group=pair), rest[2]
                out = getattr(mappings, name)(torch.ones(4, 4, 4), **options)
                shape = [4, 4, 4]
                kind = PAIRS[rest[1]][0]
                if kind in ("own", "reduce_scatter"):
                    shape[dim] //= 2
                elif kind == "gather":
                    shape[dim] *= 2
                assert list(out.shape) == shape, name

    threads.run(tp_mesh(4), work)


def test_context_parallel_sum():
    def work():
        return mappings.reduce_from_context_model_parallel_region(torch.ones(2)).tolist()

    assert threads.run(Mesh(4, tp=2, cp=2), work) == [[2.0, 2.0]] * 4


def test_a_dim_that_does_not_divide_is_refused_with_the_numbers():
    for name in ("scatter_to_tensor_model_parallel_region", "reduce_scatter_last_dim_to_tensor_parallel_region"):
        with comm.as_rank(tp_mesh(2), 0), pytest.raises(ValueError, match=r"unable to create 2 partitions along dim 1"):
            getattr(mappings, name)(torch.ones(2, 3))


@pytest.mark.parametrize("scatter_gather", [False, True])
def test_expert_regions(scatter_gather):
    """Every expert's tokens come to the rank that holds it, and go back where they came from."""
    experts, capacity, hidden, ep = 4, 2, 3, 2

    def work():
        source = comm.rank("ep")
        x = torch.zeros(experts, capacity, hidden)
        for e in range(experts):
            x[e] = 100 * source + 10 * e + torch.arange(capacity).unsqueeze(1)
        x.requires_grad_()
        inside = mappings.enter_expert_parallel_region(x, scatter_gather)
        assert inside.shape == (experts // ep, ep, capacity, hidden)
        for local in range(experts // ep):
            for origin in range(ep):
                expert = source * (experts // ep) + local
                expected = 100 * origin + 10 * expert + torch.arange(float(capacity)).unsqueeze(1).expand(-1, hidden)
                assert torch.equal(inside[local, origin].detach(), expected)
        out = mappings.exit_expert_parallel_region(inside, scatter_gather)
        assert torch.equal(out, x)
        g = value(0, experts, capacity, hidden) + source
        out.backward(g)
        assert torch.equal(x.grad, g)

    threads.run(Mesh(4, tp=2, ep=2), work)


def test_megatrons_all_to_all():
    def work():
        rank = comm.rank("tp")
        x = torch.arange(4.0) + 10 * rank
        x.requires_grad_()
        y = mappings.all_to_all("tp", x)
        y.backward(torch.arange(4.0) + 10 * rank)
        return y.tolist(), x.grad.tolist()

    want = [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert threads.run(tp_mesh(2), work) == [(want[0], want[0]), (want[1], want[1])]
