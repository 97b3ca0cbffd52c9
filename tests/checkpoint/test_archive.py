"""`torch.load` takes what `archive` makes."""

import io
import math

import pytest
import torch

from neuronx_dist.checking.types.axis_powers import AxisSize
from neuronx_dist.checkpoint.dcp import archive as module
from neuronx_dist.checkpoint.dcp.archive import ALIGNMENT, archive
from neuronx_dist.weights.host_memory import as_bytes, as_tensor

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (3, 1, 2), (0, 4)])
def test_torch_loads_it(dtype, shape):
    count = math.prod(shape)
    tensor = torch.arange(count).float().view(shape).to(dtype)
    around = archive(dtype, shape)
    content = around.head + bytes(as_bytes(tensor)) + around.tail
    assert len(around.head) % ALIGNMENT == len(content) % ALIGNMENT == 0
    assert around.nbytes == count * dtype.itemsize
    for length in (around.length, len(content)):
        loaded = torch.load(io.BytesIO(content[:length]), weights_only=True)
        assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, tensor.shape, tensor.stride())
        assert bytes(as_bytes(loaded)) == bytes(as_bytes(tensor))


def test_more_than_4_gib_are_refused():
    assert archive(torch.uint8, (module.MAX_BYTES,)).nbytes == module.MAX_BYTES
    with pytest.raises(ValueError, match="too large for one piece"):
        archive(torch.float32, (1 << 15, 1 << 15))


def test_bytes_live_as_long_as_their_view():
    view = as_bytes(torch.arange(1 << 16))
    torch.zeros(1 << 16, dtype=torch.int64)  # would take the memory
    assert torch.equal(as_tensor(view, torch.int64, (1 << 16,)), torch.arange(1 << 16))


def test_bytes_that_cannot_be_written_are_copied(recwarn):
    tensor = as_tensor(memoryview(bytes(8)), torch.int32, (2, 1))
    assert tensor.tolist() == [[0], [0]] and not recwarn.list


def test_sizes_that_know_their_axes_leave_plain_ints() -> None:
    """A tensor of a shape that a type check counted with has the archive of equal plain sizes, whichever came first."""
    shape = (AxisSize(6, {"tp": 1}), 35)
    for sizes in (shape, (6, 35)):
        found = archive(torch.float64, sizes)
        assert {type(found.nbytes), type(found.length)} == {int} and found.nbytes == 6 * 35 * 8
