"""A training run for test_outside_torch.py: `outside_torch_job.py DEVICE FOLDER`; rank 0 prints its figures as JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import accelerator
from neuronx_dist.parallel_layers.random import get_rng_state, model_parallel_manual_seed
from neuronx_dist.shard_tensor.construct import ones
from neuronx_dist.shard_tensor.device_mesh import DeviceMesh
from neuronx_dist.shard_tensor.placements import Shard
from tests.support.devices import outside_torch


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block() for _ in range(4)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def pipeline(device: torch.device) -> list[float]:
    """Gradient norms of two steps of a pipeline of two stages."""
    nxd.initialize_model_parallel(pipeline_model_parallel_size=torch.distributed.get_world_size())
    torch.manual_seed(7)
    model = nxd.NxDPPModel(
        _Model(),
        transformer_layer_cls=_Block,
        num_microbatches=4,
        auto_partition=True,
        input_names=["x", "y"],
        output_loss_value_spec=True,
    )
    nxd.move_model_to_device(model, device)
    optimizer = nxd.NeuronZero1Optimizer(model.local_parameters(), torch.optim.AdamW, lr=0.1)
    x, y = torch.linspace(-1, 1, 64).view(8, 8).to(device), torch.ones(8, 8, device=device)
    norms = []
    for _ in range(2):
        model.run_train(x=x, y=y)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    return norms


def main(name: str, folder: str) -> None:
    if name == outside_torch.NAME:
        outside_torch.register()
        if "shares" not in folder:  # each process sees one device, number 0
            os.environ["IMITATED_VISIBLE_CORES"] = os.environ["LOCAL_RANK"]
        os.environ["LOCAL_RANK"] = "0"
    device = nxd.init_distributed("cpu" if name == "cpu" else "auto")
    nxd.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    torch.manual_seed(3)
    layers = [
        nxd.ColumnParallelLinear(8, 16, gather_output=False, dtype=torch.float64),
        nn.Dropout(0.5),
        nxd.RowParallelLinear(16, 8, input_is_parallel=True, dtype=torch.float64),
    ]
    model = nxd.move_model_to_device(nn.Sequential(nxd.checkpoint_wrapper(nn.Sequential(*layers))), device)
    optimizer = nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model_parallel_manual_seed(5)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8).to(device)
    figures: list[float] = []

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        figures.extend([loss.item(), float(optimizer.grad_norm)])

    step()
    nxd.save_checkpoint(folder, "one", model=model, optimizer=optimizer, async_save=True)
    nxd.finalize_checkpoint()
    step()
    nxd.load_checkpoint(folder, "one", model=model, optimizer=optimizer)
    step()
    with accelerator.random_state_restored():
        first = torch.rand(3, device=device).tolist()
    figures.append(float(first == torch.rand(3, device=device).tolist()))
    mesh = DeviceMesh.from_axes("tp", device_type=device.type)
    placed = ones(4, 6, device_mesh=mesh, placements=[Shard(0)])
    figures += [float(placed.sum().full_tensor()), float(len(get_rng_state()))]
    nxd.destroy_model_parallel()
    norms = pipeline(device)
    if torch.distributed.get_rank() == 0:
        report = {"figures": figures, "norms": norms, "device": str(device)}
        print(json.dumps({**report, "local": str(placed.to_local().device), "calls": outside_torch.CALLS}))
    nxd.destroy_model_parallel()


if __name__ == "__main__":
    main(*sys.argv[1:])
