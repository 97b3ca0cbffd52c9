"""Ids in a vocabulary: are they inside of it?"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .. import spmd
from ..comm.traced import ordered_operator
from ..comm.transforms import transforming, whole_batch

__all__ = ["check_ids"]


def check_ids(ids: torch.Tensor, vocabulary: int, ignore_index: int | None, name: str) -> None:
    """Checks that ids are in `0..vocabulary - 1`, or are `ignore_index`. It reads values: for tensors on the CPU.

    Raises:
        IndexError: one is not; the message begins with `name`.
    """
    if is_dynamo_compiling():
        _operator(ids, vocabulary, ignore_index, name)
    else:
        _check(ids, vocabulary, ignore_index, name)


@spmd.no_typecheck()  # each rank looks at its own
def _check(ids: torch.Tensor, vocabulary: int, ignore_index: int | None, name: str) -> None:
    if transforming():
        ids = whole_batch(ids)
    wrong = (ids < 0) | (ids >= vocabulary)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if wrong.any():
        ignored = f" and is not ignore_index={ignore_index}" if ignore_index is not None else ""
        raise IndexError(f"{name} {ids[wrong][0].item()} is outside the vocabulary of {vocabulary}{ignored}")


_operator = ordered_operator(
    "check_ids(Tensor ids, int vocabulary, int? ignore_index, str name) -> ()", _check, lambda *arguments: None
)
