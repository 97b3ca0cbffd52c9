"""Every value and gradient of the reference, on threads, on two real processes, and by shape without a group."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.spmd.rows import ROWS
from tests.support.conformance import CONFORMANCE, TP2
from tests.support.pool import processes


def check_conformance(device: str = "cpu") -> int:
    """Runs the table on this rank. With strided inputs and gradients too: neither need be contiguous."""
    rank = comm.rank("tp")
    with_values = comm.current().backend.name != "shapes"
    for number, operator, src, dst, options, x, y, g, gx in CONFORMANCE:
        what = (number, operator.__name__, src, dst)
        for strided in (False, True):
            leaf = torch.tensor(x[rank], dtype=torch.float64, device=device, requires_grad=True)
            given = torch.stack([leaf, leaf], -1)[..., 0] if strided else leaf
            grad = torch.tensor(g[rank], dtype=torch.float64, device=device)
            grad = torch.stack([grad, grad], -1)[..., 0] if strided else grad
            result = operator(given, "tp", src=src, dst=dst, **options)
            expected = torch.tensor(y[rank], dtype=torch.float64)
            assert result.shape == expected.shape, (what, result.shape)
            result.backward(grad)
            assert leaf.grad is not None and leaf.grad.shape == leaf.shape
            if with_values:
                assert torch.equal(result.detach(), expected), (what, result)
                assert torch.equal(leaf.grad, torch.tensor(gx[rank], dtype=torch.float64)), (what, leaf.grad)
            with torch.no_grad():  # the same without a graph
                again = operator(given, "tp", src=src, dst=dst, **options)
            assert again.shape == result.shape and again.grad_fn is None
            if with_values:
                assert torch.equal(again, result), what
    return len(CONFORMANCE)


def test_conformance_on_threads():
    assert threads.run(TP2, check_conformance) == [len(CONFORMANCE)] * 2


def test_conformance_on_two_processes():
    assert processes(2).run(check_conformance, mesh=dict(tp=2)) == [len(CONFORMANCE)] * 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_conformance_by_shape_without_a_group(device):
    for rank in range(2):
        with comm.as_rank(TP2, rank):
            assert check_conformance(device) == len(CONFORMANCE)


def test_every_row_is_in_the_conformance_table():
    covered = {(operator.__name__, src.letter, dst.letter) for _, operator, src, dst, *_ in CONFORMANCE}
    assert covered | {("all_to_all", "S", "S")} == set(ROWS)
    assert {number for number, *_ in CONFORMANCE if number} == set(range(1, 30))


def test_backwards_are_rows_and_duals():
    """A backward maps the dual of dst to the dual of src (V and S read alike)."""

    def varying(letter):
        return "V" if letter == "S" else letter

    dual = {"R": "P", "P": "R", "I": "I", "V": "V"}
    for (operation, src, dst), row in ROWS.items():
        assert row.backward in ROWS, row
        back_src, back_dst = (varying(letter) for letter in row.backward[1:])
        # I -> P and reductions of V first read the value as another type (reference rows 3, 28, 29)
        if (operation, src, dst) in {("reinterpret", "I", "V"), ("reinterpret", "I", "P")}:
            assert row.backward == ("all_reduce", "V", "I")
        elif src == "V" and operation in ("all_reduce", "reduce_scatter"):
            assert (back_src, back_dst) == (dual[varying(dst)], "R")
        else:
            assert (back_src, back_dst) == (dual[varying(dst)], dual[varying(src)]), row
