"""Fallback for functions without a handler: computed on shards if these are independent (`free_labels.py`).

Else the operands are gathered, and the results split again.

Nothing is gathered silently: a warning names each call site once, with the function, the bytes, and the remedy.
DTensor's rules are not used, since they are wrong for shards that are no chunks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..call_site import call_site
from ..rules import RULES
from ..torch_internals.distributed import before_flattening
from ..torch_internals.operators import OpOverload
from ..torch_internals.tensors import DisableTorchFunction, pytree
from ..torch_internals.transforms import is_functorch_wrapped_tensor
from .free_labels import on_shards
from .handlers import DISPATCH, FUNCTIONS, UNHANDLED, sharded
from .labels import one_mesh
from .moves.redistribute import redistributed, redistributed_view
from .report import gathered
from .spec import ShardTensorSpec, make_spec
from .tensor import ShardTensor, local_of, wrap, wrap_result

__all__ = ["announce", "fallback", "set_fallback"]

_MODES = ("error", "warn", "gather")
_default = ["warn"]
_mode: ContextVar[str | None] = ContextVar("fallback", default=None)
_warned: set[tuple[str, str]] = set()


def _checked(mode: str) -> str:
    if mode not in _MODES:
        raise ValueError(f"fallback {mode!r} is not one of {', '.join(_MODES)}")
    return mode


def set_fallback(mode: str) -> None:
    """Sets the treatment of functions without a handler: "error", "warn" (once a call site), or "gather" silently."""
    _default[0] = _checked(mode)


@contextmanager
def fallback(mode: str) -> Iterator[None]:
    """Sets the fallback for this thread, as `set_fallback`: `with fallback("error"):`."""
    token = _mode.set(_checked(mode))
    try:
        yield
    finally:
        _mode.reset(token)


@sharded(UNHANDLED)
def by_gathering(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Computes `func` on shards that are independent, or else on whole tensors, on every rank."""
    _refuse_collectives(func)
    if getattr(func, "__name__", "") == "__get__":  # an attribute is no computation: torch reads it of the wrapper
        with DisableTorchFunction():
            return func(*args, **kwargs)
    if DISPATCH.keys() != {UNHANDLED} and not getattr(func, "__module__", "").startswith("neuronx_dist"):
        with DisableTorchFunction():  # continues with operators, of which some have a handler
            return func(*args, **kwargs)
    rule = RULES.get(func)
    if rule is not None and rule.decompose is not None and rule.inplace is None:
        return rule.decompose(*args, **kwargs)
    if isinstance(func, OpOverload):
        return _by_gathering_operator(func, types, args, kwargs)
    return _gathered(func, args, kwargs)


def _by_gathering_operator(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Computes an operator that autograd, or a function without a handler, called."""
    x: Any = args[0] if args else None
    _refuse_collectives(func)
    if isinstance(x, ShardTensor) and is_functorch_wrapped_tensor(x._local):
        raise NotImplementedError(
            f"{func}: a ShardTensor made of plain tensors inside of torch.func leaves the transformed function: pass "
            "ShardTensors to that function, or return to_local() or full_tensor()"
        )
    if func in _ON_LOCALS and isinstance(x, ShardTensor):
        return wrap(func(x._local, *args[1:], **kwargs), x._spec)
    if func is _aten.view.default and tuple(args[1]) == tuple(x.shape):  # an input that an autograd function returns
        return wrap(x._local.view(x._local.shape), x._spec)
    function = _function_of(func)
    return _gathered(func, args, kwargs) if function is None else FUNCTIONS[function](function, types, args, kwargs)


def _refuse_collectives(func: Any) -> None:
    """Refuses torch.distributed's functions and operators, which do not know the layout of a ShardTensor."""
    if str(func).partition(".")[0] in _COLLECTIVES:  # torch.ops._c10d_functional.all_reduce, or its overload
        name = str(func)
    elif getattr(func, "__module__", "").startswith("torch.distributed."):
        name = func.__name__
    else:
        return
    raise NotImplementedError(
        f"{name} of a ShardTensor: torch.distributed does not know its layout. x.redistribute() and "
        "x.full_tensor() communicate by the layout; x.to_local() is this rank's part as a plain tensor. "
        f"(FullyShardedDataParallel calls this for parameters that are ShardTensors: {_DATA_PARALLEL})"
    )


def _function_of(func: Any) -> Any:
    """Returns the torch function with an operator's name, if it has a handler; else None."""
    name = func.overloadpacket.__name__
    functions = getattr(torch, name, None), getattr(torch.Tensor, name, None)
    return next((function for function in functions if function in FUNCTIONS), None)


def announce(name: str, text: str, moved: int) -> None:
    """Reports that the function `name` gathers `moved` bytes, and warns of it once for each call site.

    Raises:
        NotImplementedError: under `fallback("error")`.
    """
    mode = _mode.get() or _default[0]
    if mode == "error":
        raise NotImplementedError(text)
    gathered(name, moved)
    site = call_site()
    if mode == "warn" and (name, site) not in _warned:
        _warned.add((name, site))
        warnings.warn(f"{text}; at {site}", stacklevel=3)


def _gathered(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", str(func))
    base = name.partition(".")[0]  # without an operator's overload
    if (base.endswith("_") and not base.endswith("__")) or kwargs.get("out") is not None:
        raise NotImplementedError(f"{name} has no handler and writes in place: use its out-of-place form")
    flat, tree = pytree.tree_flatten((args, kwargs))
    operands = [x for x in flat if isinstance(x, ShardTensor)]
    one_mesh([x for x in flat if isinstance(x, torch.Tensor)], name)
    result = on_shards(func, args, kwargs)
    if result is not NotImplemented:
        return result
    first = operands[0]._spec
    split = [x for x in operands if x._spec is not x._spec.replicated()]
    if split:
        moved = sum(x.numel() * x.element_size() for x in split)
        text = (
            f"{name} has no handler: {len(split)} ShardTensors would be gathered ({moved} bytes on every rank, of "
            f"shapes {[tuple(x.shape) for x in split]}). Register a handler (neuronx_dist.shard_tensor.sharded), or "
            "call full_tensor() to gather explicitly"
        )
        announce(name, text, moved)
    args, kwargs = pytree.tree_unflatten([_whole(x) if isinstance(x, ShardTensor) else x for x in flat], tree)
    result = func(*args, **kwargs)
    return pytree.tree_map(lambda x: _split_again(x, first, operands) if isinstance(x, torch.Tensor) else x, result)


def into_plain(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Computes a function that writes ShardTensors into a plain tensor, equal on all ranks: shards are gathered.

    Raises:
        NotImplementedError: shards would be gathered, under `fallback("error")`.
    """
    flat, tree = pytree.tree_flatten((args, kwargs))
    one_mesh([x for x in flat if isinstance(x, torch.Tensor)], name)
    moved = sum(x.numel() * x.element_size() for x in flat if isinstance(x, ShardTensor) and x._spec.sharded)
    if moved:
        shape = tuple(args[0].shape)
        text = (
            f"{name} of a plain tensor of shape {shape}, and values that are sharded: they would be gathered ({moved} "
            "bytes on every rank). Make it like a ShardTensor (x.new_zeros(..)) and distribute it, or use the "
            "out-of-place form"
        )
        announce(name, text, moved)
    args, kwargs = pytree.tree_map_only(ShardTensor, lambda x: x.full_tensor(), (args, kwargs))
    return func(*args, **kwargs)


def _whole(x: ShardTensor) -> torch.Tensor:
    """Returns `x` on every rank."""
    return redistributed_view(local_of(x), x._spec, x._spec.replicated())


def _split_again(whole: torch.Tensor, like: ShardTensorSpec, operands: Sequence[ShardTensor]) -> ShardTensor:
    """Splits a global result: in the layout of the first operand if it has its shape, else replicated."""
    if whole.layout is not torch.strided:
        raise NotImplementedError(
            f"the result has layout {whole.layout}, and a ShardTensor must be strided: call full_tensor() on the "
            "operands first"
        )
    spec = make_spec(like.mesh, None, whole.shape)
    target = like if whole.shape == like.shape and not like.partial else spec
    return wrap_result(redistributed(whole, spec, target), target, operands)


_DATA_PARALLEL = (
    "use fully_shard over the data-parallel ranks, or leave parameters plain, and distribute inputs: "
    "docs/shard-tensor-wrappers.md"
)


def _refuse_flattening(param: torch.Tensor) -> bool:
    raise NotImplementedError(f"FullyShardedDataParallel of a ShardTensor: {_DATA_PARALLEL}")


_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"))
_aten = torch.ops.aten
_ON_LOCALS = frozenset((_aten.detach.default, _aten.alias.default, _aten.clone.default))
before_flattening(ShardTensor, _refuse_flattening)
DISPATCH[UNHANDLED] = _by_gathering_operator
