"""Checkpoints, ShardTensor and `parallelize` on imitated devices: the programs of their tests, which compare values."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn import functional as F

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.attention import Keys, attention
from neuronx_dist.hf import full_state_dict, swap
from tests.checkpoint.llama_layouts import Layout as LlamaLayout
from tests.checkpoint.llama_layouts import make, steps
from tests.checkpoint.test_resume import Layout, relative, resume, train_and_save
from tests.hf.models import VOCAB, llama_config, reference_model
from tests.hf.parity import AllInFloat64
from tests.hf.trainer_runs import on_ranks, train
from tests.modules import test_moe
from tests.optimizer import test_muon_llama
from tests.parallelize.support.models import model
from tests.parallelize.support.parity import trained
from tests.parallelize.test_processes import SGD, train_on_rank
from tests.shard_tensor import test_awaited, test_processes
from tests.shard_tensor.moves.test_exchange import halo_on_processes
from tests.shard_tensor.test_checkpoint import lay, whole
from tests.support.pool import processes
from tests.support.synthetic import relative_error
from tests.trainer import test_accelerator

pytestmark = pytest.mark.slow

LAYOUTS = ["uneven", "replicated", "grid"]  # torch's DTensor calls groups in C++, where one in Python has no methods


@pytest.mark.parametrize("backend", ["neuron", "tpu_dist"])
def test_checkpoints_of_other_layouts(backend: str, tmp_path: Path) -> None:
    saved, loaded = Layout(dp=2), Layout(pp=2, microbatches=2)
    losses = processes(2).run(train_and_save, saved, tmp_path, mesh={}, backend=backend)
    assert processes(2).run(resume, saved, tmp_path, mesh={}, backend=backend) == losses
    for resumed in processes(2).run(resume, loaded, tmp_path, mesh=dict(pp=2), backend=backend):
        assert relative(resumed, losses[0]) < 1e-6


@pytest.mark.parametrize("backend", ["neuron", "neuron_single", "tpu_dist"])
def test_shard_tensor_halo_and_moves(backend: str) -> None:
    processes(2).run(halo_on_processes, mesh=dict(tp=2), backend=backend)
    processes(2).run(test_awaited.on_processes, mesh={}, backend=backend)


@pytest.mark.parametrize("backend", ["neuron", "tpu_dist"])
def test_shard_tensor_operators_and_ring(backend: str) -> None:
    test_processes.check_sample(*processes(2).run(test_processes.sample, mesh={}, backend=backend))


def save_shards(folder: str, world: int) -> None:
    dcp.save({name: lay(whole(), name, world) for name in LAYOUTS}, checkpoint_id=folder)


def load_shards(folder: str, world: int) -> None:
    """Loads each tensor in the layout after the one in which it was saved."""
    state = {name: lay(torch.zeros(7, 6), other, world) for name, other in zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1])}
    dcp.load(state, checkpoint_id=folder)
    for name, x in state.items():
        assert torch.equal(x.full_tensor(), whole()), name


def test_shard_tensor_checkpoints(tmp_path: Path) -> None:
    processes(4).run(save_shards, str(tmp_path), 4, mesh={}, backend="neuron")
    processes(2).run(load_shards, str(tmp_path), 2, mesh={}, backend="neuron_single")


@pytest.mark.parametrize("backend", ["neuron", "tpu_dist"])
def test_parallelize(backend: str, tmp_path: Path) -> None:
    module, arguments = model("gpt")
    wanted = trained(module, arguments, SGD, 3, 2).weights
    for weights in processes(4).run(train_on_rank, str(tmp_path), mesh={"tp": 2}, backend=backend):
        for name, x in weights.items():
            torch.testing.assert_close(x, wanted[name], rtol=1e-9, atol=1e-9)


def ring_attention() -> None:
    """Causal attention with keys on both ranks of cp, and its gradients, against all of it on one rank."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 10, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    sizes, rank = (6, 4), comm.rank("cp")
    runs = tuple(((begin, end),) for begin, end in ((0, 6), (6, 10)))
    local = [x.split(sizes, 2)[rank].clone().requires_grad_() for x in (q, k, v)]
    keys = Keys(sizes, queries=runs[rank], positions=runs)
    out = attention(*local, keys, "cp", scale=0.5)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected.split(sizes, 2)[rank], rtol=1e-10, atol=1e-10)
    for x, y in zip(local, whole):
        torch.testing.assert_close(x.grad, y.grad.split(sizes, 2)[rank], rtol=1e-10, atol=1e-10)


def swapped_llama(method: str) -> None:
    """Loss and gradients of a swapped Llama over all ranks of cp, in zig-zag order, against one process."""
    model = reference_model(llama_config(layers=1))
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    with AllInFloat64():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    local = swap(copy.deepcopy(model), context_parallel=method)
    local.zero_grad()
    part = nxd.get_batch_on_this_context_parallel_rank({"input_ids": ids, "labels": ids}, "zigzag")
    items = nxd.global_num_items(part["labels"], dtype=torch.float64)
    with AllInFloat64():
        share = local(**part, num_items_in_batch=items).loss
        share.backward()
    nxd.reduce_gradients(local)
    mean = comm.all_reduce(share.detach(), "cp") / comm.size("cp")
    torch.testing.assert_close(mean, loss.detach(), rtol=1e-10, atol=0)
    for (name, param), of_rank in zip(model.named_parameters(), local.parameters()):
        torch.testing.assert_close(of_rank.grad, param.grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("backend", ["neuron", "neuron_single", "tpu_dist"])
def test_context_parallel_attention(backend: str) -> None:
    processes(2).run(ring_attention, mesh={"cp": 2}, backend=backend)
    processes(2).run(swapped_llama, "ring", mesh={"cp": 2}, backend=backend)
    processes(2).run(swapped_llama, "ulysses", mesh={"cp": 2}, backend=backend)
    processes(4).run(swapped_llama, "ring+ulysses", mesh={"cp": 4}, backend=backend)


@pytest.mark.parametrize("backend, tp", [("neuron", 2), ("neuron_single", 1), ("tpu_dist", 1)])
def test_experts(backend: str, tp: int) -> None:
    """Uneven exchanges of rows are padded where a device has none."""
    results = test_moe.in_one_process(2, shared=True)
    ranks = processes(2 * tp)
    ranks.run(partial(test_moe.compare_on_rank, *results, shared=True), mesh={"tp": tp, "ep": 2}, backend=backend)


def test_transformers_trainer(tmp_path: Path) -> None:
    """Trains, saves and predicts without the calls that transformers and accelerate make themselves."""
    expected = train(tmp_path / "one_process", False)
    run = dict(tp=2, save_strategy="steps", save_steps=2, backend="tpu_dist")
    found = on_ranks(2, train, tmp_path, True, **run)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-10) and found["flos"] == expected["flos"]
    for name, weight in expected["weights"].items():
        assert relative_error(found["weights"][name], weight) < 1e-10, name


def test_lightning(tmp_path: Path) -> None:
    """Metrics of torchmetrics too, in a pipeline whose stages have no messages."""
    any_module = pytest.importorskip("tests.lightning.any_module")
    expected = any_module.fit(str(tmp_path / "one_process"), max_steps=2)
    fit = partial(any_module.fit, max_steps=2)
    for found in processes(2).run(fit, str(tmp_path / "ranks"), {"pp": 2}, mesh={"pp": 2}, backend="neuron"):
        for what in ("losses", "validated", "tested"):
            assert found[what] == pytest.approx(expected[what], rel=1e-10)


def test_accelerate(tmp_path: Path) -> None:
    (expected,) = processes(1).run(test_accelerator.variants, str(tmp_path / "one_process"), False)
    run = partial(processes(2).run, test_accelerator.variants_launched, str(tmp_path / "ranks"), initialize=False)
    for found in run(backend="tpu_dist"):
        for ours, alone in zip(found[:2], expected):  # the third in bf16
            assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-10)


def llama_by_muon(layout: LlamaLayout) -> dict[str, torch.Tensor]:
    """Weights after steps of Muon and AdamW, with the fused loss, layers recomputed and their inputs on the host."""
    llama, _ = make(layout)
    nxd.recompute(llama, "full", offload=True)
    steps(layout, llama, test_muon_llama.optimizer_of(layout, llama), 0, test_muon_llama.LAST)
    return full_state_dict(llama)


@pytest.mark.parametrize(
    "backend, degrees", [("neuron", dict(tp=2)), ("neuron_single", dict(dp=2)), ("tpu_dist", dict(tp=2))]
)
def test_fused_loss_muon_and_recomputation(backend: str, degrees: dict[str, int]) -> None:
    """Uneven exchanges of rows go to owners of matrices by padded all-to-alls."""
    layout = LlamaLayout(**degrees)
    expected = test_muon_llama.one_process(layout)
    mesh = dict(tp=layout.tp)
    for weights in processes(2).run(llama_by_muon, layout, mesh=mesh, backend=backend):
        for name, value in expected.items():
            assert relative_error(weights[name], value) < 1e-10, name
