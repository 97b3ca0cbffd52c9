"""`Plan`: how a model is divided over ranks, as one JSON file.

    plan.save("llama.plan.json")
    plan = Plan.load("llama.plan.json")     # PlanError: not a plan, or of another version

Degrees, schedule, recomputation and microbatches; which layers become parallel ones, for `hf.swap(plan=)`; and the
strategy of each call, for `parallelize(pas_policy=)`. What it was made for is a part of it: `Plan.check` refuses
another model, other shapes and another cluster, and says what differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ..nearest import nearest
from ..parallel_layers.replace import STYLES, LayerPlan

__all__ = ["PlanError", "CallPlan", "Plan", "TensorPlan"]

FORMAT = "neuronx_dist.plan"
VERSION = 1
LISTED = 8  # differences that a message has at most


class PlanError(ValueError):
    """A plan that cannot be carried out, or is of something else; the message has names, numbers and what works."""


class CallPlan(NamedTuple):
    """The strategy of one call, by name; `function` and `module` are where it stands."""

    function: str
    module: str
    strategy: str


class TensorPlan(NamedTuple):
    """The type of one parameter or input, as text (`I`, `S(0)`, `S(0, stride=3)`); shape and dtype are of the whole.

    `second`: its type on the second of two axes; "": there is one.
    """

    shape: tuple[int, ...]
    dtype: str
    type: str
    second: str = ""


@dataclass(frozen=True)
class Plan:
    """How a model is divided over ranks.

    Attributes:
        tp, pp, dp: ranks along each axis; `tp * pp` is a unit, one model.
        second: of tp, ranks along the second of two axes; 1: there is one.
        schedule: a name of `pipeline.schedule`; `microbatches`: of a step.
        stages: number of the first call of each pipeline stage.
        recompute: spans of calls, from and to, that are computed again in backward.
        layers: which layers become parallel ones.
        calls: the strategy of each call of the recorded program, in order; `second_calls`: of each call that a rank of
            the first of two axes runs, its strategy on the second.
        parameters, inputs: by name, of the recorded program.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    second: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    stages: tuple[int, ...] = (0,)
    recompute: tuple[tuple[int, int], ...] = ()
    layers: tuple[LayerPlan, ...] = ()
    calls: tuple[CallPlan, ...] = ()
    second_calls: tuple[CallPlan, ...] = ()
    parameters: Mapping[str, TensorPlan] | None = None
    inputs: Mapping[str, TensorPlan] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "second", "microbatches"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise PlanError(f"Plan: {name} must be a positive integer, got {number!r}")
        if self.tp % self.second:
            raise PlanError(f"Plan: second={self.second} does not divide tp={self.tp}: it is a part of it")
        for layer in self.layers:
            if layer.style not in STYLES:
                raise PlanError(
                    f"Plan: layer {layer.name} has the unknown style {layer.style!r}; nearest: "
                    f"{nearest(layer.style, STYLES)}"
                )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan to a JSON file, whole or not at all.

        Raises:
            TypeError: options of a layer that JSON cannot hold.
        """
        temporary = Path(f"{path}.new")
        temporary.write_text(self.text())
        temporary.replace(path)

    def text(self) -> str:
        """What a plan's file holds."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for name in ("parameters", "inputs"):
            content[name] = {key: tensor._asdict() for key, tensor in (getattr(self, name) or {}).items()}
        for name in ("calls", "second_calls"):
            content[name] = [call._asdict() for call in getattr(self, name)]
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Reads a plan.

        Raises:
            PlanError: the file is no plan, is damaged, or is of another version; the message has the path.
            FileNotFoundError: there is no such file.
        """
        try:
            content = json.loads(Path(path).read_text())
        except ValueError as error:
            raise PlanError(f"{path} is no plan: it is not JSON ({error})") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise PlanError(f'{path} is no plan: it has no "format": "{FORMAT}"')
        version = content.pop("version", None)
        if version != VERSION:
            raise PlanError(f"{path} is a plan of version {version}; this package reads version {VERSION}")
        try:
            return cls(**_decoded(content))
        except (KeyError, TypeError, AttributeError) as error:
            known = ", ".join(field.name for field in fields(cls))
            raise PlanError(f"{path} is a damaged plan: {error}; a plan has {known}") from None

    def check(
        self,
        *,
        unit: int,
        units: int,
        calls: Sequence[tuple[str, str]],
        parameters: Mapping[str, tuple[Sequence[int], str]],
        inputs: Mapping[str, tuple[Sequence[int], str]],
    ) -> None:
        """That the plan was made for this cluster and this program.

        Args:
            unit: ranks that hold one model; `units`: how many of them train together.
            calls: function and module of each call.
            parameters, inputs: shape and dtype of each, by name.

        Raises:
            PlanError: it was not; each difference, with the plan's and the given.
        """
        differences = []
        if self.tp * self.pp != unit:
            differences.append(f"ranks of a unit: tp={self.tp} x pp={self.pp} in the plan, {unit} here")
        if self.dp != units:
            differences.append(f"units: dp={self.dp} in the plan, {units} here")
        for what, planned_tensors, given_tensors in (
            ("parameter", self.parameters or {}, parameters),
            ("input", self.inputs or {}, inputs),
        ):
            differences += _tensor_differences(what, planned_tensors, given_tensors)
        planned_calls = [(call.function, call.module) for call in self.calls]
        if planned_calls != list(calls):
            differences.append(_call_difference(planned_calls, list(calls)))
        if differences:
            more = len(differences) - LISTED
            shown = differences[:LISTED] + ([f"and {more} more"] if more > 0 else [])
            raise PlanError("\n  - ".join(["the plan was made for something else:", *shown]))


def _decoded(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan from what JSON made of them."""
    decoded = dict(content)
    decoded["stages"] = tuple(content.get("stages", (0,)))
    decoded["recompute"] = tuple((first, last) for first, last in content.get("recompute", ()))
    decoded["layers"] = tuple(map(_layer, content.get("layers", ())))
    for name in ("calls", "second_calls"):
        decoded[name] = tuple(CallPlan(**call) for call in content.get(name, ()))
    for name in ("parameters", "inputs"):
        decoded[name] = {
            key: TensorPlan(tuple(tensor["shape"]), tensor["dtype"], tensor["type"], tensor.get("second", ""))
            for key, tensor in (content.get(name) or {}).items()
        }
    return decoded


def _layer(content: dict[str, Any]) -> LayerPlan:
    group = content.get("group")
    return LayerPlan(
        **{
            **content,
            "fused_with": tuple(content.get("fused_with", ())),
            "group": None if group is None else (group[0], group[1]),
        }
    )


def _tensor_differences(
    what: str, planned: Mapping[str, TensorPlan], given: Mapping[str, tuple[Sequence[int], str]]
) -> list[str]:
    found = []
    for name in dict.fromkeys((*planned, *given)):
        if name not in given:
            found.append(f"{what} {name} {list(planned[name].shape)} is in the plan and not here")
        elif name not in planned:
            found.append(f"{what} {name} {list(given[name][0])} is here and not in the plan")
        elif (tuple(planned[name].shape), planned[name].dtype) != (tuple(given[name][0]), given[name][1]):
            (shape, dtype), plan = given[name], planned[name]
            found.append(f"{what} {name}: {plan.dtype}{list(plan.shape)} in the plan, {dtype}{list(shape)} here")
    return found


def _call_difference(planned: list[tuple[str, str]], given: list[tuple[str, str]]) -> str:
    """The first call that differs."""
    for number, (one, other) in enumerate(zip(planned, given, strict=False)):
        if one != other:
            return f"call {number}: {_call(one)} in the plan, {_call(other)} here"
    return f"{len(planned)} calls in the plan, {len(given)} here"


def _call(call: tuple[str, str]) -> str:
    function, module = call
    return f"{function} of {module}" if module else function
