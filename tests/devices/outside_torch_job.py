"""A training run for test_outside_torch.py: `outside_torch_job.py DEVICE FOLDER`; rank 0 prints its figures as JSON."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import accelerator, comm, spmd
from neuronx_dist.optimizer import MuonAdamW, muon_groups
from neuronx_dist.parallel_layers.random import get_rng_state, model_parallel_manual_seed
from neuronx_dist.parallelize import ComputeConfig, build_optimizer, parallelize
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


def on_threads(device: torch.device) -> list[float]:
    """Gradients of two ranks that are threads of this process, with a collective in backward."""

    def rank() -> float:
        x = torch.full((3,), 1.0 + comm.rank("tp"), device=device, requires_grad=True)
        spmd.all_reduce(x.square(), "tp", src=spmd.P, dst=spmd.R).sum().backward()
        assert x.grad is not None
        return float(x.grad.sum())

    return comm.threads.run(nxd.Mesh(2, tp=2), rank, timeout=20.0)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def divided(device: torch.device, folder: str) -> list[float]:
    """Losses of two steps of a module that `parallelize` divides over both processes, on the module's device."""
    torch.manual_seed(11)
    module, x = _Mlp().double().to(device), torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8).to(device)
    parallel: Any = parallelize(module, {"x": x}, "tp", ComputeConfig(plan_ngpus=2), gen_savedir=folder + "/generated")
    assert {param.device for param in parallel.parameters()} == {x.device}
    optimizer = build_optimizer(parallel, partial(torch.optim.SGD, lr=0.1))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = parallel(x=x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class _Tokens(nn.Module):
    """An embedding, two blocks and the fused loss of a head, over both processes."""

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.float64
        self.embed = nxd.ParallelEmbedding(12, 8, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nxd.ColumnParallelLinear(8, 16, gather_output=False, dtype=dtype),
                nn.Tanh(),
                nxd.RowParallelLinear(16, 8, input_is_parallel=True, dtype=dtype),
            )
            for _ in range(2)
        )
        self.lm_head = nxd.ColumnParallelLinear(8, 12, bias=False, gather_output=False, dtype=dtype)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nxd.parallel_linear_cross_entropy(x, self.lm_head.weight, labels, chunk_size=5)


def muon(device: torch.device) -> list[float]:
    """Losses of three steps of Muon, with the fused loss, blocks recomputed and their inputs on the host."""
    torch.manual_seed(13)
    model = nxd.move_model_to_device(_Tokens(), device)
    nxd.recompute(model, "Sequential", offload=True)
    optimizer = nxd.NeuronZero1Optimizer(muon_groups(model), MuonAdamW, lr=0.05)
    ids = torch.arange(24).view(2, 12).remainder(12)
    losses = []
    for _ in range(3):
        loss = model(ids.to(device), ids.roll(1, 1).to(device))
        loss.backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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
    rows = [placed[[0, 3]], placed[torch.tensor([1, 2])]]  # positions on the CPU, as torch takes them
    assert all(x.full_tensor().cpu().equal(torch.ones(2, 6)) for x in rows)
    figures += [float(placed.sum().full_tensor()), float(len(get_rng_state()))]
    divided_losses, muon_losses = divided(device, folder), muon(device)
    nxd.destroy_model_parallel()
    norms, threads = pipeline(device), on_threads(device)
    if torch.distributed.get_rank() == 0:
        report = {
            "figures": figures,
            "norms": norms,
            "threads": threads,
            "divided": divided_losses,
            "muon": muon_losses,
            "device": str(device),
        }
        print(json.dumps({**report, "local": str(placed.to_local().device), "calls": outside_torch.CALLS}))
    nxd.destroy_model_parallel()


if __name__ == "__main__":
    main(*sys.argv[1:])
