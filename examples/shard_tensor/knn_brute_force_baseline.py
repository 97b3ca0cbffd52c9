"""Example 2, one device: the nearest neighbours of points, by all distances. For its parallel forms, not for use.

python examples/shard_tensor/knn_brute_force_baseline.py [--size full]
"""

import torch
from tutorial import say, seconds, size_of

LAPTOP, FULL = (2_347, 123, 17), (234_567, 12_345, 17)  # points to search in, points to search for, neighbours


def knn(x: torch.Tensor, y: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `n` points of `x` that are nearest to each of `y`, and their distances: `[len(y), n, 3]`, `[len(y), n]`."""
    displacement_vec = x[None, :, :] - y[:, None, :]
    distance = torch.norm(displacement_vec, dim=2)
    distance, indices = torch.topk(distance, k=n, dim=1, largest=False)
    return x[indices], distance


if __name__ == "__main__":
    (to_search, targets, n), _ = size_of(LAPTOP, FULL)
    x, y = torch.randn(to_search, 3), torch.randn(targets, 3)
    say(f"displacements: {to_search * targets * 3 * 4:,} bytes")
    say(f"{targets:,} points in {to_search:,}: {seconds(lambda: knn(x, y, n)) * 1e3:.2f} ms a call")
