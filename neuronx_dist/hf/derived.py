"""A plan derived from the forward of a module itself: `swap(model, plan="derived")`.

recorded (recorded_model.py) -> regions on shards, by the rules of its calls (regions.py) -> words -> proven
(rank_proof.py)
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..program.program import Program
from ..program.repeated import first_difference
from .model_plan import Derived, parent_of
from .plan_reading import end_of
from .rank_proof import prove
from .recorded_model import MATRICES, RecordedModel, kind_of
from .regions import CannotShard, Forward, LayerCalls, Region, grow, regions_of

__all__ = ["IndivisibleError", "derive"]

_FEW = 16  # a matrix with fewer weights than this part of the largest one stays whole: a collective costs more
_DEGREES = range(2, 9)
_ALONE = ("colwise_gather_output", "rowwise_split_input")


class IndivisibleError(ValueError):
    """Heads or sizes that tp does not divide; `degree`: one that divides them, 1 if there is none."""

    def __init__(self, message: str, degree: int) -> None:
        super().__init__(message)
        self.degree = degree


def derive(model: nn.Module, inputs: Mapping[str, Any] | None, tp: int, degree: int = 0) -> Derived:
    """Returns the words of a model's layers at a tp degree, and what is to be changed besides.

    Args:
        degree: at which regions are grown and attributes are found; 0: tp.
        inputs: arguments of forward by name, of which shapes and dtypes count; None: `dummy_inputs` of the model.

    Raises:
        UnsupportedModelError: forward cannot be recorded, has numbers of whole sizes that are no attributes, or draws
            random numbers for shards and for whole values in one module, not parted by columns and row layers.
        IndivisibleError: tp does not divide the heads or sizes of layers that another degree would shard.
    """
    source, degree = RecordedModel(model, inputs), degree or tp
    words: dict[str, str] = {}
    local_logits, siblings = True, {}
    attributes: dict[str, dict[str, int]] = {}
    random: tuple[tuple[str, ...], tuple[str, ...], bool] = ((), (), False)
    recorded = source.program(True)
    for training in (True, False):
        program = recorded if training else source.program(False)
        if not training and not first_difference(recorded, program):
            break
        layers = source.layers(program)
        ends = source.ends(layers)
        source.check_ends(program)
        inner = {name: layer for name, layer in layers.items() if name not in ends}
        forward = Forward(program, inner)
        regions, reasons = regions_of(forward, degree)
        found = _words(source, layers, inner, regions, tp)
        if words and found != words:
            differing = sorted(name for name in {**words, **found} if words.get(name) != found.get(name))
            raise source.refusal(f"training and evaluation would shard {', '.join(differing)} differently")
        words = found
        if training:
            _check_divided(source, forward, regions, reasons, degree)
            _report_gathers(source, words, reasons)
            siblings = _siblings(source, inner, words)
            random = _random_modules(source, program, regions)
        local_logits = local_logits and _has_open_logits(source, program, layers)
        attributes = prove(source, program, regions, attributes, degree, training)
    return Derived({**source.rest(words), **words}, attributes, siblings, *random, local_logits)


# --- words


def _words(
    source: RecordedModel,
    every: Mapping[str, LayerCalls],
    layers: Mapping[str, LayerCalls],
    regions: list[Region],
    tp: int,
) -> dict[str, str]:
    """Returns the words of layers in regions, of what such regions read, and of layers that are sharded alone.

    Args:
        every: all layers that parallel ones can replace; `layers`: all but the ends and those that share weights.
    """
    words: dict[str, str] = {}
    for region in regions:
        words |= region.words
        words |= {value.path: word for value, word in region.parameters.items()}
        for value in region.partial:
            owner = parent_of(value.path)
            read = {parameter.path for parameter in region.partial}
            if any(f"{owner}.{key}" not in read for key, _ in source.modules[owner].named_parameters(recurse=False)):
                raise source.refusal(f"shards read {value.path}, but not all parameters of {owner or source.what}")
            words[owner] = "replicated_with_grad_allreduce"
    sizes = [module.weight.numel() for module in source.modules.values() if kind_of(module) in MATRICES]
    largest = max(sizes, default=0)
    for name, layer in layers.items():
        is_large = name not in words and source.modules[name].weight.numel() * _FEW >= largest
        if is_large and (word := _alone(source.modules[name], layer.kind, largest, tp)):
            words[name] = word
    for name in source.modules:
        if kind_of(source.modules[name]) == "embedding" and name not in words and len(source.sharing(name)) > 1:
            if any(other not in every for other in source.sharing(name)):  # their weight is read by other calls, too
                continue
            words |= _tied(source, name, tp)
    return words


def _alone(module: Any, kind: str, largest: int, tp: int) -> str:
    """Returns the word of a layer outside of regions, whose input and output are whole; "": it stays whole."""
    if kind == "linear" and module.out_features % tp == 0:
        return "colwise_gather_output"
    if kind == "linear" and module.in_features % tp == 0:
        return "rowwise_split_input"
    is_vocabulary = kind == "embedding" and module.weight.numel() >= largest
    return "embedding_rowwise" if is_vocabulary and module.num_embeddings % tp == 0 else ""


def _tied(source: RecordedModel, name: str, tp: int) -> dict[str, str]:
    """Returns the words of an embedding and its head with one weight, in a model that does not name its ends."""
    names = source.sharing(name)
    kinds = {other: kind_of(source.modules[other]) for other in names}
    ends = {source.names.get(id(end_of(source.model, side))) for side in ("input", "output")}
    if ends.intersection(names) or not set(kinds.values()) <= {"embedding", "linear"}:
        return {}
    if source.modules[name].num_embeddings % tp:
        return {}
    return {n: "embedding_rowwise" if kind == "embedding" else "colwise_gather_output" for n, kind in kinds.items()}


def _check_divided(
    source: RecordedModel, forward: Forward, regions: list[Region], reasons: Mapping[str, CannotShard], tp: int
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
        raise IndivisibleError(
            f'swap: {source.what}: plan="derived" cannot shard layers over tp={tp}: {"; ".join(listed)}. Choose such a '
            f"tp; else {source.advice()}",
            max(set.intersection(*(set(degrees[name]) for name in refused if degrees[name])), default=1),
        )


def _report_gathers(source: RecordedModel, words: Mapping[str, str], reasons: Mapping[str, CannotShard]) -> None:
    """Warns of layers whose output is gathered, with the reason of one: a plan may pair them."""
    alone = [name for name, word in words.items() if word in _ALONE and name in reasons and not reasons[name].is_result]
    if alone:
        warnings.warn(
            f'swap: {source.what}: plan="derived" gathers the output of {len(alone)} layers, where columns and rows in '
            f"pairs send less: {alone[0]}: {reasons[alone[0]]}",
            stacklevel=7,
        )


def _siblings(
    source: RecordedModel, layers: Mapping[str, LayerCalls], words: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Returns, by column layer, the others of its module that are called on the same tensors."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        if words.get(name) == "colwise" and layer.kind == "linear":
            groups[parent_of(name), layer.inputs, source.modules[name].bias is None].append(name)
    return {name: tuple(n for n in group if n != name) for group in groups.values() for name in group}


def _random_modules(
    source: RecordedModel, program: Program, regions: list[Region]
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Returns the modules that draw random numbers for shards only, and those that do between columns and row layers.

    The last item: there are random numbers for whole values.
    """
    sharded = {call for region in regions for call in region.calls}
    local = dict.fromkeys(call.module for call in program.calls if call.random and call in sharded)
    whole = dict.fromkeys(call.module for call in program.calls if call.random and call not in sharded)
    both = {name: others for name in local if (others := [other for other in whole if _is_inside(other, name)])}
    words = {layer: word for region in regions for layer, word in region.words.items()}
    for name, others in both.items():
        of_module = {layer: "col" in word for layer, word in words.items() if parent_of(layer) == name}
        is_between = False  # what hooks of the layers make it
        for call in program.calls:
            is_between = of_module.get(call.module, is_between)
            if call.random and is_between != (call in sharded) and (is_between or _is_inside(call.module, name)):
                raise source.refusal(
                    f"{name or source.what} draws random numbers for shards, which differ over tp, and {others[0]} for "
                    f"whole values, at {call.where}, where columns and row layers do not part them: move the one into "
                    "a module of its own, or set a rate to 0"
                )
    return tuple(name for name in local if name not in both), tuple(both), bool(whole)


def _is_inside(path: str, module: str) -> bool:
    return not module or f"{path}.".startswith(f"{module}.")


def _has_open_logits(source: RecordedModel, program: Program, layers: Mapping[str, LayerCalls]) -> bool:
    """Returns whether calls after the head take shards of the vocabulary, up to forward's result."""
    head = end_of(source.model, "output")
    layer = layers.get(source.names.get(id(head), ""))
    if layer is None or not hasattr(source.model, "loss_type"):  # its loss is not known
        return head is None
    size = layer.outputs[0].shape[-1]
    divisor = next(n for n in range(2, size + 1) if size % n == 0) if size > 1 else 1
    try:
        return list(grow(Forward(program, {layer.name: layer}, True), layer, 1, divisor).words) == [layer.name]
    except CannotShard:
        return False
