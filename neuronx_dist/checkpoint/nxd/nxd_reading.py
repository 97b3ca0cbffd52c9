"""Reads folders of NeuronX Distributed as pieces of whole tensors, into any layout.

A file says which rank wrote it, but not how a tensor was divided. The division follows from the `ShardSpec` of the
model that loads (sharded dim, fused blocks, whole shape), and the number of shards from the file names.

The optimizer's state goes by number. Parameter number n of a rank is the n-th of its model file, in the order of the
groups of the optimizer that loads; shapes that were saved with the state are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ... import comm
from ...gradients.gradient import ParameterGradient
from ...weights.partial_model import parameter_names, partial_model
from ...weights.shard_spec import ShardSpec, spec_of
from ..agreement import together
from ..dcp.catalog import Catalog, Extent, SavedTensor, StoredChunk
from ..dcp.checkpoint_source import RectangleRead
from ..dcp.checksums import Ranges
from ..dcp.reading import load_from
from ..errors import CheckpointCorrupted, CheckpointMismatch
from ..optimizer_state import GROUPS, merged_groups, named_groups
from ..parameters import parameters_of
from ..pieces import TensorPiece, pieces_of, rows_of, whole_piece, within
from ..rank_tensors import key_of
from ..storage import Storage
from .parameter_layout import HeadOrder, ShardDivision, division_of, names_of_keys, separate_names, separated
from .rank_files import NxdFiles, StoredTensor, Writer

__all__ = ["NxdSource", "WholeParameter", "kv_heads_of", "load_nxd", "specs_of"]


def load_nxd(
    storage: Storage,
    folder: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    overwritten: frozenset[str] = frozenset(),
    device: str | torch.device = "cpu",
) -> None:
    """Loads a folder that NeuronX Distributed wrote into this layout; all ranks call it.

    Raises:
        CheckpointMismatch: the folder is of another model, or the division of a tensor is unknown; nothing was changed.
        CheckpointCorrupted: a file is missing, or cannot be read.
    """
    where = storage.describe(folder)
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        with together(f"{where} was not loaded"):
            local_groups = named_groups(optimizer, parameters_of(model))
        everywhere = comm.gather_objects(local_groups)
        with together(f"{where} was not loaded"):
            groups = merged_groups(everywhere)

    def opened() -> NxdSource:
        parameters = specs_of(model)
        files = NxdFiles(storage, folder, lambda name: name in parameters and parameters[name].is_expert)
        files.check(comm.rank("world"), comm.size("world"))
        source = NxdSource(files, parameters, kv_heads_of(model))
        if optimizer is not None:
            source.add_optimizer(groups)
        return source

    load_from(opened, where, model, optimizer, strict=strict, overwritten=overwritten, device=device)


class WholeParameter(NamedTuple):
    """A parameter of the model that loads.

    Attributes:
        names: all names of the parameter.
        spec: layout in the model that loads, of all experts.
        trained: whether it requires a gradient.
        is_expert: whether dim 0 is the dim of experts, which may be divided over ep.
    """

    names: list[str]
    spec: ShardSpec
    trained: bool
    is_expert: bool


def specs_of(model: Any) -> dict[str, WholeParameter]:
    """The parameters of the whole model, by each of their names."""
    aliases = parameter_names(model)
    parameters = {id(param): param for param in partial_model(model).original_module.parameters()}
    described = {}
    for identity, names in aliases.items():
        parameter = parameters[identity]
        spec, is_expert = spec_of(parameter), ParameterGradient(parameter).is_expert
        if is_expert and spec.axis != "ep" and spec.dim != 0:
            spec = replace(spec, full_shape=(comm.size("ep") * spec.full_shape[0], *spec.full_shape[1:]))
        described[identity] = WholeParameter(names, spec, parameter.requires_grad, is_expert)
    return {name: parameter for parameter in described.values() for name in parameter.names}


def kv_heads_of(model: Any) -> int | None:
    """The key/value heads of a Hugging Face model."""
    config: Any = getattr(partial_model(model).original_module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_key_value_heads", None)
    return heads if isinstance(heads, int) else None


class _Stored(NamedTuple):
    """A rectangle of a stored tensor."""

    tensor: StoredTensor
    local: tuple[slice, ...]

    def copy(self, slices: Sequence[slice], target: torch.Tensor) -> None:
        target.copy_(self.tensor.tensor()[self.local][tuple(slices)])


class NxdSource:
    """A folder that NeuronX Distributed wrote.

    Args:
        parameters: of the model that loads, by each of their names.
        kv_heads: number of key/value heads of the model, if known.

    Attributes:
        catalog: content of the folder, by the names of the model that loads.
    """

    def __init__(self, files: NxdFiles, parameters: Mapping[str, WholeParameter], kv_heads: int | None = None) -> None:
        self._kv_heads = kv_heads
        self.catalog = Catalog(checksums=False)
        self._files = files
        self._parameters = parameters
        for writer, state in files.model.items():
            for name, value in state.items():
                if not isinstance(value, StoredTensor) and (name in parameters or separate_names(name)):
                    raise CheckpointCorrupted(
                        f"{files.name}: {name} of tp rank {writer.tp}, pp rank {writer.pp} is a "
                        f"{type(value).__name__}, not a tensor"
                    )
        specs = {name: parameter.spec for name, parameter in parameters.items()}
        parts = {writer: separated(state, specs, files.tp) for writer, state in files.model.items()}
        self._model = {writer: state for writer, (state, _) in parts.items()}
        self._origins = {writer.pp: origins for writer, (_, origins) in parts.items()}  # equal on all tp ranks
        self._divisions: dict[str, ShardDivision] = {}
        self._stored: list[_Stored] = []
        self._objects: list[Any] = []
        for stage in range(files.pp):
            for name in self._model[Writer(0, stage, 0)]:
                if key_of(("model", name)) not in self.catalog.tensors:
                    self._add_weight(stage, name)

    def needs(self, objects: Iterable[Extent], reads: Iterable[RectangleRead]) -> dict[str, Ranges]:
        """Returns no needs: these files have no checksums."""
        return {}

    def share(self, needs: Sequence[Mapping[str, Ranges]], objects: Iterable[Extent]) -> None:
        """Does nothing: these files have no checksums."""

    def object(self, extent: Extent) -> Any:
        return self._objects[extent.start]

    def open(self, chunk: StoredChunk, dtype: torch.dtype) -> _Stored:
        return self._stored[chunk.extent.start]

    def finish(self) -> None:
        """Does nothing: these files have no checksums."""

    def add_optimizer(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Adds the optimizer's state.

        Args:
            groups: of the whole model; under `params` the names of their parameters.

        Raises:
            CheckpointMismatch: the state was not saved, or its parameters cannot be determined.
        """
        files = self._files
        if not files.optimizer:
            raise CheckpointMismatch(f"{files.name} was saved without an optimizer: load the model alone")
        if files.ep > 1:
            raise CheckpointMismatch(
                f"the optimizer in {files.name} is of experts on {files.ep} ranks of ep, whose state cannot be "
                "read: load the model alone"
            )
        saved: list[dict[str, Any]] = []
        added: set[str] = set()  # a tied weight has its state on two stages
        for stage in range(files.pp):
            state = files.optimizer[Writer(0, stage, 0)]
            if len(state["param_groups"]) != len(groups):
                raise CheckpointMismatch(
                    f"the optimizer in {files.name} has {len(state['param_groups'])} parameter groups, but this one "
                    f"has {len(groups)}: create it with the same groups, or load the model alone"
                )
            is_zero1 = "base_state" in state
            by_group = [self._names_of_stage(stage, group["params"], is_zero1) for group in groups]
            numbered = [parameter for group in by_group for parameter in group.items()]
            self._check_order(stage, state, [origin for origin, _ in numbered])
            for index, (group, members) in enumerate(zip(state["param_groups"], by_group)):
                if index == len(saved):
                    saved.append({key: value for key, value in group.items() if key != "param_names"} | {"params": []})
                names = [name for names in members.values() for name in names if name not in added]
                saved[index]["params"] += names
            for number, (_, names) in enumerate(numbered):
                for name in names:
                    if name not in added:
                        self._add_state(stage, number, name, is_zero1)
                    added.update(self._parameters[name].names)
        self._add_object(key_of(GROUPS), saved)

    def _add_weight(self, stage: int, name: str) -> None:
        shards = []
        for tp in range(self._files.tp):
            state = self._model[Writer(tp, stage, 0)]
            if name not in state:
                raise CheckpointMismatch(f"{self._files.name}: {name} is missing in the file of tp rank {tp}")
            shards.append(state[name])
        if not isinstance(shards[0], StoredTensor):
            return
        key, parameter = key_of(("model", name)), self._parameters.get(name)
        if parameter is None:  # a buffer, or a name that the model does not have
            piece = whole_piece(shards[0].shape)
            self._add(key, shards[0].shape, [(piece, shards[0])])
            return
        division = division_of(f"{self._files.name}: {name}", parameter.spec, shards)
        division = self._divisions[name] = self._with_query_order(stage, name, division)
        for alias in parameter.names:
            tied = self.catalog.tensors.get(key_of(("model", alias)))
            if tied is not None and self._same(alias, division, shards):
                self.catalog.tensors[key] = tied
                return
        parts = [
            (piece, shards[tp]) for tp, index in division.shards.items() for piece in pieces_of(division.spec, index)
        ]
        self._add(key, division.spec.unpadded_shape, parts)

    def _with_query_order(self, stage: int, name: str, division: ShardDivision) -> ShardDivision:
        """Reorders query heads: with key/value heads repeated as 0 1 0 1, they follow the heads that they use."""
        states = [self._model[Writer(tp, stage, 0)] for tp in range(self._files.tp)]
        key = next((key for key in names_of_keys(name) if key in states[0] and key in self._parameters), None)
        if key is None:
            return division
        spec, shards = division_of(
            f"{self._files.name}: {key}", self._parameters[key].spec, [state[key] for state in states]
        )
        heads = len(shards)
        is_interleaved = 1 < heads < len(states) and list(shards) == list(range(heads))
        if not is_interleaved or len(division.shards) < len(states):
            return division
        if self._kv_heads not in (None, heads):
            raise CheckpointMismatch(
                f"{self._files.name}: {self._kv_heads} key/value heads are repeated on {len(states)} tp ranks, "
                "several on each, in the order of trn1, for which the order of query heads is unknown: save it with "
                "kv_size_multiplier = tp / key/value heads"
            )
        blocks = HeadOrder(heads, len(states) // heads).blocks
        return ShardDivision(division.spec, {tp: blocks[tp] for tp in division.shards})

    def _same(self, alias: str, division: ShardDivision, shards: Sequence[StoredTensor]) -> bool:
        """Returns whether a tied weight was saved with equal values under another name."""
        other = next(
            states
            for stage in range(self._files.pp)
            if alias in (states := [self._model[Writer(tp, stage, 0)] for tp in range(self._files.tp)])[0]
        )
        return self._divisions[alias] == division and all(
            torch.equal(other[tp][alias].tensor(), shards[tp].tensor()) for tp in division.shards
        )

    def _names_of_stage(self, stage: int, members: Iterable[str], is_zero1: bool) -> dict[str, list[str]]:
        """Parameters of a group on a stage, in its order, a tied weight once: saved name -> names of its parts here."""
        of_group = set(members)
        names: dict[str, list[str]] = {}
        known: set[str] = set()
        for name in self._model[Writer(0, stage, 0)]:
            parameter = self._parameters.get(name)
            if parameter is None or name in known or not of_group.intersection(parameter.names):
                continue
            known.update(parameter.names)
            if parameter.trained or not is_zero1:
                names.setdefault(self._origins[stage][name].name, []).append(name)
        return names

    def _check_order(self, stage: int, state: Mapping[str, Any], names: Sequence[str]) -> None:
        """Compares a stage's parameters, as they are numbered here, with the shapes saved with its optimizer."""
        shapes = [self._files.model[Writer(0, stage, 0)][name].shape for name in names]
        if "shape_info" in state:
            saved = [tuple(shape) for _, shape in sorted(state["shape_info"].items())]
            differs = next((n for n, (there, here) in enumerate(zip(saved, shapes)) if there != here), None)
        else:
            saved = [() for group in state["param_groups"] for _ in group["params"]]
            differs = None
        if len(saved) != len(shapes) or differs is not None:
            what = (
                f"{len(saved)} parameters and {len(shapes)} are to be trained here"
                if differs is None
                else f"parameter {differs} of shape {saved[differs]}, and {names[differs]} has shape {shapes[differs]}"
            )
            raise CheckpointMismatch(
                f"the optimizer in {self._files.name} goes by number, and that of pp rank {stage} has {what}: make the "
                f"optimizer of the same parameters, in the model's order and the same groups, or load the model alone"
            )

    def _add_state(self, stage: int, number: int, name: str, is_zero1: bool) -> None:
        """Adds the state and the master weights of a parameter."""
        division, degree = self._divisions[name], self._files.dp if is_zero1 else 1
        origin = self._origins[stage][name]
        local = self._files.model[Writer(0, stage, 0)][origin.name].shape
        rows = -(-(local or (1,))[0] // degree)
        entries: dict[str, list[tuple[TensorPiece, StoredTensor]]] = {}
        for tp, index in division.shards.items():
            for dp in range(degree if local else 1):  # a parameter without dims is a row of the first rank
                state = self._files.optimizer[Writer(tp, stage, dp)]
                entries_of_parameter = dict(state["base_state" if is_zero1 else "state"].get(number, {}))
                if number in state.get("sharded_master_weights", {}):
                    entries_of_parameter[""] = state["sharded_master_weights"][number]
                pieces = pieces_of(division.spec, index)
                if origin.start:
                    pieces = within(pieces, origin.start)
                if is_zero1 and local:
                    pieces = rows_of(pieces, dp * rows, (dp + 1) * rows)
                shape = (rows, *local[1:]) if is_zero1 else local
                for entry, value in entries_of_parameter.items():
                    self._add_entry(entries, name, entry, value, shape, pieces, tp == dp == 0)
        whole = division.spec.unpadded_shape
        for entry, parts in entries.items():
            is_whole = entry == "step" or not parts[0][1].shape
            key = key_of(("optimizer", "state", name, entry) if entry else ("optimizer", "master", name))
            self._add(key, parts[0][1].shape if is_whole else whole, parts)

    def _add_entry(
        self,
        entries: dict[str, list[tuple[TensorPiece, StoredTensor]]],
        name: str,
        entry: str,
        value: Any,
        shape: tuple[int, ...],
        pieces: Sequence[TensorPiece],
        is_first: bool,
    ) -> None:
        if not isinstance(value, StoredTensor):
            if is_first:
                self._add_object(key_of(("optimizer", "state", name, entry)), value)
        elif not value.shape or entry == "step":
            if is_first:
                entries[entry] = [(whole_piece(value.shape), value)]
        elif value.shape == shape:
            if pieces and not pieces[0].shape:
                value = StoredTensor.of(value.tensor().view(()))
            entries.setdefault(entry, []).extend((piece, value) for piece in pieces)
        else:
            raise CheckpointMismatch(
                f"{self._files.name}: the optimizer has {entry or 'a master weight'} of shape {value.shape} for "
                f"{name}, but {shape} was expected with {self._files.dp} dp ranks: load the model alone"
            )

    def _add(self, key: str, shape: tuple[int, ...], parts: Sequence[tuple[TensorPiece, StoredTensor]]) -> None:
        saved = self.catalog.tensors[key] = SavedTensor(shape, parts[0][1].dtype)
        for piece, tensor in parts:
            extent = Extent(self._files.name, len(self._stored), 0)
            self._stored.append(_Stored(tensor, piece.local))
            saved.chunks.append(StoredChunk(piece.offset, piece.shape, extent))
        if sum(math.prod(chunk.shape) for chunk in saved.chunks) != math.prod(shape):
            raise CheckpointCorrupted(f"{self._files.name}: {key} is in the files of some ranks alone")

    def _add_object(self, key: str, value: Any) -> None:
        self.catalog.objects[key] = Extent(self._files.name, len(self._objects), 0)
        self._objects.append(value)
