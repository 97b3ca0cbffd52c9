"""Weights of the linear layers: those of torch for one seed at any degree, and none on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.parallel_layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    grads,
)
from neuronx_dist.spmd import ShardSpec, spec_of
from tests.parallel_layers.layer_parity import (
    IN,
    OUT,
    tp_mesh,
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, dict(stride=2), dict(bias=False)])
def test_weights_are_those_of_torch_at_any_degree(tp, options):
    torch.manual_seed(11)
    whole = nn.Linear(IN, OUT, bias=options.get("bias", True))
    after = torch.rand(1)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layers = []
        for rank in range(tp):
            with comm.as_rank(tp_mesh(tp), rank):
                torch.manual_seed(11)
                more = dict(gather_output=False) if kind is ColumnParallelLinear else {}
                layers.append(kind(IN, OUT, keep_master_weight=rank == 0, **options, **more))
                assert torch.equal(torch.rand(1), after), "as much is drawn as torch draws"
        for name, want in whole.named_parameters():
            params = [getattr(layer, name) for layer in layers]
            assert torch.equal(spec_of(params[0]).assemble(params), want)
            if kind is RowParallelLinear and name == "bias":
                assert all(torch.equal(param, want) for param in params)
        assert torch.equal(layers[0].master_weight, whole.weight)
        assert tp == 1 or layers[1].master_weight is None


@pytest.mark.parametrize("tp", [1, 2])
def test_init_weight_cpu_draws_the_weight_again(tp):
    """Scripts for NxD call it for layers that were built on meta; the bias is theirs to set."""
    for number, kind in enumerate((ColumnParallelLinear, RowParallelLinear, ParallelEmbedding)):
        more = [{"gather_output": False}, {}, {"padding_idx": 3}][number]
        more |= {} if kind is ParallelEmbedding else {"keep_master_weight": True}
        for rank in range(tp):
            with comm.as_rank(tp_mesh(tp), rank):
                torch.manual_seed(5)
                want = kind(IN, OUT, **more)
                layer = kind(IN, OUT, device="meta", **more)
                layer.to_empty(device="cpu")
                before = [nn.init.zeros_(param) for param in layer.parameters()]
                torch.manual_seed(5)
                layer.init_weight_cpu()
                assert [id(param) for param in layer.parameters()] == [id(param) for param in before]
                assert torch.equal(layer.weight, want.weight)
                assert spec_of(layer.weight) == spec_of(want.weight)
                assert kind is ParallelEmbedding or torch.equal(layer.master_weight, want.master_weight)
                assert kind is ParallelEmbedding or not layer.bias.any()


def test_bias_shards_are_not_copies_of_each_other():
    biases = []
    for rank in range(2):
        with comm.as_rank(tp_mesh(2), rank):
            torch.manual_seed(3)
            biases.append(ColumnParallelLinear(IN, OUT, gather_output=False).bias)
    assert not torch.equal(*biases)


def test_an_initialiser_sees_the_whole_weight():
    shapes = []

    def init(weight):
        shapes.append(tuple(weight.shape))
        with torch.no_grad():
            weight.copy_(torch.arange(weight.numel()).view(weight.shape))

    with comm.as_rank(tp_mesh(2), 1):
        column = ColumnParallelLinear(IN, OUT, init_method=init, gather_output=False)
        row = RowParallelLinear(IN, OUT, init_method=init)
    assert shapes == [(OUT, IN)] * 2
    whole = torch.arange(float(OUT * IN)).view(OUT, IN)
    assert torch.equal(column.weight, whole[OUT // 2 :]) and torch.equal(row.weight, whole[:, IN // 2 :])


@pytest.mark.parametrize("how", ["argument", "context", "default"])
def test_on_the_meta_device_nothing_is_drawn(how):
    before = torch.get_rng_state()
    with comm.as_rank(tp_mesh(2), 0):
        if how == "argument":
            layers = [ColumnParallelLinear(IN, OUT, device="meta"), RowParallelLinear(IN, OUT, device="meta")]
        elif how == "context":
            with torch.device("meta"):
                layers = [ColumnParallelLinear(IN, OUT), RowParallelLinear(IN, OUT)]
        else:
            torch.set_default_device("meta")
            try:
                layers = [ColumnParallelLinear(IN, OUT), RowParallelLinear(IN, OUT)]
            finally:
                torch.set_default_device(None)
        assert all(param.is_meta for layer in layers for param in layer.parameters())
        assert layers[0](torch.ones(3, IN, device="meta")).shape == (3, OUT)
        assert layers[1](torch.ones(3, IN, device="meta")).shape == (3, OUT)
        for layer in layers:
            full = layer.full_module()
            assert isinstance(full, nn.Linear) and full.weight.is_meta
            assert full.weight.shape == (OUT, IN) and full.bias.shape == (OUT,)
            assert layer.full_module("cpu").weight.device.type == "cpu"
    assert torch.equal(before, torch.get_rng_state())


def test_layouts_of_the_parameters():
    with comm.as_rank(tp_mesh(2), 0):
        column = ColumnParallelLinear(IN, OUT, gather_output=False)
        gathering = ColumnParallelLinear(IN, OUT)
        row = RowParallelLinear(IN, OUT, input_is_parallel=True, sequence_parallel_enabled=True)
    assert spec_of(column.bias) == ShardSpec("tp", 0, 1, 2, (OUT,)) and column.bias.tensor_model_parallel
    assert spec_of(gathering.bias) == ShardSpec(full_shape=(OUT,))
    assert not hasattr(gathering.bias, "tensor_model_parallel")
    assert spec_of(row.bias).sequence_parallel and row.bias.sequence_parallel_enabled
    assert spec_of(row.weight) == ShardSpec("tp", 1, 1, 2, (OUT, IN))
    assert (column.output_size_per_partition, row.input_size_per_partition) == (OUT // 2, IN // 2)
    assert "local_weight=[8, 8]" in repr(column)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_marks_of_sequence_parallelism_do_not_depend_on_the_degree(tp, enabled):
    """Scripts for NxD read them from parameters; at tp 1 a reduction over tp changes nothing."""

    def rank():
        row = RowParallelLinear(IN, OUT, input_is_parallel=True, sequence_parallel_enabled=enabled)
        norms = [norm(IN, sequence_parallel_enabled=enabled) for norm in (LayerNorm, RMSNorm)]
        marked = [row.bias, *norms[0].parameters(), *norms[1].parameters()]
        assert [getattr(param, "sequence_parallel_enabled", False) for param in marked] == [enabled] * 4
        assert not hasattr(row.weight, "sequence_parallel_enabled")
        for param in marked:
            param.grad = torch.ones_like(param)
        grads.reduce_gradients(nn.ModuleList([row, *norms]))
        assert all(torch.equal(param.grad, torch.full_like(param, tp if enabled else 1)) for param in marked)

    comm.threads.run(tp_mesh(tp), rank)
