"""The reference's operators under the type checker: on threads, by shape, on real processes; and every pair that is no
operator, every tensor that is not what `src` says.
"""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, SpmdTypeMode, V, assert_type, get_local_type
from neuronx_dist.spmd.rows import ROWS
from tests.support.conformance import CONFORMANCE, TP2
from tests.support.pool import processes

pytestmark = pytest.mark.slow

OPERATORS = {
    name: getattr(spmd, name)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert", "reinterpret", "redistribute")
}
TYPES = (R, I, V, P, S(0), S(1))
DUAL = {"R": "P", "P": "R", "I": "I", "V": "V", "S": "S"}


def rows():
    """The reference's rows, by shape only, for any number of ranks: the first rank's values, cut or repeated."""
    return [(operator, src, dst, options, x[0]) for _, operator, src, dst, options, x, *_ in CONFORMANCE]


def typed(values, kind) -> torch.Tensor:
    """A tensor from outside of a check, declared."""
    return assert_type(torch.as_tensor(values, dtype=torch.float64), {"tp": kind})


def became(operator, src, dst):
    """The type of a result: what is the same everywhere is its own mean, not its own sum."""
    return P("avg") if operator is spmd.reinterpret and dst is P and src is not V else dst


def check_types(with_values: bool = True) -> int:
    """The table on two ranks: types before and after, values, and gradients."""
    rank = int(comm.rank("tp"))
    for number, operator, src, dst, options, x, y, g, gx in CONFORMANCE:
        what = (number, operator.__name__, src, dst)
        leaf = typed(x[rank], src).requires_grad_()
        grad = typed(g[rank], spmd.types.dual(dst))
        with SpmdTypeMode() as mode:
            before = get_local_type(leaf)["tp"]
            assert before.letter == src.letter, what
            result = operator(leaf, "tp", src=src, dst=dst, **options)
            assert get_local_type(result) == {"tp": became(operator, src, dst)}, (what, get_local_type(result))
            assert get_local_type(leaf) == {"tp": before}, what
            result.backward(grad)
            assert leaf.grad is not None
            assert get_local_type(leaf.grad)["tp"].letter == DUAL[before.letter], what
            assert not mode.assumed or (src is V and operator.__name__ in ("all_reduce", "reduce_scatter")), what
        if with_values:
            assert torch.equal(result.detach(), torch.tensor(y[rank], dtype=torch.float64)), what
            assert torch.equal(leaf.grad, torch.tensor(gx[rank], dtype=torch.float64)), what
        leaf = typed(x[rank], src)
        with SpmdTypeMode(), torch.no_grad():
            result = operator(leaf, "tp", src=src, dst=dst, **options)
            assert get_local_type(result) == {"tp": became(operator, src, dst)}, what
    return len(CONFORMANCE)


def test_types_values_and_gradients_on_threads():
    assert threads.run(TP2, check_types) == [len(CONFORMANCE)] * 2


def test_types_values_and_gradients_on_two_processes():
    assert processes(2).run(check_types, mesh=dict(tp=2)) == [len(CONFORMANCE)] * 2


@pytest.mark.parametrize("backend", ["shapes", "check"])
def test_types_by_shape_without_a_group(backend):
    for rank in range(2):
        with comm.as_rank(TP2, rank, *([CheckBackend()] if backend == "check" else [])):
            assert check_types(with_values=False) == len(CONFORMANCE)


# --- gradients, by what types mean -----------------------------------------------------------------------------------


def pairing(kind, grads: list[torch.Tensor], steps: list[torch.Tensor]) -> torch.Tensor:
    """Returns what a gradient g says of a small change dx, for all ranks together, by the type of x (reference 1.1)."""
    if kind.letter == "R":
        return (sum(grads) * steps[0]).sum()
    if kind.letter == "I":
        return (grads[0] * steps[0]).sum()
    if kind.letter == "P":
        return (grads[0] * sum(steps)).sum()
    return sum((g * dx).sum() for g, dx in zip(grads, steps))


def drawn(kind, shape: torch.Size, rank: int, seed: int) -> torch.Tensor:
    """A tensor of a type: the same on all ranks, or another on each."""
    generator = torch.Generator().manual_seed(seed if kind.letter in "RI" else 100 * seed + rank + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def one_row(number: int):
    """A change of the input and of the output of one row, and gradients, on this rank. All rows are linear."""
    operator, src, dst, options, like = rows()[number]
    size, rank = comm.size("tp"), int(comm.rank("tp"))
    shape = list(torch.tensor(like).shape)
    shape = [size if length == 2 else 2 * size if length == 4 else length for length in shape]
    x = drawn(src, torch.Size(shape), rank, 1).requires_grad_()
    step = drawn(src, x.shape, rank, 2)
    y = operator(x, "tp", src=src, dst=dst, **options)
    with torch.no_grad():
        change = operator(step, "tp", src=src, dst=dst, **options)
    upstream = drawn(spmd.types.dual(dst), y.shape, rank, 3)
    y.backward(upstream)
    assert x.grad is not None
    return upstream, change, x.grad, step


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_those_that_the_types_mean(size):
    for number, (operator, src, dst, options, _) in enumerate(rows()):
        given = threads.run(Mesh(size, tp=size), one_row, number)
        upstream, change, grads, steps = ([result[part] for result in given] for part in range(4))
        # A V that is reduced is read as the summand it is; R -> P by reinterpret counts each copy.
        after, before = pairing(dst, upstream, change), pairing(src, grads, steps)
        assert torch.allclose(after, before, rtol=1e-12), (operator.__name__, src, dst, options, after, before)


# --- what is no operator, and what is not what it is said to be -------------------------------------------------------


def test_pairs_that_are_no_operator_are_refused_whether_checked_or_not():
    refused = 0
    with comm.as_rank(TP2, 0):
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert", "reinterpret"):
            for src in TYPES:
                for dst in TYPES:
                    nothing = src == dst or (name == "convert" and {src.letter, dst.letter} == {"V", "S"})
                    if (name, src.letter, dst.letter) in ROWS or (nothing and name in ("convert", "reinterpret")):
                        continue
                    options = dict(expert_mode=True) if name in ("convert", "reinterpret") else {}
                    with pytest.raises(ValueError):
                        OPERATORS[name](torch.zeros(4, 4), "tp", src=src, dst=dst, **options)
                    x = typed(torch.zeros(4, 4), src)
                    with SpmdTypeMode(), pytest.raises(SpmdTypeError):
                        OPERATORS[name](x, "tp", src=src, dst=dst, **options)
                    refused += 1
    assert refused > 90


def test_a_tensor_that_is_not_what_src_says_is_refused():
    refused = 0
    with comm.as_rank(TP2, 0):
        for operator, src, dst, options, like in rows():
            shape = torch.tensor(like).shape
            for actual in (R, I, V, P, *(S(dim) for dim in range(len(shape)))):
                what = (operator.__name__, src, dst, actual)
                x = typed(torch.zeros(shape), actual).requires_grad_()
                reduces = operator in (spmd.all_reduce, spmd.reduce_scatter)
                fits = actual == src or (src is V and actual.letter == "S" and not reduces)
                unknown = actual is V and (src.letter == "S" or (src in (P, V) and reduces))
                with SpmdTypeMode() as mode:
                    if fits or unknown:  # of V nothing is known: it is taken for that, which is listed
                        operator(x, "tp", src=src, dst=dst, **options)
                        assert bool(mode.assumed) >= unknown, what
                        continue
                    try:
                        operator(x, "tp", src=src, dst=dst, **options)
                    except SpmdTypeError as error:
                        assert operator.__name__ in str(error), what
                        refused += 1
                    else:
                        raise AssertionError(what)
    assert refused > 90


def test_pairs_that_are_rarely_meant_need_expert_mode():
    with comm.as_rank(TP2, 0), SpmdTypeMode() as mode:
        for (name, src, dst), row in ROWS.items():
            if not row.expert:
                continue
            source, target = (next(kind for kind in TYPES if kind.letter == letter) for letter in (src, dst))
            with mode.pause():
                x = typed(torch.zeros(2, 2), source)
            with pytest.raises(SpmdTypeError, match="expert_mode=True"):
                OPERATORS[name](x, "tp", src=source, dst=target)
            before = len(mode.trusted)
            OPERATORS[name](x, "tp", src=source, dst=target, expert_mode=True)
            assert len(mode.trusted) >= max(1, before)


def test_redistribute_takes_every_pair_and_gives_its_type():
    for rank in range(2):
        with comm.as_rank(TP2, rank):
            for src in TYPES:
                for dst in TYPES:
                    if src is V and dst.letter == "S" or src.letter == "S" and dst is V:
                        continue  # the same values, read in another way
                    x = typed(torch.zeros(2, 2), src)
                    with SpmdTypeMode():
                        result = spmd.redistribute(x, "tp", src=src, dst=dst)
                    assert get_local_type(result)["tp"].letter == dst.letter, (src, dst)
