"""Writers of a run's figures: callables `(step, values)`, as any function that logs can be, with a `close`."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["JsonLines", "TensorBoard"]


class JsonLines:
    """A file with one strict JSON object a step, which is whole at any moment, also when the process is killed.

    JSON has no NaN: such a value is null, and `"nonfinite": {"loss": "nan"}` says which one it was; in nested values
    it has a path (`"norms.1"`).
    A disk that is full ends no run: what could not be written is written with the next step.

    Args:
        path: of the file. Ranks need files of their own: `metrics.jsonl`, `metrics.rank1.jsonl`.
        after: the step from which a run resumes: objects of later steps are removed. 0: the file begins anew.
        warn: gets a line of text when a write fails for the first time; None: silent.

    Attributes:
        rows: the objects of the steps up to `after`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, after: int = 0, warn: Callable[[str], Any] | None = None
    ) -> None:
        self.path, self.warn = Path(path), warn
        self.rows = _rows(self.path, after)
        self._waiting = b""
        self._failed = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")  # a reader finds the old file or the new one
        part.write_text("".join(_line(row) for row in self.rows))
        part.replace(self.path)
        self._file: IO[bytes] = open(self.path, "r+b", buffering=0)  # noqa: SIM115
        self._size = self.path.stat().st_size  # of the whole lines

    def __call__(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends the values of a step."""
        self._waiting += _line({"step": step, **values}).encode()
        self._write()

    def close(self) -> None:
        """Tries once more to write what is waiting, and closes the file."""
        if not self._file.closed:
            self._write()
            self._file.close()

    def _write(self) -> None:
        try:
            self._file.truncate(self._size)  # what an attempt has left that failed in the middle of a line
            self._file.seek(self._size)
            self._file.write(self._waiting)
        except OSError as error:
            if not self._failed and self.warn is not None:
                self.warn(f"warning: training goes on, {self.path.name} waits: {error}")
            self._failed = True
        else:
            self._size += len(self._waiting)
            self._waiting = b""


class TensorBoard:
    """Curves for TensorBoard, by the package that is installed: tensorboard or tensorboardX.

    Args:
        folder: for the files, of one rank.
        after: the step from which a run resumes; the curves of later steps are hidden.

    Raises:
        ImportError: neither package is installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, after: int = 0) -> None:
        self._writer = _summary_writer()(os.fspath(folder), purge_step=after + 1 if after else None)

    def __call__(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _summary_writer() -> Any:
    for package in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(package).SummaryWriter
        except ImportError:
            pass
    raise ImportError("TensorBoard's files need a package: pip install tensorboardX")


def _line(row: Mapping[str, Any]) -> str:
    bad: dict[str, str] = {}
    strict = {name: _strict(value, name, bad) for name, value in row.items()}
    return json.dumps({**strict, **({"nonfinite": bad} if bad else {})}, allow_nan=False) + "\n"


def _strict(value: Any, name: str, bad: dict[str, str]) -> Any:
    """Returns a value with null for numbers that are not finite, which are added to `bad` by their names."""
    if isinstance(value, Mapping):
        return {key: _strict(item, f"{name}.{key}", bad) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item, f"{name}.{index}", bad) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        bad[name] = str(value)
        return None
    return value


def _rows(path: Path, upto: int) -> list[dict[str, Any]]:
    """The objects up to a step; what a killed run has left of a line is none."""
    rows = []
    for line in path.read_text().splitlines() if upto and path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] <= upto:
            row.update({name: float(text) for name, text in row.pop("nonfinite", {}).items() if name in row})
            rows.append(row)
    return rows
