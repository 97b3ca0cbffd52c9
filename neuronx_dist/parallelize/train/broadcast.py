"""Sends weights from the ranks that have values to those that have none: `broadcast_weights`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ... import comm
from .optimizer import parallel_modules
from .parallel_module import Container

__all__ = ["broadcast_weights"]


def broadcast_weights(module: nn.Module, stride_size: int | None = None) -> None:
    """Sends every rank the parameters and buffers of rank `rank % stride_size`, non-persistent buffers included.

    For modules made with `init_module_params=rank < plan_ngpus`. All ranks call it together.

    Args:
        stride_size: number of ranks, from rank 0, that have weights; None: the size of a unit, if all parallel modules
            inside agree; 1 without parallel modules.

    Raises:
        ValueError: `stride_size` does not divide the job into ranks that hold equal parts; or it is None, and the
            parallel modules inside have units of several sizes.
        RuntimeError: a buffer of a rank that sends has no value.
    """
    sizes = {child.compute_config.plan_ngpus for child in parallel_modules(module).values()}
    if stride_size is None:
        if len(sizes) > 1:
            raise ValueError(
                f"broadcast_weights: the parallel modules have different sizes, {sorted(sizes)} ranks: pass stride_size"
            )
        stride_size = next(iter(sizes), 1)
    if not comm.is_initialized():
        return
    world = comm.current().mesh.world_size
    wrong = [size for size in sizes if stride_size % size]
    if stride_size < 1 or world % stride_size or wrong:
        raise ValueError(
            f"broadcast_weights: stride_size={stride_size} must divide the {world} ranks of the job and be a multiple "
            f"of plan_ngpus {sorted(sizes)}" + (f", such as {max(sizes)}" if sizes else "")
        )
    _check_values(module, stride_size)
    lists = [list(range(first, world, stride_size)) for first in range(stride_size)]
    group = comm.communicator("dp")
    if list(group.ranks) not in lists:
        own_group = comm.new_group(lists, "weights")
        assert own_group is not None  # they hold all ranks
        group = own_group
    for tensor in _tensors(module):
        comm.broadcast(tensor, group, out=tensor)
    for child in module.modules():
        if isinstance(child, Container):
            for name in list(child._buffers):
                child.initialised(name)


def _check_values(module: nn.Module, stride_size: int) -> None:
    """Raises RuntimeError, on every rank, if one of the first `stride_size` ranks has a buffer without a value."""
    containers = [child for child in module.modules() if isinstance(child, Container)]
    missing = comm.gather_objects([name for child in containers for name in child.__dict__["_uninitialised"].values()])
    for rank, names in enumerate(missing[:stride_size]):
        if names:
            raise RuntimeError(
                f"broadcast_weights: buffer {names[0]!r} of rank {rank}, which sends its weights, has no value: make "
                f"the module with init_module_params=True on ranks 0 to {stride_size - 1}, or load a state dict there"
            )


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields each parameter and buffer once, also buffers without a value, which cannot be read by name."""
    seen = set()
    for child in module.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor.detach()
