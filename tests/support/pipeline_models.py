"""Small models that are hard on a pipeline, and what one process computes with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import NxDPPModel

VOCAB, HIDDEN, SEQ, BATCH = 13, 8, 6, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        if mask is not None:
            y = mask @ y
        return x + y


class Model(nn.Module):
    """Embedding, blocks, norm and head. Subclasses say what happens between."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.loss(self.body(self.embed(ids)), labels)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make(model_class: Callable[..., nn.Module] = Model, **options: Any) -> nn.Module:
    """A model in float64, with the same values every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(**options).double()


def batch(rows: int = BATCH, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, SEQ), generator=generator)
    labels = torch.randint(0, VOCAB, (rows, SEQ), generator=generator)
    return {"ids": ids, "labels": labels}


def pick(output: Any, spec: Any) -> torch.Tensor:
    """The loss in an output, written independently of the code under test."""
    if spec is True:
        return output
    if isinstance(spec, dict):
        return output[next(key for key, value in spec.items() if value)]
    return output[list(spec).index(True)]


def cut(inputs: dict[str, Any], microbatches: int) -> list[dict[str, Any]]:
    def piece(x: Any, index: int) -> Any:
        return x.chunk(microbatches)[index] if isinstance(x, torch.Tensor) and x.ndim else x

    return [{key: piece(value, index) for key, value in inputs.items()} for index in range(microbatches)]


def reference(
    model: nn.Module, inputs: dict[str, Any], microbatches: int = 1, spec: Any = True
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss over the microbatches and its gradients, in one process."""
    model = copy.deepcopy(model)
    pieces = [copy.deepcopy(piece) for piece in cut(inputs, microbatches)]
    total = torch.stack([pick(model(**piece), spec) for piece in pieces]).mean()
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return total.detach(), grads


def on_ranks(
    mesh: Mesh,
    model: nn.Module,
    use: Callable[[NxDPPModel], Any],
    example: dict[str, Any] | None = None,
    timeout: float = 60.0,
    **options: Any,
) -> list[Any]:
    """`use(pipeline model)` on every rank of a world of threads, each with its own copy of `model`.

    With example inputs the model is cut by hand, at `pipeline_cuts`.
    """
    options = {"transformer_layer_cls": Block, "auto_partition": True, **options}
    cuts = options.pop("pipeline_cuts", []) if example is not None else []

    def main() -> Any:
        pipeline = NxDPPModel(copy.deepcopy(model), **options)
        if example is not None:
            pipeline.trace(kwargs=example)
            for cut in cuts:
                pipeline.cut_pipeline_stage(cut)
            pipeline.partition()
        return use(pipeline)

    return comm.threads.run(mesh, main, timeout=timeout)


def train(
    mesh: Mesh, model: nn.Module, inputs: dict[str, Any], microbatches: int = 1, spec: Any = True, **options: Any
) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """Losses and local gradients by rank, after one step."""

    def use(pipeline: NxDPPModel) -> Any:
        loss = pipeline.run_train(**copy.deepcopy(inputs))
        assert pipeline.peak_in_flight <= pipeline.num_stages - pipeline.stage
        grads = {name: p.grad for name, p in pipeline.local_named_parameters() if p.grad is not None}
        return loss, grads

    options = {"num_microbatches": microbatches, "output_loss_value_spec": spec, "input_names": list(inputs), **options}
    results = on_ranks(mesh, model, use, **options)
    return [loss for loss, _ in results], [grads for _, grads in results]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||a - b|| / ||b||, and ||a|| where b is zero."""
    return float((actual - expected).norm() / (expected.norm() or 1.0))


def check_parity(
    mesh: Mesh, model: nn.Module, inputs: dict[str, Any], microbatches: int = 1, spec: Any = True, **options: Any
) -> None:
    """Loss and every gradient, against one process, to 1e-10. Every parameter is on some stage."""
    loss, grads = reference(model, inputs, microbatches, spec)
    losses, found = train(mesh, model, inputs, microbatches, spec, **options)
    for rank, value in enumerate(losses):
        if mesh.coordinate("pp", rank) == mesh.pp - 1:
            assert error(value, loss) < 1e-10
        else:
            assert value is None
    for rank, local in enumerate(found):
        for name, grad in local.items():
            assert error(grad, grads[name]) < 1e-10, (rank, name)
    names = {name for local in found for name in local}
    canonical = {name for name, p in model.named_parameters() if name in grads}
    assert canonical <= names <= set(grads)
