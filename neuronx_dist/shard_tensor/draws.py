"""Random numbers of a ShardTensor: those of one process, or, on request, of each part by itself.

By default every rank draws the numbers of the whole tensor from the default stream, which is seeded equally on all
ranks (`spmd.manual_seed`, `torch.manual_seed`), and keeps its part. So the values are those of one process at any
layout, and ranks with the same part have the same numbers.

No draw of torch begins in the middle of a tensor: on a CPU the generator goes from number to number (and MKL takes one
seed for a call), on a GPU what an element gets depends on the launch for all of it. So `random_numbers("part")`, which
draws this rank's part alone, has other values than one process, of the same distribution: a number of the default
stream and the bounds of the part seed it. Values then depend on the layout; ranks with the same part still agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..comm.generators import get_state, seed, set_state
from .device_mesh import with_values
from .spec import ShardTensorSpec

__all__ = ["drawn", "drawn_between", "own_piece", "random_numbers"]

_MODES = ("whole", "part")
_mode: ContextVar[str] = ContextVar("random_numbers", default="whole")


@contextmanager
def random_numbers(mode: str) -> Iterator[None]:
    """Sets, for this thread, what a rank draws of a ShardTensor: `with random_numbers("part"):`.

    This is for dropout, also of attention, random tensors in place, and factories.

    Args:
        mode: "whole", the default: all numbers of the tensor, so that values are those of one process. "part": this
            rank's numbers alone, in memory and time of the part; values depend on the layout.
    """
    if mode not in _MODES:
        raise ValueError(f"random_numbers {mode!r} is not one of {', '.join(_MODES)}")
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def own_piece(whole: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """Returns this rank's part of a whole tensor, as a view."""
    if spec.mesh.communicators is None:
        return whole.reshape(-1)[:0].view(spec.local_shape)
    for dim in spec.mesh_dim_of:
        whole = whole.narrow(dim, spec.offsets[dim], spec.local_shape[dim])
    return whole


def drawn(
    draw: Callable[[Sequence[int]], torch.Tensor],
    spec: ShardTensorSpec,
    *,
    dims: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Returns this rank's part of the numbers that `draw` returns for a shape.

    Args:
        dims: numbers are drawn for the first so many dims, and repeated along the others; None: for all.
        generator: the one that `draw` uses; None: the default stream.
    """

    def numbers(shape: Sequence[int]) -> torch.Tensor:
        some = draw(shape[:dims])
        return some if dims is None else some.view(*some.shape, *[1] * (len(shape) - some.dim())).expand(shape)

    if _mode.get() == "part":
        with _stream_of((spec.offsets[:dims], *spec.local_shape[:dims]), generator):
            return numbers(spec.local_shape).contiguous()
    return own_piece(numbers(spec.shape), spec).clone()


def drawn_between(
    draw: Callable[[Sequence[int]], torch.Tensor], shape: Sequence[int], bounds: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Returns the numbers of a shape between bounds: start and stop of each dim."""
    if _mode.get() == "part":
        with _stream_of(bounds, None):
            return draw([stop - start for start, stop in bounds])
    return draw(shape)[tuple(slice(*bound) for bound in bounds)]


@contextmanager
def _stream_of(part: Sequence[Any], generator: torch.Generator | None) -> Iterator[None]:
    """Draws from a stream that a number of the generator and a part seed; the generator goes on by that number."""
    with with_values():
        device = "cpu" if generator is None else generator.device
        base = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))
    # Mixed, since torch's generator for CPUs takes 32 bits of a seed: bounds may differ in higher ones alone.
    mixed = hash((base, *part)) % 2**32
    if generator is None:
        state = get_state()
        seed(mixed)
    else:
        position = generator.get_state()
        generator.manual_seed(mixed)
    try:
        yield
    finally:
        if generator is None:
            set_state(state)
        else:
            generator.set_state(position)
