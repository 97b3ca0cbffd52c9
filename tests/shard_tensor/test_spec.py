"""Layouts: frozen, the same object where they are equal, and forgotten with what is planned for them."""

from __future__ import annotations

import copy
import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.tensor as torch_placements
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from neuronx_dist.shard_tensor import Partial, Replicate, Shard, ShardTensorSpec, distribute_tensor
from neuronx_dist.shard_tensor.bounded import Bounded
from neuronx_dist.shard_tensor.spec import make_spec
from tests.shard_tensor.support.cases import on_ranks


def test_no_attribute_can_be_set():
    def function(mesh):
        spec = make_spec(mesh, [Shard(0)], (7, 2), [(5, 2)])
        for name in (*ShardTensorSpec.__annotations__, "other"):
            with pytest.raises(
                AttributeError, match=f"{name} of a layout cannot be set, because tensors share the layout"
            ):
                setattr(spec, name, None)
        with pytest.raises(AttributeError, match="shape of a layout cannot be deleted"):
            del spec.shape
        with pytest.raises(TypeError):
            spec.mesh_dim_of[1] = 0
        assert copy.deepcopy(spec) is spec and spec.mesh_dim_of == {0: 0} and spec.sizes == ((5, 2),)

    on_ranks(2, function)


def test_equal_layouts_are_one_object_as_long_as_somebody_holds_one():
    def function(mesh):
        x = distribute_tensor(torch.ones(7, 2), mesh, [Shard(0)], sizes=[(5, 2)], src=None)
        for n in range(3000):  # more than are remembered by their arguments
            make_spec(mesh, [Replicate()], (n,))
        assert make_spec(mesh, [Shard(-2)], torch.Size((7, 2)), [[5, 2]]) is x._spec

    on_ranks(2, function)


@pytest.mark.slow
@pytest.mark.full
def test_a_thousand_layouts_do_not_stay():
    def function(mesh):
        def layouts(first):
            for n in range(first, first + 1000):
                x = distribute_tensor(torch.ones(n), mesh, [Shard(0)], sizes=[(n - 1, 1)], src=None)
                (x * x.sum()).redistribute(mesh, [Replicate()])

        def held():
            gc.collect()
            specs = len(mesh.tables["living specs"])
            return specs, len(mesh.plans), *(len(each) for each in mesh.tables.values() if isinstance(each, Bounded))

        layouts(2)
        once = held()
        layouts(2000)
        again = held()
        assert max(again[1:]) <= 1024 and again[0] <= 4096
        assert again[0] <= 1.2 * once[0]
        return once, again

    on_ranks(2, function)


def test_what_is_forgotten_is_what_was_learned_first():
    table = Bounded(8)
    for n in range(9):
        table[n] = n
    assert sorted(table) == [2, 3, 4, 5, 6, 7, 8]


def test_names_of_torchs_spec_have_its_values():
    """Compared with DTensorSpec for each pair of placements on a mesh of 2 x 2."""

    def function(mesh):
        placements = [Replicate(), Shard(0), Shard(1), Partial()]
        for pair in itertools.product(placements, repeat=2):
            if pair[0] == pair[1] and isinstance(pair[0], Shard):
                continue
            spec = make_spec(mesh, pair, (8, 6, 5))
            theirs = tuple(
                getattr(torch_placements, type(p).__name__)(*([p.dim] if isinstance(p, Shard) else [])) for p in pair
            )
            grid = SimpleNamespace(ndim=2, size=lambda m: 2)
            meta = TensorMeta(torch.Size((8, 6, 5)), (30, 5, 1), torch.float32)
            expected = SimpleNamespace(mesh=grid, placements=theirs, ndim=3, tensor_meta=meta, device_mesh=grid)
            for name in ("num_shards", "dim_map", "num_shards_map", "sums"):
                assert getattr(spec, name) == getattr(DTensorSpec, name).fget(expected), (name, pair)
            for name in ("is_replicated", "is_sharded"):
                assert getattr(spec, name)() == getattr(DTensorSpec, name)(expected), (name, pair)
            assert spec.ndim == 3 and spec.device_mesh is mesh
            assert spec.tensor_meta == meta[:2]

    on_ranks(4, function, (2, 2))
