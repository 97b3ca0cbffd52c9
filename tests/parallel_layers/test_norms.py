"""LayerNorm and RMSNorm are torch's, and say that sequence parallelism makes their gradients partial."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import LayerNorm, RMSNorm
from neuronx_dist.spmd import spec_of
from tests.parallel_layers.layer_parity import close, draw, gradients, load, tp_mesh, whole_gradients

KINDS = [
    (LayerNorm, nn.LayerNorm, {}),
    (LayerNorm, nn.LayerNorm, dict(eps=1e-2)),
    (LayerNorm, nn.LayerNorm, dict(bias=False)),
    (LayerNorm, nn.LayerNorm, dict(elementwise_affine=False)),
    (RMSNorm, nn.RMSNorm, dict(eps=1e-6)),
]


def case(kind, options, size, x, g, full):
    rank, tp = comm.rank("tp"), comm.size("tp")
    norm = kind(size, dtype=torch.float64, sequence_parallel_enabled=True, **options)
    load(norm, full)
    mine = x.chunk(tp, 1)[rank].clone().requires_grad_()
    out = norm(mine)
    out.backward(g.chunk(tp, 1)[rank])
    return out.detach(), mine.grad, gradients(norm)


@pytest.mark.each_pair
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind, torchs, options", KINDS)
@pytest.mark.parametrize("size", [6, (3, 6)])
def test_norms_on_shards_of_the_sequence(tp, kind, torchs, options, size):
    shape = (2, 4, 6) if size == 6 else (2, 4, 3, 6)
    x, g = draw(*shape), draw(*shape, seed=1)
    whole = torchs(size, dtype=torch.float64, **options)
    full = {name: draw(*param.shape, seed=2 + i) for i, (name, param) in enumerate(whole.named_parameters())}
    whole.load_state_dict(full)
    given = x.clone().requires_grad_()
    want = whole(given)
    want.backward(g)
    outs, xs, grads = zip(*threads.run(tp_mesh(tp), case, kind, options, size, x, g, full))
    close(torch.cat(outs, 1), want, "output")
    close(torch.cat(xs, 1), given.grad, "dx")
    found = whole_gradients(grads)
    assert set(found) == set(full)
    for name, grad in found.items():
        close(grad, dict(whole.named_parameters())[name].grad, name)


def test_fresh_norms_are_the_identity_scaling():
    for norm in (LayerNorm(4), RMSNorm(4)):
        assert (norm.weight == 1).all()
    assert (LayerNorm(4).bias == 0).all()
    assert LayerNorm(4, elementwise_affine=False).weight is None and LayerNorm(4, bias=False).bias is None
    assert list(LayerNorm(4, elementwise_affine=False).parameters()) == []


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_parameters_are_marked(kind):
    for param in kind(4, sequence_parallel_enabled=True).parameters():
        assert spec_of(param).sequence_parallel and param.sequence_parallel_enabled
    for param in kind(4).parameters():
        assert not spec_of(param).sequence_parallel and not hasattr(param, "sequence_parallel_enabled")


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_of_the_input_comes_back(kind, dtype):
    """Upstream B15: LayerNorm discards its cast back. Low precisions are computed in fp32."""
    x = (3 * draw(4, 64)).to(dtype)
    out = kind(64, dtype=dtype)(x)
    assert out.dtype == dtype
    close(out, kind(64)(x.float()), tolerance=4e-3)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_on_the_meta_device(kind):
    norm = kind(4, device="meta")
    assert all(p.is_meta for p in norm.parameters()) and norm(torch.ones(2, 4, device="meta")).shape == (2, 4)
    with torch.device("meta"):
        assert kind(4).weight.is_meta
    assert "sequence_parallel=False" in repr(norm)


def test_it_is_one_of_torchs_which_scripts_ask_for() -> None:
    with comm.as_rank(Mesh(1), 0):
        norm = LayerNorm(4, sequence_parallel_enabled=True)
    assert isinstance(norm, nn.LayerNorm) and norm.elementwise_affine
    assert dict(norm.named_parameters()).keys() == {"weight", "bias"}
