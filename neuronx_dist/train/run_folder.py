"""The folder of a run: which one it is, whether it may be written, whether all hosts see it."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from .. import comm
from ..checkpoint.api import has_checkpoint
from ..checkpoint.errors import CheckpointError
from ..checkpoint.storage import open_storage
from ..checkpoint.tags import CheckpointFolder
from ..planning.layout import Layout
from . import rank_exit
from .run_checkpoints import folder_of

__all__ = ["check_resume", "choose_folder", "make_folder"]

_PATIENCE = 10.0  # seconds until another host sees a new folder; network file systems remember what was not there


def check_resume(args: Namespace) -> None:
    """Refuses `--resume` and `--resume TAG` of a checkpoint that is not there.

    Raises:
        ValueError: there is no complete checkpoint, or none of this tag.
    """
    if args.resume in (None, "auto"):
        return
    if not has_checkpoint(folder_of(args)):
        raise ValueError(f"--resume: there is no complete checkpoint in {folder_of(args)}; --resume auto starts anew")
    if args.resume:
        try:
            CheckpointFolder(open_storage(folder_of(args))).find(args.resume)
        except CheckpointError as error:
            raise ValueError(f"--resume {args.resume}: {error}") from None


def choose_folder(args: Namespace, layout: Layout) -> list[Any]:
    """Decides on `--out` and `--resume` for all ranks, which all call it; returns their launches.

    Ranks that a launcher has started again go on with the run of their launch, whatever the flags say. Rank 0 looks,
    and knows which hosts are in the job: of those some may have been started anew.

    Raises:
        ValueError: on all ranks: the folder cannot be that of this run.
    """
    everywhere = comm.gather_objects((rank_exit.launch(), rank_exit.is_restart()))
    launches = [list(launch) for launch in dict.fromkeys(tuple(launch) for launch, _ in everywhere if launch)]
    answer: tuple[str, str | None, str | None] | None = None
    if rank_exit.launcher_rank() == 0:
        try:
            answer = (*_choice(args, layout, launches, any(again for _, again in everywhere)), None)
        except (ValueError, OSError, CheckpointError) as error:
            answer = ("", None, str(error))
    args.out, args.resume, refusal = comm.broadcast_object(answer)
    if refusal:
        raise ValueError(refusal)
    return launches


def make_folder(args: Namespace) -> None:
    """Makes the folder, where it is missing; all ranks call it.

    Raises:
        ValueError: on all ranks: it cannot be written, or a host does not see it.
    """
    out = Path(args.out)
    refusal = None
    if rank_exit.launcher_rank() == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out) as file:
                file.write(b"\n")
        except OSError as error:
            refusal = f"--out {out} cannot be written: {error.strerror}"
    refusal = comm.broadcast_object(refusal)
    if refusal is None:
        deadline = time.monotonic() + _PATIENCE
        while not out.is_dir() and time.monotonic() < deadline:
            time.sleep(0.05)
        blind = [rank for rank, sees in enumerate(comm.gather_objects(out.is_dir())) if not sees]
        if blind:
            refusal = (
                f"rank 0 has made {out.absolute()}, and on the host of rank {blind[0]} it is not there: give an --out "
                "that all hosts share"
            )
    if refusal:
        raise ValueError(refusal)


def _choice(args: Namespace, layout: Layout, launches: list[Any], again: bool) -> tuple[str, str | None]:
    """`--out` and `--resume` of this run."""

    def is_own(out: Path) -> bool:
        """Whether a run of this launch is there. With a wrapper around the script each start has another parent."""
        return any(
            one in launches or (again and one[0] != "none" and one[0] in [launch[0] for launch in launches])
            for one in _launches_of(out)
        )

    if args.out is None:
        folders: list[Path] = []
        while (free := Path(_default(len(folders) + 1))).exists():
            folders.append(free)
        ours = [out for out in folders if is_own(out)]
        return (str(ours[-1]), "auto") if ours else (str(free), None)
    out = Path(args.out)
    if is_own(out):
        return args.out, "auto"
    if args.resume is None:
        layout.check(out=out)
    elif args.resume == "auto":
        if out.exists() and not (out / "run.json").is_file() and any(out.iterdir()):
            raise ValueError(f"--resume auto: {out} is not the folder of a run, it has no run.json; give another --out")
        if (out / "model").exists() and not has_checkpoint(folder_of(args)):
            raise ValueError(f"--resume auto: {out} has a run that has ended, and no checkpoint; give another --out")
    else:
        check_resume(args)
    return args.out, args.resume


def _default(number: int) -> str:
    return f"runs/llama-{number}" if number > 1 else "runs/llama"


def _launches_of(out: Path) -> list[Any]:
    """The launches that the run of a folder has had."""
    try:
        record = json.loads((out / "run.json").read_text())
        return [launch for entry in (record, *record.get("resumed", ())) for launch in entry["launches"]]
    except (OSError, ValueError, KeyError):
        return []
