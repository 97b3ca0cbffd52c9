"""State dicts of ShardTensors: `torch.distributed.checkpoint` from and to any layout and world size, `torch.save`."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import distribute_tensor as distribute_dtensor

from neuronx_dist import distributed
from neuronx_dist.shard_tensor import Replicate, Shard, distribute_tensor
from tests.shard_tensor.support.cases import on_ranks
from tests.support.pool import processes

LAYOUTS = ["plain", "dtensor", "uneven", "replicated", "grid", "twice", "dtensor twice"]


def whole() -> torch.Tensor:
    return torch.arange(7 * 6, dtype=torch.float32).view(7, 6)


def lay(x: torch.Tensor, layout: str, world: int) -> torch.Tensor:
    mesh = distributed.init_device_mesh("cpu", (world,))
    grid = distributed.init_device_mesh("cpu", (2, world // 2))
    if layout == "plain":
        return x.clone()
    if layout == "dtensor":
        return distribute_dtensor(x, mesh.to_torch(), [Shard(1)])
    if layout == "uneven":
        return distribute_tensor(x, mesh, [Shard(0)], sizes=[(1, 5, 0, 1) if world == 4 else (0, 7)])
    if layout == "replicated":
        return distribute_tensor(x, grid, [Replicate(), Shard(0)])
    if layout == "twice":
        return distribute_tensor(x, grid, [Shard(0), Shard(0)], sizes=[(3, 0, 1, 3) if world == 4 else (5, 2), None])
    if layout == "dtensor twice":
        return distribute_dtensor(x, grid.to_torch(), [Shard(0), Shard(0)])
    return distribute_tensor(x, grid, [Shard(1), Shard(0)], sizes=[(1, 5), (3, 4) if world == 4 else (7,)])


def save(folder: str, world: int) -> None:
    state = {layout: lay(whole(), layout, world) for layout in LAYOUTS}
    dcp.save({"step": 3, **state}, checkpoint_id=folder)


def load(folder: str, world: int, shift: int) -> None:
    """Each tensor is loaded in the layout that is `shift` further in the list."""
    others = LAYOUTS[shift:] + LAYOUTS[:shift]
    state = {saved: lay(torch.zeros(7, 6), other, world) for saved, other in zip(LAYOUTS, others)}
    everything = {"step": 0, **state}
    dcp.load(everything, checkpoint_id=folder)
    assert everything["step"] == 3
    for (saved, x), other in zip(state.items(), others):
        loaded = x if other == "plain" else x.full_tensor()
        assert torch.equal(loaded, whole()), f"saved as {saved}, loaded as {other}: {loaded}"


@pytest.mark.process
def test_every_layout_loads_every_other_and_another_world_size(tmp_path):
    processes(4).run(save, str(tmp_path / "4"), 4, mesh={})
    for shift in range(len(LAYOUTS)):
        processes(4).run(load, str(tmp_path / "4"), 4, shift, mesh={})
    processes(2).run(load, str(tmp_path / "4"), 2, 3, mesh={})
    processes(2).run(save, str(tmp_path / "2"), 2, mesh={})
    processes(4).run(load, str(tmp_path / "2"), 4, 1, mesh={})


def test_an_empty_shard_writes_nothing_and_a_summand_is_refused():
    def items(mesh):
        x = distribute_tensor(whole(), mesh, [Shard(0)], sizes=[(0, 7)], src=None)
        chunks = x.__create_chunk_list__()
        assert len(x.__create_write_items__("x", x)) == len(chunks) == mesh.get_rank()
        y = distribute_tensor(whole(), mesh, [Shard(0)], src=None)
        with pytest.raises(ValueError, match="the block at \\(2, 0\\) was requested"):
            y.__get_tensor_shard__(MetadataIndex("y", torch.Size((2, 0))))
        partial = torch.dot(y.redistribute(placements=[Shard(0)])[:, 0], y[:, 0])
        with pytest.raises(ValueError, match="checkpoint: loss is .*redistribute"):
            partial.__create_write_items__("loss", partial)

    on_ranks(2, items)


@pytest.mark.parametrize("weights_only", [False, True])
def test_torch_save(weights_only):
    def copied(mesh):
        x = torch.nn.Parameter(distribute_tensor(whole(), mesh, [Shard(0)], sizes=[(2, 5)], src=None))
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        y = torch.load(file, weights_only=weights_only)["x"]
        assert y._spec is x._spec and isinstance(y, torch.nn.Parameter)
        assert torch.equal(y.full_tensor(), whole())

    on_ranks(2, copied)


def test_state_dicts_of_modules_load_plain_values_into_shards():
    def load_plain(mesh):
        module = torch.nn.Linear(6, 7)
        module.weight = torch.nn.Parameter(distribute_tensor(whole() * 0, mesh, [Shard(0)], sizes=[(2, 5)], src=None))
        module.load_state_dict({"weight": whole(), "bias": torch.ones(7)})
        assert torch.equal(module.weight.full_tensor(), whole()) and module.weight.placements == (Shard(0),)
        assert module.state_dict()["weight"]._spec is module.weight._spec

    on_ranks(2, load_plain)
