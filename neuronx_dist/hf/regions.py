"""Regions of a recorded forward that compute on shards, found by the rules of its calls (`rules/`).

    x -> column [.., out/tp] -> calls on shards of one label -> row [.., in/tp] -> sum

A region grows from one column layer: every call that reads a shard must be the same function of shards, as its label
spec says; whatever has the sharded label, too, is sharded by its layer; the region ends in row layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ..program.program import Call, Program, Value, local_shape, operands_of
from ..rules import RULES
from ..rules.containers import edited, substituted
from ..rules.local_call import Arguments, TensorSlot, local_arguments, spec_of
from ..rules.spec import Spec
from ..spmd.types import S, Shard

__all__ = ["CannotShard", "Forward", "LayerCalls", "Region", "grow", "regions_of"]

MAX_BLOCKS = 3  # a fused matrix of queries, keys and values


class CannotShard(Exception):
    """A label cannot be sharded; the message has the call and the reason."""

    def __init__(
        self, reason: str, call: Call | None = None, *, indivisible: bool = False, is_result: bool = False
    ) -> None:
        super().__init__(f"{reason} ({call.name} at {call.where})" if call else reason)
        self.indivisible, self.is_result = indivisible, is_result


@dataclass(frozen=True)
class LayerCalls:
    """A layer that parallel ones can replace, in a recorded forward.

    Attributes:
        kind: "linear", "conv1d" (transformers' transposed linear) or "embedding".
        inputs, outputs: its input and result in each of its invocations.
    """

    name: str
    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Forward:
    """A recorded forward, its layers, and what depends on weights.

    Attributes:
        owner: by a call of a layer the layer.
        column_of, rows_of: the layer that returns a value; the layers that take it as input.
        results: values that forward returns, of which `open_results` may be shards.
    """

    def __init__(self, program: Program, layers: Mapping[str, LayerCalls], open_results: bool = False) -> None:
        self.program, self.layers, self.open_results = program, layers, open_results
        self.consumers = program.consumers()
        self.owner = {call: layers[call.module] for call in program.calls if call.module in layers}
        self.column_of = {value: layer for layer in layers.values() for value in layer.outputs}
        self.results = {value for value in program.outputs if isinstance(value, Value)}
        self.weights: dict[Value, frozenset[Value]] = {value: frozenset([value]) for value in program.parameters}
        for call in program.calls:
            found = [self.weights.get(value, frozenset()) for value in operands_of(call)]
            both = frozenset().union(*found)
            for value in call.results if call.grad and both else ():
                if value.dtype.is_floating_point:
                    self.weights[value] = both
        activations = set(program.inputs)
        for call in program.calls:
            if activations.intersection(operands_of(call)):
                activations.update(call.results)
        # Differentiable values that depend on activations, and not on weights only.
        self.from_inputs = {value for value in self.weights if value in activations}

    def rows_of(self, call: Call, value: Value) -> LayerCalls | None:
        """Returns the layer whose input a call reads, if the call is one of a layer."""
        layer = self.owner.get(call)
        return layer if layer is not None and value in layer.inputs else None


@dataclass
class Region:
    """Layers by name with a word, bare parameters, values and calls that are sharded over one axis.

    Attributes:
        partial: whole parameters that calls on shards read, so that a rank has a part of their gradient.
        calls: by call its arguments on a rank, with `Value`s.
    """

    size: int
    words: dict[str, str] = field(default_factory=dict)
    parameters: dict[Value, str] = field(default_factory=dict)
    types: dict[Value, Shard] = field(default_factory=dict)
    partial: set[Value] = field(default_factory=set)
    calls: dict[Call, Arguments] = field(default_factory=dict)

    def shapes(self) -> dict[Value, tuple[int, ...]]:
        """Returns the shapes of its values on one rank."""
        return {value: local_shape(value.shape, shard, self.size) for value, shard in self.types.items()}


def grow(forward: Forward, layer: LayerCalls, blocks: int, size: int) -> Region:
    """Returns the region of a column layer whose output is sharded in `blocks` blocks.

    Raises:
        CannotShard: a call mixes values along the label, or something that has it cannot be sharded.
    """
    growth = _Growth(forward, size)
    for value in layer.outputs:
        growth.shard(value, S(len(value.shape) - 1, blocks))
    growth.run()
    return growth.region


_COLUMN = {1: "colwise", 2: "packed_colwise", 3: "packed_colwise_3"}
_ROW = {1: "rowwise", 2: "packed_rowwise"}


class _Growth:
    def __init__(self, forward: Forward, size: int) -> None:
        self.forward, self.size = forward, size
        self.region = Region(size)
        self.queue: deque[Value] = deque()
        self.whole: set[Value] = set()
        self.labels: dict[Call, tuple[int, int]] = {}
        self.specs: dict[Call, tuple[Spec, Arguments, list[Value]]] = {}

    def run(self) -> None:
        while self.queue:
            value = self.queue.popleft()
            shard = self.region.types[value]
            self._producer(value, shard)
            if value in self.forward.results and not self.forward.open_results:
                raise CannotShard(
                    f"forward returns a value that would be a shard of {list(value.shape)}", is_result=True
                )
            for call, _ in self.forward.consumers.get(value, ()):
                self._consumer(call, value, shard)
        for call in self.labels:
            self._whole_operands(call)
        if not self.forward.open_results and "row" not in "".join(self.region.words.values()):
            raise CannotShard("no layer takes the shards as its input")
        for call in self.labels:
            self.region.calls[call] = self._local(call)
        for value in self.region.partial:
            self._check_partial(value)

    def shard(self, value: Value, shard: Shard, call: Call | None = None) -> None:
        known = self.region.types.get(value)
        if known == shard:
            return
        if known is not None:
            raise CannotShard(f"a value of {list(value.shape)} would be {shard} and {known}", call)
        if value in self.whole:
            raise CannotShard(f"the sum of a row layer, {list(value.shape)}, would be sharded", call)
        if shard.dim >= len(value.shape) or value.shape[shard.dim] % (shard.stride * self.size):
            raise CannotShard(
                f"{self.size} ranks do not divide dim {shard.dim} of {list(value.shape)}", call, indivisible=True
            )
        self.region.types[value] = shard
        self.queue.append(value)

    def _word(self, layer: LayerCalls, word: str | None) -> None:
        if word is None or self.region.words.setdefault(layer.name, word) != word:
            raise CannotShard(f"{layer.name} would be sharded in two ways")

    def _producer(self, value: Value, shard: Shard) -> None:
        layer, last = self.forward.column_of.get(value), shard.dim == len(value.shape) - 1
        if layer is not None and last:
            if layer.kind == "embedding":
                self._word(layer, "embedding_heads" if shard.stride == 1 else None)
            else:
                self._word(layer, _COLUMN.get(shard.stride))
            for output in layer.outputs:
                if output not in self.region.types:
                    self.shard(output, S(len(output.shape) - 1, shard.stride))
        elif value.producer is not None:
            call = value.producer
            if _is_uniform(call):
                self.region.calls[call] = self._smaller(call, value)
            else:
                self._assign(call, call.results.index(value), shard, of_result=True)
        elif value.kind == "parameter":
            dims = len(value.shape)
            words = {max(dims - 2, 0): "colwise", dims - 1: "rowwise"}
            word = words.get(shard.dim) if shard.stride == 1 else None
            if word is None:
                raise CannotShard(f"{value.path} {list(value.shape)} would be {shard}, for which there is no word")
            self.region.parameters[value] = "colwise" if dims == 1 else word
        else:
            raise CannotShard(f"the {value.kind} {value.path or value.name} {list(value.shape)} would have to be cut")

    def _consumer(self, call: Call, value: Value, shard: Shard) -> None:
        layer = self.forward.rows_of(call, value)
        if layer is None or shard.dim != len(value.shape) - 1 or layer.kind == "embedding":
            if self.forward.owner.get(call) is not None and value.kind == "parameter":
                raise CannotShard(f"{value.path} belongs to a layer", call)
            self._assign(call, operands_of(call).index(value), shard, of_result=False)
            return
        self._word(layer, _ROW.get(shard.stride) if layer.kind == "linear" or shard.stride == 1 else None)
        for output in layer.outputs:
            if output in self.region.types:
                raise CannotShard(f"the sum of the row layer {layer.name} would be sharded", call)
            self.whole.add(output)
        for other in layer.inputs:
            self.shard(other, S(len(other.shape) - 1, shard.stride), call)

    # --- calls on shards

    def _spec(self, call: Call) -> tuple[Spec, Arguments, list[Value]]:
        if call in self.specs:
            return self.specs[call]
        rule = RULES.get(call.function)
        if rule is None or rule.kind != "op" or rule.spec is None:
            raise CannotShard("a function without a rule for its dims reads a shard", call)
        values: list[Value] = []

        def slot(value: Value) -> TensorSlot:
            values.append(value)
            return TensorSlot(len(values) - 1, value.shape, value.dtype)

        arguments: Arguments = substituted((call.args, call.kwargs), Value, slot)
        try:
            spec = spec_of(rule, substituted(arguments, TensorSlot, _meta))
        except Exception as error:  # the rule reads values
            raise CannotShard(f"its rule needs values ({type(error).__name__})", call) from error
        if len(spec.ins) != len(operands_of(call)) or len(spec.outs) != len(call.results):
            raise CannotShard("its rule describes other operands", call)
        self.specs[call] = spec, arguments, values
        return self.specs[call]

    def _assign(self, call: Call, index: int, shard: Shard, *, of_result: bool) -> None:
        """Shards all operands and results of a call that have the label of one of them."""
        if call.writes:
            raise CannotShard("a buffer would be written with a shard", call)
        spec, _, _ = self._spec(call)
        dims = (spec.outs if of_result else spec.ins)[index]
        if dims is None:  # only its dtype or shape is read
            return
        label, inside = self._label(spec, dims, shard, call)
        if call in self.labels:
            if self.labels[call] != (label, inside):
                raise CannotShard("it would be sharded along two of its labels", call)
            return
        self.labels[call] = label, inside
        if label in spec.fixed or label in spec.ranges or label in spec.looked_up:
            raise CannotShard(spec.fixed.get(label, "it takes a range of the sharded dim"), call)
        if label in spec.reduced:
            raise CannotShard("it sums over the sharded dim", call)
        for value, of in (*zip(operands_of(call), spec.ins), *zip(call.results, spec.outs)):
            other = None if of is None else _cut(spec, of, label, inside)
            if other is not None:
                self.shard(value, other, call)
            elif value in call.results:
                raise CannotShard("its result would not be a shard", call)

    def _label(self, spec: Spec, dims: Any, shard: Shard, call: Call) -> tuple[int, int]:
        """Returns the label that a shard cuts, and the number of blocks inside it."""
        outer = 1
        for factor in dims[shard.dim]:
            length = spec.sizes[factor]
            if shard.stride % outer == 0 and shard.stride < outer * length:
                inside = shard.stride // outer
                if length % (inside * self.size):
                    what = f"{inside} blocks of " if inside > 1 else ""
                    raise CannotShard(
                        f"{self.size} ranks do not divide {what}{length // inside}", call, indivisible=True
                    )
                return factor, inside
            outer *= length
        raise CannotShard(f"its dims have no part that {shard} cuts", call)

    def _local(self, call: Call) -> Arguments:
        """Returns the arguments of a call on one rank.

        Raises:
            CannotShard: no integers make it the function of a shard.
        """
        spec, arguments, values = self._spec(call)
        label, _ = self.labels[call]

        def tensor(slot: TensorSlot) -> torch.Tensor:
            return _meta(TensorSlot(slot.number, self.shape(values[slot.number]), slot.dtype))

        sizes = {label: spec.sizes[label] // self.size}
        local = local_arguments(call.function, RULES[call.function], spec, sizes, arguments, tensor)
        if local is None:
            raise CannotShard("no integers make it the same function of a shard", call)
        restored: Arguments = substituted(local, TensorSlot, lambda slot: values[slot.number])
        return restored

    def _smaller(self, call: Call, value: Value) -> Arguments:
        """Returns the arguments of `torch.zeros` and its like for the shape of a shard."""
        arguments = (call.args, call.kwargs)
        for local in edited(arguments, lambda x: x // self.size if x and x % self.size == 0 else None):
            args, kwargs = local
            if tuple(call.function(*args, **{**kwargs, "device": "meta"}).shape) == self.shape(value):
                return local
        raise CannotShard("no integers make it the same function of a shard", call)

    def shape(self, value: Value) -> tuple[int, ...]:
        shard = self.region.types.get(value)
        return value.shape if shard is None else local_shape(value.shape, shard, self.size)

    # --- gradients of what stays whole

    def _whole_operands(self, call: Call) -> None:
        """Checks the gradients of operands that are whole beside shards: those of parameters alone may be partial."""
        for value in operands_of(call):
            weights = self.forward.weights.get(value)
            if weights is None or value in self.region.types or not call.grad:
                continue
            if value in self.forward.from_inputs:
                raise CannotShard("a whole activation meets shards, and its gradient would be partial", call)
            self.region.partial.update(weights)

    def _check_partial(self, parameter: Value) -> None:
        """Raises CannotShard if calls on whole values read a parameter, too, which adds a complete gradient."""
        waiting = [parameter]
        while waiting:
            value = waiting.pop()
            if value in self.forward.results:
                raise CannotShard(f"forward returns {parameter.path}, and its gradient would be partial")
            for call, _ in self.forward.consumers.get(value, ()):
                layer = self.forward.rows_of(call, value)
                if layer is not None and layer.kind != "embedding":
                    raise CannotShard(f"shards, and {layer.name} as its input, read {parameter.path}", call)
                if call in self.labels:
                    continue
                if any(result in self.forward.from_inputs for result in call.results):
                    raise CannotShard(f"shards and whole values read {parameter.path}", call)
                waiting += [result for result in call.results if result in self.forward.weights]


def _is_uniform(call: Call) -> bool:
    """Returns whether a call makes a tensor of one number, so that its shards are equal: `torch.zeros(..)`."""
    rule = RULES.get(call.function)
    return rule is not None and rule.kind in ("zero", "uniform") and not operands_of(call)


def _cut(spec: Spec, dims: Any, label: int, inside: int) -> Shard | None:
    for dim, factors in enumerate(dims):
        if label in factors:
            return S(dim, prod(spec.sizes[factor] for factor in factors[: factors.index(label)]) * inside)
    return None


def _meta(slot: TensorSlot) -> torch.Tensor:
    return torch.empty(slot.shape, dtype=slot.dtype, device="meta")


def regions_of(forward: Forward, size: int) -> tuple[list[Region], dict[str, CannotShard]]:
    """Returns the largest regions without a common layer, and the reason for each layer from which none grows."""
    found: list[Region] = []
    reasons: dict[str, CannotShard] = {}
    for layer in forward.layers.values():
        if layer.kind == "embedding" or any("colwise" in region.words.get(layer.name, "") for region in found):
            continue
        width = layer.outputs[0].shape[-1]
        for blocks in (n for n in range(1, MAX_BLOCKS + 1) if width % n == 0):
            try:
                found.append(grow(forward, layer, blocks, size))
                break
            except CannotShard as reason:
                if layer.name not in reasons or (reason.indivisible and not reasons[layer.name].indivisible):
                    reasons[layer.name] = reason
    chosen: list[Region] = []
    for region in sorted(found, key=lambda region: -len(region.words)):
        used: set[Any] = {item for other in chosen for item in (*other.words, *other.types)}
        if not used.intersection((*region.words, *region.types)):
            chosen.append(region)
    return chosen, reasons
