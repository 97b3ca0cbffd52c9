"""Layouts of parameters: slicing and assembling, and staying with their module whatever happens to the tensors."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import ColumnParallelLinear, LayerNorm, ParallelEmbedding, RowParallelLinear
from neuronx_dist.parallel_layers.utils import move_model_to_device, set_tensor_model_parallel_attributes
from neuronx_dist.spmd import ShardSpec, spec_of


@settings(max_examples=150, deadline=None)
@given(
    dim=st.integers(0, 2),
    stride=st.integers(1, 3),
    parts=st.integers(1, 4),
    share=st.integers(1, 3),
    missing=st.integers(0, 12),
    others=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_slices_assemble_to_the_whole(dim, stride, parts, share, missing, others):
    shape = list(others)
    shape.insert(dim, stride * parts * share)
    held = parts * share - min(missing, parts * share - 1)  # of one block, without padding
    unpadded = stride * held if missing else None
    spec = ShardSpec("tp", dim, stride, parts, tuple(shape), unpadded)
    whole_shape = spec.unpadded_shape
    assert whole_shape[dim] == (stride * held if missing else shape[dim])
    whole = torch.arange(1, torch.Size(whole_shape).numel() + 1).view(whole_shape)
    shards = [spec.local_slice(whole, index) for index in range(parts)]
    assert all(tuple(shard.shape) == spec.local_shape for shard in shards)
    assert torch.equal(spec.assemble(shards), whole)
    # what is not the whole is zero padding, and there is as much of it as the padding says
    assert sum(int((shard != 0).sum()) for shard in shards) == whole.numel()
    assert sum(int(shard.sum()) for shard in shards) == int(whole.sum())
    # each block is sharded by itself: shard i holds rows i*each.. of every block
    for index, shard in enumerate(shards):
        for block, piece in enumerate(shard.split(share, dim)):
            start = min(index * share, held)
            length = min(share, held - start)
            assert torch.equal(piece.narrow(dim, 0, length), whole.narrow(dim, block * held + start, length))


@settings(max_examples=150, deadline=None)
@given(
    dim=st.integers(0, 1),
    groups=st.integers(1, 3),
    more=st.integers(0, 2),
    ranks=st.integers(1, 4),
    share=st.integers(1, 3),
    missing=st.integers(0, 11),
    others=st.integers(1, 3),
)
def test_zeros_at_the_end_of_every_group(dim, groups, more, ranks, share, missing, others):
    """Against padding written out; `more` whole groups of zeros come behind."""
    padded = ranks * share
    real = padded - min(missing, padded - 1)
    shape, whole_shape = [others, others], [others, others]
    shape[dim], whole_shape[dim] = (groups + more) * padded, groups * real
    spec = ShardSpec("tp", dim, 1, (groups + more) * ranks, tuple(shape), groups * real, group=(real, padded))
    whole = torch.arange(1, torch.Size(whole_shape).numel() + 1).view(whole_shape)
    rows = [group + [None] * (padded - real) for group in torch.arange(groups * real).view(groups, real).tolist()]
    rows += [[None] * padded] * more
    by_hand = torch.zeros(shape, dtype=whole.dtype)
    for to, source in enumerate(row for group in rows for row in group):
        if source is not None:
            by_hand.select(dim, to).copy_(whole.select(dim, source))
    shards = [spec.local_slice(whole, index) for index in range(spec.num_partitions)]
    assert torch.equal(torch.cat(shards, dim), by_hand)
    assert torch.equal(spec.assemble(shards), whole)


def test_groups_that_do_not_fit_are_refused():
    for group, unpadded in (((3, 4), 5), ((5, 4), 5), ((3, 6), 6)):
        with pytest.raises(ValueError, match=f"groups of {group[0]}, padded to {group[1]}, do not fit"):
            ShardSpec("tp", 0, 1, 2, (8,), unpadded, group=group)
    with pytest.raises(ValueError, match="groups of 3, padded to 4, do not fit shards of 2"):
        ShardSpec("tp", 0, 1, 3, (6,), 6, group=(3, 4))  # two groups are 8


def test_where_copies_are():
    specs = {axis: ShardSpec(axis, 0, 1, 2, (4,)) for axis in ("tp", "tp/4", "ep")}
    assert {axis: spec.replicated_over for axis, spec in specs.items()} == {"tp": (), "tp/4": "tp%4", "ep": "tp"}
    assert ShardSpec(full_shape=(4,)).replicated_over == "tp"


def test_fused_blocks_by_hand():
    whole = torch.arange(8)  # gate 0..3, up 4..7
    spec = ShardSpec("tp", 0, 2, 2, (8,))
    assert spec.local_slice(whole, 0).tolist() == [0, 1, 4, 5]
    assert spec.local_slice(whole, 1).tolist() == [2, 3, 6, 7]


def test_replicated():
    spec = ShardSpec(full_shape=(3,))
    x = torch.arange(3)
    assert not spec.is_sharded and spec.local_slice(x, 5) is x and spec.assemble([x, x]) is x
    assert spec.local_shape == spec.unpadded_shape == (3,)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (("tp", 0, 1, 2, (3,)), ["dim 0", "(3,)", "2 partitions"]),
        (("tp", 0, 3, 2, (8,)), ["2 partitions", "3 fused"]),
        (("tp", 1, 1, 2, (4,)), ["dim 1", "(4,)"]),
        (("tp", None, 1, 2, (4,)), ["None"]),
        (("tp", 0, 1, 2, (4,), 5), ["5", "(4,)"]),
        (("tp", 0, 2, 2, (4,), 3), ["3", "(4,)"]),
    ],
)
def test_impossible_layouts_are_refused(arguments, parts):
    with pytest.raises(ValueError) as error:
        ShardSpec(*arguments)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_tensor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(6, 2\).*\(4, 2\)"):
        ShardSpec("tp", 0, 1, 4, (8, 2), 6).local_slice(torch.ones(4, 2), 0)


class Model(nn.Module):
    def __init__(self, device=None, tie=False):
        super().__init__()
        self.embedding = ParallelEmbedding(8, 4, device=device)
        self.up = ColumnParallelLinear(4, 8, gather_output=False, stride=2, device=device)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True, sequence_parallel_enabled=True, device=device)
        self.norm = LayerNorm(4, sequence_parallel_enabled=True, device=device)
        self.head = ColumnParallelLinear(4, 8, bias=False, gather_output=False, device=device)
        self.plain = nn.Linear(2, 2, device=device)
        if tie:
            self.head.weight = self.embedding.weight


EXPECTED = {
    "embedding.weight": ShardSpec("tp", 0, 1, 2, (8, 4)),
    "up.weight": ShardSpec("tp", 0, 2, 2, (8, 4)),
    "up.bias": ShardSpec("tp", 0, 2, 2, (8,)),
    "down.weight": ShardSpec("tp", 1, 1, 2, (4, 8)),
    "down.bias": ShardSpec(full_shape=(4,), sequence_parallel=True),
    "norm.weight": ShardSpec(full_shape=(4,), sequence_parallel=True),
    "norm.bias": ShardSpec(full_shape=(4,), sequence_parallel=True),
    "head.weight": ShardSpec("tp", 0, 1, 2, (8, 4)),
    "plain.weight": ShardSpec(full_shape=(2, 2)),
    "plain.bias": ShardSpec(full_shape=(2,)),
}


def check(model: nn.Module, tie: bool = False) -> None:
    expected = {name: spec for name, spec in EXPECTED.items() if not (tie and name == "head.weight")}
    # read from the parameters first: `named_specs` would repair what was lost
    assert {name: spec_of(param) for name, param in model.named_parameters()} == expected
    assert {name: spec for name, _, spec in spmd.named_specs(model)} == expected
    for name, param in model.named_parameters():
        spec = expected[name]
        assert getattr(param, "tensor_model_parallel", False) == spec.is_sharded, name
        assert getattr(param, "sequence_parallel_enabled", False) == spec.sequence_parallel, name
        if spec.is_sharded:
            assert (param.partition_dim, param.partition_stride, param.num_partitions) == (spec.dim, spec.stride, 2)
        assert tuple(param.shape) == spec.local_shape


@pytest.fixture(autouse=True)
def rank_of_two():
    with comm.as_rank(Mesh(2, tp=2), 1):
        yield


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m,
        lambda m: m.to(torch.float64),
        lambda m: m.bfloat16(),
        lambda m: move_model_to_device(m, "meta"),  # `.to("meta")` alone unties: torch's own way
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.requires_grad_(False),
        copy.deepcopy,
        lambda m: copy.deepcopy(copy.deepcopy(m).double()),
        lambda m: torch.load(roundtrip(m), weights_only=False),
    ],
)
def test_layouts_survive(change, tie):
    model = change(Model(tie=tie))
    assert (model.head.weight is model.embedding.weight) == tie
    check(model, tie)


def roundtrip(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_layouts_survive_conversions_that_replace_parameters():
    check(Model().to("meta"))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        check(Model().to(torch.float64))
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_layouts_survive_rewrapping():
    model = Model()
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().clone()))
    check(model)


def test_layouts_survive_being_replaced_behind_the_modules_back():
    """Some libraries write into `_parameters`. `named_specs` finds the layout with the module, and restores it."""
    model = Model()
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                module._parameters[name] = nn.Parameter(param.detach().clone())
    assert not spec_of(model.up.weight).is_sharded
    list(spmd.named_specs(model))
    check(model)


@pytest.mark.parametrize("device", [None, "meta"])
def test_layouts_survive_assigning_a_state_dict(device):
    state = Model().state_dict()
    model = Model(device=device)
    model.load_state_dict(state, assign=True)
    check(model)
    model.load_state_dict(state)
    check(model)


def test_tied_parameters_are_named_once():
    names = [name for name, _, _ in spmd.named_specs(Model(tie=True))]
    assert len(names) == len(set(names)) == len(EXPECTED) - 1 and "head.weight" not in names


def test_sequence_parallelism_marked_by_hand():
    param = nn.Parameter(torch.ones(3))
    assert spec_of(param) == ShardSpec(full_shape=(3,))
    param.sequence_parallel_enabled = True
    assert spec_of(param) == ShardSpec(full_shape=(3,), sequence_parallel=True)
    norm = LayerNorm(4)
    norm.weight.sequence_parallel_enabled = True
    assert spec_of(norm.weight).sequence_parallel and not spec_of(norm.bias).sequence_parallel
    norm.weight.sequence_parallel_enabled = False
    assert not spec_of(norm.weight).sequence_parallel


def test_sharding_marked_by_hand_in_nxds_way():
    param = nn.Parameter(torch.ones(3, 4))
    param.tensor_model_parallel, param.partition_dim, param.partition_stride, param.num_partitions = True, 1, 2, 4
    assert spec_of(param) == ShardSpec("tp", 1, 2, 4, (3, 16))
    param = nn.Parameter(torch.ones(3, 4))
    set_tensor_model_parallel_attributes(param, True, 0)  # num_partitions -1: the tensor-parallel size
    assert param.num_partitions == -1 and spec_of(param) == ShardSpec("tp", 0, 1, 2, (6, 4))
    param = nn.Parameter(torch.ones(3, 4))
    set_tensor_model_parallel_attributes(param, False, -1)
    assert spec_of(param) == ShardSpec(full_shape=(3, 4))
    with pytest.raises(ValueError, match="already"):
        set_tensor_model_parallel_attributes(param, True, 0)


def test_set_spec_on_any_module():
    linear = nn.Linear(4, 2)
    spec = ShardSpec("tp", 0, 1, 2, (4, 4))
    spmd.set_spec(linear, "weight", spec)
    assert spec_of(linear.weight) == spec and linear.weight.partition_dim == 0
    moved = copy.deepcopy(linear)
    assert {name: found for name, _, found in spmd.named_specs(moved)}["weight"] == spec


def test_one_shard_may_have_all_positions() -> None:
    layout, whole = ShardSpec("tp", 0, num_partitions=3, full_shape=(5, 2), holder=1), torch.arange(10.0).view(5, 2)
    shards = [layout.local_slice(whole, index) for index in range(3)]
    assert [tuple(shard.shape) for shard in shards] == [(0, 2), (5, 2), (0, 2)] == [*map(layout.shape_of, range(3))]
    torch.testing.assert_close(layout.assemble(shards), whole)
    with pytest.raises(ValueError, match="shard 3 of 3 cannot have all positions"):
        ShardSpec("tp", 0, num_partitions=3, full_shape=(5, 2), holder=3)
