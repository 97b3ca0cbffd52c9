"""Which output of a model is its loss: `NxDPPModel.output_loss_value_spec`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from ..record.recording import Recording, describe

__all__ = ["find_loss"]


def find_loss(recording: Recording, spec: Any) -> fx.Node:
    """The node of the output that `spec` marks as the loss.

    Args:
        spec: True for a forward that returns the loss; a tuple as long as the tuple or list that it returns; a dict of
            keys of the dict that it returns (those that are left out are not the loss); or these within one another.

    Raises:
        ValueError: the spec does not fit the outputs, or does not mark one scalar; the message shows both.
    """
    result = recording.result
    try:
        marked = list(_marked(result, spec, "the model's output"))
        if len(marked) != 1:
            raise ValueError(f"it marks {len(marked)} outputs as the loss: mark one with True")
        (loss,) = marked
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(f"it marks {describe(loss)}, which is no scalar tensor: are labels among the inputs?")
    except ValueError as error:
        raise ValueError(
            f"output_loss_value_spec={spec!r} does not fit the model's output {describe(result)}: {error}"
        ) from None
    flat = pytree.tree_leaves(result)
    node = recording.outputs[next(index for index, leaf in enumerate(flat) if leaf is loss)]
    assert isinstance(node, fx.Node)
    return node


def _marked(output: Any, spec: Any, where: str) -> Iterator[Any]:
    if spec is True:
        yield output
    elif isinstance(spec, Mapping):
        if not isinstance(output, Mapping):
            raise ValueError(f"{where} is no dict; {_fitting(output)}")
        missing = [key for key in spec if key not in output]
        if missing:
            labels = " (are labels among the inputs?)" if any(spec[key] for key in missing) else ""
            raise ValueError(f"{where} has no {', '.join(map(repr, missing))}{labels}")
        for key, inner in spec.items():
            yield from _marked(output[key], inner, f"{where}[{key!r}]")
    elif isinstance(spec, (tuple, list)):
        if not isinstance(output, (tuple, list)):
            raise ValueError(f"{where} is no tuple; {_fitting(output)}")
        if len(output) != len(spec):
            raise ValueError(f"{where} has {len(output)} entries, the spec {len(spec)}")
        for index, inner in enumerate(spec):
            yield from _marked(output[index], inner, f"{where}[{index}]")
    elif spec not in (False, None):
        raise ValueError(f"a spec is made of True, False, tuples and dicts, not of {spec!r}")


def _fitting(output: Any) -> str:
    """What a spec for this output looks like."""
    if isinstance(output, Mapping):
        return f"a spec for it is a dict, such as {{{next(iter(output), 'loss')!r}: True}}"
    if isinstance(output, (tuple, list)):
        return f"a spec for it is a tuple, such as {(True, *(False for _ in output[1:]))}"
    return "a spec for it is True"
