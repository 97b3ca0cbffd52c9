"""Conversion of weights between formats in one process, with one tensor in memory at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...hf.conversion import named_as_in
from ...hf.gguf_file import gguf_file, open_gguf, write_configs
from ...hf.sources import WeightSource, has_weights, open_source
from ...hf.writing import copy_configs, write_weights
from ...model_shape import stage_layers
from ...weights.partial_model import parameter_names
from ...weights.shard_spec import ShardSpec, spec_of
from ...weights.sums_file import write_sums
from ..dcp.checkpoint_source import CheckpointSource
from ..dcp.flattened_groups import JoinedGroups, flattened_groups
from ..dcp.plain_data import packed
from ..dcp.reading import CheckpointFiles
from ..dcp.writing import WholeTensor, write_whole
from ..errors import CheckpointError, CheckpointMismatch
from ..nxd.nxd_reading import NxdSource, WholeParameter, kv_heads_of, specs_of
from ..nxd.nxd_writing import RankedTensor, write_files
from ..nxd.parameter_layout import FUSED, FusedNames, HeadOrder
from ..nxd.rank_files import NxdFiles, file_of, is_nxd_folder, is_of_checkpointing
from ..optimizer_state import GROUPS
from ..pieces import TensorPiece, whole_piece
from ..rank_tensors import Path as CheckpointPath
from ..rank_tensors import key_of
from ..storage import Storage, open_storage
from ..tags import CheckpointFolder, Entry, check_tag
from .convert_optimizer import add_optimizer, items_of_optimizer, nxd_optimizer, read_piece
from .model_config import model_of

__all__ = ["FORMATS", "SavedWeights", "convert"]

FORMATS = ("hf", "nxd", "ours")
_PREFIX = "model."  # of the keys of weights in a checkpoint
Progress = Callable[[int, int], None]


class SavedWeights:
    """Weights of a checkpoint of `save_checkpoint` or NeuronX Distributed, as a `WeightSource` of `neuronx_dist.hf`.

    A tied weight has the first of its names.
    """

    def __init__(self, source: CheckpointSource, description: str) -> None:
        self.description = description
        self._source = source
        tensors = source.catalog.tensors
        firsts: dict[object, str] = {}
        for key in tensors:
            if key.startswith(_PREFIX):
                firsts.setdefault(tuple(tensors[key].chunks) or key, key)
        self._keys = {key[len(_PREFIX) :]: key for key in firsts.values()}

    def names(self) -> Iterable[str]:
        return self._keys.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.catalog.tensors[self._keys[name]].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._source.catalog.tensors[self._keys[name]].dtype

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        piece = whole_piece(self.shape(name))
        if dim is not None:
            offset = tuple(start * (at == dim) for at in range(len(piece.shape)))
            piece = TensorPiece(piece.local, offset, (*piece.shape[:dim], stop - start, *piece.shape[dim + 1 :]))
        return read_piece(self._source, self._keys[name], piece)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    tag: str | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    config: str | os.PathLike[str] | None = None,
    optimizer: bool = False,
    groups: Sequence[str] = (),
    fused: str | None = None,
    kv_size_multiplier: int = 1,
    hw_backend: str = "trn1",
    xser: bool = False,
    progress: Progress = lambda done, total: None,
) -> str:
    """Writes the weights of one folder as another format, and the optimizer's state if asked.

    Args:
        source: a folder of Hugging Face's, or a weight file (GGUF too); of `save_checkpoint`; or of NeuronX
            Distributed's.
        target: a folder, or a URL of fsspec if it is to be "ours".
        to: "hf" (safetensors), "nxd" (a file for each tp and pp rank), "ours" (any layout loads it); None: "ours" of a
            folder of Hugging Face's, else "hf", which of a GGUF file has its config and tokenizer.
        tag: of the checkpoint in `source`, None: the newest; and of the checkpoint in `target`, None: the tag of the
            source, or "converted".
        tp, pp, dp: degrees of the layout of "nxd"; dp is the degree of ZeRO-1's state.
        config: a folder with the `config.json` of the model; None: `source`, if it has one. NeuronX Distributed's files
            do not say how they were divided: the config is needed to read files of several tp ranks, and to write.
        optimizer: convert the optimizer's state too, master weights included, between "ours" and ZeRO-1's of "nxd".
        groups: for "nxd" with several parameter groups: a regular expression for each group after the first, which the
            names of its parameters match.
        fused: of "nxd": `gate_up_proj`, and "weight_q": `qkv_proj.weight_q` and so on, or "weight_qkv": one
            `qkv_proj.weight_qkv`; None: the model's own names.
        kv_size_multiplier, hw_backend: with `fused`: number of repetitions of key/value heads, and their order, "trn1"
            (0 1 0 1) or "trn2" (0 0 1 1).
        xser: of "nxd": as `use_xser` writes.
        progress: called after each tensor with the number of written tensors and the total.

    Returns:
        The format that was written.

    Raises:
        ValueError: arguments that do not go together.
        CheckpointError: the source has no weights, or cannot be read; the target is not empty.
    """
    here = os.fspath(source)
    folder = Path(here)
    source_of_state: CheckpointSource | None = None
    gguf = None if has_weights(folder) else gguf_file(folder)
    of_hf = has_weights(folder) or folder.is_file() or gguf is not None
    to = to or ("ours" if of_hf and gguf is None else "hf")
    if to not in FORMATS:
        raise ValueError(f"to is one of {', '.join(FORMATS)}, not {to!r}")
    if to != "nxd" and (tp, pp) != (1, 1):
        raise ValueError(f"tp and pp apply to nxd only; {to!r} can be loaded into any layout")
    if to != "nxd" and (dp, fused, kv_size_multiplier, xser) != (1, None, 1, False):
        raise ValueError(f"dp, fused, kv_size_multiplier and xser apply to nxd, not to {to!r}")
    if optimizer and (of_hf or to == "hf"):
        raise ValueError("Hugging Face folders have no optimizer state: it can be converted between ours and nxd only")
    if fused not in (None, *FUSED) or hw_backend not in ("trn1", "trn2"):
        raise ValueError(f"fused is one of {', '.join(FUSED)}, and hw_backend trn1 or trn2: {fused!r}, {hw_backend!r}")
    if config is None and (folder / "config.json").is_file():
        config = folder
    config = config or gguf
    model = None if config is None else model_of(config, 1)
    parameters = {} if model is None else specs_of(model)
    if gguf is not None:
        weights = open_gguf(gguf, model)
    elif of_hf:
        weights = open_source(here)
        if model is not None:
            weights = named_as_in(model, weights, list(parameters))
    else:
        storage, name = _checkpoint(here, tag)
        source_of_state = _opened(storage, name, model, parameters)
        weights = SavedWeights(source_of_state, storage.describe("" if name == "." else name))
        tag = tag or ("converted" if name == "." else name)
    tag = check_tag(tag or "converted")
    state = source_of_state if optimizer else None
    count = len(list(weights.names()))
    if not count:
        raise CheckpointError(f"{weights.description} has no weights")
    if config is not None:
        _compare(weights, parameters, config)
    if optimizer and isinstance(source_of_state, NxdSource):
        if not parameters:
            raise ValueError(
                "the optimizer's state has no parameter names: pass the folder with the model's config.json"
            )
        add_optimizer(source_of_state, parameters, groups)
    if to == "hf":
        with _new_folder(_local(target, to)) as path:
            write_weights(weights, path, done=lambda done: progress(done, count))
            if config is not None:
                if Path(config).is_file():
                    write_configs(Path(config), path)
                else:
                    copy_configs(Path(config), path)
            write_sums(path, [*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")])
    elif to == "nxd":
        names = None
        if fused is not None and config is not None:
            heads = kv_heads_of(model)
            if heads is None:
                raise ValueError(f"fused: the config of {config} does not contain the number of key/value heads")
            names = FusedNames(HeadOrder(heads, kv_size_multiplier, hw_backend == "trn2"), tp, fused)
        ranked = _ranked(weights, config, tp, pp, names)
        fuse = list if names is None else names.fused
        tensors = [tensor.divided(tp) for tensor in fuse(ranked)]
        files: dict[str, dict[Any, Any]] = {file_of("model", rank, at): {} for at in range(pp) for rank in range(tp)}
        if state is not None:
            more, of_files = nxd_optimizer(state, ranked, fuse, tp, pp, dp)
            tensors, files = tensors + more, files | of_files
        with _new_folder(_local(target, to) / tag) as path:
            write_files(tensors, files, path, progress, xser=xser)
    else:
        _write_ours(weights, state, open_storage(target), tag, progress)
    return to


def _checkpoint(source: str, tag: str | None) -> tuple[Storage, str]:
    """Storage of a checkpoint, and its folder there. `source` may be the folder of a tag itself."""
    storage = open_storage(source)
    if tag is None and (storage.exists("done") or is_of_checkpointing(storage, ".")):
        return storage, "."
    folder = CheckpointFolder(storage)
    if tag is not None:
        name = check_tag(tag)
        return storage, name if is_of_checkpointing(storage, name) else folder.find(name).name
    complete = [candidate.name for candidate in folder.complete() if not candidate.damage]
    if not complete:
        raise CheckpointError(
            f"{source} has no weights of Hugging Face's, no complete checkpoint and no files of NeuronX Distributed's"
        )
    return storage, complete[0]


def _opened(
    storage: Storage,
    name: str,
    model: Any,
    parameters: Mapping[str, WholeParameter],
) -> CheckpointSource:
    """A checkpoint of ours or NxD's.

    Args:
        model: of the config, None without one; `parameters`: its parameters by name.
    """
    where = storage.describe("" if name == "." else name)
    if not is_nxd_folder(storage, name):
        return JoinedGroups(CheckpointFiles(storage, name))
    files = NxdFiles(storage, name)
    files.check(0, 1)
    if files.tp > 1 and model is None:
        raise CheckpointMismatch(
            f"{where} has {files.tp} tp ranks, and its files do not record how tensors are sharded: pass the folder "
            "with the model's config.json (--config FOLDER)"
        )
    return NxdSource(files, parameters, None if model is None else kv_heads_of(model))


def _compare(weights: WeightSource, parameters: Mapping[str, WholeParameter], config: str | os.PathLike[str]) -> None:
    """Raises a CheckpointMismatch if weights lack a parameter of the model, or have one in another shape."""
    present = dict.fromkeys(weights.names())
    missing, other_shapes = [], []
    for names, spec, *_ in dict.fromkeys((tuple(p.names), p.spec) for p in parameters.values()):
        name = next((alias for alias in names if alias in present), None)
        if name is None:
            missing.append(names[0])
        elif tuple(weights.shape(name)) != spec.unpadded_shape:
            other_shapes.append(f"{name} is {tuple(weights.shape(name))} in place of {spec.unpadded_shape}")
    if missing:
        unknown = [name for name in present if name not in parameters]
        there = f"; it has {', '.join(unknown[:4])}" if unknown else ""
        raise CheckpointMismatch(
            f"{weights.description} has other parameter names than the model of {config}: {', '.join(missing[:4])} "
            f"{('are' if len(missing) > 1 else 'is')} missing{there}"
        )
    if other_shapes:
        raise CheckpointMismatch(
            f"{weights.description} is of another model than {config}, or lacks the files of ranks: "
            f"{len(other_shapes)} parameters have other shapes; {'; '.join(other_shapes[:4])}"
        )


def _ranked(
    weights: WeightSource, config: str | os.PathLike[str] | None, tp: int, pp: int, fused: FusedNames | None
) -> list[RankedTensor]:
    """The weights with the ranks that get a part of them, before projections are fused."""
    if config is None:
        raise ValueError(
            "tp and pp need the model's layers, to shard its tensors: pass the folder with its config.json "
            "(--config FOLDER)"
        )
    model = model_of(config, tp)
    parameters = {id(param): param for param in model.parameters()}
    stage_of = _stages(model, pp)
    present = set(weights.names())
    tensors = []
    for identity, names in parameter_names(model).items():
        name = next((alias for alias in names if alias in present), None)
        if name is None:
            raise CheckpointMismatch(f"{weights.description} lacks {names[0]}, which the model of {config} has")
        spec = spec_of(parameters[identity])
        is_by_heads = fused is not None and fused.is_of_attention(name)
        if not is_by_heads and spec.is_sharded and (spec.num_partitions != tp or spec.group is not None):
            raise ValueError(
                f"tp={tp} does not divide the heads of {name}: choose a tp that divides the number of key/value heads"
            )
        stages: dict[int, list[str]] = {}
        for alias in names:
            stages.setdefault(stage_of[alias], []).append(alias)
        tensors.append(RankedTensor(stages, spec, weights.dtype(name), partial(weights.read, name), name))
    known = {name for names in parameter_names(model).values() for name in names}
    for name in sorted(present - known):
        spec = ShardSpec(full_shape=weights.shape(name))
        read = partial(weights.read, name)
        tensors.append(RankedTensor({stage_of.get(name, 0): [name]}, spec, weights.dtype(name), read, name))
    return tensors


def _stages(model: Any, pp: int) -> Mapping[str, int]:
    """The stage of each name: layers by NxD's rule, names before them on the first stage, after them on the last."""
    count = model.config.get_text_config().num_hidden_layers
    layers = next(
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    )
    if pp > count:
        raise ValueError(f"pp={pp} is more than the {count} layers of the model")
    of_layer = {layer: stage for stage, numbers in enumerate(stage_layers(count, pp)) for layer in numbers}
    stages, current = {}, 0
    for name in model.state_dict():
        if name.startswith(f"{layers}."):
            stages[name] = of_layer[int(name[len(layers) + 1 :].partition(".")[0])]
            current = pp - 1
        else:
            stages[name] = current
    return stages


def _write_ours(
    weights: WeightSource, state: CheckpointSource | None, storage: Storage, tag: str, progress: Progress
) -> None:
    folder = CheckpointFolder(storage)
    if folder.is_complete(tag):
        raise CheckpointError(f"{storage.describe(tag)} exists already: choose another --tag, or remove it")
    items, objects = ({}, {}) if state is None else items_of_optimizer(state)
    names = list(weights.names())
    numbers = {path: number for number, path in enumerate([*(("model", name) for name in names), *items], 1)}

    def read_weight(name: str, piece: TensorPiece) -> torch.Tensor:
        rows = weights.read(name, 0, piece.offset[0], piece.offset[0] + piece.shape[0]) if piece.shape else None
        if rows is None:
            value = weights.read(name)
        else:
            value = rows[(slice(None), *(slice(at, at + n) for at, n in zip(piece.offset[1:], piece.shape[1:])))]
        progress(numbers["model", name], len(numbers))
        return value

    def read_state(source: CheckpointSource, path: CheckpointPath, piece: TensorPiece) -> torch.Tensor:
        value = read_piece(source, items[path], piece)
        progress(numbers[path], len(numbers))
        return value

    tensors: dict[CheckpointPath, WholeTensor] = {
        ("model", name): WholeTensor(weights.shape(name), weights.dtype(name), partial(read_weight, name))
        for name in names
    }
    packed_objects: dict[CheckpointPath, bytes] = {}
    if state is not None:
        for path, key in items.items():
            saved = state.catalog.tensors[key]
            tensors[path] = WholeTensor(saved.shape, saved.dtype, partial(read_state, state, path))
        flat = flattened_groups(objects.pop(GROUPS, []))
        packed_objects = {path: packed(key_of(path), value) for path, value in {**objects, **flat}.items()}
    try:
        folder.begin(tag)
        files = write_whole(tensors, packed_objects, storage, tag)
        folder.commit(tag, {file: Entry(storage.size(f"{tag}/{file}")) for file in files})
    except BaseException:
        folder.abandon(tag)
        raise


def _local(target: str | os.PathLike[str], to: str) -> Path:
    if "://" in os.fspath(target):
        raise ValueError(f"{to!r} is written to a local folder, not to {os.fspath(target)}")
    return Path(target)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yields a folder that is new or empty; an error leaves nothing in it, and no folder that was created for it.

    Raises:
        CheckpointError: the folder is not empty, or is a file.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists already, and is not empty: nothing was written")
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield path
    except BaseException:
        for entry in path.iterdir() if path.is_dir() else ():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for folder in created:
            with suppress(OSError):  # it was not created, or another program writes there
                folder.rmdir()
        raise
