"""The lines of one forward: calls on this rank's shards, conversions between them, deletions, `with` statements."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import Any, NamedTuple

import torch

from ...program.program import (
    FILE_NAMES,
    Call,
    Division,
    Program,
    Value,
    argument_name,
    dotted,
    fresh,
    local_shape,
    operands_of,
    values_in,
)
from ...spmd.types import I, R, SpmdType
from ...torch_internals.tensors import pytree
from ..choose.conversions import OPERATORS, conversion, has_type, read_once, suffix
from ..choose.stages import StageCalls
from .source_text import Imports, attribute, call_text, literal

__all__ = ["INDENT", "body"]

INDENT = "    "
_WIDTH = 120
_Context = tuple[bool, tuple[str, torch.dtype, bool] | None]  # gradients are on, autocast
_PLAIN: _Context = (True, None)


class _BodyLine(NamedTuple):
    """A line of the program."""

    text: str
    comment: str
    uses: frozenset[str]
    defines: tuple[str, ...]
    context: _Context = _PLAIN
    above: str = ""  # a comment of its own, where the source line changes
    spans: tuple[int, ...] = ()  # numbers of the recomputed spans it is in, the outermost first
    inner: tuple[str, ...] = ()  # the lines of the function that it calls


def body(
    division: Division, imports: Imports, constants: Mapping[Value, str], stage: StageCalls, *, is_last: bool = True
) -> list[str]:
    """Returns the lines of a method that runs a stage of a division, without the line of its head.

    Args:
        constants: the attribute by which the module keeps each constant.
        stage: the method takes the arguments of forward, then the received values.
        is_last: the method returns the results of the program; else a tuple of the values that the stage sends.

    Raises:
        ValueError: no operator does a conversion, or a file cannot name a function or container.
    """
    return _Body(division, imports, constants, stage).lines(is_last)


class _Body:
    """The lines of one forward."""

    def __init__(self, division: Division, imports: Imports, constants: Mapping[Value, str], stage: StageCalls) -> None:
        self.division = division
        self.stage = stage
        self.constants = constants
        self.program = division.program
        self.imports = imports
        self.steps: list[_BodyLine] = []
        self.names: dict[tuple[Value, SpmdType], str] = {}
        self.names_in_use = {value.name for value in self.program.leaves}
        self.names_in_use |= {value.name for call in self.program.calls for value in call.results} | FILE_NAMES
        self.used: set[str] = set()
        self.calls_here = set(stage.calls)
        self.spans = _spans(division)
        self.consumers = self.program.consumers()

    def lines(self, is_last: bool) -> list[str]:
        read = {value for call in self.stage.calls for value in values_in((call.args, call.kwargs))}
        read |= set(values_in(self.program.outputs)) if is_last else set()
        unpacked = _unpacked(self.program, read)
        self.steps += [_BodyLine(text, "", frozenset(), (name,)) for name, text in unpacked]
        for call in self.stage.calls:
            self._call(call, self.spans.get(call, ()))
        result = self._result() if is_last else self._sent()
        local = {value.name for value in (*self.program.inputs, *self.stage.received)}
        steps = _with_functions(self.steps, self.used, local)
        return [*_written(_with_deletions(steps, self.used)), f"{INDENT * 2}return {result}"]

    def _call(self, call: Call, spans: tuple[int, ...]) -> None:
        division = self.division
        strategy = division.strategies[call]
        above = "  ".join(filter(None, [call.module, _where(call)]))
        wanted: dict[Value, list[SpmdType]] = {}
        for value, spmd_type in zip(operands_of(call), strategy.operands):
            wanted.setdefault(value, []).append(spmd_type)
        for value, types in wanted.items():
            for spmd_type in dict.fromkeys(types):
                self._converted(value, spmd_type, above, spans)

        used: set[str] = set()

        def variable(x: Any) -> str | None:
            if not isinstance(x, Value):
                return None
            types = wanted.get(x)
            if types is None:  # only its shape or its dtype is read
                spmd_type = division.type_of(x)
            else:
                spmd_type = types.pop(0) if len(types) > 1 else types[0]
            used.add(self.names.get((x, spmd_type), x.name))
            return self._name(x, spmd_type)

        function, args, kwargs = strategy.local
        if "inplace" in kwargs and function in OPERATORS.values() and not self._overwrites(args[0], call, spans):
            kwargs = {name: item for name, item in kwargs.items() if name != "inplace"}
        text = call_text(function, args, kwargs, self.imports, variable, call.where)
        results = [value.name for value in call.results]
        if call.several:
            text = f"{', '.join(results)}{',' if len(results) == 1 else ''} = {text}"
        elif results:
            text = f"{results[0]} = {text}"
        comment = "; ".join(self._described(value) for value in call.results)
        self.steps.append(
            _BodyLine(text, comment, frozenset(used), tuple(results), (call.grad, call.autocast), above, spans)
        )

    def _name(self, value: Value, spmd_type: SpmdType) -> str:
        """Returns the expression that reads a value in this type."""
        if (value, spmd_type) in self.names:
            return self.names[value, spmd_type]
        if value.kind in ("parameter", "buffer"):
            return attribute(value.path)
        return attribute(self.constants[value]) if value.kind == "constant" else value.name

    def _converted(self, value: Value, wanted: SpmdType, above: str = "", spans: tuple[int, ...] = ()) -> str:
        """Returns the name of a value as `wanted`; the first request writes the conversion."""
        has = self.division.type_of(value)
        if self.division.size == 1 or has_type(has, wanted, value) or (value, wanted) in self.names:
            return self._name(value, wanted)
        source = self._name(value, has)
        name = fresh(value.name + suffix(wanted), self.names_in_use)
        division = self.division
        how = conversion(value, has, wanted, division.size)
        if how is None:
            raise ValueError(f"{value!r}: no operator converts {has} to {wanted}, needed by {above or 'the result'}")
        inplace = read_once(value, self.program, self.consumers) and self._made_here(value, spans)
        call = how.call(_Text(source), division.axis, inplace=inplace)
        text = f"{name} = {call_text(*call, self.imports, _text)}"
        used = frozenset([source]) if source.isidentifier() else frozenset()
        self.steps.append(_BodyLine(text, self._described(value, wanted), used, (name,), above=above, spans=spans))
        self.names[value, wanted] = name
        return name

    def _overwrites(self, value: Value, conversion: Call, spans: tuple[int, ...]) -> bool:
        """Returns whether a conversion on the first axis reads the product itself, and may overwrite it."""
        wanted = self.division.strategies[conversion].operands[0]
        return self._made_here(value, spans) and has_type(self.division.type_of(value), wanted, value)

    def _made_here(self, value: Value, spans: tuple[int, ...]) -> bool:
        """Returns whether this stage and recomputed span compute a value: no other value may be overwritten."""
        producer = value.producer
        return producer in self.calls_here and self.spans.get(producer, ()) == spans

    def _described(self, value: Value, spmd_type: SpmdType | None = None) -> str:
        spmd_type = spmd_type or self.division.type_of(value)
        types = str(spmd_type) if self.division.outer is None else f"{value.outer}, {spmd_type}"
        return f"{list(local_shape(value.shape, spmd_type, self.division.size))} {types}"

    def _sent(self) -> str:
        names = [self._name(value, self.division.type_of(value)) for value in self.stage.sent]
        self.used.update(names)
        return f"({names[0]},)" if len(names) == 1 else ", ".join(names) or "()"

    def _result(self) -> str:
        """Returns the expression of the result, whole on every rank."""
        names: list[Any] = []
        for output in self.program.outputs:
            if not isinstance(output, Value):
                names.append(_Text(literal(output, self.imports)))
                continue
            has = self.division.type_of(output)
            wanted = has if has.letter in "RI" else I if output.requires_grad else R
            if has is R and output.requires_grad and self.division.size > 1:
                raise ValueError(
                    f"{output.name} is a result of the module and R on {self.division.axis}: every rank computes with "
                    "it, so its gradient would be counted once for each rank; it must be I"
                )
            text = self._converted(output, wanted)
            self.used.add(text)
            names.append(_Text(text))
        result = pytree.tree_unflatten(names, self.program.output_structure)
        return literal(result, self.imports, _text)


class _Text(str):
    """Source text in the place of a value."""


def _text(x: Any) -> str | None:
    return str(x) if isinstance(x, _Text) else None


def _spans(division: Division) -> dict[Call, tuple[int, ...]]:
    """Returns the recomputed spans around calls; a call that writes a buffer is in none, or would write twice."""
    found: dict[Call, tuple[int, ...]] = {}
    for number, (start, stop) in enumerate(sorted(division.recompute, key=lambda span: (span[0], -span[1]))):
        for call in division.program.calls[start:stop]:
            if not call.writes:
                found[call] = (*found.get(call, ()), number)
    return found


def _where(call: Call) -> str:
    """Returns the line of the module's source that made a call: `model.py:12: x = layer(x)`."""
    where = call.where.replace("\\", "/").rpartition("/")[2]
    return f"{where}: {call.source.strip()}" if call.source else where


def _with_functions(
    steps: Sequence[_BodyLine],
    read_after: Iterable[str],
    local: Iterable[str],
    depth: int = 0,
    numbers: Iterator[int] | None = None,
) -> list[_BodyLine]:
    """Returns the steps, those of each recomputed span as one: a function, and its call under `checkpoint`.

    Args:
        read_after: names that are read after all steps.
        local: names that are defined before all steps.
        depth: the number of spans that all steps are in; `numbers`: for names of functions.
    """
    numbers = numbers or count()
    known = {*local, *(name for step in steps for name in step.defines)}
    together = [list(group) for _, group in groupby(steps, lambda step: step.spans[depth : depth + 1])]
    later = [set(read_after)]  # names that are read after each group, from the last one back
    for group in reversed(together):
        later.append(later[-1].union(*(step.uses for step in group)))
    result: list[_BodyLine] = []
    for group, after in zip(together, [*reversed(later)][1:], strict=True):
        defined = dict.fromkeys(name for step in group for name in step.defines)
        given = [name for name in defined if name in after]
        if len(group[0].spans) <= depth or not given:
            result += group
            continue
        read = sorted({name for step in group for name in step.uses if name in known and name not in defined})
        name = f"recomputed_{next(numbers)}"
        inner = [f"{INDENT * 2}def {name}({', '.join(read)}):"]
        within = _with_functions(group, given, read, depth + 1, numbers)
        inner += [INDENT + line for line in _written(_with_deletions(within, given))]
        inner += [f"{INDENT * 3}return {', '.join(given)}", ""]
        text = f"{', '.join(given)} = checkpoint({', '.join([name, *read])})"
        result.append(_BodyLine(text, "", frozenset(read), tuple(given), inner=("", *inner)))
    return result


def _with_deletions(steps: Sequence[_BodyLine], read_after: Iterable[str]) -> Iterator[_BodyLine]:
    """Yields the steps, and behind those of each source line a step that deletes values after their last use."""
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        for name in (*step.defines, *step.uses):
            last[name] = number
    temporary = {name for step in steps for name in step.defines} - set(read_after)
    for _, group in groupby(enumerate(steps), lambda numbered: (numbered[1].above, numbered[1].context)):
        ended: list[str] = []
        for number, step in group:
            yield step
            names = (*step.defines, *sorted(step.uses))
            ended += [name for name in names if name in temporary and last[name] == number]
        if ended and number + 1 < len(steps):
            yield step._replace(text=f"del {', '.join(dict.fromkeys(ended))}", comment="", inner=())


def _written(steps: Iterable[_BodyLine]) -> Iterator[str]:
    context, above = _PLAIN, ""
    indent = INDENT * 2
    for step in steps:
        if step.context != context:
            context, indent = step.context, INDENT * 2
            for line in _contexts(context):
                yield indent + line
                indent += INDENT
        yield from step.inner
        if step.above and step.above != above:
            above = step.above
            yield f"{indent}# {above}"[:_WIDTH]
        yield f"{indent}{step.text}" + (f"  # {step.comment}" if step.comment else "")


def _contexts(context: _Context) -> Iterator[str]:
    grad, autocast = context
    if not grad:
        yield "with torch.no_grad():"
    if autocast is not None:
        _, dtype, enabled = autocast  # the device of the recording is replaced by the device that it runs on
        yield f"with torch.autocast(self.device.type, {dtype}, enabled={enabled}):"


def _unpacked(program: Program, read: Collection[Value]) -> Iterator[tuple[str, str]]:
    """Yields the name of each input that is read inside of an argument, and the line that takes it out."""
    numbered = pytree.tree_unflatten(list(range(program.structure.num_leaves)), program.structure)
    paths = [path for path, _ in pytree.tree_flatten_with_path(numbered)[0]]
    by_path = {dotted(path): path for path in paths}
    for value in program.inputs:
        if value not in read:
            continue
        path = by_path.get(value.path)
        if path is None:
            raise ValueError(f"input {value.name}: forward has no argument {value.path!r}")
        text = argument_name(dotted(path[:1])) + "".join(map(_step_text, path[1:]))
        if text != value.name:
            yield value.name, f"{value.name} = {text}"


def _step_text(entry: Any) -> str:
    if hasattr(entry, "name"):
        return f".{entry.name}"
    return f"[{literal(getattr(entry, 'key', getattr(entry, 'idx', None)), Imports())}]"
