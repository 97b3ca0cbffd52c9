"""Registry of the handlers that compute functions of ShardTensors, and promotion of plain tensors that meet one.

How a handler is written (`ops/` has one family of functions a file):

    @sharded(torch.nn.functional.linear)                  # 1. the functions that it computes
    def linear(func, types, args, kwargs):                # 2. torch's `__torch_function__` signature, global arguments
        (x, w), spec = inside(rule_of(func), args[:2])    # 3. local operands, and the layout of the result
        return wrap(func(x, w), spec)                     # 4. the function itself on local tensors; the result's layout

* **Labels** of dims come from the function's rule (`rules`): `rule_of(func)`. A function of global shapes that returns
  `Labels`, or a `Spec` of `rules`, replaces it if the handler can do more than the rule says, such as look up rows in a
  sharded dim, or if there is no rule. Labels are computed once for each combination of layouts.
* **Locals.** `inside(rule, operands, *extras)` (`labels.py`) decides from the labels what stays sharded and brings
  every operand there: a Replicate operand that meets a shard of the same label is split, of another label becomes
  `convert(I, R)`, so that its gradient is reduced once; Partial is reduced; shards that disagree are brought to the
  larger one's layout. Plain tensors count as Replicate. A label in `Labels.whole` must not be sharded. A contracted
  label that is sharded makes the result Partial.
* **Without labels** a handler takes `local_of(x)` and `x._spec` itself. `spec.sizes[mesh_dim]` are the sizes of *all*
  ranks' shards: results that depend on the others' shapes are computed from these sizes, without communication.
  `spec.mesh.communicator(mesh_dim)` is the group. Computations on specs alone belong in a function decorated
  with `planned`, which runs once for equal specs.
* **Communication** inside a handler is typed: `spmd.all_reduce(y, group, src=P, dst=I)` for a sum over the ranks,
  `src=P, dst=R` if what follows differs by rank; `gather`, `split`, `scatter_sum`, `transpose` of `moves.one_dim`
  for shards of any sizes; `redistributed(local, spec, target)` for a whole layout. Their backward is that of the
  table of types. Every rank calls them, also a rank whose shard is empty. Computations on one shard, such as its
  maximum, go through `on_own_shard`.
* **Results**: `wrap(local, make_spec(mesh, placements, shape, sizes))`; other results are returned unchanged.
* **Tests**: one line in `tests/shard_tensor/support/table.py` (see `support/cases.py`) runs it at all layouts, one in
  `support/refusals.py` each error that it raises, on all ranks.

A user's handler is the same: `ShardTensor.register_function_handler(target, handler)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..call_site import call_site
from ..comm.verbs.transformed_tensors import whole_batch
from ..rules.spec import HANDLERS, register_operator
from ..spmd import no_typecheck
from ..torch_internals.operators import OpOverload, OpOverloadPacket, name_of
from ..torch_internals.tensors import pytree
from ..torch_internals.transforms import transforms_active

__all__ = [
    "DISPATCH",
    "DTensorMet",
    "FUNCTIONS",
    "Handler",
    "TensorPromotionMode",
    "UNHANDLED",
    "check_promotion",
    "composed",
    "get_promotion_mode",
    "named_handler",
    "promotion_mode",
    "register_dispatch_handler",
    "register_function_handler",
    "register_named_function_handler",
    "set_promotion_mode",
    "sharded",
]

Handler = Callable[..., Any]  # (func, types, args, kwargs)


def UNHANDLED() -> None:
    """Key of the handler that computes functions without a handler."""


FUNCTIONS: dict[Any, Handler] = HANDLERS
DISPATCH: dict[Any, Handler] = {}
_NAMED: dict[str, Handler] = {}


def register_function_handler(target: Callable[..., Any], handler: Handler, **rule: Any) -> None:
    """Registers `handler(func, types, args, kwargs)`, which computes `target` whenever an argument is a ShardTensor.

    The handler replaces an earlier one of the function.

    Args:
        target: a function of torch, a method of `torch.Tensor`, or one that asks `torch.overrides.has_torch_function`.
        rule: fields of `rules.Rule`, `spec` first, from which the type checker and `parallelize` know the function;
            none: the function keeps its rule.

    Raises:
        TypeError: `target` or `handler` is no function, or rules do not have such a field.
        ValueError: both handlers are this package's, so that the order of imports would decide.
    """
    if not callable(target) or not callable(handler):
        raise TypeError(f"register_function_handler: {target!r} and {handler!r} must be functions")
    earlier = FUNCTIONS.get(target)
    if earlier is not None and earlier is not handler and _is_ours(earlier) and _is_ours(handler):
        raise ValueError(
            f"{getattr(target, '__name__', target)} has two handlers, {_name(earlier)} and {_name(handler)}: "
            "register only one"
        )
    register_operator(target, handler=handler, **rule)


def _is_ours(handler: Handler) -> bool:
    return (getattr(handler, "__module__", None) or "").startswith(f"{__package__}.")


def _name(handler: Handler) -> str:
    return f"{handler.__module__}.{getattr(handler, '__qualname__', type(handler).__name__)}"


def register_dispatch_handler(aten_overload: Any, handler: Callable[..., Any]) -> None:
    """Registers `handler(*args, **kwargs)`, which computes an operator such as `torch.ops.aten.dot.default`.

    The handler is used if the called function has no function handler.
    """
    if not isinstance(aten_overload, OpOverload):
        raise TypeError(
            f"register_dispatch_handler: {aten_overload!r} is not an operator overload, such as "
            "torch.ops.aten.dot.default"
        )
    DISPATCH[aten_overload] = handler


def register_named_function_handler(name: str, handler: Handler) -> None:
    """Registers a handler by an operator's name, `"namespace.operator.overload"`; the operator may not exist yet."""
    if name.count(".") != 2:
        raise ValueError(f"register_named_function_handler: {name!r} is not of the form 'namespace.operator.default'")
    _NAMED[name] = handler


def named_handler(func: Any) -> Handler | None:
    """Returns the handler that was registered by the name of an operator, or None."""
    if not _NAMED:
        return None
    if isinstance(func, OpOverloadPacket):
        return _NAMED.get(f"{name_of(func).replace('::', '.')}.default")
    return _NAMED.get(str(func)) if isinstance(func, OpOverload) else None


def sharded(*targets: Callable[..., Any], **rule: Any) -> Callable[[Handler], Handler]:
    """Decorator that registers the handler of some functions: `@sharded(torch.dot)`.

    Args:
        rule: fields of a rule, for functions that have none: `@sharded(my_function, spec=.., linear=..)`.
    """

    def decorate(handler: Handler) -> Handler:
        for target in targets:
            register_function_handler(target, handler, **rule)
        return handler

    return decorate


def composed(*targets: Callable[..., Any], checked: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers a function that computes `targets` by functions that have handlers.

    Args:
        checked: torch's function is called on tensors without values first, for torch's errors.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @sharded(*targets)
        def handler(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
            if kwargs.get("out") is not None:
                raise NotImplementedError(f"{func.__name__} with out= is not supported: use its out-of-place form")
            if checked:
                with no_typecheck():
                    meta_args, meta_kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
                    func(*meta_args, **meta_kwargs)
            return function(*args, **kwargs)

        return function

    return decorate


def _without_values(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


class DTensorMet(ValueError):
    """A DTensor of torch meets a ShardTensor: `__torch_function__` calls the handler again with one in its layout."""


class TensorPromotionMode(Enum):
    """Treatment of a plain tensor that meets a ShardTensor."""

    DISABLED = "disabled"  # an error
    WARN = "warn"  # Replicate, with a warning
    SILENT = "silent"  # Replicate


_mode: ContextVar[TensorPromotionMode] = ContextVar("promotion_mode", default=TensorPromotionMode.SILENT)


def get_promotion_mode() -> TensorPromotionMode:
    """Returns the promotion mode of this thread."""
    return _mode.get()


def set_promotion_mode(mode: TensorPromotionMode | str) -> None:
    """Sets the promotion mode for this thread from now on.

    Raises:
        ValueError: there is no such mode.
    """
    modes = {member.value: member for member in TensorPromotionMode}
    if not isinstance(mode, TensorPromotionMode) and mode not in modes:
        raise ValueError(f"promotion_mode {mode!r} is not one of {', '.join(modes)}")
    _mode.set(TensorPromotionMode(mode))


@contextmanager
def promotion_mode(mode: TensorPromotionMode | str) -> Iterator[None]:
    """Sets the promotion mode for this thread in a `with`: `with promotion_mode("disabled"):`."""
    before = get_promotion_mode()
    set_promotion_mode(mode)
    try:
        yield
    finally:
        _mode.set(before)


def check_promotion(x: torch.Tensor, function: str) -> None:
    """Checks that a plain tensor may be used as Replicate, and warns if the mode says so.

    Raises:
        DTensorMet: the tensor is torch's DTensor, which has a layout.
        NotImplementedError: the tensor is a ShardTensor inside of a transform of `torch.func`.
        ValueError: the mode is DISABLED.
    """
    if transforms_active() and getattr(whole_batch(x), "holds_local", False):
        raise NotImplementedError(
            f"{function}: a ShardTensor that torch.func transforms meets one that it does not: pass both to the "
            "transformed function, or use torch.autograd.grad"
        )
    if type(x) is DTensor:
        raise DTensorMet(function)
    mode = _mode.get()
    if mode is TensorPromotionMode.SILENT:
        return
    text = (
        f"{function}: a plain tensor of shape {tuple(x.shape)} is mixed with a ShardTensor, and its layout is "
        "unknown: use distribute_tensor(x, mesh, placements)"
    )
    if mode is TensorPromotionMode.DISABLED:
        raise ValueError(f"{text}; promotion_mode('silent') assumes that it is equal on all ranks")
    warnings.warn(f"{text}; it is assumed to be equal on all ranks, at {call_site()}", stacklevel=2)
