"""One GPU beside the CPU: ranks as threads on one device, NCCL with a world of one, gloo between two processes.

float64 and float32 on the GPU are held to 1e-10 and 1e-5 of one process, on the same GPU where transformers computes in
float32 whatever the model's dtype is. The error of bfloat16 is held to a multiple of the error that plain transformers
has in bfloat16 on the same device.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm, hf, spmd
from neuronx_dist.parallelize import ComputeConfig
from neuronx_dist.shard_tensor import DeviceMesh, Shard, distribute_tensor
from tests.checkpoint.small_run import Run
from tests.parallelize.support.models import model as module_and_arguments
from tests.parallelize.support.parity import assert_equal, trained, trained_parallel
from tests.support import forked
from tests.support.llama_training import (
    Case,
    batch,
    build,
    config,
    initial_state,
    inputs,
    mean_loss,
    reference,
    train,
    worst_difference,
)
from tests.support.pipeline_training import CHUNKS

pytestmark = pytest.mark.slow

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
CLIP = 0.3

CASES = [
    Case(),
    Case(tp=2, clip=CLIP),
    Case(tp=2, sequence_parallel=True, heads="padded"),
    Case(tp=4, sequence_parallel=True, tied=True, heads="replicated"),
    Case(tp=2, dp=2, sequence_parallel=True, optimizer="zero1", microbatches=2, clip=CLIP),
    Case(dp=4, optimizer="zero1", labels="empty"),
    Case(tp=2, pp=2, dp=2, sequence_parallel=True, optimizer="zero1", microbatches=4, checkpointed=True),
    *(Case(pp=2, microbatches=4, tied=True, schedule=schedule, evaluate=True) for schedule in CHUNKS),
    *(Case(tp=2, pp=2, sequence_parallel=True, microbatches=4, schedule=schedule) for schedule in ("zb_h1", "zb_v")),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_one_process(case: Case, dtype: torch.dtype, device: str) -> None:
    case = replace(case, device=device, dtype=dtype)
    worst, what = worst_difference(case, comm.threads.run(case.mesh, train, case))
    assert worst < TOLERANCE[dtype], f"{what} differs by {worst:.2e}"


def _loss(case: Case) -> float:
    state = initial_state(case.heads, case.tied, case.options.layers, torch.float64)
    model = build(case)
    hf.load_pretrained(model, state, device=case.device)
    return float(model.run_train(**inputs(case, 0)))


@pytest.mark.parametrize("case", [Case(tp=2, sequence_parallel=True), Case(pp=2, microbatches=2)], ids=str)
def test_bfloat16_is_as_exact_as_plain_transformers(case: Case, device: str) -> None:
    case = replace(case, device=device, dtype=torch.bfloat16)
    exact = reference(replace(case.options, dtype=torch.float64), "sgd").losses[0]
    plain = LlamaForCausalLM(config(case.options))
    plain.load_state_dict(initial_state(case.heads, case.tied, case.options.layers, torch.float64))
    ids, labels = (x.to(device) for x in batch(case.labels, 0))
    plain.to(device, torch.bfloat16)
    with torch.no_grad():
        of_plain = float(mean_loss(plain(input_ids=ids).logits, labels))
    rounding = 2.0**-8 * abs(exact)  # of the result alone
    losses = comm.threads.run(case.mesh, _loss, case)
    assert max(abs(loss - exact) for loss in losses) <= 4 * abs(of_plain - exact) + rounding


def test_cross_entropy(device: str) -> None:
    logits = torch.randn(6, 40, dtype=torch.float64)
    targets = torch.tensor([0, 39, 17, 20, -100, 19])
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction="none")
    expected.sum().backward()

    def rank() -> tuple[torch.Tensor, torch.Tensor]:
        shard = logits.chunk(2, -1)[comm.rank("tp")].to(device).requires_grad_()
        loss = nxd.parallel_cross_entropy(shard, targets.to(device), ignore_index=-100)
        loss.sum().backward()
        assert shard.grad is not None
        return loss.detach().cpu(), shard.grad.cpu()

    assert whole.grad is not None
    for index, (loss, grad) in enumerate(comm.threads.run(Mesh(2, tp=2), rank)):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grad, whole.grad.chunk(2, -1)[index], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("overlap", [False, True])
def test_zero1_with_overlap_has_the_same_bits(overlap: bool, device: str) -> None:
    def rank() -> list[torch.Tensor]:
        with torch.device(device):
            run = Run(overlap=overlap)
        run.train(3)
        return [x.cpu() for x in run.values()]

    def plain() -> list[torch.Tensor]:
        with torch.device(device):
            run = Run()
        run.train(3)
        return [x.cpu() for x in run.values()]

    mesh = Mesh(4, tp=2)
    for has, wanted in zip(comm.threads.run(mesh, rank), comm.threads.run(mesh, plain)):
        assert all(map(torch.equal, has, wanted))


@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_is_loaded_to_the_bit(async_save: bool, device: str, tmp_path: Path) -> None:
    """The copy of an asynchronous save goes through pinned memory on a stream of its own."""

    def rank() -> None:
        nxd.model_parallel_manual_seed(0)
        with torch.device(device):
            run, other = Run(dropout=0.1), Run(dropout=0.1, seed=7)
        run.train(2)
        saved = [x.clone() for x in run.values()]
        run.save(tmp_path, "two", async_save=async_save)
        run.train(1)
        nxd.finalize_checkpoint()
        other.load(tmp_path, "two")
        assert other.step == 2 and all(map(torch.equal, other.values(), saved))
        other.train(1)
        assert all(map(torch.equal, other.values(), run.values()))

    comm.threads.run(Mesh(1), rank)


@pytest.mark.parametrize("sizes", [None, [(9, 7)]], ids=["even", "uneven"])
def test_a_convolution_of_shards(sizes: Any, device: str) -> None:
    """Rows of an image on two ranks, with their halo."""
    image, weight = torch.randn(1, 3, 16, 8, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    x = image.clone().requires_grad_()
    expected = F.conv2d(x, weight, padding=1)
    expected.square().sum().backward()

    def rank() -> tuple[torch.Tensor, torch.Tensor]:
        mesh = DeviceMesh(device, list(range(2)))
        shard = distribute_tensor(image.to(device), mesh, [Shard(2)])
        shard = shard.redistribute(sizes=sizes) if sizes else shard
        shard = shard.detach().requires_grad_()
        y = F.conv2d(shard, weight.to(device), padding=1)
        y.square().sum().backward()
        return y.full_tensor().detach().cpu(), shard.grad.full_tensor().cpu()

    assert x.grad is not None
    for y, grad in comm.threads.run(Mesh(2), rank):
        torch.testing.assert_close(y, expected.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grad, x.grad, rtol=1e-10, atol=1e-10)


def test_parallelize(device: str, tmp_path: Path) -> None:
    module, arguments = module_and_arguments("gpt")
    optimizer = partial(torch.optim.SGD, lr=0.1)
    wanted = trained(module, arguments, optimizer, 2, 1)
    moved = {name: x.to(device) for name, x in arguments.items()}
    has = trained_parallel(copy.deepcopy(module).to(device), moved, optimizer, 2, ComputeConfig(2, 2), "tp", tmp_path)
    on_cpu = has._replace(
        gradients={name: None if x is None else x.cpu() for name, x in has.gradients.items()},
        weights={name: x.cpu() for name, x in has.weights.items()},
    )
    assert_equal(on_cpu, wanted, 1e-9)


class Doubled(nn.Module):
    """A row-parallel layer after a column-parallel one; if `wrong`, the result is summed a second time."""

    def __init__(self, wrong: bool, device: str) -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(4, 8, gather_output=False, device=torch.device(device))
        self.down = nxd.RowParallelLinear(8, 4, input_is_parallel=True, device=torch.device(device))
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x))
        return (spmd.all_reduce(y, "tp", src=spmd.P, dst=spmd.I) if self.wrong else y).sum()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_on_the_device_is_checked(wrong: bool, device: str) -> None:
    report = spmd.check(lambda: Doubled(wrong, device), {"x": torch.zeros(2, 4, device=device)}, Mesh(2, tp=2))
    assert report.ok is not wrong and (not wrong or "all_reduce" in str(report))


def test_random_numbers_of_the_device_are_those_of_the_seed(device: str) -> None:
    """Dropout in the tensor-parallel stream differs between tp ranks, outside of it is equal on them."""

    def rank() -> tuple[torch.Tensor, torch.Tensor]:
        nxd.model_parallel_manual_seed(3)
        ones = torch.ones(64, device=device)
        with spmd.random.streams().fork():
            inside = F.dropout(ones, 0.5)
        return inside.cpu(), F.dropout(ones, 0.5).cpu()

    one, again = (comm.threads.run(Mesh(1), rank)[0] for _ in range(2))
    assert all(map(torch.equal, one, again)) and not torch.equal(one[0], one[1])


JOB = """
import sys, torch, torch.distributed as dist
import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.launch import end_step
device, backend = sys.argv[1:]
if backend == "default":
    place = nxd.init_distributed(device)
else:
    dist.init_process_group(backend)
    place = torch.device(device)
nxd.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
torch.manual_seed(0)
whole = torch.randn(8, 6, dtype=torch.float64)
x = torch.randn(3, 6, dtype=torch.float64)
layer = nxd.ColumnParallelLinear(6, 8, bias=False, gather_output=True, dtype=torch.float64, device=place)
with torch.no_grad():
    layer.weight.copy_(whole.chunk(comm.size("tp"))[comm.rank("tp")])
y = layer(x.to(place))
assert y.device.type == place.type
assert torch.allclose(y.cpu(), x @ whole.t(), rtol=1e-10, atol=1e-10)
y.sum().backward()
print("right on", comm.size("tp"))
"""


def test_a_world_of_one_on_the_default_backend(device: str) -> None:
    """NCCL, on CUDA."""
    result = forked.run(["-c", JOB, device, "default"])
    assert result.codes == [0] and result.outputs == ["right on 1\n"], result.errors


def test_two_processes_share_a_device_by_gloo(device: str) -> None:
    result = forked.run(["-c", JOB, device, "gloo"], ranks=2)
    assert result.codes == [0, 0] and result.outputs == ["right on 2\n"] * 2, result.errors


def test_every_case_of_a_schedule_is_there() -> None:
    """The tier says which schedules it runs; a new one is to be added."""
    schedules = {case.schedule for case in CASES} - {None}
    assert schedules == set(CHUNKS)
    assert {(case.tp > 1, case.pp > 1, case.dp > 1) for case in CASES} >= set(
        itertools.chain([(True, False, False), (False, True, False), (False, False, True), (True, True, True)])
    )
