"""Costs of the checker, counted rather than timed: a call judged once is looked up, and only an equal one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, handle_torch_function

from neuronx_dist import comm, spmd
from neuronx_dist.checking.types import memo as memo_module
from neuronx_dist.checking.types import mode as checker_module
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import (
    I,
    P,
    R,
    S,
    SpmdTypeError,
    SpmdTypeMode,
    V,
    all_reduce,
    assert_type,
    convert,
    get_local_type,
)
from neuronx_dist.spmd import random as random_module
from neuronx_dist.spmd.watching import active

APPLY = torch.autograd.Function.__dict__["apply"]


@pytest.fixture(autouse=True)
def forget() -> None:
    """Nothing has been judged yet."""
    for memo in checker_module._memos.values():
        memo.clear()


@pytest.fixture
def mode() -> Iterator[SpmdTypeMode]:
    """A mode at tp=2."""
    with comm.as_rank(Mesh(2, tp=2), 0), SpmdTypeMode() as mode:
        yield mode


class Count:
    """The number of calls of a method of the mode since the last look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls: list[str] = []
        original = getattr(SpmdTypeMode, name)

        def counted(mode: SpmdTypeMode, function: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(getattr(function, "name", None) or getattr(function, "__name__", "?"))
            return original(mode, function, *args, **kwargs)

        monkeypatch.setattr(SpmdTypeMode, name, counted)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def block(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Attention and MLP at tp=2, with what models do besides: slices, lists, dropout, writes."""
    h = convert(F.layer_norm(x, x.shape[-1:], w["norm"]), "tp", src=I, dst=R)
    qkv = F.linear(h, w["qkv"])
    q, k, v = (piece.reshape(*x.shape[:2], -1, 4).transpose(1, 2) for piece in qkv.chunk(3, dim=-1))
    k = torch.cat([k[..., :2], -k[..., 2:]], dim=-1)
    q = torch.stack([q, q], dim=-1)[..., 0]
    scores = F.dropout(F.softmax(q @ k.transpose(-2, -1) * 0.5, dim=-1), 0.0)
    y = F.linear((scores @ v).transpose(1, 2).flatten(2), w["o"])
    x = x + all_reduce(y, "tp", src=P, dst=I)
    h = convert(F.layer_norm(x, x.shape[-1:], w["norm"]), "tp", src=I, dst=R)
    z = all_reduce(F.linear(F.gelu(F.linear(h, w["up"])), w["down"]), "tp", src=P, dst=I)
    z = z.clone()
    z.add_(x).mul_(0.5)
    return F.dropout(z, 0.1)


def weights() -> tuple[Tensor, dict[str, Tensor]]:
    kinds = {"norm": I, "qkv": S(0, 3), "o": S(1), "up": S(0), "down": S(1)}
    shapes = {"norm": (8,), "qkv": (12, 8), "o": (8, 4), "up": (16, 8), "down": (8, 16)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    for name, weight in tensors.items():
        assert_type(weight, {"tp": kinds[name]}).requires_grad_()
    return assert_type(torch.randn(2, 3, 8), {"tp": I}), tensors


def declared(kind: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch._C.DisableTorchFunction():
        x = torch.ones(shape, dtype=dtype)
    return assert_type(x, {"tp": kind})


# --- nothing is judged twice ---


def test_a_block_is_judged_once(mode: SpmdTypeMode, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = weights()
    judged, slow = Count(monkeypatch, "judge"), Count(monkeypatch, "_judge_and_run")
    first = get_local_type(block(x, w))
    assert len(judged.take()) > 20
    slow.take()
    operators = mode.operators
    for _ in range(3):
        assert get_local_type(block(x, w)) == first == {"tp": I}
    assert judged.take() == []
    assert set(slow.take()) <= {"convert", "all_reduce"}  # which have a memory of their own
    assert mode.operators >= operators + 3 * 30  # and are counted all the same


def test_another_mode_need_not_judge_again(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Count(monkeypatch, "judge")
    with comm.as_rank(Mesh(2, tp=2), 0):
        with SpmdTypeMode():
            x, w = weights()
            block(x, w)
        assert len(judged.take()) > 20
        with SpmdTypeMode():
            assert get_local_type(block(x, w)) == {"tp": I}
        assert judged.take() == []


def test_operators_are_judged_once(mode: SpmdTypeMode, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    from neuronx_dist.checking.types.handlers import operators

    original = operators._check_source
    monkeypatch.setattr(operators, "_check_source", lambda *args: (calls.append(args), original(*args))[1])
    x = declared(P, 4, 4)
    for _ in range(3):
        assert get_local_type(all_reduce(x, "tp", src=P, dst=R)) == {"tp": R}
    assert len(calls) == 1
    with pytest.raises(SpmdTypeError, match="R"):
        all_reduce(declared(R, 4, 4), "tp", src=P, dst=R)
    assert mode.collectives == 3


def test_what_is_assumed_is_told_every_time_and_to_every_mode(mode: SpmdTypeMode) -> None:
    x = declared(V, 4, 4)
    for _ in range(2):
        torch.Tensor.map_(x.clone(), x, lambda a, b: a)  # no rule says what it does to dims
        all_reduce(x, "tp", src=P, dst=R)
    assert {count for (text, _), count in mode.assumed.items() if "summands" in text} == {2}
    assumptions = sum(mode.assumed.values())
    with SpmdTypeMode() as other:
        for _ in range(2):
            torch.Tensor.map_(x.clone(), x, lambda a, b: a)
            all_reduce(x, "tp", src=P, dst=R)
    assert sum(other.assumed.values()) == assumptions


def test_where_a_partial_sum_began_is_where_it_began_this_time(mode: SpmdTypeMode) -> None:
    x, w = declared(S(1), 4, 8), declared(S(1), 8, 8)
    for _ in range(2):
        first = F.linear(x, w)
    second = F.linear(x, w)
    places = [y.__dict__["_spmd"][1]["tp"].where for y in (first, second)]
    assert places[0] != places[1] and all(__file__ in place for place in places)


# --- what looks the same and is not ---


def test_shapes_of_what_is_not_sharded_count(mode: SpmdTypeMode) -> None:
    x = declared(S(0), 4, 8)
    assert get_local_type(x + declared(R, 1, 8)) == {"tp": S(0)}
    with pytest.raises(SpmdTypeError):
        x + declared(R, 4, 8)


def test_zero_and_another_number_are_not_the_same(mode: SpmdTypeMode) -> None:
    x = declared(P, 4)
    for zero in (0, 0.0):
        assert get_local_type(x + zero) == {"tp": P}
    for number in (3, 3.0):
        with pytest.raises(SpmdTypeError):
            x + number
    assert get_local_type(x + 0) == {"tp": P}


def test_indices_that_are_equal_and_mean_something_else(mode: SpmdTypeMode) -> None:
    x = declared(S(1), 4, 6)
    assert get_local_type(x[1]) == {"tp": S(0)}
    assert get_local_type(x[True]) == {"tp": S(2)}
    y = declared(S(2), 4, 6, 2)
    assert get_local_type(y[0, 1]) == {"tp": S(0)}
    assert get_local_type(y[[0, 1]]) == {"tp": S(2)}
    assert get_local_type(y[0:1]) == get_local_type(y[slice(0, 1)]) == {"tp": S(2)}
    assert get_local_type(y[0:1, 1]) == {"tp": S(1)}


def test_what_receives_a_gradient_counts(mode: SpmdTypeMode) -> None:
    x, y = declared(I, 4), declared(R, 4)
    y.requires_grad_()
    assert get_local_type(x * y) == {"tp": R}
    x.requires_grad_()
    with torch.no_grad():
        assert get_local_type(x * y) == {"tp": R}
    with pytest.raises(SpmdTypeError, match="I and R"):
        x * y


def test_dtypes_count_where_a_cast_rounds(mode: SpmdTypeMode) -> None:
    assert get_local_type(declared(P, 4, dtype=torch.int32).to(torch.int64)) == {"tp": P}
    with pytest.raises(SpmdTypeError):
        declared(P, 4).to(torch.int64)


def test_masks_and_positions_are_not_the_same(mode: SpmdTypeMode) -> None:
    x = declared(S(1), 4, 6)
    assert get_local_type(x[declared(R, 4, dtype=torch.int64)]) == {"tp": S(1)}
    assert get_local_type(x[declared(R, 4, dtype=torch.bool)]) == {"tp": S(1)}
    with pytest.raises(SpmdTypeError):
        x.transpose(0, 1)[declared(R, 6, dtype=torch.bool)]


def test_keyword_arguments_count(mode: SpmdTypeMode) -> None:
    x = declared(S(1), 4, 6)
    for _ in range(2):
        assert get_local_type(x.sum(dim=0)) == {"tp": S(0)}
        assert get_local_type(x.sum(dim=0, keepdim=True)) == {"tp": S(1)}
        assert get_local_type(x.sum(dim=1)) == {"tp": P}


def test_random_numbers_are_of_the_stream_that_is_drawn_from(mode: SpmdTypeMode) -> None:
    random_module.manual_seed(0)
    x = declared(R, 4)
    for _ in range(2):
        assert get_local_type(F.dropout(x, 0.5)) == {"tp": R}
        with random_module.streams().fork():
            assert get_local_type(F.dropout(x, 0.5)) == {"tp": V}
            assert get_local_type(F.dropout(x, 0.0)) == {"tp": R}
            assert get_local_type(torch.rand(3)).get("tp") is V
        assert get_local_type(torch.rand(3)).get("tp", R) is R


def test_a_cat_may_be_a_packed_buffer(mode: SpmdTypeMode) -> None:
    x, y = declared(R, 4), declared(V, 4)
    assert get_local_type(torch.cat([x, y])) == {"tp": V}
    with torch.no_grad():
        first, second = torch.cat([x, y]).split([4, 4])
    assert get_local_type(first) == {"tp": R} and get_local_type(second) == {"tp": V}
    assert get_local_type(torch.cat([x, y])) == {"tp": V}


# --- writes ---


def test_writes_behind_the_back_are_found_by_calls_that_were_judged(mode: SpmdTypeMode) -> None:
    x, y = declared(R, 4), declared(R, 4)
    for _ in range(2):
        x * y
    with torch._C.DisableTorchFunction():
        x.add_(1)
    with pytest.raises(SpmdTypeError, match="written in place"):
        x * y


def test_writes_that_were_judged_are_remembered(mode: SpmdTypeMode, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = declared(R, 4, 4), declared(R, 4, 4)
    view = x[0]
    judged = Count(monkeypatch, "judge")
    for _ in range(3):
        x.add_(y)
        x[0] = y[0]
        view.mul_(2.0)
    assert sorted(judged.take()) == ["__setitem__", "add_", "index_put", "mul_"]  # of which the first consists
    assert get_local_type(view + x[1]) == {"tp": R}  # both know of all writes
    x.add_(declared(V, 4, 4))  # becomes something else
    assert get_local_type(x) == {"tp": V} == get_local_type(view * 1)


def test_a_type_that_a_write_changes_is_not_remembered(mode: SpmdTypeMode) -> None:
    for _ in range(2):
        x = declared(R, 4)
        x.mul_(declared(V, 4))
        assert get_local_type(x) == {"tp": V}


# --- the memory ---


def _memos() -> int:
    return sum(len(memo) for memo in checker_module._memos.values())


def test_the_memory_is_bounded(mode: SpmdTypeMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo_module, "SIZE", 50)
    x = declared(S(0), 4)
    for step in range(200):
        assert get_local_type(x * (step + 0.5)) == {"tp": S(0)}
        assert _memos() <= 50


def test_long_lists_are_not_remembered(mode: SpmdTypeMode) -> None:
    torch.tensor([1, 2])
    before = _memos()
    torch.tensor(list(range(1000)))
    assert _memos() == before


def test_functions_of_the_program_are_not_held(mode: SpmdTypeMode) -> None:
    x = declared(R, 4)
    before = _memos()

    def call() -> Any:
        def inner(x: Tensor) -> Tensor:
            return x * 2

        return handle_torch_function(inner, (x,), x)

    for _ in range(5):
        assert get_local_type(call()) == {"tp": R}
    keys = [key for memo in checker_module._memos.values() for key in memo]
    assert len(keys) <= before + 1 and not any("inner" in getattr(key[0], "__qualname__", "") for key in keys)


def test_entries_hold_no_tensors(mode: SpmdTypeMode) -> None:
    x, w = weights()
    block(x, w)
    keys = [part for memo in checker_module._memos.values() for key in memo for part in key]
    assert keys and not any(isinstance(part, Tensor) for part in keys)


def test_inference_mode_has_no_versions_and_is_checked(mode: SpmdTypeMode) -> None:
    x, y = declared(R, 4), declared(V, 4)
    with torch.inference_mode():
        for _ in range(2):
            z = (x + y) * y
            assert get_local_type(z) == {"tp": V}
            assert get_local_type(z + 1) == {"tp": V}
            assert get_local_type(torch.zeros(3) + z[:3]) == {"tp": V}


# --- off ---


def test_nothing_is_installed_when_it_is_off() -> None:
    def off() -> None:
        assert torch.autograd.Function.__dict__["apply"] is APPLY
        assert _get_current_function_mode_stack() == []
        assert active() is None

    off()
    x, y, untyped = torch.randn(4), torch.randn(4), torch.randn(4)
    with SpmdTypeMode() as mode:
        assert torch.autograd.Function.__dict__["apply"] is not APPLY
        assert _get_current_function_mode_stack() == [mode]
        assert_type(x, {"tp": R})
        assert_type(y, {"tp": V})
        x * y
        with pytest.raises(SpmdTypeError), SpmdTypeMode():
            F.relu(untyped)
        assert _get_current_function_mode_stack() == [mode]
    off()
    assert not spmd.has_local_type(x * y)


def test_getters_go_straight_through(mode: SpmdTypeMode, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Count(monkeypatch, "_judge_and_run")
    untyped = torch.Tensor.detach(declared(R, 4))
    slow.take()
    for x in (untyped, declared(S(0), 2, 2)):
        assert x.dim() == len(x.shape) and x.size(0) == len(x) and x.dtype is torch.float32
        assert x.is_contiguous() and x.stride()[-1] == 1 and x.numel() >= 4 and not x.requires_grad
    assert slow.take() == [] and mode.assumed == {}
