"""`NxDStrategy` around a user's module: losses, weights, checkpoints are those of Lightning in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from tests.hf.models import llama_config, reference_model
from tests.strangers.toy import message_of
from tests.support.paths import ROOT
from tests.support.pool import processes
from tests.support.synthetic import relative_error

pytest.importorskip("lightning")
from tests.lightning import any_module

LAYOUTS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "dp 2, AdamW, ZeRO-1": (2, dict(), torch.optim.AdamW),
    "tp 2, SGD": (2, dict(tp=2, zero1=False), torch.optim.SGD),
    "pp 2, AdamW": (2, dict(pp=2), torch.optim.AdamW),
    "cp 2, SGD, ZeRO-1": (2, dict(cp=2), torch.optim.SGD),
    "tp 2, dp 2, SGD, ZeRO-1, swap": (4, dict(tp=2, swap=True, sequence_parallel=True), torch.optim.SGD),
    "pp 2, dp 2, SGD, swap": (4, dict(pp=2, zero1=False, swap=True, microbatches=2), torch.optim.SGD),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    ranks, options, optimizer = LAYOUTS[name]
    alone = any_module.fit(str(tmp_path / "alone"), None, optimizer)
    mesh = {axis: size for axis, size in options.items() if axis in ("tp", "pp", "cp")}
    results = processes(ranks).run(any_module.fit, str(tmp_path / "ranks"), options, optimizer, mesh=mesh)
    before = reference_model(llama_config()).state_dict()
    assert min(relative_error(alone["weights"][key], before[key]) for key in before) > 1e-3
    assert len({*alone["rates"]}) > 2
    whole: dict[str, Any] = {}
    for result in results:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert result["rates"] == pytest.approx(alone["rates"], rel=1e-12)
        for kind in ("validated", "tested"):
            assert result[kind] == pytest.approx(alone[kind], rel=1e-10)
        assert result["best"] == alone["best"]
        whole |= result["weights"]
    assert whole.keys() == alone["weights"].keys()
    assert max(relative_error(whole[key], alone["weights"][key]) for key in whole) < 1e-10


@pytest.mark.slow
@pytest.mark.process
def test_a_checkpoint_resumes_in_another_layout(tmp_path: Path) -> None:
    """Saved at pp 2, loaded at tp 2 with ZeRO-1 over dp 2, and the reverse; it goes on as Lightning by itself does."""
    begun = any_module.fit(str(tmp_path / "alone"), max_steps=2)
    alone = any_module.fit(str(tmp_path / "alone"), resumed=begun["last"])
    for index, (sizes, later) in enumerate([({"pp": 2}, {"tp": 2}), ({"tp": 2}, {"pp": 2})]):
        folder = str(tmp_path / str(index))
        ranks = 2 if "pp" in sizes else 4
        first = processes(ranks).run(partial(any_module.fit, max_steps=2), folder, sizes, mesh=sizes)
        assert Path(first[0]["last"]).is_dir()
        resume = partial(any_module.fit, resumed=first[0]["last"])
        whole: dict[str, Any] = {}
        for result in processes(6 - ranks).run(resume, folder, later, mesh=later):
            assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
            assert result["rates"] == pytest.approx(alone["rates"], rel=1e-12)
            assert result["tested"] == pytest.approx(alone["tested"], rel=1e-10)
            whole |= result["weights"]
        assert whole.keys() == alone["weights"].keys()
        assert max(relative_error(whole[key], alone["weights"][key]) for key in whole) < 1e-10


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("options", [{"zero1": False}, {"pp": 2}], ids=str)
def test_manual_optimization_is_that_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    fit = partial(any_module.fit, module_class=any_module.Manual, clip=None, accumulate_grad_batches=1, max_steps=3)
    alone = fit(str(tmp_path / "alone"), None, torch.optim.SGD)
    results = processes(2).run(
        fit, str(tmp_path / "ranks"), options, torch.optim.SGD, mesh={"pp": options.get("pp", 1)}
    )
    whole = results[0]["weights"] | results[1]["weights"]
    for result in results:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
    assert max(relative_error(whole[key], alone["weights"][key]) for key in alone["weights"]) < 1e-10


@pytest.mark.slow
@pytest.mark.process
def test_experts_over_ep_are_those_of_one_process(tmp_path: Path) -> None:
    fit = partial(any_module.fit, module_class=any_module.Experts, max_steps=2)
    alone = fit(str(tmp_path / "alone"))
    first, second = processes(2).run(fit, str(tmp_path / "ranks"), {"ep": 2}, mesh={"ep": 2})
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-10)
    assert first["tested"] == pytest.approx(alone["tested"], rel=1e-10)
    for name, weight in alone["weights"].items():
        assert relative_error(first["weights"][name], weight) < 1e-10, name


@pytest.mark.slow
@pytest.mark.process
def test_bf16_weights_have_fp32_masters_and_predictions_are_those_of_one_process(tmp_path: Path) -> None:
    ids = torch.stack([row["input_ids"] for row in any_module.rows(1)])
    expected = any_module.Whole().model(input_ids=ids).logits.argmax(-1)
    exact = any_module.fit(str(tmp_path / "alone"), max_steps=2)
    for losses, dtypes, predicted in processes(2).run(any_module.in_bf16, str(tmp_path), mesh={"tp": 2}):
        assert losses == pytest.approx(exact["losses"], rel=0.02)
        assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
        assert torch.equal(torch.cat(predicted), expected)


@pytest.mark.slow
@pytest.mark.process
def test_hooks_see_the_gradients_and_values_of_one_process(tmp_path: Path) -> None:
    """With ZeRO-1; gradients are clipped by value, modules copied, and a tuner's checkpoint is saved and removed."""
    alone = any_module.watched(str(tmp_path / "alone"))
    size = len([*(tmp_path / "alone").iterdir()])
    for result in processes(4).run(any_module.watched, str(tmp_path / "ranks"), {"tp": 2}, mesh={"tp": 2}):
        assert result["seen"] == pytest.approx(alone["seen"], rel=1e-10)
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        for name, weight in alone["weights"].items():
            assert relative_error(result["weights"][name], weight) < 1e-10, name
    assert len([*(tmp_path / "ranks").iterdir()]) == size


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_of_a_replica_draw_equal_data_beside_dropout(options: dict[str, int], tmp_path: Path) -> None:
    first, second = processes(2).run(any_module.random_data, str(tmp_path), options, mesh=options)
    assert first == second and len({*first}) == len(first) == 8


def refusals() -> dict[str, str]:
    """Messages by what is wrong, on one rank of pp 2."""
    module = any_module.Llama
    plain = torch.nn.Linear(2, 2)
    fit = partial(any_module.fit, "", {"pp": 2}, clip=None, accumulate_grad_batches=1)

    class NoPipeline(module):  # type: ignore[misc, valid-type]
        def configure_model(self) -> None:
            self.model = plain

    class Outside(module):  # type: ignore[misc, valid-type]
        def configure_model(self) -> None:
            super().configure_model()
            self.head = torch.nn.Linear(2, 2)

    class Several(any_module.Manual):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    class Ours(module):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            return nxd.NeuronZero1Optimizer(self.model.local_parameters(), torch.optim.SGD, lr=0.1)

    class WithState(module):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.model.local_parameters())

    class Saves(module):  # type: ignore[misc, valid-type]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {"weight": torch.zeros(1)}

    cases: dict[str, Any] = {
        "no pipeline": NoPipeline,
        "outside": Outside,
        "several optimizers": Several,
        "ours": Ours,
        "state": WithState,
        "weights in a hook": Saves,
    }
    found = {name: message_of(partial(fit, module_class=case)) for name, case in cases.items()}
    found["batch norm"] = message_of(partial(fit, sync_batchnorm=True))
    found["nothing to swap"] = message_of(partial(any_module.fit, "", {"pp": 2, "swap": True}, module_class=NoPipeline))
    return found


@pytest.mark.process
def test_what_would_train_wrongly_is_refused_by_name(tmp_path: Path) -> None:
    expected = {
        "no pipeline": "NoPipeline has 0 NxDPPModels: build one in configure_model",
        "outside": "head.weight of Outside is a parameter outside of its NxDPPModel",
        "several optimizers": "returned 2 optimizers, and a checkpoint has one: return one",
        "ours": "returned a NeuronZero1Optimizer: return the torch optimizer",
        "state": "Adagrad has state of its parameters before the first step.*zero1=False",
        "weights in a hook": r"puts 1 weights into checkpoint\['state_dict'\].*train without checkpoints",
        "batch norm": r"Trainer\(sync_batchnorm=True\) is not supported",
        "nothing to swap": "NoPipeline has no child that is a model of transformers",
    }
    for found in processes(2).run(refusals, mesh={"pp": 2}):
        for name, message in expected.items():
            assert re.search(message, found[name]), (name, found[name])


SCRIPT = """
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from neuronx_dist import comm
from neuronx_dist.lightning import NxDStrategy
from tests.lightning.any_module import Llama, rows

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for steps in (2, 1):  # the second finds the processes of the first
    trainer = Trainer(strategy=NxDStrategy(tp=2), devices=2, precision="64-true", max_steps=steps, **quiet)
    trainer.fit(Llama(), DataLoader(rows(), batch_size=4))
    print(f"rank {comm.rank('world')} of {comm.size('tp')}, step {trainer.global_step}", flush=True)
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.process
def test_a_script_by_itself_starts_a_process_for_each_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert found == [f"rank {rank} of 2, step {step}" for rank in (0, 1) for step in (1, 2)], done.stderr[-2000:]


def test_processes_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning starts all but one, and each knows its rank."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies.launchers import subprocess_script

    started: list[str] = []
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(subprocess_script.subprocess, "Popen", lambda _, env, **rest: started.append(env["LOCAL_RANK"]))
    monkeypatch.setattr(subprocess_script, "_launch_process_observer", len)
    monkeypatch.setattr(any_module.NxDStrategy, "setup_distributed", lambda self: None)

    def process() -> tuple[int, str | None]:
        strategy = Trainer(strategy=any_module.NxDStrategy(tp=3), devices=3, logger=False).strategy
        launch = strategy.launcher.launch if strategy.launcher else lambda function: function()
        launch(strategy.setup_environment)
        return strategy.global_rank, os.environ["LOCAL_WORLD_SIZE"]

    assert process() == (0, "3") and started == ["1", "2"]
    assert process() == (0, "3") and started == ["1", "2"]  # of the job that there is
    os.environ["LOCAL_RANK"] = "2"
    del os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]
    assert process() == (2, "3") and started == ["1", "2"]
    with pytest.raises(ValueError, match=r"Trainer\(devices=2\): 3 processes run on this host"):
        Trainer(strategy=any_module.NxDStrategy(), devices=2, logger=False)


def test_mistakes_in_the_script_are_refused_by_name(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import Precision, TorchCheckpointIO

    strategy = any_module.NxDStrategy
    with pytest.raises(ValueError, match="microbatches=4.* is for swap=True: pass it to the layers"):
        strategy(pp=2, microbatches=4)
    with pytest.raises(TypeError, match="TorchCheckpointIO is not supported"):
        Trainer(strategy=strategy(), plugins=[TorchCheckpointIO()], logger=False)
    with pytest.raises(TypeError, match=r"precision='int8'.*use '32-true', 'bf16-true' \(ZeRO-1 has fp32 masters\)"):
        strategy().precision_plugin = type("Int8", (Precision,), {"precision": "int8"})()
    with pytest.raises(ValueError, match=r"algorithm='value'\): under ZeRO-1 at ep=2 .*zero1=False"):
        strategy(ep=2).clip_gradients(None, 0.5, "value")
    with pytest.raises(TypeError, match="has no storage_options"):
        strategy().save_checkpoint({}, tmp_path, storage_options=1)
    (tmp_path / "a.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match="a.ckpt is a file of Lightning's, with the weights of one process"):
        strategy().load_checkpoint(tmp_path / "a.ckpt")
