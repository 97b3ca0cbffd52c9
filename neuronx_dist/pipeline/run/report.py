"""What a step returns of its losses, and on which ranks."""

from __future__ import annotations

import torch

from ... import comm, spmd
from ...spmd.watching import active
from ..record.recording import TensorSpec

__all__ = ["report_loss"]


def report_loss(
    losses: list[torch.Tensor],
    spec: TensorSpec,
    *,
    stage: int,
    last_stage: int,
    return_mb_loss: bool,
    broadcast_and_average_loss: bool,
    computed_on: torch.device,
    report_on: torch.device,
) -> torch.Tensor | list[torch.Tensor] | None:
    """The mean loss, as the options of `NxDPPModel` say. All ranks call it.

    Args:
        losses: by microbatch, on `last_stage`, which holds the end of the model.
        spec: of one of them.
        computed_on, report_on: devices of the losses, and of what is returned.
    """
    is_last = stage == last_stage
    if not is_last and not broadcast_and_average_loss:
        return None
    if return_mb_loss:
        return [loss.to(report_on) for loss in losses]
    if is_last:
        mean = torch.stack(losses).mean()
    else:
        mean = torch.empty((), dtype=spec.dtype, device=computed_on)
    if broadcast_and_average_loss:
        if is_last:
            total = comm.all_reduce(mean, ("dp", "cp"))
            mean = total / comm.size(("dp", "cp"))
        mean = comm.broadcast(mean, "pp", src=last_stage)
        if active() is not None:
            spmd.assert_type(mean, dict.fromkeys(("pp", "dp", "cp"), spmd.R))
    return mean.to(report_on)
