"""Division of a batch into microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...comm.host import upload
from ...torch_internals.tensors import pytree

__all__ = ["Batch", "evaluating"]


class Batch:
    """The inputs of a step, flattened, to be cut along dim 0.

    Args:
        inputs: keyword arguments of the model; tensors may lie in containers.
        names: required names of the inputs; None: any names.
        num_microbatches: number of pieces to cut tensors into, with equally many rows. Tensors of one row, where others
            have more, 0-dim tensors, and all else go whole to each microbatch.

    Raises:
        ValueError: missing or unexpected inputs; no rows, a number of rows that does not divide, or different numbers.
    """

    def __init__(self, inputs: Mapping[str, Any], names: Sequence[str] | None, num_microbatches: int) -> None:
        if names is not None and set(inputs) != set(names):
            missing = [name for name in names if name not in inputs]
            unexpected = [name for name in inputs if name not in names]
            raise ValueError(
                f"inputs must be exactly input_names {list(names)}: missing {missing or 'none'}, unexpected "
                f"{unexpected or 'none'} (pass None for an input that the batch does not have)"
            )
        ordered = {name: inputs[name] for name in (names if names is not None else sorted(inputs))}
        self.leaves, self.structure = pytree.tree_flatten(ordered)
        self.num_microbatches = num_microbatches
        rows = {
            index: leaf.shape[0]
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.ndim
        }
        self._cut = {index for index, count in rows.items() if count != 1} or {*rows}
        for index in sorted(self._cut):
            if problem := _wrong_rows(self.leaves[index], num_microbatches):
                raise ValueError(f"input {self._name(index)} {problem}")
        self._check_equal_rows({index: rows[index] for index in sorted(self._cut)})

    def key(self) -> tuple[Any, ...]:
        """A key that is equal for batches that can share a recording."""
        return (self.structure, *(self._key_of(self._piece(index, leaf, 0)) for index, leaf in enumerate(self.leaves)))

    def example(self) -> dict[str, Any]:
        """The first microbatch."""
        pieces = [self._piece(index, leaf, 0) for index, leaf in enumerate(self.leaves)]
        example: dict[str, Any] = pytree.tree_unflatten(pieces, self.structure)
        return example

    def constants(self) -> list[Any]:
        """Inputs that are no tensors: constants of a recording."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]

    def microbatches(self, leaves: Sequence[int], device: torch.device) -> list[dict[int, torch.Tensor]]:
        """The tensors with these leaf numbers, on `device`, for each microbatch.

        Raises:
            ValueError: a tensor is on meta.
        """
        for index in leaves:
            if self.leaves[index].is_meta and device.type != "meta":
                raise ValueError(f"input {self._name(index)} is on the meta device, where it has no values")
        # A 0-dim tensor of 0 or 1 would be a constant of an XLA program, which another value would need anew.
        moved = {
            index: leaf.to(device, non_blocking=True) if leaf.ndim else upload(leaf, device)
            for index, leaf in ((index, self.leaves[index]) for index in leaves)
        }
        return [
            {index: self._piece(index, leaf, microbatch) for index, leaf in moved.items()}
            for microbatch in range(self.num_microbatches)
        ]

    def _name(self, index: int) -> str:
        """Name of a leaf in error messages: `['ids']`."""
        inputs = pytree.tree_unflatten(self.leaves, self.structure)
        return pytree.keystr(pytree.tree_flatten_with_path(inputs)[0][index][0])

    def _check_equal_rows(self, rows: Mapping[int, int]) -> None:
        """Refuses tensors with different numbers of rows per microbatch; an undivided batch is left to the model."""
        if self.num_microbatches == 1 or len(set(rows.values())) < 2:
            return
        first = next(iter(rows))
        other = next(index for index in rows if rows[index] != rows[first])
        raise ValueError(
            f"inputs {self._name(first)} and {self._name(other)} have {rows[first]} and {rows[other]} rows, so each "
            f"of {self.num_microbatches} microbatches would get {rows[first] // self.num_microbatches} and "
            f"{rows[other] // self.num_microbatches}. Pass one row for each sample in each tensor (for several rows "
            "of a sample: [samples, several, ...]), or a single row, [1, ...], for a tensor that all microbatches "
            "use"
        )

    def _piece(self, index: int, leaf: Any, microbatch: int) -> Any:
        if index not in self._cut or self.num_microbatches == 1:
            return leaf
        size = leaf.shape[0] // self.num_microbatches
        return leaf.narrow(0, microbatch * size, size)

    @staticmethod
    def _key_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
        try:
            hash(leaf)
        except TypeError:
            return type(leaf), id(leaf)
        return type(leaf), leaf


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Sets evaluation mode inside; afterwards each module has its earlier mode again."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def _wrong_rows(x: torch.Tensor, num_microbatches: int) -> str:
    """The reason why a tensor cannot be cut into microbatches, in words; empty if it can."""
    rows = x.shape[0]
    if rows == 0:
        return (
            f"has shape {list(x.shape)}, no rows, so its mean would be nan: pass every rank at least one row for "
            f"each of {num_microbatches} microbatches"
        )
    if rows % num_microbatches == 0:
        return ""
    below = rows // num_microbatches * num_microbatches
    nearest = f"nearest are {below} and {below + num_microbatches}" if below else f"nearest is {num_microbatches}"
    return f"has {rows} rows, which is not divisible into {num_microbatches} microbatches: {nearest}"
