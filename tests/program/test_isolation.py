"""Features that a recording switches off: the cache, collectives between stages."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import compile_compatible_method_lru_cache

from neuronx_dist import comm
from neuronx_dist.comm.errors import CommError
from neuronx_dist.mesh import Axis, Mesh
from neuronx_dist.program import isolation
from neuronx_dist.program.isolation import without_cache, without_loops_over_experts
from neuronx_dist.program.recorder import record
from tests.support.locks import SeeingLock
from tests.support.pipeline_models import Block, Model, batch, error, make, on_ranks, reference

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

TRAIN: dict[str, Any] = {"output_loss_value_spec": True, "num_microbatches": 2}


class Means(Block):
    """A layer whose result is that of all ranks along an axis, which are given the same."""

    axis: Axis = "tp"

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x, mask)
        return x + (comm.all_reduce(x.detach(), self.axis) / comm.size(self.axis) - x.detach())


class OnTop(Model):
    axis: Axis = "tp"

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        comm.gather_objects(comm.rank(self.axis), self.axis)
        return super().loss(x, labels)


def with_layer(axis: Axis) -> nn.Module:
    model: Any = make()
    model.layers[2].__class__ = Means
    model.layers[2].axis = axis
    return model


def with_function(axis: Axis) -> nn.Module:
    model: Any = make(OnTop)
    model.axis = axis
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("axis,pp,tp", [("pp", 2, 1), ("pp", 3, 1), ("world", 2, 2), (("pp", "tp"), 2, 2)], ids=str)
@pytest.mark.parametrize("build,verb", [(with_layer, "all_reduce"), (with_function, "gather_objects")])
def test_a_collective_between_stages_is_refused_before_any_rank_waits(
    build: Any, verb: str, axis: Axis, pp: int, tp: int
) -> None:
    label = axis if isinstance(axis, str) else ",".join(axis)
    message = f"{verb} over {label} .*{Path(__file__).name}:.* is between pipeline stages"
    mesh = Mesh(pp * tp, pp=pp, tp=tp)

    def use(pipeline: Any) -> None:
        with pytest.raises(CommError, match=message):
            pipeline.run_train(**batch())

    on_ranks(mesh, build(axis), use, timeout=10, **TRAIN)
    with pytest.raises(CommError, match=message):
        on_ranks(mesh, build(axis), lambda p: None, batch(), timeout=10, **TRAIN)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "axis,mesh",
    [("tp", Mesh(4, pp=2, tp=2)), ("dp", Mesh(4, pp=2)), (("dp", "tp"), Mesh(8, pp=2, tp=2)), ("pp", Mesh(1))],
    ids=str,
)
@pytest.mark.parametrize("build", [with_layer, with_function])
def test_a_collective_within_a_stage_is_recorded(build: Any, axis: Axis, mesh: Mesh) -> None:
    expected, _ = reference(make(), batch(), 2)
    losses = on_ranks(mesh, build(axis), lambda p: p.run_train(**batch()), timeout=10, **TRAIN)
    assert error(losses[-1], expected) < 1e-10


def test_a_config_of_two_recordings_has_no_cache_until_both_have_ended():
    config = SimpleNamespace(use_cache=True)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first.config = second.config = config
    one, other = without_cache(first), without_cache(second)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert config.use_cache is False
    other.__exit__(None, None, None)
    assert config.use_cache is True


def test_a_cache_is_switched_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch):
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(use_cache=True)
    lock = SeeingLock(lambda: model.config.use_cache)
    monkeypatch.setattr(isolation, "_lock", lock)
    with without_cache(model), without_cache(model):
        pass
    assert lock.seen == [True, False, False, False, False, False, False, True]


def test_a_cache_that_is_off_stays_off():
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(use_cache=False)
    with without_cache(model):
        assert model.config.use_cache is False
    assert model.config.use_cache is False


class Remembers(nn.Module):
    """Scales by positions that two functions remember: one of the user, one as transformers has them."""

    @staticmethod
    @lru_cache(maxsize=4)
    def of_the_user(size: int) -> torch.Tensor:
        return torch.arange(size) + 1.0

    @staticmethod
    @compile_compatible_method_lru_cache(maxsize=4)
    def of_transformers(size: int) -> torch.Tensor:
        return torch.arange(size) + 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.of_the_user(x.shape[-1]) * self.of_transformers(x.shape[-1])


def test_a_forward_after_a_recording_has_values_that_functions_remember() -> None:
    for _ in range(2):  # without entries, and with those of the forward
        with comm.as_rank(Mesh(1), 0):
            record(Remembers(), {"x": torch.ones(3)}, leaves=False)
        assert torch.equal(Remembers()(torch.ones(3)), torch.tensor([1.0, 4.0, 9.0]))


def test_the_implementation_of_experts_is_restored_in_configs_inside() -> None:
    """MPT has a config of its attention inside, which no module holds: files of the model depend on both."""
    config = transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=8)
    model = transformers.MptForCausalLM(config)
    before = config.to_dict(), config._experts_implementation, config.attn_config._experts_implementation
    with without_loops_over_experts(model):
        assert config._experts_implementation == "neuronx_dist"
    assert (config.to_dict(), config._experts_implementation, config.attn_config._experts_implementation) == before
