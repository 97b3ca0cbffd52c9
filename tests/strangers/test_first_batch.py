"""Different batches on the ranks of one tensor-parallel group are refused at the first one."""

from __future__ import annotations

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
        return [[(call.verb, call.bytes) for call in each] for each in (calls, later)]

    for first, later in comm.threads.run(Mesh(2, tp=2), recorded):
        assert first == later
