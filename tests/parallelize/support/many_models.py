"""Models of many packages in layouts of many policies, beside one process: the table of docs/parallelize-models.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from neuronx_dist.parallelize import EmittedProgramError
from neuronx_dist.program.recording import TracingError
from tests.hf.every_plan import inputs_of, model_of
from tests.parallelize.support import matrix, models
from tests.shard_tensor.support.model_of import Model
from tests.shard_tensor.support.models import PACKAGES
from tests.shard_tensor.support.outside_models import load, made
from tests.support.architectures import Architecture
from tests.support.more_architectures import OF_TRANSFORMERS
from tests.support.paths import ROOT

Made = tuple[nn.Module, dict[str, Any]]
PAGE = ROOT / "docs" / "parallelize-models.md"
COLUMNS = {
    "dp2": "dp, 2",
    "dp4": "dp, 4",
    "tp2": "tp, 2",
    "tp4": "tp, 4",
    "pp2": "pp, 2",
    "pp4": "pp, 4",
    "autodist2": "autodist, 2",
    "autodist4": "autodist, 4",
    "pp2 interleaved": "hybrid, 2",
    "pp2 tp2": "hybrid, 4",
}
"""Titles of layouts of `matrix.LAYOUTS`: policy and ranks."""
OUTSIDE = ("timm", "torchvision", "vit_pytorch", "x_transformers", "diffusers")
OTHERS_OF_TRANSFORMERS = (
    "PerceiverModel",
    "SwinForImageClassification",
    "SegformerForSemanticSegmentation",
    "ConvNextForImageClassification",
    "DPTForSemanticSegmentation",
)

PLANS = "plans"
"""The package of tiny models of all configurations of transformers with a tensor-parallel plan."""

LEFT_OUT = ("CrossFormer",)
"""It runs in float32 only, where gradients of its biases before softmax, zero in exact numbers, are rounding alone."""


def _architecture(architecture: Architecture) -> Made:
    model: Any = architecture.make(2)
    return model, dict(architecture.inputs())


def _outside(model: Model) -> Made:
    """A module, and arguments by the names of its forward."""
    module = made(model)
    torch.manual_seed(1)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in model.inputs().items()}
    names = [*inspect.signature(module.forward).parameters]
    return module, {names[int(name)] if name.isdigit() else name: x for name, x in inputs.items()}


def _table() -> dict[tuple[str, str], Callable[[], Made]]:
    table: dict[tuple[str, str], Callable[[], Made]] = {}
    for architecture in OF_TRANSFORMERS:
        table["transformers", architecture.name] = lambda architecture=architecture: _architecture(architecture)
    others = {name: PACKAGES["transformers"][name] for name in OTHERS_OF_TRANSFORMERS}
    for package in ("transformers", *OUTSIDE):
        for name, model in (others if package == "transformers" else PACKAGES[package]).items():
            if name not in LEFT_OUT:
                table[package, name] = lambda model=model: _outside(model)
    for name in models.MODELS:
        table["hand-written", name] = lambda name=name: models.model(name)
    return table


MANY = _table()
"""Functions that make a model in float64 and its arguments, by package and name."""


def installed(package: str) -> bool:
    """Imports a package; returns False if it is not installed. torchvision first: transformers imports it."""
    return load("transformers" if package in ("hand-written", PLANS) else package)


class _Float32(TorchDispatchMode):
    """Notes whether a function returns float32."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            self.seen |= isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.complex64)
        return result


def _made(package: str, name: str) -> Made:
    if package == PLANS:
        model = model_of(name)
        return model, inputs_of(model)
    return MANY[package, name]()


def case_of(package: str, name: str) -> matrix.Case:
    """A module, its arguments, and the tolerance: float32's if forward computes anything in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, arguments = _made(package, name)
        config: Any = getattr(module, "config", None)
        if package == "transformers" and hasattr(config, "use_cache"):
            config.use_cache = False
        state = {key: x.clone() for key, x in module.state_dict().items()}
        with _Float32() as mode, torch.no_grad():
            module(**arguments)
        module.load_state_dict(state)
    return matrix.Case(module, arguments, 1e-5 if mode.seen else 1e-10)


def cell(package: str, name: str, layout: str, folder: Path) -> str:
    """Returns "exact", or "refused" and the class of the error.

    Raises:
        AssertionError: losses, gradients, or weights after 3 steps of SGD differ from one process's.
        EmittedProgramError, or an error that is not about the module: a bug.
    """
    installed(package)
    key, division = f"{package}/{name}", matrix.LAYOUTS[layout]
    matrix.add_case(key, lambda: case_of(package, name))
    wanted = matrix.in_one_process(key, "SGD", division.units, division.micro)
    try:
        ranks = matrix.on_threads(key, layout, folder, optimizers=["SGD"])
    except EmittedProgramError:
        raise
    except (ValueError, TracingError) as error:  # PlanError is a ValueError
        return f"refused, {type(error).__name__}"
    matrix.assert_same([runs[0] for runs in ranks], wanted, matrix.case(key).tolerance)
    return "exact"


def rows() -> dict[tuple[str, str], list[str]]:
    """Returns the cells of the page, by package and model."""
    found = re.findall(r"^\| `([\w-]+)` \| (.+?) \| (.+) \|$", PAGE.read_text(), re.M)
    return {(package, name): cells.split(" | ") for package, name, cells in found}


def others() -> list[str]:
    """Returns the configurations that the page names as exact under tp over two ranks."""
    return re.findall(r"`(\w+Config)`", PAGE.read_text())


def write(package: str, name: str, found: list[str]) -> None:
    """Writes a row of the page, in the order of `MANY`."""
    table = rows() | {(package, name): found}
    head, _, rest = PAGE.read_text().partition("| package |")
    _, _, tail = rest.partition("|\n\n")  # the page's sections behind the table
    titles = ["package", "model", *COLUMNS.values()]
    lines = [f"| `{key[0]}` | {key[1]} | {' | '.join(table[key])} |" for key in MANY if key in table]
    text = "\n".join([f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}", *lines])
    PAGE.write_text(f"{head}{text}\n\n{tail}")
