"""A model of another package in one process, and on ranks that hold parts of its inputs: results and all gradients."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Shard, ShardTensor, distribute_module, distribute_tensor, fallback
from tests.shard_tensor.support.model_of import Model
from tests.shard_tensor.support.models import PACKAGES
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "shard-tensor-models.md"
TOLERANCE = 1e-10
ROWS, COLUMNS = 0, 1


class Layout(NamedTuple):
    """A mesh, and for each of its dims the dim of the inputs that it cuts, into which shares of 16."""

    mesh: tuple[int, ...]
    cuts: tuple[tuple[int, tuple[int, ...]], ...]


LAYOUTS = {
    "2 ranks": Layout((2,), ((ROWS, (11, 5)),)),
    "3 ranks, one empty": Layout((3,), ((COLUMNS, (9, 0, 7)),)),
    "2 x 2": Layout((2, 2), ((ROWS, (7, 9)), (COLUMNS, (11, 5)))),
    "2 x 2, one empty": Layout((2, 2), ((COLUMNS, (16, 0)), (ROWS, (10, 6)))),
}

_libraries = []  # a library of operators lasts as long as its object


def load(package: str) -> bool:
    """Imports a package; returns False if it is not installed.

    torchvision's wheels for CUDA do not load their operators beside a torch for CPUs, which no model here calls, but
    which torchvision describes as it is imported.
    """
    if importlib.util.find_spec(package) is None:
        return False
    if importlib.util.find_spec("torchvision") is not None and not _libraries:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")  # noqa: TOR901
            _libraries.append(library)
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module(package)
    return True


class Expected(NamedTuple):
    """Inputs of a model, and its results and gradients in one process."""

    inputs: dict[str, torch.Tensor]
    results: list[torch.Tensor]
    weights: list[torch.Tensor]  # of the loss, a weighted sum of the results
    grads: dict[str, torch.Tensor]


@contextmanager
def in_float64() -> Iterator[None]:
    """Makes float64 of a model's casts to float32, whose rounding would hide differences."""
    names = {"float32": torch.float64, "float": torch.float64, "cfloat": torch.cdouble, "complex64": torch.cdouble}
    with mock.patch.multiple(torch, **names), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def made(model: Model) -> nn.Module:
    """Returns the module in training, in float64 and without dropout, with parameters of which none is zero."""
    torch.manual_seed(0)
    module = model.make().double().train()
    for each in module.modules():
        for name in ("p", "drop_prob", "dropout_prob"):
            if isinstance(getattr(each, name, None), float):
                setattr(each, name, 0.0)
    for param in module.parameters():
        param.data = param.data.to(torch.cdouble) if param.is_complex() else param.data
        param.data.add_(torch.randn_like(param) * 0.05)
    return module


def called(model: Model, module: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    by_name = {name: x for name, x in inputs.items() if not name.isdigit()}
    result = module(*(x for name, x in inputs.items() if name.isdigit()), **by_name)
    result = result if model.output is None else getattr(result, model.output)
    return [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]


def differentiate(results: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    losses: list[Any] = [(y * w).sum() for y, w in zip(results, weights, strict=True) if y.requires_grad]
    sum(losses).backward()


def gradients(module: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {**dict(module.named_parameters()), **inputs}
    return {name: x.grad for name, x in leaves.items() if x.grad is not None}


def expected_of(model: Model) -> Expected:
    module = made(model)
    torch.manual_seed(1)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in model.inputs().items()}
    leaves = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    with in_float64():
        results = called(model, module, leaves)
        weights = [torch.randn(y.shape, dtype=torch.float64) for y in results]
        differentiate(results, weights)
    return Expected(inputs, [y.detach() for y in results], weights, gradients(module, leaves))


def cut(n: int, shares: Sequence[int]) -> tuple[int, ...]:
    bounds = [n * sum(shares[:i]) // 16 for i in range(len(shares) + 1)]
    return tuple(high - low for low, high in zip(bounds, bounds[1:]))


def distributed(x: torch.Tensor, dims: tuple[int, int], layout: Layout, mesh: DeviceMesh) -> ShardTensor:
    return distribute_tensor(
        x.clone().requires_grad_(x.is_floating_point()),
        mesh,
        [Shard(dims[which]) for which, _ in layout.cuts],
        sizes=[cut(x.shape[dims[which]], shares) for which, shares in layout.cuts],
        src=None,
    )


def difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    actual = (actual.full_tensor() if isinstance(actual, ShardTensor) else actual).detach()
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} for {tuple(expected.shape)}"
    off, scale = (actual - expected).norm().item(), max(expected.norm().item(), 1.0)
    return "" if off <= TOLERANCE * scale else f"off by {off} of {scale}"


def compared(model: Model, modules: Sequence[nn.Module], layout: Layout, expected: Expected) -> str:
    """Computes a model on this rank, and returns what differs, or nothing."""
    mesh = DeviceMesh("cpu", torch.arange(len(modules)).view(layout.mesh))
    module = distribute_module(modules[mesh.get_rank()], mesh)
    inputs = {
        name: distributed(x, model.dims[name], layout, mesh) if name in model.dims else x.clone()
        for name, x in expected.inputs.items()
    }
    results = called(model, module, inputs)
    differentiate(results, expected.weights)
    for i, (y, other) in enumerate(zip(results, expected.results, strict=True)):
        if text := difference(y, other):
            return f"result {i}: {text}"
    grads = gradients(module, inputs)
    for name, grad in expected.grads.items():
        if name in expected.inputs and name not in model.dims:
            continue
        if name not in grads:
            if grad.any():
                return f"{name} has no gradient"
        elif text := difference(grads[name], grad):
            return f"gradient of {name}: {text}"
    return ""


def differs(model: Model, layout: Layout, expected: Expected) -> str:
    """Computes a model on ranks that are threads, and returns what differs from one process, or nothing."""
    count = torch.Size(layout.mesh).numel()
    modules = [made(model) for _ in range(count)]
    with warnings.catch_warnings(), fallback("gather"), in_float64():
        warnings.simplefilter("ignore")
        texts = threads.run(Mesh(count), lambda: compared(model, modules, layout, expected), timeout=300.0)
    return next((f"on rank {i}: {text}" for i, text in enumerate(texts) if text), "")


def cells(package: str, name: str) -> list[str]:
    """Returns "exact", or the error of a refusal, for each layout.

    Raises:
        AssertionError: values differ from one process's.
    """
    model = PACKAGES[package][name]
    expected = expected_of(model)
    found = []
    for title, layout in LAYOUTS.items():
        try:
            text = differs(model, layout, expected)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            found.append(f"refused, {type(error).__name__}")
            continue
        assert not text, f"{name} on {title}: {text}"
        found.append("exact")
    return found


def rows() -> dict[tuple[str, str], list[str]]:
    """Returns the cells of the page, by package and model."""
    found = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", PAGE.read_text(), re.M)
    return {(package, name): cells.split(" | ") for package, name, cells in found}


def write(package: str, name: str, found: list[str]) -> None:
    """Writes a row of the page, among those of the models that there are."""
    table = rows() | {(package, name): found}
    lines = [
        f"| `{package}` | {name} | {' | '.join(table[package, name])} |"
        for package, models in PACKAGES.items()
        for name in models
        if (package, name) in table
    ]
    head, _, _ = PAGE.read_text().partition("| package |")
    titles = ["package", "model", *LAYOUTS]
    table_head = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    PAGE.write_text(head + "\n".join([*table_head, *lines]) + "\n")
