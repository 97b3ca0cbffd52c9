"""Detection of gathered tensors from autograd's graph, or without one from their memory, without reading values."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import has_torch_function_unary

from ..comm import Communicator
from ..torch_internals.autograd import input_metadata
from ..torch_internals.tensors import has_storage
from .rows import OperatorArguments, Row

__all__ = ["carry_note", "is_gathered", "note_gathered"]

# Elementwise functions and views, by the names of autograd's nodes.
_ELEMENTWISE = frozenset(
    "Add Alias Clamp ClampMax ClampMin Clone Div Expand MaskedFill Mul Neg Permute ReshapeAlias Slice Squeeze Sub Tanh "
    "ToCopy Transpose UnsafeView Unsqueeze View Where".split()
)
_LIMIT = 64  # nodes that are visited

# Memory of results of all_gather along the last dim that have no graph: ranks, and the size of the last dim.
_without_graph: WeakKeyDictionary[torch.UntypedStorage, tuple[tuple[int, ...], int]] = WeakKeyDictionary()


def note_gathered(result: torch.Tensor, communicator: Communicator, arguments: OperatorArguments) -> None:
    """Notes the result of a typed all_gather that has no graph, for `is_gathered`."""
    if arguments.src_dim == result.dim() - 1 and _has_memory(result):
        _without_graph[result.untyped_storage()] = communicator.ranks, result.shape[-1]


def carry_note(x: torch.Tensor, result: torch.Tensor) -> None:
    """Notes `result`, of an elementwise function of `x`, as `note_gathered` has noted `x`."""
    if _has_memory(x) and _has_memory(result) and x.grad_fn is None is result.grad_fn:
        note = _without_graph.get(x.untyped_storage())
        if note is not None:
            _without_graph[result.untyped_storage()] = note


def _has_memory(x: torch.Tensor) -> bool:
    return not torch.compiler.is_compiling() and not has_torch_function_unary(x) and has_storage(x)


def is_gathered(x: torch.Tensor, communicator: Communicator) -> bool:
    """Returns whether the last dim of `x` is the result of a typed all_gather over the ranks of `communicator`.

    Casts, scaling, softcapping and views that keep the size of the last dim may stand between; without a graph
    (`no_grad`) views alone. False where nothing is known: behind any other function.
    """
    if x.grad_fn is None:
        return _has_memory(x) and _without_graph.get(x.untyped_storage()) == (communicator.ranks, x.shape[-1])
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
