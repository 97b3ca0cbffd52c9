"""In-place writes become values: forward, gradients and buffers stay those of the module, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from neuronx_dist.program.record import record_program
from neuronx_dist.program.recording import TracingError
from tests.parallelize.support.programs import Function, assert_equal, in_place_calls, sample


def _assigned(index: Any, value: Any) -> Callable[[Function, torch.Tensor], torch.Tensor]:
    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        y[index] = value(y, self.weight) if callable(value) else value
        return y

    return forward


def _augmented(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * self.weight
    y += self.weight
    y -= 1
    y *= x
    y /= 2
    y **= 2
    return y


def _methods(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = (x * self.weight).add_(x, alpha=2).mul_(self.weight).clamp_(min=-3).sub_(0.5).neg_()
    y.masked_fill_(x > 1, 0.0).addcmul_(x, self.weight, value=0.1)
    return y.relu_() + F.relu_(x + self.weight) + torch.sigmoid_(x - self.weight)


def _options(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(x * self.weight, True)
    y = F.leaky_relu(y - 1, 0.3, inplace=True)
    return F.dropout(F.silu(y + 1, inplace=True), 0.5, True, True)


def _copies(self: Function, x: torch.Tensor) -> torch.Tensor:
    y, z = torch.empty_like(x), torch.ones(6, 5)
    y.copy_(self.weight[0])
    z.copy_(self.weight)  # in float32
    w = (x * self.weight).zero_() + (self.weight + 1).fill_(3)
    return y * z * w + (x * 2).fill_(self.weight.sum()) + y.sum()


def _views_read_what_was_written(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * self.weight
    row, column, turned, part = y[1], y[:, 2], y.t(), y.narrow(0, 2, 3)
    y.mul_(2)
    return row + column[:5] + turned[0, :5] + part.sum(0) + turned.sin().sum()


def _views_are_written(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * self.weight
    row = y[1]
    y[:, 1:3].mul_(3)
    y.view(30)[4:7].add_(self.weight[0, :3])
    y.t()[0].zero_()
    y.narrow(1, 3, 2).copy_(x[:, :2])
    y.select(0, 2).exp_()
    return y * 2 + row


def _several_views(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    first, second = y.chunk(2, 1)
    second.neg_()
    y.unbind()[5].mul_(3)
    y.split((1, 4), dim=1)[1].add_(1)
    return y * self.weight + first.sum() + second.sum()


def _written_twice(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(6, 5, dtype=torch.float64)
    for index in range(3):
        y[index] = self.weight[index] * x[index]
        z = y[2:4]
        z += y[:2]
    return y + z.sum()


def _put_together(self: Function, x: torch.Tensor) -> torch.Tensor:
    """DeepSeek's keys of two parts, in a new tensor that gets its gradient from the first write to a view."""
    y = x.new_empty(6, 10)
    y[..., :5].copy_(x * self.weight)
    y[..., 5:].copy_(self.weight.detach()[:1].expand(6, -1))
    y[:, 5:].mul_(self.weight)
    return y[:, :5] * y[:, 5:] + y[:, 2:7]


def _outputs_given(self: Function, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = torch.empty_like(x)
        torch.add(x, self.weight, out=y)
        torch.mul(y, 2.0, out=y)
    return y * self.weight


def _other_view(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = (x * self.weight).unsqueeze_(0).transpose_(1, 2)
    z = y.squeeze_(0)
    z.add_(1)
    return z @ x


def _without_gradient(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    with torch.no_grad():
        y.add_(self.weight).clamp_(max=1)
    return y * self.weight


VALUES: dict[str, Callable[[Function, torch.Tensor], torch.Tensor]] = {
    "augmented": _augmented,
    "methods": _methods,
    "options": _options,
    "copies": _copies,
    "views are read": _views_read_what_was_written,
    "views are written": _views_are_written,
    "put together": _put_together,
    "several views": _several_views,
    "written twice": _written_twice,
    "out": _outputs_given,
    "other views": _other_view,
    "no_grad": _without_gradient,
    "a number at a row": _assigned(1, 2.0),
    "rows": _assigned(slice(1, 3), lambda y, w: w[:2]),
    "columns": _assigned((Ellipsis, slice(None, None, 2)), lambda y, w: w[:, :3]),
    "a mask": _assigned(sample() > 0, 0.0),
    "a mask of rows": _assigned(torch.tensor([True, False] * 3), lambda y, w: w[:3]),
    "positions": _assigned((torch.tensor([0, 2, 4]), slice(1, 4)), lambda y, w: w[3:, 1:4]),
    "a computed mask": lambda self, x: _assigned(x > 0, -1.0)(self, x),
    "itself": _assigned(slice(1, 3), lambda y, w: y[3:5] * 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_writes_become_values(name: str) -> None:
    program = assert_equal(Function(VALUES[name]), {"x": sample()})
    assert not in_place_calls(program) and not any(call.writes for call in program.calls)


def _counted(self: Function, x: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    self.total.mul_(0.9).add_(x, alpha=0.1)
    return x * self.weight + self.total * self.count


def _part_of_a_buffer(self: Function, x: torch.Tensor) -> torch.Tensor:
    self.total[1:3] = x[:2]
    self.total[0].copy_(x[5])
    return self.weight * self.total.clone()


def _other_buffer(self: Function, x: torch.Tensor) -> torch.Tensor:
    self.total = self.total * 0.5 + x
    self.count = self.count + 1
    return self.weight * self.total.detach()


def _statistics(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(x * self.weight, self.total[0].zero_(), self.total[1].fill_(1), training=False)
    mean = self.total.view(30)[:5]
    return y + mean


BUFFERS = {
    "methods": _counted,
    "a part": _part_of_a_buffer,
    "another tensor": _other_buffer,
    "views": _statistics,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_written(name: str) -> None:
    program = assert_equal(Function(BUFFERS[name]), {"x": sample()})
    writes = [call for call in program.calls if call.writes]
    assert writes and all(call.args[index].kind == "buffer" for call in writes for index in call.writes)


def test_statistics_that_batch_norm_wrote_are_read_after_it() -> None:
    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x * self.weight)
        return y + self.norm.running_mean

    module = Function(forward)
    module.norm = torch.nn.BatchNorm1d(5).double()
    names = [call.name for call in assert_equal(module, {"x": sample()}).calls]
    assert names[-2:] == ["detach", "add"]  # another value: what was made of the buffer before is not it


def test_random_numbers_are_drawn_into_what_is_made_for_them() -> None:
    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * x.new_empty(6, 1).bernoulli_(0.5) + torch.empty_like(x).normal_().mul_(2)

    program = assert_equal(Function(forward), {"x": sample()})
    assert in_place_calls(program) == ["bernoulli_", "normal_"]


def _escapes(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * self.weight
    y.diagonal().zero_()
    return y


def _detached(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * self.weight
    y.detach().zero_()
    return y


def _drawn_over(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    return y.sin() + y.normal_()


def _unrecorded(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * self.weight
    with torch.no_grad():
        y.mul_(2)
    return y


def _other_shape(self: Function, x: torch.Tensor) -> torch.Tensor:
    self.total = x[0]
    return x * self.weight


def _kept_graph(self: Function, x: torch.Tensor) -> torch.Tensor:
    self.total.add_(self.weight)
    return self.total


def _attribute(self: Function, x: torch.Tensor) -> torch.Tensor:
    self.plain.add_(1)
    return x * self.plain


def _data(self: Function, x: torch.Tensor) -> torch.Tensor:
    y = x * self.weight
    y.data = x
    return y


REFUSED: dict[str, tuple[Callable[[Function, torch.Tensor], Any], str]] = {
    "an argument": (lambda self, x: x.add_(1) * self.weight, r"add_ writes argument x of forward .* x\.clone\(\)"),
    "a view of an argument": (lambda self, x: x[0].add_(1) * self.weight, "writes argument x of forward in place"),
    "a parameter": (lambda self, x: self.weight.detach().mul_(2) * x, "writes parameter weight in place"),
    "a tensor that is no buffer": (_attribute, "no buffer. Register the tensor"),
    "a view that cannot be undone": (_escapes, r"wrote in place to a diagonal view of this tensor .* index"),
    "a detached view": (_detached, "wrote in place to a detach view of this tensor"),
    "random numbers over others": (_drawn_over, r"normal_ writes .* torch\.empty_like\(x\)\.normal_"),
    "random numbers over a view": (lambda self, x: torch.zeros_like(x)[0].normal_() * x, "normal_ writes a tensor"),
    "a graph in a buffer": (_kept_graph, "requires a gradient to buffer total.*detach"),
    "a gradient that is not recorded": (_unrecorded, r"mul_ writes a tensor that requires a gradient inside no_grad"),
    "another shape in a buffer": (
        _other_shape,
        r"buffer total, .*\[6, 5\].* is replaced by a tensor of another shape .*\[5\]",
    ),
    "data": (_data, r"forward sets \.data of a tensor"),
    "a hook on a tensor": (lambda self, x: (x * self.weight).register_hook(print), "registers a hook on a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_value(name: str) -> None:
    forward, message = REFUSED[name]
    module = Function(forward)
    module.plain = torch.ones(5, dtype=torch.float64)
    with pytest.raises(TracingError, match=rf"{__file__}:\d+.*{message}"):
        record_program(module, {"x": sample()}, training=True)


def test_flops_and_random_numbers_are_those_of_the_value() -> None:
    def forward(self: Function, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.mm(x, self.weight.T, out=torch.empty(6, 6, dtype=torch.float64))
        return F.dropout(y @ self.weight, 0.5, True, True)

    calls = {call.name: call for call in assert_equal(Function(forward), {"x": sample()}).calls}
    assert calls["mm"].flops == calls["matmul"].flops == 2 * 6 * 6 * 5
    assert calls["dropout"].random and not calls["mm"].random
