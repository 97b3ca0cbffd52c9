"""Calls that differ in one thing have results of their own: none is given what another one left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from neuronx_dist.program import fake_mode
from neuronx_dist.program.fake_mode import QuietFakeMode

Build = Callable[[], torch.Tensor]
X: Build = lambda: torch.empty(4, 6)  # noqa: E731


def _doubled_by(number: Any) -> Callable[[], Any]:
    return lambda: torch.empty(4, dtype=torch.int32) * number


def _in_default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    x = torch.empty(4, dtype=torch.int64)
    torch.set_default_dtype(dtype)
    try:
        return x / 2
    finally:
        torch.set_default_dtype(before)


# Calls of one function that differ in one thing, of which the result depends.
PAIRS: dict[str, list[Callable[[], Any]]] = {
    "shape": [lambda: X() + 1, lambda: torch.empty(6, 4) + 1, lambda: torch.empty(4, 6, 1) + 1],
    "stride": [lambda: X() * 2, lambda: torch.empty(6, 4).t() * 2],
    "dtype": [lambda: X().neg(), lambda: X().double().neg(), lambda: X().bfloat16().neg()],
    "offset": [lambda: torch.empty(9)[:4].view(2, 2), lambda: torch.empty(9)[3:7].view(2, 2)],
    "memory": [lambda: torch.empty(4).as_strided((2,), (1,)), lambda: torch.empty(9)[:4].as_strided((2,), (1,))],
    "gradient": [lambda: X().requires_grad_() * 3, lambda: X() * 3],
    "device": [lambda: X().exp(), lambda: torch.empty(4, 6, device="meta").exp()],
    "class of a number": [_doubled_by(1), _doubled_by(1.0), _doubled_by(True)],
    "number": [lambda: X().sum(0), lambda: X().sum(1)],
    "dtype as an argument": [lambda: X().sum(0, dtype=torch.float64), lambda: X().sum(0, dtype=torch.float32)],
    "keyword": [lambda: X().sum(0, keepdim=True), lambda: X().sum(0, dtype=torch.float32)],
    "sequence": [lambda: X().permute(0, 1), lambda: X().permute(1, 0), lambda: X().sum((0, 1)), lambda: X().sum((0,))],
    "tensors in a sequence": [lambda: torch.cat([X(), X()]), lambda: torch.cat([X()] * 3), lambda: torch.cat([X()])],
    "default dtype": [lambda: _in_default_dtype(torch.float32), lambda: _in_default_dtype(torch.float64)],
    "function": [lambda: X().exp(), lambda: X().exp_(), lambda: X().argmax(1)],
    "the same tensor twice": [lambda: _twice(True), lambda: _twice(False)],
    "new memory": [lambda: _new(), lambda: _new((1, 3)), lambda: _new(dtype=torch.int8), lambda: _new(device="meta")],
    "several results": [lambda: X().split(2), lambda: X().unbind(0), lambda: X().max(1), lambda: X().topk(2)],
    "a tensor more": [lambda: F.linear(X(), X()), lambda: F.linear(X(), X(), torch.empty(4))],
    "complex": [lambda: X().to(torch.complex64), lambda: X().to(torch.complex64).conj() + 1],
    "sparse": [lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_sparse() * 2],
}  # fmt: skip


def _new(strides: tuple[int, int] = (2, 1), device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Returns two tensors, which share no memory."""
    return [torch.empty_strided((3, 2), strides, device=torch.device(device), dtype=dtype) for _ in range(2)]


def _twice(same: bool) -> Any:
    x, y = X(), X()
    return x.add_(x if same else y)


def _flat(result: Any) -> list[Any]:
    return [*result] if isinstance(result, (tuple, list)) else [result]


def _traits(result: Any) -> list[Any]:
    results = _flat(result)
    every = []
    for x in results:
        assert isinstance(x, FakeTensor)
        dense = x.layout is torch.strided
        sizes = (x.stride(), x.storage_offset(), x.untyped_storage().nbytes()) if dense else ()
        shares = [x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in results] if dense else []
        every.append((type(result), x.shape, *sizes, x.dtype, x.device, x.requires_grad, x._version, shares))
    return every


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("turn", [False, True])
def test_results_of_calls_that_differ_in_one_thing(name: str, turn: bool) -> None:
    calls = PAIRS[name][::-1] if turn else PAIRS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        expected = [_traits(call()) for call in calls]
    fake_mode._known.clear()
    with QuietFakeMode():
        for _ in range(2):
            assert [_traits(call()) for call in calls] == expected
    same_key = ("class of a number", "the same tensor twice", "a tensor more", "complex", "sparse")
    assert len({str(traits) for traits in expected}) == len(expected) or name in same_key


def test_a_call_is_asked_of_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    dispatch = FakeTensorMode.__torch_dispatch__

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(func)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    fake_mode._known.clear()
    for repeat in range(3):
        with QuietFakeMode() as mode:
            x = X()
            asked.clear()
            results = [x + 1, x.t(), x.add_(1), *x.split(2), x.sum(0)]
            assert len(asked) == (0 if repeat else 5)
            assert all(y.fake_mode is mode for y in results) and results[2] is x
    assert x.device.type == "cpu" and not asked  # a device is known anyway


def test_what_is_known_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_mode, "_SIZE", 3)
    fake_mode._known.clear()
    sizes = []
    with QuietFakeMode():
        for size in range(1, 8):
            torch.empty(size).exp()
            sizes.append(len(fake_mode._known))
    assert sizes == [1, 2, 3, 1, 2, 3, 1]
