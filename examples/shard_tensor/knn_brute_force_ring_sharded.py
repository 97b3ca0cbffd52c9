"""Example 2, on all ranks, by a ring: the points to search in travel, and no rank ever holds all distances.

`knn` is no function of torch: it asks `torch.overrides` for handlers, and the one that is registered here computes it.
While a rank searches one part of the points, the next part is on its way.

    torchrun --nproc-per-node 2 examples/shard_tensor/knn_brute_force_ring_sharded.py [--size full]
"""

from typing import Any

import knn_brute_force_baseline
import torch
from knn_brute_force_baseline import FULL, LAPTOP
from torch.overrides import handle_torch_function, has_torch_function
from tutorial import expect_equal, expect_traffic, say, seconds, size_of

from neuronx_dist.shard_tensor import DistributedManager, Shard, ShardTensor, report, scatter_tensor
from neuronx_dist.shard_tensor.ring import RingPassingConfig, perform_ring_iteration_async


def knn(x: torch.Tensor, y: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The function of the baseline, known to `torch.overrides`."""
    if has_torch_function((x, y)):
        return handle_torch_function(knn, (x, y), x, y, n)
    return knn_brute_force_baseline.knn(x, y, n)


def knn_ring(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    x, y, n = args
    mesh, ring = x._spec.mesh, RingPassingConfig(mesh_dim=0)
    size, rank = mesh.size(0), mesh.get_local_rank(0)
    rows = x._spec.sizes[0]
    part, queries = x.to_local(), y.to_local()
    best: Any = None
    for step in range(size):
        following = None
        if step + 1 < size:  # what comes is the part of the rank that is one further behind
            shape = (rows[(rank - step - 1) % size], 3)
            following = perform_ring_iteration_async(part, mesh, ring, recv_shape=shape)
        found = func(part, queries, min(n, len(part)))
        best = found if best is None else nearest(best, found, n)
        if following is not None:
            part = following.wait()
    points, distances = best
    sizes = y._spec.sizes[0]
    return tuple(
        ShardTensor.from_local(x, mesh, y.placements, sharding_shapes={0: [(count, *x.shape[1:]) for count in sizes]})
        for x in (points, distances)
    )


def nearest(one: Any, other: Any, n: int) -> Any:
    """The `n` nearest of two sets of neighbours."""
    points, distances = (torch.cat(pair, dim=1) for pair in zip(one, other))
    distances, indices = torch.topk(distances, k=min(n, distances.shape[1]), dim=1, largest=False)
    return torch.take_along_dim(points, indices[..., None], dim=1), distances


ShardTensor.register_function_handler(knn, knn_ring)


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
    rows, rank, size = x._spec.sizes[0] or (), manager.rank, manager.world_size
    hops = [(rows[(rank - step) % size], rows[(rank - step - 1) % size]) for step in range(size - 1)]
    steps = {"exchange": size - 1} if size > 1 else {}
    expect_traffic(r, steps, sum(max(hop) * 3 * 4 for hop in hops))
    if small:
        expected, expected_distances = knn(whole[0], whole[1], n)
        expect_equal("distances", distances, expected_distances)
        expect_equal("neighbours", neighbours, expected)
    say(f"{targets:,} points in {to_search:,}: {seconds(lambda: knn(x, y, n)) * 1e3:.2f} ms a call")


if __name__ == "__main__":
    main()
