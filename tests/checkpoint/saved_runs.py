"""Runs that are saved on ranks as threads (test_api*.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from tests.checkpoint.small_run import Run

MESH = Mesh(4, tp=2)


def on_ranks(function: Callable[[], Any], mesh: Mesh = MESH) -> list[Any]:
    return threads.run(mesh, function)


def saved(folder: Path, *tags: str, **options: Any) -> None:
    """A run that was saved after each of so many steps."""

    def rank() -> None:
        run = Run()
        for tag in tags:
            run.train()
            run.save(folder, tag, **options)

    on_ranks(rank)
