"""Detection of gathered tensors from autograd's graph, without reading values."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import Communicator
from ..torch_internals.autograd import input_metadata
from .rows import Row

__all__ = ["is_gathered"]

# Elementwise functions and views, by the names of autograd's nodes.
_ELEMENTWISE = frozenset(
    "Add Alias Clamp ClampMax ClampMin Clone Div Expand MaskedFill Mul Neg Permute ReshapeAlias Slice Squeeze Sub Tanh "
    "ToCopy Transpose UnsafeView Unsqueeze View Where".split()
)
_LIMIT = 64  # nodes that are visited


def is_gathered(x: torch.Tensor, communicator: Communicator) -> bool:
    """Returns whether the last dim of `x` is the result of a typed all_gather over the ranks of `communicator`.

    Casts, scaling, softcapping and views that keep the size of the last dim may stand between. False where nothing is
    known: without gradients, or behind any other function.
    """
    pending: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while pending and len(seen) < _LIMIT:
        node = pending.pop()
        if node is None or node in seen or _last_dim(node) != x.shape[-1:]:
            continue
        seen.add(node)
        row = getattr(node, "row", None)
        if isinstance(row, Row):
            if row.key[0] != "all_gather" or node.communicator.ranks != communicator.ranks:
                continue
            if node.arguments.src_dim == len(input_metadata(node)[0].shape) - 1:
                return True
        elif node.name().partition("Backward")[0] in _ELEMENTWISE:
            pending += [following for following, _ in node.next_functions]
    return False


def _last_dim(node: Any) -> tuple[int, ...]:
    """Size of the last dim of a node's result, in a tuple; empty if it has none."""
    results = input_metadata(node)
    return tuple(results[0].shape[-1:]) if results else ()
