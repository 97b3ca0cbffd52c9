"""The optimizer's state from one format to another: what `neuronx-dist convert --optimizer` adds to the weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .errors import CheckpointMismatch
from .nxd_source import NxdSource, WholeParameter
from .nxd_writing import DividedTensor, Part, RankedTensor, file_of, padded_rows
from .optimizer_state import GROUPS
from .pieces import Piece, whole_piece
from .reading import fill
from .source import Source
from .tensors import Path, ShardedTensor, key_of

__all__ = ["add_optimizer", "items_of_optimizer", "nxd_optimizer", "read_piece"]

_STATE, _MASTER = "optimizer.state.", "optimizer.master."
Fuse = Callable[[Sequence[RankedTensor]], Sequence[RankedTensor]]


def add_optimizer(source: NxdSource, parameters: Mapping[str, WholeParameter], later_groups: Sequence[str]) -> None:
    """Adds the state of the optimizer to a folder of NxD's, which numbers parameters and does not name them.

    Args:
        later_groups: regular expressions, one for each parameter group behind the first: a parameter is in the first
            one of these that its name matches, else in the first group.

    Raises:
        CheckpointMismatch: the groups are not those of the optimizer that was saved.
    """
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(1 + len(later_groups))]
    for names in dict.fromkeys(tuple(each.names) for each in parameters.values()):
        group = next((n for n, each in enumerate(later_groups, 1) if re.search(each, names[0])), 0)
        groups[group]["params"].append(names[0])
    try:
        source.add_optimizer(groups)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            f"{error} (convert: --groups REGEX ... says which parameters the groups behind the first one have; without "
            f"--optimizer weights alone are converted)"
        ) from None


def read_piece(source: Source, key: str, piece: Piece | None = None) -> torch.Tensor:
    """A tensor of a checkpoint, or a rectangle of it, given by offset and shape."""
    saved = source.catalog.tensors[key]
    piece = whole_piece(saved.shape) if piece is None else piece
    target = torch.empty(piece.shape, dtype=saved.dtype)
    fill(
        ShardedTensor([], saved.shape, target, [Piece(whole_piece(piece.shape).local, piece.offset, piece.shape)]),
        saved,
        source,
    )
    return target


def items_of_optimizer(source: Source) -> tuple[dict[Path, str], dict[Path, Any]]:
    """What a checkpoint has of an optimizer: keys of tensors, and objects, by where they stand in nested dicts."""
    tensors: dict[Path, str] = {}
    chunks: set[Any] = set()
    for key, saved in source.catalog.tensors.items():
        if key.startswith("optimizer.") and tuple(saved.chunks) not in chunks:
            chunks.add(tuple(saved.chunks))
            tensors[_path(key)] = key
    objects = {
        _path(key): source.object(extent)
        for key, extent in source.catalog.objects.items()
        if key.startswith("optimizer.")
    }
    return tensors, objects


def nxd_optimizer(
    source: Source, parameters: Sequence[RankedTensor], fuse: Fuse, tp: int, pp: int, dp: int
) -> tuple[list[DividedTensor], dict[str, dict[Any, Any]]]:
    """The state as NxD's ZeRO-1 keeps it, for `write_files`: tensors, and what else each file holds.

    Args:
        parameters: of the model, in its order; `origin` is the name in the checkpoint.
        fuse: makes NxD's parameters of these, or of a state of each.

    Raises:
        CheckpointMismatch: there is no state.
    """
    groups_key = key_of(GROUPS)
    if groups_key not in source.catalog.objects:
        raise CheckpointMismatch("the checkpoint was saved without an optimizer: convert the weights alone")
    groups = source.object(source.catalog.objects[groups_key])
    group_of = {name: index for index, group in enumerate(groups) for name in group["params"]}
    trained = [each._replace(origin=_saved_name(each, group_of)) for each in parameters]
    trained = [each for each in trained if each.origin]
    numbered = _Numbers(fuse(trained), group_of, pp)
    layout = _Layout(tp, pp, dp)
    constants: dict[str, dict[Any, Any]] = {
        file: {
            "state": {},
            "param_groups": numbered.groups(groups, stage),
            "base_state": {number: {} for number in range(len(numbered.of_stage[stage]))},
            "shape_info": {
                number: torch.Size(each.spec.local_shape) for number, each in enumerate(numbered.of_stage[stage])
            },
        }
        for stage in range(pp)
        for file in layout.files(stage)
    }
    names = {each.origin for each in trained}
    tensors: list[DividedTensor] = []
    for prefix, entry in _entries(source, names):
        keys = {each.origin: f"{prefix}{each.origin}{entry and '.' + entry}" for each in trained}
        where = ("base_state", entry) if entry else ("sharded_master_weights",)
        state = [
            _state_of(source, each, keys[each.origin])
            for each in trained
            if keys[each.origin] in source.catalog.tensors
        ]
        alike = [each for each in state if each is not None]
        for each in fuse(alike):
            tensors.append(DividedTensor(each.dtype, each.read, list(layout.rows(each, numbered, where))))
        for each in numbered.all():  # such as the number of a step
            key = keys[each.origin]
            if key in source.catalog.tensors and each.origin not in {one.origin for one in alike}:
                saved = source.catalog.tensors[key]
                read = partial(read_piece, source, key)
                tensors.append(
                    DividedTensor(saved.dtype, read, list(layout.copies(each, saved.shape, numbered, where)))
                )
            elif key in source.catalog.objects:
                for stage, number in numbered.places(each):
                    for file in layout.files(stage):
                        constants[file]["base_state"][number][entry] = source.object(source.catalog.objects[key])
    return tensors, constants


class _Numbers:
    """The number of each parameter in each stage: by group, and in the model's order."""

    def __init__(self, parameters: Sequence[RankedTensor], group_of: Mapping[str, int], pp: int) -> None:
        self._group_of = group_of
        self.of_stage = [
            sorted((each for each in parameters if stage in each.names), key=lambda each: group_of[each.origin])
            for stage in range(pp)
        ]

    def all(self) -> Iterator[RankedTensor]:
        yield from {each.origin: each for stage in self.of_stage for each in stage}.values()

    def places(self, tensor: RankedTensor) -> Iterator[tuple[int, int]]:
        """`(stage, number)` of a parameter."""
        for stage, own in enumerate(self.of_stage):
            for number, each in enumerate(own):
                if each.origin == tensor.origin:
                    yield stage, number

    def groups(self, saved: Sequence[Mapping[str, Any]], stage: int) -> list[dict[str, Any]]:
        """The options of a stage's groups, and the numbers of their parameters."""
        of_group = [self._group_of[each.origin] for each in self.of_stage[stage]]
        return [
            {**group, "params": [number for number, own in enumerate(of_group) if own == index]}
            for index, group in enumerate(saved)
        ]


class _Layout(NamedTuple):
    """Which files there are."""

    tp: int
    pp: int
    dp: int

    def files(self, stage: int) -> list[str]:
        return [file_of("optim", tp, stage, dp) for tp in range(self.tp) for dp in range(self.dp)]

    def rows(self, tensor: RankedTensor, numbers: _Numbers, where: Sequence[str]) -> Iterator[Part]:
        """A state's rows for each dp rank, padded to equal numbers."""
        count, *rest = tensor.spec.local_shape or (1,)
        own = -(-count // self.dp)
        for stage, number in numbers.places(tensor):
            for tp in range(self.tp):
                for dp in range(self.dp):
                    cut = partial(_own_rows, tensor, tp, dp * own, own)
                    yield Part(file_of("optim", tp, stage, dp), _keys(where, number), (own, *rest), cut)

    def copies(
        self, tensor: RankedTensor, shape: tuple[int, ...], numbers: _Numbers, where: Sequence[str]
    ) -> Iterator[Part]:
        """What every rank has all of."""
        for stage, number in numbers.places(tensor):
            for file in self.files(stage):
                yield Part(file, _keys(where, number), shape, lambda whole: whole)


def _keys(where: Sequence[str], number: int) -> tuple[Any, ...]:
    return (where[0], number, *where[1:])


def _own_rows(tensor: RankedTensor, tp: int, start: int, count: int, whole: torch.Tensor) -> torch.Tensor:
    shard = tensor.spec.local_slice(whole, tp)
    return padded_rows(shard if shard.dim() else shard.view(1), start, count)


def _saved_name(tensor: RankedTensor, group_of: Mapping[str, int]) -> str:
    """The name by which the optimizer has a parameter; empty if it does not."""
    names = [tensor.origin, *(name for names in tensor.names.values() for name in names)]
    return next((name for name in names if name in group_of), "")


def _entries(source: Source, names: set[str]) -> list[tuple[str, str]]:
    """`(prefix, entry)` of the states that there are; the master weights have no entry."""
    found: dict[tuple[str, str], None] = {}
    for key in (*source.catalog.tensors, *source.catalog.objects):
        if key.startswith(_STATE):
            name, _, entry = key[len(_STATE) :].rpartition(".")
            if name in names:
                found[_STATE, entry] = None
        elif key.startswith(_MASTER) and key[len(_MASTER) :] in names:
            found[_MASTER, ""] = None
    return list(found)


def _state_of(source: Source, parameter: RankedTensor, key: str) -> RankedTensor | None:
    """A state that is laid out as its parameter is; None if it is not."""
    saved = source.catalog.tensors[key]
    if key.endswith(".step") or saved.shape != parameter.spec.unpadded_shape:
        return None
    return parameter._replace(dtype=saved.dtype, read=partial(read_piece, source, key))


def _path(key: str) -> Path:
    if key.startswith(_STATE):
        name, _, entry = key[len(_STATE) :].rpartition(".")
        return ("optimizer", "state", name, entry)
    head, part, *rest = key.split(".", 2)
    return (head, part, *rest)
