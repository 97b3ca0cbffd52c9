"""Fake tensors of the mode are equal to torch's, call by call."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from neuronx_dist.program.fake_mode import QuietFakeMode


def _program():
    """A step of a small model, with views, writes in place, lists and numbers of all kinds; returns all tensors."""
    fakes = []
    weight = torch.nn.Parameter(torch.empty(6, 8, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], foreach=True)
    for _ in range(3):
        x = torch.empty(4, 8, dtype=torch.bfloat16)
        y = torch.nn.functional.linear(x, weight)
        z = y.transpose(0, 1)[1:, ::2]
        parts = [*y.split(2, dim=1), *y.unbind(0), *torch._foreach_mul([y, z], 2.0)]
        wide = [y * 2, y * 2.5, y + True, y.float() + 1, y.to(torch.int64) + 1, y.to(torch.int64) + 1.0]
        shapes = [y.view(2, 12), y.reshape(-1), y.expand(3, 4, 6), y.as_strided((2, 2), (6, 1), 3), z.contiguous()]
        loss = (y.float() ** 2).sum()
        loss.backward()
        same = x.detach()
        same.mul_(2)
        same.mul_(2.0)
        fakes += [x, y, z, *parts, same, *wide, *shapes, loss, weight.grad, weight.grad.to(torch.float32)]
        optimizer.step()
        optimizer.zero_grad()
    return fakes


def _traits(x, everything):
    memory = [y.untyped_storage()._cdata for y in everything]
    shares = [other == x.untyped_storage()._cdata for other in memory]
    sizes = x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x._version, x._is_view()
    return *sizes, x.dtype, x.device, x.requires_grad, x.is_leaf, type(x.grad_fn), torch._C._dispatch_key_set(x), shares


def test_results_are_those_of_torch():
    found = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), QuietFakeMode(), QuietFakeMode()):
        with mode:
            program = _program()
        assert all(isinstance(x, FakeTensor) and x.fake_mode is mode for x in program)
        found.append([_traits(x, program) for x in program])
    assert found[0] == found[1] == found[2]


def _grads(x):
    with torch.no_grad():
        y = x * 2
    return [x * 2, y, x.detach() * 2]


def _autocast(x):
    weight = torch.empty(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ weight
    return [x @ weight, y, torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])]


def _default_dtype(x):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        y = x.to(torch.int64) / 2
    finally:
        torch.set_default_dtype(before)
    return [x.to(torch.int64) / 2, y]


def _inference(x):
    with torch.inference_mode():
        y = torch.empty(4, 8) + 1
    return [torch.empty(4, 8) + 1, y]


def _memory(x):
    y = torch.empty(4, 8)
    y.set_(torch.empty(6, 8).untyped_storage(), 8, (4, 8), (8, 1))
    z = torch.empty(4, 8).resize_(2, 16)
    return [y + 1, y.t(), z.view(-1), z.t_() * 2, torch.nn.functional.conv1d(x[None], torch.empty(3, 4, 2))]


def _devices(x):
    return [x * 2, torch.empty(4, 8, device="meta") * 2, torch.empty(4, 8, dtype=torch.float64) * 2]


@pytest.mark.parametrize("calls", [_grads, _autocast, _default_dtype, _inference, _memory, _devices])
def test_what_surrounds_a_call_decides_too(calls):
    """The same calls on the same shapes, in other circumstances: the second time, what the first left is there."""
    results = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), QuietFakeMode(), QuietFakeMode()):
        with mode:
            x = torch.empty(4, 8, requires_grad=True)
            outputs = calls(x)
        sizes = [(y.shape, y.stride(), y.storage_offset(), y.dtype, y.device, y.is_inference()) for y in outputs]
        results.append([(*size, y.requires_grad, type(y.grad_fn)) for size, y in zip(sizes, outputs)])
    assert results[0] == results[1] == results[2]


def test_a_call_that_failed_fails_again():
    with QuietFakeMode():
        x = torch.empty(4, 4)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                x @ torch.empty(3, 3)
        with pytest.raises(Exception, match="nonzero|data-dependent|dynamic"):
            x.nonzero()


def test_an_out_tensor_is_resized_each_time():
    with QuietFakeMode(), pytest.warns(UserWarning):
        x = torch.empty(4, 4)
        for _ in range(2):
            out = torch.empty(1)
            assert torch.add(x, x, out=out).shape == out.shape == (4, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dims", [(2, 3), (3, 3), (2, 2), (3, 2)])
def test_a_grouped_product_has_the_sizes_and_strides_of_torch(dims, dtype):
    """torch's fake form takes bfloat16 alone. Rows are padded to 16 bytes."""
    columns = 12 if dims == (2, 3) and dtype is torch.float32 else 24
    a, b = (torch.ones((2, *shape)[-n:], dtype=dtype) for n, shape in zip(dims, ((8, 16), (16, columns)), strict=True))
    last = {(2, 3): 8, (2, 2): 16, (3, 2): columns}
    offsets = torch.tensor([8, last[dims]], dtype=torch.int32) if dims in last else None
    real = torch._grouped_mm(a, b, offs=offsets)
    mode = QuietFakeMode()
    operands = [None if x is None else mode.from_tensor(x) for x in (a, b, offsets)]
    with mode:
        fake = torch._grouped_mm(operands[0], operands[1], offs=operands[2])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
