"""Recordings of models that are hard to cut, and the stages that they are cut into, as a file.

`stages.txt` has what was reviewed: each recorded call with all that is known of it, what each stage runs and sends, and
the steps that it becomes. NXD_UPDATE_STAGES=1 writes it anew. That stages compute what the model does, parity shows.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import mappings
from neuronx_dist.pipeline.cut.balance import weights_by_recording, weights_by_registration
from neuronx_dist.pipeline.cut.placement import place_by_recording, place_by_registration
from neuronx_dist.pipeline.cut.splitting import split
from neuronx_dist.pipeline.cut.stage import StageFunction
from neuronx_dist.program.recorder import record
from neuronx_dist.program.recording import Recording, info_of
from neuronx_dist.spmd import random
from tests.pipeline.test_parity import (
    Attributes,
    Buffers,
    ChangedInPlace,
    Collected,
    Containers,
    DictOutput,
    Hooked,
    Masks,
    NoGrad,
    OwnFunction,
    PairBlock,
    ReadAlone,
    SharedLayer,
    Skip,
    Transposed,
    WeightOutside,
)
from tests.support.pipeline_models import Block, Model, batch, make

FILE = Path(__file__).parent / "stages.txt"


class Regions(Model):
    """Autocast, checkpoints of each kind, random numbers, a collective, and calls that are made for their effect."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.layers[0](x)) + torch.rand_like(x)
        x.register_hook(lambda grad: grad)
        with torch.autocast("cpu", torch.bfloat16):
            x = x + x @ x.mT @ x
        x = checkpoint(lambda y: self.layers[1](y).relu() * 2, x, use_reentrant=False)
        x = checkpoint(lambda y: self.layers[2](y).neg() * 2, x, use_reentrant=True)
        x = random.checkpoint(lambda y: (y * 3, y.sum()), x)[0]
        x = mappings.copy_to_tensor_model_parallel_region(x) + 1
        y, _ = x.topk(2, -1)
        x[..., :2] = y
        return self.layers[3](x[:, torch.arange(x.shape[1])])


def _spec(spec: Any) -> str:
    if spec is None:
        return "-"
    gradient = " grad" if spec.requires_grad else ""
    return f"{list(spec.shape)} {list(spec.stride)} {str(spec.dtype).removeprefix('torch.')}{gradient}"


class _Memory(dict[int, str]):
    """Names of memory, in the order in which they are asked for."""

    def __missing__(self, storage: int) -> str:
        self[storage] = f"m{len(self)}"
        return self[storage]

    def of(self, storages: Any) -> list[str]:
        return sorted(self[storage] for storage in storages if storage in self)


def _text(x: Any) -> str:
    if isinstance(x, fx.Node):
        return x.name
    if isinstance(x, (list, tuple)):
        return f"({', '.join(map(_text, x))})"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in x.items())}}}"
    if isinstance(x, slice):
        return f"{_text(x.start)}:{_text(x.stop)}:{_text(x.step)}"
    if isinstance(x, (bool, int, float, str, torch.dtype)) or x is None:
        return str(x)
    return f"<{type(x).__name__}>"


def _calls(recording: Recording) -> Iterator[str]:
    memory = _Memory()
    for node in recording.graph.nodes:
        if node.op == "output":
            continue
        info = info_of(node)
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
        words = [f"{node.name} = {info.kind} {target}{_text(node.args)}{_text(node.kwargs) if node.kwargs else ''}"]
        words.append(f"{_spec(info.spec)}{f' in {memory[info.storage]}' if info.storage is not None else ''}")
        for name, value in (
            ("after", sorted(other.name for other in info.after)),
            ("writes", memory.of(info.writes)),
            ("buffers", len(info.buffers)),
            ("repeatable", info.repeatable),
            ("random", info.random),
            ("flops", info.flops),
            ("without gradients", not info.grad),
            ("autocast", info.autocast),
            ("checkpoint", None if info.checkpoint is None else str(info.checkpoint)),
            ("value", None if info.constant is None else info.constant.flatten()[:4].tolist()),
            ("leaf", node.meta.get("leaf")),
        ):
            if value:
                words.append(f"{name} {value}")
        line = info.where.rpartition(":")
        words.append(Path(line[0]).name if line[0] else info.where)
        yield "  " + "; ".join(map(str, words))
    yield f"  result {_text(recording.outputs)} as {type(recording.result).__name__}"


def _stages(recording: Recording, cuts: list[str]) -> Iterator[str]:
    for number, plan in enumerate(split(recording, cuts)):
        yield f"  stage {number} of {cuts}: {' '.join(node.name for node in plan.nodes)}"
        yield f"    received {_text(plan.received)}, of them copied {sorted(node.name for node in plan.copied)}"
        yield f"    sent {_text(plan.sent)}, outputs {_text(plan.outputs)}, inputs {StageFunction(plan).input_leaves}"
        stage = StageFunction(plan)
        for item in vars(stage)["_sequence"]:
            steps = getattr(item, "steps", [item])
            if steps != [item]:
                yield f"    checkpoint: reads {item.reads}, results {item.results}, frees {item.free}"
            for step in steps:
                surround = f", in {step.surround.__name__}" if step.surround is not None else ""
                nested = ", nested" if step.nested else ""
                yield f"    {step.node.name} -> {step.out}, frees {sorted(step.free)}{nested}{surround}"
        yield f"    first {sorted(vars(stage)['_first'])}, sends {vars(stage)['_sent']}"


def _holders(placement: Any) -> str:
    tables = (placement.leaves, placement.direct)
    return " | ".join(", ".join(f"{name} {sorted(stages)}" for name, stages in table.items()) for table in tables)


def _all() -> Iterator[str]:
    for model_class, more in (
        (Skip, [["layers.0", "layers.2"]]),
        (WeightOutside, []),
        (ReadAlone, []),
        (SharedLayer, []),
        (DictOutput, []),
        (Masks, []),
        (ChangedInPlace, [["layers.0"]]),
        (Collected, []),
        (NoGrad, []),
        (Buffers, []),
        (Containers, []),
        (OwnFunction, []),
        (Transposed, []),
        (Attributes, []),
        (Hooked, []),
        (Regions, []),
    ):
        model = make(model_class)
        leaf = PairBlock if model_class is Containers else Block
        recording = record(model, batch(2), [leaf])
        yield f"== {model_class.__name__}"
        yield from _calls(recording)
        for cuts in [["layers.2"], *more]:
            yield from _stages(recording, cuts)
        cuts = ["layers.2"]
        yield f"  held {_holders(place_by_recording(model, split(recording, cuts), cuts, [leaf]))}"
        yield f"  by registration {_holders(place_by_registration(model, cuts, [leaf]))}"
        for weights in (weights_by_recording(model, recording), weights_by_registration(model, [leaf])):
            yield "  weights " + ", ".join(f"{name} {flops} {count}" for name, flops, count in weights)


@pytest.mark.slow
def test_stages_are_as_reviewed() -> None:
    with comm.as_rank(Mesh(2, tp=2), 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        now = [*_all()]
    if os.environ.get("NXD_UPDATE_STAGES"):
        FILE.write_text("\n".join(now) + "\n")
    assert now == FILE.read_text().splitlines()
