"""Example 0, one device: the sum of two vectors.

python examples/shard_tensor/vector_add_baseline.py [--size full]
"""

import torch
from tutorial import say, seconds, size_of


def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


if __name__ == "__main__":
    (n,), _ = size_of((1_000_003,), full=(1_000_000_000,))
    a, b = torch.randn(n), torch.randn(n)
    say(f"{n:,} elements: {seconds(lambda: f(a, b)) * 1e3:.2f} ms a call")
