"""A batch in microbatches, and which output of a model is its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from ...comm.host import upload
from ..record.recording import Recording

__all__ = ["Batch", "evaluating", "find_loss"]


class Batch:
    """The inputs of a step, flattened, to be cut along dim 0.

    Args:
        inputs: keyword arguments of the model; tensors may lie in containers.
        names: what they must be called; None: anything.
        num_microbatches: how many pieces to cut tensors into; 0-dim tensors and all else go whole to each.

    Raises:
        ValueError: missing or unexpected inputs, or a dim 0 that is empty or not divisible.
    """

    def __init__(self, inputs: Mapping[str, Any], names: Sequence[str] | None, num_microbatches: int) -> None:
        if names is not None and set(inputs) != set(names):
            missing = [name for name in names if name not in inputs]
            unexpected = [name for name in inputs if name not in names]
            raise ValueError(
                f"inputs must be exactly input_names {list(names)}: missing {missing or 'none'}, unexpected "
                f"{unexpected or 'none'} (pass None for what a batch does not have)"
            )
        ordered = {name: inputs[name] for name in (names if names is not None else sorted(inputs))}
        self.leaves, self.structure = pytree.tree_flatten(ordered)
        self.num_microbatches = num_microbatches
        for path, leaf in pytree.tree_flatten_with_path(ordered)[0]:
            if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
                continue
            if leaf.shape[0] == 0:
                raise ValueError(
                    f"input {pytree.keystr(path)} has shape {list(leaf.shape)}, no rows, so that a mean over them "
                    f"would be nan: give every rank at least a row for each of {num_microbatches} microbatches"
                )
            if leaf.shape[0] % num_microbatches:
                raise ValueError(
                    f"input {pytree.keystr(path)} has {leaf.shape[0]} rows, which is not divisible into "
                    f"{num_microbatches} microbatches: nearest are "
                    f"{leaf.shape[0] // num_microbatches * num_microbatches} and "
                    f"{-(-leaf.shape[0] // num_microbatches) * num_microbatches}"
                )

    def key(self) -> tuple[Any, ...]:
        """Equal for batches that one recording serves."""
        return (self.structure, *(self._key_of(self._piece(leaf, 0)) for leaf in self.leaves))

    def example(self) -> dict[str, Any]:
        """The first microbatch."""
        example: dict[str, Any] = pytree.tree_unflatten([self._piece(leaf, 0) for leaf in self.leaves], self.structure)
        return example

    def constants(self) -> list[Any]:
        """What is not a tensor: constants of a recording."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]

    def microbatches(self, leaves: Sequence[int], device: torch.device) -> list[dict[int, torch.Tensor]]:
        """The tensors with these leaf numbers, on `device`, for each microbatch."""
        # A 0-dim tensor of 0 or 1 would be a constant of an XLA program, which another value would need anew.
        moved = {
            index: leaf.to(device, non_blocking=True) if leaf.ndim else upload(leaf, device)
            for index, leaf in ((index, self.leaves[index]) for index in leaves)
        }
        return [
            {index: self._piece(leaf, microbatch) for index, leaf in moved.items()}
            for microbatch in range(self.num_microbatches)
        ]

    def _piece(self, leaf: Any, microbatch: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or self.num_microbatches == 1:
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
    """Evaluation mode for a while; afterwards each module has its own mode again."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def find_loss(recording: Recording, spec: Any) -> fx.Node:
    """The node of the output that `spec` (`NxDPPModel.output_loss_value_spec`) marks as the loss.

    Raises:
        ValueError: the spec does not fit the outputs, or what it marks is not a scalar.
    """
    marked = list(_marked(recording.result, spec, "the model's output"))
    if len(marked) != 1:
        raise ValueError(f"output_loss_value_spec={spec!r} marks {len(marked)} outputs as the loss; mark one with True")
    (loss,) = marked
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ValueError(
            f"output_loss_value_spec={spec!r} marks an output that is no scalar tensor but {what}: is the spec right, "
            f"and were labels given?"
        )
    flat = pytree.tree_leaves(recording.result)
    node = recording.outputs[next(index for index, leaf in enumerate(flat) if leaf is loss)]
    assert isinstance(node, fx.Node)
    return node


def _marked(output: Any, spec: Any, where: str) -> Iterator[Any]:
    if spec is True:
        yield output
    elif isinstance(spec, Mapping):
        if not isinstance(output, Mapping):
            raise ValueError(f"output_loss_value_spec is a dict, but {where} is a {_type_name(output)}")
        for key, inner in spec.items():
            if inner and key not in output:
                raise ValueError(f"output_loss_value_spec names {key!r}, but {where} has {sorted(map(str, output))}")
            if inner:
                yield from _marked(output[key], inner, f"{where}[{key!r}]")
    elif isinstance(spec, (tuple, list)):
        items = list(output.values()) if isinstance(output, Mapping) else output
        if not isinstance(items, (tuple, list)) or len(items) < len(spec):
            raise ValueError(
                f"output_loss_value_spec has {len(spec)} entries, but {where} is a {_type_name(output)}"
                + (f" of {len(items)}" if isinstance(items, (tuple, list)) else "")
            )
        for index, inner in enumerate(spec):
            if inner:
                yield from _marked(items[index], inner, f"{where}[{index}]")
    elif spec:
        raise ValueError(f"output_loss_value_spec must be made of True, False, tuples and dicts, got {spec!r}")


def _type_name(output: Any) -> str:
    return "Tensor" if isinstance(output, torch.Tensor) else type(output).__name__  # it is a fake one
