"""The code of the DistributedTensor RFC (PyTorch, 2022), in its order and its words.

Changed are the imports, the device, and what is no Python there: `DeviceMesh(device_type="cuda", [0, 1, 2, 3])` is
`DeviceMesh("cpu", [0, 1, 2, 3])`, `def MyModule` a class. It runs on 4 ranks; behind each block stands what is true.

    torchrun --nproc-per-node 4 examples/shard_tensor/rfc.py
"""
# mypy: ignore-errors

import argparse

import torch
import torch.nn as nn
from tutorial import say

import neuronx_dist.distributed as distributed
from neuronx_dist.distributed import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from neuronx_dist.shard_tensor import DistributedManager


class MyModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, input):
        return self.relu(self.fc1(input) + self.fc2(input))


def expect(what: str, fact: bool) -> None:
    if not fact:
        raise SystemExit(f"not so: {what}")
    say(f"{what}: so it is")


def big_tensor_in_three_lines(world_size: int) -> None:
    mesh = DeviceMesh("cpu", list(range(world_size)))
    big_tensor = torch.randn(100000, 88)
    sharded = distribute_tensor(big_tensor, mesh, [Shard(dim=0)])

    expect("a rank holds a quarter", sharded.to_local().shape == (25000, 88))


def tensors() -> None:
    # construct a device mesh with available devices (multi-host or single host)
    device_mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    # if we want to do row-wise sharding
    rowwise_placement = [Shard(0)]
    # if we want to do col-wise sharding
    colwise_placement = [Shard(1)]
    # distributed tensor returned will be sharded across the dimension specified in placements
    rowwise = distributed.empty((8, 12), device_mesh=device_mesh, placements=rowwise_placement)

    # if we want to do replication across a certain device list
    replica_placement = [Replicate()]
    # distributed tensor will be replicated to all four GPUs.
    replica = distributed.empty((8, 12), device_mesh=device_mesh, placements=replica_placement)

    # if we want to distributed a tensor with both replication and sharding
    device_mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    # replicate across the first dimension of device mesh, then sharding on the second dimension of device mesh
    spec = [Replicate(), Shard(0)]
    both = distributed.empty((8, 8), device_mesh=device_mesh, placements=spec)

    expect("row-wise: two of eight rows", rowwise.to_local().shape == (2, 12))
    expect("replicated: all rows", replica.to_local().shape == (8, 12))
    expect("both: half of the rows", both.to_local().shape == (4, 8))

    device_mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    # create a DistributedTensor that shards on dim 0, from a local torch.Tensor
    local_tensor = torch.randn((8, 8), requires_grad=True)
    rowwise_tensor = DTensor.from_local(local_tensor, device_mesh, rowwise_placement)

    # reshard the current rowise tensor to a colwise tensor or replicate tensor
    colwise_tensor = rowwise_tensor.redistribute(device_mesh, colwise_placement)
    replica_tensor = colwise_tensor.redistribute(device_mesh, replica_placement)

    expect("four local tensors of 8 rows are one of 32", rowwise_tensor.shape == (32, 8))
    expect("column-wise: two of eight columns", colwise_tensor.to_local().shape == (32, 2))
    replica_tensor.sum().backward()
    expect("gradients come back through both", torch.equal(local_tensor.grad, torch.ones(8, 8)))


def modules() -> None:
    mesh = device_mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    rowwise_placement = [Shard(0)]
    torch.manual_seed(0)
    alone, model, other = MyModule(), MyModule(), MyModule()
    model.load_state_dict(alone.state_dict())
    other.load_state_dict(alone.state_dict())

    def shard_params(mod_name, mod):
        def to_dist_tensor(t):
            return distribute_tensor(t, mesh, rowwise_placement)

        mod._apply(to_dist_tensor)

    sharded_module = distribute_module(model, device_mesh, partition_fn=shard_params)
    check_module(sharded_module, alone, "every parameter row-wise")
    expect("fc2 is row-wise, too", model.fc2.weight.placements == (Shard(0),))

    def shard_fc(mod_name, mod):
        if mod_name == "fc1":
            mod.weight = torch.nn.Parameter(distribute_tensor(mod.weight, device_mesh, rowwise_placement))

    sharded_module = distribute_module(other, device_mesh, partition_fn=shard_fc)
    check_module(sharded_module, alone, "fc1 row-wise")
    expect("fc2 is replicated", other.fc2.weight.placements == (Replicate(),))


def check_module(module: nn.Module, alone: nn.Module, what: str) -> None:
    """Outputs and gradients against the module of one process."""
    x = torch.linspace(-1, 1, 24).view(3, 8)
    alone.zero_grad()
    alone(x).square().sum().backward()
    module(x).square().sum().backward()
    expect(f"{what}: the output", torch.allclose(module(x).full_tensor(), alone(x), atol=1e-6))
    for (name, param), expected in zip(module.named_parameters(), alone.parameters()):
        expect(f"{what}: gradient of {name}", torch.allclose(param.grad.full_tensor(), expected.grad, atol=1e-6))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    DistributedManager.initialize("cpu")
    world_size = DistributedManager().world_size
    if world_size != 4:
        raise SystemExit(
            f"rfc.py needs 4 ranks, as the RFC's meshes have them, not {world_size}: torchrun --nproc-per-node 4"
        )
    torch.manual_seed(0)
    big_tensor_in_three_lines(world_size)
    tensors()
    modules()


if __name__ == "__main__":
    main()
