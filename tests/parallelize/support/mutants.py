"""Wrong versions of an emitted source: each collective dropped, doubled, retargeted, exchanged, scaled."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

from torch import nn

from neuronx_dist.parallelize.choose.exact import choose
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.example import Example
from neuronx_dist.parallelize.prove.value_comparison import EmittedProgramError, check_values
from neuronx_dist.parallelize.prove.verify import check_types
from neuronx_dist.parallelize.train.stored import constants_of, stored_of
from neuronx_dist.planning.costs import Costs
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.program import Division
from neuronx_dist.program.record import record_program
from tests.parallelize.support.models import model
from tests.support.source_edits import SourceEdit

# Communication is cheap, computing is not: everything that can be cut is.
EAGER = Costs(flops=1e6, bandwidth=1e7, launch=1e-9, link_bandwidth=1e9, link_latency=1e-9)

_LINE = re.compile(
    r"^(?P<head>\s+(?P<name>[\w, ]+) = )spmd\."
    r"(?P<call>(?P<several>together\(spmd\.)?(?P<op>\w+)[(,] ?(?P<operand>.+?), \"tp.*?\))(?P<tail>  #.*)$"
)


class Emitted(NamedTuple):
    """A source and what it is proven by."""

    source: str
    division: Division
    module: nn.Module
    constants: dict[str, Any]
    arguments: dict[str, Any]


def emitted(name: str, size: int = 2) -> Emitted:
    """The source of a model of the table, everything cut that can be; "NAME, joined": with equal collectives as one."""
    name, _, joined = name.partition(", ")
    module, arguments = model(name)
    division = choose(decomposed(record_program(module, arguments, training=True)), "tp", size, costs=EAGER)
    division.joined_bytes = inf if joined else 0.0
    stored = stored_of(module, division)
    source = emit(division, stored=stored, signature=inspect.signature(module.forward))
    constants = {key: value.constant for value, key in constants_of(division).items()}
    return Emitted(source, division, module, constants, arguments)


def mutants(source: str) -> Iterator[SourceEdit]:
    """Every wrong call of every collective in an emitted source."""
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        match = _LINE.match(line.rstrip("\n"))
        if match is not None:
            begin, end = start + match.end("head"), start + match.start("tail")
            edits = _edits if match["several"] is None else _edits_of_several
            for edit, text in edits(source[begin:end], match["op"], match["operand"]):
                yield SourceEdit("emitted.py", edit, source, begin, end, text, (number, match.end("head")))
        start += len(line)


def _edits(call: str, op: str, operand: str) -> Iterator[tuple[str, str]]:
    yield "drop", operand
    yield "double", call.replace(f"({operand},", f"({call},")
    yield "scale", f"{call} * 2"
    for a, b in (("dst=R", "dst=I"), ("dst=I", "dst=R"), ("dst=S(0)", "dst=S(1)"), ("dst=S(1)", "dst=S(0)")):
        if a in call:
            yield "retarget", call.replace(a, b)
    other = {"all_reduce": "all_gather", "all_gather": "all_reduce", "reduce_scatter": "all_to_all"}.get(op)
    if other is not None:
        yield "exchange", re.sub(r"src=(P\(\"avg\"\)|P|S\(\d\))", "src=V", call.replace(op, other, 1))


def _edits_of_several(call: str, op: str, operand: str) -> Iterator[tuple[str, str]]:
    yield "joined: drop", operand
    yield "joined: drop one", f"(*{call}[:-1], {operand}[-1])"
    yield "joined: reorder", f"{call}[::-1]"
    yield "joined: double", call.replace(operand, call, 1)
    yield "joined: scale one", f"(*{call}[:-1], {call}[-1] * 2)"
    if "dst=R" in call:
        yield "joined: retarget", call.replace("dst=R", "dst=I")


def noticed(program: Emitted, source: str) -> str:
    """By what a source is refused: "types", "values"; "": by nothing."""
    source = source.replace("import I, P, R, S", "import I, P, R, S, V")
    try:
        check_types(source, program.division, program.arguments)
    except EmittedProgramError:
        return "types"
    try:
        check_values(source, program.division, Example(program.module, program.arguments), program.constants)
    except EmittedProgramError:
        return "values"
    return ""
