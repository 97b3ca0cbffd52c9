"""A run that is saved, and goes on in the same layout or another one."""

import pytest
import torch

from neuronx_dist import comm
from tests.checkpoint.llama_layouts import Layout, load_each, resume, train_and_save, whole
from tests.support.pool import processes

BF16 = dict(dtype=torch.bfloat16)


def relative(losses, expected):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, dp=2),
        pytest.param(Layout(dp=2, dtype=torch.float32, clip=0.5), marks=pytest.mark.full),
        Layout(dp=2, **BF16),
        pytest.param(Layout(pp=2, microbatches=2, optimizer="master", **BF16), marks=pytest.mark.full),
        Layout(pp=2, tp=2, microbatches=2, schedule="zb_v", sequence_parallel=True, optimizer="plain"),
    ],
    ids=str,
)
def test_the_same_layout_goes_on_bit_equal(layout, tmp_path):
    losses = comm.threads.run(layout.mesh, train_and_save, layout, tmp_path)
    assert losses[0][0] != losses[0][1]
    assert comm.threads.run(layout.mesh, resume, layout, tmp_path) == losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved, loaded",
    [
        (Layout(tp=2, dp=2), Layout(pp=2, microbatches=2)),
        (Layout(pp=2, dp=2, microbatches=2), Layout(tp=4, sequence_parallel=True, optimizer="plain")),
        pytest.param(Layout(optimizer="plain"), Layout(tp=2, dp=2), marks=pytest.mark.full),
        pytest.param(Layout(dp=4, dtype=torch.float32), Layout(tp=2, dtype=torch.float32), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_another_layout_goes_on_with_losses_equal_to_1e_6(saved, loaded, tmp_path):
    losses = comm.threads.run(saved.mesh, train_and_save, saved, tmp_path)[0]
    for resumed in comm.threads.run(loaded.mesh, resume, loaded, tmp_path):
        assert relative(resumed, losses) < 1e-6


@pytest.mark.slow
def test_processes_save_and_load(tmp_path):
    """Data parallel with ZeRO-1, then in two stages; larger layouts are those of threads, above."""
    saved, loaded = Layout(dp=2), Layout(pp=2, microbatches=2)
    losses = processes(2).run(train_and_save, saved, tmp_path, mesh={})
    assert processes(2).run(resume, saved, tmp_path, mesh={}) == losses
    for resumed in processes(2).run(resume, loaded, tmp_path, mesh=dict(pp=2)):
        assert relative(resumed, losses[0]) < 1e-6


@pytest.mark.slow
def test_masters_are_saved_in_fp32_and_loaded_into_any_sharding(tmp_path):
    layout = Layout(tp=2, dp=2, **BF16)
    comm.threads.run(layout.mesh, train_and_save, layout, tmp_path)
    tensors = whole(tmp_path)
    names = [key.removeprefix("model.") for key in tensors if key.startswith("model.") and "lm_head" not in key]
    assert len(names) == 38
    for name in names:
        master, weight = tensors[f"optimizer.master.{name}"], tensors[f"model.{name}"]
        assert master.dtype == tensors[f"optimizer.state.{name}.exp_avg"].dtype == torch.float32
        assert torch.equal(master.bfloat16(), weight) and not torch.equal(master, weight.float())
    for other in (Layout(pp=2, dp=2, microbatches=2, **BF16), Layout(tp=4, optimizer="master", **BF16)):
        for tensors_of_rank in comm.threads.run(other.mesh, load_each, other, {"saved": tmp_path}):
            masters = [key for key in tensors_of_rank["saved"] if key.startswith("optimizer.master.")]
            for key in masters:
                weight = tensors_of_rank["saved"][key.replace("optimizer.master.", "model.")]
                master = tensors_of_rank["saved"][key]
                assert master.abs().sum() > 0
                if master.shape == weight.shape:
                    assert torch.equal(master.bfloat16(), weight)
            assert len(masters) > 10


@pytest.mark.slow
def test_without_masters_they_are_made_of_the_weights(tmp_path):
    plain, sharded = Layout(optimizer="plain", **BF16), Layout(dp=2, **BF16)
    comm.threads.run(plain.mesh, train_and_save, plain, tmp_path)
    (_, tensors) = comm.threads.run(sharded.mesh, load_each, sharded, {"saved": tmp_path})
    expected = whole(tmp_path)["model.model.norm.weight"]
    master = tensors["saved"]["optimizer.master.model.norm.weight"]
    assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), expected[len(expected) // 2 :])
    state = tensors["saved"]["optimizer.state.model.norm.weight.exp_avg"]
    assert state.dtype == torch.float32 and state.abs().sum() > 0
