"""Files of a folder that NeuronX Distributed wrote: their names by rank, and the tensors in them.

    model/dp_rank_00_tp_rank_01_pp_rank_00.pt       of `nxd.save_checkpoint`: the state dict of a tp and pp rank
    model/dp_rank_00_ep_rank_01_tp_rank_01_pp...    with experts: ep rank 0 has all weights, the others their experts
    optim/dp_rank_03_tp_rank_01_pp_rank_00.pt       the optimizer's; with ZeRO-1 by dp rank too
    tp_rank_01_pp_rank_00/checkpoint.pt             of `parallel_layers.checkpointing.save`

With `use_xser` a file has references, and `<file>.tensors/tensor_<n>.pt` the tensors; `<file>.info.pt` their shapes.
All files are read with `weights_only=True`: nothing in a file runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...torch_internals.tensors import pytree
from ...weights.sums_file import check_sums
from ...weights.torch_files import read_plain
from ..errors import CheckpointCorrupted, CheckpointMismatch
from ..storage import Storage

__all__ = [
    "NxdFiles",
    "StoredTensor",
    "TensorReference",
    "Writer",
    "fault_of_optimizer",
    "file_of",
    "is_nxd_folder",
    "is_of_checkpointing",
    "stored_state",
]

_OF_TRAINER = re.compile(r"dp_rank_(?P<dp>\d+)(_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
_OF_CHECKPOINTING = re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)(_dp_rank_(?P<dp>\d+))?")


def file_of(part: str, tp: int, pp: int, dp: int = 0, ep: int | None = None) -> str:
    """The path of a rank's file; `part` is "model" or "optim"."""
    expert = "" if ep is None else f"ep_rank_{ep:02d}_"
    return f"{part}/dp_rank_{dp:02d}_{expert}tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


class TensorReference:
    """Reference to a tensor in a file of torch_xla's serialization; `tid` is the number of the tensor."""

    tid: int

    def __setstate__(self, state: Any) -> None:
        self.tid = int(state["tid"])


# The file names torch_xla's class; this class, which holds a number, replaces it.
torch.serialization.add_safe_globals([(TensorReference, "torch_xla.utils.serialization.TensorReference")])


class Writer(NamedTuple):
    """The coordinates of the rank that wrote a file."""

    tp: int
    pp: int
    dp: int


class StoredTensor:
    """A tensor in a file, read on access.

    Attributes:
        shape, dtype: of the tensor.

    Args:
        file: its file, for error messages.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor], file: str = "a file"
    ) -> None:
        self._file = file
        self.shape = shape
        self.dtype = dtype
        self._read = read

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StoredTensor:
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @classmethod
    def stacked(cls, parts: Sequence[StoredTensor]) -> StoredTensor:
        """Tensors joined along dim 0."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return cls(shape, parts[0].dtype, lambda: torch.cat([part.tensor() for part in parts]))

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Rows `start` to `stop` of the tensor (dim 0)."""
        return StoredTensor((stop - start, *self.shape[1:]), self.dtype, lambda: self.tensor()[start:stop])

    def tensor(self) -> torch.Tensor:
        """Reads the tensor; pages of a local file are read on first use.

        Raises:
            CheckpointCorrupted: the file holds another shape, dtype or type.
        """
        value = self._read()
        if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (self.shape, self.dtype):
            has = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointCorrupted(f"{self._file} holds {has}, in place of a tensor {self.shape} of {self.dtype}")
        return value


def is_nxd_folder(storage: Storage, folder: str) -> bool:
    """Returns whether a folder holds files of NeuronX Distributed."""
    of_trainer = any(_OF_TRAINER.fullmatch(name) for name in storage.list(f"{folder}/model"))
    return of_trainer or is_of_checkpointing(storage, folder)


def is_of_checkpointing(storage: Storage, folder: str) -> bool:
    """Returns whether `parallel_layers.checkpointing.save`, which writes no markers, wrote a folder."""
    return next(_of_checkpointing(storage, folder), None) is not None


class NxdFiles:
    """The files of a folder.

    Attributes:
        model: state dicts of dp rank 0, which all dp ranks share, by writer; tensors are `StoredTensor`s, with the
            experts of all ep ranks joined.
        optimizer: state dicts of the optimizer by writer, of torch or ZeRO-1; empty if it was not saved.
        tp, pp, dp, ep: degrees of the layout that wrote the files; `dp` is ZeRO-1's.

    Args:
        folder: of `nxd.save_checkpoint` or `parallel_layers.checkpointing.save`, or one of model files alone.
        is_expert: returns whether a parameter of this name has the experts of an ep rank in dim 0.
        model_key: of the weights in the argument of `parallel_layers.checkpointing.save`; Lightning's is known.

    Raises:
        CheckpointCorrupted: a file is missing, cut off, or holds something that could run.
        CheckpointMismatch: the folder holds no weights.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        is_expert: Callable[[str], bool] = lambda name: "expert" in name,
        model_key: str = "model",
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._apart: list[StoredTensor] = []  # in separate files
        self.name = storage.describe(folder)
        models = _of_trainer(storage, f"{folder}/model") or _of_trainer(storage, folder)
        optimizers = _of_trainer(storage, f"{folder}/optim")
        self.ep = max([1, *(1 + max(paths) for paths in models.values())])
        if models or optimizers:
            self.model = {writer: self._with_experts(paths, is_expert) for writer, paths in models.items()}
            self.optimizer = {writer: self._load(paths[0]) for writer, paths in optimizers.items() if 0 in paths}
        else:
            saved = {writer: self._load(path) for writer, path in _of_checkpointing(storage, folder)}
            of_lightning = any("pytorch-lightning_version" in state for state in saved.values())
            model_key = "state_dict" if of_lightning and model_key == "model" else model_key
            self.model = {writer: _part(state, model_key) for writer, state in saved.items() if writer.dp == 0}
            self.optimizer = {writer: state["optimizer"] for writer, state in saved.items() if "optimizer" in state}
        for writer, state in self.optimizer.items():
            wrong = fault_of_optimizer(state)
            if wrong:
                raise CheckpointCorrupted(
                    f"{self.name}: {wrong} in the optimizer of tp rank {writer.tp}, pp rank {writer.pp}, dp rank "
                    f"{writer.dp} is not what NeuronX Distributed writes"
                )
        if len({"base_state" in state for state in self.optimizer.values()}) > 1:
            raise CheckpointCorrupted(f"{self.name}: base_state is in the optimizer's files of some ranks alone")
        if not self.model:
            raise CheckpointMismatch(f"{self.name} holds no weights saved by NeuronX Distributed")
        writers = (*self.model, *self.optimizer)
        self.tp, self.pp = (1 + max(writer[axis] for writer in writers) for axis in (0, 1))
        self.dp = 1 + max((writer.dp for writer in self.optimizer), default=0)
        self._check_complete("model", self.model, 1)
        if self.optimizer:
            self._check_complete("optim", self.optimizer, self.dp)

    def check(self, share: int, shares: int) -> None:
        """Compares files with `SHA256SUMS`, if a local folder has it, and opens files of single tensors (`use_xser`).

        Args:
            share, shares: the part of the files to open, and the number of parts.

        Raises:
            CheckpointCorrupted: a file is missing, cut off, differs, or does not hold its tensor.
        """
        local = self._storage.local_path(self._folder)
        if local is not None:
            try:
                check_sums(local, share, shares)
            except ValueError as error:
                raise CheckpointCorrupted(str(error)) from error
        for tensor in self._apart[share::shares]:
            tensor.tensor()

    def _check_complete(self, part: str, states: Mapping[Writer, Any], dp: int) -> None:
        expected = self.tp * self.pp * dp
        if len(states) < expected:  # a rank in the name of a file may be any number: ranks are not listed
            every = (Writer(tp, pp, rank) for tp in range(self.tp) for pp in range(self.pp) for rank in range(dp))
            one = next(writer for writer in every if writer not in states)
            raise CheckpointCorrupted(
                f"{self.name} lacks {expected - len(states)} of {expected} files of {part}, of a layout tp={self.tp}, "
                f"pp={self.pp}, dp={dp}: the first is that of tp rank {one.tp}, pp rank {one.pp}, dp rank {one.dp}"
            )

    def _with_experts(self, paths: Mapping[int, str], is_expert: Callable[[str], bool]) -> Any:
        """A state dict with the experts of all ep ranks."""
        if len(paths) < self.ep:
            missing = next(rank for rank in range(self.ep) if rank not in paths)
            raise CheckpointCorrupted(
                f"{self.name} lacks the file of ep rank {missing}, of {self.ep}, beside {next(iter(paths.values()))}"
            )
        state, *others = (self._load(path) for _, path in sorted(paths.items()))
        for name in [key for key in state if others and is_expert(key)]:
            if not all(isinstance(other.get(name), StoredTensor) for other in others):
                raise CheckpointCorrupted(
                    f"{self.name}: {name}, of experts, is not in the files of all {self.ep} ep ranks"
                )
            state[name] = StoredTensor.stacked([state[name], *(other[name] for other in others)])
        return state

    def _load(self, path: str) -> MutableMapping[Any, Any]:
        state = stored_state(self._storage, path, self._apart)
        if not isinstance(state, MutableMapping):
            raise CheckpointCorrupted(
                f"{self._storage.describe(path)} has a {type(state).__name__} in place of a state dict"
            )
        return state


def fault_of_optimizer(state: Any) -> str:
    """Returns the part of an optimizer's state that has other types than torch's or ZeRO-1's, by name; "" if none."""

    def is_entry(value: Any) -> bool:
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)

    def is_shape(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(isinstance(size, int) for size in value)

    tables: dict[str, Callable[[Any], bool]] = {
        "state": is_entry,
        "base_state": is_entry,
        "shape_info": is_shape,
        "sharded_master_weights": lambda value: isinstance(value, StoredTensor),
    }
    if not isinstance(state, Mapping) or not ("state" in state or "base_state" in state):
        return "the state"
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(
        is_entry(group) and isinstance(group.get("params"), list) for group in groups
    ):
        return "param_groups"
    for name, is_right in tables.items():
        entries = state.get(name, {})
        if not isinstance(entries, Mapping) or not all(
            isinstance(number, int) and is_right(value) for number, value in entries.items()
        ):
            return name
    return ""


def stored_state(storage: Storage, path: str, apart: list[StoredTensor]) -> Any:
    """Reads the state dict of a file, with a `StoredTensor` for each tensor; tensors in separate files go to `apart`.

    Raises:
        CheckpointCorrupted: a file is missing, cut off, or holds something that could run.
    """
    state = _loaded(storage, path)
    match = _OF_TRAINER.fullmatch(path.rpartition("/")[2])
    is_of_other_experts = match is not None and int(match["ep"] or 0) > 0
    info: Mapping[int, Any] = {}
    if storage.exists(f"{path}.info.pt"):
        info = _loaded(storage, f"{path}.info.pt")
        if not isinstance(info, Mapping) or not all(
            isinstance(entry, Mapping)
            and isinstance(entry.get("shape"), (list, tuple))
            and isinstance(entry.get("dtype"), torch.dtype)
            for entry in info.values()
        ):
            raise CheckpointCorrupted(f"{storage.describe(path)}.info.pt has no shape and dtype for each tensor")

    def stored(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return StoredTensor.of(leaf.detach())
        if not isinstance(leaf, TensorReference):
            return leaf
        file = f"{path}.tensors/tensor_{leaf.tid}.pt"
        read = partial(_loaded, storage, file)
        if leaf.tid not in info:
            value = read()
            if not isinstance(value, torch.Tensor):
                raise CheckpointCorrupted(f"{storage.describe(file)} holds a {type(value).__name__}, and no tensor")
            return StoredTensor.of(value)
        if is_of_other_experts and not info[leaf.tid].get("expert_model_parallel"):
            return None  # ep rank 0 has written it
        shape, dtype = tuple(info[leaf.tid]["shape"]), info[leaf.tid]["dtype"]
        apart.append(StoredTensor(shape, dtype, read, storage.describe(file)))
        return apart[-1]

    return pytree.tree_map(stored, state, is_leaf=lambda leaf: isinstance(leaf, (TensorReference, torch.Size)))


def _of_trainer(storage: Storage, folder: str) -> dict[Writer, dict[int, str]]:
    """The paths of a folder's files, by writer and ep rank."""
    paths: dict[Writer, dict[int, str]] = {}
    for name in storage.list(folder):
        match = _OF_TRAINER.fullmatch(name)
        if match is not None:
            writer = Writer(int(match["tp"]), int(match["pp"]), int(match["dp"]))
            paths.setdefault(writer, {})[int(match["ep"] or 0)] = f"{folder}/{name}"
    return paths


def _of_checkpointing(storage: Storage, folder: str) -> Iterator[tuple[Writer, str]]:
    names = storage.list(folder)
    for name in names:
        match = _OF_CHECKPOINTING.fullmatch(name)
        if match is not None:
            path = f"{folder}/{name}" if f"{name}.tensors" in names else f"{folder}/{name}/checkpoint.pt"
            yield Writer(int(match["tp"]), int(match["pp"]), int(match["dp"] or 0)), path


def _part(state: Any, key: str) -> Any:
    """The weights in what a script saved: under `key`, or the whole state."""
    return state[key] if isinstance(state.get(key), Mapping) else state


def _loaded(storage: Storage, path: str) -> Any:
    """Reads the tensors and plain data of a file; a local file is mapped into memory."""
    local = storage.local_path(path)
    try:
        return read_plain(storage.read(path) if local is None else local, storage.describe(path), mmap=True)
    except FileNotFoundError:
        raise CheckpointCorrupted(f"{storage.describe(path)} is missing") from None
    except ValueError as error:
        raise CheckpointCorrupted(str(error)) from error
