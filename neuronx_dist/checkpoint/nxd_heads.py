"""Which heads each rank has, where NeuronX Distributed repeats key/value heads (`kv_size_multiplier`).

With key/value heads 0 and 1, a multiplier of 2, and query heads a b (which use 0) and c d (which use 1), on 4 ranks:

    trn1    key/value 0 1 0 1    query a c b d
    trn2    key/value 0 0 1 1    query a b c d

The query projection's rows, and the output projection's columns, stand in this order of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["HeadOrder"]


@dataclass(frozen=True)
class HeadOrder:
    """The order of heads over the ranks, one after another.

    Attributes:
        kv_heads: key/value heads of the model.
        multiplier: how often each of them is repeated.
        blocked: repetitions of a head stand side by side, as on trn2.
    """

    kv_heads: int
    multiplier: int = 1
    blocked: bool = False

    @property
    def blocks(self) -> Sequence[int]:
        """Which block of query heads stands at each position; a block uses one repetition of a key/value head."""
        count = self.kv_heads * self.multiplier
        if self.blocked:
            return range(count)
        return [head * self.multiplier + copy for copy in range(self.multiplier) for head in range(self.kv_heads)]

    def ordered(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """A query or output projection whose heads, along `dim`, are put in this order."""
        return self._selected(weight, dim, self.blocks)

    def natural(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """The inverse of `ordered`."""
        return self._selected(weight, dim, sorted(range(len(self.blocks)), key=self.blocks.__getitem__))

    def repeated(self, weight: torch.Tensor) -> torch.Tensor:
        """A key or value projection with all repetitions of its heads (dim 0)."""
        heads = self._split(weight, 0, self.kv_heads)
        if self.blocked:
            return heads.repeat_interleave(self.multiplier, 0).flatten(0, 1)
        return torch.cat([weight] * self.multiplier)

    def single(self, weight: torch.Tensor) -> torch.Tensor:
        """The inverse of `repeated`."""
        if not self.blocked:
            return self._split(weight, 0, self.multiplier)[0]
        return self._split(weight, 0, self.kv_heads * self.multiplier)[:: self.multiplier].flatten(0, 1)

    def _selected(self, weight: torch.Tensor, dim: int, order: Sequence[int]) -> torch.Tensor:
        if list(order) == sorted(order):
            return weight
        parts = self._split(weight, dim, len(order))
        return parts.index_select(dim, torch.tensor(order)).flatten(dim, dim + 1)

    def _split(self, weight: torch.Tensor, dim: int, count: int) -> torch.Tensor:
        if weight.shape[dim] % count:
            raise ValueError(
                f"{self.kv_heads} key/value heads, {self.multiplier} times each, do not divide dim {dim} of a "
                f"projection {tuple(weight.shape)}"
            )
        return weight.unflatten(dim, (count, -1))
