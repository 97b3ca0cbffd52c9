"""Hooks on gradients: their bodies run under the checker, and their results must have the expected type.

The gradient that a hook receives has the dual of its tensor's type; so must the gradient that the hook returns or
writes. A leaf is the exception: only the accumulation follows its hooks, so that the leaf's gradient has the type of
the last hook's result from then on (a hook that reduces over dp makes R of P), and the optimizer gate judges.

    tensors, parameters     `register_hook`; by it `torch.autograd.graph.register_multi_grad_hook`
    accumulated gradients   `register_post_accumulate_grad_hook`
    nodes of the graph      `grad_fn.register_hook`, `.register_prehook`; by them the backward hooks of modules
    saved tensors           `torch.autograd.graph.saved_tensors_hooks`: an assumption

Hooks that exist before the mode sees their tensor are found on the tensor. The gradients that a node passes to its
inputs may belong to no tensor that the checker has seen; then a hook's effect is an assumption, with the hook's line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ....call_site import USER, call_site, owner_of
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import Note, TensorType, note_of
from ....spmd.types import SAME, UNIFORM, I, R, Shard, V
from ....spmd.watching import active
from ....torch_internals.autograd import REGISTER_HOOK, HookMixin, current_node
from ....torch_internals.tensors import DisableTorchFunction, backward_hooks, post_accumulate_hooks, version_of
from ..session import Session
from .accumulation import accumulated_error, fits, gradient_type, set_incoming
from .autograd import adopt

__all__ = ["handlers", "install", "pass_through", "remove", "watch_hooks"]

_KEY = "_spmd"  # in the metadata of a node: the types of its outputs by number; on a watched hook: the hook itself
_DUE = "_spmd_due"  # of a tensor with hooks: its type when the first one was registered
_POST_ACCUMULATE: Any = Tensor.register_post_accumulate_grad_hook
_GRAD_FN: Any = Tensor.grad_fn

Hook = Callable[..., Any]


def watch_hooks(mode: Session, x: Tensor) -> None:
    """Makes the hooks that a tensor has already run under the checker."""
    for table, watched in ((backward_hooks(x), _watched), (post_accumulate_hooks(x), _watched_after)):
        for key, hook in (table or {}).items():
            table[key] = watched(mode, x, hook)  # type: ignore[index]


def _run(mode: Session, hook: Hook, args: Sequence[Any]) -> Any:
    """Runs the body of a hook under the checker; the engine runs without it."""
    with ExitStack() as stack:
        stack.enter_context(mode)
        if mode.around_hooks is not None:
            stack.enter_context(mode.around_hooks())
        return hook(*args)


def _mode_for(mode: Session) -> Session | None:
    """The checker under which a hook runs: this thread's, or, in a thread of the engine, the one that watched it."""
    here = cast("Session | None", active())
    if here is None and mode.entered and not mode.paused:
        return mode
    return here


def _is_watched(hook: Hook) -> bool:
    return hasattr(hook, _KEY)


def _marked(watched: Hook, hook: Hook) -> Hook:
    functools.update_wrapper(watched, hook, updated=())
    setattr(watched, _KEY, hook)
    return watched


def _named(hook: Hook, registered: str) -> str:
    """The name and line of a hook; for torch's own, which calls a module's hooks, the line of the registration."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or owner_of(code.co_filename) != USER:
        return f"a hook that was registered at {registered}"
    name = getattr(function, "__name__", "")
    return f"the hook {'' if name == '<lambda>' else name + ' '}at {code.co_filename}:{code.co_firstlineno}"


# --- tensors ----------------------------------------------------------------------------------------------------------


def _watched(mode: Session, x: Tensor, hook: Hook) -> Hook:
    """Wraps a hook of `x` so that it is judged: `hook(grad)` returns another gradient, or None."""
    if _is_watched(hook):
        return hook
    leaf = ref(x) if x.is_leaf else None
    note, table, registered = note_of(x), ref(x), call_site()
    due_type = given_type = note.type if note is not None else None
    if note is not None and next(iter((backward_hooks(x) or {}).values()), hook) is hook:  # the first one
        given_type = _choose(mode, x, note, hook)
    if due_type is not None:
        due_type = x.__dict__.setdefault(_DUE, due_type)

    def watched(grad: Any) -> Any:
        here, tensor = _mode_for(mode), table()
        if here is None or not isinstance(grad, Tensor):
            return hook(grad)
        hooks = [*((backward_hooks(tensor) or {}).values() if tensor is not None else ())]
        param = leaf() if leaf is not None else None
        if given_type is not None and (note_of(grad) is None or hooks[:1] == [watched]):
            here.stamp(grad, here.gradient_type(given_type))
        before = version_of(grad)
        result = _run(here, hook, (grad,))
        if hooks and hooks[-1] is not watched:
            return result  # passed to the next hook
        given = grad if result is None else result
        if param is not None:
            _accumulates(here, param, given, hook, registered)
        elif due_type is not None:
            _verify(here, hook, registered, [given], [here.gradient_type(due_type)])
        elif result is not None or version_of(grad) != before:
            here.assume(f"{_named(hook, registered)}: the gradient that it returns is of the type that is due")
        return result

    return _marked(watched, hook)


def _choose(mode: Session, x: Tensor, note: Note, hook: Hook) -> TensorType:
    """Chooses the type of a tensor with hooks, whose dual the first hook receives.

    A tensor that is I may be used as R, if its hook sums the gradients of these uses (I of P). That is tried, on
    gradients without values.
    """
    axes = [axis for axis in mode.axes_of(note.type) if note.type.get(axis) is I]
    as_replicated = note.type
    for axis in axes:
        as_replicated = as_replicated.with_axis(axis, R)
    if not axes or _probe(mode, x, hook, note.type, note.type) or not _probe(mode, x, hook, as_replicated, note.type):
        return note.type
    mode.stamp(x, as_replicated, note.origins, note.extra)
    return as_replicated


def _probe(mode: Session, x: Tensor, hook: Hook, given: TensorType, due: TensorType) -> bool:
    """Returns whether a hook turns gradients of a tensor of type `given` into those of a tensor of type `due`."""
    with DisableTorchFunction():
        grad = torch.zeros_like(x, requires_grad=False)
    mode.stamp(grad, mode.named(given).of_gradient())
    try:
        with mode.trial(), mode.unwatched(), torch.no_grad(), mode:
            result = hook(grad)
            _verify(mode, hook, "", [grad if result is None else result], [mode.named(due).of_gradient()])
    except Exception:  # a hook may ask for what is there in backward only
        return False
    return True


def _accumulates(mode: Session, param: Tensor, grad: Tensor, hook: Hook, registered: str) -> None:
    """Stores the type that the last hook of a leaf returned, which is added to the leaf's gradient.

    Raises:
        SpmdTypeError: the gradient that was accumulated before has another type.
    """
    note = note_of(grad)
    if note is None:
        mode.assume(f"{_named(hook, registered)}: the gradient that it returns is of the type that is due")
        set_incoming(mode, param, None)
        return
    with DisableTorchFunction():
        total = param.grad
        old = None if total is None else note_of(adopt(mode, param, total))
    set_incoming(mode, param, note.type, note.origins)
    leaf_note = note_of(param)
    if old is not None and leaf_note is not None:
        for axis in mode.axes_of(note.type):
            if not _equal_types(old.type, note.type, axis):
                raise accumulated_error(param, leaf_note.type, old.type, note.type)


def _equal_types(one: TensorType, other: TensorType, axis: str) -> bool:
    here, there = one.get(axis), other.get(axis)
    return here is None or there is None or (fits(here, there) and fits(there, here))


def _verify(
    mode: Session, hook: Hook, registered: str, grads: Sequence[Any], types: Sequence[TensorType | None]
) -> None:
    """Checks that the gradients which a hook returned, or wrote in place, have the expected types.

    Raises:
        SpmdTypeError: one has not.
    """
    for index, (grad, expected) in enumerate(zip(grads, types)):
        if expected is None or not isinstance(grad, Tensor):
            continue
        note = note_of(grad)
        if note is None:
            mode.assume(f"{_named(hook, registered)}: the gradient that it returns is {expected}")
            continue
        for axis in sorted({*expected.types, *note.type.types}):
            due, actual = expected.get(axis), note.type.get(axis)
            if due is None or actual is None:
                continue
            whole = isinstance(due, Shard) and actual.letter in SAME and actual is not UNIFORM
            if fits(actual, due) and not whole:
                if isinstance(due, Shard) and actual is V:
                    mode.assume(f"{_named(hook, registered)}: the gradient that it returns is {due} on {axis}")
                continue
            which = f"gradient {index}" if len(types) > 1 else "the gradient"
            raise SpmdTypeError(
                f"{_named(hook, registered)} returns a gradient {list(grad.shape)} {note.type}",
                f"on {axis} {which} must be {due} for the type of its tensor, but the hook returns {actual}",
                repairs=[f"return a gradient that is {due} on {axis}", "change it in a hook of the parameter"],
                axis=axis,
                rule="hook",
            )


def _watched_after(mode: Session, x: Tensor, hook: Hook) -> Hook:
    """Wraps a hook that runs after the accumulation: `hook(param)`, which may change `param.grad` in any way."""
    if _is_watched(hook):
        return hook

    def watched(param: Any) -> Any:
        here = _mode_for(mode)
        return hook(param) if here is None else _run(here, hook, (param,))

    return _marked(watched, hook)


def _register(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles `x.register_hook(hook)` and `x.register_post_accumulate_grad_hook(hook)`."""
    x, hook = (*args, *kwargs.values())
    if note_of(x) is not None or isinstance(x, nn.Parameter):
        mode.note(x, func.__name__)  # before it is watched: a write may have changed its type
    return func(x, (_watched_after if func is _POST_ACCUMULATE else _watched)(mode, x, hook))


# --- nodes ------------------------------------------------------------------------------------------------------------


def _node_of(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles `x.grad_fn`: stores the type of x with the node, for hooks that are registered there."""
    node, note = func(*args, **kwargs), note_of(args[0])
    if node is not None and note is not None:
        node.metadata.setdefault(_KEY, {})[args[0].output_nr] = note.type
    return node


def _output_type(mode: Session, node: Any, number: int) -> TensorType | None:
    """The type of the gradient that a node receives for its output `number`; None: it is not known."""
    if node is None:
        return None
    variable = getattr(node, "variable", None)
    if isinstance(variable, Tensor):
        note = mode.note(variable, "grad")
        return gradient_type(mode, variable, note) if note is not None else None
    types = _types_of(node)
    if types is not None:
        outputs = types[1]
        type_ = outputs[number] if number < len(outputs) else None
    else:
        type_ = node.metadata.get(_KEY, {}).get(number)
    return None if type_ is None else mode.gradient_type(type_)


def _types_of(node: Any) -> tuple[Sequence[TensorType | None], Sequence[TensorType | None]] | None:
    """Types of the inputs and the outputs of a custom function's call; None for another node."""
    signature = getattr(node, "_spmd", None)
    return None if signature is None else (signature.inputs, signature.outputs)


def _input_types(mode: Session, node: Any, count: int) -> list[TensorType | None]:
    """Types of the gradients that a node passes to its inputs."""
    types = _types_of(node)
    if types is not None and len(types[0]) == count:
        return [None if type_ is None else mode.gradient_type(type_) for type_ in types[0]]
    return [_output_type(mode, below, number) for below, number in node.next_functions[:count]]


def _watched_node(mode: Session, hook: Hook) -> Hook:
    """Wraps a hook of a node: `hook(grad_outputs)` runs before it, `hook(grad_inputs, grad_outputs)` after it."""
    if _is_watched(hook):
        return hook
    registered = call_site()

    def watched(*args: Any) -> Any:
        here = _mode_for(mode)
        if here is None:
            return hook(*args)
        node = current_node()
        grads, before = args[-1], len(args) == 1
        above = [_output_type(here, node, number) for number in range(len(grads))]
        types = above if before else _input_types(here, node, len(args[0]))
        for values, known in ((grads, above), (args[0], types)):
            for grad, type_ in zip(values, known):
                if isinstance(grad, Tensor) and type_ is not None:
                    here.stamp(grad, type_)
        versions = [version_of(grad) if isinstance(grad, Tensor) else 0 for grad in args[0]]
        result = _run(here, hook, args)
        changed = args[0] if result is None else result if isinstance(result, (tuple, list)) else (result,)
        variable = getattr(node, "variable", None)
        if before and isinstance(variable, Tensor):
            _accumulates(here, variable, changed[0], hook, registered)
            return result
        _verify(here, hook, registered, changed, types)
        for old, new, type_, version in zip(args[0], changed, types, versions):
            touched = isinstance(new, Tensor) and (new is not old or version_of(new) != version)
            if touched and type_ is None:
                here.assume(f"{_named(hook, registered)}: what it makes of a gradient of {node.name()} is of its type")
        return result

    return _marked(watched, hook)


class _Types:
    """Types of the inputs and outputs of a function that returns its arguments."""

    __slots__ = ("inputs", "outputs")

    def __init__(self, types: Sequence[TensorType | None]) -> None:
        self.inputs = self.outputs = types


def pass_through(mode: Session, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Handles `BackwardHookFunction.apply(*tensors)`, with which torch finds the gradients at a module's borders."""
    notes = [mode.note(x, "a module with backward hooks") for x in args]
    result = original(*args)
    with DisableTorchFunction():
        for x, note in zip(result, notes):
            if note is not None:
                mode.stamp(x, note.type, note.origins, note.extra)
        node = next((x.grad_fn for x in result if x.grad_fn is not None), None)
        if node is not None:
            node._spmd = _Types([None if note is None else note.type for note in notes])
    return result


# --- what is changed in torch while a mode is entered -----------------------------------------------------------------

_register_hook = vars(HookMixin)[REGISTER_HOOK]
_enter = saved_tensors_hooks.__enter__


def _registering(hooks: Any, hook: Hook) -> Any:
    mode = cast("Session | None", active())
    return _register_hook.__func__(hooks, hook if mode is None else _watched_node(mode, hook))


def _entering(self: Any) -> None:
    mode = cast("Session | None", active())
    for hook in (self.pack_hook, self.unpack_hook):
        code = getattr(hook, "__code__", None)
        if mode is not None and code is not None and owner_of(code.co_filename) == USER:
            mode.assume(
                f"saved_tensors_hooks: {_named(self.unpack_hook, '')} returns to backward what was saved by "
                f"{_named(self.pack_hook, '')}"
            )
            break
    _enter(self)


def install() -> None:
    """Makes threads that check types judge hooks of nodes, and list hooks of saved tensors."""
    setattr(HookMixin, REGISTER_HOOK, staticmethod(_registering))
    saved_tensors_hooks.__enter__ = _entering  # type: ignore[method-assign]


def remove() -> None:
    """Restores torch's own functions."""
    setattr(HookMixin, REGISTER_HOOK, _register_hook)
    saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]


handlers: dict[Any, Any] = {
    Tensor.register_hook: _register,
    _POST_ACCUMULATE: _register,
    _GRAD_FN.__get__: _node_of,
}
