"""The source of a division: read, imported, and run on threads as one process runs the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist import Mesh
from neuronx_dist.comm import threads
from neuronx_dist.parallelize.body import conversion
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.emit import emit
from neuronx_dist.parallelize.initial_weights import write_initial
from neuronx_dist.parallelize.module import load
from neuronx_dist.parallelize.stored import stored_of
from neuronx_dist.spmd import I, P, R, S
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.by_hand import pair


def written(tmp_path: Path, size: int) -> tuple[torch.nn.Module, Path, dict[str, Any]]:
    module, division, arguments = pair(size)
    stored = stored_of(module, division)
    file = tmp_path / "code.py"
    file.write_text(emit(division, name="Pair", stored=stored))
    write_initial(module, stored, tmp_path)
    return module, file, arguments


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_division_equals_one_process(tmp_path: Path, size: int) -> None:
    module, file, arguments = written(tmp_path, size)
    expected = module(**arguments)
    expected["loss"].backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}

    def rank() -> tuple[Any, dict[str, Any], list[str]]:
        divided = load(file, ComputeConfig(size, size))()
        result = divided(**arguments)
        result["loss"].backward()
        whole = {
            name: None if p.grad is None else gather_full(p.grad, spec_of(p)) for name, p in divided.named_parameters()
        }
        return result, whole, list(divided.state_dict())

    for result, whole, names in threads.run(Mesh(size, tp=size), rank):
        assert names == list(module.state_dict())
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole, gradients, rtol=1e-12, atol=1e-12)


def test_the_text_of_a_file(tmp_path: Path) -> None:
    _, file, _ = written(tmp_path, 2)
    lines = [line.strip() for line in file.read_text().splitlines()]
    assert "linear = F.linear(x, self.layers[0].weight, self.layers[0].bias)  # [4, 8] S(1)" in lines
    assert 'linear_1_I = spmd.all_reduce(linear_1, "tp", src=P, dst=I)  # [4, 8] I' in lines
    assert "# layers  model.py:2: ..." in lines
    assert "del tanh" in lines
    assert lines[-1] == 'return {"loss": sum_1, "rows": (linear_1_I,)}'


@pytest.mark.parametrize("src, dst", [(R, I), (S(0), P), (S(0, stride=2), R), (I, S(0, stride=2))])
def test_conversions_that_do_not_exist(src: Any, dst: Any) -> None:
    with pytest.raises(ValueError, match="x: no operator makes"):
        conversion("x", "tp", src, dst)
