"""The program of one rank of an axis that is divided, so that it can be divided over a second one.

Its calls are the local calls of the first division, on values of their local shapes; where the first division converts
a value, an operator of `spmd` is a call like any other. Over the second axis each of them has strategies again
(`strategies.py`), which are judged with the types that it has on the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..spmd.types import I, R, SpmdType
from .conversions import conversion, has_type, read_once, suffix
from .names import FILE_NAMES, fresh
from .program import Call, Division, OuterCall, Program, Value, local_shape, operands_of, substituted

__all__ = ["LocalProgram", "local_program"]


@dataclass
class LocalProgram:
    """A rank's program.

    Attributes:
        calls, values: what stands for each call and each value of the whole program.
        starts: number of the first call that each call of the whole program needs, its conversions included; at the end
            the number of all.
    """

    program: Program
    calls: dict[Call, Call]
    values: dict[Value, Value]
    starts: list[int]


def local_program(division: Division) -> LocalProgram:
    """What a rank of the division's axis runs.

    Raises:
        ValueError: a conversion that no operator does.
    """
    return _Builder(division).built()


class _Builder:
    def __init__(self, division: Division) -> None:
        self.division, self.whole = division, division.program
        self.consumers = self.whole.consumers()
        self.values: dict[Value, Value] = {}
        self.converted: dict[tuple[Value, SpmdType], Value] = {}
        self.local_calls: list[Call] = []
        self.taken = {value.name for value in self.whole.leaves} | FILE_NAMES
        self.taken |= {value.name for call in self.whole.calls for value in call.results}

    def built(self) -> LocalProgram:
        whole = self.whole
        for value in whole.leaves:
            self._add(value)
        calls, starts = {}, []
        for call in whole.calls:
            starts.append(len(self.local_calls))
            calls[call] = self._call(call)
        starts.append(len(self.local_calls))
        program = Program(
            inputs=self._leaves(whole.inputs),
            structure=whole.structure,
            parameters=self._leaves(whole.parameters),
            buffers=self._leaves(whole.buffers),
            constants=self._leaves(whole.constants),
            calls=self.local_calls,
            outputs=[self._output(each) if isinstance(each, Value) else each for each in whole.outputs],
            output_structure=whole.output_structure,
            training=whole.training,
            arguments=[self.values[leaf] if isinstance(leaf, Value) else leaf for leaf in whole.arguments],
        )
        return LocalProgram(program, calls, self.values, starts)

    def _leaves(self, values: list[Value]) -> list[Value]:
        return [self.values[value] for value in values]

    def _add(self, value: Value, producer: Call | None = None) -> Value:
        spmd_type = self.division.type_of(value)
        shape = local_shape(value.shape, spmd_type, self.division.size)
        self.values[value] = replace(value, shape=shape, outer=spmd_type, producer=producer)
        return self.values[value]

    def _call(self, whole: Call) -> Call:
        strategy = self.division.strategies[whole]
        wanted: dict[Value, list[Value]] = {}
        for value, spmd_type in zip(operands_of(whole), strategy.operands, strict=True):
            wanted.setdefault(value, []).append(self._as(value, spmd_type, whole))

        def local(value: Value) -> Value:
            forms = wanted.get(value)
            if forms is None:  # only its shape or its dtype is read
                return self.values[value]
            return forms.pop(0) if len(forms) > 1 else forms[0]

        args, kwargs = substituted((strategy.local.args, strategy.local.kwargs), Value, local)
        on_first = OuterCall(self.division.axis, strategy.operands, strategy.results, strategy.bytes_moved, whole)
        call = replace(
            whole,
            function=strategy.local.function,
            args=args,
            kwargs=kwargs,
            results=[],
            flops=int(whole.flops * strategy.share),
            outer=on_first,
        )
        call.results = [self._add(value, call) for value in whole.results]
        self.local_calls.append(call)
        return call

    def _as(self, value: Value, wanted: SpmdType, reader: Call | None) -> Value:
        """A value as `wanted`, converted where it is first asked for."""
        division = self.division
        has = division.type_of(value)
        if division.size == 1 or has_type(has, wanted, value):
            return self.values[value]
        if (value, wanted) in self.converted:
            return self.converted[value, wanted]
        how = conversion(value, has, wanted, division.size)
        if how is None:
            raise ValueError(f"{value!r}: no operator makes {wanted} of {has}, at {reader or 'the result'}")
        function, args, kwargs = how.call(
            self.values[value], division.axis, inplace=read_once(value, self.whole, self.consumers)
        )
        on_first = OuterCall(division.axis, (how.src,), (how.dst,), (how.forward, how.backward), None)
        call = Call(function, args, kwargs, outer=on_first)
        if reader is not None:
            call.where, call.source, call.module = reader.where, reader.source, reader.module
        shape = local_shape(value.shape, wanted, division.size)
        name = fresh(value.name + suffix(wanted), self.taken)
        result = Value(name, "result", shape, value.dtype, value.requires_grad, "", call, value.varies, None, wanted)
        call.results = [result]
        self.local_calls.append(call)
        self.converted[value, wanted] = result
        return result

    def _output(self, value: Value) -> Value:
        """A result of the module, whole on every rank."""
        has = self.division.type_of(value)
        return self._as(value, has if has.letter in "RI" else I if value.requires_grad else R, None)
