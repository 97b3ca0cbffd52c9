"""The types of what pipeline stages send one another, from one played stage to the next."""

from __future__ import annotations

from typing import Any

import torch

from ...spmd.tensor_type import TensorType, type_of, write
from ..types.mode import SpmdTypeMode

__all__ = ["Wire"]


class Wire:
    """What stages send one another has the types that it was sent with. Stages are played in order.

    Gradients come back from a stage that was not played yet: they have the duals of what was sent, at the scale of a
    loss whose gradients are averaged over the data, which the last stage must have. A receive is posted before that is
    known, so its buffer gets its type when it is.
    """

    def __init__(self) -> None:
        self._sent: dict[int, list[TensorType | None]] = {}  # by stage, in the order of sending

    def connect(self, mode: SpmdTypeMode, model: Any, inputs: Any) -> None:
        """Follows the messages of one play of a pipeline model's stage."""
        stage = getattr(model, "stage", None)
        if stage is None or model.num_stages == 1:
            return
        forward, backward, *_ = model.stage_channels
        needs_grad = [spec.requires_grad for chunk in model.program(inputs).chunks for spec in chunk.plan.sent_specs]
        sent: list[TensorType | None] = []
        arriving = iter(self._sent.get(stage - 1, ()))
        posted: list[torch.Tensor] = []

        def on_send(x: torch.Tensor, axis: Any) -> None:
            if axis is not forward:
                return
            sent_type = type_of(x)
            sent.append(sent_type)
            self._sent[stage] = sent
            before, index = divmod(len(sent) - 1, len(needs_grad))  # of passes before, when the step makes several
            if sent_type is not None and needs_grad[index]:
                buffer = posted[before * sum(needs_grad) + sum(needs_grad[:index])]
                write(buffer, mode.gradient_type(sent_type), None, mode.session)

        def on_receive(buffer: torch.Tensor, axis: Any) -> TensorType | None:
            if axis is forward:
                return next(arriving, None)
            if axis is backward:
                posted.append(buffer)
            return None

        mode.sent, mode.received = on_send, on_receive
        mode.averaged = mode.data_axes()
        mode.gradient_scales = dict.fromkeys(mode.averaged, 1)
