"""The small things that scripts import."""

from __future__ import annotations

import random as pythons
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.parallel_layers import ColumnParallelLinear, ParallelEmbedding, layers, random, utils
from neuronx_dist.spmd import set_spec, spec_of
from tests.parallel_layers.layer_parity import tp_mesh


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


NXDS = dict(tensor_model_parallel=True, partition_dim=1, partition_stride=2, num_partitions=4)


@pytest.mark.parametrize(
    "marks",
    [NXDS, dict(sequence_parallel_enabled=True), dict(expert_model_parallel=True), dict(shared=True), {}],
    ids=str,
)
def test_a_copy_has_the_marks_of_its_source_and_no_others(marks):
    source, destination = torch.ones(2, 8), torch.ones(2, 8)
    vars(source).update(marks)
    utils.copy_tensor_model_parallel_attributes(destination_tensor=destination, source_tensor=source)
    assert vars(destination) == marks


def test_a_copy_has_the_layout_of_its_source():
    with comm.as_rank(tp_mesh(2), 1):
        layer = ColumnParallelLinear(4, 6)
        set_spec(layer, "weight", replace(spec_of(layer.weight), unpadded=5))  # of which NxD's marks say nothing
        destination = torch.empty_like(layer.weight)
        utils.copy_tensor_model_parallel_attributes(destination, layer.weight)
        assert spec_of(destination) == spec_of(layer.weight) and spec_of(destination).unpadded_shape == (5, 4)


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
    assert utils.move_all_tensor_to_cpu(data, convert=False) is data


@pytest.mark.parametrize("setting", [None, "overwrite_module_params_on_conversion", "swap_module_params_on_conversion"])
def test_moving_a_model_keeps_ties_and_attributes(setting):
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
        change = getattr(torch.__future__, f"set_{setting}", lambda value: None)  # torch's own ways to convert
        change(True)
        try:
            moved = utils.move_model_to_device(model, "meta")
        finally:
            change(False)
        assert moved is model and all(param.is_meta for param in model.parameters())
        assert model["head"].weight is model["embedding"].weight
        assert model["nested"][1].weight is model["nested"][0].weight
        assert model["plain"].weight.my_mark == "kept"
        assert {name: spec_of(param) for name, param in model.named_parameters()} == specs
        assert model["embedding"].weight.tensor_model_parallel and spec_of(model["plain"].bias).sequence_parallel


def test_a_moved_model_keeps_its_tensors_identity():
    """An optimizer made before has the parameters; a buffer of two modules is one, as a tied weight is."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.LSTM(4, 4))
    model[1].running_mean = model[0].running_mean
    model[0].bias.requires_grad_(False)
    before = {id(param) for param in model.parameters()}
    utils.move_model_to_device(model, "meta")
    assert {id(param) for param in model.parameters()} == before
    assert model[1].running_mean is model[0].running_mean and model[0].running_mean.is_meta
    assert model[2]._flat_weights[0] is model[2].weight_ih_l0
    assert [param.requires_grad for param in model[0].parameters()] == [True, False]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_move_along(device):
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    utils.move_model_to_device(layer, device)
    assert layer.weight.grad.device.type == device and layer.bias.grad is None


def test_what_has_no_value_is_not_moved():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(RuntimeError, match="1.weight of Sequential is on the meta device.*to cpu.*materialize"):
        utils.move_model_to_device(model, "cpu")
    model = nn.BatchNorm1d(2)
    model.running_var = model.running_var.to("meta")
    with pytest.raises(RuntimeError, match="running_var of BatchNorm1d"):
        utils.move_model_to_device(model, "cpu")


def test_a_model_in_use_is_not_moved_to_another_kind_of_device():
    model = nn.Sequential(nn.Linear(2, 2))
    view = model[0].weight.view(-1)
    with pytest.raises(RuntimeError, match="parameter 0.weight is referenced"):
        utils.move_model_to_device(model, "meta")
    utils.move_model_to_device(model, "cpu")  # the same memory
    assert view.data_ptr() == model[0].weight.data_ptr()


def test_how_an_optimizer_computes_is_not_loaded():
    def optimizer(**options):
        torch.manual_seed(0)
        layer = nn.Linear(2, 2)
        adamw = torch.optim.AdamW(layer.parameters(), **options)
        layer(torch.ones(1, 2)).sum().backward()
        adamw.step()
        return adamw

    saved = optimizer(lr=torch.tensor(0.5), foreach=False, weight_decay=0.25).state_dict()
    saved["param_groups"][0]["capturable"] = True  # of a run on XLA
    ours = optimizer(lr=0.125, foreach=True)
    utils.load_optimizer_state_dict(ours, saved)
    (group,) = ours.param_groups
    assert (group["capturable"], group["foreach"], group["weight_decay"]) == (False, True, 0.25)
    assert group["lr"] == 0.5 and isinstance(group["lr"], float)
    ours.step()
    assert {float(values["step"]) for values in ours.state.values()} == {2.0}

    lr = torch.tensor(0.125)
    ours = optimizer(lr=lr, foreach=False)
    utils.load_optimizer_state_dict(ours, optimizer(lr=0.5).state_dict())
    assert ours.param_groups[0]["lr"] is lr and lr == 0.5  # what the script writes a schedule into


def test_everything_that_draws_is_seeded():
    def draw():
        with random.get_rng_tracker().fork():
            sharded = torch.rand(())
        return pythons.random(), np.random.rand(), float(torch.rand(())), float(sharded)

    with comm.as_rank(tp_mesh(2), 1):
        random.set_random_seed(3)
        first = draw()
        assert not set(draw()) & set(first)
        random.set_random_seed(3)
        assert draw() == first
    random.set_random_seed(3)  # without a mesh too
    assert (pythons.random(), np.random.rand(), float(torch.rand(()))) == first[:3]


def test_a_large_seed_seeds_everything():
    """NumPy takes 32 bits, the others 64."""
    drawn = []
    for seed in (2**33 + 3, 2**33 + 4, 2**33 + 3):
        random.set_random_seed(seed)
        drawn.append((pythons.random(), float(torch.rand(())), np.random.rand()))
    assert drawn[0] == drawn[2] and not set(drawn[0]) & set(drawn[1])
    random.set_random_seed(3)
    assert np.random.rand() == drawn[0][2]


def test_a_random_state_is_of_one_kind_of_device():
    before = random.get_rng_state()
    numbers = torch.rand(3)
    random.set_rng_state(before)
    assert torch.equal(torch.rand(3), numbers)
    with pytest.raises(
        ValueError, match="of an XLA device cannot be set on a device other than XLA.*model_parallel_manual_seed"
    ):
        random.set_rng_state([*before[:1], torch.tensor([5])])


def test_nxds_import_paths():
    from neuronx_dist.parallel_layers import PARALLEL_FUNCTIONS, PARALLEL_MODULES, layer_norm, loss_functions

    assert layers.ColumnParallelLinear in PARALLEL_MODULES and layers.ParallelEmbedding in PARALLEL_MODULES
    assert loss_functions.parallel_cross_entropy in PARALLEL_FUNCTIONS
    assert layer_norm.LayerNorm and layers.RowParallelLinear


def test_the_lists_of_parallel_layers_and_functions_are_whole():
    from neuronx_dist.parallel_layers import PARALLEL_FUNCTIONS, PARALLEL_MODULES, loss_functions

    assert {layers.ColumnParallelLinear, layers.RowParallelLinear, layers.ParallelEmbedding} <= {*PARALLEL_MODULES}
    assert loss_functions.parallel_cross_entropy in PARALLEL_FUNCTIONS
