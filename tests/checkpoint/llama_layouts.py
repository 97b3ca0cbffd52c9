"""A small Llama that is trained, saved and loaded in layouts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from neuronx_dist import comm, hf
from neuronx_dist.checkpoint.dcp import reading, writing
from neuronx_dist.checkpoint.run_state import collect
from neuronx_dist.checkpoint.storage import LocalStorage
from tests.support import llama_training
from tests.support.llama_training import Case, Options

STEPS = 2  # before the checkpoint, and after it


@dataclass(frozen=True)
class Layout(Case):
    """A layout of one and the same model, of four layers."""

    optimizer: str = "zero1"
    heads: str = "replicated"  # 6 query and 2 key/value heads: at tp 4 these are on two ranks, and groups are padded
    tied: bool = True

    @property
    def options(self) -> Options:
        return Options(self.heads, self.tied, 4, self.labels, self.clip, self.dtype)


class Folder(LocalStorage):
    """Files that are not synced."""

    def write(self, path: str, chunks: Any) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)


def make(layout: Layout, zeros: bool = False) -> tuple[Any, Any]:
    """A model and its AdamW."""
    options = layout.options
    model = llama_training.build(layout)
    state = llama_training.initial_state(options.heads, options.tied, options.layers, options.dtype)
    hf.load_pretrained(model, {name: torch.zeros_like(value) for name, value in state.items()} if zeros else state)
    model.train()
    return model, optimizer_of(layout, model)


def optimizer_of(layout: Layout, model: Any) -> Any:
    params = [param for param in model.local_parameters() if param.requires_grad]
    return llama_training.make_optimizer(layout, "adamw", params)


def steps(layout: Layout, model: Any, optimizer: Any, first: int, count: int = STEPS) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = llama_training.run_train(layout, model, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save(model: Any, optimizer: Any, root: Path, folder: str = "tag") -> None:
    writing.write(writing.plan(collect(model, optimizer)), Folder(root), folder)
    comm.barrier()


def load(model: Any, optimizer: Any, root: Path, folder: str = "tag", **options: Any) -> None:
    reading.load(Folder(root), folder, model, optimizer, **options)


def train_and_save(layout: Layout, root: Path) -> list[float]:
    """Trains, saves, and goes on; the losses of what comes after the checkpoint."""
    model, optimizer = make(layout)
    steps(layout, model, optimizer, 0)
    save(model, optimizer, root)
    return steps(layout, model, optimizer, STEPS)


def resume(layout: Layout, root: Path) -> list[float]:
    """Loads into a new model and goes on."""
    model, optimizer = make(layout, zeros=True)
    load(model, optimizer, root)
    return steps(layout, model, optimizer, STEPS)


def load_and_save(layout: Layout, source: Path, target: Path) -> None:
    model, optimizer = make(layout, zeros=True)
    load(model, optimizer, source)
    save(model, optimizer, target)


def load_each(layout: Layout, sources: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """State of this rank after loading each of several checkpoints, by key."""
    model, _ = make(layout, zeros=True)
    results = {}
    for name, root in sources.items():
        with torch.no_grad():
            for param in model.local_parameters():
                param.zero_()
        optimizer = optimizer_of(layout, model)
        load(model, optimizer, root)
        state = collect(model, optimizer)
        results[name] = {key: tensor.tensor.clone() for key, tensor in state.tensors.items()}
        for number, group in enumerate(state.groups or []):
            results[name] |= {f"{number}.{option}": torch.tensor(group[option]) for option in ("lr", "weight_decay")}
    return results


def whole(root: Path, folder: str = "tag") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as torch.distributed.checkpoint reads them."""
    catalog = reading.read_catalog(Folder(root), folder)
    tensors = {key: torch.full(tensor.shape, 7).to(tensor.dtype) for key, tensor in catalog.tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=str(root / folder), no_dist=True)
    return tensors
