"""The lines of one forward: calls on this rank's shards, and conversions between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch.nn.functional as F

from ...program.program import (
    FILE_NAMES,
    Call,
    Division,
    Program,
    Value,
    argument_name,
    dotted,
    fresh,
    operands_of,
    values_in,
)
from ...spmd.types import I, R, S, Shard, SpmdType
from ...torch_internals.tensors import pytree
from ..choose.composite_strategies import over_units
from ..choose.conversions import (
    OPERATORS,
    Conversion,
    WholeOnRank,
    conversion,
    has_type,
    joined_call,
    read_once,
    suffix,
)
from ..choose.joined import joined_conversions, recomputed_spans, type_of_output
from ..choose.stages import StageCalls
from .lines import Line, path_mark, value_mark
from .source_text import Imports, call_text, literal

__all__ = ["Body", "shape_text"]


class Body:
    """The lines of a method that runs a stage of a division.

    Attributes:
        lines: the statements; `returned`: the expression that the method returns, as marked text.
        arguments: names of the values that the method takes.
        names_in_use: names of all values.
    """

    def __init__(
        self,
        division: Division,
        imports: Imports,
        constants: Mapping[Value, str],
        stage: StageCalls,
        *,
        is_last: bool = True,
        synchronised: Collection[str] = (),
    ) -> None:
        """Writes the lines.

        Args:
            constants: the attribute by which the module keeps each constant.
            stage: the method takes the arguments of forward, then the received values.
            is_last: the method returns the results of the program; else a tuple of the values that the stage sends.
            synchronised: paths of the modules whose batch norm has statistics over all units.

        Raises:
            ValueError: no operator does a conversion, or a file cannot name a function or container.
        """
        self.division = division
        self.constants, self.synchronised = constants, synchronised
        self.program = division.program
        self.imports = imports
        self.lines: list[Line] = []
        self.names: dict[tuple[Value, SpmdType], str] = {}
        self.names_in_use = {value.name for value in self.program.leaves}
        self.names_in_use |= {value.name for call in self.program.calls for value in call.results} | FILE_NAMES
        self.calls_here = set(stage.calls)
        self.spans = recomputed_spans(division)
        self.joined = joined_conversions(division, stage.calls, is_last)
        self.consumers = self.program.consumers()
        self.arguments = {value.name for value in (*self.program.inputs, *stage.received)}
        read = {value for call in stage.calls for value in values_in((call.args, call.kwargs))}
        read |= set(values_in(self.program.outputs)) if is_last else set()
        for name, expression in _unpacked(self.program, read):
            self.lines.append(Line(expression, value_mark(name)))
        together = self._linears_of_one_input()
        for call in stage.calls:
            linears = together.get(call, [call])
            if linears[0] is call and len(linears) > 1:
                self._linears(linears)
            elif linears[0] is call:
                self._call(call, self.spans.get(call, ()))
        self.returned = self._result() if is_last else self._sent(stage)

    def _call(self, call: Call, spans: tuple[int, ...]) -> None:
        division = self.division
        strategy = division.strategies[call]
        wanted: dict[Value, list[SpmdType]] = {}
        for value, spmd_type in zip(operands_of(call), strategy.operands):
            wanted.setdefault(value, []).append(spmd_type)
        for value, types in wanted.items():
            for spmd_type in dict.fromkeys(types):
                self._converted(value, spmd_type, call, spans)

        def variable(x: Any) -> str | None:
            if not isinstance(x, Value):
                return None
            types = wanted.get(x)
            if types is None:  # only its shape or its dtype is read
                spmd_type = division.type_of(x)
            else:
                spmd_type = types.pop(0) if len(types) > 1 else types[0]
            return self._name(x, spmd_type)

        is_synchronised = call.module in self.synchronised and self.program.training
        function, args, kwargs = over_units(strategy.local) if is_synchronised else strategy.local
        if "inplace" in kwargs and function in OPERATORS.values() and not self._overwrites(args[0], call, spans):
            kwargs = {name: item for name, item in kwargs.items() if name != "inplace"}
        text = call_text(function, args, kwargs, self.imports, variable, call.where)
        targets = ", ".join(value_mark(value.name) for value in call.results)
        targets += "," if call.several and len(call.results) == 1 else ""
        comment = "; ".join(self._described(value) for value in call.results)
        context = call.grad, call.autocast
        self.lines.append(Line(text, targets, comment, call.module, _where(call), context, spans))

    def _linears_of_one_input(self) -> dict[Call, list[Call]]:
        """Returns the linear layers that are to be one call, by each of them, in program order.

        They read one value, which nothing else reads as R, and it is I: the sum of its gradient over the ranks is one
        collective in any case, and so the additions before it, and the wait for it, are saved.
        """
        found: dict[Call, list[Call]] = {}
        for value, readers in self.consumers.items():
            if not value.requires_grad or self.division.size == 1 or self.division.type_of(value) != I:
                continue
            calls = [call for call, index in readers if self.division.strategies[call].operands[index] == R]
            if len(calls) > 1 and all(self._is_column(call, value) for call in calls):
                same = {(self.spans.get(call, ()), len(operands_of(call))) for call in calls}
                if len(same) == 1 and self.calls_here.issuperset(calls):
                    found.update(dict.fromkeys(calls, calls))
        return found

    def _is_column(self, call: Call, input: Value) -> bool:
        """Returns whether a call is `F.linear` of an input, with a sharded weight and bias that need no conversion."""
        strategy, (first, *params) = self.division.strategies[call], operands_of(call)
        held = zip(params, strategy.operands[1:], strict=True)
        return (
            call.function is strategy.local.function is F.linear
            and first is input
            and not any(param is input for param in params)
            and all(param.kind == "parameter" and self.division.types[param] == want for param, want in held)
            and all(isinstance(want, Shard) for want in strategy.operands[1:])
            and (call.grad, call.autocast, call.outer) == (True, None, ())
        )

    def _linears(self, calls: list[Call]) -> None:
        """Writes linear layers of one input as one call."""
        columns = zip(*([self._name(v, self.division.type_of(v)) for v in operands_of(call)] for call in calls))
        (input, *_), weights, *biases = columns
        groups = [f"({', '.join(names)})" for names in (weights, *biases)]
        text = f'composites.linears({input}, {", ".join(groups)}, axis="{self.division.axis}")'
        results = [call.results[0] for call in calls]
        targets, comment = ", ".join(value_mark(v.name) for v in results), "; ".join(map(self._described, results))
        spans = self.spans.get(calls[0], ())
        self.lines.append(Line(text, targets, comment, calls[0].module, _where(calls[0]), spans=spans))

    def _name(self, value: Value, spmd_type: SpmdType) -> str:
        """Returns the expression that reads a value in this type, as marked text."""
        if (value, spmd_type) in self.names:
            return value_mark(self.names[value, spmd_type])
        if value.kind in ("parameter", "buffer"):
            return path_mark(value.path)
        return path_mark(self.constants[value]) if value.kind == "constant" else value_mark(value.name)

    def _converted(
        self, value: Value, wanted: SpmdType, reader: Call | None = None, spans: tuple[int, ...] = ()
    ) -> str:
        """Returns the expression of a value as `wanted`; the first request writes the conversion."""
        has = self.division.type_of(value)
        if self.division.size == 1 or has_type(has, wanted, value) or (value, wanted) in self.names:
            return self._name(value, wanted)
        group = self.joined.get((value, wanted), [(value, wanted)])
        ways = [self._conversion(*each, reader) for each in group]
        sources = [_Text(self._name(x, self.division.type_of(x))) for x, _ in group]
        if len(group) > 1:
            call = joined_call(ways, sources, self.division.axis)
        else:
            inplace = read_once(value, self.program, self.consumers) and self._made_here(value, spans)
            call = ways[0].call(sources[0], self.division.axis, inplace=inplace)
        names = [fresh(x.name + suffix(want), self.names_in_use) for x, want in group]
        self.names.update(zip(group, names, strict=True))
        targets, comment = ", ".join(map(value_mark, names)), "; ".join(self._described(*each) for each in group)
        module, where = (reader.module, _where(reader)) if reader is not None else ("", "")
        text = call_text(*call, self.imports, _text)
        self.lines.append(Line(text, targets, comment, module, where, spans=spans, converts=True))
        return self._name(value, wanted)

    def _conversion(self, value: Value, wanted: SpmdType, reader: Call | None) -> Conversion:
        has = self.division.type_of(value)
        how = conversion(value, has, wanted, self.division.size)
        if how is None:
            by = "  ".join(filter(None, [reader.module, _where(reader)] if reader else [])) or "the result"
            raise ValueError(f"{value!r}: no operator converts {has} to {wanted}, needed by {by}")
        return how

    def _overwrites(self, value: Value, conversion: Call, spans: tuple[int, ...]) -> bool:
        """Returns whether a conversion on an axis before reads the product itself, and may overwrite it."""
        wanted = self.division.strategies[conversion].operands[0]
        is_product = read_once(value, self.program, self.consumers)  # and not the result of a conversion in between
        return is_product and self._made_here(value, spans) and has_type(self.division.type_of(value), wanted, value)

    def _made_here(self, value: Value, spans: tuple[int, ...]) -> bool:
        """Returns whether this stage and recomputed span compute a value: no other value may be overwritten."""
        producer = value.producer
        return producer in self.calls_here and self.spans.get(producer, ()) == spans

    def _described(self, value: Value, spmd_type: SpmdType | None = None) -> str:
        spmd_type = spmd_type or self.division.type_of(value)
        types = ", ".join(str(S(t.dim) if isinstance(t, WholeOnRank) else t) for t in (*value.outer, spmd_type))
        outer = zip(value.outer, self.division.axes.values())  # without the last axis
        return f"{shape_text(value.shape, (spmd_type, self.division.size), *outer)} {types}"

    def _sent(self, stage: StageCalls) -> str:
        names = [self._name(value, self.division.type_of(value)) for value in stage.sent]
        return f"({names[0]},)" if len(names) == 1 else ", ".join(names) or "()"

    def _result(self) -> str:
        """Returns the expression of the result, whole on every rank."""
        names: list[Any] = []
        for output in self.program.outputs:
            if not isinstance(output, Value):
                names.append(_Text(literal(output, self.imports)))
                continue
            has = self.division.type_of(output)
            wanted = type_of_output(self.division, output)
            if has is R and output.requires_grad and self.division.size > 1:
                raise ValueError(
                    f"{output.name} is a result of the module and R on {self.division.axis}: every rank computes with "
                    "it, so its gradient would be counted once for each rank; it must be I"
                )
            names.append(_Text(self._converted(output, wanted)))
        result = pytree.tree_unflatten(names, self.program.output_structure)
        return literal(result, self.imports, _text)


class _Text(str):
    """Source text in the place of a value."""


def _text(x: Any) -> str | None:
    return str(x) if isinstance(x, _Text) else None


def shape_text(shape: tuple[int, ...], cut: tuple[SpmdType, int], *outer: tuple[SpmdType, int]) -> str:
    """Returns the shape that a rank holds, beside the whole one where that differs: `[4, 8 of 16]`.

    Args:
        shape: before the last axis cuts it.
        cut: the type on the last axis, and its size; `outer`: those of the axes before it.
    """
    dims = []
    for dim, size in enumerate(shape):
        local, whole = size, size
        if isinstance(cut[0], WholeOnRank):
            dims.append(f"{size} on rank {cut[0].rank}" if cut[0].dim == dim else str(size))
            continue
        if isinstance(cut[0], Shard) and cut[0].dim == dim:
            local //= cut[1]
        for spmd_type, count in outer:
            whole *= count if isinstance(spmd_type, Shard) and spmd_type.dim == dim else 1
        dims.append(str(local) if local == whole else f"{local} of {whole}")
    return f"[{', '.join(dims)}]"


def _where(call: Call) -> str:
    """Returns the line of the module's source that made a call: `model.py:12: x = layer(x)`."""
    where = call.where.replace("\\", "/").rpartition("/")[2]
    return f"{where}: {call.source.strip()}" if call.source else where


def _unpacked(program: Program, read: Collection[Value]) -> Iterator[tuple[str, str]]:
    """Yields the name of each input that is read inside of an argument, and the expression that takes it out."""
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
            yield value.name, text


def _step_text(entry: Any) -> str:
    if hasattr(entry, "name"):
        return f".{entry.name}"
    return f"[{literal(getattr(entry, 'key', getattr(entry, 'idx', None)), Imports())}]"
