"""A swapped model beside the one that it was made of: loss, logits and all gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import full_state_dict, swap
from neuronx_dist.mesh import Mesh
from tests.hf.every_plan import inputs_of, model_of
from tests.hf.models import error, sum_partial_gradients
from tests.support.more_architectures import OF_TRANSFORMERS

__all__ = ["AllInFloat64", "compare", "differences", "without_labels"]


class AllInFloat64(TorchFunctionMode):
    """Runs transformers' code without its roundings to float32 (of norms, softmax, routers), so that 1e-10 can hold."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def double(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(double, args), **{name: double(x) for name, x in (kwargs or {}).items()})


def differences(model: Any, inputs: Mapping[str, torch.Tensor], tp: int, /, **options: Any) -> dict[str, float]:
    """The largest difference over ranks, by what differs: "loss", "logits", names of parameters; NaN: one is missing.

    Of a model without a loss, its first result is projected on random numbers.
    """
    without = without_labels(model, inputs)

    def run(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with AllInFloat64():
            output = model(**inputs)
            loss = output.loss if "labels" in inputs else _projection(output[0])
            loss.backward()
            with torch.no_grad():
                result = model(**without)
        return loss.detach(), result.logits if "labels" in inputs else result[0]

    model.zero_grad()
    loss, logits = run(model)
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()

    def rank() -> dict[str, float]:
        local = swap(copy.deepcopy(model), **options)
        local_loss, local_logits = run(local)
        sum_partial_gradients(local)
        local_gradients = full_state_dict(local, gradients=True)
        found = {"loss": error(local_loss, loss), "logits": error(local_logits, logits)}
        for name in gradients.keys() | local_gradients.keys():
            both = name in gradients and name in local_gradients
            found[name] = _difference(local_gradients[name], gradients[name]) if both else float("nan")
        return found

    ranks = threads.run(Mesh(tp, tp=tp), rank)
    return {name: max(found[name] for found in ranks) for name in ranks[0]}


def _projection(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).mean()


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, and of a gradient that is zero up to rounding (a key's bias) absolute."""
    if actual.shape != expected.shape:
        return float("nan")
    return min(error(actual, expected), (actual - expected).norm().item() / 1e-3)


def without_labels(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs without labels; with those of a decoder, which without labels it does not make itself."""
    without = {name: x for name, x in inputs.items() if name != "labels"}
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return without
    return {**without, "decoder_input_ids": inputs["labels"].clamp(min=0)}


def compare(name: str, tp: int = 2, **options: Any) -> None:
    """Compares one of the architectures, or the tiny model of a configuration with a plan."""
    found = {architecture.name: architecture for architecture in OF_TRANSFORMERS}
    model = found[name].make(2 * len(found[name].layers)) if name in found else model_of(name)
    inputs = found[name].inputs() if name in found else inputs_of(model)
    for what, difference in differences(model, inputs, tp, **options).items():
        assert difference < 1e-10, f"{name}: {what} is {difference:.1e} away"
