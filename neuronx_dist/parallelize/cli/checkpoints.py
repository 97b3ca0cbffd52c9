"""Checkpoints of the trainer: folders of a file for each rank, `last` and `best`, and files of merged states."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import comm
from ..train.layouts import LAYOUT, layout_of
from ..train.state_dicts import (
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dict,
    load_sharded_state_dict,
    merge_state_dicts,
)
from .component_args import CheckpointConfig

__all__ = ["load_states", "merged", "read", "save", "states_of"]

_load = partial(torch.load, map_location="cpu", weights_only=True)  # tensors and plain data
_SHARED = ("model", "optimizer", "train_args", "train_status", "lr_scheduler", "rank")  # others are listed by rank


def states_of(config: CheckpointConfig, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Returns the states of a rank's model and optimizer."""
    is_deduped = config.save_type == "deduped"
    states = deduped_state_dict(model, optimizer) if is_deduped else (model.state_dict(), optimizer.state_dict())
    return dict(zip(("model", "optimizer"), states))


def load_states(content: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
    """Loads the states of `read` into a rank's model and optimizer. All ranks call it together."""
    saved = content.get("train_args", {}).get("checkpoint", {}).get("save_type", "merged")
    loads: dict[str, Any] = {"sharded": load_sharded_state_dict, "deduped": load_deduped_state_dict}
    loads.get(saved, load_merged_state_dict)(model, content["model"], optimizer, content["optimizer"])


def save(content: dict[str, Any], config: CheckpointConfig, name: str, is_best: bool) -> None:
    """Writes this rank's file of a checkpoint, and points `last` and `best` to it. All ranks call it together."""
    rank, size, folder = int(comm.rank("world")), comm.size("world"), Path(config.save_dir)
    path = folder / name / f"{rank}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # a reader finds a complete file, or none
    torch.save(content, part)
    part.replace(path)
    comm.barrier()
    names = ["last"] * config.save_last + ["best"] * (config.save_best and is_best)
    for place in (folder / other / path.name for other in names):
        place.parent.mkdir(exist_ok=True)
        part = place.with_suffix(".part")
        part.unlink(missing_ok=True)
        if config.symlink_best_and_last:
            part.symlink_to(Path("..") / name / path.name)
        else:
            shutil.copy(path, part)
        part.replace(place)
    comm.barrier()
    if rank % int(os.environ.get("LOCAL_WORLD_SIZE", size)) == 0:
        for number, file in (item for other in [name, *names] for item in _files(folder / other).items()):
            if number >= size:  # of an earlier run on more ranks
                file.unlink(missing_ok=True)
        if config.keep_last_n_checkpoints:
            _expire(folder, config.keep_last_n_checkpoints)
    comm.barrier()


def _files(path: Path) -> dict[int, Path]:
    return {int(file.stem): file for file in path.glob("*.ckpt") if file.stem.isdigit()}


def _expire(folder: Path, count: int) -> None:
    """Removes all but the last checkpoints, and those that `last` and `best` point to."""
    linked = {path.resolve().parent.name for path in folder.glob("*/*.ckpt") if path.is_symlink()}
    steps = {path: path.name.rpartition("-")[2] for path in folder.glob("*-*") if path.is_dir()}
    saved = sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path]))
    for path in saved[:-count]:
        if path.name not in linked:
            shutil.rmtree(path, ignore_errors=True)


def read(path: Path, model: nn.Module, optimizer: Any, with_merged: bool | None) -> dict[str, Any]:
    """Returns the content of a file, or of this rank's file in a folder; merged, if another layout saved it.

    All ranks call it together, and all see the folder.

    Raises:
        ValueError: files are missing, or of different steps; or another layout saved them, and `with_merged` is False.
    """
    if path.is_file():
        return _load(path)
    files = _files(path)
    if not files or set(files) != set(range(len(files))):
        raise ValueError(
            f"checkpoint {path} has the files of ranks {sorted(files)}: a file of each rank is needed, from 0"
        )
    content = _load(files[int(comm.rank("world"))]) if len(files) == comm.size("world") else None
    here = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    is_same = content is not None and _layout(content) == _layout(here)
    same, statuses = zip(*comm.gather_objects((is_same, content and content.get("train_status"))))
    if any(status != statuses[0] for status in statuses):
        raise ValueError(
            f"checkpoint {path} has files of different steps, {[*statuses]}: a run has ended while it replaced them; "
            f"resume from a checkpoint of one step in {path.parent}"
        )
    is_same = all(same)
    if with_merged is False and not is_same:
        raise ValueError(
            f"checkpoint {path} was saved by {len(files)} ranks in another layout: leave with_merged=None to merge it"
        )
    return content if content is not None and is_same and not with_merged else merged([*files.values()])


def _layout(content: dict[str, Any]) -> Any:
    layout, rows = layout_of(content["model"]), content["optimizer"][LAYOUT]["rows"]
    return layout.plan_ngpus, layout.runtime_ngpus, layout.index, layout.specs, layout.elsewhere, rows


def merged(files: Sequence[Path | str]) -> dict[str, Any]:
    """Returns the content of the files of all ranks of one checkpoint: states of the original model and optimizer."""
    contents = sorted(map(_load, files), key=lambda content: int(content["rank"]))
    first = contents[0]
    for content, file in zip(contents, files):
        for key in ("train_args", "lr_scheduler", "train_status"):
            if content.get(key) != first.get(key):
                raise ValueError(f"{file} has another {key!r} than {files[0]}: merge files of one checkpoint")
    model, optimizer = merge_state_dicts([c["model"] for c in contents], [c["optimizer"] for c in contents])
    args = {**first["train_args"], "checkpoint": {**first["train_args"]["checkpoint"], "save_type": "merged"}}
    shared = {"model": model, "optimizer": optimizer, "train_args": args}
    shared |= {key: first.get(key) for key in ("lr_scheduler", "train_status")}
    others = dict.fromkeys(key for content in contents for key in content if key not in _SHARED)
    return {**shared, **{key: [content.get(key) for content in contents] for key in others}}
