"""The sharded embedding is `nn.Embedding`: outputs, weight gradients, options, and what it communicates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.parallel_layers import ParallelEmbedding
from neuronx_dist.spmd import ShardSpec, spec_of
from tests.parallel_layers.layer_parity import close, draw, gradients, load, tp_mesh, whole_gradients
from tests.support.pool import processes

V, H, BATCH, SEQ = 8, 12, 2, 4
F64 = torch.float64
IDS = torch.tensor([[0, 7, 3, 4], [4, 5, 0, 0]])


def reference(weight, g, **options):
    weight = weight.clone().requires_grad_()
    out = F.embedding(IDS, weight, **options)
    out.backward(g)
    return out.detach(), weight.grad, weight.detach()


@pytest.mark.parametrize("rank", range(2))
def test_the_ids_that_a_rank_holds(rank):
    with comm.as_rank(tp_mesh(2), rank):
        by_rows, by_columns = ParallelEmbedding(V, H), ParallelEmbedding(V, H, shard_across_embedding=True)
        assert (by_rows.start_index, by_rows.end_index) == (rank * V // 2, (rank + 1) * V // 2)
        assert (by_columns.start_index, by_columns.end_index) == (0, V)


def case(tp, options, weight, g):
    """Output as it comes, and the weight's gradient, with the output's gradient cut as the output is."""
    rank = comm.rank("tp")
    layer = ParallelEmbedding(V, H, dtype=F64, **options)
    load(layer, {"weight": weight})
    out = layer(IDS)
    sequence_parallel = options.get("sequence_parallel_enabled", False)
    dim = options.get("sequence_dimension") or 0
    if sequence_parallel and dim == 0:
        g = g.transpose(0, 1)
    if not options.get("collect_output", True):
        if options.get("shard_across_embedding"):
            g = g.chunk(tp, -1)[rank]
    elif sequence_parallel:
        g = g.chunk(tp, dim)[rank]
    out.backward(g)
    grad = gradients(layer)
    return out.detach(), grad, layer.weight.detach()


SP = [dict(sequence_parallel_enabled=True, sequence_dimension=d) for d in (None, 0, 1)]
CASES = [
    dict(a, **b)
    for a in ({}, dict(shard_across_embedding=True))
    for b in ({}, *SP, dict(collect_output=False), dict(padding_idx=0), dict(padding_idx=5), dict(padding_idx=-1))
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_it_is_one_embedding(tp, options):
    weight, g = draw(V, H), draw(BATCH, SEQ, H, seed=1)
    want, want_grad, _ = reference(weight, g, padding_idx=options.get("padding_idx"))
    outs, grads, _ = zip(*threads.run(tp_mesh(tp), case, tp, options, weight, g))
    dim = options.get("sequence_dimension") or 0
    sequence_parallel = options.get("sequence_parallel_enabled", False)
    if sequence_parallel and dim == 0:
        want = want.transpose(0, 1)
        assert outs[0].is_contiguous()
    if not options.get("collect_output", True):
        whole = torch.cat(outs, -1) if options.get("shard_across_embedding") else torch.stack(outs).sum(0)
    elif sequence_parallel:
        whole = torch.cat(outs, dim)
    else:
        whole = outs[0]
        assert all(torch.equal(out, whole) for out in outs)
    close(whole, want, "output")
    close(whole_gradients(grads)["weight"], want_grad, "dW")


def test_on_real_processes():
    weight, g = draw(V, H), draw(BATCH, SEQ, H, seed=1)
    want, want_grad, _ = reference(weight, g)
    for options in ({}, SP[2], dict(shard_across_embedding=True)):
        outs, grads, _ = zip(*processes(2).run(case, 2, options, weight, g, mesh=dict(tp=2)))
        close(torch.cat(outs, 1) if options == SP[2] else outs[1], want)
        close(whole_gradients(grads)["weight"], want_grad)


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_are_renormalised(tp):
    weight, g = 3 * draw(V, H), draw(BATCH, SEQ, H, seed=1)
    whole = nn.Embedding(V, H, max_norm=1.5, norm_type=1.0, dtype=F64)
    whole.load_state_dict({"weight": weight})
    want = whole(IDS)
    want.backward(g)
    options = dict(max_norm=1.5, norm_type=1.0)
    outs, grads, weights = zip(*threads.run(tp_mesh(tp), case, tp, options, weight, g))
    close(outs[0], want)
    close(torch.cat(weights), whole.weight)
    close(whole_gradients(grads)["weight"], whole.weight.grad)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("row", range(V))
def test_a_row_that_is_not_looked_up_keeps_its_value(tp, row):
    """The first row of each shard too, in whose place the ids of other ranks are looked up."""
    weight = 100 * draw(V, H)
    ids = torch.full((BATCH, SEQ), row)
    options = dict(max_norm=1.0)
    whole = nn.Embedding(V, H, dtype=F64, **options)
    whole.load_state_dict({"weight": weight})
    want = whole(ids)

    def work():
        layer = ParallelEmbedding(V, H, dtype=F64, **options)
        load(layer, {"weight": weight})
        return layer(ids).detach(), layer.weight.detach()

    outs, weights = zip(*threads.run(tp_mesh(tp), work))
    close(outs[0], want)
    close(torch.cat(weights), whole.weight)
    assert [i for i in range(V) if not torch.equal(torch.cat(weights)[i], weight[i])] == [row]


@pytest.mark.parametrize("tp", [1, 2])
def test_sparse_gradients(tp):
    weight, g = draw(V, H), draw(BATCH, SEQ, H, seed=1)
    _, want_grad, _ = reference(weight, g)

    def work():
        layer = ParallelEmbedding(V, H, dtype=F64, sparse=True)
        load(layer, {"weight": weight})
        layer(IDS).backward(g)
        assert layer.weight.grad.is_sparse
        return layer.weight.grad.to_dense()

    close(torch.cat(threads.run(tp_mesh(tp), work)), want_grad)


def test_gradients_scaled_by_frequency():
    weight, g = draw(V, H), draw(BATCH, SEQ, H, seed=1)
    _, want_grad, _ = reference(weight, g, scale_grad_by_freq=True)
    options = dict(scale_grad_by_freq=True, shard_across_embedding=True)
    _, grads, _ = zip(*threads.run(tp_mesh(2), case, 2, options, weight, g))
    close(whole_gradients(grads)["weight"], want_grad)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, dict(padding_idx=0), dict(shard_across_embedding=True, padding_idx=5)])
def test_weights_are_those_of_torch_at_any_degree(tp, options):
    torch.manual_seed(5)
    whole = nn.Embedding(V, H, padding_idx=options.get("padding_idx"))
    layers = []
    for rank in range(tp):
        with comm.as_rank(tp_mesh(tp), rank):
            torch.manual_seed(5)
            layers.append(ParallelEmbedding(V, H, **options).weight)
    assert torch.equal(spec_of(layers[0]).assemble(layers), whole.weight)


def collectives(options):
    layer = ParallelEmbedding(V, H, **options)
    with comm.record() as forward:
        out = layer(IDS)
    with comm.record() as backward:
        out.sum().backward()
    return [(call.verb, call.shape) for call in forward], [(call.verb, call.shape) for call in backward]


def test_collectives():
    whole, turned = (BATCH, SEQ, H), (SEQ, BATCH, H)
    columns = (BATCH, SEQ, H // 2)
    for options, expected in [
        ({}, ([("all_reduce", whole)], [])),
        (SP[0], ([("reduce_scatter", turned)], [("all_gather", (SEQ // 2, BATCH, H))])),
        (SP[2], ([("reduce_scatter", whole)], [("all_gather", (BATCH, SEQ // 2, H))])),
        (dict(collect_output=False), ([], [])),
        (dict(shard_across_embedding=True), ([("all_gather", columns)], [])),
        (
            dict(shard_across_embedding=True, **SP[2]),
            ([("all_to_all", columns)], [("all_to_all", (BATCH, SEQ // 2, H))]),
        ),
    ]:
        assert threads.run(tp_mesh(2), collectives, options) == [expected] * 2, options
        assert threads.run(tp_mesh(1), collectives, options) == [([], [])]


def test_bf16_is_summed_in_fp32_and_frozen_tables_work():
    def work():
        layer = ParallelEmbedding(V, H, dtype=torch.bfloat16).requires_grad_(False)
        with comm.record() as calls:
            out = layer(IDS)
        assert out.dtype == torch.bfloat16 and not out.requires_grad
        return [call.dtype for call in calls]

    assert threads.run(tp_mesh(2), work) == [[torch.float32]] * 2


# --- upstream B7: padding_idx=0 is ignored, device="meta" lands on the CPU, sequence_dimension=1 gives partial sums ---


def test_b7_padding_idx_0_is_honoured():
    weight, g = draw(V, H), draw(BATCH, SEQ, H, seed=1)
    for tp in (1, 2):
        _, grads, _ = zip(*threads.run(tp_mesh(tp), case, tp, dict(padding_idx=0), weight, g))
        grad = whole_gradients(grads)["weight"]
        assert not grad[0].any() and grad[4].any()
    with comm.as_rank(tp_mesh(2), 0):
        assert not ParallelEmbedding(V, H, padding_idx=0).weight[0].any()


def test_b7_meta_stays_meta():
    before = torch.get_rng_state()
    with comm.as_rank(tp_mesh(2), 1):
        layer = ParallelEmbedding(V, H, device="meta")
        assert layer.weight.is_meta and layer.weight.shape == (V // 2, H)
        with torch.device("meta"):
            assert ParallelEmbedding(V, H).weight.is_meta
        assert spec_of(layer.weight) == ShardSpec("tp", 0, 1, 2, (V, H))
        assert layer(IDS.to("meta")).shape == (BATCH, SEQ, H)
        full = layer.full_module()
        assert isinstance(full, nn.Embedding) and full.weight.is_meta and full.weight.shape == (V, H)
    assert torch.equal(before, torch.get_rng_state())


def test_b7_sequence_dimension_1_is_reduced():
    weight, g = draw(V, H), draw(BATCH, SEQ, H, seed=1)
    outs, _, _ = zip(*threads.run(tp_mesh(2), case, 2, SP[2], weight, g))
    for rank, out in enumerate(outs):
        close(out, F.embedding(IDS, weight).chunk(2, 1)[rank])


# --- errors ---


@pytest.mark.parametrize(
    "options, parts",
    [
        (dict(num_embeddings=7), ["num_embeddings 7", "size 2", "8"]),
        (dict(embedding_dim=3, shard_across_embedding=True), ["embedding_dim 3", "4"]),
        (dict(padding_idx=8), ["padding_idx 8", "8 embeddings"]),
        (dict(max_norm=1.0, shard_across_embedding=True), ["max_norm"]),
        (dict(scale_grad_by_freq=True), ["scale_grad_by_freq", "shard_across_embedding=True"]),
        (dict(sequence_parallel_enabled=True, sequence_dimension=2), ["sequence_dimension", "2"]),
    ],
)
def test_impossible_tables_are_refused(options, parts):
    arguments = dict(num_embeddings=V, embedding_dim=H) | options
    with comm.as_rank(tp_mesh(2), 0), pytest.raises(ValueError) as error:
        ParallelEmbedding(**arguments)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("wrong", [V, -1])
def test_ids_outside_the_vocabulary_are_refused(tp, wrong):
    with comm.as_rank(tp_mesh(tp), 0):
        layer = ParallelEmbedding(V, H)
        with pytest.raises(IndexError):
            layer(torch.tensor([[0, wrong]]))
