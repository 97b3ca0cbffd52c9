"""Types through backward: losses, gradients, and the bodies of custom autograd functions.

Native derivatives are right by construction: the gradient of a tensor has the dual of its type. Custom functions are
checked: the forward of an `autograd.Function` runs under the checker like other code, its outputs' gradients get the
duals of the outputs' types, its backward runs under the checker too, and must return gradients with the duals of its
inputs' types. So a missing or an additional collective in a fused function's backward is found.

Forward does not show whether an output that is equal on all ranks is I or R. Where a collective made it equal, it is
the one for which its backward is right: both are tried, I first, on gradients without values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from ....call_site import call_site
from ....comm import context
from ....rules import RULES
from ....spmd.errors import SpmdTypeError
from ....spmd.intercept import apply_of
from ....spmd.tensor_type import READONLY, TensorType, note_of, origins_of, tensors_in, write
from ....spmd.types import SAME, I, P, R, SpmdType, V
from ....torch_internals.autograd import backward_class, function_class, saved_tensors_of, top_saved_tensors_hooks
from ....torch_internals.tensors import DisableTorchFunction, version_of
from ..messages.explain import gradient_error, shown
from ..messages.loss_errors import loss_error, scale_error
from ..session import Session
from .accumulation import accumulated_error, accumulating, adds_up, averages_leaf, fits, gradient_type, incoming_origins
from .composition import CompositionCheck, run_node
from .inplace import check_write, last_write
from .vmapped import hidden_gradient, seen_losses
from .ways_back import check_ways_back

__all__ = ["adopt", "apply_function", "check_loss", "handlers", "is_checked"]


class _Signature:
    """Types of the inputs and outputs of one call of a function; None for arguments that are no tensors."""

    __slots__ = ("inputs", "leaves", "mode", "name", "outputs", "sent", "where")

    def __init__(self, mode: Session, name: str, inputs: Sequence[TensorType | None], args: Sequence[Any]) -> None:
        self.mode, self.name, self.inputs = mode, name, inputs
        self.leaves = [x if isinstance(x, Tensor) and x.is_leaf and x.requires_grad else None for x in args]
        self.outputs: list[TensorType | None] = []
        self.sent: list[Any] = []  # by permutes in forward
        self.where = call_site()


_checked: dict[Any, Any] = {}
_flavours: dict[Any, Any] = {}  # which of I and R the outputs are, by function and types


def apply_function(
    mode: Session,
    cls: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rehearsal: bool = False,
) -> Any:
    """Runs `cls.apply(*args)` with its forward and its backward under the checker."""
    quiet = DisableTorchFunction
    with quiet():
        notes = [mode.note(x, cls.__name__) if isinstance(x, Tensor) else None for x in args]
        signature = _Signature(mode, cls.__name__, [None if note is None else note.type for note in notes], args)
    hooked = top_saved_tensors_hooks(True) is not None
    if hooked and not rehearsal and torch.is_grad_enabled():
        _rehearse(mode, cls, args, kwargs, signature.inputs)
    comparison = CompositionCheck(mode, cls, args, signature.inputs)
    before = len(mode.permuted)
    result = apply_of(_subclass(cls))(*args, **kwargs)
    signature.sent = mode.permuted[before:]
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    with quiet():
        differentiable = [x for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
        node: Any = differentiable[0].grad_fn if differentiable else None
        for x in outputs:
            note = note_of(x) if isinstance(x, Tensor) else None
            signature.outputs.append(None if note is None else note.type)
        if node is not None and function_class(node) is not None:
            node._spmd = signature
    if node is not None and hasattr(node, "_spmd"):
        _choose(signature, cls, args, outputs)
        with quiet():
            for x, type_ in zip(outputs, signature.outputs):
                if type_ is not None:
                    mode.stamp(x, type_, origins_of(x) or None)
    if comparison.active:
        comparison.compare(outputs, signature.outputs)
    return result


def _rehearse(
    mode: Session,
    cls: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[TensorType | None],
) -> None:
    """Calls the function on copies first, so that the results of trials are known in the call itself.

    Inside of a checkpoint a trial would unpack saved tensors, which recomputes, and pack some of its own.
    """
    key = ("rehearsal", cls, tuple(inputs), _hashable(args))
    if key in mode.compared:
        return
    mode.compared.add(key)
    with DisableTorchFunction():
        copies = []
        for x, type_ in zip(args, inputs):
            if isinstance(x, Tensor):
                note = note_of(x)
                x = x.detach().requires_grad_(x.requires_grad).clone()  # no leaf, which may not be written
                if type_ is not None:
                    mode.stamp(x, type_, note.origins if note is not None else None)
            copies.append(x)
    events: list[Any] = getattr(context.current().backend if context.is_initialized() else None, "events", [])
    begin, counts = len(events), (mode.operators, mode.collectives)
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        apply_function(mode, cls, tuple(copies), kwargs, rehearsal=True)
    del events[begin:]
    mode.operators, mode.collectives = counts


def _hashable(x: Any) -> Any:
    """An argument as a part of a key; for a tensor the properties on which a trial depends."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.requires_grad
    if isinstance(x, (list, tuple)):
        return tuple(map(_hashable, x))
    try:
        hash(x)
    except TypeError:  # a dict, or options with one
        return repr(x)
    return x


def _itself(x: Any) -> Any:
    return x


def is_checked(cls: Any) -> bool:
    """Returns whether a function is the subclass of one whose backward is checked."""
    return _checked.get(cls.__base__) is cls


def _subclass(cls: Any) -> Any:
    """A subclass of the function whose backward is checked; one for each function."""
    subclass = _checked.get(cls)
    if subclass is None:

        def backward(ctx: Any, *grads: Any) -> Any:
            signature: _Signature | None = getattr(ctx, "_spmd", None)
            if signature is None or signature.mode.paused:
                return cls.backward(ctx, *grads)
            mode = signature.mode
            for grad, type_ in zip(grads, signature.outputs):
                if isinstance(grad, Tensor) and type_ is not None:
                    mode.stamp(grad, mode.gradient_type(type_))
            before = len(mode.permuted)
            with mode:  # the engine runs without it
                result = cls.backward(ctx, *grads)
            check_ways_back(signature.name, signature.where, signature.sent, mode.permuted[before:])
            _verify(signature, cls, result if isinstance(result, tuple) else (result,), ctx)
            return result

        def remembering(function: Callable[..., Any]) -> Any:
            """Wraps forward, or setup_context, so that it stores the types of the tensors that it saves."""

            def saving(ctx: Any, *args: Any, **kwargs: Any) -> Any:
                result = function(ctx, *args, **kwargs)
                saved = getattr(ctx, "to_save", None) or ()
                ctx._spmd_saved = [note_of(x) if isinstance(x, Tensor) else None for x in saved]
                return result

            return staticmethod(saving)

        split = cls.setup_context is not torch.autograd.Function.setup_context
        name = "setup_context" if split else "forward"
        members = {"backward": staticmethod(backward), name: remembering(getattr(cls, name))}
        subclass = type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})
        node_class = backward_class(subclass)
        node_class.saved_tensors = property(_saved)
        if hasattr(node_class, "input_grad_buffers"):  # torch 2.15
            node_class.input_grad_buffers = property(_no_buffers)
        _checked[cls] = subclass
    return subclass


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Restores the types of `ctx.saved_tensors`, which hooks on saved tensors (a checkpoint's) lose."""
    saved: tuple[Any, ...] = saved_tensors_of(ctx)
    for x, note in zip(saved, getattr(ctx, "_spmd_saved", ())):
        if note is not None and isinstance(x, Tensor) and note_of(x) is None:
            write(x, note.type, note.origins, note.session, note.extra)
    return saved


def _no_buffers(ctx: Any) -> tuple[None, ...]:
    """Returns no buffer for any input, so that the backward returns its gradients, which are checked.

    torch promises a buffer to no call; a trial runs outside of the engine, where torch has none.
    """
    signature: _Signature | None = getattr(ctx, "_spmd", None)
    if signature is not None:
        signature.mode.assume(f"{signature.name}.backward: what it adds to input_grad_buffers is what it else returns")
    return (None,) * len(ctx.needs_input_grad)


def _verify(signature: _Signature, cls: Any, grads: Sequence[Any], node: Any) -> None:
    """Checks that the gradients returned by a backward have the duals of the inputs' types."""
    for index, (grad, input_type) in enumerate(zip(grads, signature.inputs)):
        note = note_of(grad) if isinstance(grad, Tensor) else None
        if input_type is None or not isinstance(grad, Tensor):
            continue
        if note is None:
            signature.mode.assume(f"{signature.name}.backward: the type of gradient {index}")
            continue
        gradient_type = signature.mode.gradient_type(input_type)
        for axis in sorted({*gradient_type.types, *note.type.types}):
            expected_type, actual_type = gradient_type.get(axis), note.type.get(axis)
            if expected_type is None or actual_type is None or fits(actual_type, expected_type):
                continue
            if averages_leaf(
                signature.mode, signature.leaves[index], node, note.type, axis, actual_type, expected_type
            ):
                continue
            raise gradient_error(cls, signature.where, input_type.get(axis), index, grad, axis, expected_type)


# --- I or R -----------------------------------------------------------------------------------------------------------


def _choose(signature: _Signature, cls: Any, args: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Decides for outputs that are equal on an axis whether they are I or R, and writes it into the signature."""
    undecided: dict[str, tuple[SpmdType, SpmdType]] = {}  # by axis, in the order in which they are tried
    flavours: dict[str, SpmdType] = {}
    axes = {axis for type_ in (*signature.inputs, *signature.outputs) if type_ is not None for axis in type_.types}
    for axis in sorted(axes):
        spmd_types = [(x, type_.get(axis)) for x, type_ in zip(args, signature.inputs) if type_ is not None]
        equal = [type_ for type_ in signature.outputs if type_ is not None and (type_.get(axis) or R).letter in SAME]
        receiving = {spmd_type.letter for x, spmd_type in spmd_types if spmd_type is not None and x.requires_grad}
        receiving &= set("RIVSP")
        if not equal or not receiving:
            continue
        tried: tuple[SpmdType, SpmdType] = (R, I) if receiving == {"R"} else (I, R)
        if cls is CheckpointFunction and len(receiving) == 1 and receiving <= SAME:
            flavours[axis] = tried[0]  # its backward is native, and has effects
        else:
            undecided[axis] = tried
    outputs_before = list(signature.outputs)
    if undecided:
        key = (
            cls,
            tuple(signature.inputs),
            tuple(outputs_before),
            tuple(undecided),
            tuple(x for x in args if isinstance(x, (int, bool, str))),
        )
        known = _flavours.get(key)
        for axis, tried in undecided.items():
            if known is not None:
                flavours[axis] = known[axis]
                continue
            for flavour in tried:
                flavours[axis] = flavour
                if _probe(signature, flavours, outputs_before, outputs):
                    break
            else:
                flavours[axis] = tried[0]  # wrong either way: the error of backward has the reason
        if known is None:
            _flavours[key] = {axis: flavours[axis] for axis in undecided}
    signature.outputs = _with(outputs_before, flavours)


def _with(types: Sequence[TensorType | None], flavours: dict[str, SpmdType]) -> list[TensorType | None]:
    """The types with I and R exchanged for the one that `flavours` has for the axis."""
    result = []
    for type_ in types:
        for axis, spmd_type in flavours.items():
            if type_ is not None and (type_.get(axis) or R).letter in SAME:
                type_ = type_.with_axis(axis, spmd_type)
        result.append(type_)
    return result


def _probe(
    signature: _Signature,
    flavours: dict[str, SpmdType],
    outputs_before: Sequence[TensorType | None],
    outputs: Sequence[Any],
) -> bool:
    """Returns whether the backward is right if the outputs are of these flavours."""
    mode = signature.mode
    signature.outputs = _with(outputs_before, flavours)
    try:
        with mode.trial(), mode.unwatched(), mode.gradients_restored():
            run_node(outputs)
    except SpmdTypeError:
        return False
    return True


# --- the handlers -----------------------------------------------------------------------------------------------------


def _backward(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`loss.backward(gradient)`, `torch.autograd.backward(tensors, grad_tensors)`; `tensors` may be gradient edges."""
    tensors = args[0] if args else kwargs.get("tensors")
    grads = args[1] if len(args) > 1 else kwargs.get("gradient", kwargs.get("grad_tensors"))
    _check_start(mode, tensors, grads)
    with accumulating(mode, tensors):
        return func(*args, **kwargs)


def _grad(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad(outputs, inputs, grad_outputs)`."""
    if mode.probing:
        return func(*args, **kwargs)
    named = {**dict(zip(("outputs", "inputs", "grad_outputs"), args)), **kwargs}
    tensors = tensors_in((named["outputs"], named.get("grad_outputs")))
    losses = [note for x in tensors if (note := note_of(x)) is not None]
    with seen_losses(mode, tensors):
        _check_start(mode, named["outputs"], named.get("grad_outputs"))
    inputs = named["inputs"] if isinstance(named["inputs"], (list, tuple)) else (named["inputs"],)
    with accumulating(mode, named["outputs"]):
        result = func(*args, **kwargs)
        for x, grad in zip(inputs, result):
            note = mode.note(x, "grad") if isinstance(x, Tensor) else None
            if note is not None and isinstance(grad, Tensor):
                type_, hidden = hidden_gradient(losses, note, gradient_type(mode, x, note))
                mode.stamp(grad, type_, incoming_origins(mode, x), hidden)
    return result


def _check_start(mode: Session, tensors: Any, grads: Any) -> None:
    """Checks the losses, or gradients, at which backward starts, and stores the scale of its gradients."""
    outputs = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
    seeds = grads if isinstance(grads, (list, tuple)) else (grads,) * len(outputs)
    scale_and_loss: dict[str, tuple[int, Tensor]] = {}
    for output, seed in zip(outputs, seeds):
        if not isinstance(output, Tensor):
            continue
        for axis, scale in check_loss(mode, output, seed).items():
            before, other = scale_and_loss.setdefault(axis, (scale, output))
            if before != scale:
                raise scale_error(mode, [other, output], axis)
    for axis in mode.averaged:
        if axis in scale_and_loss and scale_and_loss[axis][0] != 1:
            raise scale_error(mode, [scale_and_loss[axis][1]], axis)
    scales = {axis: scale for axis, (scale, _) in scale_and_loss.items() if scale}
    if scales != mode.gradient_scales:
        mode.adopt_gradients()  # of the backward before, whose losses had other scales
        mode.gradient_scales = scales


def check_loss(mode: Session, loss: Tensor, gradient: Tensor | None = None) -> dict[str, int]:
    """Checks that backward may start at a loss; returns the scale that gradients have by it, by axis.

    Raises:
        SpmdTypeError: a loss that is R would be counted once for each rank; a loss that varies has no known sum.
    """
    note = mode.note(loss, "backward")
    if note is None:
        return {}
    loss_type = note.type
    scales: dict[str, int] = {}
    if gradient is not None:
        seed = mode.note(gradient, "backward")
        gradient_type = mode.named(loss_type).of_gradient()  # of an axis in the rest too
        for axis in sorted({*gradient_type.types, *(seed.type.types if seed is not None else ())}):
            actual, expected = seed.type.get(axis) if seed is not None else None, gradient_type.get(axis)
            if actual is None or expected is None or axis == "pp":
                continue
            given_whole = actual.letter == "R" and expected.letter != "P"
            own_mean = actual.letter == "R" and expected.letter == "P" and axis in mode.data_axes()
            if not (own_mean or given_whole or fits(actual.base, expected.base)):
                raise SpmdTypeError(
                    f"backward of {shown(loss, loss_type)} at {call_site()}",
                    f"on {axis} the gradient passed to backward must be {expected}, but is {actual}",
                    axis=axis,
                    rule="loss",
                )
            scales[axis] = actual.scale - expected.scale + own_mean
        return scales
    for axis in mode.axes_of(loss_type):
        spmd_type = loss_type.get(axis)
        if spmd_type is None or axis == "pp" or not loss.requires_grad:
            continue
        scales[axis] = spmd_type.scale
        if spmd_type.letter == "R" and (spmd_type.scale == -1 or axis in mode.data_axes()):
            scales[axis] += 1  # its own mean
            continue
        if spmd_type.letter in "I0" or spmd_type.base is P:
            continue
        if spmd_type.base is V and axis in mode.data_axes():
            mode.assume(f"the losses that vary over {axis} are summands")
            continue
        raise loss_error(mode, loss, loss_type, axis, spmd_type)
    return scales


def _get_grad(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = func(*args, **kwargs)
    return None if grad is None else adopt(mode, args[0], grad)


def adopt(mode: Session, param: Tensor, grad: Tensor) -> Tensor:
    """Writes the dual of the parameter's type on a gradient that backward made or added to.

    Raises:
        SpmdTypeError: it was something else, a sum over ranks for instance, when backward added to it.
    """
    note = note_of(param)
    if note is None and isinstance(param, nn.Parameter):
        note = mode.note(param, "grad")
    if note is None:
        return grad
    added, grad_note = gradient_type(mode, param, note), note_of(grad)
    known = last_write(mode, grad) if grad_note is not None else None
    if grad_note is None or grad_note.session != mode.session:
        mode.stamp(grad, added, incoming_origins(mode, param))
    elif grad_note.version != version_of(grad) and (known is None or known.version != version_of(grad)):
        if not adds_up(grad_note.type, added):
            raise accumulated_error(param, note.type, grad_note.type, added)
        mode.stamp(grad, added, grad_note.origins)
    return grad


def _get_data(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    note = mode.note(args[0], "data") if note_of(args[0]) is not None or isinstance(args[0], nn.Parameter) else None
    if note is not None:
        mode.stamp(result, note.type, note.origins, READONLY)
    return result


def _set_data(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, value = args
    old, new = note_of(target), note_of(value)
    if old is not None and new is not None and isinstance(target, nn.Parameter):
        check_write(mode, RULES[func], target, new.type, args, [old, new])
    result = func(*args, **kwargs)
    if old is not None and (new is None or new.type is not old.type) and not isinstance(target, nn.Parameter):
        mode.stamp(target, new.type if new is not None else old.type)
    elif old is not None:
        mode.stamp(target, old.type, old.origins)
    return result


def _plainly(mode: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
handlers: dict[Any, Any] = {
    Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    _GRAD.__get__: _get_grad,
    _GRAD.__set__: _plainly,
    _DATA.__get__: _get_data,
    _DATA.__set__: _set_data,
}
