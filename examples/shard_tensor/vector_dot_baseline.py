"""Example 1, one device: the dot product of two vectors.

python examples/shard_tensor/vector_dot_baseline.py [--size full]
"""

import torch
from tutorial import say, seconds, size_of


def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.dot(x, y)


if __name__ == "__main__":
    (n,), _ = size_of((1_000_003,), full=(1_000_000_000,))
    x, y = torch.randn(n), torch.randn(n)
    say(f"{n:,} elements: {seconds(lambda: f(x, y)) * 1e3:.2f} ms a call")
