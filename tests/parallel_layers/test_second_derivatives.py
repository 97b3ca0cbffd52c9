"""Second derivatives (`create_graph=True`, as of gradient penalties) of parallel layers: those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import fuse_columns
from neuronx_dist.spmd import I, S
from neuronx_dist.weights.shard_spec import gather_full, named_specs

HIDDEN, VOCABULARY = 16, 32


class Net(nn.Module):
    """Norms, fused columns and a row layer, layers that gather and scatter, and sharded logits."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        parallel = {"dtype": torch.float64, "sequence_parallel_enabled": sequence_parallel}
        self.norm, self.rms = nxd.LayerNorm(HIDDEN, **parallel), nxd.RMSNorm(HIDDEN, **parallel)
        self.up, self.gate = (
            nxd.ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **parallel) for _ in range(2)
        )
        self.down = nxd.RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **parallel)
        self.gathering = nxd.ColumnParallelLinear(HIDDEN, 2 * HIDDEN, dtype=torch.float64)
        self.scattering = nxd.RowParallelLinear(2 * HIDDEN, HIDDEN, dtype=torch.float64)
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCABULARY, gather_output=False, bias=False, **parallel)
        fuse_columns([self.up, self.gate])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, param, spec in named_specs(self):
                whole = torch.randn(spec.full_shape, generator=generator, dtype=torch.float64) / 4
                param.copy_(spec.local_slice(whole, comm.rank("tp")))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            x = spmd.convert(x, "tp", src=I, dst=S(0))
        y = self.norm(x)
        x = self.rms(x + self.down(F.silu(self.gate(y)) * self.up(y)))
        if not self.sequence_parallel:
            x = x + self.scattering(F.gelu(self.gathering(x)))
        return nxd.parallel_cross_entropy(self.head(x), labels).mean()


def penalised(sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Gradients of a loss that has the norm of its gradient."""
    model, generator = Net(sequence_parallel), torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    loss = model(x, torch.randint(VOCABULARY, (4, 3), generator=generator))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + 10 * grad.square().sum()).backward()
    nxd.reduce_gradients(model)
    grads = {name: (param.grad, spec) for name, param, spec in named_specs(model) if param.grad is not None}
    return {"input": x.grad, **{name: gather_full(grad, spec) for name, (grad, spec) in grads.items()}}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gradient_penalty_is_one_process(sequence_parallel, tp):
    with comm.as_rank(Mesh(1), 0):
        reference = penalised(sequence_parallel)
    for grads in comm.threads.run(Mesh(tp, tp=tp), penalised, sequence_parallel):
        assert grads.keys() == reference.keys() and len(grads) > 10
        for name, grad in grads.items():
            assert (grad - reference[name]).norm() < 1e-10 * reference[name].norm(), name


def test_under_autocast_it_is_refused():
    def refused() -> str:
        layer = nxd.RowParallelLinear(8, 4, input_is_parallel=True, bias=False)
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(torch.ones(2, 4, requires_grad=True)).float().square().sum()
        with pytest.raises(RuntimeError, match="no second derivatives under autocast") as caught:
            torch.autograd.grad(loss, layer.weight, create_graph=True)
        return str(caught.value)

    comm.threads.run(Mesh(2, tp=2), refused)
