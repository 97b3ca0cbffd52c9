"""Example 2: what becomes of shards that disagree. The larger tensor stays as it is, and the smaller one is gathered.

torchrun --nproc-per-node 2 examples/shard_tensor/reshape_subtract.py [--size full]
"""

from typing import Any

import torch
from tutorial import expect_equal, expect_traffic, say, size_of

from neuronx_dist.shard_tensor import DistributedManager, Shard, report, scatter_tensor


def main() -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    (n, m), small = size_of((2_344, 124), full=(234_567, 12_345))

    torch.manual_seed(0)
    a, b = (torch.randn(count, 3, device=manager.device) for count in (n, m))
    a_sharded: Any
    b_sharded: Any
    a_sharded, b_sharded = (scatter_tensor(x, 0, mesh, (Shard(0),)) for x in (a, b))
    say(f"a_sharded shape and placement: {a_sharded.shape}, {a_sharded.placements}")
    say(f"b_sharded shape and placement: {b_sharded.shape}, {b_sharded.placements}")

    a_sharded, b_sharded = a_sharded[None, :, :], b_sharded[:, None, :]
    say(f"a_sharded shape and placement: {a_sharded.shape}, {a_sharded.placements}")
    say(f"b_sharded shape and placement: {b_sharded.shape}, {b_sharded.placements}")

    with report() as r:
        distance_vec = a_sharded - b_sharded
    say(f"distance_vec shape and placement: {distance_vec.shape}, {distance_vec.placements}")
    even = m % manager.world_size == 0
    verbs = {} if manager.world_size == 1 else {"all_gather" if even else "exchange": 1}
    expect_traffic(r, verbs, None if not even else m * 3 * 4 * len(verbs))
    if small:
        expect_equal("displacements", distance_vec, a[None, :, :] - b[:, None, :])


if __name__ == "__main__":
    main()
