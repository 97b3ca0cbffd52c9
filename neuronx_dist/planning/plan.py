"""`Plan`: the division of a model over ranks, as one JSON file.

    plan.save("llama.plan.json")
    plan = Plan.load("llama.plan.json")     # PlanError: not a plan, or of another version

A plan has degrees, schedule, recomputation and microbatches; the layers to replace by parallel ones, for
`hf.swap(plan=)`; and the strategy of each call, for `parallelize(pas_policy=)`. It describes the model and cluster that
it was made for: `Plan.check` refuses another model, other shapes and another cluster, and names the differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from os import PathLike
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from ..nearest import nearest
from ..parallel_layers.replace import STYLES, LayerPlan

__all__ = ["PlanError", "CallPlan", "JobPlan", "Plan", "TensorPlan"]

FORMAT = "neuronx_dist.plan"
VERSION = 2  # 1: with `second`, `second_calls` and a type `second` of two axes at most
LISTED = 8  # maximum number of differences in a message
OPTIONAL = ("job", "costs")  # keys that a plan's file may lack
_MEANING = {
    "tp": "tensor-parallel size",
    "pp": "number of pipeline stages",
    "dp": "data-parallel size",
    "microbatches": "number of microbatches of a step",
}


class PlanError(ValueError):
    """Error: a plan cannot be carried out, or was made for something else; the message says what would work."""


class CallPlan(NamedTuple):
    """The strategy of a call, by name; `function` is the called function, `module` the module that calls it."""

    function: str
    module: str
    strategy: str


class TensorPlan(NamedTuple):
    """The type of a parameter or input, as text (`I`, `S(0)`, `S(0, stride=3)`), with its global shape and dtype.

    `later`: its types on the axes after the first one.
    """

    shape: tuple[int, ...]
    dtype: str
    type: str
    later: tuple[str, ...] = ()


class JobPlan(NamedTuple):
    """The values that `nxd.plan` chose beside the division of a unit, and the job that it chose them for.

    Attributes:
        recompute: argument of `nxd.recompute`; "": nothing is recomputed.
        overlap: argument of `NeuronZero1Optimizer`.
        compiled: pointwise operations are predicted as fused; nothing that trains reads it.
        model, num_parameters: the model that was planned.
    """

    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    pad_heads: bool = False
    pad_vocab: bool = False
    virtual_pipeline_size: int = 1
    global_batch: int = 1
    seq_len: int = 1
    dtype: str = "bfloat16"
    recompute: str = ""
    fused_loss: bool = True
    overlap: bool = False
    compiled: bool = False
    model: str = ""
    num_parameters: int = 0


@dataclass(frozen=True)
class Plan:
    """The division of a model over ranks.

    Attributes:
        tp, pp, dp: ranks along each axis; `tp * pp` ranks are a unit, which holds one model.
        zero1: dp shards the optimizer's state; `parallelize` reads it where the plan decides `plan_ngpus`.
        axes: ranks along each axis that tp consists of, outermost first; (): it is one axis.
        schedule: a name of `pipeline.schedule`, or "chimera_direct"; `microbatches`: number of microbatches of a step.
        stages: index of the first call of each pipeline stage.
        recompute: (first, end) spans of calls that are computed again in backward.
        layers: the layers to replace by parallel ones.
        calls: the strategy of each call of the recorded program, in order; `later_calls`: for each axis after the first
            one the strategy of each call in the local program of a rank of the axes before.
        parameters, inputs: the types of the recorded program's parameters and inputs, by name.
        job: the layout's other values, if `nxd.plan` chose it.
        costs: what the plan costs, as `parallelize.explain` returns it; nothing that carries out a plan reads it.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero1: bool = False
    axes: tuple[int, ...] = ()
    schedule: str = "1f1b"
    microbatches: int = 1
    stages: tuple[int, ...] = (0,)
    recompute: tuple[tuple[int, int], ...] = ()
    layers: tuple[LayerPlan, ...] = ()
    calls: tuple[CallPlan, ...] = ()
    later_calls: tuple[tuple[CallPlan, ...], ...] = ()
    parameters: Mapping[str, TensorPlan] | None = None
    inputs: Mapping[str, TensorPlan] | None = None
    job: JobPlan | None = None
    costs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        numbers = [(name, getattr(self, name)) for name in ("tp", "pp", "dp", "microbatches")]
        for name, number in (*numbers, *(("axes", size) for size in self.axes)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise PlanError(f"Plan: {name} must be a positive integer, got {number!r}")
        for name in ("cp", "ep", "virtual_pipeline_size", "global_batch", "seq_len") if self.job else ():
            if getattr(self.job, name) < 1:
                raise PlanError(f"Plan: job: {name} must be a positive integer, got {getattr(self.job, name)}")
        if self.axes and prod(self.axes) != self.tp:
            raise PlanError(f"Plan: axes={self.axes} are {prod(self.axes)} ranks, and not tp={self.tp}")
        if len(self.later_calls) != len(self.axes[1:]):
            raise PlanError(f"Plan: later_calls are of {len(self.later_calls)} axes, and axes={self.axes}")
        for name, tensor in (*(self.parameters or {}).items(), *(self.inputs or {}).items()):
            if len(tensor.later) != len(self.later_calls):
                raise PlanError(
                    f"Plan: {name} has later={list(tensor.later)}; it needs a type on each of {len(self.later_calls)} "
                    f"axes after the first one: axes={self.axes}"
                )
        for layer in self.layers:
            if layer.style not in STYLES:
                raise PlanError(
                    f"Plan: layer {layer.name} has the unknown style {layer.style!r}; nearest: "
                    f"{nearest(layer.style, STYLES)}"
                )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan to a JSON file, atomically.

        Raises:
            TypeError: a layer has options that JSON cannot hold.
        """
        temporary = Path(f"{path}.new")
        temporary.write_text(self.text())
        temporary.replace(path)

    def text(self) -> str:
        """Returns the content of the plan's file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for name in ("parameters", "inputs"):
            content[name] = {key: tensor._asdict() for key, tensor in (getattr(self, name) or {}).items()}
        content["calls"] = [call._asdict() for call in self.calls]
        content["later_calls"] = [[call._asdict() for call in calls] for calls in self.later_calls]
        content["job"] = self.job._asdict() if self.job is not None else None
        if self.job is None:
            del content["job"]
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Reads a plan.

        Raises:
            PlanError: the file is no plan, is damaged, or has another version; the message has the path.
            FileNotFoundError: there is no such file.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path} is no plan: it is not JSON ({error})") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise PlanError(f'{path} is no plan: it has no "format": "{FORMAT}"')
        version = content.pop("version", None)
        if version not in (1, VERSION):
            raise PlanError(f"{path} is a plan of version {version}; this package reads versions 1 to {VERSION}")
        try:
            content = _of_version_1(content) if version == 1 else content
            known = [field.name for field in fields(cls)]
            unknown = [name for name in content if name not in known]
            if unknown:
                raise PlanError(
                    f"it has {unknown[0]!r}, which is no key of a plan; nearest: {nearest(unknown[0], known)}. "
                    f"A plan has {', '.join(known)}"
                )
            missing = [name for name in known if name not in content and name not in OPTIONAL]
            if missing:
                words = [f"{name!r}, the {_MEANING[name]}" if name in _MEANING else repr(name) for name in missing]
                raise PlanError(f"it has no {'; no '.join(words)}: add it, or save it anew")
            return cls(**_decoded(content))
        except PlanError as error:
            raise PlanError(f"{path} is a damaged plan: {error}") from None

    def check(
        self,
        *,
        unit: int,
        units: int,
        calls: Sequence[tuple[str, str]],
        parameters: Mapping[str, tuple[Sequence[int], str]],
        inputs: Mapping[str, tuple[Sequence[int], str]],
    ) -> None:
        """Raises a PlanError if the plan was made for another cluster or another program.

        Args:
            unit: number of ranks that hold one model; `units`: number of units that train together.
            calls: function and module of each call.
            parameters, inputs: shape and dtype of each, by name.

        Raises:
            PlanError: lists the differences between the plan and the arguments.
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
            raise PlanError("\n  - ".join(["the plan was made for another job or model:", *shown]))


def _decoded(content: dict[str, Any]) -> dict[str, Any]:
    """Converts the fields of a plan from the types of JSON.

    Raises:
        PlanError: a field has another type.
    """
    decoded = dict(content)
    for name in ("stages", "recompute", "layers", "calls", "axes", "later_calls"):
        decoded[name] = _typed(content[name], list, name)
    decoded["zero1"] = _typed(content["zero1"], bool, "zero1")
    decoded["schedule"] = _typed(content["schedule"], str, "schedule")
    decoded["stages"] = tuple(_typed(stage, int, "stages") for stage in decoded["stages"])
    if content.get("job") is not None:
        types = {name: type(default) for name, default in JobPlan._field_defaults.items()}
        decoded["job"] = JobPlan(**_entry(content["job"], types, JobPlan._fields, "job"))
    decoded["recompute"] = tuple(_pair(span, int, "recompute") for span in decoded["recompute"])
    decoded["layers"] = tuple(map(_layer, decoded["layers"]))
    decoded["axes"] = tuple(_typed(size, int, "axes") for size in decoded["axes"])
    decoded["calls"] = _calls(decoded["calls"], "calls")
    decoded["later_calls"] = tuple(_calls(calls, "later_calls") for calls in decoded["later_calls"])
    for name in ("parameters", "inputs"):
        tensors = _typed(content[name], dict, name)
        decoded[name] = {key: _tensor(tensor, f"{name}: {key}") for key, tensor in tensors.items()}
    if content.get("costs") is not None:
        _typed(content["costs"], dict, "costs")
    return decoded


def _of_version_1(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a plan of version 1, in which tp consists of one axis or two.

    Raises:
        PlanError: a field has another type.
    """
    missing = [name for name in ("tp", "second", "second_calls") if name not in content]
    if missing:
        raise PlanError(f"it has no {missing[0]!r}: add it, or save it anew")
    content = dict(content)
    second, calls = content.pop("second"), content.pop("second_calls")
    if _typed(second, int, "second") < 1:
        raise PlanError(f"second must be a positive integer, got {second}")
    if _typed(content["tp"], int, "tp") % second:
        raise PlanError(f"second={second} must divide tp={content['tp']}")
    axes = [content["tp"] // second, second] if second > 1 else []
    content |= {"axes": axes, "later_calls": [calls] if axes else []}
    if isinstance(content.get("job"), dict):
        content["job"] = {"overlap": False, "compiled": False, **content["job"]}
    for name in ("parameters", "inputs"):
        tensors = content.get(name)
        for tensor in tensors.values() if isinstance(tensors, dict) else ():
            if isinstance(tensor, dict):
                later = tensor.pop("second", "")
                tensor["later"] = [later] if later else []
    return content


def _calls(calls: Any, where: str) -> tuple[CallPlan, ...]:
    types = dict.fromkeys(CallPlan._fields, str)
    return tuple(CallPlan(**_entry(call, types, CallPlan._fields, where)) for call in _typed(calls, list, where))


def _typed(value: Any, type_: type, where: str) -> Any:
    """Returns a value of this type.

    Raises:
        PlanError: it has another type.
    """
    if not isinstance(value, type_) or (type_ is int and isinstance(value, bool)):
        raise PlanError(f"{where} has {short(value)}, which is no {type_.__name__}")
    return value


def _pair(value: Any, type_: type, where: str) -> tuple[Any, Any]:
    if len(_typed(value, list, where)) != 2:
        raise PlanError(f"{where} has {short(value)}, and not a list of two")
    return _typed(value[0], type_, where), _typed(value[1], type_, where)


def _entry(value: Any, types: Mapping[str, type], needed: Sequence[str], where: str) -> dict[str, Any]:
    """Returns a dict with fields of these types."""
    entry = _typed(value, dict, where)
    missing = [name for name in needed if name not in entry]
    unknown = [name for name in entry if name not in types]
    if unknown:
        near = nearest(unknown[0], types)
        raise PlanError(f"{where} has {unknown[0]!r}, which is no key of it; nearest: {near}. It is {short(value)}")
    if missing:
        raise PlanError(f"{where} has no {missing[0]!r}. It is {short(value)}")
    return {name: _typed(field, types[name], f"{where}: {name}") for name, field in entry.items()}


def _tensor(value: Any, where: str) -> TensorPlan:
    types: dict[str, type] = {"shape": list, "dtype": str, "type": str, "later": list}
    entry = _entry(value, types, ("shape", "dtype", "type"), where)
    entry["shape"] = tuple(_typed(size, int, f"{where}: shape") for size in entry["shape"])
    entry["later"] = tuple(_typed(type_, str, f"{where}: later") for type_ in entry.get("later", ()))
    return TensorPlan(**entry)


def _layer(content: Any) -> LayerPlan:
    types: dict[str, type] = {"name": str, "style": str, "padded_size": int, "fused_with": list, "options": dict}
    given = {name: value for name, value in _typed(content, dict, "layers").items() if value is not None}
    entry = _entry(given, {**types, "group": list}, ("name", "style"), "layers")
    entry["fused_with"] = tuple(_typed(name, str, "layers: fused_with") for name in entry.get("fused_with", ()))
    if "group" in entry:
        entry["group"] = _pair(entry["group"], int, "layers: group")
    return LayerPlan(**entry)


def _tensor_differences(
    what: str, planned: Mapping[str, TensorPlan], actual: Mapping[str, tuple[Sequence[int], str]]
) -> list[str]:
    differences = []
    for name in dict.fromkeys((*planned, *actual)):
        if name not in actual:
            differences.append(f"{what} {name} {list(planned[name].shape)} is in the plan and not here")
        elif name not in planned:
            differences.append(f"{what} {name} {list(actual[name][0])} is here and not in the plan")
        elif (tuple(planned[name].shape), planned[name].dtype) != (tuple(actual[name][0]), actual[name][1]):
            (shape, dtype), plan = actual[name], planned[name]
            differences.append(f"{what} {name}: {plan.dtype}{list(plan.shape)} in the plan, {dtype}{list(shape)} here")
    return differences


def _call_difference(planned: list[tuple[str, str]], actual: list[tuple[str, str]]) -> str:
    """Describes the first call that differs."""
    for number, (one, other) in enumerate(zip(planned, actual, strict=False)):
        if one != other:
            return f"call {number}: {_call(one)} in the plan, {_call(other)} here"
    return f"{len(planned)} calls in the plan, {len(actual)} here"


def _call(call: tuple[str, str]) -> str:
    function, module = call
    return f"{function} of {module}" if module else function
