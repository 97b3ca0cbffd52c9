"""A model whose forward is recorded for a derived plan, and its layers in that recording."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..program.program import Call, Program, operands_of
from ..program.record import record_program
from ..program.recording import TracingError, describe
from ..torch_internals.modules import has_forward_hooks
from .model_plan import UnsupportedModelError
from .plan_reading import SAME_AS_LINEAR, end_of
from .regions import LayerCalls

__all__ = ["MATRICES", "RecordedModel", "kind_of"]

_WORDS = (
    'plan={"name.of.*.a.layer": "colwise", ...} gives the style of each layer ("colwise_gather_output" and '
    '"rowwise_split_input" are right wherever tp divides the sizes)'
)
_LAYERS = (
    "neuronx_dist.parallel_layers.replace.apply(model, [LayerPlan(name, style), ...]) replaces the layers that it is "
    "passed"
)
MATRICES = ("linear", "falcon", "conv1d")
_CALLS = {"linear": 1, "embedding": 1, "conv1d": 3}


class RecordedModel:
    """A model, and the arguments of its forward."""

    def __init__(self, model: Any, inputs: Mapping[str, Any] | None) -> None:
        self.model, self.what = model, type(model).__name__
        if inputs is None:
            inputs = getattr(model, "dummy_inputs", None)
        if inputs is not None and not isinstance(inputs, Mapping):
            first = next(iter(inspect.signature(model.forward).parameters), "name")
            raise TypeError(
                f"swap: inputs are example arguments of forward of {self.what} in a dict by name, such as "
                f'inputs={{"{first}": tensor}}; got {describe(inputs)}'
            )
        if not inputs:
            raise ValueError(
                f'swap: plan="derived" records the forward of {self.what}: pass inputs={{...}}, example arguments by '
                "name"
            )
        self.inputs = dict(inputs)
        parameters = inspect.signature(model.forward).parameters
        if "use_cache" in parameters:
            self.inputs.setdefault("use_cache", False)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.modules = dict(model.named_modules())
        self.first_name: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.first_name.setdefault(id(parameter), name)

    def refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f'{self.what} cannot be swapped by plan="derived": {reason}. {self.advice()}')

    def advice(self) -> str:
        """Returns other ways to shard the model, for messages: a plan of words needs a config."""
        other = _WORDS if getattr(self.model, "config", None) is not None else _LAYERS
        return f"{other}, and neuronx_dist.parallelize divides any module"

    def copy(self) -> Any:
        """Returns a copy of the model with the same tensors, that computes logits in the place of a loss."""
        shared = {id(x): x for x in (*self.model.parameters(), *self.model.buffers())}
        try:
            model: Any = copy.deepcopy(self.model, dict(shared))
        except Exception as error:
            raise self.refusal(f"it cannot be copied ({type(error).__name__}: {error})") from error
        if hasattr(model, "loss_type"):
            model.loss_function = lambda logits, *args, **kwargs: logits
        return model

    def program(self, training: bool) -> Program:
        try:
            return record_program(self.copy(), self.inputs, training=training)
        except TypeError:
            raise
        except TracingError as error:
            raise self.refusal(f"its forward cannot be recorded: {error}") from error
        except Exception as error:
            raise self.refusal(
                f"its forward fails on the inputs {', '.join(self.inputs)} ({type(error).__name__}: {error})"
            ) from error

    def layers(self, program: Program) -> dict[str, LayerCalls]:
        """Returns the layers that parallel ones can replace: their calls, and nothing else, read their weights."""
        calls_of: dict[str, list[Call]] = defaultdict(list)
        for call in program.calls:
            calls_of[call.module].append(call)
        consumers, paths = program.consumers(), {value.path: value for value in program.parameters}
        sharers: dict[str, set[str]] = defaultdict(set)
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False) if kind_of(module) else ():
                sharers[self.first_name[id(parameter)]].add(name)
        layers = {}
        for name, module in self.modules.items():
            kind, calls = kind_of(module), calls_of.get(name, [])
            count = 2 + (module.bias is not None) if kind == "falcon" else _CALLS[kind or "linear"]
            if kind is None or not calls or len(calls) % count or has_forward_hooks(module):
                continue
            of_module = [self.first_name[id(x)] for x in module.parameters()]
            if any(call.module not in sharers[path] for path in of_module for call, _ in consumers[paths[path]]):
                continue
            groups = [calls[at : at + count] for at in range(0, len(calls), count)]
            inside = {paths[path] for path in of_module}.union(x for call in calls for x in call.results)
            read = [next((x for call in group for x in operands_of(call) if x not in inside), None) for group in groups]
            if None in read:  # of another forward than the layer's
                continue
            outputs = tuple(group[-1].results[0] for group in groups)
            layers[name] = LayerCalls(name, "linear" if kind == "falcon" else kind, tuple(filter(None, read)), outputs)
        return layers

    def check_ends(self, program: Program) -> None:
        """Refuses an embedding or a head, which plans shard, whose weight other calls read."""
        consumers, paths = program.consumers(), {value.path: value for value in program.parameters}
        for end in (end_of(self.model, side) for side in ("input", "output")):
            weight = paths.get(self.first_name[id(end.weight)]) if kind_of(end) and id(end) in self.names else None
            for call, _ in consumers.get(weight, ()) if weight is not None else ():
                reader = self.model.get_submodule(call.module)
                if reader._parameters.get("weight") is not end.weight:
                    name = self.names[id(end)]
                    raise self.refusal(f"the weight of {name} is read outside of a call of it, at {call.where}")

    def ends(self, layers: Mapping[str, LayerCalls]) -> set[str]:
        """Returns the names of embedding and head, and of other layers with weights that several modules have."""
        named = {
            self.names[id(end)] for side in ("input", "output") if id(end := end_of(self.model, side)) in self.names
        }
        return named | {name for name in layers if len(self.sharing(name)) > 1}

    def sharing(self, name: str) -> list[str]:
        """Returns the names of the modules with the weight of a layer."""
        weight = self.modules[name].weight
        return [other for other, module in self.modules.items() if module._parameters.get("weight") is weight]

    def rest(self, words: Mapping[str, str]) -> dict[str, str]:
        """Returns the word of all other modules with parameters of their own, but the vocabulary's layers."""
        ends = {id(end_of(self.model, side)) for side in ("input", "output")}
        return {
            name: "replicate"
            for name, module in self.modules.items()
            if name not in words and id(module) not in ends and next(module.parameters(recurse=False), None) is not None
        }  # fmt: skip


def _has_options(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq


def kind_of(module: Any) -> str | None:
    if type(module) is nn.Linear or type(module).__name__ in SAME_AS_LINEAR:
        return (
            "falcon" if type(module).__name__ == "FalconLinear" else "linear"
        )  # whose forward is `x @ weight.T + bias`
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "conv1d"
    return "embedding" if type(module) is nn.Embedding and not _has_options(module) else None
