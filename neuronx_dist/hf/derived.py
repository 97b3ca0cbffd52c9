"""A plan derived from the forward of a module itself: `swap(model, plan="derived")`.

    recorded (program/) -> regions on shards, by the rules of its calls (regions.py) -> words -> proven

The proof: a copy whose layers have the weights of one rank is recorded, too, and its calls must be those of a rank, with
the integers that the rules ask for. An integer that forward reads from an attribute of a module, as a number of heads,
becomes that of a rank; any other one is refused.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import nn

from ..program.program import Call, Program, Value, operands_of, values_in
from ..program.record import record_program
from ..program.recording import TracingError
from ..program.repeated import first_difference
from ..rules.containers import substituted
from ..weights.shard_spec import ShardSpec
from .in_place import sharded_dim
from .model_plan import Derived, UnsupportedModelError, parent_of
from .plan_reading import SAME_AS_LINEAR, end_of
from .regions import CannotShard, Forward, LayerCalls, Region, grow, regions_of
from .words import LAYER_STYLES, WORDS

__all__ = ["derive"]

_ADVICE = (
    'plan={"name.of.*.a.layer": "colwise", ...} gives the style of each layer ("colwise_gather_output" and '
    '"rowwise_split_input" are right wherever tp divides the sizes), and neuronx_dist.parallelize divides any module'
)
_FEW = 16  # a matrix with fewer weights than this part of the largest one stays whole: a collective costs more
_DEGREES = range(2, 9)
_MATRICES = ("linear", "falcon", "conv1d")
_CALLS = {"linear": 1, "embedding": 1, "conv1d": 3}
# Names of attributes with a number of heads, or of features of all heads.
_COUNTS = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "n_head", "heads",
    "split_size", "all_head_size", "inner_dim",
)  # fmt: skip


def derive(model: nn.Module, inputs: Mapping[str, Any] | None, tp: int) -> Derived:
    """Returns the words of a model's layers at a tp degree, and what is to be changed besides.

    Args:
        inputs: arguments of forward by name, of which shapes and dtypes count; None: `dummy_inputs` of the model.

    Raises:
        UnsupportedModelError: forward cannot be recorded, has numbers of whole sizes that are no attributes, or draws
            random numbers on shards and on whole values in one module.
        ValueError: tp does not divide the heads or sizes of layers that another degree would shard.
    """
    source = _Source(model, inputs)
    words: dict[str, str] = {}
    local_logits, siblings = True, {}
    attributes: dict[str, dict[str, int]] = {}
    random: tuple[str, ...] = ()
    whole_random: tuple[str, ...] = ()
    recorded = source.program(True)
    for training in (True, False):
        program = recorded if training else source.program(False)
        if not training and not first_difference(recorded, program):
            break
        layers = source.layers(program)
        ends = source.ends(layers)
        inner = {name: layer for name, layer in layers.items() if name not in ends}
        forward = Forward(program, inner)
        regions, reasons = regions_of(forward, tp)
        found = _words(source, inner, regions, tp)
        if words and found != words:
            differing = sorted(name for name in {**words, **found} if words.get(name) != found.get(name))
            raise source.refusal(f"training and evaluation would shard {', '.join(differing)} differently")
        words = found
        if training:
            _check_divided(source, forward, regions, reasons, tp)
            siblings = _siblings(source, inner, words)
            random, whole_random = _random_modules(source, program, regions)
        local_logits = local_logits and _has_open_logits(source, program, layers)
        attributes = _proven(source, program, regions, attributes, tp, training)
    return Derived({**source.rest(words), **words}, attributes, siblings, random, bool(whole_random), local_logits)


class _Source:
    """A model, and the arguments of its forward."""

    def __init__(self, model: Any, inputs: Mapping[str, Any] | None) -> None:
        self.model, self.what = model, type(model).__name__
        if inputs is None:
            inputs = getattr(model, "dummy_inputs", None)
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
        return UnsupportedModelError(f'{self.what} cannot be swapped by plan="derived": {reason}. {_ADVICE}')

    def copy(self) -> Any:
        """Returns a copy of the model with the same tensors, that computes logits in the place of a loss."""
        shared = {id(x): x for x in (*self.model.parameters(), *self.model.buffers())}
        try:
            model: Any = copy.deepcopy(self.model, dict(shared))
        except Exception as error:
            raise self.refusal(f"it cannot be copied ({type(error).__name__}: {error})") from error
        if hasattr(model, "loss_type"):
            model.loss_function = lambda logits, *args, **kwargs: logits
        for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
            if hasattr(config, "_experts_implementation"):
                config._experts_implementation = "batched_mm"  # without branches on the number of tokens of an expert
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
            for parameter in module.parameters(recurse=False):
                sharers[self.first_name[id(parameter)]].add(name)
        layers = {}
        for name, module in self.modules.items():
            kind, calls = _kind(module), calls_of.get(name, [])
            count = 2 + (module.bias is not None) if kind == "falcon" else _CALLS[kind or "linear"]
            if kind is None or not calls or len(calls) % count:
                continue
            of_module = [self.first_name[id(x)] for x in module.parameters()]
            if any(call.module not in sharers[path] for path in of_module for call, _ in consumers[paths[path]]):
                continue
            groups = [calls[at : at + count] for at in range(0, len(calls), count)]
            inside = {paths[path] for path in of_module}.union(x for call in calls for x in call.results)
            read = tuple(next(x for call in group for x in operands_of(call) if x not in inside) for group in groups)
            outputs = tuple(group[-1].results[0] for group in groups)
            layers[name] = LayerCalls(name, "linear" if kind == "falcon" else kind, read, outputs)
        return layers

    def ends(self, layers: Mapping[str, LayerCalls]) -> set[str]:
        """Returns the names of embedding and head, and of other layers with weights that several modules have."""
        named = {self.names[id(end)] for side in ("input", "output") if id(end := end_of(self.model, side)) in self.names}
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


def _kind(module: Any) -> str | None:
    if type(module) is nn.Linear or type(module).__name__ in SAME_AS_LINEAR:
        return "falcon" if type(module).__name__ == "FalconLinear" else "linear"  # whose forward is `x @ weight.T + bias`
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "conv1d"
    return "embedding" if type(module) is nn.Embedding and module.max_norm is None and not module.sparse else None


# --- words


def _words(source: _Source, layers: Mapping[str, LayerCalls], regions: list[Region], tp: int) -> dict[str, str]:
    """Returns the words of layers in regions, of what such regions read, and of layers that are sharded alone."""
    words: dict[str, str] = {}
    for region in regions:
        words |= region.words
        words |= {value.path: word for value, word in region.parameters.items()}
        for value in region.partial:
            owner = parent_of(value.path)
            read = {parameter.path for parameter in region.partial}
            if any(f"{owner}.{key}" not in read for key, _ in source.modules[owner].named_parameters(recurse=False)):
                raise source.refusal(f"shards read {value.path}, but not all parameters of {owner}")
            words[owner] = "replicated_with_grad_allreduce"
    sizes = [module.weight.numel() for module in source.modules.values() if _kind(module) in _MATRICES]
    largest = max(sizes, default=0)
    for name, layer in layers.items():
        if name not in words and source.modules[name].weight.numel() * _FEW >= largest:
            words |= {name: word for word in _alone(source.modules[name], layer.kind, largest, tp)}
    for name in source.modules:
        if _kind(source.modules[name]) == "embedding" and name not in words and len(source.sharing(name)) > 1:
            words |= _tied(source, name, tp)
    return words


def _alone(module: Any, kind: str, largest: int, tp: int) -> Iterator[str]:
    """Yields the word of a layer outside of regions, whose input and output are whole."""
    if kind == "linear" and module.out_features % tp == 0:
        yield "colwise_gather_output"
    elif kind == "linear" and module.in_features % tp == 0:
        yield "rowwise_split_input"
    elif kind == "embedding" and module.weight.numel() >= largest and module.num_embeddings % tp == 0:
        yield "embedding_rowwise"


def _tied(source: _Source, name: str, tp: int) -> dict[str, str]:
    """Returns the words of an embedding and its head with one weight, in a model that does not name its ends."""
    names = source.sharing(name)
    kinds = {other: _kind(source.modules[other]) for other in names}
    ends = {source.names.get(id(end_of(source.model, side))) for side in ("input", "output")}
    if ends.intersection(names) or not set(kinds.values()) <= {"embedding", "linear"}:
        return {}
    if source.modules[name].num_embeddings % tp:
        return {}
    return {n: "embedding_rowwise" if kind == "embedding" else "colwise_gather_output" for n, kind in kinds.items()}


def _check_divided(
    source: _Source, forward: Forward, regions: list[Region], reasons: Mapping[str, CannotShard], tp: int
) -> None:
    """Raises a ValueError for layers that other degrees would shard."""
    inside = {name for region in regions for name in region.words}
    refused = {name: reason for name, reason in reasons.items() if name not in inside and reason.indivisible}
    if not refused:
        return
    degrees: dict[str, list[int]] = defaultdict(list)
    for degree in _DEGREES:
        for region in regions_of(forward, degree)[0] if degree != tp else ():
            for name in region.words:
                degrees[name].append(degree)
    listed = [f"{name}: {reason}, but {degrees[name]} do" for name, reason in refused.items() if degrees[name]]
    if listed:
        raise ValueError(
            f'swap: {source.what}: plan="derived" cannot shard layers over tp={tp}: {"; ".join(listed)}. Choose such a '
            f"tp, or pass a plan: {_ADVICE}"
        )


def _siblings(source: _Source, layers: Mapping[str, LayerCalls], words: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Returns, by column layer, the others of its module that are called on the same tensors."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        if words.get(name) == "colwise" and layer.kind == "linear":
            groups[parent_of(name), layer.inputs, source.modules[name].bias is None].append(name)
    return {name: tuple(n for n in group if n != name) for group in groups.values() for name in group}


def _random_modules(
    source: _Source, program: Program, regions: list[Region]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the modules that draw random numbers for shards, and those that draw them for whole values."""
    sharded = {call for region in regions for call in region.calls}
    local = dict.fromkeys(call.module for call in program.calls if call.random and call in sharded)
    whole = dict.fromkeys(call.module for call in program.calls if call.random and call not in sharded)
    for name in local:
        if mixed := [other for other in whole if f"{other}.".startswith(f"{name}.")]:
            raise source.refusal(
                f"{name} draws random numbers for shards, which differ over tp, and {mixed[0]} for whole values: set "
                "a dropout rate to 0"
            )
    return tuple(local), tuple(whole)


def _has_open_logits(source: _Source, program: Program, layers: Mapping[str, LayerCalls]) -> bool:
    """Returns whether calls after the head take shards of the vocabulary, up to forward's result."""
    head = end_of(source.model, "output")
    layer = layers.get(source.names.get(id(head), ""))
    if layer is None:
        return head is None
    size = layer.outputs[0].shape[-1]
    divisor = next(n for n in range(2, size + 1) if size % n == 0) if size > 1 else 1
    try:
        return list(grow(Forward(program, {layer.name: layer}, True), layer, 1, divisor).words) == [layer.name]
    except CannotShard:
        return False


# --- proof by a rank's forward


def _proven(
    source: _Source,
    program: Program,
    regions: list[Region],
    attributes: dict[str, dict[str, int]],
    tp: int,
    training: bool,
) -> dict[str, dict[str, int]]:
    """Returns the attributes of modules that a rank changes, so that forward on its shards makes the right calls.

    Raises:
        UnsupportedModelError: no attributes make it so; the message has the first call.
    """
    if tp == 1 or not regions:
        return attributes
    inside = (call.module for region in regions for call in region.calls if call.module not in region.words)
    modules = {name: source.model.get_submodule(name) for name in dict.fromkeys(inside)}
    local, (at, reason) = attributes, _mismatch(source, program, regions, attributes, tp, training)
    while at is not None:
        for names in _candidates(modules, local, tp):
            changed = {name: dict(of) for name, of in local.items()}
            for kind, attribute in names:
                for name, module in modules.items():
                    if type(module) is kind and _divisible(module, attribute, tp):
                        changed.setdefault(name, {})[attribute] = getattr(module, attribute) // tp
            later, why = _mismatch(source, program, regions, changed, tp, training)
            if later is None or later > at:
                local, at, reason = changed, later, why
                break
        else:
            call = program.calls[at]
            raise source.refusal(
                f"{call.module} computes with a number of the whole size that is no attribute of the module, or that "
                f"has other uses, at {call.where}: {reason}. Read the number from the shape of a tensor, as "
                "x.view(batch, seq, -1, head_dim) does"
            )
    return local


def _divisible(module: nn.Module, attribute: str, tp: int) -> bool:
    value = vars(module).get(attribute)
    return type(value) is int and value > 1 and value % tp == 0


def _candidates(
    modules: Mapping[str, nn.Module], known: Mapping[str, Mapping[str, int]], tp: int
) -> Iterator[tuple[tuple[type, str], ...]]:
    """Yields attributes that may be those of all ranks: one at a time, numbers of heads first; then two."""
    found = dict.fromkeys(
        (type(module), attribute)
        for name, module in modules.items()
        for attribute in vars(module)
        if _divisible(module, attribute, tp) and attribute not in known.get(name, {})
    )
    ordered = sorted(found, key=lambda item: (item[1] not in _COUNTS, "head" not in item[1] or "dim" in item[1]))
    counts = tuple(item for item in ordered if item[1] in _COUNTS)
    yield from [counts] if len(counts) > 1 else []
    yield from ((item,) for item in ordered)
    yield from combinations(ordered, 2)


def _mismatch(
    source: _Source,
    program: Program,
    regions: list[Region],
    attributes: Mapping[str, Mapping[str, int]],
    tp: int,
    training: bool,
) -> tuple[int | None, str]:
    """Returns the number of the first call that is not that of a rank, and the difference; None: all are."""
    model = source.copy()
    for region in regions:
        _cut_weights(model, region, tp)
    for name, values in attributes.items():
        vars(model.get_submodule(name)).update(values)
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(program.calls):
        numbers[call.where].append(number)
    try:
        local = record_program(model, source.inputs, training=training)
    except Exception as error:
        frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        at = next((numbers[frame][0] for frame in reversed(frames) if frame in numbers), 0)
        return at, f"{type(error).__name__}: {error}"
    return _first_difference(program, local, regions)


def _cut_weights(model: nn.Module, region: Region, tp: int) -> None:
    """Gives the layers of a region, and its bare parameters, the shapes of a rank's."""
    dims: dict[tuple[str, str], tuple[int, int]] = {}
    for name, word in region.words.items():
        module = model.get_submodule(name)
        base = LAYER_STYLES[WORDS[word]][0]
        transposed = type(module).__name__ == "Conv1D"
        if base == "row":
            dims[name, "weight"] = 0 if transposed else 1, 1
            module.__dict__.update({"nx": module.nx // tp} if transposed else {})  # type: ignore[operator]
        else:
            dims[name, "weight"] = 1 if transposed or base.startswith("embedding") else 0, 1
            if module._parameters.get("bias") is not None:
                dims[name, "bias"] = 0, 1
            module.__dict__.update({"nf": module.nf // tp} if transposed else {})  # type: ignore[operator]
    for value, word in region.parameters.items():
        parameter = model.get_parameter(value.path)
        name, _, key = value.path.rpartition(".")
        dims[name, key] = sharded_dim(WORDS[word], parameter.ndim)
    for (name, key), (dim, stride) in dims.items():
        module = model.get_submodule(name)
        full = module._parameters[key]
        assert full is not None
        spec = ShardSpec("tp", dim, stride, tp, tuple(full.shape))
        module._parameters[key] = nn.Parameter(spec.local_slice(full.detach(), 0), full.requires_grad)


def _first_difference(program: Program, local: Program, regions: list[Region]) -> tuple[int | None, str]:
    """Returns the number of the first call of a rank that is not the one that the rules ask for."""
    expected = {call: arguments for region in regions for call, arguments in region.calls.items()}
    shards = {value: shape for region in regions for value, shape in region.shapes().items()}
    layers = {name for region in regions for name in region.words}
    same: dict[Value, Value] = {}
    of_local = {(value.kind, value.path): value for value in local.leaves if value.path}
    for value in program.leaves:
        if value.path and (value.kind, value.path) in of_local:
            same[value] = of_local[value.kind, value.path]
    for number, call in enumerate(program.calls):
        if number >= len(local.calls):
            return number, "the call is missing"
        other = local.calls[number]
        if other.function != call.function or other.module != call.module:
            return number, f"{other.name} in the place of {call.name}"
        args, kwargs = expected.get(call, (call.args, call.kwargs))
        for mine, theirs in zip(values_in((args, kwargs)), values_in((other.args, other.kwargs))):
            same.setdefault(mine, theirs)  # constants
        wanted = substituted((args, kwargs), Value, lambda value: same.get(value, value))
        if call.module not in layers and not _equal(wanted, (other.args, other.kwargs)):
            return number, f"{other!r} of {_numbers(other)}, and not of {_numbers_of(wanted)}"
        for result, value in zip(call.results, other.results, strict=True):
            is_inside = call.module in layers and result not in shards  # between the calls of a layer
            if value.shape != shards.get(result, result.shape) and not is_inside:
                return number, f"a result of {list(value.shape)}, not {list(shards.get(result, result.shape))}"
            same[result] = value
    return (None, "") if len(local.calls) == len(program.calls) else (len(program.calls) - 1, "there are more calls")


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Value) or isinstance(b, Value):
        return a is b
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, slice) and isinstance(b, slice):
        return all(_equal(getattr(a, name), getattr(b, name)) for name in ("start", "stop", "step"))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b or (type(a) is type(b) and a.shape == b.shape)
    return type(a) is type(b) and bool(a == b)


def _numbers(call: Call) -> str:
    return _numbers_of((call.args, call.kwargs))


def _numbers_of(x: Any) -> str:
    def ints(x: Any) -> Iterator[int]:
        if isinstance(x, int):
            yield x
        for item in x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ():
            yield from ints(item)

    return str(list(ints(x)))
