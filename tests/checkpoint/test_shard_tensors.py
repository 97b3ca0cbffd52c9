"""`save_checkpoint` of models whose parameters are ShardTensors or DTensors: from and to any layout, plain ones too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import neuronx_dist
from neuronx_dist.checkpoint.errors import CheckpointMismatch
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.shard_tensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor, distribute_module
from neuronx_dist.shard_tensor import distribute_tensor as distribute
from tests.shard_tensor.support.cases import assert_close, on_ranks
from tests.support.pool import processes

LAYOUTS = {
    "plain": None,
    "replicated": (Replicate(), Replicate()),
    "rows": (Replicate(), Shard(0)),
    "columns": (Shard(1), Replicate()),
    "grid": (Shard(1), Shard(0)),
}


def drawn(module: nn.Module, seed: int) -> nn.Module:
    """The module in float64, with values that do not depend on other threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in module.double().parameters():
            x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64))
    return module


def model(layout: str, mesh: DeviceMesh, seed: int = 0) -> nn.Sequential:
    """A model on 2 x 2 ranks, with a buffer; weights have shards of uneven sizes."""
    module = drawn(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 7), nn.Linear(7, 3)), seed)

    def split(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
        placements = LAYOUTS[layout]
        if isinstance(layer, nn.Linear) and placements is not None:
            sizes = [(1, layer.weight.shape[p.dim] - 1) if isinstance(p, Shard) else None for p in placements]
            layer.weight = nn.Parameter(distribute(layer.weight.detach(), mesh, placements, sizes=sizes, src=None))

    return module if layout == "plain" else distribute_module(module, mesh, split)


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (x.full_tensor() if isinstance(x, ShardTensor) else x).detach() for name, x in module.state_dict().items()
    }


@pytest.mark.each_value
@pytest.mark.parametrize("load", LAYOUTS)
@pytest.mark.parametrize("save", LAYOUTS)
def test_weights_and_state_of_every_layout_load_into_every_other(tmp_path, save, load):
    def run(mesh):
        saved = model(save, mesh)
        optimizer = torch.optim.AdamW(saved.parameters(), lr=0.1)
        step(saved, optimizer)
        neuronx_dist.save_checkpoint(tmp_path, "1", model=saved, optimizer=optimizer, async_save=save == "grid")
        step(saved, optimizer)  # an asynchronous save has the values before this step
        neuronx_dist.finalize_checkpoint()
        loaded = model(load, mesh, seed=1)
        other = torch.optim.AdamW(loaded.parameters(), lr=0.5)
        neuronx_dist.load_checkpoint(tmp_path, "1", model=loaded, optimizer=other)
        assert all(type(x) is type(y) for x, y in zip(loaded.parameters(), model(load, mesh).parameters()))
        step(loaded, other)
        return values(saved), values(loaded)

    for expected, actual in on_ranks(4, run, (2, 2)):
        for name, x in expected.items():
            assert_close(actual[name], x, f"{name}, saved as {save}, loaded as {load}")


def test_a_model_on_meta_and_a_whole_file(tmp_path):
    def run(mesh):
        saved = model("grid", mesh)
        neuronx_dist.save_checkpoint(tmp_path, "1", model=saved)
        with torch.device("meta"):
            loaded = model("grid", mesh)
        assert loaded[1].weight.is_meta
        weight = loaded[1].weight
        neuronx_dist.load_checkpoint(tmp_path, "1", model=loaded)
        assert loaded[1].weight is weight and weight.placements == LAYOUTS["grid"]
        return values(saved), values(loaded)

    for expected, actual in on_ranks(4, run, (2, 2)):
        assert all(torch.equal(actual[name], x) for name, x in expected.items())


def test_a_sum_over_ranks_is_refused_by_its_name(tmp_path):
    def run(mesh):
        module = nn.Module()
        module.scale = nn.Parameter(ShardTensor.from_local(torch.ones(3), mesh, [Partial()]))
        with pytest.raises(ValueError, match=r"^scale cannot be a part of a checkpoint: .*Partial.* redistribute"):
            neuronx_dist.save_checkpoint(tmp_path, "1", model=module)

    on_ranks(2, run)


def test_another_shape_is_a_mismatch(tmp_path):
    def run(mesh):
        neuronx_dist.save_checkpoint(tmp_path, "1", model=distribute_module(nn.Linear(2, 6), mesh))
        other = distribute_module(nn.Linear(3, 6), mesh, lambda _, layer: layer._apply(lambda x: shards(x, mesh)))
        with pytest.raises(CheckpointMismatch, match=r"weight has shape \(6, 2\) in the checkpoint and \(6, 3\)"):
            neuronx_dist.load_checkpoint(tmp_path, "1", model=other)

    def shards(x, mesh):
        return distribute(x.detach(), mesh, [Shard(0)], src=None)

    on_ranks(2, run)


def _zero1(folder: str) -> None:
    """ZeRO-1 over dp of weights that are sharded over tp, by rows and by columns, loaded by a plain optimizer."""
    mesh = DeviceMesh.from_axes(("dp", "tp"))

    def optimized(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = drawn(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), seed)

        def split(name: str, layer: nn.Module) -> None:
            if isinstance(layer, nn.Linear):
                dim = int(name)
                size = layer.weight.shape[dim]
                x = distribute(layer.weight.detach(), mesh["tp"], [Shard(dim)], sizes=[(1, size - 1)])
                layer.weight = nn.Parameter(x)

        distribute_module(module, mesh["tp"], split)
        return module, NeuronZero1Optimizer(module.parameters(), torch.optim.AdamW, lr=0.1, grad_clipping=False)

    saved, optimizer = optimized(0)
    step(saved, optimizer)
    neuronx_dist.save_checkpoint(folder, "1", model=saved, optimizer=optimizer)
    loaded, other = optimized(1)
    neuronx_dist.load_checkpoint(folder, "1", model=loaded, optimizer=other)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    third = torch.optim.AdamW(plain.parameters(), lr=0.5)
    neuronx_dist.load_checkpoint(folder, "1", model=plain, optimizer=third)
    for module, steps in ((saved, optimizer), (loaded, other), (plain, third)):
        step(module, steps)
    for name, x in values(saved).items():
        assert_close(values(loaded)[name], x, name)
        assert_close(plain.state_dict()[name], x, name)


@pytest.mark.process
def test_zero1_of_sharded_weights(tmp_path):
    processes(4).run(_zero1, str(tmp_path), mesh=dict(tp=2))


def _fully_sharded(folder: str) -> None:
    def optimized(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = drawn(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), seed)
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    saved, optimizer = optimized(0)
    step(saved, optimizer)
    neuronx_dist.save_checkpoint(folder, "1", model=saved, optimizer=optimizer)
    loaded, other = optimized(1)
    neuronx_dist.load_checkpoint(folder, "1", model=loaded, optimizer=other)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    neuronx_dist.load_checkpoint(folder, "1", model=plain)
    for name, x in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].full_tensor(), x.full_tensor()), name
        assert torch.equal(plain.state_dict()[name], x.full_tensor()), name
    step(saved, optimizer)
    step(loaded, other)
    for name, x in saved.state_dict().items():
        assert_close(loaded.state_dict()[name].full_tensor(), x.full_tensor(), name)


@pytest.mark.process
def test_parameters_of_fully_shard(tmp_path):
    processes(2).run(_fully_sharded, str(tmp_path), mesh={})
