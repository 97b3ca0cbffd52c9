"""A backend without groups: collectives return tensors of the right shape, as if all ranks held the same values.

Works on fake and meta tensors, so that whole models run, and are checked, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import backends
from ..base import DONE, Backend, Communicator, WorkLike
from ..ranks.rank_numbers import concrete

__all__ = ["ShapesBackend", "ShapesCommunicator"]


class ShapesCommunicator(Communicator):
    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> WorkLike:
        if op == "sum":
            buffer.mul_(self.size)
        return DONE

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> WorkLike:
        gathered.copy_(x.unsqueeze(0).expand_as(gathered))
        return DONE

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> WorkLike:
        out.copy_(scattered[concrete(self.rank)])
        return self.start_all_reduce(out, op)

    def start_all_to_all(self, gathered: torch.Tensor, scattered: torch.Tensor) -> WorkLike:
        gathered.copy_(scattered[concrete(self.rank)].unsqueeze(0).expand_as(gathered))
        return DONE

    def start_permute(self, out: torch.Tensor, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> WorkLike:
        rank = concrete(self.rank)
        if any(dst == rank for _, dst in pairs):
            out.copy_(x)
        else:
            out.zero_()
        return DONE

    def start_broadcast(self, buffer: torch.Tensor, src: int) -> WorkLike:
        return DONE

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> WorkLike:
        return DONE

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> WorkLike:
        out.zero_()
        return DONE

    def start_exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> WorkLike:
        for out in received:
            if out.numel():  # most of many ranks send nothing
                out.zero_()
        return DONE

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj] * self.size


class ShapesBackend(Backend):
    name = "shapes"

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, separate: bool = False
    ) -> Communicator:
        return ShapesCommunicator(label, next(group for group in groups if global_rank in group), global_rank)

    def wrap(self, group: Any, global_rank: int) -> Communicator:
        ranks = backends.c10d.ranks_of_group(group)
        return ShapesCommunicator(group.group_desc or "group", ranks, global_rank)
