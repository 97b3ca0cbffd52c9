"""Zero heads where tp does not divide the heads: same outputs, no gradient, and layouts that survive (defect B6)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.model_shape import padded_heads
from neuronx_dist.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_cross_entropy,
)
from neuronx_dist.parallel_layers.pad import (
    generate_padding_mask,
    get_number_of_extra_heads,
    pad_model,
    unpad_model,
)
from neuronx_dist.spmd import spec_of
from neuronx_dist.weights.shard_spec import gather_full

HIDDEN, HEAD_DIM = 16, 4


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[batch, seq, heads * head_dim]` projections to the attention's output, of the same shape as q."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """A model as in an NxD script: the layers are parallel, the heads are counted by hand where they are needed."""

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


@pytest.mark.parametrize(
    "tp,degree,heads,kv_heads,padded",
    [
        (2, 2, 9, 3, (12, 4)),
        (4, 4, 6, 2, (12, 4)),
        (2, 2, 3, 3, (4, 4)),
        (1, 2, 9, 3, (12, 4)),  # padded as for a later run at another degree
        (2, 4, 6, 2, (12, 4)),
        (2, 3, 4, 4, (6, 6)),
    ],
)
def test_padded_model_is_the_same_model(
    tp: int, degree: int, heads: int, kv_heads: int, padded: tuple[int, int]
) -> None:
    """Built unpadded (ranks hold pieces of heads), then padded by its key/value heads: outputs, gradients, layout."""
    state = _state(heads, kv_heads)
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, gradients = _reference(state, x)

    def rank() -> None:
        model = _fill(Model(heads, kv_heads), state)
        assert pad_model(model, degree, kv_heads, wrapped_classes=(Attention,)) is model
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


@pytest.mark.parametrize(
    "tp,degree,heads,kv_heads,padded,replicas",
    [
        (2, 2, 9, 3, (12, 4), 1),
        (4, 4, 9, 3, (12, 4), 1),
        (4, 4, 6, 2, (8, 2), 2),
        (8, 8, 6, 2, (8, 2), 4),
        (1, 8, 9, 3, (24, 8), 1),  # replicas are for the mesh of the degree
        (2, 2, 4, 2, (4, 2), 1),  # nothing to pad
        (4, 4, 4, 2, (4, 2), 2),  # nor here: the ranks share heads
    ],
)
def test_grouped_queries_are_padded_or_shared_by_the_number_of_query_heads(
    tp: int, degree: int, heads: int, kv_heads: int, padded: tuple[int, int], replicas: int
) -> None:
    """Upstream's pad_model has no such case. And `unpad_model` gives back what there was."""
    state = _state(heads, kv_heads)
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, gradients = _reference(state, x)

    def rank() -> None:
        model: Any = _fill(Model(heads, kv_heads), state)
        model.attention.num_heads, model.attention.num_key_value_groups = heads, heads // kv_heads
        if (heads, degree) != (9, 2):  # there is only one reading of 9 heads
            model.attention.head_dim = HEAD_DIM
        before = {name: (param.detach().clone(), spec_of(param)) for name, param in model.named_parameters()}
        seen: list[float] = []
        for _ in range(2):  # the second changes nothing
            pad_model(model, degree, heads, (Attention,), lambda _, ratio: seen.append(ratio))
        assert seen == ([padded[0] / heads] * 2 if padded[0] > heads else [])
        local_heads, shared = padded[0] // tp, padded[1] * replicas // tp
        assert model.attention.num_heads == local_heads
        assert model.attention.num_key_value_groups == local_heads // shared
        assert model.attention.q.weight.shape[0] == local_heads * HEAD_DIM
        assert model.attention.k.weight.shape[0] == model.attention.v.output_size_per_partition == shared * HEAD_DIM
        assert model.attention.k.replicas == replicas and model.attention.o.input_size == padded[0] * HEAD_DIM
        out = model(x)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            torch.testing.assert_close(gather_full(param.grad, spec_of(param)), gradients[name], rtol=1e-10, atol=1e-8)
            assert torch.equal(gather_full(param, spec_of(param)), state[name])
        assert unpad_model(model) is model
        assert (model.attention.num_heads, model.attention.k.replicas) == (heads, 1)
        assert model.attention.k.output_size_per_partition == kv_heads * HEAD_DIM // tp
        for name, param in model.named_parameters():
            assert spec_of(param) == before[name][1] and torch.equal(param, before[name][0]), name

    threads.run(Mesh(tp, tp=tp), rank)


def test_the_size_of_a_head_says_which_heads_are_counted() -> None:
    """32 heads over 8 at tp 64 double by the ratio, which would leave half a key/value head on a rank."""

    def rank() -> None:
        with torch.device("meta"):
            model: Any = Model(8, 4)
        model.attention.head_dim = HEAD_DIM
        with pytest.raises(ValueError, match="n_heads=6, but attention has 8 query heads over 4 key/value heads"):
            pad_model(model, 16, 6)
        pad_model(model, 16, 8)
        assert (model.attention.q.output_size, model.attention.k.output_size) == (16 * HEAD_DIM, 4 * HEAD_DIM)
        assert model.attention.k.replicas == 4

    threads.run(Mesh(16, tp=16), rank)


def test_a_padded_model_has_the_logits_of_its_vocabulary() -> None:
    """Padding all of a model must not add columns of zeros, which are ids with a probability."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = ParallelEmbedding(20, HIDDEN, dtype=torch.float64)
            self.attention = Attention(3, 3)
            self.head = ColumnParallelLinear(HIDDEN, 20, bias=False, gather_output=False, dtype=torch.float64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return parallel_cross_entropy(self.head(self.attention(self.embed(ids))), ids)

    def alone() -> torch.Tensor:
        torch.manual_seed(0)
        losses: torch.Tensor = Language()(torch.arange(10).view(2, 5)).detach()
        return losses

    (expected,) = threads.run(Mesh(1), alone)

    def padded() -> None:
        torch.manual_seed(0)
        model: Any = pad_model(Language(), 2, 3)
        assert model.head.output_size == 20 and model.attention.q.output_size == 4 * HEAD_DIM
        torch.testing.assert_close(model(torch.arange(10).view(2, 5)), expected, rtol=1e-12, atol=1e-12)

    threads.run(Mesh(2, tp=2), padded)


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
        pad_model(model, 1, 2)
        assert before == {name: id(param) for name, param in model.named_parameters()}

    threads.run(Mesh(2, tp=2), rank)


@pytest.mark.parametrize("wrapped", [Attention, (Attention,), [Attention, nn.Embedding]])
def test_the_hook_is_called_for_instances_of_a_wrapped_class_alone(wrapped: Any) -> None:
    """The guide's case: a hook that sets an attribute of the attention must not be called with its projections."""

    def rank() -> Any:
        seen: list[tuple[nn.Module, float]] = []
        model = Model(9, 3)
        pad_model(model, 2, 3, wrapped, lambda module, ratio: seen.append((module, ratio)))
        assert seen == [(model.attention, 4 / 3)]

    threads.run(Mesh(2, tp=2), rank)


def test_without_a_wrapped_class_the_hook_is_called_for_every_module() -> None:
    def rank() -> Any:
        seen: list[nn.Module] = []
        model = Model(9, 3).attention
        pad_model(model, 2, 3, pad_hook_fn=lambda module, ratio: seen.append(module))
        assert seen == [*model.modules()]

    threads.run(Mesh(2, tp=2), rank)


def test_frozen_weights_stay_frozen() -> None:
    def rank() -> None:
        model = Model(9, 3)
        frozen = {"attention.q.weight", "attention.q.bias", "attention.o.weight"}
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        pad_model(model, 2, 3, wrapped_classes=Attention)
        assert {name for name, param in model.named_parameters() if not param.requires_grad} == frozen

    threads.run(Mesh(2, tp=2), rank)


class TwoAttentions(nn.Module):
    """The queries have one weight, as has, of the second attention, a layer outside."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.first, self.second = Attention(6, 6), Attention(6, 6)
        self.second.q.weight = self.first.q.weight
        if outside:
            self.outside = ColumnParallelLinear(HIDDEN, 6 * HEAD_DIM, gather_output=False, dtype=torch.float64)
            self.outside.weight = self.second.q.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def test_tied_weights_stay_tied() -> None:
    def rank() -> None:
        model = TwoAttentions(outside=False)
        before = gather_full(model.first.q.weight.detach(), spec_of(model.first.q.weight))
        for change, heads in (
            (partial(pad_model, tp_degree=4, n_heads=6, wrapped_classes=Attention), 4),
            (unpad_model, 3),
        ):
            change(model)
            weight = model.first.q.weight
            assert weight is model.second.q.weight and weight.shape[0] == heads * HEAD_DIM
            assert gather_full(weight.detach(), spec_of(weight)).equal(before)
        with pytest.raises(ValueError, match=r"would untie first.q.weight and outside.weight, of which one is padded"):
            pad_model(TwoAttentions(outside=True), 4, 6, Attention)

    threads.run(Mesh(2, tp=2), rank)


def test_mistakes_are_named() -> None:
    def pad(*args: Any, **options: Any) -> str:
        with pytest.raises(ValueError) as caught:
            threads.run(Mesh(2, tp=2), lambda: pad_model(Model(9, 3), *args, **options))
        return str(caught.value)

    message = pad(2, 5, wrapped_classes=(Attention,))
    assert "the output_size 36 of attention.q times 6/5 is not an integer" in message
    assert "the number of query heads or of key/value heads" in message
    message = pad(3, 3, wrapped_classes=(Attention,))
    assert "3 heads, padded to 3 for tp_degree 3, are not divisible by the tensor-parallel size 2" in message
    assert "mlp gathers its output" in pad(2, 3)
    assert "no module of this Model is a Embedding, so that wrapped_classes leave nothing" in pad(2, 3, nn.Embedding)
    with pytest.raises(TypeError, match=r"wrapped_classes='Attention': pass classes, and not 'Attention'"):
        pad_model(nn.Linear(1, 1), 2, 3, "Attention")  # type: ignore[arg-type]


@pytest.mark.parametrize("attribute,value", [("num_heads", 3), ("n_heads", 3), ("head_dim", HEAD_DIM)])
def test_a_number_of_heads_that_the_attention_does_not_have(attribute: str, value: int) -> None:
    """4 heads need no padding at tp 2, and 3 do."""

    def rank() -> None:
        model = Model(3, 3)
        setattr(model.attention, attribute, value)
        with pytest.raises(ValueError, match="n_heads=4, but attention, a Attention, has 3 heads: pass its number of"):
            pad_model(model, 2, 4, [Attention])
        pad_model(model, 2, 3, [Attention])
        setattr(model.attention, attribute, value if attribute == "head_dim" else 2)  # as scripts set the local number
        pad_model(model, 2, 4 if attribute != "head_dim" else 3, [Attention])

    threads.run(Mesh(2, tp=2), rank)


def test_number_of_extra_heads() -> None:
    assert [get_number_of_extra_heads(n, 4) for n in (1, 3, 4, 5, 8)] == [3, 1, 0, 3, 0]


def test_padding_mask() -> None:
    masks = [generate_padding_mask(9, 12, 3, 2, rank) for rank in range(2)]
    assert torch.cat(masks).tolist() == [True] * 9 + [False] * 3
    assert generate_padding_mask(8, 8, 2, 4, 1).all()
    assert [generate_padding_mask(2, 4, 2, 2, rank).tolist() for rank in range(2)] == [[True, False]] * 2
    for arguments, message in (
        ((9, 12, 3, 5, 0), "not divisible by tp_degree 5"),
        ((9, 10, 3, 2, 0), "groups of equal size, of 3 or more"),
        ((9, 12, 3, 2, 2), "tp_rank 2"),
        ((9, 6, 3, 2, 0), "fewer"),
        ((9, 12, 2, 2, 0), "9 heads over 2"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_padding_mask(*arguments)
    with pytest.raises(RuntimeError, match="Unexpected hardware_type 'gpu': use None or one of trn1, inf2, trn2"):
        generate_padding_mask(9, 12, 3, 2, 0, "gpu")


def _assigned_heads(num_heads: int, padded: int, kv_heads: int, tp: int, interleaved: bool) -> list[list[bool]]:
    """Heads dealt out one by one: each key/value head has its query heads and then padding, and the ranks that hold it
    take them in turn.
    """
    copies = max(1, tp // kv_heads)
    # Key/value heads as the ranks hold them, one after the other: K0 K0 K1 K1, or K0 K1 K0 K1.
    held = [*range(kv_heads)] * copies if interleaved else [kv for kv in range(kv_heads) for _ in range(copies)]
    left = {kv: [True] * (num_heads // kv_heads) + [False] * ((padded - num_heads) // kv_heads) for kv in held}
    masks = []
    for rank in range(tp):
        is_local: list[bool] = []
        per_rank = len(held) // tp
        for kv in held[rank * per_rank : (rank + 1) * per_rank]:
            count = padded // tp // per_rank
            is_local += left[kv][:count]
            left[kv] = left[kv][count:]
        masks.append(is_local)
    assert not any(left.values())
    return masks


@pytest.mark.slow
def test_padding_mask_of_replicated_heads() -> None:
    """Against heads that are dealt out one by one, in every layout in which they can be."""
    layouts = 0
    for kv_heads, tp in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8, 16, 32)):
        if kv_heads % tp and tp % kv_heads:
            continue
        unit = max(tp, kv_heads)
        for group, extra in itertools.product(range(1, 8), range(4)):
            num_heads = kv_heads * group
            padded = (-(-num_heads // unit) + extra) * unit
            for hardware in (None, "trn1"):
                expected = _assigned_heads(num_heads, padded, kv_heads, tp, hardware == "trn1")
                if hardware is not None and tp < kv_heads:  # padding is at the end of a rank's heads, as upstream
                    expected = [sorted(mask, reverse=True) for mask in expected]
                arguments = (num_heads, padded, kv_heads, tp)
                masks = [generate_padding_mask(*arguments, rank, hardware).tolist() for rank in range(tp)]
                assert masks == expected, (*arguments, hardware)
                layouts += 1
    assert layouts > 1000
    masks = [generate_padding_mask(48, 64, 8, 32, rank).tolist() for rank in range(32)]
    assert masks == [[True, True], [True, True], [True, True], [False, False]] * 8
    interleaved = [generate_padding_mask(48, 64, 8, 32, rank, "trn1").tolist() for rank in range(32)]
    assert interleaved == [[True, True]] * 24 + [[False, False]] * 8
    for same, other in (("inf2", "trn1"), ("trn2", None)):
        arguments = (48, 64, 8, 32, 9)
        assert torch.equal(generate_padding_mask(*arguments, same), generate_padding_mask(*arguments, other))


def test_the_padding_mask_is_that_of_padded_heads() -> None:
    """Key/value heads that do not fit tp are padded as the layers of a swapped model are."""
    for kv_heads, group, tp in itertools.product(range(1, 9), range(1, 5), range(1, 13)):
        heads, padded_kv, _ = padded_heads(kv_heads * group, kv_heads, tp)
        masks = [generate_padding_mask(kv_heads * group, heads, kv_heads, tp, rank) for rank in range(tp)]
        groups = torch.cat(masks).view(padded_kv, -1)
        assert groups[:kv_heads, :group].all() and groups.sum() == kv_heads * group
