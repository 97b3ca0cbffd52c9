"""Generating files once in a job: rank 0 generates or reuses, the others wait, and get what they lack.

An error on rank 0 is an error on all ranks, with its cause. New files are sent to the hosts that do not share rank 0's
folder, by `BroadcastGenFilesStrategy`; files that are reused are not sent.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import comm
from ..weights.host_memory import as_bytes
from .config import BroadcastGenFilesStrategy, ReuseType
from .files import MANIFEST, WEIGHTS, ForeignFilesError, Generated, GeneratedFilesError, GeneratedFolder
from .keys import Key

__all__ = ["Emitted", "generate"]

_CHUNK = 64 * 2**20  # bytes that are sent at a time


class Emitted(NamedTuple):
    """What is generated for a module.

    Attributes:
        files: text by name.
        weights: whole initial parameters and buffers by name; None: the module has none (it is on meta).
    """

    files: Mapping[str, str]
    weights: Mapping[str, torch.Tensor] | None


class _Outcome(NamedTuple):
    """What rank 0 tells the others."""

    error: str = ""
    is_new: bool = False
    key_digest: str = ""
    values_digest: str = ""  # of the weights that the module given has; "": it gives none


def generate(
    folder: GeneratedFolder,
    make_key: Callable[[], Key],
    emit: Callable[[], Emitted],
    *,
    reuse: ReuseType | str = ReuseType.MATCH,
    strategy: BroadcastGenFilesStrategy | str = BroadcastGenFilesStrategy.NONE,
    load: bool = True,
    values: Callable[[], Mapping[str, torch.Tensor] | None] = lambda: None,
) -> Generated | None:
    """Makes sure that a folder has the files of a module, on all ranks together.

    Args:
        make_key, emit: called on rank 0 alone, `emit` only where files are generated; without a process group on every
            process, whose last one to write wins.
        load: read the files on every rank.
        values: called on rank 0: the initial weights that the module given now has, in whose place files that are used
            again have those of another run; None: those are kept.

    Returns:
        The files; None without `load`.

    Raises:
        RuntimeError: files are to be sent, and there is no process group; or rank 0 failed (on the other ranks, with
            its message).
        GeneratedFilesError: with `ReuseType.MATCH` the folder's files are of something else; or they are not here.
    """
    reuse, strategy = ReuseType.of(reuse), BroadcastGenFilesStrategy.of(strategy)
    if not comm.is_initialized():
        if strategy is not BroadcastGenFilesStrategy.NONE:
            raise RuntimeError(
                f"broadcast_strategy={strategy.value!r} sends files to other ranks, and there is no process group: "
                "initialize torch.distributed first, or pass broadcast_strategy='none'"
            )
        key = make_key()
        _generate_here(folder, key, emit, reuse, values())
        return folder.read(key) if load else None
    outcome = _on_rank_0(lambda: _generate_here(folder, make_key(), emit, reuse, values()))
    if outcome.is_new and strategy is not BroadcastGenFilesStrategy.NONE:
        _send(folder, strategy)
    return _read_on_all(folder, outcome) if load else None


def _generate_here(
    folder: GeneratedFolder,
    key: Key,
    emit: Callable[[], Emitted],
    reuse: ReuseType,
    values: Mapping[str, torch.Tensor] | None,
) -> _Outcome:
    state = _state(folder, key, reuse)
    replace = reuse is not ReuseType.MATCH
    generated = folder.read(key) if state != "empty" and not replace else None  # raises, and says what differs
    if state == "same" and reuse in (ReuseType.MATCH, ReuseType.MOO):
        generated = generated or folder.read(key)
        if values is None or generated.has_values(values):
            return _outcome(folder, key, values, is_new=False)
        names = generated.manifest["weights"]
        if names:
            files = {name: generated.text(name) for name in generated.files}
            folder.write(key, files, {name: values[name] for name in names}, replace=replace)
            return _outcome(folder, key, values, is_new=True)
        # They are of a module on meta, and say nothing of the names of values.
    emitted = emit()
    folder.write(
        key,
        emitted.files,
        emitted.weights,
        keep_weights=reuse is ReuseType.GRAPH and state.startswith("same") and values is None,
        replace=replace,
    )
    return _outcome(folder, key, values, is_new=True)


def _outcome(folder: GeneratedFolder, key: Key, values: Mapping[str, torch.Tensor] | None, *, is_new: bool) -> _Outcome:
    return _Outcome("", is_new, key.digest, "" if values is None else folder.read(key).values_digest)


def _state(folder: GeneratedFolder, key: Key, reuse: ReuseType) -> str:
    try:
        return folder.state(key)
    except ForeignFilesError:
        raise
    except GeneratedFilesError:
        if reuse is ReuseType.MATCH:
            raise
        return "damaged"


def _on_rank_0(function: Callable[[], _Outcome]) -> _Outcome:
    """What a function returns on rank 0, on all ranks; its error is raised on all.

    The others learn of an error at once, whatever it is: rank 0 tells them before it raises it.
    """
    error: BaseException | None = None
    outcome = _Outcome()
    if comm.current().rank == 0:
        try:
            outcome = function()
        except BaseException as failure:
            error, outcome = failure, _Outcome(f"{type(failure).__name__}: {failure}")
    outcome = comm.broadcast_object(outcome)
    if error is not None:
        raise error
    if outcome.error:
        raise RuntimeError(f"parallelize failed on rank 0: {outcome.error}")
    return outcome


def _read_on_all(folder: GeneratedFolder, outcome: _Outcome) -> Generated:
    """Reads the folder on every rank; what one cannot read is an error on all."""
    error: GeneratedFilesError | None = None
    generated: Generated | None = None
    try:
        generated = folder.read()
        other = "files of something else" if generated.key.digest != outcome.key_digest else ""
        if not other and outcome.values_digest and generated.values_digest != outcome.values_digest:
            other = "other initial weights"
        if other:
            raise GeneratedFilesError(
                f"{folder.path} has {other} than what rank 0 has: copy its folder, or pass broadcast_strategy='all' "
                "and reuse='override'"
            )
    except GeneratedFilesError as failure:
        error = failure
    failures = {rank: text for rank, text in enumerate(comm.gather_objects(str(error or ""))) if text}
    if error is not None:
        raise error
    if failures:
        rank, text = next(iter(failures.items()))
        raise GeneratedFilesError(f"rank {rank} (of {len(failures)} such ranks): {text}")
    assert generated is not None
    return generated


def _send(folder: GeneratedFolder, strategy: BroadcastGenFilesStrategy) -> None:
    """Sends rank 0's files to the ranks that do not see them: one writer for each folder that lacks them."""
    own = comm.current().rank
    text = (folder.path / MANIFEST).read_text() if own == 0 else ""
    text = comm.broadcast_object(text)
    wanted = _wanted(folder, strategy) if own == 0 else []
    wanted = comm.broadcast_object(wanted)
    path = folder.path
    has_it = (path / MANIFEST).is_file() and (path / MANIFEST).read_text() == text
    places = comm.gather_objects((socket.gethostname(), str(path), has_it))
    writers = [rank for rank, place in enumerate(places) if not place[2] and places.index(place) == rank]
    if not writers:
        return
    with folder.beside() as new:
        writes = own in writers
        for name, nbytes in wanted:
            _send_file(path / name, nbytes, new / name if writes else None)
        if writes:
            keep = folder.whole_files() - {name for name, _ in wanted}
            for name in keep:
                if name.startswith(WEIGHTS + "/"):
                    (new / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path / name, new / name)
            folder.swap(new)
    comm.barrier()


def _wanted(folder: GeneratedFolder, strategy: BroadcastGenFilesStrategy) -> list[tuple[str, int]]:
    """The files that are sent, with their sizes; the manifest last."""
    names = [*folder.read().manifest["files"], MANIFEST]
    if strategy is not BroadcastGenFilesStrategy.ALL:
        names = [name for name in names if not name.startswith(WEIGHTS + "/")]
    return [(name, (folder.path / name).stat().st_size) for name in names]


def _send_file(source: Path, nbytes: int, target: Path | None) -> None:
    device = comm.current().backend.device
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
    own = comm.current().rank
    with open(source if own == 0 else os.devnull, "rb") as reader, open(target or os.devnull, "wb") as writer:
        for start in range(0, nbytes, _CHUNK):
            chunk = torch.empty(min(_CHUNK, nbytes - start), dtype=torch.uint8)
            if own == 0:
                reader.readinto(as_bytes(chunk))
            received: Any = comm.broadcast(chunk.to(device), "world").cpu()
            writer.write(as_bytes(received))
