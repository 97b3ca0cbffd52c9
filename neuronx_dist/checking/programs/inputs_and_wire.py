"""Where a played program's types come from: its inputs, and what other stages send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...call_site import PACKAGE, USER, nearest_line
from ...spmd.tensor_type import TensorType, type_of, write
from ...spmd.types import LocalType, Shard
from ..types.declared import input_type
from ..types.mode import SpmdTypeMode

__all__ = ["Types", "Wire", "declare_inputs"]


def declare_inputs(inputs: Any, given: Any, mode: SpmdTypeMode) -> None:
    """Writes the types of inputs.

    Args:
        given: `{axis: type}` for all of them, or such dicts by name (of a dict of inputs) or in a list (of positional
            ones); what is not said is sharded on dim 0 over dp, and equal elsewhere.

    Raises:
        ValueError: a name that no input has.
    """
    assert mode.mesh is not None
    for_all = isinstance(given, Mapping) and all(isinstance(kind, (LocalType, Shard)) for kind in given.values())
    if given is not None and not for_all and isinstance(given, Mapping) and isinstance(inputs, Mapping):
        unknown = sorted(set(given) - set(inputs))
        if unknown:
            raise ValueError(f"in_types names {', '.join(unknown)}, but the inputs are {', '.join(map(str, inputs))}")
    for path, x in pytree.tree_flatten_with_path(inputs)[0]:
        if isinstance(x, torch.Tensor):
            types = given if for_all or given is None else _of(given, path)
            write(x, input_type(x, mode.mesh, types, mode.level), None, mode.session)


def _of(given: Any, path: tuple[Any, ...]) -> Mapping[Any, Any] | None:
    """The types at a path, or of the container around it."""
    for entry in path:
        key = getattr(entry, "key", getattr(entry, "idx", None))
        try:
            given = given[key]
        except (KeyError, IndexError, TypeError):
            return None
        if isinstance(given, Mapping) and all(isinstance(kind, (LocalType, Shard)) for kind in given.values()):
            return given
    return given if isinstance(given, Mapping) else None


class Types(SpmdTypeMode):
    """The type checker of a played program. It names the line that declares or assumes something, be it ours."""

    def assume(self, text: str) -> None:
        self.assumed[text, nearest_line(USER, PACKAGE)] = self.assumed.get((text, nearest_line(USER, PACKAGE)), 0) + 1

    def trust(self, text: str) -> None:
        self.trusted[text, nearest_line(USER, PACKAGE)] = self.trusted.get((text, nearest_line(USER, PACKAGE)), 0) + 1


class Wire:
    """What stages send one another has the types that it was sent with. Stages are played in order.

    Gradients come back from a stage that was not played yet: they have the duals of what was sent. A receive is posted
    before that is known, so its buffer gets its type when it is.
    """

    def __init__(self) -> None:
        self._sent: dict[int, list[TensorType | None]] = {}  # by stage, in the order of sending

    def connect(self, mode: SpmdTypeMode, model: Any, inputs: Any) -> None:
        """Follows the messages of one play of a pipeline model's stage."""
        stage = getattr(model, "stage", None)
        if stage is None or model.num_stages == 1:
            return
        forward, backward = model.stage_channels
        needs_grad = [spec.requires_grad for chunk in model.program(inputs).chunks for spec in chunk.plan.sent_specs]
        sent: list[TensorType | None] = []
        arriving = iter(self._sent.get(stage - 1, ()))
        posted: list[torch.Tensor] = []

        def on_send(x: torch.Tensor, axis: Any) -> None:
            if axis is not forward:
                return
            found = type_of(x)
            sent.append(found)
            self._sent[stage] = sent
            index = len(sent) - 1
            if found is not None and needs_grad[index]:
                buffer = posted[sum(needs_grad[:index])]
                write(buffer, found.of_gradient(), None, mode.session)

        def on_receive(buffer: torch.Tensor, axis: Any) -> TensorType | None:
            if axis is forward:
                return next(arriving, None)
            if axis is backward:
                posted.append(buffer)
            return None

        mode.sent, mode.received = on_send, on_receive
