"""Damaged and mismatched checkpoints are refused on all ranks; those of torch.distributed.checkpoint are read."""

import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from neuronx_dist import comm
from neuronx_dist.checkpoint.dcp import writing
from neuronx_dist.checkpoint.errors import CheckpointError, CheckpointMismatch
from neuronx_dist.mesh import Mesh
from tests.checkpoint.llama_layouts import load, save, whole
from tests.checkpoint.test_catalog import Evil
from tests.checkpoint.test_state import DP2, ONE, TP2, Model, adamw, loaded, saved, zero1, zeroed


def on_all_ranks(mesh, error, function, *args):
    """The messages of the error that each rank raises."""

    def run():
        try:
            function(*args)
        except error as raised:
            return f"{type(raised).__name__}: {raised}"
        raise AssertionError("nothing was raised")

    return comm.threads.run(mesh, run)


class Wider(Model):
    """More and other parameters."""

    def __init__(self):
        super().__init__(width=4)
        self.added = nn.Parameter(torch.zeros(2))
        del self.one


@pytest.mark.parametrize("strict", [True, False])
def test_another_model_is_refused_with_names_and_shapes(strict, tmp_path):
    comm.threads.run(TP2, saved, adamw, tmp_path)
    models = {}

    def run():
        model = models[comm.rank("tp")] = zeroed(Wider())
        load(model, None, tmp_path, strict=strict)

    messages = on_all_ranks(TP2, CheckpointMismatch, run)
    for message in messages:
        assert "nothing was changed" in message
        assert "1 of other shapes: model.fused has shape (8, 3) in the checkpoint and (8, 4) in this model." in message
        assert ("1 missing in it: model.added." in message) == strict
        assert ("1 not in this model: model.one.weight." in message) == strict
    assert all(float(param.detach().abs().sum()) == 0 for model in models.values() for param in model.parameters())


def test_what_differs_on_one_stage_is_said_on_all(tmp_path):
    comm.threads.run(DP2, saved, adamw, tmp_path)

    def run():
        model = zeroed(Model())
        if comm.rank("dp") == 1:
            model.added = nn.Parameter(torch.zeros(2))
        load(model, None, tmp_path)

    assert all("1 missing in it: model.added" in message for message in on_all_ranks(DP2, CheckpointMismatch, run))


def test_long_lists_are_cut(tmp_path):
    comm.threads.run(ONE, save, nn.ParameterList(torch.zeros(1) for _ in range(30)), None, tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"30 not in this model: model\.0, model\.1.*\(22 more\)"):
        comm.threads.run(ONE, load, nn.Module(), None, tmp_path)


def test_not_strict_loads_what_both_have(tmp_path):
    comm.threads.run(DP2, saved, adamw, tmp_path)

    def run():
        model = zeroed(Model())
        model.added = nn.Parameter(torch.full((2,), 7.0))
        del model.one
        optimizer = zero1(model.parameters())
        load(model, optimizer, tmp_path, strict=False)
        return model

    for model in comm.threads.run(DP2, run):
        assert model.added.tolist() == [7.0, 7.0]
        assert torch.equal(model.fused.detach(), whole(tmp_path)["model.fused"])


def test_a_checkpoint_without_an_optimizer(tmp_path):
    comm.threads.run(ONE, save, nn.Linear(2, 2), None, tmp_path)

    def run(**options):
        model = nn.Linear(2, 2)
        load(model, adamw(model.parameters()), tmp_path, **options)

    with pytest.raises(CheckpointMismatch, match="1 missing in it: optimizer.param_groups"):
        comm.threads.run(ONE, run)
    comm.threads.run(ONE, lambda: run(strict=False))


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_missing_and_truncated_files_are_said_on_all_ranks(name, tmp_path):
    comm.threads.run(TP2, saved, adamw, tmp_path)
    file = tmp_path / "tag" / name
    content = file.read_bytes()
    file.write_bytes(content[:-7])
    messages = on_all_ranks(TP2, CheckpointError, loaded, adamw, tmp_path)
    assert all(f"tag/{name} is truncated" in message for message in messages)
    file.unlink()
    assert all(f"tag/{name} is missing" in m for m in on_all_ranks(TP2, CheckpointError, loaded, adamw, tmp_path))


def test_a_flipped_bit_of_a_tensor_is_said_on_all_ranks(tmp_path):
    comm.threads.run(TP2, saved, adamw, tmp_path)
    file = tmp_path / "tag" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    generator = random.Random(0)
    for tensor in generator.sample(range(400, len(content) - 400), 5):
        content[tensor] ^= 1
        file.write_bytes(content)
        assert "damaged" in on_all_ranks(TP2, CheckpointError, loaded, adamw, tmp_path)[0]
        content[tensor] ^= 1


def test_objects_are_read_without_running_code(tmp_path, monkeypatch):
    """An object that is a pickle of code, with checksums that fit."""
    target = tmp_path / "it_ran"

    def malicious(path, value):
        return pickle.dumps(Evil(target))

    monkeypatch.setattr(writing, "packed", malicious)
    comm.threads.run(ONE, saved, adamw, tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is a plain pickle, .*; nothing was executed"):
        comm.threads.run(ONE, loaded, adamw, tmp_path)
    assert not target.exists()


def test_no_plain_data_is_refused():
    class Scheduled(torch.optim.SGD):
        pass

    def run():
        model = nn.Linear(2, 2)
        optimizer = Scheduled(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["hook"] = random.Random(0)
        save(model, optimizer, None)

    with pytest.raises(
        ValueError, match=r"^optimizer.param_groups\[0\]\['hook'\] holds a Random that cannot be read back"
    ):
        comm.threads.run(ONE, run)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_of_torch_distributed_checkpoint_are_read(tmp_path):
    source = comm.threads.run(ONE, Model)[0]
    weights = source.state_dict()
    weights["padded"] = weights["padded"][:, :5]
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "tag", no_dist=True)

    def run():
        model = zeroed(Model())
        load(model, None, tmp_path)
        return model

    for rank, model in enumerate(comm.threads.run(TP2, run)):
        expected = weights["fused"].view(2, 2, 2, 3)[:, rank].reshape(4, 3)
        assert torch.equal(model.fused.detach(), expected)
        assert torch.equal(model.padded.detach(), source.padded.detach()[:, rank * 3 : rank * 3 + 3])


def test_ranks_share_the_writing(tmp_path):
    def run():
        model = nn.ParameterList(torch.ones(64, 64) for _ in range(8))
        save(model, None, tmp_path)

    comm.threads.run(Mesh(4), run)
    sizes = [(tmp_path / "tag" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) == min(sizes) and 2 * 64 * 64 * 4 < sizes[0] < 2 * 64 * 64 * 4 + 2000


def test_large_pieces_are_cut_and_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_MAX_PIECE", 4096)

    def run():
        model = nn.ParameterList([torch.arange(4096.0).view(64, 64)])
        save(model, None, tmp_path)
        with torch.no_grad():
            model[0].zero_()
        load(model, None, tmp_path)
        return model[0].detach()

    for read in comm.threads.run(DP2, run):
        assert torch.equal(read, torch.arange(4096.0).view(64, 64))
    sizes = [(tmp_path / "tag" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert min(sizes) > 2 * 4096


def test_ranks_that_describe_a_tensor_differently_are_refused():
    def run():
        save(nn.ParameterList([torch.zeros(2 + comm.rank("dp"))]), None, None)

    with pytest.raises(ValueError, match=r"model.0 has shape \(3,\) and dtype torch.float32 on rank 1, but \(2,\)"):
        comm.threads.run(DP2, run)


def test_staged_memory_is_written_and_used_again(tmp_path):
    from neuronx_dist.checkpoint.run_state import collect
    from tests.checkpoint.llama_layouts import Folder

    def run():
        model = Model()
        plan = writing.plan(collect(model))
        staged = plan.stage().buffer
        expected = {name: param.detach().clone() for name, param in model.named_parameters()}
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        writing.write(plan, Folder(tmp_path), "tag")
        assert writing.plan(collect(model)).stage(staged).buffer.data_ptr() == staged.data_ptr()
        comm.barrier()
        load(model, None, tmp_path)
        assert all(torch.equal(param.detach(), expected[name]) for name, param in model.named_parameters())

    comm.threads.run(TP2, run)
