"""What the mode repeats is what torch's own fake tensors give, call by call."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from neuronx_dist.pipeline.record.fake_mode import QuietFakeMode


def _program():
    """A step of a small model, with views, writes in place, lists and numbers of all kinds; returns all tensors."""
    made = []
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
        made += [x, y, z, *parts, same, *wide, *shapes, loss, weight.grad, weight.grad.to(torch.float32)]
        optimizer.step()
        optimizer.zero_grad()
    return made


def _traits(x, everything):
    memory = [y.untyped_storage()._cdata for y in everything]
    shares = [other == x.untyped_storage()._cdata for other in memory]
    sizes = x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x._version, x._is_view()
    return *sizes, x.dtype, x.device, x.requires_grad, x.is_leaf, type(x.grad_fn), torch._C._dispatch_key_set(x), shares


def test_results_are_those_of_torch():
    found = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), QuietFakeMode(), QuietFakeMode()):
        with mode:
            made = _program()
        assert all(isinstance(x, FakeTensor) and x.fake_mode is mode for x in made)
        found.append([_traits(x, made) for x in made])
    assert found[0] == found[1] == found[2]


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
