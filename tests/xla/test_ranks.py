"""Starts of ranks: threads of `torch_xla.launch`, and processes with torch_xla's process group.

Processes with an XLA device each are on Neuron and TPU hosts only. Here one process takes itself for each of them in
turn, over the real class of the group, and its programs are lowered, not executed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import xla
from neuronx_dist.comm.errors import CommError
from neuronx_dist.mesh import Mesh
from tests.support.paths import ROOT
from tests.xla.one_device import on_device
from tests.xla.programs import ranks as programs

THREADS = """
import json, threading
import torch, torch.distributed as dist, torch_xla
import neuronx_dist as nxd
from neuronx_dist import ColumnParallelLinear, RowParallelLinear, comm, parallel_state

def rank_main(index):
    device = nxd.init_distributed("xla")
    nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = parallel_state.get_rank()
    column = ColumnParallelLinear(8, 16, gather_output=False, device="meta")
    row = RowParallelLinear(16, 8, input_is_parallel=True, device="meta")
    model = nxd.materialize(torch.nn.Sequential(column, row), 0, device=device)
    seen = []
    x = torch.ones(4, 8).to(device).requires_grad_()
    y = model(x)
    y.register_hook(lambda grad: seen.append((comm.current().rank, threading.get_ident())))
    y.square().mean().backward()
    text = torch_xla._XLAC._get_xla_tensors_hlo([x.grad, column.weight.grad, row.weight.grad])
    found = dict(
        text=text, tp=comm.rank("tp"), dp=parallel_state.get_data_parallel_rank(), in_backward=seen[0][0],
        another_thread=seen[0][1] != threading.get_ident(),
        group=list(parallel_state.get_tensor_model_parallel_group().ranks),
        lists=parallel_state.get_tensor_model_parallel_group(as_list=True), torch_distributed=dist.is_initialized(),
    )
    with open(f"rank-{rank}.json", "w") as file:
        json.dump(found, file)
    nxd.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()

if __name__ == "__main__":
    torch_xla.launch(rank_main)
"""


def test_ranks_as_threads_have_one_program(tmp_path):
    (tmp_path / "job.py").write_text(THREADS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = {rank: json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)}
    assert "replica_groups={{0,1},{2,3}}" in ranks[0]["text"]
    for rank, found in ranks.items():
        assert found["text"] == ranks[0]["text"]
        assert (found["dp"], found["tp"]) == divmod(rank, 2)
        assert found["in_backward"] == rank and found["another_thread"]
        assert found["group"] == [rank // 2 * 2, rank // 2 * 2 + 1] and found["lists"] == [[0, 1], [2, 3]]
        assert not found["torch_distributed"]


@pytest.fixture(scope="module")
def processes():
    return [on_device(programs.groups, 4, rank) for rank in range(4)]


def test_getters_give_process_groups_with_all_replica_groups(processes):
    for rank, found in enumerate(processes):
        dp, tp = divmod(rank, 2)
        assert found["classes"] == {"ProcessGroupXla"} and found["device"] == "xla"
        assert found["meshes"] == ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2], [1, 3]])
        assert found["sizes"] == (2, 2, 2, dp)  # of tp and dp, of tp for torch.distributed; this rank in dp
        assert found["again"] and found["pipeline"] == [[0], [1], [2], [3]]
        assert found["lists"] == [[0, 2], [1, 3]]  # as_list=True


def test_a_process_group_is_an_axis(processes):
    for rank, found in enumerate(processes):
        dp, tp = divmod(rank, 2)
        assert found["axes"] == ("tp", "dp", "group")
        assert found["ranks"] == ((2 * dp, 2 * dp + 1), (tp, tp + 2), dp)
        assert found["whole"] == [[0, 1, 2, 3]]  # the default group names no groups: it is all ranks


def test_layers_over_a_process_group_have_one_program(processes):
    first = processes[0]
    for found in processes:
        assert found["layers"] == first["layers"] and found["all_reduce"] == first["all_reduce"]
    for text in (*first["layers"].values(), first["all_reduce"]):
        assert "replica_groups={{0,2},{1,3}}" in text


def test_groups_and_worlds_that_cannot_be_are_refused():
    found = on_device(programs.refused, 4, 1)
    assert (
        "xla_pg_options" in found["own ranks only"]
        and "the group of this rank, [0, 1], of 4 ranks" in found["own ranks only"]
    )
    assert "xla_pg_options" in found["not a member"] and "got -100" in found["not a member"]
    assert "xla_pg_options" in found["not of XLA"]
    assert "torchrun started 4 processes (WORLD_SIZE), torch_xla sees a world of 1" in found["alone"]


def test_a_process_alone_joins_by_the_rendezvous_of_torch_xla():
    found = on_device(programs.world_of_one)
    assert found == {"dist": ("xla", 1, 0), "group": ("ProcessGroupXla", [[0]]), "out": True}


def test_groups_of_two_sizes_are_refused():
    with pytest.raises(CommError, match=r"sizes \[2, 3\]"):
        xla.XlaBackend().communicator("odd", [[0, 1, 2], [3, 4]], 0)


def runtime(monkeypatch, size: int, rank: int, dist_size: int | None) -> None:
    import torch.distributed as dist
    import torch_xla.runtime as xr

    monkeypatch.setattr(xr, "world_size", lambda: size)
    monkeypatch.setattr(xr, "global_ordinal", lambda: rank)
    monkeypatch.setattr(dist, "is_initialized", lambda: dist_size is not None)
    monkeypatch.setattr(dist, "get_world_size", lambda: dist_size)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)


def test_worlds_of_different_sizes_are_refused(monkeypatch):
    runtime(monkeypatch, 32, 5, 32)
    assert xla.world() == (32, 5)
    runtime(monkeypatch, 1, 0, 32)
    with pytest.raises(CommError, match="rank 0 of 32, torch_xla rank 0 of 1"):
        xla.world()


def test_objects_are_gathered_by_a_rendezvous(monkeypatch):
    import pickle

    import torch_xla.core.xla_model as xm

    asked = []

    def rendezvous(tag: str, payload: bytes) -> list[bytes]:
        asked.append((tag, pickle.loads(payload)))
        return [pickle.dumps(("gather_objects", f"of rank {rank}")) for rank in range(4)]

    monkeypatch.setattr(xm, "rendezvous", rendezvous)
    group = xla.XlaBackend().communicator("dp", [[0, 2], [1, 3]], 1)
    assert comm.gather_objects("mine", group) == ["of rank 1", "of rank 3"]
    assert asked == [("nxd.dp", ("gather_objects", "mine"))]


def test_ranks_that_torch_distributed_knows_have_a_board(monkeypatch):
    import torch.distributed as dist

    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(xla, "check_launched", lambda size: None)
    monkeypatch.setattr(xla, "ranks_are_threads", lambda: False)
    for dist_size, known in ((2, True), (None, False)):
        runtime(monkeypatch, 2, 1, dist_size)
        xla.connect(Mesh(2, pp=2))
        try:
            assert (comm.current().backend.board is not None) == known
        finally:
            comm.context.set_default(None)
    assert xla.XlaBackend().board is None  # of a replay


def test_messages_between_two_ranks_are_refused_with_what_to_use():
    group = xla.XlaBackend().communicator("pp", [[0, 1]], 0)
    with pytest.raises(CommError, match="use comm.permute"):
        comm.send(torch.zeros(2), group, dst=1)
    with pytest.raises(CommError, match="not on an XLA device"):
        comm.all_reduce(torch.zeros(2), group)


def test_the_module_is_found_without_torch_xla():
    """A machine without it imports the package; nothing is loaded before a device is asked for."""
    code = "import sys, neuronx_dist.comm.backends.xla as x; print('torch_xla' in sys.modules, x.in_use())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == ["False", "False"]
