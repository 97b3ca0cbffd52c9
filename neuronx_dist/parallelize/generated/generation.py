"""Generates files once in a job: rank 0 generates or reuses them, the other ranks wait, and receive missing files.

An error on rank 0 is raised on all ranks, with its cause. New files are sent to the hosts that do not share the folder
of rank 0, by `BroadcastGenFilesStrategy`; reused files are not sent.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import comm
from ...comm.backends.observed import CheckBackend
from ...weights.host_memory import as_bytes
from ..config import BroadcastGenFilesStrategy, ReuseType
from .generated_files import MANIFEST, WEIGHTS, ForeignFilesError, Generated, GeneratedFilesError, GeneratedFolder
from .keys import Key

__all__ = ["Emitted", "generate"]

_CHUNK = 64 * 2**20  # bytes that are sent at a time


class Emitted(NamedTuple):
    """The generated files of a module, and its initial weights.

    Attributes:
        files: text by name.
        weights: whole initial parameters and buffers by name; None: the module is on meta.
    """

    files: Mapping[str, str]
    weights: Mapping[str, torch.Tensor] | None


class _Outcome(NamedTuple):
    """The result on rank 0, which is broadcast to the other ranks."""

    error: str = ""
    is_new: bool = False
    key_digest: str = ""
    values_digest: str = ""  # of the weights of the module object that was passed; "": none


def generate(
    folder: GeneratedFolder,
    make_key: Callable[[], Key],
    emit: Callable[[], Emitted],
    *,
    reuse: ReuseType | str = ReuseType.MATCH,
    strategy: BroadcastGenFilesStrategy | str = BroadcastGenFilesStrategy.NONE,
    load: bool = True,
    values: Callable[[], Mapping[str, torch.Tensor] | None] = lambda: None,
    is_complete: Callable[[Generated], bool] = lambda generated: True,
) -> Generated | None:
    """Generates the files of a module in a folder, or reuses the files there, on all ranks together.

    Args:
        make_key, emit: called on rank 0 alone, `emit` only where files are generated; without a process group on every
            process, whose last one to write wins.
        load: read the files on every rank.
        values: called on rank 0; returns the current weights of the module, which replace those of reused files; None:
            reused files keep their weights.
        is_complete: called on rank 0: False: files of this key are generated anew; initial weights stay as they are.

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
        _generate_here(folder, key, emit, reuse, values(), is_complete)
        return _opened(folder.read(key)) if load else None
    outcome = _on_rank_0(lambda: _generate_here(folder, make_key(), emit, reuse, values(), is_complete))
    if outcome.is_new and strategy is not BroadcastGenFilesStrategy.NONE:
        _send(folder, strategy)
    return _read_on_all(folder, outcome) if load else None


def _generate_here(
    folder: GeneratedFolder,
    key: Key,
    emit: Callable[[], Emitted],
    reuse: ReuseType,
    values: Mapping[str, torch.Tensor] | None,
    is_complete: Callable[[Generated], bool],
) -> _Outcome:
    state = _state(folder, key, reuse)
    replace = reuse is not ReuseType.MATCH
    generated = folder.read(key) if state != "empty" and not replace else None  # raises, and says what differs
    keep_weights = values is None and state.startswith("same") and reuse is ReuseType.GRAPH
    if state == "same" and reuse in (ReuseType.MATCH, ReuseType.MOO):
        generated = generated or folder.read(key)
        keep_weights = values is None
        names = generated.manifest["weights"]
        if is_complete(generated):
            if values is None or generated.has_values(values):
                return _outcome(folder, key, values, is_new=False)
            if names:  # else they are of a module on meta, and say nothing of the names of values
                files = {name: generated.text(name) for name in generated.files}
                folder.write(key, files, {name: values[name] for name in names}, replace=replace)
                return _outcome(folder, key, values, is_new=True)
    emitted = emit()
    folder.write(key, emitted.files, emitted.weights, keep_weights=keep_weights, replace=replace)
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
    """Runs a function on rank 0, and returns its result on all ranks; its error is raised on all ranks.

    Rank 0 broadcasts an error before it raises it, so that no other rank waits.
    """
    if isinstance(comm.current().backend, CheckBackend):
        raise RuntimeError(
            "parallelize was called in a check (spmd.check), which has no values and no files for all ranks: call it "
            "before, with the class of the module, and pass the class that it returns to the check. (The types of the "
            "emitted program itself were checked when it was generated: the PROOF of the class.)"
        )
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
    """Reads the folder on every rank; an error on one rank is raised on all."""
    error: GeneratedFilesError | None = None
    generated: Generated | None = None
    try:
        generated = _opened(folder.read())
        other = "files generated from other inputs" if generated.key.digest != outcome.key_digest else ""
        if not other and outcome.values_digest and generated.values_digest != outcome.values_digest:
            other = "other initial weights"
        if other:
            raise GeneratedFilesError(
                f"{folder.path} on this rank has {other} than on rank 0: copy rank 0's folder, or pass "
                "broadcast_strategy='all' and reuse='override'"
            )
    except GeneratedFilesError as failure:
        error = failure
    failures = {rank: text for rank, text in enumerate(comm.gather_objects(str(error or ""))) if text}
    if error is not None:
        raise error
    if failures:
        rank, text = next(iter(failures.items()))
        raise GeneratedFilesError(f"rank {rank} (of {len(failures)} failing ranks): {text}")
    assert generated is not None
    return generated


def _opened(generated: Generated) -> Generated:
    """Opens the weights before another run can replace them; an error is raised where they are read."""
    with suppress(GeneratedFilesError):
        generated.weights()
    return generated


def _send(folder: GeneratedFolder, strategy: BroadcastGenFilesStrategy) -> None:
    """Sends the files of rank 0 to the ranks that do not see them, to one writer for each folder."""
    rank = comm.current().rank
    text = (folder.path / MANIFEST).read_text() if rank == 0 else ""
    text = comm.broadcast_object(text)
    wanted = _wanted(folder, strategy) if rank == 0 else []
    wanted = comm.broadcast_object(wanted)
    path = folder.path
    has_it = (path / MANIFEST).is_file() and (path / MANIFEST).read_text() == text
    places = comm.gather_objects((socket.gethostname(), str(path), has_it))
    writers = [rank for rank, place in enumerate(places) if not place[2] and places.index(place) == rank]
    if not writers:
        return
    with folder.beside() as new:
        writes = rank in writers
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
    """Returns the names and sizes of the files that are sent, the manifest last."""
    names = [*folder.read().manifest["files"], MANIFEST]
    if strategy is not BroadcastGenFilesStrategy.ALL:
        names = [name for name in names if not name.startswith(WEIGHTS + "/")]
    return [(name, (folder.path / name).stat().st_size) for name in names]


def _send_file(source: Path, nbytes: int, target: Path | None) -> None:
    device = comm.current().backend.device
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
    rank = comm.current().rank
    with open(source if rank == 0 else os.devnull, "rb") as reader, open(target or os.devnull, "wb") as writer:
        for start in range(0, nbytes, _CHUNK):
            chunk = torch.empty(min(_CHUNK, nbytes - start), dtype=torch.uint8)
            if rank == 0:
                reader.readinto(as_bytes(chunk))
            received: Any = comm.broadcast(chunk.to(device), "world").cpu()
            writer.write(as_bytes(received))
