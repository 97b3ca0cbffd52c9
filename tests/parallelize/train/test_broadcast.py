"""`broadcast_weights`: from the ranks that have weights to those that do not."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize import parallelize
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.train.broadcast import broadcast_weights
from tests.parallelize.support import sent_weights
from tests.parallelize.support.training import Parent, close, original, parallel, whole


@pytest.mark.parametrize("stride", [None, 2])
def test_units_without_weights_get_those_of_the_first(stride):
    config = ComputeConfig(2, 4)
    with parallel(config, "parent") as make:

        def program():
            has_weights = comm.current().rank < 2
            module = make()
            if not has_weights:
                module.inner = type(module.inner)(init_params=False)
                with torch.no_grad():
                    for tensor in (*module.parameters(), *module.buffers()):
                        tensor.fill_(float("nan"))
            broadcast_weights(module, stride)
            return whole(module), dict(module.named_buffers())

        results = comm.threads.run(config.mesh(), program)
    expected = original("parent")
    for weights, buffers in results:
        close(weights, {name: param.detach() for name, param in expected.named_parameters()})
        close(buffers, dict(expected.named_buffers()))


def test_buffers_without_a_value_have_one_afterwards():
    def program():
        module = torch.nn.BatchNorm1d(3)
        module.register_buffer("table", torch.full((2,), float(comm.current().rank)), persistent=False)
        torch.nn.init.constant_(module.weight, comm.current().rank)
        broadcast_weights(module)
        return module.table.tolist(), module.weight.tolist()

    assert comm.threads.run(Mesh(3), program) == [([0.0, 0.0], [0.0, 0.0, 0.0])] * 3


@pytest.mark.parametrize(
    "stride, parts", [(3, ["stride_size=3", "4 ranks", "plan_ngpus [2]", "such as 2"]), (1, ["[2]"])]
)
def test_other_strides_are_refused(stride, parts):
    config = ComputeConfig(2, 4)
    with parallel(config) as make, pytest.raises(ValueError) as error:
        comm.threads.run(config.mesh(), lambda: broadcast_weights(make(), stride))
    assert all(part in str(error.value) for part in parts)


def test_modules_of_several_sizes_need_a_stride():
    with parallel(ComputeConfig(1, 2)) as one, parallel(ComputeConfig(2, 2)) as two:

        def program():
            module = Parent(two(), one())
            with pytest.raises(
                ValueError, match="parallel modules have different sizes, \\[1, 2\\] ranks: pass stride_size"
            ):
                broadcast_weights(module)
            broadcast_weights(module, 2)

        comm.threads.run(Mesh(2, tp=2), program)


@pytest.mark.filterwarnings("ignore:.*batch norm takes its statistics")
def test_buffers_without_a_value_are_not_sent(tmp_path):
    def program():
        config = ComputeConfig(1, 2)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        options = {"gen_savedir": tmp_path, "init_module_params": False}
        parallel_module = parallelize(module, {"input": torch.ones(8, 4)}, "dp", config, **options)
        with pytest.raises(
            RuntimeError, match="buffer '1.running_mean' of rank 0, which sends its weights, has no val"
        ):
            broadcast_weights(parallel_module)

    comm.threads.run(Mesh(2), program)
    sent_weights.a_sender_without_values()
    sent_weights.a_receiver_without_values()
