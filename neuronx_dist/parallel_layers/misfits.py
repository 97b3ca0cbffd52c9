"""Errors for inputs and keywords that do not fit a layer: the message says what the layer expects.

Loaded for the first error: a training run loads none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from .. import comm
from ..call_site import calling_module
from ..nearest import nearest
from ..spmd import SpmdTypeError

__all__ = ["refuse_ids", "refuse_input", "refuse_keyword", "refuse_sequence"]


def refuse_keyword(name: str, key: str, known: Sequence[str]) -> NoReturn:
    """Refuses a keyword argument that a function or class does not have.

    Raises:
        TypeError: always; the message names the keyword and the most similar ones.
    """
    raise TypeError(f"{name}() got an unexpected keyword argument {key!r}; nearest: {nearest(key, known)}")


def refuse_sequence(layer: Any, x: torch.Tensor) -> NoReturn:
    """Refuses an input of a sequence-parallel layer that has no sequence dim at the layer's position for it.

    Raises:
        ValueError: always; the message names the layer, the shape and what to do.
    """
    raise ValueError(
        f"{calling_module()}: the input {list(x.shape)} has no sequence dim {layer.sequence_dimension} "
        "(sequence_dimension of this sequence-parallel layer): pass a batch of sequences, [batch, seq, ..] or [seq, "
        "batch, ..], set sequence_dimension to the dim of the sequence, or build it with "
        "sequence_parallel_enabled=False"
    )


def refuse_input(layer: Any, x: torch.Tensor, cause: Exception) -> None:
    """Explains why a linear layer failed, if its input does not fit; called from its forward.

    Raises:
        ValueError: the input's features or dtype are not the layer's; the message names the layer, by its path where it
            is known, both shapes and dtypes, and what to do.
    """
    if isinstance(cause, SpmdTypeError):  # the checker's, which says more
        return
    size = comm.communicator(layer.axis).size
    weight = layer.weight_q if hasattr(layer, "weight_q") else layer.weight
    parallel = getattr(layer, "input_is_parallel", None)  # None: of a column layer, whose input is whole
    features = weight.shape[1] if parallel else layer.input_size
    given = x.shape[-1] if x.dim() else 0
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    if given != features:
        repair = f"it takes [.., {features}]"
        if given == layer.input_size:  # and the layer takes a shard
            repair += (
                ", this rank's shard of the features (input_is_parallel=True), but got all features: build it with "
                "input_is_parallel=False, or pass the output of a layer with gather_output=False"
            )
        elif given * size == features:
            repair += ", all features, and got this rank's shard of them: " + (
                "gather them (gather_output=True in the layer before)"
                if parallel is None
                else "build it with input_is_parallel=True"
            )
    elif x.dtype != weight.dtype and not autocast:
        repair = (
            f"cast the input to {weight.dtype}, build the layer with dtype={x.dtype}, or call it under torch.autocast"
        )
    else:
        return
    raise ValueError(
        f"{calling_module()}: the input {list(x.shape)} of {x.dtype} does not fit the weight {list(weight.shape)} of "
        f"{weight.dtype}, [out, in] at a tensor parallel size of {size}: {repair}"
    ) from cause


def refuse_ids(layer: Any, ids: torch.Tensor, cause: Exception) -> None:
    """Explains why an embedding failed, if its ids are no integers; called from its forward.

    Raises:
        ValueError: the ids are no integers.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{calling_module()}: ids must be int64 or int32, got {list(ids.shape)} of {ids.dtype} for a table of "
            f"{layer.num_embeddings} rows: pass token ids, or cast them with .long()"
        ) from cause
