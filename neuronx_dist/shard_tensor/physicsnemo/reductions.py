"""Sums over ranks, without gradients, under PhysicsNeMo's names: many tensors at once, a loss, shared parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ... import comm
from ...comm import Handle
from ..manager import DistributedManager
from .primitives import communicator_of

__all__ = ["fused_all_reduce", "mark_module_as_shared", "reduce_loss", "unmark_module_as_shared"]

_OPS = {"SUM": "sum", "AVG": "sum", "MAX": "max", "MIN": "min"}
_HANDLE = "_shared_weight_dist_hook"  # of a parameter


class FusedWork:
    """A sum on its way; until `wait()` the results have this rank's values."""

    def __init__(self, handle: Handle | None, results: Sequence[torch.Tensor], divisor: int) -> None:
        self._handle, self._results, self._divisor = handle, results, divisor

    def wait(self) -> bool:
        """Waits, and fills the results. May be called again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            buffer = handle.wait()
            pieces = buffer.split([x.numel() for x in self._results])
            for result, piece in zip(self._results, pieces):
                result.copy_((piece / self._divisor if self._divisor > 1 else piece).view(result.shape))
        return True

    def is_completed(self) -> bool:
        """Returns whether `wait` was called, or there was nothing to wait for."""
        return self._handle is None


@torch.no_grad()
def fused_all_reduce(
    tensors: Any,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
) -> Any:
    """Reduces a tensor, or all tensors of a mapping (a TensorDict too) or sequence, by one all-reduce.

    Results have the shape, dtype and device of their tensors, and no graph. Keys of a mapping travel sorted, so that
    their order may differ between ranks.

    Args:
        op: `torch.distributed.ReduceOp` SUM, AVG, MAX or MIN.
        buffer_dtype: in which they travel; None: to which all promote, at least fp32 for floats.
        device: on which they travel; None: of the first.
        async_op: whether to return the result with its work: `result, work`; `work.wait()` fills the result.

    Raises:
        TypeError: not tensors.
        ValueError: integers and floats without `buffer_dtype`; another `op`.
    """
    if isinstance(tensors, torch.Tensor):
        result: Any = tensors.detach().clone()
        leaves = [result]
    elif isinstance(tensors, Mapping):
        detach = getattr(tensors, "detach", None)  # a TensorDict's
        result = _copied(tensors) if detach is None else detach().clone()
        leaves = [x for _, x in sorted(_items(result), key=lambda item: item[0])]
    elif isinstance(tensors, Sequence) and not isinstance(tensors, (str, bytes)):
        result = leaves = [x.detach().clone() for x in tensors]
    else:
        raise TypeError(f"fused_all_reduce takes a tensor, a mapping or a sequence of tensors, got {type(tensors)}")
    work = _started(leaves, op, communicator_of(group) if comm.is_initialized() else None, buffer_dtype, device)
    if async_op:
        return result, work
    work.wait()
    return result


def _copied(tensors: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: _copied(x) if isinstance(x, Mapping) else x.detach().clone() for name, x in tensors.items()}


def _items(tensors: Mapping[Any, Any], prefix: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    for name, x in tensors.items():
        if isinstance(x, Mapping):
            yield from _items(x, (*prefix, name))
        else:
            yield (*prefix, name), x


def _started(
    leaves: Sequence[torch.Tensor], op: Any, communicator: Any, buffer_dtype: torch.dtype | None, device: Any
) -> FusedWork:
    name = next((name for name in _OPS if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise ValueError(f"fused_all_reduce: op {op} is not one of ReduceOp.{', ReduceOp.'.join(_OPS)}")
    if not leaves:
        return FusedWork(None, leaves, 1)
    dtype = buffer_dtype or reduce(torch.promote_types, (x.dtype for x in leaves))
    if buffer_dtype is None and dtype.is_floating_point:
        if not all(x.dtype.is_floating_point for x in leaves):
            raise ValueError(
                f"fused_all_reduce: {', '.join(sorted({str(x.dtype) for x in leaves}))} would travel as {dtype}, which "
                "does not hold all integers: pass buffer_dtype, or call it once for each"
            )
        dtype = torch.promote_types(dtype, torch.float32)
    if communicator is None or communicator.size == 1:
        return FusedWork(None, leaves, 1)
    buffer = torch.cat([x.reshape(-1).to(device=device or leaves[0].device, dtype=dtype) for x in leaves])
    handle = comm.all_reduce(buffer, communicator, op=_OPS[name], async_op=True)
    assert isinstance(handle, Handle)
    return FusedWork(handle, leaves, communicator.size if name == "AVG" else 1)


@torch.no_grad()
def reduce_loss(loss: float, dst_rank: int = 0, mean: bool = True) -> float | None:
    """Returns the mean, or the sum, of the ranks' losses on rank `dst_rank`, None on the others.

    Raises:
        UninitializedManagerError: nobody has called `DistributedManager.initialize()`.
    """
    manager = DistributedManager()
    total = comm.all_reduce(torch.tensor([float(loss)], device=manager.device), "world")
    assert isinstance(total, torch.Tensor)
    if manager.rank != dst_rank:
        return None
    return total.item() / (manager.world_size if mean else 1)


def mark_module_as_shared(
    module: nn.Module, process_group: str | None, recurse: bool = True, use_fp32_reduction: bool = True
) -> nn.Module:
    """Makes every backward sum the gradients of a module's parameters over a named group; returns the module.

    Args:
        process_group: name of a group of `DistributedManager`; None: all ranks.
        recurse: whether parameters of submodules are shared too.
        use_fp32_reduction: sum in at least fp32.

    Raises:
        RuntimeError: a parameter is marked already.
    """
    communicator = communicator_of(DistributedManager().group(process_group))
    reduce_dtype = torch.float32 if use_fp32_reduction else None

    def summed(grad: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(grad, communicator, reduce_dtype=reduce_dtype)

    for name, param in module.named_parameters(recurse=recurse):
        if hasattr(param, _HANDLE):
            raise RuntimeError(f"mark_module_as_shared: parameter {name} is marked already: unmark it first")
        setattr(param, _HANDLE, param.register_hook(summed))
    return module


def unmark_module_as_shared(module: nn.Module, recurse: bool = True) -> nn.Module:
    """Ends what `mark_module_as_shared` began; returns the module.

    Raises:
        RuntimeError: a parameter is not marked.
    """
    for name, param in module.named_parameters(recurse=recurse):
        if not hasattr(param, _HANDLE):
            raise RuntimeError(f"unmark_module_as_shared: parameter {name} is not marked")
        getattr(param, _HANDLE).remove()
        delattr(param, _HANDLE)
    return module
