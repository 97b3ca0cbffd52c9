"""`SpmdTypeMode` (or `typecheck()`): types follow tensors through torch functions; types that do not fit raise.

A `TorchFunctionMode`: every torch function and every operator of this package arrives in `__torch_function__`, is
run, and its results get types. Judgements are cached by function, types and kinds of arguments, so that the usual call
costs a look-up. Sources: the spmd_types quick start; `docs/type-system.md` for the rules.

    fast path   all arguments typed and plain, judged before     -> run, write the type
    handlers    collectives, backward, gradients, data           -> `operators.py`, `autograd.py`
    slow path   label spec -> judgement -> cached                -> `judging.py`, `rules/`, `judge.py`; `explain.py`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import set_multithreading_enabled
from torch.utils.checkpoint import CheckpointFunction

from ...comm import context
from ...rules import RULES, Rule, operands
from ...rules.names import CATS
from ...spmd.function_types import is_declared
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
    note_of,
    version,
    without_shards,
)
from ...spmd.watching import HANDLERS, Watcher, entered, left
from ...torch_internals.autograd import in_backward
from ...torch_internals.modules import BackwardHookFunction
from ...torch_internals.tensors import version_of
from ...torch_internals.versions import warn_if_untested
from . import raw_collectives as raw
from .axis_powers import tracked
from .declared import parameter_type
from .handlers import (  # noqa: F401 - importing checked_losses, operators and verbs fills HANDLERS
    autograd,
    axis_numbers,
    checked_losses,
    hooks,
    operators,
    packing,
    verbs,
)
from .handlers.declared_functions import declared_function
from .handlers.inplace import check_write, note_write, shard_zeros, stale
from .handlers.local_scope import local_scope
from .handlers.lookups import lookup_note
from .handlers.own_rows import note_whole, placed, rows_note
from .handlers.rank_arguments import counts, picked
from .handlers.stacks import stacked_note
from .handlers.vmapped import batched
from .judge import Judgement, Operand
from .judging import begin, judge_call, result_origins
from .memo import (
    BY_VALUE,
    LONG,
    NUMBERS,
    SEQUENCES,
    TENSORS,
    CachedJudgement,
    extra_key_of,
    extra_values,
    store,
)
from .messages.explain import JudgedCall, explain_shapes, missing_type
from .session import Session
from .surroundings import surroundings

__all__ = ["SpmdTypeMode", "typecheck"]

_JUDGED: Any = object()  # in the place of a handler: the call is judged
_NO_KEYWORDS: dict[str, Any] = {}

# Judgements of all modes, by the key of the call; those of modes whose ranks are RankValues apart.
_memos: dict[bool, dict[Any, CachedJudgement]] = {False: {}, True: {}}


class _Uncached(NamedTuple):
    """A call on the slow path. `key`: under which to store its judgement; None: it is not to be stored."""

    rule: Rule
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[Tensor]
    notes: Sequence[Note]
    key: tuple[Any, ...] | None


class SpmdTypeMode(Session):
    """Checks types while it is entered, in this thread.

    Args:
        mesh: sizes by axis (`{"dp": 2, "tp": 4}`), a Mesh, or None: the current one if there is any. Without a mesh
            axes are the names that tensors were annotated with.
        level: "G": shards are followed, and contractions over sharded dims are found. "L": only R, I, V and P are
            followed.
        strict: a tensor without a type is an error; else it counts as equal on all ranks, which `assumed` lists.

    Attributes:
        assumed: assumptions that could not be proven, with the line, each once.
        trusted: declarations that were not proven, with the line, each once.
        operators, collectives: how many were checked.

    Raises:
        SpmdTypeError: (inside) types that do not go together; the message says which, why, since where, and what to
            write instead.
    """

    def __init__(self, mesh: Any = None, *, level: str = "G", strict: bool = True) -> None:
        if level not in ("G", "L"):
            raise ValueError(f"level must be 'G' (global) or 'L' (local), got {level!r}")
        warn_if_untested("the type checker")
        super().__init__(mesh, level, strict)
        self._memo = _memos[False]
        self._before: list[Watcher | None] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> SpmdTypeMode:
        if context.is_initialized():
            if self.mesh is None:
                self.mesh = context.current().typed_mesh
                self.known.clear()
            self.symbolic = context.current().backend.name == "check"
            self.local_axes = getattr(context.current(), "local_axes", ())  # of `spmd.set_current_mesh`
            self._memo = _memos[self.symbolic]
        self._before.append(entered(self))
        self._hooks.append(ExitStack())
        self._hooks[-1].enter_context(intercept(self._function))
        self._hooks[-1].enter_context(surroundings)
        self._hooks[-1].enter_context(tracked())
        self._hooks[-1].enter_context(set_multithreading_enabled(False))  # a GPU's backward would not see this checker
        if self.local_axes and not self.entered:
            self._hooks[-1].enter_context(self.local_scope(self.local_axes))
        super().__enter__()
        self.entered += 1
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.entered -= 1
        self._hooks.pop().__exit__(None, None, None)
        left(self._before.pop())

    # --- what the user's code reaches

    # Long because every call of torch passes here: a part in a function of its own would cost as much as the look-up.
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and not self.paused:
            for class_ in types:
                if getattr(class_, "holds_local", False):  # a tensor made of local tensors: its handlers are followed
                    with self:
                        return class_.as_laid_out(class_.__torch_function__(func, types, args, kwargs or {}))
                if getattr(class_, "is_deferred", False):  # a tensor whose values the function computes
                    with self:
                        return class_.__torch_function__(func, types, args, kwargs or {})
        handler = HANDLERS.get(func, _JUDGED)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.paused:
            return func(*args, **(kwargs or {}))
        if handler is not _JUDGED:
            return handler(self, func, args, kwargs or _NO_KEYWORDS)
        session, memo = self.session, self._memo
        if kwargs:
            items: list[Any] = [*args, *kwargs.values()]
            key: list[Any] = [func, tuple(kwargs)]
        else:
            items, key = [*args], [func]
        origins = None
        try:
            for x in items:
                class_ = x.__class__
                if class_ in TENSORS:
                    type_, x_origins, x_session, x_version, extra = x.__dict__[NOTE]
                    if x_session != session or x_version != version_of(x) or extra is not None:
                        return self._judge_and_run(func, args, kwargs or _NO_KEYWORDS)
                    key.append(type_)
                    if x_origins is not None and x_origins is not origins:
                        origins = x_origins if origins is None else {**x_origins, **origins}
                elif class_ in BY_VALUE:
                    key.append(x)
                elif class_ in SEQUENCES and len(x) < LONG:
                    key += (class_, len(x))
                    items += x  # they come after all others
                elif class_ in NUMBERS:
                    key += (class_, x)
                elif class_ is slice:
                    key.append(class_)
                    items += (x.start, x.stop, x.step)
                else:
                    return self._judge_and_run(func, args, kwargs or _NO_KEYWORDS)
        except (KeyError, RuntimeError):  # no type; or no version, in inference mode
            return self._judge_and_run(func, args, kwargs or _NO_KEYWORDS)
        full_key = tuple(key)
        cached = memo.get(full_key)
        if cached is not None and cached.extra_key is not None:
            full_key += extra_values(cached.extra_key, items, self)
            cached = memo.get(full_key)
        if cached is None:
            return self._judge_and_run(func, args, kwargs or _NO_KEYWORDS, tuple(key), items)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError:
            return self._judge_and_run(func, args, kwargs or _NO_KEYWORDS)  # says more, if it is about shapes
        self.operators += 1
        if cached.has_effects:
            origins = self._repeat(cached, origins)
            if cached.written:
                note_write(self, args[0], cached.result_types, origins)
                return result
        try:
            if result.__class__ in TENSORS:
                # A plain tuple, not a Note: see `NOTE`.
                result.__dict__[NOTE] = (cached.result_types, origins, session, version_of(result), cached.note_extra)
                return result
        except RuntimeError:
            pass  # no version, in inference mode
        self._stamp(result, cached.result_types, origins, cached.note_extra)
        return result

    def _function(self, original: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follows the types through `Function.apply`, which torch does not hand to modes."""
        if cls is BackwardHookFunction and not self.paused:
            return hooks.pass_through(self, original, args)
        if self.paused or (cls.__module__.startswith("torch.") and cls is not CheckpointFunction):
            return original(*args, **kwargs)
        if is_declared(cls):
            return declared_function(self, original, cls, args, kwargs)
        return autograd.apply_function(self, cls, args, kwargs)

    # --- types of tensors

    def note(self, x: Tensor, function: str) -> Note | None:
        """The note of an operand; None in backward passes, where native derivatives are right by construction.

        Raises:
            SpmdTypeError: it has no type; or its memory was written behind the checker's back.
        """
        note = note_of(x)
        if self.scope is not None and (note is None or note.session != self.session):
            self.scope.take(x, function)
            return note_of(x)
        if note is None:
            type_ = None
            if self.mesh is not None and isinstance(x, nn.Parameter):
                type_ = parameter_type(x, self.mesh, self.tied.get(id(x)), self.level)
            elif in_backward():
                return None
            elif not self.strict:
                self.assume(f"a tensor {list(x.shape)} made before the check is equal on all ranks")
                type_ = EQUAL
            if type_ is None:
                raise missing_type(self, x, function)
            self.stamp(x, type_)
            hooks.watch_hooks(self, x)
        elif note.session != self.session:  # written outside of any mode: what it says holds from now on
            type_ = note.type if self.level == "G" else without_shards(note.type)
            self.stamp(x, type_, note.origins, note.extra)
            hooks.watch_hooks(self, x)
        elif note.version != version(x):
            return stale(self, x, note)
        else:
            return note
        return note_of(x)

    judge = judge_call
    origins = result_origins

    def adopt(self, param: Tensor, grad: Tensor) -> Tensor:
        """Writes the expected gradient type on `grad`, the gradient of `param` that backward has accumulated."""
        return autograd.adopt(self, param, grad)

    def local_scope(self, axes: Collection[str]) -> AbstractContextManager[None]:
        """Makes shards over `axes` this rank's own numbers inside the context."""
        return local_scope(self, axes)

    # --- calls whose judgement is not in the memo

    def _judge_and_run(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: tuple[Any, ...] | None = None,
        items: Sequence[Any] = (),
    ) -> Any:
        """The slow path: finds the rule and the notes, judges, runs the function, and stores the judgement.

        `key`: of the call, under which to store it; None: it is not to be stored. `items`: what the key was made of.
        """
        rule = RULES.get(func)
        if rule is None:
            raw.refuse_raw_collective(func, args, kwargs)
            rule, key = Rule(getattr(func, "__name__", str(func)), None), None
        if rule.kind == "pass":  # one that was registered after this module was loaded
            return func(*args, **kwargs)
        tensors = operands(args, kwargs)
        if rule.random is True and not tensors:  # `torch.normal(0, 1, size)`: a distribution of numbers
            rule = rule._replace(kind="random")
        notes, changed = self._notes(tensors, rule.name)
        if notes is None:  # in a backward pass: nothing is known, and nothing is checked
            return func(*args, **kwargs)
        if changed:  # with the notes written now, the judgement may be in the memo
            return self.__torch_function__(func, (), args, kwargs)
        if any(isinstance(note.extra, Segments) for note in notes) or (
            rule.name in CATS and not torch.is_grad_enabled() and batched(notes) is None
        ):
            packed = packing.call(self, rule, func, args, kwargs, tensors, notes)
            if packed is not None:
                return packed
        if func in packing.FOREACH:
            return packing.for_each(self, func, args, kwargs)
        self.operators += 1
        if key is not None:
            extra_key = extra_key_of(rule, [note.type for note in notes], items)
            if extra_key is not None:
                store(self._memo, key, CachedJudgement.undecided(rule.name, extra_key))
                key += extra_values(extra_key, items, self)
        judgement = self.judge(rule, func, args, kwargs, tensors, notes)
        if self.uncached:
            self.uncached, key = False, None
        call = _Uncached(rule, func, args, kwargs, tensors, notes, key)
        if rule.inplace is not None:
            return self._write(call, tensors[rule.inplace], judgement)
        if kwargs.get("out") is not None:
            return self._write(call, kwargs["out"], judgement)
        return self._make(call, judgement)

    def _notes(self, tensors: Sequence[Tensor], function: str) -> tuple[list[Note] | None, bool]:
        """The note of each operand, and whether this call has written one of them.

        None in place of the notes if an operand has none: see `note`.
        """
        notes: list[Note] = []
        changed = False
        for x in tensors:
            before = x.__dict__.get(NOTE)
            note = self.note(x, function)
            if note is None:
                return None, changed
            changed = changed or x.__dict__[NOTE] is not before
            notes.append(note)
        return notes, changed

    def _write(self, call: _Uncached, target: Tensor, judgement: Judgement) -> Any:
        """Runs a function that writes to `target`, if `target` may have the type of what is written."""
        type_ = judgement.types[0]
        check_write(self, call.rule, target, type_, call.tensors, call.notes)
        rows = placed(call.rule, call.args, call.kwargs, call.tensors, call.notes)
        shard_zeros(self, target, type_)
        result = call.func(*call.args, **call.kwargs)
        extra: Any = batched(call.notes)
        if extra is None:
            extra = lookup_note(self, call.rule, call.args, call.kwargs, call.tensors, call.notes, target, type_)
        origins = self.origins(judgement, call.notes)
        note_write(self, target, type_, origins, extra)
        if rows is not None and call.rule.name == "copy_":
            note_whole(self, target, rows, origins)
        keeps_type = bool(call.args) and target is call.args[0] is call.tensors[0] and type_ is call.notes[0].type
        if call.key is not None and keeps_type:
            store(self._memo, call.key, CachedJudgement.of(judgement, call.rule.name, written=True))
        return result

    def _make(self, call: _Uncached, judgement: Judgement) -> Any:
        """Runs a function that makes new tensors, and writes their types on them."""
        rule, args, kwargs, notes = call.rule, call.args, call.kwargs, call.notes
        try:
            result = call.func(*args, **kwargs)
        except RuntimeError as error:  # says more, if shapes do not fit because operands are sharded
            number = self.stand_in(call.tensors[0], rule.name) if rule.kind == "scalar" and self.stand_in else None
            if number is not None:
                return number
            operand_types = [Operand(note.type, x.requires_grad) for x, note in zip(call.tensors, notes)]
            refused = JudgedCall(rule, call.func, args, kwargs, call.tensors, operand_types, None)
            raise (explain_shapes(self, refused, error) or error) from None
        origins = self.origins(judgement, notes)
        extra = batched(notes) or self._extra_of(call, judgement, result)
        entry = CachedJudgement.of(judgement, rule.name, extra)
        self._stamp(result, entry.result_types, origins, extra)
        if self.symbolic:
            pieces = picked(self, rule, result, args, kwargs)
            if pieces is not result:
                return pieces
        if call.key is not None:
            store(self._memo, call.key, entry)
        return result

    def _extra_of(self, call: _Uncached, judgement: Judgement, result: Any) -> Any:
        """The `extra` of the note of a call's result; None: there is none."""
        rule, args, kwargs, notes = call.rule, call.args, call.kwargs, call.notes
        if rule.kind == "random":
            return FRESH
        extra = notes[0].extra if rule.aliases and notes else None
        if extra == READONLY:
            return READONLY
        same_size = isinstance(result, Tensor) and bool(notes) and result.numel() == call.tensors[0].numel()
        if counts(rule, args, kwargs) or (extra == COUNTED and same_size):
            return COUNTED
        lookup = lookup_note(self, rule, args, kwargs, call.tensors, notes, result, judgement.types[0])
        return lookup or stacked_note(rule, args, kwargs, call.tensors, notes) or rows_note(rule, notes, result)

    def _repeat(self, cached: CachedJudgement, origins: dict[str, Origin] | None) -> dict[str, Origin] | None:
        """Assumes again what a cached judgement assumes, and returns the origins of the call's results."""
        for text in cached.assumed:
            self.assume(text)
        return begin(self, cached.born, origins) if cached.born else origins


typecheck = SpmdTypeMode  # the newer name
HANDLERS.update((func, None) for func, rule in RULES.items() if rule.kind == "pass")
HANDLERS.update({**autograd.handlers, **hooks.handlers, **axis_numbers.handlers})
