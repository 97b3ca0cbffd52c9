"""Inputs that do not fit a layer: the message names the layer and its path, both shapes and dtypes, and the repair."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import NxDPPModel, comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    fuse_columns,
    mappings,
)
from tests.parallel_layers.layer_parity import tp_mesh

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inner = layer

    def forward(self, x):
        return self.inner(x)


class Model(nn.Module):
    """`layers.1.inner` is the layer in question."""

    def __init__(self, layer):
        super().__init__()
        self.layers = nn.Sequential(nn.Identity(), Block(layer))

    def forward(self, x):
        return self.layers(x)


class Region(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def message(mesh, build, x, kind=ValueError):
    """Error of each rank of a model with this layer for this input."""

    def work():
        model = Model(build())
        with pytest.raises(kind) as error:
            model(x)
        return str(error.value)

    first, *others = threads.run(mesh, work)
    assert all(other == first for other in others)
    return first


PARALLEL = dict(input_is_parallel=True)
LINEAR = [
    (lambda: RowParallelLinear(8, 4, **PARALLEL), (2, 8), FP32, "RowParallelLinear", "input_is_parallel=False, or"),
    (
        lambda: RowParallelLinear(8, 4, reduce_output=False, **PARALLEL),
        (2, 8),
        FP32,
        "RowParallelLinear",
        "all features",
    ),
    (lambda: RowParallelLinear(8, 4), (2, 4), FP32, "RowParallelLinear", "build it with input_is_parallel=True"),
    (lambda: RowParallelLinear(6, 4), (2, 3), FP32, "RowParallelLinear", "build it with input_is_parallel=True"),
    (lambda: RowParallelLinear(8, 4), (2, 6), FP32, "RowParallelLinear", "it takes [.., 8]"),
    (lambda: RowParallelLinear(8, 4, stride=2), (2, 7), FP32, "RowParallelLinear", "it takes [.., 8]"),
    (lambda: RowParallelLinear(8, 4, **PARALLEL), (2, 4), BF16, "RowParallelLinear", "cast the input to torch.float32"),
    (lambda: RowParallelLinear(8, 4, dtype=BF16), (2, 8), FP32, "RowParallelLinear", "dtype=torch.float32"),
    (
        lambda: ColumnParallelLinear(8, 4),
        (2, 4),
        FP32,
        "ColumnParallelLinear",
        "gather_output=True in the layer before",
    ),
    (lambda: ColumnParallelLinear(8, 4), (2, 5), FP32, "ColumnParallelLinear", "it takes [.., 8]"),
    (lambda: ColumnParallelLinear(8, 4), (2, 8), BF16, "ColumnParallelLinear", "or call it under torch.autocast"),
    (lambda: ColumnParallelLinear(8, 4, dtype=torch.float16), (2, 8), FP32, "ColumnParallelLinear", "to torch.float16"),
    (lambda: ColumnParallelLinear(8, 4), (2, 8), torch.int64, "ColumnParallelLinear", "dtype=torch.int64"),
]


@pytest.mark.parametrize("build, shape, dtype, name, repair", LINEAR)
def test_linear_layers(build, shape, dtype, name, repair):
    text = message(tp_mesh(2), build, torch.ones(shape, dtype=dtype))
    with comm.as_rank(tp_mesh(2), 0):
        weight = build().weight
    assert text.startswith(
        f"{name} layers.1.inner of Model: the input {list(shape)} of {dtype} does not fit the weight "
    )
    assert f"{list(weight.shape)} of {weight.dtype}, [out, in] at a tensor parallel size of 2: " in text
    assert repair in text


SP = dict(sequence_parallel_enabled=True, sequence_dimension=1)


@pytest.mark.parametrize(
    "build, shape",
    [
        (lambda: ColumnParallelLinear(4, 8, gather_output=False, **SP), (2, 4)),
        (lambda: ColumnParallelLinear(4, 8, gather_output=False, **{**SP, "sequence_dimension": -1}), (2, 3, 4)),
        (lambda: ColumnParallelLinear(4, 8, gather_output=False, sequence_parallel_enabled=True), (4,)),
        (lambda: ColumnParallelLinear(4, 8, gather_output=False, **{**SP, "sequence_dimension": -3}), (2, 4)),
        (lambda: RowParallelLinear(4, 8, **PARALLEL, **SP), (2, 2)),
        (lambda: ParallelEmbedding(4, 8, **SP), (4,)),
        (lambda: ParallelEmbedding(4, 8, sequence_parallel_enabled=True), (4,)),
    ],
)
def test_an_input_without_a_sequence_is_refused_by_sequence_parallel_layers(build, shape):
    with comm.as_rank(tp_mesh(2), 0):
        name, dim = type(build()).__name__, build().sequence_dimension
    x = torch.ones(shape, dtype=torch.long if name == "ParallelEmbedding" else FP32)
    text = message(tp_mesh(2), build, x)
    assert text.startswith(f"{name} layers.1.inner of Model: the input {list(shape)} has no sequence dim {dim} (seq")
    assert "sequence_parallel_enabled=False" in text


@pytest.mark.parametrize("dim, shape", [(0, (2, 4)), (-2, (2, 4)), (1, (3, 2, 4)), (-2, (3, 2, 4)), (-3, (2, 2, 4))])
def test_inputs_with_a_sequence_are_gathered(dim, shape):
    def work():
        layer = ColumnParallelLinear(
            4, 8, gather_output=False, sequence_parallel_enabled=True, sequence_dimension=dim, bias=False
        )
        out = layer(torch.ones(shape))
        assert (
            out.shape[dim] == 2 * shape[dim]
            and out.numel() == 2 * layer.weight.shape[0] * torch.Size(shape).numel() // 4
        )

    threads.run(tp_mesh(2), work)


def test_in_one_process_too():
    text = message(Mesh(1), lambda: RowParallelLinear(8, 4), torch.ones(2, 8, dtype=BF16))
    assert "RowParallelLinear layers.1.inner of Model" in text and "tensor parallel size of 1: cast the input" in text


def test_fused_columns_name_the_layer_that_was_called():
    def build():
        q, k = (ColumnParallelLinear(8, 4, gather_output=False) for _ in range(2))
        fuse_columns([q, k])
        return nn.Sequential(q, k)

    assert "ColumnParallelLinear layers.1.inner.0 of Model" in message(tp_mesh(2), build, torch.ones(2, 6))


def test_autocast_casts_and_other_errors_stay_as_they_are():
    def work():
        layer = RowParallelLinear(8, 4)
        with torch.autocast("cpu", BF16):
            assert layer(torch.ones(2, 8)).dtype == BF16
            with pytest.raises(ValueError, match=r"takes \[.., 8\]"):
                layer(torch.ones(2, 9))
        layer.bias = nn.Parameter(torch.ones(3))
        for dtype in (FP32, BF16):
            with torch.autocast("cpu", BF16, enabled=dtype == BF16), pytest.raises(RuntimeError) as error:
                layer(torch.ones(2, 8, dtype=dtype))
            assert "does not fit" not in str(error.value)

    threads.run(tp_mesh(2), work)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shard_across_embedding", [False, True])
@pytest.mark.parametrize("value", [1.0, -0.5, 8.0])
def test_ids_are_integers(tp, shard_across_embedding, value):
    def build():
        return ParallelEmbedding(8, 4, shard_across_embedding=shard_across_embedding)

    text = message(tp_mesh(tp), build, torch.full((2, 3), value))
    assert text.startswith(
        "ParallelEmbedding layers.1.inner of Model: ids must be int64 or int32, got [2, 3] of torch.fl"
    )
    assert "table of 8 rows" in text and ".long()" in text
    if tp == 1:  # another error stays as it is
        with comm.as_rank(Mesh(1), 0), pytest.raises(IndexError):
            build()(torch.tensor([8]))
        with comm.as_rank(Mesh(1), 0), pytest.raises(RuntimeError) as error:
            layer = build()
            layer.weight = nn.Parameter(torch.ones(8))
            layer(torch.tensor([1]))
        assert "ids must be" not in str(error.value)


@pytest.mark.parametrize(
    "function, verb",
    [
        (mappings.scatter_to_tensor_model_parallel_region, "convert"),
        (mappings.scatter_to_sequence_parallel_region, "convert"),
        (mappings.reduce_scatter_to_sequence_parallel_region, "reduce_scatter"),
    ],
)
def test_dims_that_do_not_divide_name_the_module(function, verb):
    text = message(tp_mesh(2), lambda: Region(function), torch.ones(3, 5))
    assert text.startswith(f"{verb} over tp: unable to create 2 partitions along dim ") and "of shape (3, 5): " in text
    assert text.endswith("; in Region layers.1.inner of Model")


def test_dims_that_do_not_divide_outside_of_a_module():
    with comm.as_rank(tp_mesh(2), 0), pytest.raises(ValueError) as error:
        mappings.scatter_to_tensor_model_parallel_region(torch.ones(5))
    assert str(error.value).endswith("5 is not divisible by 2")


def test_the_path_is_of_the_outermost_module_that_has_the_layer():
    class Trainer(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.models = [model]  # not registered

        def forward(self, x):
            return self.models[0](x)

    text = message(tp_mesh(2), lambda: Trainer(Model(RowParallelLinear(8, 4))), torch.ones(2, 6))
    assert text.startswith("RowParallelLinear layers.1.inner of Model: ")


def test_a_pipelines_layers_have_the_names_of_the_whole_model():
    def work():
        model = Model(RowParallelLinear(8, 4, input_is_parallel=True))
        pipeline = NxDPPModel(model, Block, output_loss_value_spec=True)
        with pytest.raises(Exception, match="RowParallelLinear layers.1.inner of Model: the input"):
            pipeline.run_eval(x=torch.ones(2, 8))

    threads.run(tp_mesh(2), work)
