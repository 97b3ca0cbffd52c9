"""Moving models, host copies, checkpoints and resuming, on one XLA device of the CPU and to and from it."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import replay_loop
from tests.support.llama_training import distance
from tests.support.pool import processes
from tests.xla.one_device import on_device
from tests.xla.programs import foundation as programs
from tests.xla.programs import training as training_programs
from tests.xla.programs.foundation import CPU, XLA
from tests.xla.programs.training import Training

CLOSE = dict(rel=1e-5, abs=0)


def test_a_moved_model_is_the_same_model():
    found = on_device(programs.move_there_and_back)
    before, there, back = found["before"], found["there"], found["back"]
    assert before["tied"] and before["buffers_tied"] and before["grad_is_there"] and before["trained"] == ["a.bias"]
    assert (before.pop("devices"), there.pop("devices"), back.pop("devices")) == ({CPU}, {XLA}, {CPU})
    assert there == before and back == before
    assert found["same objects"]
    assert found["loss there"] == pytest.approx(found["loss"], **CLOSE)
    # The optimizer was made before the move, and what it did was done to the model that came back.
    assert found["loss there after a step"] < 0.99 * found["loss"]
    assert found["loss back"] == pytest.approx(found["loss there after a step"], **CLOSE)


def test_what_cannot_be_moved_is_named():
    found = on_device(programs.move_what_cannot)
    assert "0.weight of Sequential is on the meta device and has no value to move to xla:0" in found["meta"]
    assert "materialize(model, seed, device=...)" in found["meta"]
    assert "running_mean of BatchNorm1d is on the meta device" in found["meta buffer"]
    assert "parameter weight is referenced by" in found["in use"] and "before it is called" in found["in use"]


def test_a_llama_with_tied_embeddings_is_moved():
    found = on_device(programs.llama_moved)
    assert found["loss"] == pytest.approx(found["expected"], **CLOSE)
    assert found["tied"] and found["specs"] and found["devices"] == {XLA}


def test_the_loss_of_a_pipeline_is_returned_on_the_cpu_unless_told_otherwise():
    assert on_device(programs.device_of_the_loss, True) == (CPU, CPU)
    assert on_device(programs.device_of_the_loss, False) == (XLA.split(":")[0],) * 2


def test_host_copies_are_one_program():
    found = on_device(programs.host_copies)
    x = torch.arange(6, dtype=torch.float32)
    expected = {
        "a": [x + 1, (x > 2, (x * 3).to(torch.bfloat16))],
        "b": x * 2,
        "step": torch.tensor(1.0),
        "ids": (x * 2).long(),
        "here": torch.ones(2),
        "plain": (3, "text", None),
    }
    leaves, spec = torch.utils._pytree.tree_flatten(found["copied"])
    expected_leaves, expected_spec = torch.utils._pytree.tree_flatten(expected)
    assert spec == expected_spec
    for leaf, wanted in zip(leaves, expected_leaves):
        if isinstance(wanted, torch.Tensor):
            assert leaf.device.type == CPU and leaf.dtype == wanted.dtype and torch.equal(leaf, wanted)
            assert not leaf.requires_grad
        else:
            assert leaf == wanted
    assert found["executed"] == 1 and found["executed_for_copies"] == 0
    assert found["unchanged"] and found["same_memory"]


@pytest.mark.parametrize(
    "kind, dtype", [("plain", torch.float32), ("zero1", torch.float32), ("master", torch.bfloat16)]
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(kind, dtype):
    """Two steps, a file, two steps: bit for bit the losses of four, with dropout; and no new program."""
    found = on_device(programs.resume, kind, dtype)
    assert found["resumed"] == found["whole"] and len(set(found["whole"])) == 4
    assert found["compiled"] == 0
    leaves = torch.utils._pytree.tree_leaves(found["state"])
    assert {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)} == {CPU}
    assert {value.dtype for value in found["state"]["model"].values()} == {dtype}


@pytest.mark.parametrize("kind", ["plain", "zero1"])
@pytest.mark.parametrize("source, target", [(XLA, CPU), (CPU, XLA)])
def test_a_checkpoint_is_of_no_device(kind, source, target):
    """`capturable` stays what the optimizer here has, and the count of steps is where it needs it."""
    found = on_device(programs.across, kind, source, target)
    assert found["found"] == pytest.approx(found["expected"], **CLOSE)
    assert found["steps"] == [4.0] * 5
    assert found["step_devices"] == {target} and found["moments"] == {(target, torch.float32)}
    assert found["capturable"] == (target == XLA)
    rate, kind_of_rate, same_object = found["lr"]
    assert rate == pytest.approx(0.01)
    assert (kind_of_rate, same_object) == (("Tensor", True) if target == XLA else ("float", False))
    assert found["compiled"] == 0


def test_masters_of_bf16_go_to_the_cpu_in_float32():
    found = on_device(programs.across, "zero1", XLA, CPU, torch.bfloat16)
    assert found["found"] == pytest.approx(found["expected"], rel=2e-2)
    assert found["moments"] == {(CPU, torch.float32)}


def test_checkpoints_of_a_pipeline_model(tmp_path):
    from safetensors.torch import load_file

    found = on_device(programs.llama_checkpoints, str(tmp_path))
    assert found["found"] == found["expected"]
    assert found["local"] and found["saved_on"] == {CPU}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(value, found["state"][name]), name


# --- several ranks ---


def test_all_ranks_take_part_in_saving(tmp_path):
    """On XLA a gather is in a program of all ranks: one that left it out would leave the others waiting."""
    found = [on_device(programs.save_as_rank, rank, str(tmp_path)) for rank in range(4)]
    gathered, _ = found[0]
    assert len(gathered) == 21
    assert found == [(gathered, 0)] * 4
    assert (tmp_path / "model.safetensors").exists()


def test_ranks_of_the_cpu_go_on_from_what_xla_ranks_had():
    """tp 2 x dp 2 with ZeRO-1: two steps on XLA devices and a third under gloo are three steps under gloo."""
    case, mesh = Training("adamw", "zero1"), Mesh(4, tp=2)
    arguments = [(case, torch.zeros(1), torch.tensor(1e-3))] * 4
    batches = [[training_programs.rows_of(2, rank // 2, step) for step in range(2)] for rank in range(4)]
    states = replay_loop(training_programs.setup, mesh, arguments, batches).states
    found = processes(4).run(programs.go_on, case, states, 2, mesh=dict(tp=2))
    expected = processes(4).run(training_programs.under_gloo, case, 3, mesh=dict(tp=2))
    for (output, weights), (outputs, state) in zip(found, expected):
        assert distance(output["loss"], outputs[2]["loss"]) <= 1e-5
        assert distance(output["norm"], outputs[2]["norm"]) <= 1e-5
        assert len(weights) == 21
        for name, value in weights.items():
            assert distance(value, state[f"['model']['{name}']"]) <= 1e-5, name
