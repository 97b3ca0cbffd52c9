"""Example 2, on all ranks, with the function of one device as it is.

`y` is gathered, since `x` is larger; of the distances each rank sends its nearest ones alone, and then the points that
were chosen travel. No rank is sent the distances.

torchrun --nproc-per-node 2 examples/shard_tensor/knn_brute_force_sharded.py [--size full]
"""

from typing import Any

import torch
from knn_brute_force_baseline import FULL, LAPTOP, knn
from tutorial import expect_equal, say, seconds, size_of

from neuronx_dist.shard_tensor import DistributedManager, Shard, report, scatter_tensor


def main() -> None:
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh((-1,), ("domain",))
    (to_search, targets, n), small = size_of(LAPTOP, FULL)

    torch.manual_seed(0)
    whole: list[Any] = [
        torch.randn(count, 3, device=manager.device) if small or manager.rank == 0 else None
        for count in (to_search, targets)
    ]
    x, y = (scatter_tensor(x, 0, mesh, (Shard(0),)) for x in whole)

    with report() as r:
        neighbours, distances = knn(x, y, n)
    say(r)
    distance_bytes = to_search * targets * 4
    if r.gathers or r.bytes > distance_bytes // 4:
        raise SystemExit(f"more travels than candidates, where all distances are {distance_bytes:,} bytes:\n{r}")
    if small:
        expected, expected_distances = knn(whole[0], whole[1], n)
        expect_equal("distances", distances, expected_distances)
        expect_equal("neighbours", neighbours, expected)
    say(f"{targets:,} points in {to_search:,}: {seconds(lambda: knn(x, y, n)) * 1e3:.2f} ms a call")


if __name__ == "__main__":
    main()
