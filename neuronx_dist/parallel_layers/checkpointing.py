"""NxD's first way of saving: a file for each tp and pp rank, of this layout only, by its names.

    output_dir/tp_rank_00_pp_rank_00/checkpoint.pt

`neuronx_dist.save_checkpoint` is what new scripts use: its checkpoints load into any layout. Files are read with
`weights_only=True`, whatever the arguments, so that no code in them runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import comm
from ..torch_internals.tensors import pytree
from ..weights.partial_model import parameter_names, parameter_slots
from ..weights.shard_spec import spec_of
from ..weights.torch_files import read_plain
from .utils import load_optimizer_state_dict, move_all_tensor_to_cpu

__all__ = ["ensure_directory_exists", "get_sharded_model_dict", "load", "save"]


def save(
    checkpoint: dict[str, Any],
    output_dir: str | os.PathLike[str],
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    master_dp_only: bool = True,
) -> None:
    """Writes the weights of each tp and pp rank; all ranks call it.

    Args:
        checkpoint: plain data with this rank's tensors: `{"model": model.state_dict(), "step": 100}`.
        output_dir: a folder that all ranks can reach.
        down_cast_bf16: write floating-point tensors as bf16.
        master_dp_only: only data-parallel rank 0 writes; False: every data-parallel rank, with its number in the
            folder's name.
        save_serially, save_xser: without effect: ranks write at the same time, in one format.

    Raises:
        RuntimeError: another rank could not write; the message has its error. The rank that could not write raises the
            error itself.
    """
    error: Exception | None = None
    try:
        on_cpu = move_all_tensor_to_cpu(checkpoint)  # what is still to be computed, all ranks do
        if comm.rank(("dp", "cp")) == 0 or not master_dp_only:
            _write(on_cpu, _path(output_dir, master_dp_only), down_cast_bf16)
    except Exception as failure:
        error = failure
    messages = comm.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
    if failed:
        raise RuntimeError(f"checkpointing.save: {output_dir} was not written: {'; '.join(failed[:4])}")


def load(
    chkpt_path: str | os.PathLike[str],
    model: Any = None,
    model_or_optimizer: Any = None,
    model_key: str | None = "model",
    load_xser: bool = False,
    sharded: bool = True,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = True,
) -> Any:
    """Reads the files that `save` wrote in the same layout, or one file with an unsharded model.

    Args:
        chkpt_path: the `output_dir` of `save`; with `sharded=False` a file, or a folder with one `checkpoint.pt`.
        model, model_or_optimizer: the object to load into, in one of the two; None in both: nothing is loaded.
        model_key: key of the loaded part of the checkpoint; None: the entire checkpoint.
        sharded: False: the weights are full, and each rank loads its shards.
        strict: of `load_state_dict` of a model.
        load_xser, weights_only: without effect: files are always read with `weights_only=True`.

    Returns:
        The entire checkpoint.

    Raises:
        FileNotFoundError: there is no file for this rank's coordinates: another layout, or another folder.
        KeyError: the checkpoint has no `model_key`; the message names its keys.
        ValueError: the file is damaged, or holds more than tensors and plain data; the message names it.
        RuntimeError: `load_state_dict` of the model or optimizer refuses the checkpoint.
    """
    if model is not None and model_or_optimizer is not None:
        raise ValueError("checkpointing.load: pass either model or model_or_optimizer, not both")
    target = model if model_or_optimizer is None else model_or_optimizer
    whole = Path(chkpt_path)
    path = _path(chkpt_path, master_dp_only) if sharded else whole / "checkpoint.pt" if whole.is_dir() else whole
    if not path.is_file():
        folders = sorted(file.parent.name for file in whole.glob("*/checkpoint.pt"))
        there = f"there are {', '.join(folders[:8])}" if folders else f"{whole} has no such folders"
        raise FileNotFoundError(
            f"checkpointing.load: there is no {path}; {there}: load it in the layout it was saved in"
        )
    checkpoint = read_plain(path)
    if target is None:
        return checkpoint
    if not isinstance(checkpoint, Mapping):
        raise ValueError(f"checkpointing.load: {path} has a {type(checkpoint).__name__} in place of a state dict")
    if model_key is not None and model_key not in checkpoint:
        raise KeyError(
            f"checkpointing.load: {path} has no {model_key!r}, only {', '.join(map(repr, [*checkpoint][:8]))}: pass "
            "one of these as model_key, or model_key=None if the checkpoint itself is the state dict"
        )
    state = checkpoint if model_key is None else checkpoint[model_key]
    if not isinstance(state, Mapping):
        raise ValueError(
            f"checkpointing.load: {path} has a {type(state).__name__} under {model_key!r}, in place of a state dict"
        )
    is_optimizer = isinstance(target, torch.optim.Optimizer)
    if is_optimizer and not sharded:
        raise ValueError(
            "checkpointing.load: an optimizer's state must be loaded by the rank that saved it: pass sharded=True"
        )
    try:
        if is_optimizer:
            load_optimizer_state_dict(target, state)
        else:
            target.load_state_dict(state if sharded else get_sharded_model_dict(target, state), strict=strict)
    except comm.CommError:
        raise
    except Exception as error:  # of torch, without the file's name and of many lines
        reason = " ".join(str(error).split())
        raise RuntimeError(f"checkpointing.load: {path} does not fit the {type(target).__name__}: {reason}") from error
    return checkpoint


def get_sharded_model_dict(model: nn.Module, model_state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's shards of an unsharded model's weights, by the layout of its parameters."""
    aliases = parameter_names(model)
    shards = dict(model_state_dict)
    for slot in parameter_slots(model):
        spec = spec_of(slot.tensor)
        for name in aliases[id(slot.tensor)]:
            if spec.axis is not None and name in shards:
                shards[name] = spec.local_slice(model_state_dict[name], comm.rank(spec.axis))
    return shards


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Makes the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def _write(state: Any, path: Path, down_cast_bf16: bool) -> None:
    """Writes a file, which gets its name when it is complete."""
    if down_cast_bf16:
        state = pytree.tree_map_only(torch.Tensor, _as_bf16, state)
    ensure_directory_exists(path)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    os.replace(partial, path)


def _path(folder: str | os.PathLike[str], master_dp_only: bool) -> Path:
    """This rank's file."""
    name = f"tp_rank_{comm.rank('tp'):02d}_pp_rank_{comm.rank('pp'):02d}"
    if not master_dp_only:
        name += f"_dp_rank_{comm.rank(('dp', 'cp')):02d}"
    return Path(folder) / name / "checkpoint.pt"


def _as_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
