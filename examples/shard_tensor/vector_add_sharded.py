"""Example 0, on all ranks: the sum of two vectors. Nothing is communicated, in neither pass.

torchrun --nproc-per-node 2 examples/shard_tensor/vector_add_sharded.py [--size full]
"""

from typing import Any

import torch
from tutorial import expect_equal, expect_traffic, say, seconds, size_of
from vector_add_baseline import f

from neuronx_dist.shard_tensor import DistributedManager, Shard, report, scatter_tensor


def main() -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    (n,), small = size_of((1_000_003,), full=(1_000_000_000,))

    torch.manual_seed(0)
    whole: list[Any] = [torch.randn(n, device=manager.device) if small or manager.rank == 0 else None for _ in range(2)]
    a, b = (scatter_tensor(x, 0, mesh, (Shard(0),), requires_grad=True) for x in whole)

    with report() as r:
        c = f(a, b)
        c.backward(torch.ones_like(c))
    expect_traffic(r, {})
    if small:
        expect_equal("a + b", c, f(*whole))
        expect_equal("gradient of a", a.grad, torch.ones(n, device=manager.device))
    say(f"{n:,} elements on {manager.world_size} ranks: {seconds(lambda: f(a, b)) * 1e3:.2f} ms a call")


if __name__ == "__main__":
    main()
