"""The proof of a derived plan: a copy of the model with the weights of one rank makes the calls that the rules ask for.

Numbers of heads that forward reads from attributes of its modules become those of a rank, found by trial.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import nn

from ..program.program import Program, Value, operands_of, values_in
from ..program.record import record_program
from ..rules.containers import substituted
from ..weights.shard_spec import ShardSpec
from .in_place import sharded_dim
from .recorded_model import RecordedModel
from .regions import Region
from .words import LAYER_STYLES, WORDS

__all__ = ["prove"]

# Names of attributes with a number of heads, or of features of all heads.
_COUNTS = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "n_head", "heads",
    "split_size", "all_head_size", "inner_dim",
)  # fmt: skip


def prove(
    source: RecordedModel,
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
    at, reason = _mismatch(source, program, regions, attributes, tp, training)
    if at is None:
        return attributes
    furthest, dead_ends = (at, reason), 0
    trials = [(at, attributes, _candidates(modules, attributes, tp))]
    while trials and dead_ends < _DEAD_ENDS:  # depth first: a wrong attribute may lead past the first mismatch, too
        at, local, candidates = trials[-1]
        for names in candidates:
            changed = _with_local(local, modules, names, tp)
            later, reason = _mismatch(source, program, regions, changed, tp, training)
            if later is None:
                return changed
            if later > at:
                furthest = max(furthest, (later, reason), key=lambda mismatch: mismatch[0])
                trials.append((later, changed, _candidates(modules, changed, tp)))
                break
        else:
            trials.pop()
            dead_ends += 1
    call, reason = program.calls[furthest[0]], furthest[1]
    raise source.refusal(
        f"{call.module or source.what} computes with a number of the whole size that is no attribute of the module, or "
        f"that has other uses, at {call.where}: {reason}. Read the number from the shape of a tensor, as x.view(batch, "
        "seq, -1, head_dim) does"
    )


_DEAD_ENDS = 8  # choices of attributes that lead nowhere, before the model is refused


def _with_local(
    attributes: Mapping[str, Mapping[str, int]],
    modules: Mapping[str, nn.Module],
    names: tuple[tuple[type, str], ...],
    tp: int,
) -> dict[str, dict[str, int]]:
    """Returns the attributes that a rank changes, and those of `names`, of all modules of a class."""
    changed = {name: dict(values) for name, values in attributes.items()}
    for kind, attribute in names:
        for name, module in modules.items():
            if _divisible(module, attribute, tp) and type(module) is kind:
                changed.setdefault(name, {})[attribute] = getattr(module, attribute) // tp
    return changed


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
    source: RecordedModel,
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
    first: dict[str, int] = {}  # call on shards at a line
    for number, call in enumerate(program.calls):
        if any(call in region.calls for region in regions):
            first.setdefault(call.where, number)
    try:
        local = record_program(model, source.inputs, training=training)
    except Exception as error:
        frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        at = next((first[frame] for frame in reversed(frames) if frame in first), 0)
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
    calls, others = ([call for call in p.calls if any(x.varies for x in call.results)] for p in (program, local))
    numbers = {call: number for number, call in enumerate(program.calls)}
    for place, call in enumerate(calls):  # others make constants, which forward may have from an earlier call
        number = numbers[call]
        if place >= len(others):
            return number, "the call is missing"
        other = others[place]
        if other.function != call.function or other.module != call.module:
            return number, f"{other.name} in the place of {call.name}"
        args, kwargs = expected.get(call, (call.args, call.kwargs))
        wanted, actual = (substituted(x, Value, _compact) for x in ((args, kwargs), (other.args, other.kwargs)))
        for mine, theirs in zip(values_in(wanted), values_in(actual)):
            if mine not in same and theirs.shape != shards.get(mine, mine.shape):
                return number, f"an operand of {list(theirs.shape)}, not {list(shards.get(mine, mine.shape))}"
            if mine not in same and not _is_equal_constant(mine, theirs, expected):
                return number, f"the constant {theirs.name} has other numbers"
            same.setdefault(mine, theirs)
        wanted = substituted(wanted, Value, same.__getitem__)
        if call.module not in layers and not _equal(wanted, actual):
            return number, f"{other!r} has the numbers {_numbers(actual)}, and not {_numbers(wanted)}"
        for result, value in zip(call.results, other.results, strict=True):
            is_inside = call.module in layers and result not in shards  # between the calls of a layer
            if value.shape != shards.get(result, result.shape) and not is_inside:
                return number, f"a result of {list(value.shape)}, not {list(shards.get(result, result.shape))}"
            same[_compact(result)] = _compact(value)
    return (None, "") if len(calls) == len(others) else (len(program.calls) - 1, "there are more calls")


def _compact(value: Value) -> Value:
    """Returns the value that `value` is a contiguous copy of: of a tensor of one head it is the tensor itself."""
    while value.producer is not None and value.producer.name == "contiguous":
        value = operands_of(value.producer)[0]
    return value


def _is_equal_constant(mine: Value, theirs: Value, expected: Mapping[Any, Any]) -> bool:
    """Returns whether constants are made by equal calls: on shards by the calls that the rules ask for."""
    if mine.varies or theirs.varies:
        return True
    if mine.producer is None or theirs.producer is None:
        tensors = mine.constant, theirs.constant
        if None in (tensors[0], tensors[1]) or any(tensor.is_meta for tensor in tensors if tensor is not None):
            return mine.producer is theirs.producer
        return torch.equal(*tensors)  # type: ignore[arg-type]
    if mine.producer.function != theirs.producer.function:
        return False
    args, kwargs = expected.get(mine.producer, (mine.producer.args, mine.producer.kwargs))
    return _equal(
        (args, kwargs),
        (theirs.producer.args, theirs.producer.kwargs),
        lambda a, b: _is_equal_constant(a, b, expected),
    )


def _equal(a: Any, b: Any, are_equal: Callable[[Value, Value], bool] = operator.is_) -> bool:
    if isinstance(a, Value) and isinstance(b, Value):
        return are_equal(a, b)
    if isinstance(a, Value) or isinstance(b, Value):
        return False
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_equal(x, y, are_equal) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key], are_equal) for key in a)
    if isinstance(a, slice) and isinstance(b, slice):
        return all(_equal(getattr(a, name), getattr(b, name), are_equal) for name in ("start", "stop", "step"))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b or (type(a) is type(b) and a.shape == b.shape)
    if isinstance(a, int) and isinstance(b, int):  # in a check, sizes of axes are ints of a class of their own
        return isinstance(a, bool) == isinstance(b, bool) and a == b
    return type(a) is type(b) and bool(a == b)


def _numbers(x: Any) -> str:
    def numbers(x: Any) -> Iterator[float]:
        if isinstance(x, (int, float)):
            yield x
        parts = (x.start, x.stop, x.step) if isinstance(x, slice) else x if isinstance(x, (tuple, list)) else ()
        for item in x.values() if isinstance(x, dict) else parts:
            yield from numbers(item)

    return str(list(numbers(x)))
