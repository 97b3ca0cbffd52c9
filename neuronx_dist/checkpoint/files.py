"""The files of a checkpoint: torch.distributed.checkpoint's own format, written and read without copies.

    .metadata           where each piece of each tensor lies (pickled classes of torch.distributed.checkpoint)
    __<rank>_0.distcp   pieces that this rank wrote, each as `torch.save` writes a tensor; objects too

`torch.distributed.checkpoint.load` reads it. Each file ends with checksums of its blocks (`checksums`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from .state import State

__all__ = ["WritePlan", "plan", "read", "write"]


class Storage(Protocol):
    """What is asked of a storage; `storage.Storage` is one."""

    def write(self, path: str, chunks: Iterator[memoryview | bytes]) -> Any: ...

    def map(self, path: str) -> memoryview:
        """The whole file as a memory map, or read into memory where there is none."""


class WritePlan:
    """What this rank writes.

    Attributes:
        files: name -> size in bytes of each file that this rank writes: `__<rank>_0.distcp`; rank 0 `.metadata` too.
    """

    files: dict[str, int]

    def stage(self, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Copies all that this rank writes into host memory; from then on the run may change its tensors.

        Args:
            buffer: what an earlier `stage` returned; it is written anew if it is large enough.
        """
        raise NotImplementedError

    def chunks(self, name: str) -> Iterator[memoryview | bytes]:
        """The content of a file, with its checksums: from staged memory if there is some, else from the tensors."""
        raise NotImplementedError


def plan(state: State) -> WritePlan:
    """Shares the writing among the ranks that hold the same pieces, and lays out the files. All ranks call it.

    One `gather_objects` over the world, and nothing else is communicated until the files are written.
    """
    raise NotImplementedError


def write(plan: WritePlan, storage: Storage, folder: str) -> None:
    """Writes this rank's files; no communication. The `.metadata` of rank 0 names files of others: wait for all."""
    raise NotImplementedError


def read(state: State, storage: Storage, folder: str, *, strict: bool = True) -> list[str]:
    """Reads this rank's pieces into the tensors of a state, and the objects. All ranks call it.

    Before anything is changed, all ranks compare names and shapes, and either all go on or all raise.

    Returns:
        Keys of the state that the checkpoint does not hold; with `strict` there are none.

    Raises:
        CheckpointMismatch: with `strict`, missing or unexpected keys; and other shapes, in any case.
        CheckpointCorrupted: a file is missing, truncated or changed; `.metadata` is no checkpoint's.
    """
    raise NotImplementedError
