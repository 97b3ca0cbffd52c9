"""Weights from one format to another in one process, a tensor in memory at a time: what `neuronx-dist convert` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import comm
from ..hf.conversion import named_as_in
from ..hf.gguf_file import gguf_file, open_gguf
from ..hf.sources import WeightSource, has_weights, open_source
from ..hf.swap import swap
from ..hf.writing import copy_configs, write_weights
from ..mesh import Mesh
from ..model_shape import stage_layers
from ..weights.partial_model import parameter_names
from ..weights.shard_spec import ShardSpec, spec_of
from .errors import CheckpointError, CheckpointMismatch
from .files import WholeTensor, write_whole
from .nxd_files import NxdFiles, is_nxd_folder, is_of_checkpointing
from .nxd_source import NxdSource, kv_heads_of, specs_of
from .nxd_writing import RankedTensor, write_nxd
from .pieces import Piece
from .reading import CheckpointFiles
from .storage import Storage, open_storage
from .tags import CheckpointFolder, Entry, check_tag
from .whole_weights import SavedWeights

__all__ = ["FORMATS", "convert"]

FORMATS = ("hf", "nxd", "ours")
Progress = Callable[[int, int], None]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    tag: str | None = None,
    tp: int = 1,
    pp: int = 1,
    config: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, total: None,
) -> str:
    """Writes the weights of one folder as another format.

    Args:
        source: a folder of Hugging Face's, or a weight file (GGUF too); of `save_checkpoint`; or of NeuronX
            Distributed's.
        target: a folder, or a URL of fsspec if it is to be "ours".
        to: "hf" (safetensors), "nxd" (a file for each tp and pp rank), "ours" (any layout loads it); None: "ours" of a
            folder of Hugging Face's, else "hf".
        tag: of the checkpoint in `source` that is read, None: the newest; of the one in `target` that is written, None:
            that of the source, or "converted".
        tp, pp: degrees of the layout of "nxd".
        config: a folder with the `config.json` of the model; None: that of `source`, if it has one. NeuronX
            Distributed's files do not say how they were divided: it is needed if that was over tp, and to write them.
        progress: called after each tensor with how many are written, of how many.

    Returns:
        The format that was written.

    Raises:
        ValueError: arguments that do not go together.
        CheckpointError: the source has no weights, or cannot be read; there is something at the target already.
    """
    here = os.fspath(source)
    folder = Path(here)
    gguf = None if has_weights(folder) else gguf_file(folder)
    of_hf = has_weights(folder) or folder.is_file() or gguf is not None
    to = to or ("ours" if of_hf else "hf")
    if to not in FORMATS:
        raise ValueError(f"to is one of {', '.join(FORMATS)}, not {to!r}")
    if to != "nxd" and (tp, pp) != (1, 1):
        raise ValueError(f"tp and pp are of the layout of nxd; {to!r} is loaded into any")
    if config is None and (folder / "config.json").is_file():
        config = folder
    if gguf is not None:
        config = config or gguf
        weights = open_gguf(gguf, _model(config, 1))
    elif of_hf:
        weights = open_source(here)
        if config is not None:
            whole = _model(config, 1)
            weights = named_as_in(whole, weights, list(specs_of(whole)))
    else:
        storage, name = _checkpoint(here, tag)
        weights = _saved(storage, name, config)
        tag = tag or ("converted" if name == "." else name)
    tag = check_tag(tag or "converted")
    count = len(list(weights.names()))
    if not count:
        raise CheckpointError(f"{weights.description} has no weights")
    done = partial(_told, progress, count)
    if to == "hf":
        path = _empty(_local(target, to))
        write_weights(weights, path, done=done)
        if config is not None:
            if Path(config).is_file():
                _config(config).save_pretrained(path)
            else:
                copy_configs(Path(config), path)
    elif to == "nxd":
        tensors = _ranked(weights, config, tp, pp)
        write_nxd(tensors, _empty(_local(target, to) / tag), tp, pp, partial(_told, progress, len(tensors)))
    else:
        _write_ours(weights, open_storage(target), tag, done)
    return to


def _told(progress: Progress, total: int, done: int) -> None:
    progress(done, total)


def _checkpoint(source: str, tag: str | None) -> tuple[Storage, str]:
    """Where a checkpoint is: its storage, and its folder there. `source` may be the folder of a tag itself."""
    storage = open_storage(source)
    if tag is None and (storage.exists("done") or is_of_checkpointing(storage, ".")):
        return storage, "."
    folder = CheckpointFolder(storage)
    if tag is not None:
        name = check_tag(tag)
        return storage, name if is_of_checkpointing(storage, name) else folder.find(name).name
    complete = [each.name for each in folder.complete() if not each.damage]
    if not complete:
        raise CheckpointError(
            f"{source} has no weights of Hugging Face's, no complete checkpoint and no files of NeuronX Distributed's"
        )
    return storage, complete[0]


def _saved(storage: Storage, name: str, config: str | os.PathLike[str] | None) -> WeightSource:
    where = storage.describe("" if name == "." else name)
    if not is_nxd_folder(storage, name):
        return SavedWeights(CheckpointFiles(storage, name), where)
    files = NxdFiles(storage, name)
    if files.tp > 1 and config is None:
        raise CheckpointMismatch(
            f"{where} is of {files.tp} tp ranks, and its files do not say how tensors were divided: give the folder "
            f"with the model's config.json (--config FOLDER)"
        )
    model = None if config is None else _model(config, 1)
    parameters = {} if model is None else specs_of(model)
    source = NxdSource(files, parameters, None if model is None else kv_heads_of(model))
    missing = [name for name in parameters if f"model.{name}" not in source.catalog.tensors]
    tied = {name for parameter in parameters.values() for name in parameter.names if len(parameter.names) > 1}
    unknown = [key for key in source.catalog.tensors if key.removeprefix("model.") not in parameters]
    if parameters and set(missing) - tied:
        there = f"; it has {', '.join(key.removeprefix('model.') for key in unknown[:4])}" if unknown else ""
        raise CheckpointMismatch(
            f"{where} has other names than the model of {config}: {', '.join(missing[:4])} "
            f"{'are' if len(missing) > 1 else 'is'} missing{there}"
        )
    return SavedWeights(source, where)


def _model(config: str | os.PathLike[str], tp: int) -> Any:
    """The model of a `config.json`, without memory, its layers parallel: they say how each parameter is divided."""
    from transformers import AutoModelForCausalLM

    with comm.as_rank(Mesh(tp, tp=tp), 0), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(config))
        return swap(model, pad_vocab=True)


def _config(path: str | os.PathLike[str]) -> Any:
    """The config in a folder, or in a GGUF file."""
    from transformers import AutoConfig

    source = Path(path)
    if source.is_file():
        return AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    return AutoConfig.from_pretrained(source)


def _ranked(weights: WeightSource, config: str | os.PathLike[str] | None, tp: int, pp: int) -> Sequence[RankedTensor]:
    """Which rank gets what of the weights."""
    if config is None:
        raise ValueError(
            "how tensors are divided over tp and pp, the model's layers say: give the folder with its config.json "
            "(--config FOLDER)"
        )
    model = _model(config, tp)
    parameters = {id(param): param for param in model.parameters()}
    stage_of = _stages(model, pp)
    present = set(weights.names())
    tensors = []
    for identity, names in parameter_names(model).items():
        name = next((each for each in names if each in present), None)
        if name is None:
            raise CheckpointMismatch(f"{weights.description} lacks {names[0]}, which the model of {config} has")
        spec = spec_of(parameters[identity])
        if spec.is_sharded and (spec.num_partitions != tp or spec.group is not None):
            raise ValueError(
                f"tp={tp} does not divide the heads of {name}: choose a tp that divides the number of key/value heads"
            )
        stages: dict[int, list[str]] = {}
        for each in names:
            stages.setdefault(stage_of[each], []).append(each)
        tensors.append(RankedTensor(stages, spec, weights.dtype(name), partial(weights.read, name)))
    known = {name for names in parameter_names(model).values() for name in names}
    for name in sorted(present - known):
        spec = ShardSpec(full_shape=weights.shape(name))
        read = partial(weights.read, name)
        tensors.append(RankedTensor({stage_of.get(name, 0): [name]}, spec, weights.dtype(name), read))
    return tensors


def _stages(model: Any, pp: int) -> Mapping[str, int]:
    """The stage of each name: layers by NxD's rule, what comes before them on the first, what behind on the last."""
    count = model.config.get_text_config().num_hidden_layers
    layers = next(
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    )
    if pp > count:
        raise ValueError(f"pp={pp} is more than the {count} layers of the model")
    of_layer = {layer: stage for stage, own in enumerate(stage_layers(count, pp)) for layer in own}
    stages, current = {}, 0
    for name in model.state_dict():
        if name.startswith(f"{layers}."):
            stages[name] = of_layer[int(name[len(layers) + 1 :].partition(".")[0])]
            current = pp - 1
        else:
            stages[name] = current
    return stages


def _write_ours(weights: WeightSource, storage: Storage, tag: str, done: Callable[[int], None]) -> None:
    folder = CheckpointFolder(storage)
    if folder.is_complete(tag):
        raise CheckpointError(f"{storage.describe(tag)} is there already: choose another --tag, or remove it")
    names = list(weights.names())
    numbers = {name: number for number, name in enumerate(names, 1)}

    def read(name: str, piece: Piece) -> torch.Tensor:
        whole = weights.read(name, 0, piece.offset[0], piece.offset[0] + piece.shape[0]) if piece.shape else None
        if whole is None:
            value = weights.read(name)
        else:
            value = whole[(slice(None), *(slice(at, at + n) for at, n in zip(piece.offset[1:], piece.shape[1:])))]
        done(numbers[name])
        return value

    tensors: dict[tuple[str | int, ...], WholeTensor] = {
        ("model", name): WholeTensor(weights.shape(name), weights.dtype(name), partial(read, name)) for name in names
    }
    try:
        folder.begin(tag)
        files = write_whole(tensors, storage, tag)
        folder.commit(tag, {file: Entry(storage.size(f"{tag}/{file}")) for file in files})
    except BaseException:
        folder.abandon(tag)
        raise


def _local(target: str | os.PathLike[str], to: str) -> Path:
    if "://" in os.fspath(target):
        raise ValueError(f"{to!r} is written to a local folder, not to {os.fspath(target)}")
    return Path(target)


def _empty(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is there already, and not empty: nothing was written")
    return path
