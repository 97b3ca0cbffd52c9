"""A program, played on one rank for all: reads its rank in several ways, and passes it to torch."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode

from neuronx_dist import Mesh, comm
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.comm.ranks.rank_values import RankValue, rank_values_in

__all__ = ["MESH", "ObservedRun", "SeesRankValues", "axes_of"]

MESH = Mesh(16, tp=2, pp=2, cp=2)  # dp=2


class ObservedRun:
    """`with observed(rank) as seen`: what a program reads; `seen.axes` are those of its reads."""

    def __init__(self, mesh: Mesh = MESH, rank: int = 5) -> None:
        self.calls: list[frozenset[str]] = []
        self.backend = CheckBackend(self.calls.append)
        self._place = comm.as_rank(mesh, rank, self.backend)

    @property
    def axes(self) -> set[str]:
        return set().union(*self.calls)

    def __enter__(self) -> ObservedRun:
        self._place.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._place.__exit__(*error)


def axes_of(x: int) -> set[str]:
    return set(x.axes) if isinstance(x, RankValue) else set()


class SeesRankValues(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.axes: list[set[str]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.axes.append(set().union(*(c.axes for c in rank_values_in((args, kwargs)))))
        return func(*args, **(kwargs or {}))
