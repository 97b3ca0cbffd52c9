"""`NxDPPModel(check_finite=True)`: a loss that is NaN or infinite ends the step, and says where it began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..schedule import Task

__all__ = ["refuse_infinite_loss"]


def refuse_infinite_loss(task: Task, outputs: Sequence[Any], received: Sequence[torch.Tensor]) -> None:
    """Checks the loss of a microbatch; the host waits for its value.

    Args:
        outputs: of the model; the first is its loss.
        received: what the stage was sent for this microbatch.

    Raises:
        FloatingPointError: it is not finite; the message says whether what was received was so already.
    """
    loss = float(outputs[0].detach())
    if loss - loss == 0:
        return
    begun = [
        index for index, x in enumerate(received) if x.is_floating_point() and not bool(x.detach().isfinite().all())
    ]
    if begun:
        shape = list(received[begun[0]].shape)
        origin = f"a tensor of shape {shape} that this stage received was not finite already: look at the stages before"
    elif received:
        origin = "what this stage received was finite: it begins on this stage"
    else:
        origin = "it begins on this stage, which received nothing from others"
    raise FloatingPointError(f"the loss of microbatch {task.microbatch} is {loss} (check_finite=True); {origin}")
