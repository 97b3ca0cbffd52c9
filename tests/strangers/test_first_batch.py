"""Different batches on the ranks of one tensor-parallel group are refused at the first one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from tests.strangers.toy import HIDDEN, Net, batch
from tests.support.pool import processes

MESHES = [Mesh(2, tp=2), Mesh(4, tp=4), Mesh(4, tp=2)]


def messages(mesh: Mesh, call: Any) -> list[str]:
    def message() -> str:
        try:
            call()
        except ValueError as error:
            return str(error)
        return ""

    return comm.threads.run(mesh, message)


def model_with(ids_of: int, labels_of: int) -> None:
    """A loss of ids and labels of two parts of the data."""
    parts = comm.current().mesh.world_size
    ids, labels = batch(0, ids_of, parts)["ids"], batch(0, labels_of, parts)["labels"]
    Net()(ids, labels).backward()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_other_ids(mesh):
    """The data are divided over all ranks."""
    for message in messages(mesh, lambda: model_with(comm.current().rank, 0)):
        assert "have different input ids in the first batch: [" in message and "int64, [" in message
        assert "get_data_parallel_rank()" in message


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_other_labels(mesh):
    for message in messages(mesh, lambda: model_with(comm.rank("dp"), comm.current().rank)):
        assert "have different labels in the first batch" in message


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_same_batch_in_the_group(mesh):
    assert {*messages(mesh, lambda: model_with(comm.rank("dp"), comm.rank("dp")))} == {""}


def features(seed: int, noise: float = 0.0, shape: tuple[int, ...] = (8, HIDDEN), dtype: Any = torch.float32) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x += noise * torch.randn(shape, generator=torch.Generator().manual_seed(100 + comm.rank("tp"))) * x.abs()
    layers = nn.Sequential(
        nxd.ColumnParallelLinear(HIDDEN, 32, gather_output=False, dtype=dtype),
        nxd.RowParallelLinear(32, HIDDEN, input_is_parallel=True, dtype=dtype),
    )
    layers(x.to(dtype)).sum().backward()


SHAPES = [(1, HIDDEN), (8, HIDDEN), (4, 100, HIDDEN)]


@pytest.mark.parametrize("seed", range(0, 10, 2))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_features(shape, seed):
    for message in messages(Mesh(2, tp=2), lambda: features(seed + comm.rank("tp"), shape=shape)):
        assert "have different inputs of linear layers in the first batch" in message


def test_other_weights_before_a_linear_layer():
    """Ids are equal, and a norm between them and the layer was drawn with another seed."""

    def forward() -> None:
        embedded = nxd.ParallelEmbedding(8, HIDDEN)(torch.arange(8))
        scale = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(comm.rank("tp")))
        hidden = nxd.ColumnParallelLinear(HIDDEN, 32, gather_output=False)(embedded * scale)
        nxd.RowParallelLinear(32, HIDDEN, input_is_parallel=True)(hidden)

    for message in messages(Mesh(2, tp=2), forward):
        assert "have different inputs of linear layers" in message and "These ranks take the same batch" not in message
        assert "Their input ids are equal: seed torch equally before the model is made" in message


def test_other_shapes():
    for message in messages(Mesh(2, tp=2), lambda: features(0, shape=(8 + comm.rank("tp"), HIDDEN))):
        assert "[8, 16] of torch.float32" in message and "[9, 16] of torch.float32" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_is_no_difference(shape, dtype):
    assert messages(Mesh(2, tp=2), lambda: features(0, 2**-8, shape, dtype)) == ["", ""]


def test_only_the_first_batch_is_compared():
    def train() -> None:
        model = Net()
        model(**batch(0)).backward()
        model(**batch(1 + comm.rank("tp")))

    assert messages(Mesh(2, tp=2), train) == ["", ""]


def of_rank() -> str:
    try:
        Net()(**batch(0, comm.current().rank, 4))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.process
def test_on_processes():
    for message in processes(4).run(of_rank, mesh={"tp": 2}):
        assert "have different input ids" in message


def test_no_collective():
    def recorded() -> list[Any]:
        with comm.record() as calls:
            Net()(**batch(0))
        with comm.record() as later:
            Net()(**batch(1))
        return [[(call.verb, call.bytes) for call in found] for found in (calls, later)]

    for first, later in comm.threads.run(Mesh(2, tp=2), recorded):
        assert first == later


def of_first_rank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A bare dict of tensors on all ranks, as a file of the first rank is."""
    return {name: comm.broadcast(value, "tp", src=0) for name, value in state.items()}


def loaded_of_first_rank(by_torch: bool = False) -> list[str]:
    """Warnings of the first batches after another rank's state dict was loaded."""
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if by_torch:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, dict(model.state_dict()), options=options)
        else:
            model.load_state_dict(of_first_rank(model.state_dict()))
        for step in range(2):
            model(**batch(step))
    return [str(warning.message) for warning in caught if "tensor-parallel group" in str(warning.message)]


EQUAL = "ranks 0 and 1 are in one tensor-parallel group, and their shards of a weight have equal values"


@pytest.mark.process
@pytest.mark.parametrize("by_torch", [False, True], ids=["a bare dict", "broadcast_from_rank0"])
def test_shards_of_another_rank_are_noticed(by_torch):
    """Compares shards of the embedding and of the first linear layer."""
    first, second = processes(2).run(loaded_of_first_rank, by_torch, mesh={"tp": 2})
    assert [text.startswith(EQUAL) for text in first] == [True, True] and second == []


def test_equal_values_at_the_start_are_taken(recwarn):
    """Weights of zeros, or that were loaded from this rank's state dict."""

    def forward() -> None:
        model = Net()
        with torch.no_grad():
            model.up.weight.zero_()
        model.load_state_dict(dict(model.state_dict()))
        model(**batch(0))

    comm.threads.run(Mesh(2, tp=2), forward)
    assert not [warning for warning in recwarn if "equal values" in str(warning.message)]
