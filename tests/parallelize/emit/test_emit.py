"""The source of a division: read, imported, and run on threads as one process runs the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, parallelize
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.prove.emitted import imported
from neuronx_dist.parallelize.train.stored import stored_of
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support.by_hand import pair


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_division_equals_one_process(size: int) -> None:
    module, division, arguments = pair(size)
    source = emit(division, name="Pair", stored=stored_of(module, division))
    expected = module(**arguments)
    expected["loss"].backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}

    def rank() -> tuple[Any, dict[str, Any], list[str]]:
        divided = divided_class()
        result = divided(**arguments)
        result["loss"].backward()
        whole = {
            name: None if p.grad is None else gather_full(p.grad, spec_of(p)) for name, p in divided.named_parameters()
        }
        return result, whole, list(divided.state_dict())

    with imported(source, size, module.state_dict()) as divided_class:
        ranks = threads.run(Mesh(size, tp=size), rank)
    for result, whole, names in ranks:
        assert names == list(module.state_dict())
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole, gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_ranks_sum_the_gradients_of_a_layer_s_weights_in_one_collective(tmp_path: Path) -> None:
    """Per layer one all-reduce for 4 parameters, of the same bytes; gradients of one process."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)]
    module, x = nn.Sequential(*layers).double(), torch.randn(4, 8, dtype=torch.float64)
    module(x).square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}

    def rank() -> tuple[dict[str, Any], list[Any]]:
        parallel: Any = parallelize(module, {"input": x}, "data", ComputeConfig(2), gen_savedir=tmp_path)
        loss = parallel(x).square().sum()
        with comm.record() as calls:
            loss.backward()
        summed = [call.shape for call in calls if call.verb == "all_reduce"]
        return {name: parameter.grad for name, parameter in parallel.named_parameters()}, summed

    for gradients, summed in threads.run(Mesh(2, tp=2), rank):
        assert summed == [(3 * 8 + 8 * 8,)] * 2
        torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)


def test_the_text_of_a_file() -> None:
    lines = [line.strip() for line in emit(pair(2)[1]).splitlines()]
    assert "linear = F.linear(x, self.layers[0].weight, self.layers[0].bias)  # [4, 8 of 16] S(1)" in lines
    assert 'linear_1_I = spmd.all_reduce(linear_1, "tp", src=P, dst=I)  # [4, 8] I' in lines
    assert "# layers  model.py:2: ..." in lines
    assert "del tanh" in lines
    assert lines[-1] == 'return {"loss": sum_1, "rows": (linear_1_I,)}'
