"""Models of which this rank holds a part, and the defaults for an ordinary module."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.weights.partial_model import is_partial, parameter_slots, partial_model
from tests.support.pipeline_models import Block, Model


def test_of_an_ordinary_module_everything_is_local():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    part = partial_model(model)
    assert not is_partial(model) and part.original_module is model and part.partitioned and part.tied_weights_synced
    assert list(part.local_named_parameters()) == list(model.named_parameters())
    assert part.is_local("0.weight") and part.tied_groups() == []
    assert [slot.name for slot in parameter_slots(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_pipeline_model_is_partial_by_what_it_answers():
    """`isinstance` of a protocol looks without `__getattr__` since Python 3.12, and misses submodules."""

    def rank_main():
        model = nxd.NxDPPModel(Model(), transformer_layer_cls=Block, num_microbatches=1, auto_partition=True,
                               output_loss_value_spec=True)  # fmt: skip
        with pytest.raises(AttributeError):
            inspect.getattr_static(model, "original_module")
        assert is_partial(model) and partial_model(model) is model
        names = [slot.name for slot in parameter_slots(model)]
        assert names and set(names) < {name for name, _ in model.original_module.named_parameters()}
        return names

    first, second = comm.threads.run(nxd.Mesh(2, pp=2), rank_main)
    assert not set(first) & set(second)


def test_half_a_partial_model_is_refused():
    class Half(nn.Module):
        def tied_groups(self):
            return []

    with pytest.raises(TypeError, match="Half has tied_groups, but lacks original_module, partitioned"):
        partial_model(Half())
    with comm.as_rank(nxd.Mesh(1), 0), pytest.raises(TypeError, match="lacks original_module"):
        nxd.reduce_gradients(Half())


def test_a_one_shot_iterator_of_parameters_is_reduced_too():
    def rank_main():
        model = nn.Linear(2, 1, bias=False)
        model.weight.grad = torch.full((1, 2), float(comm.rank("dp")))
        nxd.reduce_gradients(model.parameters())
        return model.weight.grad.tolist()

    assert comm.threads.run(nxd.Mesh(2), rank_main) == [[[0.5, 0.5]]] * 2
