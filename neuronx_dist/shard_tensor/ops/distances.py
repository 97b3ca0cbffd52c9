"""Distances between rows: cdist, pairwise_distance. Points may be sharded; their coordinates are used whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..handlers import sharded
from ..labels import Labels, inside
from ..tensor import wrap

__all__: list[str] = []


def _between(x: torch.Size, y: torch.Size) -> Labels:
    batch = torch.broadcast_shapes(x[:-2], y[:-2])
    names = tuple(range(-len(batch), 0))

    def labels(shape: torch.Size, last: str) -> list[Any]:
        batch_names = names[len(names) - len(shape) + 2 :]
        return [name if size == batch[name] else None for name, size in zip(batch_names, shape)] + [last, "coordinates"]

    return Labels([labels(x, "m"), labels(y, "n")], (*names, "m", "n"), whole=frozenset(("coordinates",)))


@sharded(torch.cdist)
def cdist(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(x1: Any, x2: Any, p: float = 2.0, **options: Any) -> Any:
        (x, y), spec = inside(_between, (x1, x2))
        return wrap(torch.cdist(x, y, p, **options), spec)

    return call(*args, **kwargs)


@sharded(F.pairwise_distance, torch.pairwise_distance)
def pairwise_distance(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
        return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)

    return call(*args, **kwargs)
