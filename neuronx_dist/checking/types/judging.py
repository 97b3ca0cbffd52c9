"""From the call of a torch function to its judgement: the operands, the spec, and the error.

Nothing here runs a call or caches a judgement: `SpmdTypeMode` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...call_site import call_site
from ...rules import RULES, Rule
from ...spmd.errors import Violation
from ...spmd.tensor_type import EQUAL, Note, Origin, TensorType, tensors_in, type_of
from ...spmd.types import DIFFERING, PARTIAL_NORM, I, P, R, V
from ...torch_internals.autograd import top_saved_tensors_hooks
from .handlers.axis_numbers import with_factors, with_numbers
from .handlers.inplace import OVERWRITES, overwritten
from .handlers.lookups import assumed_masked
from .handlers.one_rank import as_share, claim
from .handlers.own_rows import check_own_rows, placed
from .handlers.random_numbers import draws, made_type, stream_type
from .handlers.rank_arguments import counted, rank_values
from .handlers.seeds import generator_in
from .handlers.vmapped import batched, refused, with_hidden_dims
from .judge import Judgement, Operand, judge
from .messages.explain import JudgedCall, explain, explain_shapes
from .messages.provenance import module_path
from .session import Session

__all__ = ["begin", "judge_call", "result_origins"]


def judge_call(
    mode: Session,
    rule: Rule,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    notes: Sequence[Note],
) -> Judgement:
    """Types of the results.

    Raises:
        SpmdTypeError: the types do not go together.
    """
    if func is Tensor.new_tensor:  # of the first operand only the dtype is read
        rule, func, args, tensors, notes = RULES[torch.tensor], torch.tensor, args[1:], tensors[1:], notes[1:]
    enabled = torch.is_grad_enabled()
    operand_types = [
        Operand(note.type, enabled and x.requires_grad, isinstance(x, nn.Parameter)) for x, note in zip(tensors, notes)
    ]
    if func in OVERWRITES or (func is Tensor.__setitem__ and _is_all(args[1])):
        operand_types[0] = Operand(overwritten(operand_types[0].type), operand_types[0].differentiable)
    rows = placed(rule, args, kwargs, tensors, notes)
    if rows is not None and rule.name != "copy_":
        operand_types = [operand._replace(type=operand.type.with_axis(rows.atom, I)) for operand in operand_types]
    operand_types = with_factors(mode, rule, kwargs, operand_types)
    numbers = [
        Operand(TensorType.of(dict.fromkeys(mode.atoms(value.axes), V), R), False)
        for value in rank_values(rule, args, kwargs)
        if rows is None or rows.atom not in mode.atoms(value.axes)
    ]
    for x in _numbers_read(rule, func, args, kwargs):
        note = mode.note(x, rule.name)
        if note is not None:
            _scalar(mode, JudgedCall(RULES[Tensor.item], Tensor.item, (x,), {}, [x], [Operand(note.type, False)], None))
    stacked = rule.kind == "factory" and len(tensors) > 0
    if rule.kind not in ("op", "scalar", "decompose") and not stacked:
        type_, assumed = made_type(mode, rule, args, kwargs, operand_types, numbers)
        born = {}
        if rule.kind == "random" and generator_in(args, kwargs) is not None:
            what = f"random numbers of {rule.name} from a seed that differs by rank"
            born = {axis: what for axis, spmd_type in type_ if spmd_type is V and axis != "pp"}
        return _assuming(mode, with_numbers(mode, rule, args, kwargs, Judgement((type_,), born, assumed)))
    if rule.kind == "decompose" and rule.decompose is not None:
        before = dict(mode.assumed)
        with mode, _apart_from_hooks():
            result = rule.decompose(*args, **kwargs)
        result_types = tuple(type_ for type_ in map(type_of, tensors_in(result)) if type_ is not None)
        return Judgement(result_types, {}, tuple(key[0] for key, n in mode.assumed.items() if before.get(key) != n))
    spec = None
    if rule.spec is not None:
        try:
            spec = rule.spec(*args, **kwargs)
        except Exception:
            try:
                func(*args, **kwargs)  # torch's own message, if the arguments are wrong
            except RuntimeError as error:
                call = JudgedCall(rule, func, args, kwargs, tensors, operand_types, None)
                raise (explain_shapes(mode, call, error) or error) from None
            raise
    if rule.kind == "scalar":
        return _scalar(mode, JudgedCall(rule, func, args, kwargs, tensors, operand_types, spec))
    if spec is not None:
        spec = with_hidden_dims(counted(rule, spec, tensors, notes), notes)
    affine = rule.affine is not None and bool(rule.affine(*args, **kwargs))
    total = max(1, len(spec.outs)) if spec is not None else 1
    drawn, assumed = [], ()
    if draws(rule, args, kwargs):
        stream, assumed = stream_type(mode, generator_in(args, kwargs), operand_types[0].type)
        drawn = [Operand(stream, False)]
    judged, squared = _squared_axes(rule, args, kwargs, operand_types)
    while True:
        try:
            if rows is None:
                check_own_rows(rule, tensors, operand_types)
            judgement = _with_squares(judge(rule, spec, [*judged, *numbers, *drawn], affine, total), squared)
            break
        except Violation as violation:
            if batched(notes) is not None:
                raise refused(rule, violation, tensors, notes) from None
            call = JudgedCall(rule, func, args, kwargs, tensors, [*operand_types, *numbers, *drawn], spec, affine)
            shares = as_share(violation, judged) if mode.claims is not None and not mode.probing else None
            if shares is None:
                raise explain(mode, violation, call) from None
            claim(mode, violation.axis, partial(explain, mode, violation, call))
            judged, mode.uncached = shares, True
    judgement = assumed_masked(rule, notes, judgement)
    judgement = judgement._replace(assumed=(*judgement.assumed, *assumed))
    return _assuming(mode, with_numbers(mode, rule, args, kwargs, judgement))


def _apart_from_hooks() -> AbstractContextManager[Any]:
    """Returns a context in which hooks see no saved tensor: a checkpoint counts those of the call itself."""
    is_hooked = top_saved_tensors_hooks(True) is not None
    return saved_tensors_hooks(_itself, _itself) if is_hooked else nullcontext()


def _itself(x: Tensor) -> Tensor:
    return x


def _numbers_read(rule: Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields tensors whose numbers the call reads: sizes, bounds of slices and of draws, items of lists in a list."""
    if rule.kind in ("zero", "uniform", "random", "copy_of_meta") and rule.spec is None:
        sizes = [value for name, value in kwargs.items() if name != "out"]
        yield from tensors_in([args[rule.name.startswith("new_") :], sizes])
    if rule.kind == "factory" or func in (Tensor.__getitem__, Tensor.__setitem__):
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, (list, tuple, slice)):
                    yield from tensors_in((item.start, item.stop, item.step) if isinstance(item, slice) else item)


def _is_all(index: Any) -> bool:
    """Returns whether `x[index] = ...` writes all of x."""
    indices = index if isinstance(index, tuple) else (index,)
    return all(item is ... or (isinstance(item, slice) and item == slice(None)) for item in indices)


def _assuming(mode: Session, judgement: Judgement) -> Judgement:
    """Notes the assumptions of a judgement, and returns it."""
    for text in judgement.assumed:
        mode.assume(text)
    return judgement


def _scalar(mode: Session, call: JudgedCall) -> Judgement:
    """Judges a call that returns a Python number, which has to be the same on all ranks."""
    for index, operand in enumerate(call.operands):
        for axis, spmd_type in operand.type:
            if spmd_type.letter in DIFFERING and axis != "pp":
                why = (
                    f"a Python number made of it would differ between the ranks of {axis}, and what it decides "
                    "could not be followed"
                )
                raise explain(mode, Violation("scalar", axis, why, [index]), call)
            if spmd_type.scale and call.rule.name in ("__int__", "__float__", "__index__"):
                python = call.rule.name.strip("_")
                why = (
                    f"{python}() makes a plain number of it, of which nobody knows that it depends on the size of "
                    f"{axis}; write x.item() for {python}(x)"
                )
                raise explain(mode, Violation("scalar_scale", axis, why, [index]), call)
    return Judgement((EQUAL,), {}, ())


def result_origins(mode: Session, judgement: Judgement | None, notes: Sequence[Note]) -> dict[str, Origin] | None:
    """Origins of the types of a result: those of its operands, or this line."""
    merged: dict[str, Origin] | None = None
    for note in notes:
        if note.origins is not None:
            merged = note.origins if merged is None or merged is note.origins else {**note.origins, **merged}
    if judgement is None or not judgement.born:
        return merged
    varies = all(judgement.types[0].get(axis) is V for axis in judgement.born)
    return begin(mode, judgement.born, merged, "V" if varies else "P")


def begin(
    mode: Session, born: dict[str, str], origins: dict[str, Origin] | None, letter: str = "P"
) -> dict[str, Origin]:
    """The origins of a result: those of its operands, and for the axes in `born` this line."""
    line, module = call_site(), module_path(mode.modules)
    return {**(origins or {}), **{axis: Origin(what, line, module, letter) for axis, what in born.items()}}


# --- norms of shards: P("norm"), ranks' numbers whose squares are the summands of a squared norm ---
#
#     x.norm() of S             P("norm")
#     stack, cat, norm of it    P("norm")
#     its square                P
#
# Everything else needs all of the norm, and is refused.


def _squared_axes(
    rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], operands: list[Operand]
) -> tuple[list[Operand], list[str]]:
    """The operands of a square, with norms of shards as equal values, and the axes of these norms; else no axes."""
    name = rule.name.strip("_")
    power = args[1] if len(args) > 1 else kwargs.get("exponent")
    is_square = name == "square" or (name in ("pow", "ipow", "float_power") and power.__class__ in (int, float))
    if not is_square or (name != "square" and power != 2):
        return operands, []
    type_ = operands[0].type
    axes = [axis for axis, spmd_type in type_ if spmd_type is PARTIAL_NORM]
    for axis in axes:
        type_ = type_.with_axis(axis, R)
    return [operands[0]._replace(type=type_), *operands[1:]], axes


def _with_squares(judgement: Judgement, axes: Sequence[str]) -> Judgement:
    """The judgement of a square, with the summands of squared norms."""
    type_ = judgement.types[0]
    for axis in axes:
        type_ = type_.with_axis(axis, P)
    return judgement._replace(types=(type_,)) if axes else judgement
