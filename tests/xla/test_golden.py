"""The collectives in lowered HLO: kinds, reductions, dtypes, shapes, groups, and how many. Nothing is executed here but
the lists of tensors.

If a change is meant, the failure shows which lines of a table become which.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import pytest
import torch

from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import Collective, lower
from tests.xla.compare import draw, same_as_threads
from tests.xla.programs import golden as programs
from tests.xla.programs.golden import BACKWARD, TABLES
from tests.xla.programs.operators import CONFORMANCE

TP2 = Mesh(4, tp=2)  # tp: {0,1} {2,3}; dp: {0,2} {1,3}


def text(names: Iterable[str], collectives: Iterable[Collective], lone: str = "") -> str:
    """A line for each collective, in the order of the calls, beside the name of the program whose traceback it has (or
    `lone`).
    """
    of: dict[str, list[str]] = {name: [] for name in names}
    for c in sorted(collectives, key=lambda c: c.number or 0):  # HLO's order is that of the results
        kind = f"{c.kind} {c.op}" if c.op else c.kind
        groups = " ".join("-".join(map(str, group)) for group in c.groups)
        name = lone or next((n for n in of if any(site.endswith(f" in [{n}]") for site in c.sites)), "?")
        operands = " ".join(c.operands).replace(", ", ",")
        of.setdefault(name, []).append(f"{kind:<22} {c.axis or '?':<5} {groups:<7}  {operands}")
    lines = []
    for name, found in of.items():
        shown = "  " + BACKWARD[2:] if name.endswith(BACKWARD) else name
        lines += [f"{shown if number == 0 else '':<33}{line}" for number, line in enumerate(found or ["-"])]
    return "\n".join(lines)


def compare(found: str, expected: str) -> None:
    lines = difflib.unified_diff(expected.split("\n"), found.split("\n"), "expected", "lowered", lineterm="", n=2)
    if found != expected:
        pytest.fail("\n".join(lines), pytrace=False)


def arguments(*more: object) -> list[tuple[object, ...]]:
    return [(*more, draw(4, 6, seed=rank).abs()) for rank in range(4)]


def test_typed_operators():
    sides = [[torch.tensor(row[i][rank % 2]).float() for row in CONFORMANCE] for i in (5, 7) for rank in range(4)]
    program = lower(programs.every_operator, TP2, list(zip(sides[:4], sides[4:])))
    names = [programs.name_of(row) + suffix for row in CONFORMANCE for suffix in ("", BACKWARD)]
    compare(text(names, program.collectives), OPERATORS)


@pytest.mark.parametrize("table", ["verbs", "lists"])
def test_plain(table):
    program = lower(programs.every, TP2, arguments(table))
    compare(text(TABLES[table], program.collectives), {"verbs": VERBS, "lists": LISTS}[table])


def test_bf16():
    """XLA sums bf16 in bf16: where fp32 is asked for, by a layer or the caller, it is on the wire. Gradients, and what
    is not summed, travel as they are.
    """
    found = [
        text([name], lower(programs.one, TP2, arguments("bf16", name)).collectives, name) for name in programs.HALF
    ]
    compare("\n".join(found), HALF)


def test_buckets_are_neither_put_together_nor_cut_to_pieces():
    """But for a reduce-scatter, which has one operand. There each gradient is sliced out once; `split` would slice all
    of them for each, and clipping a view would write the whole buffer.
    """
    names = ("gradients", "ZeRO-1, higher precision")
    reduced, zero1 = (lower(programs.one, TP2, arguments("bf16", name)).text for name in names)
    assert (reduced.count(" concatenate("), reduced.count(" slice(")) == (0, 3)  # 3: parameters, rows of the argument
    assert zero1.count(" slice(") == 3 + 3 + 2  # and the gradients; and two parameters, without their padding


def test_lists_have_the_values_of_threads():
    poison = torch.tensor([torch.inf, 1.0, torch.nan, 2.0])
    given = [(draw(6, 6, seed=rank), poison * (rank + 1)) for rank in range(4)]
    replayed = same_as_threads(programs.every_list, TP2, given)
    assert [[bool(y.all()) for y in replayed.outputs[0][name]] for name in ("bad", "bad, gathered")] == [
        [False, True]
    ] * 2


OPERATORS = """
all_reduce(P, R)                 all-reduce add         tp    0-1 2-3  f32[2]
  backward                       all-reduce add         tp    0-1 2-3  f32[2]
all_reduce(P, I)                 all-reduce add         tp    0-1 2-3  f32[2]
  backward                       -
all_reduce(V, R)                 all-reduce add         tp    0-1 2-3  f32[2]
  backward                       all-reduce add         tp    0-1 2-3  f32[2]
all_reduce(V, I)                 all-reduce add         tp    0-1 2-3  f32[2]
  backward                       -
all_gather(S(0), R)              all-gather             tp    0-1 2-3  f32[1,2]
  backward                       reduce-scatter add     tp    0-1 2-3  f32[2,2]
all_gather(S(0), I)              all-gather             tp    0-1 2-3  f32[1,2]
  backward                       -
all_gather(V, R)                 all-gather             tp    0-1 2-3  f32[1,1,2]
  backward                       reduce-scatter add     tp    0-1 2-3  f32[2,1,2]
all_gather(V, I)                 all-gather             tp    0-1 2-3  f32[1,1,2]
  backward                       -
all_gather(S(1), R)              all-gather             tp    0-1 2-3  f32[1,2,1]
  backward                       reduce-scatter add     tp    0-1 2-3  f32[2,2,1]
all_gather(V, R, dim=1)          all-gather             tp    0-1 2-3  f32[1,2,1]
  backward                       reduce-scatter add     tp    0-1 2-3  f32[2,2,1]
reduce_scatter(P, S(0))          reduce-scatter add     tp    0-1 2-3  f32[2,2]
  backward                       all-gather             tp    0-1 2-3  f32[1,2]
reduce_scatter(P, V)             reduce-scatter add     tp    0-1 2-3  f32[2,1,2]
  backward                       all-gather             tp    0-1 2-3  f32[1,1,2]
reduce_scatter(P, S(1))          reduce-scatter add     tp    0-1 2-3  f32[2,2,1]
  backward                       all-gather             tp    0-1 2-3  f32[1,2,1]
all_to_all(V, V)                 all-to-all             tp    0-1 2-3  f32[2,1,2]
  backward                       all-to-all             tp    0-1 2-3  f32[2,1,2]
all_to_all(S(0), S(1))           all-to-all             tp    0-1 2-3  f32[2,2,1]
  backward                       all-to-all             tp    0-1 2-3  f32[2,2,1]
convert(I, R)                    -
  backward                       all-reduce add         tp    0-1 2-3  f32[2]
convert(R, I)                    -
  backward                       -
convert(R, S(0))                 -
  backward                       -
convert(I, S(0))                 -
  backward                       all-gather             tp    0-1 2-3  f32[1,2]
convert(R, V)                    -
  backward                       -
convert(I, V)                    -
  backward                       all-gather             tp    0-1 2-3  f32[1,1,2]
convert(R, P)                    -
  backward                       -
convert(I, P)                    -
  backward                       -
convert(V, P)                    -
  backward                       -
convert(S(0), P)                 -
  backward                       -
reinterpret(V, P)                -
  backward                       -
reinterpret(R, V)                -
  backward                       -
reinterpret(R, P)                -
  backward                       -
reinterpret(I, V)                -
  backward                       all-reduce add         tp    0-1 2-3  f32[2]
reinterpret(I, P)                -
  backward                       all-reduce add         tp    0-1 2-3  f32[2]
reinterpret(I, R)                -
  backward                       all-reduce add         tp    0-1 2-3  f32[2]
reinterpret(R, I)                -
  backward                       -
reduce_scatter(V, S(0))          reduce-scatter add     tp    0-1 2-3  f32[2,2]
  backward                       all-gather             tp    0-1 2-3  f32[1,2]
reduce_scatter(V, V)             reduce-scatter add     tp    0-1 2-3  f32[2,1,2]
  backward                       all-gather             tp    0-1 2-3  f32[1,1,2]
reduce_scatter(P, V, dim=1)      reduce-scatter add     tp    0-1 2-3  f32[2,2,1]
  backward                       all-gather             tp    0-1 2-3  f32[1,2,1]
""".strip()

VERBS = """
all_reduce                       all-reduce add         tp    0-1 2-3  f32[4,6]
all_reduce, max over dp          all-reduce maximum     dp    0-2 1-3  f32[4,6]
all_reduce, min over dp and tp   all-reduce minimum     dp,tp 0-1-2-3  f32[4,6]
all_reduce, into itself          all-reduce add         tp    0-1 2-3  f32[4,6]
all_reduce, asynchronous         all-reduce add         tp    0-1 2-3  f32[4,6]
all_reduce of a scalar           all-reduce add         world 0-1-2-3  f32[]
all_reduce of a column           all-reduce add         tp    0-1 2-3  f32[4]
all_reduce of integers           all-reduce add         tp    0-1 2-3  s64[4,6]
all_gather                       all-gather             tp    0-1 2-3  f32[1,4,6]
all_gather, dim 1, transposed    all-gather             tp    0-1 2-3  f32[1,5,4]
all_gather of flags              all-gather             tp    0-1 2-3  pred[1,4,6]
reduce_scatter                   reduce-scatter add     tp    0-1 2-3  f32[2,2,6]
reduce_scatter, max along dim 1  reduce-scatter maximum tp    0-1 2-3  f32[2,4,3]
reduce_scatter of a column       reduce-scatter add     tp    0-1 2-3  f32[2,2]
all_to_all                       all-to-all             tp    0-1 2-3  f32[2,4,3]
permute                          collective-permute     world 0-3 3-1  f32[4,6]
broadcast                        all-reduce add         tp    0-1 2-3  f32[4,6]
broadcast of a flag              all-reduce add         dp    0-2 1-3  s32[]
""".strip()

LISTS = """
all_reduce                       all-reduce add         tp    0-1 2-3  f32[4,6] f32[4] f32[]
all_reduce, into themselves      all-reduce maximum     tp    0-1 2-3  f32[4,6] f32[6]
all_reduce, two dtypes           all-reduce add         tp    0-1 2-3  f32[4,6] f32[6]
                                 all-reduce add         tp    0-1 2-3  bf16[4,6]
all_reduce, two dtypes in f32    all-reduce add         tp    0-1 2-3  f32[4,6] f32[4,6] f32[6]
all_reduce of one                all-reduce add         tp    0-1 2-3  f32[4,6]
all_gather                       all-gather             dp    0-2 1-3  f32[1,4,6] f32[1,5,3]
all_gather of flags              all-gather             tp    0-1 2-3  pred[1,4,6] pred[1,6]
reduce_scatter                   reduce-scatter add     tp    0-1 2-3  f32[2,13]
reduce_scatter, bf16 in f32      reduce-scatter add     tp    0-1 2-3  f32[2,12]
""".strip()

HALF = """
all_reduce as it is              all-reduce add         tp    0-1 2-3  bf16[4,6]
all_reduce                       all-reduce add         tp    0-1 2-3  f32[4,6]
all_reduce, max                  all-reduce maximum     tp    0-1 2-3  bf16[4,6]
reduce_scatter                   reduce-scatter add     tp    0-1 2-3  f32[2,2,6]
all_reduce(P, R)                 all-reduce add         tp    0-1 2-3  f32[4,6]
                                 all-reduce add         tp    0-1 2-3  f32[4,6]
all_gather(S(0), R)              all-gather             tp    0-1 2-3  bf16[1,4,6]
                                 reduce-scatter add     tp    0-1 2-3  f32[2,4,6]
reduce_scatter(P, S(1))          reduce-scatter add     tp    0-1 2-3  f32[2,4,3]
                                 all-gather             tp    0-1 2-3  bf16[1,4,3]
convert(I, R)                    all-reduce add         tp    0-1 2-3  f32[4,6]
column, row                      all-reduce add         tp    0-1 2-3  f32[4,16]
                                 all-reduce add         tp    0-1 2-3  f32[4,16]
                                 all-reduce add         dp,cp 0-2 1-3  bf16[16,16] bf16[16] bf16[16,16] bf16[16] bf16[4]
column, row, sequence parallel   all-gather             tp    0-1 2-3  bf16[1,4,16]
                                 reduce-scatter add     tp    0-1 2-3  f32[2,4,16]
                                 all-gather             tp    0-1 2-3  bf16[1,4,16]
                                 all-gather             tp    0-1 2-3  bf16[1,4,16]
                                 reduce-scatter add     tp    0-1 2-3  f32[2,4,16]
                                 all-reduce add         tp    0-1 2-3  bf16[16] bf16[1]
                                 all-reduce add         dp,cp 0-2 1-3  bf16[16,16] bf16[16] bf16[16,16] bf16[16] bf16[4]
embedding                        all-reduce add         tp    0-1 2-3  f32[4,6,16]
cross entropy                    all-reduce maximum     tp    0-1 2-3  bf16[4]
                                 all-reduce add         tp    0-1 2-3  f32[2,4]
gradients                        all-reduce add         dp,cp 0-2 1-3  bf16[3,6] bf16[2,6] bf16[1,6] bf16[3]
gradients in f32                 all-reduce add         dp,cp 0-2 1-3  f32[3,6] f32[2,6] f32[1,6] f32[3]
ZeRO-1                           reduce-scatter add     dp,cp 0-2 1-3  bf16[2,27]
                                 all-reduce add         world 0-1-2-3  f32[]
                                 all-gather             dp,cp 0-2 1-3  bf16[1,1,12] bf16[1,1,6] bf16[1,1,6]
ZeRO-1, higher precision         reduce-scatter add     dp,cp 0-2 1-3  f32[2,27]
                                 all-reduce add         world 0-1-2-3  f32[]
                                 all-gather             dp,cp 0-2 1-3  bf16[1,1,12] bf16[1,1,6] bf16[1,1,6]
""".strip()
