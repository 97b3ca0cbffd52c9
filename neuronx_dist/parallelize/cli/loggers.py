"""Loggers of the trainer: any class with the methods of `LoggerBase`; TensorBoard and Weights & Biases here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ... import comm
from ...metrics.writers import TensorBoard
from .arg_parser import load_type

__all__ = ["LoggerBase", "TensorBoardLogger", "WandbLogger"]


class LoggerBase:
    """The methods that the trainer calls on every rank."""

    def setup(self, config: Mapping[str, Any]) -> None:
        """Receives the configuration of the run, as plain data, before training."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int, *, tag: str | None = None) -> None:
        """Receives figures of a step; `tag`: "train" or "val"."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Ends the log, after training."""


class TensorBoardLogger(LoggerBase):
    """Curves of rank 0, in the folder `root_dir/name/tag`, and the configuration beside them.

    Raises:
        ImportError: neither tensorboard nor tensorboardX is installed.
    """

    def __init__(self, name: str, root_dir: str) -> None:
        self.folder = Path(root_dir).expanduser() / (name or "")
        self._writers: dict[str, TensorBoard] = {}

    def setup(self, config: Mapping[str, Any]) -> None:
        if _is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.json").write_text(json.dumps(config, indent=1))

    def log_metrics(self, metrics: Mapping[str, Any], step: int, *, tag: str | None = None) -> None:
        if _is_first():
            tag = tag or ""
            self._writers[tag] = self._writers.get(tag) or TensorBoard(self.folder / tag)
            self._writers[tag](step, metrics)

    def finalize(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()


class WandbLogger(LoggerBase):
    """A run of Weights & Biases, on rank 0; the arguments are those of `wandb.init`.

    Raises:
        RuntimeError: wandb is not installed.
    """

    def __init__(self, **arguments: Any) -> None:
        self._init = partial(load_type("wandb.init"), **arguments) if _is_first() else None
        self._run: Any = None

    def setup(self, config: Mapping[str, Any]) -> None:
        self._run = self._init and self._init(config=dict(config))

    def log_metrics(self, metrics: Mapping[str, Any], step: int, *, tag: str | None = None) -> None:
        if self._run is not None:
            self._run.log({f"{tag}/{name}" if tag else name: value for name, value in metrics.items()}, step=step)

    def finalize(self) -> None:
        if self._run is not None:
            self._run.finish()


def _is_first() -> bool:
    return not comm.is_initialized() or comm.rank("world") == 0
