"""The checker's judgements of programs that judgements.txt has not: `reviewed.txt`, which has the same form.

In judgements.txt the operands receive no gradients and are of one type on one axis. Here they receive some, or are of
two types on two axes, and go through every operator, through verbs and through buffers that hold several tensors.
NXD_UPDATE_JUDGEMENTS=1 writes the file anew (`-k all_are_there`).

    python -m tests.checking.types.test_reviewed "FAMILY: NAME" ...         prints the words
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, P, R, S, V
from neuronx_dist.spmd.rows import ROWS
from tests.checking.types import test_judgements as judgements
from tests.checking.types.reviewed_programs import BACKWARDS, NUMBERS, WRITES
from tests.checking.types.test_judgements import (
    CALLS,
    UPDATE,
    Answer,
    assert_reviewed,
    in_a_line,
    in_full,
    recorded,
)

pytestmark = pytest.mark.slow

FILE = Path(__file__).parent / "reviewed.txt"
MEAN = P("avg")
Types = Sequence[dict[str, Any]]

# --- operands that receive gradients ---

ONE: list[Types] = [[{"tp": type_, "dp": R}] for type_ in (R, I, V, P, MEAN, S(0), S(1))]
PAIRS = [(S(0), I), (S(0), R), (P, I), (P, R), (I, R), (I, S(0)), (V, I), (P, V), (P, P), (MEAN, P), (S(1), S(0))]
TWO: list[Types] = [[{"tp": x, "dp": R}, {"tp": y, "dp": R}] for x, y in PAIRS]


def with_gradients(name: str) -> Iterator[tuple[Types, list[str]]]:
    """The judgements that differ from those without gradients, which judgements.txt has."""
    call, without = CALLS[name], {answer.operands: answer.lines for answer in judgements.judgements(name)}
    for types in TWO if call.__code__.co_argcount > 1 else ONE:
        lines = judgements.judged(call, types, receiving=True)
        if lines != without.get(", ".join(str(one["tp"]) for one in types)):
            yield types, lines


# --- types on two axes, through operators and verbs ---

BOTH: list[Types] = [
    [{"tp": x, "dp": y}]
    for x, y in (
        *((R, S(0)), (P, S(1)), (V, S(0)), (S(0), S(0)), (S(0), S(1)), (S(1), S(0))),
        *((S(0, 2), S(0)), (S(0, 4), S(1)), (S(0), S(0, 2))),
    )
]


def operators() -> dict[str, Callable[..., Any]]:
    """Every operator, as every row of the table has it."""
    calls: dict[str, Callable[..., Any]] = {}
    concrete = {"R": (R,), "I": (I,), "V": (V,), "P": (P,), "S": (S(0), S(1))}
    for name, *letters in ROWS:
        for src in concrete[letters[0]]:
            for dst in concrete[letters[1]]:
                options: dict[str, Any] = {"src": src, "dst": dst}
                if ROWS[(name, *letters)].expert:
                    options["expert_mode"] = True
                calls[f"{name} {src} -> {dst}"] = partial(_operator, name, dst is V, options)
                if name == "all_gather" and src is V:
                    calls[f"{name} {src} -> {dst}, dim 1"] = partial(
                        _operator, name, False, options | {"gather_dim": 1}
                    )
                if name == "reduce_scatter" and dst is V:
                    calls[f"{name} {src} -> {dst}, dim 2"] = partial(
                        _operator, name, True, options | {"scatter_dim": 2}
                    )
    return calls


def _operator(name: str, unbound: bool, options: dict[str, Any], x: Tensor) -> Tensor:
    """`unbound`: along a dim of the size of the axis."""
    if unbound:
        x = x.view(4, 3, 2) if "scatter_dim" in options else x.view(2, 2, 6)
    return getattr(spmd, name)(x, "tp", **options)


VERBS: dict[str, Callable[..., Any]] = {
    "comm.all_gather of dim 0": lambda x: comm.all_gather(x, "tp"),
    "comm.all_gather of dim -1": lambda x: comm.all_gather(x, "tp", dim=-1),
    "comm.reduce_scatter of dim 1": lambda x: comm.reduce_scatter(x, "tp", dim=1),
    "comm.all_to_all back": lambda x: comm.all_to_all(x, "tp", split_dim=1, concat_dim=0),
    "comm.all_to_all of one dim": lambda x: comm.all_to_all(x, "tp"),
    "comm.all_reduce min": lambda x: comm.all_reduce(x, "tp", op="min"),
    "comm.all_reduce over both": lambda x: comm.all_reduce(x, ("dp", "tp")),
    "comm.all_gather over both": lambda x: comm.all_gather(x, ("dp", "tp")),
    "comm.all_reduce of two": lambda x: comm.all_reduce([x, x * 2], "tp")[1],
    "comm.all_reduce of a mean": lambda x: comm.all_reduce(x.mean(), "tp"),
    "comm.all_reduce of a share": lambda x: comm.all_reduce(x / comm.size("tp"), "tp"),
    "comm.all_reduce of ones": lambda x: comm.all_reduce(torch.ones(2), "tp") + x.sum(),
    "comm.all_reduce, later": lambda x: comm.all_reduce(x, "tp", async_op=True).wait(),
    "comm.broadcast over dp": lambda x: comm.broadcast(x, "dp", src=1),
    "without expert_mode": lambda x: spmd.convert(x, "tp", src=R, dst=I),
    "a row that there is not": lambda x: spmd.all_reduce(x, "tp", src=S(0), dst=R),
    "over dp": lambda x: spmd.all_reduce(x, "dp", dst=I),
    "over both": lambda x: spmd.all_gather(x, ("dp", "tp"), src=S(0), dst=R),
    "of the last dim": lambda x: spmd.all_gather(x, "tp", src=S(-1), dst=R),
    "to the last dim": lambda x: spmd.convert(x, "tp", src=R, dst=S(-1)),
    "of the dim that is exchanged": lambda x: spmd.all_to_all(x, "tp", src=S(0), dst=S(-1)),
}

# --- buffers that hold several tensors ---


def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two vectors of different types: of x, and the same on all ranks."""
    return x.reshape(-1), torch.zeros(5)


def _packed(x: Tensor) -> Tensor:
    return torch.cat(_pair(x))


def _row_of(x: Tensor) -> Tensor:
    return torch.cat([part.view(1, -1) for part in _pair(x)], 1)


BUFFERS: dict[str, Callable[..., Any]] = {
    "split of a buffer": lambda x: _packed(x).split([24, 5])[0],
    "second part of a buffer": lambda x: _packed(x).split([24, 5])[1] + 1,
    "split by name": lambda x: torch.split(_packed(x), split_size_or_sections=[24, 5], dim=0)[0],
    "split into other sizes": lambda x: _packed(x).split([5, 24])[0],
    "split into equal sizes": lambda x: _packed(x).split(29)[0],
    "split of a row": lambda x: _row_of(x).split([24, 5], dim=1)[0],
    "split of a row along its other dim": lambda x: _row_of(x).split([1], dim=0)[0],
    "buffer times a number": lambda x: (_packed(x) * 2).split([24, 5])[0],
    "buffer divided by a size": lambda x: (_packed(x) / comm.size("tp")).split([24, 5])[0],
    "buffer times a scalar tensor": lambda x: (_packed(x) * torch.ones(())).split([24, 5])[0],
    "buffer times what varies": lambda x: _packed(x) * x.sum(),
    "number times a buffer": lambda x: (2 * _packed(x)).split([24, 5])[0],
    "tensor times a buffer": lambda x: torch.ones(29) * _packed(x),
    "buffer plus one": lambda x: _packed(x) + 1,
    "buffer as a row": lambda x: _packed(x).view(1, -1).split([24, 5], dim=1)[0],
    "row as a buffer": lambda x: _row_of(x).view(-1).split([24, 5])[0],
    "row as it is": lambda x: _row_of(x).reshape(1, 29).split([24, 5], dim=1)[0],
    "buffer as a column": lambda x: _packed(x).view(29, 1),
    "buffer in a buffer": lambda x: torch.cat([_packed(x), torch.zeros(3)]),
    "buffer, reduced": lambda x: comm.all_reduce(_packed(x), "tp").split([24, 5])[0],
    "buffer, gathered": lambda x: comm.all_gather(_packed(x), "tp").view(2, 29).split([24, 5], dim=1)[0],
    "buffer, scattered": lambda x: comm.reduce_scatter(_row_of(x).expand(2, 29), "tp"),
    "buffer over dp": lambda x: comm.all_reduce(_packed(x), "dp"),
    "buffer of shards": lambda x: torch.cat([x.reshape(-1), x.reshape(-1)]),
    "buffer of rows": lambda x: torch.cat([x, x], 1),
    "buffer of rows of different types": lambda x: torch.cat([x, torch.zeros(4, 2)], axis=1),
    "not flat": lambda x: torch.cat([x.view(4, 3, 2), torch.zeros(4, 3, 2)], 2),
    "three dims, dim 1": lambda x: torch.cat([x.view(2, 2, 6), torch.zeros(2, 2, 6)], 1),
    "flattened": lambda x: torch._utils._flatten_dense_tensors([x, torch.zeros(5)]),
    "flattened and back": lambda x: torch._utils._unflatten_dense_tensors(
        torch._utils._flatten_dense_tensors([x, torch.zeros(5)]), [x, torch.zeros(5)]
    )[0],
    "list of a buffer": lambda x: torch._foreach_add([_packed(x), _packed(x)], 1),
    "list, scaled": lambda x: torch._foreach_mul([x, torch.ones(3)], 2)[0],
    "list, added": lambda x: torch._foreach_add([x, x], [torch.ones(4, 6), x])[0],
    "list, added with a factor": lambda x: torch._foreach_add([x], [x], alpha=2)[0],
    "list, written": lambda x: _written(torch._foreach_add_, x, torch.zeros(4, 6)),
    "list, scaled in place": lambda x: _written(torch._foreach_mul_, x, 3.0),
    "list, filled with zeros": lambda x: _written(torch._foreach_zero_, x),
    "list, copied into": lambda x: _written(torch._foreach_copy_, torch.zeros(4, 6), x),
    "norms of a list": lambda x: torch._foreach_norm([x, x])[1],
    "norms of a list, of the maximum": lambda x: torch._foreach_norm([x], float("inf"))[0],
    "list divided by a list": lambda x: torch._foreach_div([x], [torch.ones(4, 6)])[0],
    "list, square roots": lambda x: torch._foreach_sqrt([x])[0],
}


def _written(function: Callable[..., Any], x: Tensor, *more: Any) -> Tensor:
    y = x.clone()
    function([y], *([one] if isinstance(one, Tensor) else one for one in more))
    return y


BUFFERED: list[Types] = [[{"tp": type_, "dp": R}] for type_ in (R, I, V, P, MEAN, S(0), S(1))] + [
    [{"tp": S(0), "dp": P}],
    [{"tp": S(0), "dp": S(0)}],
]

PROGRAMMED: list[Types] = [[{"tp": type_, "dp": R}] for type_ in (R, I, V, P, S(0))] + [[{"tp": S(0), "dp": S(0)}]]

# --- repairs, by what the user's line looks like ---


def _shard(rows: int, columns: int, dim: int) -> Tensor:
    """A weight of which every rank has a part."""
    with spmd.no_typecheck():
        weight = torch.ones(rows, columns)
    return spmd.assert_type(weight, {"tp": S(dim), "dp": R})


def _bias_before(x: Tensor) -> Tensor:
    weight, bias = _shard(2, 6, 1), torch.ones(2)
    return F.linear(x, weight, bias)


def _bias_before_the_reduction(x: Tensor) -> Tensor:
    weight, bias = _shard(2, 6, 1), torch.ones(2)
    y = F.linear(x, weight, bias)
    return spmd.all_reduce(y, "tp", dst=R)


def _bias_after_another_reduction(x: Tensor) -> Tensor:
    weight, bias = _shard(2, 6, 1), torch.ones(2)
    y = spmd.all_reduce(x * 1, "tp", dst=R)
    y = F.linear(x, weight, bias)
    return y * 2


def _bias_inside_the_reduction(x: Tensor) -> Tensor:
    weight, bias = _shard(2, 6, 1), torch.ones(2)
    return comm.all_reduce(F.linear(x, weight, bias), "tp")


def _addmm_before(x: Tensor) -> Tensor:
    weight = _shard(6, 2, 0)
    return torch.addmm(torch.ones(2), x, weight)


def _plus_before(x: Tensor) -> Tensor:
    y = x.sum(1) + torch.ones(4)
    return spmd.all_reduce(y, "tp", dst=R)


def _plus_inside(x: Tensor) -> Tensor:
    return comm.all_reduce(x.sum(1) + torch.ones(4), "tp")


def _square(x: Tensor) -> Tensor:
    y = x.sum(1)
    return y * y


def _in_a_loop(x: Tensor) -> Tensor:
    total = torch.zeros(())
    for p in (nn.Parameter(torch.ones(3)), x):
        total = total + p.sum() ** 2
    return total


def _norms(x: Tensor) -> Tensor:
    return torch.stack([part.norm() for part in (x, torch.ones(3))]).norm()


def _augmented(x: Tensor) -> Tensor:
    total = torch.ones(())
    total += x.sum()
    return total


def _by_keyword(x: Tensor) -> Tensor:
    return F.cross_entropy(input=x, target=torch.zeros(4, dtype=torch.long))


def _rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (6,), weight=torch.ones(6), eps=1e-6)


def _compared(x: Tensor) -> Tensor:
    return x.sum() > torch.ones(())


def _negated(x: Tensor) -> Tensor:
    return ~(x > 0)


def _written_item(x: Tensor) -> Tensor:
    y = torch.zeros(4, 6)
    y[1:3] = x[1:3]
    return y


def _attribute(x: Tensor) -> Tensor:
    box = {"rows": [x]}
    return box["rows"][0].softmax(0)


def _wrong_size(x: Tensor) -> Tensor:
    return x @ torch.ones(12, 3)


def _wrong_view(x: Tensor) -> Tensor:
    return x.view(4, 12)


REPAIRS: dict[str, Callable[..., Any]] = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        *(
            _bias_before,
            _bias_before_the_reduction,
            _bias_after_another_reduction,
            _bias_inside_the_reduction,
            _addmm_before,
            _plus_before,
        ),
        *(_plus_inside, _square, _in_a_loop, _norms, _augmented, _by_keyword, _rms, _compared, _negated),
        *(_written_item, _attribute, _wrong_size, _wrong_view),
    )
}
REPAIRED: list[Types] = [[{"tp": type_, "dp": R}] for type_ in (R, I, V, P, MEAN, S(0), S(1), S(1, 2))]

# --- the file ---


def in_short(given: Types) -> str:
    return ", ".join("{" + ", ".join(f"{axis}: {type_}" for axis, type_ in types.items()) + "}" for types in given)


FAMILIES: dict[str, tuple[dict[str, Callable[..., Any]], list[Types]]] = {
    "operators": (operators(), BOTH),
    "verbs": (VERBS, ONE + BOTH),
    "buffers": (BUFFERS, BUFFERED),
    "repairs": (REPAIRS, REPAIRED),
    "numbers": (NUMBERS, PROGRAMMED),
    "writes": (WRITES, PROGRAMMED),
    "backwards": (BACKWARDS, PROGRAMMED),
}


@cache
def answers(family: str, name: str) -> list[Answer]:
    if family == "gradients":
        return [Answer(in_short(types), types, lines) for types, lines in with_gradients(name)]
    calls, operand_types = FAMILIES[family]
    receiving = family in ("repairs", "backwards")
    judged = ((types, judgements.judged(calls[name], types, receiving=receiving)) for types in operand_types)
    return [Answer(in_short(types), types, lines) for types, lines in judged]


NAMES = [("gradients", name) for name in CALLS]
NAMES += [(family, name) for family, (calls, _) in FAMILIES.items() for name in calls]


def test_all_are_there():
    if UPDATE:
        lines = [in_a_line(": ".join(name), answers(*name)) for name in NAMES if answers(*name)]
        FILE.write_text("\n".join(lines) + "\n")
    assert {*recorded(FILE)} <= {": ".join(name) for name in NAMES}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the positions of instructions")
@pytest.mark.parametrize(("family", "name"), NAMES)
def test_judgements_are_what_was_reviewed(family, name):
    assert_reviewed(FILE, f"{family}: {name}", answers(family, name))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or map(": ".join, NAMES):
        family, _, name = wanted.partition(": ")
        print(in_full(wanted, answers(family, name)), end="\n\n")
