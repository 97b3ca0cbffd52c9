"""The state of a mode while it is entered: the mesh, names, assumptions, and the types of tensors.

The part of `SpmdTypeMode` without calls, for handlers, messages and reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...call_site import call_site
from ...comm import context
from ...mesh import Mesh
from ...rules import Rule
from ...spmd.axes import atoms_of, mesh_of
from ...spmd.tensor_type import EQUAL, NAME, NOTE, Note, Origin, TensorType, note_of, tensors_in, version
from ...spmd.types import I, R, scaled
from ...torch_internals.tensors import DisableTorchFunction
from ...weights.partial_model import partial_model
from ...weights.shard_spec import spec_of
from .judge import Judgement

__all__ = ["Session", "new_session"]

_sessions = count(time.time_ns())  # so that a note of another process, from a file, never counts in this one


def new_session() -> int:
    """A new serial number for a mode."""
    return next(_sessions)


class Session(TorchFunctionMode):
    """The base class of `SpmdTypeMode`, with all that handlers and messages use of it.

    Attributes:
        mesh, level, strict: arguments of the mode.
        session: serial number in its notes: of this mode, or of the scope of local code that is entered.
        scope: of local code (handlers/local_scope.py), while one is entered.
        assumed, trusted: (text, line) -> how often.
        num_assumptions: number of calls of `assume` and `trust`; a judgement that changes it is not cached.
        operators, collectives: number of checked ones.
        local_axes: axes along which shards are declared local (`spmd.set_current_mesh`).
        modules: id of a module -> its path, for messages.
        tied: id of a parameter -> the ranks that hold it, for parameters that several stages have.
        writes: the writes in place, by storage (handlers/inplace.py).
        compared: fused functions, with types and shapes, that were compared with their composition.
        declared_inside: autograd functions whose `typecheck_forward` is running.
        known: operators that were judged, on this mesh; and the atoms of axes.
        paused: number of entered `pause`; nothing is checked while it is not 0.
        entered: number of open `with` statements.
        stand_in: `(tensor, function) -> number` where a Python number is made of a tensor that has no value; None: that
            is an error.
        unrecorded: number of running steps of torch's own optimizers, whose calls are not compared.
        incoming: results of the hooks of leaves in this backward pass: by id of the leaf `(leaf, type of its gradient,
            origins)`.
        averaged_leaves: leaves whose gradients a hand-written backward averages, in this backward pass: by id of the
            leaf `(leaf, type of its gradient, nodes of the function)`.
        claims: claims that one rank alone adds a value (handlers/one_rank.py); None: nobody compares ranks.
        uncached: the last judgement rests on a claim, so that it is not to be cached.
        permuted: axis and pairs of each `comm.permute`, in order.
        around_hooks: makes a context that the body of every hook on gradients runs in; None: none.
        probing: number of entered `trial`; errors raised meanwhile are caught, and need no full message.
        symbolic: ranks are RankValues: one rank is played in place of many.
        seeds: `(line of a draw, seed) -> axes` on which the seed of that draw is known to differ.
        outside_seed: first seed of the default generator; None: the seeds of the ranks are not compared.
        received: `(tensor, axis, source, tag) -> function`, called at each `comm.recv`; the function, called when the
            tensor has been received, returns its type, or None if that is not known.
        sent: `(tensor, axis, destination, tag)`, called at each `comm.send`.
        averaged: axes over which the gradients of every backward are averaged: known before for a pipeline.
        gradient_scales: axis -> scale that the loss of the last backward gave to gradients, where it is not 0.
    """

    def __init__(self, mesh: Any, level: str, strict: bool) -> None:
        super().__init__()
        self.mesh: Mesh | None = None if mesh is None else mesh_of(mesh)
        self.level, self.strict = level, strict
        self.session = new_session()
        self.scope: Any = None
        self.assumed: dict[tuple[str, str], int] = {}
        self.trusted: dict[tuple[str, str], int] = {}
        self.operators = self.collectives = 0
        self.modules: dict[int, str] = {}
        self.tied: dict[int, Any] = {}
        self.writes: dict[int, Any] = {}
        self.compared: set[Any] = set()
        self.declared_inside: list[Any] = []
        self.local_axes: tuple[str, ...] = ()
        self.paused = 0
        self.received: Callable[[Tensor, Any, int, int], Callable[[], TensorType | None]] | None = None
        self.sent: Callable[[Tensor, Any, int, int], None] | None = None
        self.entered = self.probing = 0
        self.stand_in: Callable[[Tensor, str], Any] | None = None
        self.unrecorded = 0
        self.incoming: dict[int, tuple[Tensor, TensorType | None, Any]] = {}
        self.averaged_leaves: dict[int, tuple[Tensor, TensorType, set[Any]]] = {}
        self.claims: list[Any] | None = None
        self.uncached = False
        self.permuted: list[tuple[Any, frozenset[tuple[Any, Any]]]] = []
        self.around_hooks: Callable[[], AbstractContextManager[None]] | None = None
        self.averaged: tuple[str, ...] = ()
        self.gradient_scales: dict[str, int] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self.symbolic = False
        self.seeds: dict[tuple[str, int], frozenset[str]] = {}
        self.outside_seed: int | None = None
        self.known: dict[Any, Any] = {}
        self.num_assumptions = 0

    # --- methods of the mode that handlers call

    def note(self, x: Tensor, function: str) -> Note | None:
        """The note of an operand; None in backward passes, where native derivatives are right by construction.

        Raises:
            SpmdTypeError: it has no type; or its memory was written behind the checker's back.
        """
        raise NotImplementedError

    def judge(
        self,
        rule: Rule,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        notes: Sequence[Note],
    ) -> Judgement:
        """Types of the results of a call.

        Raises:
            SpmdTypeError: the types do not go together.
        """
        raise NotImplementedError

    def origins(self, judgement: Judgement | None, notes: Sequence[Note]) -> dict[str, Origin] | None:
        """Origins of the types of a result: those of its operands, or this line."""
        raise NotImplementedError

    def adopt(self, param: Tensor, grad: Tensor) -> Tensor:
        """Writes the expected gradient type on `grad`, the gradient of `param` that backward has accumulated."""
        raise NotImplementedError

    def gradient_type(self, type_: TensorType) -> TensorType:
        """The type of the gradient that the last backward gave to a tensor of `type_`."""
        gradient_type = self.named(type_).of_gradient()  # of an axis in the rest too: the dual of R is P
        types = {axis: scaled(spmd_type, self.gradient_scales.get(axis, 0)) for axis, spmd_type in gradient_type}
        return TensorType.of(types, gradient_type.rest)

    def adopt_gradients(self) -> None:
        """Writes types on the gradients of the parameters of watched models."""
        for param in self._parameters.values():
            if param.grad is not None:
                self.adopt(param, param.grad)

    def undeclared(self, axis: str) -> list[nn.Parameter]:
        """Returns all parameters of the model, if `axis` is of tp and none of them is declared to be a shard there."""
        params = [*self._parameters.values()]
        if axis not in self.atoms(("tp",)):
            return []
        layouts = [spec_of(param) for param in params]
        notes = [note_of(param) for param in params]
        declared = any(layout.axis is not None or layout.sequence_parallel for layout in layouts)
        asserted = any(note is not None and note.type.get(axis) not in (None, I) for note in notes)
        return [] if declared or asserted else params

    # --- the mesh

    def axes_of(self, type_: TensorType) -> list[str]:
        """All axes of a tensor: those of the mesh, or without a mesh those of its type."""
        return sorted({*type_.types, *self.atoms("world")})

    def data_axes(self) -> tuple[str, ...]:
        """Axes whose ranks have different data."""
        return self.atoms(("dp", "cp"))

    def named(self, type_: TensorType) -> TensorType:
        """The same type with every axis of the mesh named."""
        if type_.rest is None:
            return type_
        spmd_type = R if type_.rest.letter == "R" else type_.rest
        return TensorType.of({**dict.fromkeys(self.atoms("world"), spmd_type), **type_.types})

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Restores counts and lists after the context."""
        before = dict(self.assumed), dict(self.trusted), self.operators, self.collectives
        self.probing += 1
        try:
            yield
        finally:
            self.assumed, self.trusted, self.operators, self.collectives = before
            self.probing -= 1

    @contextmanager
    def gradients_restored(self) -> Iterator[None]:
        """Restores the gradients of watched parameters: a recomputation's backward adds to them."""
        scales, params = self.gradient_scales, [*self._parameters.values()]
        with DisableTorchFunction():
            grads = [param.grad for param in params]
            for param in params:
                param.grad = None
        try:
            yield
        finally:
            self.gradient_scales = scales
            with DisableTorchFunction():
                for param, grad in zip(params, grads):
                    param.grad = grad

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Keeps the checking backend from recording collectives inside the context, for trials."""
        backend = context.current().backend if context.is_initialized() else None
        before = getattr(backend, "silent", None)
        if before is not None:
            backend.silent = True  # type: ignore[union-attr]
        try:
            yield
        finally:
            if before is not None:
                backend.silent = before  # type: ignore[union-attr]

    def atoms(self, axes: Any) -> tuple[str, ...]:
        """The atoms of an axis, or of several; none without a mesh."""
        if self.mesh is None:
            return ()
        return atoms_of(tuple(axes), self.mesh) if not isinstance(axes, str) else atoms_of(axes, self.mesh)

    def _stamp(self, result: Any, types: Any, origins: Any, extra: Any = None) -> None:
        several, session = types.__class__ is tuple, self.session
        for index, x in enumerate(tensors_in(result)):
            type_ = types[min(index, len(types) - 1)] if several else types
            x.__dict__[NOTE] = (type_, origins, session, version(x), extra)

    def stamp(self, x: Tensor, type_: TensorType, origins: Any = None, extra: Any = None) -> None:
        """Writes a type on a tensor."""
        x.__dict__[NOTE] = (type_, origins, self.session, version(x), extra)

    # --- for messages and reports

    def line(self) -> str:
        """The line that a report names for an assumption or declaration made now."""
        return call_site()

    def assume(self, text: str) -> None:
        """Records an assumption, which could not be proven."""
        self.num_assumptions += 1
        entry = text, self.line()
        self.assumed[entry] = self.assumed.get(entry, 0) + 1

    def trust(self, text: str) -> None:
        """Records a declaration that was not proven."""
        self.num_assumptions += 1
        entry = text, self.line()
        self.trusted[entry] = self.trusted.get(entry, 0) + 1

    def watch(self, module: nn.Module) -> None:
        """Stores the names of a model's modules and parameters, and types its buffers as equal on all ranks."""
        self.modules.update((id(child), name) for name, child in module.named_modules())
        for name, param in module.named_parameters():
            param.__dict__[NAME] = name
            self._parameters[id(param)] = param
        part = partial_model(module)
        if part.partitioned:
            self.tied.update((id(param), group) for param, group in part.tied_groups())
        for child_name, child in module.named_modules():
            attributes = [(n, x) for n, x in child.__dict__.items() if isinstance(x, Tensor)]
            for name, x in [*child._buffers.items(), *attributes]:
                if isinstance(x, Tensor) and note_of(x) is None:
                    x.__dict__[NAME] = f"{child_name}.{name}" if child_name else name
                    self.stamp(x, EQUAL)

    def pause(self) -> Pause:
        """Switches the checker off inside the context."""
        return Pause(self)


class Pause:
    """`with mode.pause():`, without the cost of a generator."""

    __slots__ = ("mode",)

    def __init__(self, mode: Session) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.mode.paused += 1

    def __exit__(self, *error: Any) -> None:
        self.mode.paused -= 1
