"""The optimizer's state from one format to another: what `neuronx-dist convert --optimizer` adds to the weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..dcp.checkpoint_source import CheckpointSource
from ..dcp.reading import fill
from ..errors import CheckpointMismatch
from ..nxd.nxd_reading import NxdSource, WholeParameter
from ..nxd.nxd_writing import DividedTensor, Part, RankedTensor, row_parts
from ..nxd.rank_files import file_of
from ..optimizer_state import GROUPS
from ..pieces import TensorPiece, whole_piece
from ..rank_tensors import Path, ShardedTensor, key_of

__all__ = ["add_optimizer", "items_of_optimizer", "nxd_optimizer", "read_piece"]

_STATE, _MASTER = "optimizer.state.", "optimizer.master."
Fuse = Callable[[Sequence[RankedTensor]], Sequence[RankedTensor]]


def add_optimizer(source: NxdSource, parameters: Mapping[str, WholeParameter], later_groups: Sequence[str]) -> None:
    """Adds the state of the optimizer to a folder of NxD's, which numbers parameters and does not name them.

    Args:
        later_groups: regular expressions, one for each parameter group after the first: a parameter belongs to the
            first of these groups whose expression matches its name, else to the first group of all.

    Raises:
        CheckpointMismatch: the groups are not those of the optimizer that was saved.
    """
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(1 + len(later_groups))]
    for names in dict.fromkeys(tuple(parameter.names) for parameter in parameters.values()):
        group = next((n for n, pattern in enumerate(later_groups, 1) if re.search(pattern, names[0])), 0)
        groups[group]["params"].append(names[0])
    try:
        source.add_optimizer(groups)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            f"{error} (convert: --groups REGEX ... says which parameters the groups behind the first one have; without "
            f"--optimizer weights alone are converted)"
        ) from None


def read_piece(source: CheckpointSource, key: str, piece: TensorPiece | None = None) -> torch.Tensor:
    """Reads a tensor of a checkpoint, or a rectangle of it; of `piece` offset and shape count."""
    saved = source.catalog.tensors[key]
    piece = whole_piece(saved.shape) if piece is None else piece
    target = torch.empty(piece.shape, dtype=saved.dtype)
    fill(
        ShardedTensor(
            [], saved.shape, target, [TensorPiece(whole_piece(piece.shape).local, piece.offset, piece.shape)]
        ),
        saved,
        source,
    )
    return target


def items_of_optimizer(source: CheckpointSource) -> tuple[dict[Path, str], dict[Path, Any]]:
    """The optimizer's items in a checkpoint: keys of tensors, and objects, by path in nested dicts."""
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
    source: CheckpointSource, parameters: Sequence[RankedTensor], fuse: Fuse, tp: int, pp: int, dp: int
) -> tuple[list[DividedTensor], dict[str, dict[Any, Any]]]:
    """The state in the form of NxD's ZeRO-1, for `write_files`: tensors, and the other content of each file.

    Args:
        parameters: of the model, in its order; `origin` is the name in the checkpoint.
        fuse: turns parameters, or states of parameters, into NxD's fused ones.

    Raises:
        CheckpointMismatch: the checkpoint has no optimizer state.
    """
    groups_key = key_of(GROUPS)
    if groups_key not in source.catalog.objects:
        raise CheckpointMismatch("the checkpoint was saved without an optimizer: convert the weights alone")
    groups = source.object(source.catalog.objects[groups_key])
    group_of = {name: index for index, group in enumerate(groups) for name in group["params"]}
    trained = [parameter._replace(origin=_saved_name(parameter, group_of)) for parameter in parameters]
    trained = [parameter for parameter in trained if parameter.origin]
    numbered = _Numbers(fuse(trained), group_of, pp)
    layout = _Layout(tp, pp, dp)
    constants: dict[str, dict[Any, Any]] = {
        file: {
            "state": {},
            "param_groups": numbered.groups(groups, stage),
            "base_state": {number: {} for number in range(len(numbered.of_stage[stage]))},
            "shape_info": {
                number: torch.Size(tensor.spec.local_shape) for number, tensor in enumerate(numbered.of_stage[stage])
            },
        }
        for stage in range(pp)
        for file in layout.files(stage)
    }
    names = {parameter.origin for parameter in trained}
    tensors: list[DividedTensor] = []
    for prefix, entry in _entries(source, names):
        keys = {parameter.origin: f"{prefix}{parameter.origin}{entry and '.' + entry}" for parameter in trained}
        where = ("base_state", entry) if entry else ("sharded_master_weights",)
        found = [
            _state_of(source, parameter, keys[parameter.origin])
            for parameter in trained
            if keys[parameter.origin] in source.catalog.tensors
        ]
        states = [tensor for tensor in found if tensor is not None]
        for fused in fuse(states):
            tensors.append(DividedTensor(fused.dtype, fused.read, list(layout.rows(fused, numbered, where))))
        for parameter in numbered.all():  # such as the number of a step
            key = keys[parameter.origin]
            if key in source.catalog.tensors and parameter.origin not in {tensor.origin for tensor in states}:
                saved = source.catalog.tensors[key]
                read = partial(read_piece, source, key)
                tensors.append(
                    DividedTensor(saved.dtype, read, list(layout.copies(parameter, saved.shape, numbered, where)))
                )
            elif key in source.catalog.objects:
                for stage, number in numbered.places(parameter):
                    for file in layout.files(stage):
                        constants[file]["base_state"][number][entry] = source.object(source.catalog.objects[key])
    return tensors, constants


class _Numbers:
    """The number of each parameter in each stage: by group, and in the model's order."""

    def __init__(self, parameters: Sequence[RankedTensor], group_of: Mapping[str, int], pp: int) -> None:
        self._group_of = group_of
        self.of_stage = [
            sorted(
                (tensor for tensor in parameters if stage in tensor.names), key=lambda tensor: group_of[tensor.origin]
            )
            for stage in range(pp)
        ]

    def all(self) -> Iterator[RankedTensor]:
        yield from {parameter.origin: parameter for stage in self.of_stage for parameter in stage}.values()

    def places(self, tensor: RankedTensor) -> Iterator[tuple[int, int]]:
        """`(stage, number)` of a parameter."""
        for stage, parameters in enumerate(self.of_stage):
            for number, parameter in enumerate(parameters):
                if parameter.origin == tensor.origin:
                    yield stage, number

    def groups(self, saved: Sequence[Mapping[str, Any]], stage: int) -> list[dict[str, Any]]:
        """The options of a stage's groups, and the numbers of their parameters."""
        of_group = [self._group_of[parameter.origin] for parameter in self.of_stage[stage]]
        return [
            {**group, "params": [number for number, group_index in enumerate(of_group) if group_index == index]}
            for index, group in enumerate(saved)
        ]


class _Layout(NamedTuple):
    """The files of an optimizer, and the parts of states in them."""

    tp: int
    pp: int
    dp: int

    def files(self, stage: int) -> list[str]:
        return [file_of("optim", tp, stage, dp) for tp in range(self.tp) for dp in range(self.dp)]

    def rows(self, tensor: RankedTensor, numbers: _Numbers, where: Sequence[str]) -> Iterator[Part]:
        """A state's rows for each dp rank, padded to equal numbers."""
        for stage, number in numbers.places(tensor):
            for tp in range(self.tp):
                files = [file_of("optim", tp, stage, dp) for dp in range(self.dp)]
                yield from row_parts(files, _keys(where, number), tensor.spec.local_shape, partial(tensor.shard, tp))

    def copies(
        self, tensor: RankedTensor, shape: tuple[int, ...], numbers: _Numbers, where: Sequence[str]
    ) -> Iterator[Part]:
        """A state that every rank holds whole."""
        for stage, number in numbers.places(tensor):
            for file in self.files(stage):
                yield Part(file, _keys(where, number), shape)


def _keys(where: Sequence[str], number: int) -> tuple[Any, ...]:
    return (where[0], number, *where[1:])


def _saved_name(tensor: RankedTensor, group_of: Mapping[str, int]) -> str:
    """The name of a parameter in the optimizer; empty if the optimizer does not have it."""
    names = [tensor.origin, *(name for names in tensor.names.values() for name in names)]
    return next((name for name in names if name in group_of), "")


def _entries(source: CheckpointSource, names: set[str]) -> list[tuple[str, str]]:
    """`(prefix, entry)` of all states in a checkpoint; the entry of master weights is empty."""
    found: dict[tuple[str, str], None] = {}
    for key in (*source.catalog.tensors, *source.catalog.objects):
        if key.startswith(_STATE):
            name, _, entry = key[len(_STATE) :].rpartition(".")
            if name in names:
                found[_STATE, entry] = None
        elif key.startswith(_MASTER) and key[len(_MASTER) :] in names:
            found[_MASTER, ""] = None
    return list(found)


def _state_of(source: CheckpointSource, parameter: RankedTensor, key: str) -> RankedTensor | None:
    """A state with the layout of its parameter; None for a state of another shape."""
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
