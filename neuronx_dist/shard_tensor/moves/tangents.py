"""Linear moves of dual numbers (forward-mode AD): the tangent moves as the value does, on every rank.

Whether a tensor has a tangent differs by rank: the result of an empty shard may have none. A tensor without one has a
tangent of zeros inside of a dual level, so that all ranks communicate equally.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from ...torch_internals.transforms import forward_mode_level, is_forward_mode_enabled, transforms_active

__all__ = ["may_be_dual", "moved_dual"]


def may_be_dual(x: torch.Tensor) -> bool:
    """Returns whether `x` has a tangent on some rank, for all that a rank can know.

    Inside of `torch.func` moves are linear operators, which it gives their tangents.
    """
    if transforms_active() or forward_mode_level() < 0 or not is_forward_mode_enabled():
        return False
    return x.is_floating_point() or x.is_complex()


def moved_dual(
    x: torch.Tensor,
    move: Callable[[torch.Tensor], torch.Tensor],
    move_tangent: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns a linear `move` of a value together with that of its tangent (`move_tangent`, where it differs)."""
    value, tangent = forward_ad.unpack_dual(x)
    tangent = torch.zeros_like(value) if tangent is None else tangent
    return forward_ad.make_dual(move(value), (move_tangent or move)(tangent))
