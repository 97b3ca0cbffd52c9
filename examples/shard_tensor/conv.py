"""A convolution of an image whose rows are on all ranks: each exchanges one row with each neighbour, in both passes.

torchrun --nproc-per-node 2 examples/shard_tensor/conv.py [--size full]
"""

import copy
from typing import Any

import torch
from torch import nn
from tutorial import expect_equal, expect_traffic, say, seconds, size_of

from neuronx_dist.shard_tensor import DistributedManager, Shard, distribute_module, report, scatter_tensor


def main() -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    n, _ = size_of(128, full=1024)

    torch.manual_seed(0)
    alone: Any = nn.Conv2d(8, 8, 3, padding=1, device=manager.device)
    conv: Any = distribute_module(copy.deepcopy(alone), mesh)
    image = torch.randn(1, 8, n, n, device=manager.device)
    x = scatter_tensor(image, 0, mesh, (Shard(2),), requires_grad=True)

    def step() -> torch.Tensor:
        conv.zero_grad()
        x.grad = None
        y = conv(x)
        y.square().mean().backward()
        return y

    with report() as r:
        y = step()
    neighbours = 0 if manager.world_size == 1 else 1 if manager.rank in (0, manager.world_size - 1) else 2
    halos = neighbours * 8 * n * 4
    weights = sum(param.numel() for param in alone.parameters()) * 4
    if neighbours:
        # forward: halos, one scalar of the mean; backward: halos' gradients, those of weight and bias
        expect_traffic(r, {"exchange": 2, "all_reduce": 2}, 2 * halos + 4 + weights)
    say(f"halos of this rank: {halos:,} bytes in each pass; the image has {image.numel() * 4:,}")

    image.requires_grad_()
    expected = alone(image)
    expected.square().mean().backward()
    expect_equal("output", y, expected)
    expect_equal("gradient of the image", x.grad, image.grad)
    expect_equal("gradient of the weight", conv.weight.grad, alone.weight.grad)
    expect_equal("gradient of the bias", conv.bias.grad, alone.bias.grad)
    say(f"{n} x {n} on {manager.world_size} ranks: {seconds(step) * 1e3:.2f} ms a step")


if __name__ == "__main__":
    main()
