"""`torch.func` and forward-mode AD over layers: derivatives against finite differences, gradients against backward."""

from __future__ import annotations

import torch
from torch import func
from torch.autograd import forward_ad

from neuronx_dist.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    fuse_columns,
    parallel_cross_entropy,
)
from tests.support.pool import processes

DTYPE = dict(dtype=torch.float64)
VOCAB = 8


def functions():
    """Functions of `x [2, 4, 6]`, the same on all ranks."""
    shards = dict(gather_output=False, **DTYPE)
    labels = torch.randint(0, VOCAB, (2, 4))
    column, q, k = (ColumnParallelLinear(6, 8, **shards) for _ in range(3))
    fuse_columns([q, k])
    row = RowParallelLinear(8, 6, input_is_parallel=True, **DTYPE)
    partial = RowParallelLinear(8, 6, input_is_parallel=True, reduce_output=False, **DTYPE)
    sequence = ColumnParallelLinear(6, 8, sequence_parallel_enabled=True, **shards)
    sequence_row = RowParallelLinear(8, 6, input_is_parallel=True, sequence_parallel_enabled=True, **DTYPE)
    head = ColumnParallelLinear(6, VOCAB, bias=False, **shards)
    whole, split = ColumnParallelLinear(6, 8, **DTYPE), RowParallelLinear(8, 6, **DTYPE)
    yield "MLP", lambda x: row(torch.tanh(column(x)))
    yield "fused", lambda x: row(q(x) * k(x))
    yield "sequence parallel", lambda x: sequence_row(torch.tanh(sequence(x)))
    yield "whole inputs and outputs", lambda x: split(torch.tanh(whole(x)))
    yield "partial", lambda x: partial(torch.tanh(column(x)))
    yield "cross entropy", lambda x: parallel_cross_entropy(head(x), labels)
    yield "smoothing", lambda x: parallel_cross_entropy(head(x), labels, 0.1, ignore_index=3)
    yield "low precision", lambda x: parallel_cross_entropy(head(x).to(torch.bfloat16), labels)


def same(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def layers():
    torch.manual_seed(3)
    batch = torch.randn(2, 2, 4, 6, **DTYPE)
    x, tangent = batch
    for name, function in functions():
        value, derivative = func.jvp(function, (x,), (tangent,))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))
            assert same(dual.tangent, derivative), name
        assert same(value, function(x)), name
        leaf = x.clone().requires_grad_()
        grad = torch.randn_like(value)
        function(leaf).backward(grad)
        tolerance = dict(rtol=1e-2, atol=1e-2) if name == "low precision" else dict(rtol=1e-9, atol=1e-12)
        assert torch.allclose(func.vjp(function, x)[1](grad)[0], leaf.grad, **tolerance), name
        assert same(func.vmap(function)(batch), torch.stack([function(x) for x in batch])), name
        if name == "low precision":
            continue
        difference = (function(x + 1e-6 * tangent) - function(x - 1e-6 * tangent)) / 2e-6
        assert torch.allclose(derivative, difference, rtol=1e-6, atol=1e-8), name
        assert func.hessian(lambda x, f=function: f(x).square().sum())(x).isfinite().all(), name


def test_layers_and_losses():
    processes(2).run(layers, mesh=dict(tp=2))


def weights():
    torch.manual_seed(3)
    ids = torch.randint(0, VOCAB, (2, 4))
    for options in ({}, {"padding_idx": 2}, {"shard_across_embedding": True}, {"sequence_parallel_enabled": True}):
        embedding = ParallelEmbedding(VOCAB, 6, **DTYPE, **options)
        weight = embedding.weight.detach()

        def function(weight, embedding=embedding):
            return func.functional_call(embedding, {"weight": weight}, (ids,))

        tangent = torch.randn_like(weight)
        _, derivative = func.jvp(function, (weight,), (tangent,))
        assert same(derivative, function(weight + tangent) - function(weight)), options
        embedding(ids).square().sum().backward()
        assert same(func.grad(lambda w, f=function: f(w).square().sum())(weight), embedding.weight.grad), options
        if "sequence_parallel_enabled" not in options:
            rows = func.vmap(embedding)(ids)
            assert same(rows, embedding(ids)), options


def test_embeddings():
    processes(2).run(weights, mesh=dict(tp=2))
