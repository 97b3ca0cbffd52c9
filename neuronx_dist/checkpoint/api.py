"""`save_checkpoint`, `load_checkpoint`, `has_checkpoint`, `finalize_checkpoint`: NeuronX Distributed's names."""

from __future__ import annotations

import os
import time
import warnings
import zlib
from typing import Any

import torch
from torch import nn

from .. import comm
from ..weights.partial_model import unwrapped
from . import random_state
from .agreement import listed, together
from .background import CheckpointIOState, Save, state_of_rank
from .dcp import reading, writing
from .dcp.plain_data import packed, unpacked
from .dcp.staging import Staging
from .errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from .nxd.nxd_reading import load_nxd
from .nxd.rank_files import is_nxd_folder, is_of_checkpointing
from .run_state import changed_by, collect
from .storage import Storage, open_storage
from .tags import CheckpointFolder, Entry, Tag, check_tag

__all__ = ["CheckpointIOState", "finalize_checkpoint", "has_checkpoint", "load_checkpoint", "save_checkpoint"]

_SCHEDULER, _USER_CONTENT = "scheduler.pt", "user_content.pt"
_PATIENCE = 10.0  # seconds until another host sees a new file; network file systems cache that a file is missing


def save_checkpoint(
    checkpoint_dir_str: str | os.PathLike[str],
    tag: str,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
    *,
    when_busy: str = "wait",
) -> None:
    """Saves a run as checkpoint `tag`, in a form that any layout loads; all ranks call it.

    The checkpoint exists once it is complete and synced, and not before; an older one of this tag stays until then.
    The state of random generators is a part of the checkpoint.

    Args:
        checkpoint_dir_str: a folder that all ranks see: a path, or a URL of fsspec (`s3://bucket/run`).
        tag: the name of this checkpoint, and of its folder.
        model, optimizer: any module and its optimizer, sharded or not; of a pipeline model the local stage.
        scheduler: anything with a `state_dict`, equal on all ranks.
        user_content: plain data of rank 0 (numbers, strings, lists, dicts, tensors), which `load_checkpoint` returns:
            step, position in the data.
        num_kept_ckpts: how many complete checkpoints stay, this one included; None, or -1 as in NxD's scripts: all.
        async_save: copy and write in the background. The next `optimizer.step()`, or `load_state_dict`, waits until the
            tensors that it changes are copied; all others are copied before this returns. An error is raised by the
            next call of a function of this file, also if other code changed weights that were not copied yet.
        when_busy: treatment of an asynchronous save that is not complete yet: "wait" for it, or "supersede" it.
        num_workers, use_xser, zero1_optimizer, use_zero1_dcp, avoid_saving_lower_precision_weights: without effect:
            every rank writes its share, in one format, weights and masters. Where the result differs from what the
            option asks for (`use_xser` and the last one), rank 0 warns.

    Raises:
        CheckpointError: on all ranks: this checkpoint, or the asynchronous one before it, could not be written. Earlier
            checkpoints are still there, and training may go on.
        ValueError: on the ranks with the wrong argument (others get a CheckpointError): a tag that names no folder,
            user_content that is no plain data.
        TypeError: `model`, `optimizer` or `scheduler` is of another type, such as a state dict.
    """
    model, optimizer = unwrapped(model), unwrapped(optimizer)
    io_state = state_of_rank()
    rank, ranks = comm.rank("world"), comm.size("world")
    keep = None if num_kept_ckpts == -1 else num_kept_ckpts
    with together("no checkpoint was saved"):
        name = check_tag(tag)
        _check_options(when_busy, keep)
        _check_types(model, optimizer, scheduler)
    if rank == 0:
        _warn_of_unused(use_xser, avoid_saving_lower_precision_weights)
    io_state.settle(supersede=when_busy == "supersede")
    with together("no checkpoint was saved"):
        folder = CheckpointFolder(open_storage(checkpoint_dir_str))
        where = folder.storage.describe(name)
        small = {random_state.file_of(): packed("the state of random generators", random_state.capture())}
        if rank == 0 and scheduler is not None:
            small[_SCHEDULER] = packed("scheduler.state_dict()", scheduler.state_dict())
        if rank == 0 and user_content is not None:
            small[_USER_CONTENT] = packed("user_content", user_content)
    _same_everywhere(where)
    with together("no checkpoint was saved"):
        state = collect(model, optimizer)
    plan = writing.plan(state)
    staging: Staging | None = None
    try:
        with together(f"checkpoint {where} could not be begun"):
            if rank == 0:
                folder.begin(name)
        with together(f"checkpoint {where} could not be begun"):
            _await_marker(folder, name)
            if async_save:
                staging = plan.stage(io_state.staged, optimizer, changed_by(optimizer, state), model)
                io_state.staged = staging.buffer
    except BaseException as error:
        if staging is not None:
            staging.close()
        if rank == 0 and isinstance(error, CheckpointError):
            folder.abandon(name)
        raise

    def write(storage: Any, path: str) -> None:
        if staging is not None:
            staging.finish()
        for file, content in small.items():
            storage.write(f"{path}/{file}", [content])
        writing.write(plan, storage, path)

    entries = {file: Entry(len(content), zlib.crc32(content)) for file, content in small.items()}
    save = Save(folder, name, write, entries, keep, rank, ranks)
    if async_save:
        io_state.pending, io_state.staging = save, staging
        save.start()
    else:
        save.write_own_files()
        save.settle()


def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
    *,
    device: str | torch.device = "cpu",
) -> Any:
    """Loads a checkpoint of any layout into this one; all ranks call it.

    It also reads folders of NeuronX Distributed's `nxd.save_checkpoint` and `parallel_layers.checkpointing.save`, and
    folders of torch.distributed.checkpoint with `{"model": ..., "optimizer": get_optimizer_state_dict(...)}`.

    Weights, optimizer state and masters are bit-equal in any layout; random generators go on where they were in the
    same layout. All files are compared with their checksums: local ones before anything is changed, tensors in other
    storages while they are read, and an error says whether weights have been overwritten. The optimizer, the scheduler
    and random generators are set after all files are verified.

    Args:
        path: the folder of `save_checkpoint`, or NeuronX Distributed's.
        tag: of the checkpoint; None: the newest complete one; rank 0 warns if a newer one is damaged.
        model, optimizer, scheduler: objects to load into; None is left out. After weights alone, an optimizer that has
            master weights already takes the new weights by its `init_zero()`.
        strict: False accepts a model with other parameters than the checkpoint's, and loads what both have.
        num_workers, use_zero1_dcp: without effect.
        device: where parameters and buffers on meta get memory, before they are read; parameters stay the same objects.
            With `strict=False` a parameter that the checkpoint lacks stays on meta; buffers that no checkpoint has get
            the values of `materialize`.

    Returns:
        The `user_content` that was saved, None if there was none.

    Raises:
        CheckpointError: on all ranks: there is no such checkpoint.
        CheckpointCorrupted: on all ranks: files are missing, truncated or changed; the message names them, and says
            whether nothing was changed or weights were overwritten in part.
        CheckpointMismatch: on all ranks: the checkpoint is of another model, or lacks a part that is to be loaded.
        TypeError: `model`, `optimizer` or `scheduler` is of another type, such as a state dict.
    """
    model, optimizer = unwrapped(model), unwrapped(optimizer)
    state_of_rank().settle()
    with together(f"no checkpoint was loaded from {path}"):
        _check_types(model, optimizer, scheduler)
        folder = CheckpointFolder(open_storage(path))
        candidates = _candidates(folder, tag) if comm.rank("world") == 0 else []
    candidates = comm.gather_objects(candidates)[0]
    damaged, overwritten = "", frozenset[str]()
    for name in candidates:
        where = folder.storage.describe(name)
        try:
            content = _load(folder, name, model, optimizer, scheduler, strict, overwritten, device)
            break
        except CheckpointCorrupted as error:
            damaged = damaged or f"checkpoint {where} is damaged: {error}"
            overwritten |= error.overwritten
        except CheckpointError as error:
            if not damaged:
                raise
            raise type(error)(f"{damaged}; {_left(overwritten)}. Instead of it: {error}") from error
    else:
        complete = [] if tag is None else [other.name for other in folder.complete() if not other.damage]
        others = [other for other in complete if other not in candidates]
        instead = f"others are complete: {', '.join(others[:5])}" if others else "no other checkpoint is intact"
        raise CheckpointCorrupted(f"{damaged}; {_left(overwritten)}, and {instead}")
    asked = name if tag is None else str(tag)
    instead = damaged or ("" if name == asked else f"checkpoint {tag} was being replaced when its job ended")
    if instead and comm.rank("world") == 0:
        warnings.warn(f"{instead}; {name} is loaded instead", stacklevel=2)
    return content


def _left(overwritten: frozenset[str]) -> str:
    """Describes the state of the run after a checkpoint turned out to be damaged."""
    if not overwritten:
        return "nothing was changed"
    return "weights of the model were partly overwritten: load another checkpoint, or start again"


def has_checkpoint(checkpoint_dir_str: str | os.PathLike[str]) -> bool:
    """Returns whether the folder has a complete checkpoint; not a collective."""
    folder = CheckpointFolder(open_storage(checkpoint_dir_str))
    return any(folder.is_complete(name) for name in folder.storage.list())


def finalize_checkpoint() -> None:
    """Waits until the asynchronous save that is under way is complete; all ranks call it.

    Raises:
        CheckpointError: on all ranks: the save failed.
    """
    state_of_rank().settle()


def _load(
    folder: CheckpointFolder,
    name: str,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    strict: bool,
    overwritten: frozenset[str],
    device: str | torch.device,
) -> Any:
    """Loads the checkpoint in folder `name`; returns its user content.

    Raises:
        CheckpointCorrupted: on all ranks: the checkpoint is damaged.
    """
    where = folder.storage.describe(name)
    contents: dict[str, bytes] = {}
    with together(f"checkpoint {where} was not loaded"):
        checkpoint = folder.tag(name) if folder.is_complete(name) else Tag(name, 0.0, None)
        wrong = folder.damage(checkpoint, comm.rank("world"), comm.size("world"), contents)
        if wrong:
            raise CheckpointCorrupted(listed(wrong))
        is_nxd = checkpoint.files is None and is_nxd_folder(folder.storage, name)
        present = checkpoint.files or {}
        if checkpoint.files is None:
            if not is_nxd and not reading.is_of_dcp(folder.storage, checkpoint.name):
                raise CheckpointMismatch(
                    f"checkpoint {where} lists no files, and has no files of NeuronX Distributed: it was not saved "
                    "by save_checkpoint"
                )
            present = dict.fromkeys(folder.storage.list(name), Entry(0))
        if scheduler is not None and _SCHEDULER not in present:
            raise CheckpointMismatch(f"checkpoint {where} was saved without a scheduler")
        content = {
            file: unpacked(file, contents[file] if file in contents else folder.read(checkpoint, file))
            for file in (_SCHEDULER, _USER_CONTENT, random_state.file_of(present))
            if file in present
        }
        if scheduler is not None and not isinstance(content[_SCHEDULER], dict):
            kind = type(content[_SCHEDULER]).__name__
            raise CheckpointCorrupted(f"{where}/{_SCHEDULER} has a {kind} in place of a scheduler's state dict")
    common: Any = dict(strict=strict, overwritten=overwritten, device=device)
    if not is_nxd:
        is_ours = checkpoint.files is not None
        reading.load(folder.storage, name, model, optimizer, checksums=is_ours, **common)
    elif model is not None or optimizer is not None:
        load_nxd(folder.storage, name, model, optimizer, **common)
    with together(f"checkpoint {where} was loaded in part"):
        if scheduler is not None:
            scheduler.load_state_dict(content[_SCHEDULER])
        if random_state.file_of(present) in content:
            random_state.restore(content[random_state.file_of(present)])
    return content.get(_USER_CONTENT)


def _candidates(folder: CheckpointFolder, tag: str | None) -> list[str]:
    """Tags to try, in order."""
    if tag is not None:
        name = check_tag(tag)
        is_unmarked = not folder.is_complete(name) and _is_unmarked(folder.storage, name)
        return [name if is_unmarked else folder.find(name).name]
    names = [tag.name for tag in folder.complete()]
    if not names and _is_unmarked(folder.storage, "."):
        return ["."]
    if not names:
        raise CheckpointError(f"there is no complete checkpoint in {folder.storage.describe()}")
    return names


def _is_unmarked(storage: Storage, folder: str) -> bool:
    """Returns whether a folder was written by a library that does not mark checkpoints as complete."""
    return is_of_checkpointing(storage, folder) or reading.is_of_dcp(storage, folder)


def _check_options(when_busy: str, num_kept_ckpts: int | None) -> None:
    if when_busy not in ("wait", "supersede"):
        raise ValueError(f'when_busy must be "wait" or "supersede", got {when_busy!r}')
    if num_kept_ckpts is not None and num_kept_ckpts < 1:
        raise ValueError(f"num_kept_ckpts must be at least 1, or None or -1 to keep all, got {num_kept_ckpts}")


def _check_types(model: Any, optimizer: Any, scheduler: Any) -> None:
    wrong = [
        (name, value)
        for name, value, fits in (
            ("model", model, isinstance(model, nn.Module)),
            ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer)),
            ("scheduler", scheduler, hasattr(scheduler, "load_state_dict")),
        )
        if value is not None and not fits
    ]
    for name, value in wrong:
        raise TypeError(f"{name} is a {type(value).__name__}, a state dict: pass the {name} itself")


def _warn_of_unused(use_xser: bool, avoid_saving_lower_precision_weights: bool) -> None:
    if use_xser:
        warnings.warn("use_xser has no effect: files have the format of torch.distributed.checkpoint", stacklevel=3)
    if avoid_saving_lower_precision_weights:
        text = "avoid_saving_lower_precision_weights has no effect: weights are saved beside their masters"
        warnings.warn(text, stacklevel=3)


def _same_everywhere(where: str) -> None:
    """Raises CheckpointError if ranks save to different folders."""
    everywhere = comm.gather_objects(where)
    other = next((rank for rank, name in enumerate(everywhere) if name != everywhere[0]), None)
    if other is not None:
        raise CheckpointError(
            f"all ranks must save the same checkpoint: rank 0 saves {everywhere[0]}, rank {other} {everywhere[other]}"
        )


def _await_marker(folder: CheckpointFolder, name: str) -> None:
    """Waits until this rank sees the folder that rank 0 has made."""
    deadline = time.monotonic() + _PATIENCE
    while not folder.has_begun(name):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank 0 created {folder.storage.describe(name)}, but this rank's host does not see it: save to a "
                "folder that all hosts share"
            )
        time.sleep(0.05)
