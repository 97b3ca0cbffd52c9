"""Operands of one function: on two meshes, and plain ones under DISABLED, are refused by every function of torch.

The functions are those of torch's operator database with two tensors or more. `ALLOWED` are those that are not refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, distribute_tensor, fallback, promotion_mode
from tests.shard_tensor.test_operator_samples import FULL, OTHERS, REFUSED, all_operators, name_of

PARTS = 1 if FULL else 30
# Of their second operand only the shape, the dtype, or the positions of cuts are read.
ALLOWED = {"expand_as", "reshape_as", "view_as", "to", "tensor_split"}
EARLIER = {**REFUSED, "nn.functional.embedding": "does not support max_norm, scale_grad_by_freq and sparse"}
TWO_MESHES = "operands are on two meshes"
PLAIN = "its layout is unknown: use distribute_tensor"


def plain_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1])


def on_another_mesh(x: torch.Tensor) -> torch.Tensor:
    mesh = DeviceMesh("cpu", [[0, 1]])
    return distribute_tensor(x, mesh, [Replicate(), Shard(0)], src=None)


def sharded(x: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(x, plain_mesh(), [Shard(0)], src=None)


def tensors(sample: Any) -> tuple[list[Any], Any, list[int]]:
    """The arguments, and which of them are tensors that can be sharded."""
    flat, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    fit = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.is_leaf]
    return flat, tree, [i for i in fit if flat[i].ndim and flat[i].numel()]


def said(op: Any, sample: Any, odd: int, make: Any) -> str:
    """Error of a call whose operand `odd` is `make(x)`; all other tensors are sharded, or replicated."""
    flat, tree, fit = tensors(sample)
    for i, x in enumerate(flat):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            own = x.detach().clone()
            whole = distribute_tensor(own, plain_mesh(), [Replicate()], src=None)
            flat[i] = whole if i not in fit else make(own) if i == fit[odd] else sharded(own)
    first, args, kwargs = tree_unflatten(flat, tree)
    try:
        with fallback("gather"), promotion_mode("disabled" if make is torch.Tensor.clone else "silent"):
            op.op(first, *args, **kwargs)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "words"), [(on_another_mesh, TWO_MESHES), (torch.Tensor.clone, PLAIN)])
def test_operands_that_do_not_meet_are_refused(make, words):
    wrong, checked = set(), 0
    for op in all_operators()[::PARTS]:
        name = name_of(op)
        if name in ALLOWED or name in OTHERS.split():
            continue
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
        for sample in samples[:: max(1, len(samples) // 2)]:
            for odd in range(min(2, len(tensors(sample)[2]))) if len(tensors(sample)[2]) > 1 else ():
                first, second = threads.run(Mesh(2), partial(said, op, sample, odd, make), timeout=60.0)
                assert first == second, name
                checked += 1
                if words not in first and EARLIER.get(name, words) not in first:
                    wrong.add(f"{name}, operand {odd}: {first}")
    assert not wrong, "\n".join(sorted(wrong))
    assert checked > 360 // PARTS


def stacked(x, y):
    return torch.stack([x, y])


def chosen(x, y):
    return torch.where(x > 0, x, y)


def joined(x, y):
    return torch.cat([x, y])


def set_whole(x, y):
    x[...] = y


def set_row(x, y):
    x[2:4] = y[2:4]


def without_a_rule(x, y):
    return torch.isin(x, y)


@pytest.mark.parametrize(("make", "words"), [(on_another_mesh, TWO_MESHES), (torch.Tensor.clone, PLAIN)])
@pytest.mark.parametrize("function", [stacked, chosen, joined, set_whole, set_row, without_a_rule])
def test_each_form_refuses_them(function, make, words):
    def rank():
        x = torch.arange(12.0).view(6, 2)
        with fallback("gather"), promotion_mode("disabled"):
            for operands in ((sharded(x), make(x)), (make(x), sharded(x))):
                if function in (set_whole, set_row) and not hasattr(operands[0], "_spec"):
                    continue
                with pytest.raises(ValueError, match=words):
                    function(*operands)
        return True

    assert threads.run(Mesh(2), rank) == [True, True]


def test_a_number_is_set_at_positions_under_disabled():
    def rank():
        x = sharded(torch.zeros(6, 2))
        with promotion_mode("disabled"):
            x[sharded(torch.tensor([1, 4]))] = 3.0
        return x.full_tensor().sum().item()

    assert threads.run(Mesh(2), rank) == [12.0, 12.0]


def test_redistribute_alone_moves_to_another_mesh():
    def rank():
        x = sharded(torch.arange(6.0))
        other = on_another_mesh(torch.arange(6.0))
        moved = x.redistribute(other.device_mesh, other.placements)
        with pytest.raises(ValueError, match=TWO_MESHES):
            x.grad = other
        with pytest.raises(ValueError, match=TWO_MESHES):
            x.data = other
        return (moved + other).full_tensor().tolist()

    assert threads.run(Mesh(2), rank) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2
