"""Zero heads where tp does not divide the heads: same outputs, no gradient, and layouts that survive (defect B6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.parallel_layers.pad import generate_padding_mask, get_number_of_extra_heads, pad_model
from neuronx_dist.spmd import spec_of
from neuronx_dist.weights.shard_spec import gather_full

HIDDEN, HEAD_DIM = 12, 4


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[batch, seq, heads * head_dim]` projections to the attention's output, of the same shape as q."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """As an NxD script writes it: the layers are parallel, the heads are counted by hand where they are needed."""

    def __init__(self, heads: int, kv_heads: int, bias: bool = True) -> None:
        super().__init__()
        options: Any = dict(bias=bias, gather_output=False, dtype=torch.float64)
        self.q = ColumnParallelLinear(HIDDEN, heads * HEAD_DIM, **options)
        self.k = ColumnParallelLinear(HIDDEN, kv_heads * HEAD_DIM, **options)
        self.v = ColumnParallelLinear(HIDDEN, kv_heads * HEAD_DIM, **options)
        self.o = RowParallelLinear(heads * HEAD_DIM, HIDDEN, bias=bias, input_is_parallel=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.o(attend(self.q(x), self.k(x), self.v(x)))
        return out


class Model(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention = Attention(heads, kv_heads)
        self.mlp = ColumnParallelLinear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.attention(x))
        return out


def _state(heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"attention.q": heads, "attention.k": kv_heads, "attention.v": kv_heads}
    state = {}
    for name, count in shapes.items():
        state[f"{name}.weight"] = torch.randn(count * HEAD_DIM, HIDDEN, generator=generator, dtype=torch.float64)
        state[f"{name}.bias"] = torch.randn(count * HEAD_DIM, generator=generator, dtype=torch.float64)
    state["attention.o.weight"] = torch.randn(HIDDEN, heads * HEAD_DIM, generator=generator, dtype=torch.float64)
    state["mlp.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    for name in ("attention.o.bias", "mlp.bias"):
        state[name] = torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
    return state


def _fill(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    with torch.no_grad():
        for name, param in model.named_parameters():
            spec = spec_of(param)
            param.copy_(spec.local_slice(state[name], comm.rank("tp")) if spec.axis else state[name])
    return model


def _reference(state: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    p = {name: value.clone().requires_grad_() for name, value in state.items()}

    def linear(y: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(y, p[f"{name}.weight"], p[f"{name}.bias"])

    out = linear(attend(*(linear(x, f"attention.{name}") for name in "qkv")), "attention.o")
    out = linear(out, "mlp")
    out.square().sum().backward()
    return out.detach(), {name: value.grad for name, value in p.items() if value.grad is not None}


@pytest.mark.parametrize("tp,heads,kv_heads,padded", [(2, 9, 3, (12, 4)), (4, 6, 2, (12, 4)), (2, 3, 3, (4, 4))])
def test_padded_model_is_the_same_model(tp: int, heads: int, kv_heads: int, padded: tuple[int, int]) -> None:
    """Built unpadded (ranks hold pieces of heads), then padded by its key/value heads: outputs, gradients, layout."""
    state = _state(heads, kv_heads)
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, gradients = _reference(state, x)

    def rank() -> None:
        model = _fill(Model(heads, kv_heads), state)
        assert pad_model(model, tp, kv_heads, wrapped_classes=(Attention,)) is model
        assert model.attention.q.weight.shape == (padded[0] * HEAD_DIM // tp, HIDDEN)
        assert model.attention.q.output_size == padded[0] * HEAD_DIM
        assert model.attention.k.output_size_per_partition == padded[1] * HEAD_DIM // tp
        assert model.attention.o.input_size == padded[0] * HEAD_DIM
        assert model.mlp.output_size == HIDDEN
        out = model(x)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        for name, param in model.named_parameters():
            spec = spec_of(param)
            assert param.grad is not None
            torch.testing.assert_close(gather_full(param.grad, spec), gradients[name], rtol=1e-10, atol=1e-8)
            assert torch.equal(gather_full(param, spec), state[name])
            if spec.unpadded is not None:
                assert spec.dim is not None
                whole = torch.cat(list(comm.all_gather(param.grad.unsqueeze(0), "tp")), spec.dim)
                assert not whole.narrow(spec.dim, spec.unpadded, spec.full_shape[spec.dim] - spec.unpadded).any()

    threads.run(Mesh(tp, tp=tp), rank)


def test_b6_padding_keeps_the_tensor_parallel_attributes() -> None:
    """Upstream's pad_model re-wraps parameters and loses them, so that norms and checkpoints are silently wrong."""

    def rank() -> None:
        model = pad_model(Model(9, 3), 2, 3, wrapped_classes=Attention)
        for param, dim in ((model.attention.q.weight, 0), (model.attention.q.bias, 0), (model.attention.o.weight, 1)):
            assert param.tensor_model_parallel and param.partition_dim == dim
            assert param.partition_stride == 1 and param.num_partitions == 2
            assert spec_of(param).unpadded == 9 * HEAD_DIM and spec_of(param).full_shape[dim] == 12 * HEAD_DIM
        assert not getattr(model.attention.o.bias, "tensor_model_parallel", False)

    threads.run(Mesh(2, tp=2), rank)


def test_a_model_on_meta() -> None:
    def rank() -> None:
        with torch.device("meta"):
            model = Model(9, 3)
        with comm.record() as calls:
            pad_model(model, 2, 3, wrapped_classes=(Attention,))
        assert model.attention.k.weight.is_meta and model.attention.k.weight.shape == (2 * HEAD_DIM, HIDDEN)
        assert not calls

    threads.run(Mesh(2, tp=2), rank)


def test_nothing_to_pad() -> None:
    def rank() -> None:
        model = Model(4, 2)
        before = {name: id(param) for name, param in model.named_parameters()}
        pad_model(model, 2, 2)
        assert before == {name: id(param) for name, param in model.named_parameters()}

    threads.run(Mesh(2, tp=2), rank)


def test_the_hook_sees_every_module_inside_a_wrapped_class() -> None:
    def rank() -> Any:
        seen: list[tuple[str, float]] = []
        hook = lambda module, ratio: seen.append((type(module).__name__, ratio))  # noqa: E731
        pad_model(Model(9, 3), 2, 3, wrapped_classes=(Attention,), pad_hook_fn=hook)
        return seen

    names = ["Attention", *["ColumnParallelLinear"] * 3, "RowParallelLinear"]
    assert threads.run(Mesh(2, tp=2), rank)[0] == [(name, 4 / 3) for name in names]


def test_mistakes_are_named() -> None:
    def pad(*args: Any, **options: Any) -> str:
        with pytest.raises(ValueError) as caught:
            threads.run(Mesh(2, tp=2), lambda: pad_model(Model(9, 3), *args, **options))
        return str(caught.value)

    message = pad(2, 9, wrapped_classes=(Attention,))
    assert "the output_size 12 of attention.k times 10/9 is not whole" in message
    assert "the number of key/value heads" in message
    assert "tp_degree is 4, but the tensor-parallel size is 2" in pad(4, 3)
    assert "mlp gathers its output" in pad(2, 3)


def test_number_of_extra_heads() -> None:
    assert [get_number_of_extra_heads(n, 4) for n in (1, 3, 4, 5, 8)] == [3, 1, 0, 3, 0]


def test_padding_mask() -> None:
    masks = [generate_padding_mask(9, 12, 3, 2, rank) for rank in range(2)]
    assert torch.cat(masks).tolist() == [True] * 9 + [False] * 3
    assert generate_padding_mask(8, 8, 2, 4, 1).all()
    for arguments, message in (
        ((9, 12, 3, 5, 0), "not divisible by tp_degree 5"),
        ((9, 10, 3, 2, 0), "whole groups"),
        ((9, 12, 3, 2, 2), "tp_rank 2"),
        ((9, 6, 3, 2, 0), "fewer"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_padding_mask(*arguments)
