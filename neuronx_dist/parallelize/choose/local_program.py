"""The local program of one rank of a divided axis, which can be divided over a next axis.

Its calls are the local calls of the division, on values of local shapes; a conversion of the division is a call of an
`spmd` operator. Over the next axis each call has strategies again (`strategies.py`), which are judged together with its
types on the axes before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...program.program import FILE_NAMES, Call, Division, OuterCall, Program, Value, fresh, local_shape, operands_of
from ...rules.containers import substituted
from ...spmd.types import I, R, SpmdType
from .conversions import conversion, has_type, read_once, suffix

__all__ = ["LocalProgram", "local_program"]


@dataclass
class LocalProgram:
    """The local program of a rank.

    Attributes:
        calls, values: the local call of each global call, and the local value of each global value.
        starts: index of the first local call that each global call needs, conversions included; last, the number of
            local calls.
    """

    program: Program
    calls: dict[Call, Call]
    values: dict[Value, Value]
    starts: list[int]


def local_program(division: Division) -> LocalProgram:
    """Returns the local program of a rank of the division's axis.

    Raises:
        ValueError: the division needs a conversion that no operator does.
    """
    return _LocalProgramBuilder(division).built()


class _LocalProgramBuilder:
    def __init__(self, division: Division) -> None:
        self.division, self.program = division, division.program
        self.consumers = self.program.consumers()
        self.values: dict[Value, Value] = {}
        self.converted: dict[tuple[Value, SpmdType], Value] = {}
        self.local_calls: list[Call] = []
        self.names = {value.name for value in self.program.leaves} | FILE_NAMES
        self.names |= {value.name for call in self.program.calls for value in call.results}

    def built(self) -> LocalProgram:
        global_program = self.program
        for value in global_program.leaves:
            self._add(value)
        calls, starts = {}, []
        for call in global_program.calls:
            starts.append(len(self.local_calls))
            calls[call] = self._call(call)
        starts.append(len(self.local_calls))
        program = Program(
            inputs=self._leaves(global_program.inputs),
            structure=global_program.structure,
            parameters=self._leaves(global_program.parameters),
            buffers=self._leaves(global_program.buffers),
            constants=self._leaves(global_program.constants),
            calls=self.local_calls,
            outputs=[
                self._output(output) if isinstance(output, Value) else output for output in global_program.outputs
            ],
            output_structure=global_program.output_structure,
            training=global_program.training,
            arguments=[self.values[leaf] if isinstance(leaf, Value) else leaf for leaf in global_program.arguments],
        )
        return LocalProgram(program, calls, self.values, starts)

    def _leaves(self, values: list[Value]) -> list[Value]:
        return [self.values[value] for value in values]

    def _add(self, value: Value, producer: Call | None = None) -> Value:
        spmd_type = self.division.type_of(value)
        shape = local_shape(value.shape, spmd_type, self.division.size)
        self.values[value] = replace(value, shape=shape, outer=(*value.outer, spmd_type), producer=producer)
        return self.values[value]

    def _call(self, global_call: Call) -> Call:
        strategy = self.division.strategies[global_call]
        wanted: dict[Value, list[Value]] = {}
        for value, spmd_type in zip(operands_of(global_call), strategy.operands, strict=True):
            wanted.setdefault(value, []).append(self._as(value, spmd_type, global_call))

        def local(value: Value) -> Value:
            forms = wanted.get(value)
            if forms is None:  # only its shape or its dtype is read
                return self.values[value]
            return forms.pop(0) if len(forms) > 1 else forms[0]

        args, kwargs = substituted((strategy.local.args, strategy.local.kwargs), Value, local)
        types = strategy.operands, strategy.results
        axis, size = self.division.axis, self.division.size
        here = OuterCall(axis, size, *types, strategy.bytes_moved, global_call, strategy.steps)
        call = replace(
            global_call,
            function=strategy.local.function,
            args=args,
            kwargs=kwargs,
            results=[],
            flops=int(global_call.flops * strategy.share),
            outer=(*global_call.outer, here),
        )
        call.results = [self._add(value, call) for value in global_call.results]
        self.local_calls.append(call)
        return call

    def _as(self, value: Value, wanted: SpmdType, reader: Call | None) -> Value:
        """Returns a value in the type `wanted`, converted before its first reader."""
        division = self.division
        has = division.type_of(value)
        if division.size == 1 or has_type(has, wanted, value):
            return self.values[value]
        if (value, wanted) in self.converted:
            return self.converted[value, wanted]
        how = conversion(value, has, wanted, division.size)
        if how is None:
            raise ValueError(f"{value!r}: no operator converts {has} to {wanted}, needed by {reader or 'the result'}")
        function, args, kwargs = how.call(
            self.values[value], division.axis, inplace=read_once(value, self.program, self.consumers)
        )
        moved = how.forward, how.backward
        here = OuterCall(division.axis, division.size, (how.src,), (how.dst,), moved, None)
        call = Call(function, args, kwargs, outer=(here,))
        if reader is not None:
            call.where, call.source, call.module = reader.where, reader.source, reader.module
        shape = local_shape(value.shape, wanted, division.size)
        name = fresh(value.name + suffix(wanted), self.names)
        outer = (*value.outer, wanted)
        result = Value(name, "result", shape, value.dtype, value.requires_grad, "", call, value.varies, None, outer)
        call.results = [result]
        self.local_calls.append(call)
        self.converted[value, wanted] = result
        return result

    def _output(self, value: Value) -> Value:
        """Returns an output of the module as R or I."""
        has = self.division.type_of(value)
        return self._as(value, has if has.letter in "RI" else I if value.requires_grad else R, None)
