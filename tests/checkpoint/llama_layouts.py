"""A small Llama that is trained, saved and loaded in layouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neuronx_dist import comm, hf
from neuronx_dist.checkpoint import files, reading
from neuronx_dist.checkpoint.state import collect
from tests.support import llama_training
from tests.support.llama_training import Case, Options

STEPS = 2  # before the checkpoint, and after it


@dataclass(frozen=True)
class Layout(Case):
    """A layout of one and the same model, of four layers."""

    optimizer: str = "zero1"
    heads: str = "padded"  # 9 query and 3 key/value heads: padded at tp 2 and 4
    vocabulary_padding: bool = False

    @property
    def options(self) -> Options:
        return Options(self.heads, self.tied, 4, self.labels, self.clip, self.dtype)


class Folder:
    """A storage for files of a local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, chunks: Any) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def map(self, path: str) -> memoryview:
        return memoryview(bytearray((self.root / path).read_bytes()))


def make(layout: Layout, seed_weights: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its AdamW."""
    options = layout.options
    model = llama_training.build(layout)
    state = llama_training.initial_state(options.heads, options.tied, options.layers, options.dtype)
    if not seed_weights:
        state = {name: torch.zeros_like(value) for name, value in state.items()}
    hf.load_pretrained(model, state)
    model.train()
    params = [param for param in model.local_parameters() if param.requires_grad]
    return model, llama_training.make_optimizer(layout, "adamw", params)


def steps(layout: Layout, model: Any, optimizer: Any, first: int, count: int = STEPS) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = llama_training.run_train(layout, model, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save(model: Any, optimizer: Any, root: Path, folder: str = "tag") -> None:
    files.write(files.plan(collect(model, optimizer)), Folder(root), folder)
    comm.barrier()


def load(model: Any, optimizer: Any, root: Path, folder: str = "tag", **options: Any) -> None:
    reading.load(Folder(root), folder, model, optimizer, **options)


def save_run(layout: Layout, root: Path) -> list[float]:
    """Trains, saves, and goes on; the losses of what comes after the checkpoint."""
    model, optimizer = make(layout)
    steps(layout, model, optimizer, 0)
    save(model, optimizer, root)
    return steps(layout, model, optimizer, STEPS)


def resume(layout: Layout, root: Path) -> list[float]:
    """Loads into a new model and goes on."""
    model, optimizer = make(layout, seed_weights=False)
    load(model, optimizer, root)
    return steps(layout, model, optimizer, STEPS)


def resave(layout: Layout, root: Path, target: Path) -> None:
    """Loads, and saves again."""
    model, optimizer = make(layout, seed_weights=False)
    load(model, optimizer, root)
    save(model, optimizer, target)
