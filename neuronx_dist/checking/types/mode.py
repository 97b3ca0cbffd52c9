"""`SpmdTypeMode` (or `typecheck()`): types follow tensors through torch functions, and what does not fit is an error.

A `TorchFunctionMode`: every torch function and every operator of this package arrives in `__torch_function__`, is
run, and its results get types. What has been judged once is remembered by function, types and kinds of arguments, so
that the usual call costs a look-up. Sources: the spmd_types quick start; `docs/type-system.md` for the rules.

    fast path   all arguments typed and plain, judged before     -> run, write the type
    handlers    collectives, backward, gradients, data           -> `operators.py`, `autograd.py`
    slow path   label spec -> judgement -> remembered            -> `rules/`, `judge.py`; violations -> `explain.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from ...comm import context
from ...spmd.errors import Violation
from ...spmd.intercept import intercept
from ...spmd.tensor_type import (
    COUNTED,
    EQUAL,
    FRESH,
    NOTE,
    READONLY,
    Note,
    Origin,
    Segments,
    TensorType,
    note_of,
    tensors_in,
    version,
    without_shards,
)
from ...spmd.types import R, V
from ...spmd.watching import HANDLERS, Watcher, entered, left
from . import raw_collectives as raw
from .declared import parameter_type
from .handlers import autograd, packing
from .handlers.inplace import OVERWRITES, check_write, note_write, overwritten, stale
from .handlers.random_numbers import draws, made_type, stream_type
from .handlers.rank_values import counted, counts, picked, rank_values
from .judge import Judgement, Operand, judge
from .memo import LONG, NUMBERS, PLAIN, SEQUENCES, TENSORS, Plan, closer, details, keep
from .messages.explain import Call, explain, explain_shapes, missing_type
from .messages.provenance import module_path, where
from .rules import RULES, Rule, operands
from .rules.names import CATS
from .session import Session, in_backward
from .surroundings import surroundings

__all__ = ["SpmdTypeMode", "typecheck"]

_JUDGED: Any = object()  # in the place of a handler: the call is judged
_NOBODY: dict[str, Any] = {}

_memos: dict[bool, dict[Any, Plan]] = {False: {}, True: {}}  # judged calls of all modes; those of symbolic ones


class SpmdTypeMode(Session):
    """Checks types while it is entered, in this thread.

    Args:
        mesh: sizes by axis (`{"dp": 2, "tp": 4}`), a Mesh, or None: the current one if there is any. Without a mesh
            axes are the names that tensors were annotated with.
        level: "G": what varies may be known to be sharded, and contractions over sharded dims are found. "L": that is
            forgotten, and only R, I, V and P are followed.
        strict: a tensor without a type is an error; else it counts as equal on all ranks, which `assumed` lists.

    Attributes:
        assumed: what could not be proven, with the line, each once.
        trusted: declarations that were taken at their word, with the line, each once.
        operators, collectives: how many were checked.
        record: called with `(function name, arguments, where)` of each call, if it is set.

    Raises:
        SpmdTypeError: (inside) types that do not go together; the message says which, why, since where, and what to
            write instead.
    """

    def __init__(self, mesh: Any = None, *, level: str = "G", strict: bool = True) -> None:
        if level not in ("G", "L"):
            raise ValueError(f"level must be 'G' (global) or 'L' (local), got {level!r}")
        super().__init__(mesh, level, strict)
        self._memo = _memos[False]
        self._before: list[Watcher | None] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> SpmdTypeMode:
        if context.is_initialized():
            if self.mesh is None:
                self.mesh = context.current().mesh
                self.known.clear()
            self.symbolic = context.current().backend.name == "check"
            self._memo = _memos[self.symbolic]
        self._before.append(entered(self))
        self._hooks.append(ExitStack())
        self._hooks[-1].enter_context(intercept(self._function))
        self._hooks[-1].enter_context(surroundings())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.pop().__exit__(None, None, None)
        left(self._before.pop())

    # --- what the user's code reaches

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func, _JUDGED)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.paused:
            return func(*args, **(kwargs or {}))
        if handler is not _JUDGED:
            return handler(self, func, args, kwargs or _NOBODY)
        session, memo = self.session, self._memo
        if kwargs:
            items: list[Any] = [*args, *kwargs.values()]
            key: list[Any] = [func, tuple(kwargs)]
        else:
            items, key = [*args], [func]
        origins = None
        try:
            for x in items:
                kind = x.__class__
                if kind in TENSORS:
                    found, begun, made, written, extra = x.__dict__[NOTE]
                    if made != session or written != x._version or extra is not None:
                        return self._slow(func, args, kwargs or _NOBODY)
                    key.append(found)
                    if begun is not None and begun is not origins:
                        origins = begun if origins is None else {**begun, **origins}
                elif kind in PLAIN:
                    key.append(x)
                elif kind in SEQUENCES and len(x) < LONG:
                    key += (kind, len(x))
                    items += x  # they come after all others
                elif kind in NUMBERS:
                    key += (kind, x)
                elif kind is slice:
                    key.append(kind)
                    items += (x.start, x.stop, x.step)
                else:
                    return self._slow(func, args, kwargs or _NOBODY)
        except (KeyError, RuntimeError):  # no type; or no version, in inference mode
            return self._slow(func, args, kwargs or _NOBODY)
        place = tuple(key)
        plan = memo.get(place)
        if plan is not None and plan.closer is not None:
            place += details(plan.closer, items, self)
            plan = memo.get(place)
        if plan is None:
            return self._slow(func, args, kwargs or _NOBODY, tuple(key), items)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError:
            return self._slow(func, args, kwargs or _NOBODY)  # says more, if it is about shapes
        self.operators += 1
        if self.record is not None:
            self.record(plan.name, (args, kwargs or _NOBODY), where())
        if plan.more:
            origins = self._again(plan, origins)
            if plan.written:
                note_write(self, args[0], plan.types, origins)
                return result
        try:
            if result.__class__ in TENSORS:
                result.__dict__[NOTE] = (plan.types, origins, session, result._version, plan.extra)
                return result
        except RuntimeError:
            pass  # no version, in inference mode
        self._stamp(result, plan.types, origins, plan.extra)
        return result

    def _function(self, original: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`Function.apply`, which no mode sees."""
        if self.paused or (cls.__module__.startswith("torch.") and cls is not CheckpointFunction):
            return original(*args, **kwargs)
        return autograd.apply_function(self, original, cls, args, kwargs)

    # --- types of tensors

    def note(self, x: Tensor, function: str) -> Note | None:
        """What is known of an operand. None in backward passes, where native derivatives are right by construction.

        Raises:
            SpmdTypeError: it has no type; or its memory was written behind the checker's back.
        """
        note = note_of(x)
        if note is None:
            found = None
            if self.mesh is not None and isinstance(x, nn.Parameter):
                found = parameter_type(x, self.mesh, self.tied.get(id(x)), self.level)
            elif in_backward():
                return None
            elif not self.strict:
                self.assume(f"a tensor {list(x.shape)} made before the check is equal on all ranks")
                found = EQUAL
            if found is None:
                raise missing_type(self, x, function)
            note = (found, None, self.session, version(x), None)
            x.__dict__[NOTE] = note
        elif note[2] != self.session:  # written outside of any mode: what it says holds from now on
            found = note[0] if self.level == "G" else without_shards(note[0])
            note = (found, note[1], self.session, version(x), note[4])
            x.__dict__[NOTE] = note
        elif note[3] != version(x):
            note = stale(self, x, note)
        return note

    def adopt(self, param: Tensor, grad: Tensor) -> Tensor:
        """Backward accumulates the gradient of `param` in `grad`."""
        return autograd.adopt(self, param, grad)

    # --- everything that has not been judged before

    def _slow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: tuple[Any, ...] | None = None,
        items: Sequence[Any] = (),
    ) -> Any:
        rule = RULES.get(func)
        if rule is None:
            raw.check(func, args, kwargs)
            rule, key = Rule(getattr(func, "__name__", str(func)), None), None
        if rule.kind == "pass":
            HANDLERS[func] = None
            return func(*args, **kwargs)
        tensors = operands(args, kwargs)
        destination = kwargs.get("out")
        notes: list[Note] = []
        fresh = False
        for x in tensors:
            before, note = note_of(x), self.note(x, rule.name)
            if note is None:  # of a backward pass: nothing is known, and nothing is checked
                return func(*args, **kwargs)
            fresh = fresh or note is not before
            notes.append(note)
        if fresh:  # what was written, or declared elsewhere, is known now
            return self.__torch_function__(func, (), args, kwargs)
        if any(isinstance(note[4], Segments) for note in notes) or (
            rule.name in CATS and not torch.is_grad_enabled()
        ):
            packed = packing.call(self, rule, func, args, kwargs, tensors, notes)
            if packed is not NotImplemented:
                return packed
        if func in packing.FOREACH:
            return packing.for_each(self, func, args, kwargs)
        self.operators += 1
        if self.record is not None:
            self.record(rule.name, (args, kwargs), where())
        if key is not None:
            wanted = closer(rule, [note[0] for note in notes])
            if wanted is not None:
                keep(self._memo, key, Plan(None, rule.name, closer=wanted))
                key += details(wanted, items, self)
        judgement = self.judge(rule, func, args, kwargs, tensors, notes)
        if rule.inplace is not None or destination is not None:
            target: Any = tensors[rule.inplace] if rule.inplace is not None else destination
            check_write(self, rule, target, judgement.types[0], tensors, notes)
            result = func(*args, **kwargs)
            note_write(self, target, judgement.types[0], self.origins(judgement, notes))
            if key is not None and args and target is args[0] is tensors[0] and judgement.types[0] is notes[0][0]:
                keep(self._memo, key, Plan.of(judgement, rule.name, written=True))
            return result
        result = self._run(func, args, kwargs, tensors, notes, rule)
        origins = self.origins(judgement, notes)
        extra = None
        if rule.kind == "random":
            extra = FRESH
        elif rule.aliases and notes and notes[0][4] == READONLY:
            extra = READONLY
        elif counts(rule, args, kwargs) or (
            rule.aliases and notes and notes[0][4] == COUNTED and result.numel() == tensors[0].numel()
        ):
            extra = COUNTED
        plan = Plan.of(judgement, rule.name, extra)
        self._stamp(result, plan.types, origins, extra)
        if self.symbolic:
            cut = picked(self, rule, result, args, kwargs)
            if cut is not result:
                return cut
        if key is not None:
            keep(self._memo, key, plan)
        return result

    def judge(
        self,
        rule: Rule,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        notes: Sequence[Note],
    ) -> Judgement:
        """Types of the results.

        Raises:
            SpmdTypeError: the types do not go together.
        """
        enabled = torch.is_grad_enabled()
        given = [Operand(note[0], enabled and x.requires_grad) for x, note in zip(tensors, notes)]
        if func in OVERWRITES:
            given[0] = Operand(overwritten(given[0].type), given[0].differentiable)
        varying = rank_values(rule, args, kwargs)
        numbers = [Operand(TensorType.of(dict.fromkeys(self._atoms(c.axes), V), R), False) for c in varying]
        if rule.kind not in ("op", "scalar", "decompose"):
            made, assumed = made_type(self, rule, given, numbers)
            return self._assuming(Judgement((made,), {}, assumed))
        if rule.kind == "decompose" and rule.decompose is not None:
            before = dict(self.assumed)
            with self:
                result = rule.decompose(*args, **kwargs)
            found = tuple(note[0] for note in map(note_of, tensors_in(result)) if note is not None)
            return Judgement(found, {}, tuple(key[0] for key, n in self.assumed.items() if before.get(key) != n))
        spec = None
        if rule.spec is not None:
            try:
                spec = rule.spec(*args, **kwargs)
            except Exception:
                try:
                    func(*args, **kwargs)  # torch's own message, if the arguments are wrong
                except RuntimeError as error:
                    call = Call(rule, func, args, kwargs, tensors, given, None)
                    raise (explain_shapes(self, call, error) or error) from None
                raise
        if rule.kind == "scalar":
            return self._scalar(Call(rule, func, args, kwargs, tensors, given, spec))
        if spec is not None:
            spec = counted(rule, spec, tensors, notes)
        affine = rule.affine is not None and bool(rule.affine(*args, **kwargs))
        total = max(1, len(spec.outs)) if spec is not None else 1
        drawn, assumed = [], ()
        if draws(rule, args, kwargs):
            stream, assumed = stream_type(self, given[0].type)
            drawn = [Operand(stream, False)]
        try:
            judgement = judge(rule, spec, [*given, *numbers, *drawn], affine, total)
        except Violation as violation:
            call = Call(rule, func, args, kwargs, tensors, [*given, *numbers, *drawn], spec, affine)
            raise explain(self, violation, call) from None
        return self._assuming(judgement._replace(assumed=(*judgement.assumed, *assumed)))

    def _assuming(self, judgement: Judgement) -> Judgement:
        for text in judgement.assumed:
            self.assume(text)
        return judgement

    def _scalar(self, call: Call) -> Judgement:
        for index, operand in enumerate(call.operands):
            for axis, kind in operand.type:
                if kind.letter in "VSP" and axis != "pp":
                    why = (
                        f"a Python number made of it would differ between the ranks of {axis}, and what it decides "
                        "could not be followed"
                    )
                    raise explain(self, Violation("scalar", axis, why, [index]), call)
        return Judgement((EQUAL,), {}, ())

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: Any, notes: Any, rule: Rule) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            given = [Operand(note[0], x.requires_grad) for x, note in zip(tensors, notes)]
            raise (explain_shapes(self, Call(rule, func, args, kwargs, tensors, given, None), error) or error) from None

    def origins(self, judgement: Judgement | None, notes: Sequence[Note]) -> dict[str, Origin] | None:
        """Where the types of a result began: where those of its operands did, or here."""
        merged: dict[str, Origin] | None = None
        for note in notes:
            if note[1] is not None:
                merged = note[1] if merged is None or merged is note[1] else {**note[1], **merged}
        return self._begin(judgement.born, merged) if judgement is not None and judgement.born else merged

    def _begin(self, born: dict[str, str], origins: dict[str, Origin] | None) -> dict[str, Origin]:
        place, module = where(), module_path(self.modules)
        return {**(origins or {}), **{axis: Origin(what, place, module, "P") for axis, what in born.items()}}

    def _again(self, plan: Plan, origins: dict[str, Origin] | None) -> dict[str, Origin] | None:
        """What is told at every call of a plan; returns the origins of its results."""
        for text in plan.assumed:
            self.assume(text)
        return self._begin(plan.born, origins) if plan.born else origins


typecheck = SpmdTypeMode  # the newer name
HANDLERS.update((func, None) for func, rule in RULES.items() if rule.kind == "pass")
HANDLERS.update(autograd.handlers)
