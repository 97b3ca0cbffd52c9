"""The small things that scripts import."""

from __future__ import annotations

import pytest
import torch
from layer_parity import tp_mesh
from torch import nn

from neuronx_dist import comm
from neuronx_dist.parallel_layers import ColumnParallelLinear, ParallelEmbedding, layers, utils
from neuronx_dist.spmd import spec_of


def test_division():
    assert utils.divide(12, 4) == 3
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        utils.divide(13, 4)
    assert [utils.get_padding_length(n, 4) for n in (8, 9, 11, 0)] == [0, 3, 1, 0]


def test_splitting():
    x = torch.arange(24).view(2, 4, 3)
    for function, dim, count in [
        (utils.split_tensor_along_last_dim, -1, 3),
        (utils.split_tensor_along_second_dim, 1, 2),
    ]:
        for contiguous in (False, True):
            pieces = function(x, count, contiguous_split_chunks=contiguous)
            assert len(pieces) == count and torch.equal(torch.cat(pieces, dim), x)
            assert not contiguous or all(piece.is_contiguous() for piece in pieces)
    assert torch.equal(torch.cat(utils.split_tensor_along_dim(x, 0, 2)), x)
    with pytest.raises(ValueError, match="3 is not divisible by 2"):
        utils.split_tensor_along_last_dim(x, 2)


def test_attributes_in_nxds_way():
    tensor, other = torch.ones(2), torch.ones(2)
    utils.set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)
    assert (tensor.tensor_model_parallel, tensor.partition_dim) == (False, -1)
    assert (tensor.partition_stride, tensor.num_partitions) == (1, -1)
    utils.set_tensor_model_parallel_attributes(other, True, 0, stride=2, num_partitions=4)
    other.sequence_parallel_enabled, other.shared = True, True
    third = torch.ones(2)
    utils.copy_tensor_model_parallel_attributes(third, other)
    assert third.tensor_model_parallel and third.partition_stride == 2 and third.num_partitions == 4
    assert third.sequence_parallel_enabled and third.shared
    utils.set_defaults_if_not_set_tensor_model_parallel_attributes(third)
    assert third.partition_stride == 2
    with pytest.raises(ValueError, match=r"\(2,\).*already"):
        utils.set_tensor_model_parallel_attributes(tensor, True, 0)
    assert layers.set_tensor_model_parallel_attributes is utils.set_tensor_model_parallel_attributes


def test_duplicates_of_replicated_parameters():
    for rank in range(2):
        with comm.as_rank(tp_mesh(2), rank):
            column = ColumnParallelLinear(4, 4)
            assert utils.param_is_not_tensor_parallel_duplicate(column.weight)
            assert utils.param_is_not_tensor_parallel_duplicate(nn.Linear(2, 2).weight) == (rank == 0)


def test_vocabulary_ranges():
    assert utils.EmbeddingUtility.range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)
    assert utils.EmbeddingUtility.range_from_global_vocab_size(20, 3, 4) == (15, 20)
    with pytest.raises(ValueError, match="21"):
        utils.EmbeddingUtility.range_from_global_vocab_size(21, 3, 4)


def test_autocast():
    x, ids, nothing = torch.ones(2), torch.ones(2, dtype=torch.int64), None
    assert utils.cast_if_autocast_enabled(x, ids, nothing) == (x, ids, None)
    with torch.autocast("cpu", torch.bfloat16):
        found = utils.cast_if_autocast_enabled(x, ids, nothing)
        assert found[0].dtype == torch.bfloat16 and found[1] is ids and found[2] is None
        (meta,) = utils.cast_if_autocast_enabled(torch.ones(1, device="meta"))
        assert meta.is_meta


def test_tensors_in_containers_go_to_the_cpu():
    data = {"a": [torch.ones(2, requires_grad=True), 3], "b": (torch.zeros(1), "text")}
    moved = utils.move_all_tensor_to_cpu(data)
    assert torch.equal(moved["a"][0], torch.ones(2)) and not moved["a"][0].requires_grad
    assert moved["a"][1] == 3 and moved["b"][1] == "text"


@pytest.mark.parametrize("overwrite", [False, True])
def test_moving_a_model_keeps_ties_and_attributes(overwrite):
    with comm.as_rank(tp_mesh(2), 0):
        model = nn.ModuleDict(
            dict(
                embedding=ParallelEmbedding(8, 4),
                head=ColumnParallelLinear(4, 8, bias=False, gather_output=False),
                plain=nn.Linear(2, 2),
                nested=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            )
        )
        model["head"].weight = model["embedding"].weight
        model["nested"][1].weight = model["nested"][0].weight
        model["plain"].weight.my_mark = "kept"
        model["plain"].bias.sequence_parallel_enabled = True
        specs = {name: spec_of(param) for name, param in model.named_parameters()}
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        try:
            moved = utils.move_model_to_device(model, "meta")
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        assert moved is model and all(param.is_meta for param in model.parameters())
        assert model["head"].weight is model["embedding"].weight
        assert model["nested"][1].weight is model["nested"][0].weight
        assert model["plain"].weight.my_mark == "kept"
        assert {name: spec_of(param) for name, param in model.named_parameters()} == specs
        assert model["embedding"].weight.tensor_model_parallel and spec_of(model["plain"].bias).sequence_parallel


def test_nxds_import_paths():
    from neuronx_dist.parallel_layers import PARALLEL_FUNCTIONS, PARALLEL_MODULES, layer_norm, loss_functions

    assert layers.ColumnParallelLinear in PARALLEL_MODULES and layers.ParallelEmbedding in PARALLEL_MODULES
    assert loss_functions.parallel_cross_entropy in PARALLEL_FUNCTIONS
    assert layer_norm.LayerNorm and layers.RowParallelLinear
