"""Lowered programs: their collectives, the check of these against a mesh, and differences between ranks."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from ..comm.backends.xla import Issued
from ..mesh import DENSE_AXES, EXPERT_AXES, Mesh

__all__ = [
    "Collective",
    "Program",
    "ProgramsDiffer",
    "ReplicaGroupsWrong",
    "check_groups",
    "check_one_program",
    "table",
]

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"s4": 1, "u4": 1}  # the names of other dtypes have their bits
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(?P<name>\S+) = (?P<type>.+?) (?P<kind>[a-z][\w-]*)\((?P<rest>.*)$")
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_LABEL = re.compile(r'op_name="nxd-(\d+)-')
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class ProgramsDiffer(RuntimeError):
    """Error: the ranks would run different programs. On a cluster this is a hang, or a "mismatched NEFF"."""


class ReplicaGroupsWrong(RuntimeError):
    """Error: a collective's replica groups are not those of any axis of the mesh."""


@dataclass(frozen=True)
class Collective:
    """A collective instruction of a program.

    Attributes:
        kind: HLO's name: `all-reduce`, ...
        groups: replica groups, or the (source, target) pairs of a collective-permute.
        dtype, shape: of its first operand (an all-gather's result is larger).
        op: the operation of a reduction: `add`, `maximum`, ...
        nbytes: bytes of the operands or of the results, whichever are more.
        axis, sites: axis and source lines of the call that made it, if that was a call of this package.
        operands: `f32[4, 2]`, ...: several if it is coalesced.
        number: index of that call in the program's `issued`.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    dtype: str
    shape: tuple[int, ...]
    op: str | None
    nbytes: int
    axis: str | None
    sites: tuple[str, ...]
    operands: tuple[str, ...]
    number: int | None

    def __str__(self) -> str:
        groups = "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in self.groups) + "}"
        reduction = f" {self.op}" if self.op else ""
        return f"{self.kind}{reduction} {self.operand} over {self.axis or '?'} {groups}"

    @property
    def operand(self) -> str:
        """Short text of the operands."""
        others = len(self.operands) - 1
        return f"{self.operands[0]} and {others} more" if others else self.operands[0]


@dataclass
class Program:
    """A program of one rank, as HLO."""

    text: str
    proto: bytes = field(repr=False)
    issued: list[Issued] = field(repr=False)

    @cached_property
    def lines(self) -> list[str]:
        """The instructions without their metadata (source lines), which may differ between ranks."""
        return [_METADATA.sub("", line) for line in self.text.splitlines()]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of `lines`, equal for equal programs."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    @cached_property
    def collectives(self) -> list[Collective]:
        return _collectives(self.text, self.issued)

    def counts(self) -> Counter[tuple[str, str | None]]:
        """Counts the collectives by kind and axis: `{("all-reduce", "tp"): 2}`."""
        return Counter((collective.kind, collective.axis) for collective in self.collectives)


def check_one_program(programs: Sequence[Program], ranks: Sequence[int], context: str = "") -> None:
    """Checks that ranks have equal programs.

    Args:
        programs: the program of each of `ranks`.
        context: the part of the run, for the message.

    Raises:
        ProgramsDiffer: a rank's program differs from the first one; the message shows the first differing instructions,
            the first differing collectives, and their source lines.
    """
    for rank, program in zip(ranks, programs):
        first = programs[0]
        if program.fingerprint == first.fingerprint:
            continue
        parts = [f"rank {rank} and rank {ranks[0]} would run different programs{context}"]
        ours, theirs = _instructions(first), _instructions(program)
        pair = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a[1] != b[1]), min(len(ours), len(theirs)))
        parts.append("first differing instructions:")
        parts += [_quoted(first, ranks[0], ours, pair), _quoted(program, rank, theirs, pair)]
        calls = [[(c.verb, c.axis, c.groups, c.shape, c.dtype) for c in p.issued] for p in (first, program)]
        at = next((i for i, (a, b) in enumerate(zip(*calls)) if a != b), min(map(len, calls)))
        if calls[0] != calls[1]:
            parts.append(f"the first differing collective is number {at}:")
            parts += [_call(p.issued, number, at) for number, p in ((ranks[0], first), (rank, program))]
        else:
            parts.append(
                f"their {len(calls[0])} collectives are the same; one rank computes something that the other does not, "
                "or a Python number that depends on the rank became a constant: take the number from "
                'communicator.coordinate(tensor), as in comm.communicator("tp").coordinate(x), or pass it as a tensor'
            )
        raise ProgramsDiffer("\n".join(parts))


def check_groups(program: Program, mesh: Mesh, ranks: Sequence[int]) -> None:
    """Checks the groups of a program that `ranks` run together.

    Raises:
        ReplicaGroupsWrong: groups are not those of the mesh (nor of a call of this package with explicit groups), or a
            permutation uses a rank twice.
    """
    known = {frozenset(map(tuple, mesh.groups(axis))) for axis in _axes()}
    known |= {frozenset(call.groups) for call in program.issued}
    for number, collective in enumerate(program.collectives):
        where = f"collective {number}, {collective}" + (f", from {collective.sites[0]}" if collective.sites else "")
        if collective.kind == "collective-permute":
            for side in (0, 1):
                ends = [pair[side] for pair in collective.groups]
                if len(set(ends)) != len(ends) or not set(ends) <= set(range(mesh.world_size)):
                    raise ReplicaGroupsWrong(f"{where}: {('sources', 'targets')[side]} {ends} in {mesh}")
            continue
        seen = sorted(rank for group in collective.groups for rank in group)
        if collective.groups and seen not in (list(range(mesh.world_size)), list(ranks)):
            raise ReplicaGroupsWrong(
                f"{where}: the groups hold ranks {seen}, but the program is run by {list(ranks)} of "
                f"0..{mesh.world_size - 1}"
            )
        if collective.groups and frozenset(collective.groups) not in known:
            raise ReplicaGroupsWrong(f"{where}: these are not the groups of an axis of {mesh}")


def table(program: Program) -> str:
    """Formats the collectives as a table: kind, axis, operand, bytes, groups, and source line."""
    rows = [("#", "collective", "axis", "operand", "bytes", "groups", "from")]
    for number, c in enumerate(program.collectives):
        kind = f"{c.kind} {c.op}" if c.op else c.kind
        groups = " ".join("-".join(map(str, group)) for group in c.groups)
        site = c.sites[0] if c.sites else "?"
        rows.append((str(number), kind, c.axis or "?", c.operand, f"{c.nbytes:,}", groups, site))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[-1]]) for row in rows)


def _axes() -> list[tuple[str, ...]]:
    return [axes for view in (DENSE_AXES, EXPERT_AXES) for n in range(len(view) + 1) for axes in combinations(view, n)]


def _instructions(program: Program) -> list[tuple[str, str]]:
    """Returns the entry computation's instructions, each also with the numbers removed from names."""
    entry = next((i for i, line in enumerate(program.lines) if line.startswith("ENTRY")), 0)
    text_lines = program.text.splitlines()
    return [
        (text_lines[i], re.sub(r"(%[A-Za-z][\w-]*)\.\d+", r"\1", program.lines[i]))
        for i in range(entry + 1, len(text_lines))
    ]


def _quoted(program: Program, rank: int, instructions: Sequence[tuple[str, str]], index: int) -> str:
    if index >= len(instructions):
        return f"  rank {rank}: ends after {len(instructions)} instructions"
    instruction = instructions[index][0]
    source = _SOURCE.search(instruction)
    where = f"{source[1]}:{source[2]}" if source else "an unknown line"
    label = _LABEL.search(instruction)
    if label and int(label[1]) < len(program.issued) and program.issued[int(label[1])].sites:
        where = program.issued[int(label[1])].sites[0]
    return f"  rank {rank}: {_METADATA.sub('', instruction).strip()[:300]}\n          from {where}"


def _call(issued: Sequence[Issued], rank: int, index: int) -> str:
    if index >= len(issued):
        return f"  rank {rank}: has no more"
    call = issued[index]
    sites = "".join(f"\n          from {site}" for site in call.sites)
    return f"  rank {rank}: {call.verb} {str(call.dtype)[6:]}{list(call.shape)} over {call.axis}{sites}"


def _collectives(text: str, issued: Sequence[Issued]) -> list[Collective]:
    reductions: dict[str, str] = {}  # the last operation of each computation that a reduction may apply
    computation = ""
    collectives: list[Collective] = []
    for line in text.splitlines():
        if line.startswith("%"):
            computation = line[1:].split(" ", 1)[0]
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        if line.lstrip().startswith("ROOT") and computation and not line.lstrip().startswith("ROOT %tuple"):
            reductions[computation] = match["kind"]
        if match["kind"] not in KINDS:
            continue
        operands = _ARRAY.findall(match["rest"].split("), ", 1)[0])
        if match["kind"] == "all-reduce" and len(operands) > 1:
            operands.pop()  # torch_xla's token
        results = _ARRAY.findall(match["type"])[: len(operands)]
        applied = re.search(r"to_apply=%(\S+?)[,\s]", match["rest"] + " ")
        label = _LABEL.search(match["rest"])
        call = issued[int(label[1])] if label and int(label[1]) < len(issued) else None
        dtype, shape = operands[0]
        collectives.append(
            Collective(
                match["kind"],
                _groups(match["rest"]),
                dtype,
                _shape(shape),
                reductions.get(applied[1]) if applied else None,
                max(_nbytes(operands), _nbytes(results)),
                call.axis if call else None,
                call.sites if call else (),
                tuple(f"{kind}{list(_shape(sizes))}" for kind, sizes in operands),
                call.number if call else None,
            )
        )
    return collectives


def _groups(rest: str) -> tuple[tuple[int, ...], ...]:
    match = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", rest)
    inner = re.findall(r"\{([\d,]*)\}", match[1]) if match else []
    return tuple(tuple(int(rank) for rank in group.split(",") if rank) for group in inner)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def _nbytes(arrays: Sequence[tuple[str, str]]) -> int:
    return sum(_width(dtype) * math.prod(_shape(shape)) for dtype, shape in arrays)


def _width(dtype: str) -> int:
    """Bytes of an element: 4 for `f32`, 1 for `f8e4m3`."""
    bits = re.search(r"\d+", dtype)
    return _BYTES.get(dtype) or (int(bits[0]) // 8 if bits else 1)
