"""Parameter groups of an optimizer in torch.distributed.checkpoint's format: an item for each option.

optimizer.param_groups.0.lr                 of `get_optimizer_state_dict`: a list of groups, with names under `params`
optimizer.param_groups.layers.0.weight.lr   with `flatten_optimizer_state_dict`: an option of a parameter
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..optimizer_state import GROUPS
from ..rank_tensors import Path, key_of
from .catalog import Catalog, Extent, StoredChunk
from .checkpoint_source import CheckpointSource, RectangleRead, StoredRectangle
from .checksums import Ranges

__all__ = ["JoinedGroups", "flattened_groups"]

_PREFIX = key_of((*GROUPS, ""))


def flattened_groups(groups: Sequence[Mapping[str, Any]]) -> dict[Path, Any]:
    """All options of all groups, by path."""
    return {(*GROUPS, index, option): value for index, group in enumerate(groups) for option, value in group.items()}


class JoinedGroups:
    """A checkpoint with its parameter groups as one object, in whichever way they were written.

    Attributes:
        catalog: of the checkpoint, with `optimizer.param_groups` in place of the items of its options.
    """

    def __init__(self, source: CheckpointSource) -> None:
        catalog = source.catalog
        self._source = source
        self._options = [key for key in (*catalog.objects, *catalog.tensors) if key.startswith(_PREFIX)]
        items = set(self._options)
        self.catalog: Catalog = replace(
            catalog,
            tensors={key: value for key, value in catalog.tensors.items() if key not in items},
            objects={key: value for key, value in catalog.objects.items() if key not in items},
        )
        if items:
            self.catalog.objects[key_of(GROUPS)] = _JOINED

    def needs(self, objects: Iterable[Extent], reads: Iterable[RectangleRead]) -> dict[str, Ranges]:
        wanted = list(objects)
        return self._source.needs(self._extents(wanted), [*reads, *(self._reads() if _JOINED in wanted else ())])

    def share(self, needs: Sequence[Mapping[str, Ranges]], objects: Iterable[Extent]) -> None:
        self._source.share(needs, self._extents(objects))

    def finish(self) -> None:
        self._source.finish()

    def _extents(self, objects: Iterable[Extent]) -> list[Extent]:
        """The items that objects consist of."""
        saved = self._source.catalog.objects
        options = [saved[key] for key in self._options if key in saved]
        return [item for extent in objects for item in (options if extent is _JOINED else [extent])]

    def _reads(self) -> Iterator[RectangleRead]:
        """The options that are tensors."""
        saved = self._source.catalog.tensors
        for tensor in (saved[key] for key in self._options if key in saved):
            for chunk in tensor.chunks:
                yield RectangleRead(chunk, tensor.dtype, tuple(slice(0, size) for size in chunk.shape))

    def object(self, extent: Extent) -> Any:
        return self._groups() if extent is _JOINED else self._source.object(extent)

    def open(self, chunk: StoredChunk, dtype: torch.dtype) -> StoredRectangle:
        return self._source.open(chunk, dtype)

    def _groups(self) -> list[dict[str, Any]]:
        by_owner: dict[str, dict[str, Any]] = {}
        for key in self._options:
            owner, _, option = key[len(_PREFIX) :].rpartition(".")
            by_owner.setdefault(owner, {})[option] = self._value(key)
        if all(re.fullmatch(r"\d+", owner) and "params" in options for owner, options in by_owner.items()):
            return [options for _, options in sorted(by_owner.items(), key=lambda pair: int(pair[0]))]
        groups: list[dict[str, Any]] = []  # parameters with equal options form a group
        for name, options in by_owner.items():
            same = next((group for group in groups if {**group, "params": None} == {**options, "params": None}), None)
            if same is None:
                groups.append({**options, "params": [name]})
            else:
                same["params"].append(name)
        return groups

    def _value(self, key: str) -> Any:
        catalog = self._source.catalog
        if key in catalog.objects:
            return self._source.object(catalog.objects[key])
        saved = catalog.tensors[key]  # a learning rate that is a tensor
        value = torch.empty(saved.shape, dtype=saved.dtype)
        for chunk in saved.chunks:
            part = value[tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.shape))]
            self._source.open(chunk, saved.dtype).copy([slice(0, size) for size in chunk.shape], part)
        return value if saved.shape else value.item()


_JOINED = Extent(_PREFIX, 0, 0)
