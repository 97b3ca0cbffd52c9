"""The types of the messages between pipeline stages, from one played stage to the next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import comm
from ...call_site import call_in_words
from ...comm.ranks.rank_numbers import concrete
from ...mesh import Mesh
from ...pipeline.schedule import Kind
from ...spmd.axes import atoms_of
from ...spmd.errors import SpmdTypeError
from ...spmd.tensor_type import TensorType, type_of, write
from ...spmd.types import SAME, V
from ..types.mode import SpmdTypeMode

__all__ = ["Halted", "MessageTypes"]


class Halted(BaseException):
    """The end of a play that was to go no further; no program may catch it."""


class _Turns:
    """Counter of one kind of message; `next` returns the pass and the place (chunk, tensor) of the next one."""

    def __init__(self, tensors: Sequence[tuple[int, int]]) -> None:
        self._tensors = tensors
        self._count = 0

    def next(self) -> tuple[int, tuple[int, int]]:
        """The number of the pass over the schedule, and (chunk, index of the tensor among the chunk's)."""
        passes, position = divmod(self._count, len(self._tensors))
        self._count += 1
        return passes, self._tensors[position]


class MessageTypes:
    """The types of messages between stages: a tensor is received with the type with which it was sent.

    A stage is played when the pieces of the model before each of its own have been: of a stage with several, all but
    the last one are played ahead (`halt_after`), in the order of the model.

    Gradients come back from a stage that was not played yet: they have the duals of the types that were sent, at the
    scale of a loss whose gradients are averaged over the data, which the last stage must have. A receive can be posted
    before that is known; its buffer then gets its type later.

    A step that sends and receives by itself is played until it waits for a message that was not sent yet, and from the
    start again when it was.

    Attributes:
        halt_after: the chunk of the stage that is played whose last message ends the play; None: it runs to its end.
        waiting: by stage, the receive that ended its last play.
        all_wait: whether no stage can be played further: then a receive raises.
        by_hand: by channel and number, the type of a message that a step sends by itself.
    """

    def __init__(self) -> None:
        self.halt_after: int | None = None
        self.waiting: dict[int, str] = {}
        self.all_wait = False
        self.by_hand: dict[tuple[Any, int], TensorType | None] = {}
        # By piece of the model and index of the tensor: for each pass over the schedule.
        self._sent: dict[tuple[int, int], list[TensorType | None]] = {}

    def connect(self, mode: SpmdTypeMode, model: Any, inputs: Any, mesh: Mesh, rank: int) -> None:
        """Follows the messages of one play of a rank."""
        stage = getattr(model, "stage", None)
        if stage is None:
            self._connect_by_hand(mode, mesh, rank)
            return
        if model.num_stages == 1:
            return
        schedule, channels = model.training_schedule, model.stage_channels
        tasks = schedule.tasks(stage)
        plans = [chunk.plan for chunk in model.program(inputs).chunks]
        needs_grad = [[spec.requires_grad for spec in plan.sent_specs] for plan in plans]
        numbers: dict[Kind, Callable[[int], list[int]]] = {
            Kind.SEND_FORWARD: lambda chunk: [*range(len(needs_grad[chunk]))],
            Kind.RECV_FORWARD: lambda chunk: [*range(len(plans[chunk].received_specs))],
            Kind.RECV_BACKWARD: lambda chunk: [i for i, needed in enumerate(needs_grad[chunk]) if needed],
        }
        turns = {
            kind: _Turns([(task.chunk, index) for task in tasks if task.kind is kind for index in of_chunk(task.chunk)])
            for kind, of_chunk in numbers.items()
        }
        last = {chunk: len(specs) - 1 for chunk, specs in enumerate(needs_grad)}
        posted: dict[tuple[int, int], torch.Tensor] = {}
        expected: dict[tuple[int, int], TensorType] = {}
        mine: dict[tuple[int, int], list[TensorType | None]] = defaultdict(list)

        def on_send(x: torch.Tensor, axis: Any, dst: int, tag: int) -> None:
            if axis is None or axis not in channels.of(Kind.SEND_FORWARD):
                return
            sent_type = type_of(x)
            _, key = turns[Kind.SEND_FORWARD].next()
            chunk, index = key
            piece = schedule.virtual_stage(stage, chunk), index
            mine[piece].append(sent_type)
            self._sent[piece] = mine[piece]
            if sent_type is not None and needs_grad[chunk][index] and torch.is_grad_enabled():
                grad_type = mode.gradient_type(sent_type)
                if key in posted:
                    write(posted.pop(key), grad_type, None, mode.session)
                else:
                    expected[key] = grad_type
            if chunk == self.halt_after and index == last[chunk]:
                raise Halted

        def on_receive(buffer: torch.Tensor, axis: Any, src: int, tag: int) -> Callable[[], TensorType | None]:
            type_ = received_type(buffer, axis)
            return lambda: type_

        def received_type(buffer: torch.Tensor, axis: Any) -> TensorType | None:
            if axis is None:
                return None
            if axis in channels.of(Kind.RECV_FORWARD):
                passes, (chunk, index) = turns[Kind.RECV_FORWARD].next()
                known = self._sent.get((schedule.virtual_stage(stage, chunk) - 1, index))
                return known[min(passes, len(known) - 1)] if known else None
            if axis in channels.of(Kind.RECV_BACKWARD):
                _, key = turns[Kind.RECV_BACKWARD].next()
                if key not in expected:
                    posted[key] = buffer
                return expected.pop(key, None)
            return None

        mode.sent, mode.received = on_send, on_receive
        mode.averaged = mode.data_axes()
        mode.gradient_scales = dict.fromkeys(mode.averaged, 1)

    def _connect_by_hand(self, mode: SpmdTypeMode, mesh: Mesh, rank: int) -> None:
        """Follows sends and receives of a step: between two stages, or along an axis of one stage.

        Messages of a channel stay in order. Ranks of a stage send equal types, so the ends of a channel are stages.
        """
        here = mesh.coordinate("pp", rank)
        counts: Counter[Any] = Counter()

        def number(axis: Any, peer: int, tag: int, sends: bool) -> tuple[Any, int]:
            group = comm.communicator(axis)
            there = mesh.coordinate("pp", concrete(group.ranks[concrete(peer)]))
            ends = (here, there) if sends else (there, here)
            channel = (*ends, tag, group.axis if here == there else None)
            counts[channel, sends] += 1
            return channel, counts[channel, sends]

        def on_send(x: torch.Tensor, axis: Any, dst: int, tag: int) -> None:
            self.by_hand[number(axis, dst, tag, True)] = type_of(x)

        def on_receive(buffer: torch.Tensor, axis: Any, src: int, tag: int) -> Callable[[], TensorType | None]:
            key = number(axis, src, tag, False)
            (source, *_), count = key
            line = call_in_words()

            def type_when_received() -> TensorType | None:
                if key not in self.by_hand:
                    self.waiting[here] = f"stage {here} waits for message {count} of stage {source}, at {line}"
                    if not self.all_wait:
                        raise Halted
                    waits = "; ".join(self.waiting[stage] for stage in sorted(self.waiting))
                    raise SpmdTypeError("comm.recv", f"this message is never sent: {waits}", rule="deadlock")
                type_ = self.by_hand[key]
                if type_ is None or source != here:
                    return type_
                passed = {atom: type_.get(atom) for atom in atoms_of(comm.communicator(axis), mesh)}
                others = {atom: V for atom, old in passed.items() if old is not None and old.letter not in SAME}
                return TensorType.of({**dict(type_), **others}, type_.rest)

            return type_when_received

        self.waiting.pop(here, None)
        mode.sent, mode.received = on_send, on_receive
