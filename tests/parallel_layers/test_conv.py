"""Convolutions sharded over channels beside torch's in one process: values, gradients, steps, padding, groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.grads import clip_grad_norm, reduce_gradients
from neuronx_dist.parallel_layers.layers import InputChannelParallelConv2d, OutputChannelParallelConv2d
from neuronx_dist.spmd import I, S, spec_of
from neuronx_dist.weights.materialize import materialize
from neuronx_dist.weights.shard_spec import gather_full

pytestmark = pytest.mark.slow

F32, F64 = torch.float32, torch.float64
CLASSES = {"output": OutputChannelParallelConv2d, "input": InputChannelParallelConv2d}
OPTIONS: list[dict[str, Any]] = [
    dict(),
    dict(bias=False),
    dict(stride=2, padding=(1, 2)),
    dict(dilation=(2, 1), padding="same"),
    dict(padding=1, padding_mode="reflect"),
    dict(padding="same", padding_mode="circular"),
]


def images(step: int = 0, channels: int = 8, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(2, channels, 6, 5, generator=torch.Generator().manual_seed(step), dtype=F64).to(dtype)


def whole(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return gather_full(tensor, spec_of(param))


def fill(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec = spec_of(param)
            param.copy_(spec.local_slice(state[name], comm.rank("tp")) if spec.axis else state[name])


def compare(
    kind: str,
    tp: int,
    dtype: torch.dtype = F64,
    tolerance: float = 1e-10,
    in_channels: int = 8,
    out: int = 8,
    **options: Any,
) -> None:
    """Outputs, norms, gradients and weights of three steps of SGD are those of one process."""
    close: Any = dict(rtol=tolerance, atol=tolerance)
    plain_options = {name: value for name, value in options.items() if name != "partition_pad"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Conv2d(in_channels, out, 3, dtype=dtype, **plain_options)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected = []
    for step in range(3):
        x = images(step, in_channels, dtype).requires_grad_()
        y = plain(x)
        optimizer.zero_grad()
        (y**3).mean().backward()
        grads = {name: param.grad.clone() for name, param in plain.named_parameters()}
        expected.append((y.detach(), x.grad, grads, nn.utils.clip_grad_norm_(plain.parameters(), 0.01)))
        optimizer.step()

    def rank() -> None:
        model = CLASSES[kind](in_channels, out, 3, dtype=dtype, **options)
        fill(model, state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step, (y_1, grad_1, grads_1, norm_1) in enumerate(expected):
            x = images(step, in_channels, dtype).requires_grad_()
            y = model(x)
            torch.testing.assert_close(y, y_1, **close)
            optimizer.zero_grad()
            (y**3).mean().backward()
            reduce_gradients(model)
            torch.testing.assert_close(x.grad, grad_1, **close)
            for name, param in model.named_parameters():
                torch.testing.assert_close(whole(param.grad, param), grads_1[name], **close)
            torch.testing.assert_close(clip_grad_norm(model.parameters(), 0.01), norm_1, **close)
            optimizer.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(whole(param, param), plain.get_parameter(name).detach(), **close)

    threads.run(Mesh(tp, tp=tp), rank, timeout=20.0)


@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", CLASSES)
def test_steps_are_those_of_one_process(kind: str, tp: int, options: dict[str, Any]) -> None:
    compare(kind, tp, **options)


@pytest.mark.parametrize("kind", CLASSES)
def test_float32(kind: str) -> None:
    compare(kind, 2, F32, 1e-5, padding=1)


@pytest.mark.parametrize(
    "kind, tp, groups", [("output", 2, 4), ("output", 4, 4), ("output", 4, 2), ("output", 2, 8), ("input", 2, 2)]
)
def test_groups(kind: str, tp: int, groups: int) -> None:
    compare(kind, tp, groups=groups, padding=1)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("tp", [2, 4])
def test_padded_channels(kind: str, tp: int) -> None:
    compare(kind, tp, in_channels=7, out=5, partition_pad=True)


@pytest.mark.parametrize("padded", [False, True])
def test_one_behind_the_other(padded: bool) -> None:
    """Channels stay sharded between two convolutions; padded ones stay zero."""
    middle = 6 if padded else 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Conv2d(8, middle, 3, dtype=F64), nn.ReLU(), nn.Conv2d(middle, 3, 1, dtype=F64))
    x = images().requires_grad_()
    y = plain(x)
    (y**2).sum().backward()

    def rank() -> None:
        options: Any = dict(dtype=F64, partition_pad=padded)
        model = nn.Sequential(
            OutputChannelParallelConv2d(8, middle, 3, gather_output=False, **options),
            nn.ReLU(),
            InputChannelParallelConv2d(middle, 3, 1, input_is_parallel=True, **options),
        )
        fill(model, plain.state_dict())
        local = images().requires_grad_()
        with comm.record() as calls:
            out = model(local)
            (out**2).sum().backward()
        assert [(call.verb, call.axis) for call in calls] == [("all_reduce", "tp")] * 2
        torch.testing.assert_close(out, y.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(local.grad, x.grad, rtol=1e-10, atol=1e-10)
        for name, param in model.named_parameters():
            grad = plain.get_parameter(name).grad
            torch.testing.assert_close(whole(param.grad, param), grad, rtol=1e-10, atol=1e-10)
            real = spec_of(param)
            if real.unpadded is not None:  # the padding has neither values nor gradients
                start, stop = real.positions(comm.rank("tp"))
                for values in (param, param.grad):
                    assert not values.narrow(real.dim, stop - start, values.shape[real.dim] - (stop - start)).any()

    threads.run(Mesh(4, tp=4), rank)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_initial_weights_are_those_of_torch(kind: str, meta: bool) -> None:
    torch.manual_seed(5)
    plain = nn.Conv2d(7, 5, 3)

    def rank() -> Any:
        torch.manual_seed(5)
        model = CLASSES[kind](7, 5, 3, partition_pad=True, device="meta" if meta else None, keep_master_weight=True)
        if meta:
            materialize(model, seed=5)
        else:
            assert torch.equal(model.master_weight, plain.weight) and torch.equal(model.master_bias, plain.bias)
        return [whole(param, param) for param in model.parameters()]

    one, *others = [found for tp in (1, 2, 4) for found in threads.run(Mesh(tp, tp=tp), rank)]
    assert meta or all(torch.equal(a, b) for a, b in zip(one, plain.parameters()))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_attributes_and_files(tmp_path: Path) -> None:
    def save() -> None:
        torch.manual_seed(0)
        model = OutputChannelParallelConv2d(8, 6, (3, 1), partition_pad=True, bias=True, dtype=torch.bfloat16)
        assert (model.channels_per_partition, model.out_channels, model.partition_pad_size) == (2, 8, 2)
        assert model.weight.tensor_model_parallel and model.weight.partition_dim == model.bias.partition_dim == 0
        assert model.kernel_size == (3, 1) and model.weight.dtype == torch.bfloat16
        other = InputChannelParallelConv2d(8, 6, 1)
        assert other.weight.partition_dim == 1 and not hasattr(other.bias, "tensor_model_parallel")
        nxd.save_checkpoint(tmp_path, "a", model=model)

    def load() -> torch.Tensor:
        model = OutputChannelParallelConv2d(8, 6, (3, 1), partition_pad=True, dtype=torch.bfloat16)
        nxd.load_checkpoint(tmp_path, "a", model=model)
        return whole(model.weight, model.weight)

    threads.run(Mesh(4, tp=4), save)
    torch.manual_seed(0)
    (first,), (second, _) = threads.run(Mesh(1), load), threads.run(Mesh(2, tp=2), load)
    assert torch.equal(first, second) and first.shape == (6, 8, 3, 1)


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 1)
        self.one = OutputChannelParallelConv2d(8, 8, 3, padding=1, gather_output=False, **options)
        self.two = InputChannelParallelConv2d(8, 8, 3, input_is_parallel=True, **options)
        self.three = OutputChannelParallelConv2d(8, 8, 1)
        self.four = InputChannelParallelConv2d(8, 8, 1)
        self.depthwise = OutputChannelParallelConv2d(8, 8, 3, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.four(self.three(self.two(self.one(self.first(x)).relu())).relu())
        return self.depthwise(x).square().sum() * comm.size("dp")


def test_types() -> None:
    """The check finds nothing to say, and refuses a layer whose gradient is not summed."""
    x = torch.randn(4, 8, 6, 6)
    assert spmd.check(Net, x, {"dp": 2, "tp": 2}).ok, str(spmd.check(Net, x, {"dp": 2, "tp": 2}))

    class Wrong(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.one._conv(self.first(x), self.one.bias, 1)  # the input's gradient is partial
            return spmd.all_gather(out, "tp", src=S(1), dst=I).square().sum() * comm.size("dp")

    assert not spmd.check(Wrong, x, {"dp": 2, "tp": 2}).ok


def test_mistakes_are_named() -> None:
    def refused(build: Any) -> str:
        with pytest.raises(ValueError) as caught:
            threads.run(Mesh(4, tp=4), build)
        return str(caught.value)

    output, inner = OutputChannelParallelConv2d, InputChannelParallelConv2d
    assert "out_channels 6 is not divisible by the tensor parallel size 4" in refused(lambda: output(8, 6, 3))
    assert "in_channels 6 is not divisible" in refused(lambda: inner(6, 8, 3))
    assert "in_channels / groups 2 is not divisible" in refused(lambda: inner(8, 8, 3, groups=4))
    assert "3 groups do not divide the tensor parallel size 4" in refused(lambda: output(12, 12, 3, groups=3))
    assert "input_is_parallel=True is not possible with groups=2" in refused(
        lambda: inner(8, 8, 3, groups=2, input_is_parallel=True)
    )
    assert "partition_pad=True is not possible with groups=4" in refused(
        lambda: output(8, 8, 3, groups=4, partition_pad=True)
    )
    assert "the input [2, 4, 6, 5] is not [batch, channels, height, width] with 8 channels" in refused(
        lambda: output(8, 8, 3)(images(channels=4))
    )
    assert "padding_mode" in refused(lambda: output(8, 8, 3, padding_mode="mirror"))
