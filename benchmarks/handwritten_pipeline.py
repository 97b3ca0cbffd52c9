"""A hand-written 1F1B, straight on torch.distributed: one tensor of one known shape between two stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["one_f_one_b"]


def one_f_one_b(
    stage: nn.Module, pieces: Sequence[torch.Tensor], loss_of: Callable[[torch.Tensor, int], torch.Tensor]
) -> list[torch.Tensor]:
    """The losses of all microbatches, on the last rank; `pieces` are the first rank's inputs, elsewhere their shape."""
    rank, last, count = dist.get_rank(), dist.get_world_size() - 1, len(pieces)
    activations: list[tuple[torch.Tensor, torch.Tensor]] = []
    losses: list[torch.Tensor] = []
    sends: list[tuple[dist.Work, torch.Tensor]] = []

    def receive(source: int) -> tuple[dist.Work, torch.Tensor] | None:
        buffer = torch.empty_like(pieces[0])
        return (dist.irecv(buffer, source), buffer) if 0 <= source <= last else None

    def forward(microbatch: int, coming: tuple[dist.Work, torch.Tensor] | None) -> None:
        x = pieces[microbatch]
        if coming is not None:
            coming[0].wait()
            x = coming[1].requires_grad_()
        out = stage(x)
        if rank == last:
            out = loss_of(out, microbatch) / count
            losses.append(out.detach() * count)
        else:
            sends.append((dist.isend(out.detach(), rank + 1), out))
        activations.append((x, out))

    def backward(coming: tuple[dist.Work, torch.Tensor] | None) -> None:
        x, out = activations.pop(0)
        if coming is not None:
            coming[0].wait()
        out.backward(coming[1] if coming is not None else None)
        if x.grad is not None:
            sends.append((dist.isend(x.grad, rank - 1), x.grad))

    warmup = min(last - rank, count)
    activation = receive(rank - 1)
    for microbatch in range(count + warmup):
        gradient = receive(rank + 1) if microbatch >= warmup else None
        if microbatch < count:
            current, activation = activation, receive(rank - 1) if microbatch + 1 < count else None
            forward(microbatch, current)
        if microbatch >= warmup:
            backward(gradient)
    for work, _ in sends:
        work.wait()
    return losses
