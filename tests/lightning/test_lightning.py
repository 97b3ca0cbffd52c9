"""Training by Lightning is that of one process: losses, norms, weights; checkpoints, logs; errors by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends.shapes import ShapesBackend
from neuronx_dist.parallel_layers.checkpointing import load
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.lightning import training
from tests.lightning.exchanges import accelerator_collectives, strategy_collectives
from tests.support.pool import processes
from tests.support.synthetic import relative_error
from tests.trainer.nxd_model import BATCH, ROWS, STEPS, Options, config_of

pytest.importorskip("lightning")
FIRST, LAST = "epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"

# Ranks, sizes, options of the model, and of the loop.
LAYOUTS: dict[str, tuple[int, dict[str, int], Options, dict[str, Any]]] = {
    "tp 2, accumulation": (2, dict(tp=2), Options(), dict(accumulated=2)),
    "tp 2, dp 2, ZeRO-1, SP": (4, dict(tp=2), Options(zero1=True, sequence_parallel=True), {}),
    "pp 2": (2, dict(pp=2), Options(), {}),
    "tp 2, pp 2, SP, accumulation": (4, dict(tp=2, pp=2), Options(sequence_parallel=True), dict(accumulated=2)),
    "dp 2, automatic, accumulation": (2, {}, Options(), dict(accumulated=2, manual_opt=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_and_resuming_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    ranks, sizes, options, loop = LAYOUTS[name]
    mesh, automatic = nxd.Mesh(ranks, **sizes), not loop.get("manual_opt", True)
    losses, norms, weights = comm.threads.run(nxd.Mesh(1), training.plainly)[0]
    fit = partial(training.fit, mesh, options, str(tmp_path), **loop)
    results = processes(ranks).run(fit, mesh=sizes)
    assert losses[-1] < losses[0] - 0.2 and any(norm > 0.5 for norm in norms)

    whole: dict[str, Any] = {}
    for result in results:
        if not automatic:  # there the loss is the last batch's
            assert result["losses"] == pytest.approx(losses, abs=1e-10)
        assert result["norms"] == pytest.approx(norms, abs=1e-10)
        assert result["steps"] == 2 * STEPS
        whole |= result["weights"]
    assert whole.keys() == weights.keys()
    assert max(relative_error(whole[key], weights[key]) for key in whole) < 1e-10

    writer = mesh.tp if mesh.pp > 1 else 0
    assert [result["bar"] for result in results] == [rank == writer for rank in range(ranks)]
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    (log,) = {str(path.parent) for path in files if "events" in path.name}
    assert {str(Path(result["log_dir"]).relative_to(tmp_path)) for result in results} == {log}
    saved = [path for path in files if path.parts[:2] == ("checkpoints", FIRST)]
    assert len(saved) == (ranks if options.zero1 else ranks // mesh.size("dp"))
    if mesh.pp > 1:
        check_hooks(tmp_path, mesh.tp)

    again = processes(ranks).run(partial(fit, resumed=FIRST), mesh=sizes)
    for before, after in zip(results, again):
        assert after["losses"] == before["losses"][STEPS:]
        assert after["norms"] == before["norms"][STEPS:]
        for key, weight in before["weights"].items():
            assert after["weights"][key].equal(weight), key

    for path in (tmp_path / "checkpoints" / LAST, tmp_path / "any layout"):
        assert comm.threads.run(nxd.Mesh(1), loaded_in_another_layout, str(path), weights)[0]


def loaded_in_another_layout(path: str, weights: dict[str, torch.Tensor]) -> bool:
    """Loads the weights of a checkpoint of several ranks into the model of one."""
    model = training.build(False)
    nxd.load_checkpoint(path, model=model)
    return max(relative_error(param.detach(), weights[name]) for name, param in model.named_parameters()) < 1e-10


def check_hooks(folder: Path, tp: int) -> None:
    """The callback has written norms of two layers, of stages 0 and 1, in the steps 0 and 3."""
    found = sorted(str(path.relative_to(folder / "hooks")) for path in (folder / "hooks").rglob("*.pt"))
    expected = [
        f"{layer}/global_step_{step}/rank_{stage * tp}_pp{stage}_tp0_dp0_cp0_{kind}_{side}_norm.pt"
        for stage, layer in enumerate(("blocks.1", "blocks.3.up"))
        for step in (0, 3)
        for kind in ("grad", "layer")
        for side in ("input", "output")
    ]
    assert found == expected
    assert all(torch.load(folder / "hooks" / path) > 0 for path in found)


def test_what_the_strategy_exchanges() -> None:
    strategy_collectives()


def test_what_the_accelerator_exchanges() -> None:
    accelerator_collectives()


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("neuronx_dist.lightning")


def test_a_strategy_has_the_sizes_of_its_configuration(lightning: Any) -> None:
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2, pipeline_parallel_size=4, pipeline_config={})
    for strategy in (lightning.NeuronXLAStrategy(config), lightning.NeuronXLAStrategy(None, 2, 4)):
        assert (strategy.tensor_parallel_size, strategy.pipeline_parallel_size) == (2, 4)
        assert (strategy.expert_parallel_size, strategy.context_parallel_size) == (1, 1)
        assert isinstance(strategy.precision_plugin, lightning.NeuronXLAPrecisionPlugin)
        assert strategy.checkpoint_io.save_load_xser


def test_mistakes_are_refused_by_name(lightning: Any, tmp_path: Path) -> None:
    import lightning.pytorch.plugins as plugins
    from lightning.pytorch import Trainer

    config = nxd.neuronx_distributed_config()
    with pytest.raises(NotImplementedError, match="checkpoint_io=TorchCheckpointIO"):
        lightning.NeuronXLAStrategy(config, checkpoint_io=plugins.TorchCheckpointIO())
    with pytest.raises(TypeError, match="takes a NeuronXLAPrecisionPlugin, got DoublePrecision: leave out"):
        Trainer(strategy=lightning.NeuronXLAStrategy(config), precision="64-true", logger=False)
    with pytest.raises(ValueError, match=r"devices=\[0, 1\]\): 1 processes run on this host"):
        Trainer(strategy=lightning.NeuronXLAStrategy(config), devices=[0, 1], logger=False)
    with pytest.raises(TypeError, match="has no storage_options"):
        lightning.NeuronCheckpointIO().save_checkpoint({}, tmp_path, storage_options=1)
    with pytest.raises(ValueError, match="grad_accum_steps must be at least 1, got 0"):
        lightning.NeuronLTModule(config, torch.optim.SGD, None, grad_accum_steps=0)
    pipeline = nxd.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config={})
    with pytest.raises(ValueError, match="manual_opt=False in a pipeline"):
        lightning.NeuronLTModule(pipeline, torch.optim.SGD, None, manual_opt=False)
    with pytest.raises(ValueError, match=r"manual_opt=False with .*use Trainer\(accumulate_grad_batches=4\)"):
        lightning.NeuronLTModule(config, torch.optim.SGD, None, manual_opt=False, grad_accum_steps=4)
    with pytest.raises(ValueError, match=r"Trainer\(gradient_clip_val=1.0\).*set max_grad_norm"):
        lightning.NeuronXLAPrecisionPlugin().clip_gradients(None, 1.0)
    with pytest.raises(ValueError, match="hooks_interval must be at least 1 step, got 0"):
        lightning.NeuronHooksCallback(SimpleNamespace(hooks=True, target_layers="a", hooks_interval=0))
    with pytest.raises(ValueError, match="reduce_op is 'sum', 'mean', 'max' or 'min', got 'prod'"):
        lightning.NeuronXLAStrategy().reduce(1.0, reduce_op="prod")


def test_automatic_optimization_needs_an_optimizer_that_reduces(lightning: Any) -> None:
    model = SimpleNamespace(automatic_optimization=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match="by a SGD would not reduce gradients over ranks: return neuronx_dist"):
        lightning.NeuronXLAPrecisionPlugin().optimizer_step(optimizer, model, lambda: None)


def test_a_module_without_model_fn_says_so(lightning: Any) -> None:
    module = lightning.NeuronLTModule(nxd.neuronx_distributed_config(), torch.optim.SGD, None)
    with pytest.raises(ValueError, match="needs model_fn"):
        module.setup("fit")


def test_a_modules_device_is_that_of_the_rank(lightning: Any) -> None:
    module = lightning.NeuronLTModule(nxd.neuronx_distributed_config(), torch.optim.SGD, None)
    assert module.device.type == "cpu"
    backend = type("OnMeta", (ShapesBackend,), {"device": torch.device("meta")})()
    with comm.as_rank(nxd.Mesh(1), 0, backend):
        assert module.device.type == "meta"


def test_metrics_below_step_0_are_left_out(lightning: Any, tmp_path: Path) -> None:
    """And without `print_step` they have the trainer's step."""

    class Writer:
        rows: list[Any] = []

        def add_scalar(self, *row: Any) -> None:
            self.rows.append(row)

    def main() -> None:
        logger = lightning.NeuronTensorBoardLogger(save_dir=str(tmp_path))
        logger._experiment = Writer()
        assert logger.print_step == -1
        logger.log_metrics({"loss": 3.0}, 7)
        logger.print_step = -1
        logger.log_metrics({"loss": 2.0}, 8)
        logger.print_step = 5
        logger.log_metrics({"loss": 1.0}, 9)
        logger.start_validation(6)
        logger.log_metrics({"val_loss": 1.5}, 9)
        logger.print_step = -1
        start_validation(logger)
        logger.log_metrics({"val_loss": 0.5}, 9)

    def start_validation(logger: Any) -> None:
        strategy = lightning.NeuronXLAStrategy()
        strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(loggers=[logger], global_step=6))
        strategy.on_validation_start()

    comm.threads.run(nxd.Mesh(1), main)
    assert Writer.rows == [("loss", 3.0, 7), ("loss", 1.0, 5), ("val_loss", 1.5, 5), ("val_loss", 0.5, 6)]


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("layout", ["one stage", "pp 2"])
def test_an_epoch_that_ends_inside_of_an_accumulation_ends_with_a_step(
    layout: str, zero1: bool, lightning: Any
) -> None:
    """With the mean over its batches: 3 of a step of 2."""
    mesh = nxd.Mesh(2, pp=2) if layout == "pp 2" else nxd.Mesh(2)
    expected = comm.threads.run(nxd.Mesh(1), accumulated_plainly)[0]
    for losses, steps, weights in comm.threads.run(mesh, accumulated, mesh, zero1, lightning):
        assert steps == [False, True, True]
        assert losses == pytest.approx(expected[0], abs=1e-10)
        assert max(relative_error(weights[name], expected[1][name]) for name in weights) < 1e-10


def accumulated(mesh: nxd.Mesh, zero1: bool, lightning: Any) -> Any:
    """Trains an epoch of 3 batches, 2 of which are a step, without a `Trainer`."""
    module = module_of(mesh, zero1, lightning)
    module.on_train_start()
    losses, steps = [], []
    rows = ROWS // mesh.size("dp")
    for index, ids in enumerate(BATCH):
        module.trainer.is_last_batch = index == 2
        local = ids[comm.rank("dp") * rows :][:rows]
        module.training_step({"input_ids": local, "labels": local.roll(-1, 1)}, index)
        steps.append(module.should_print)
        if module.should_print:
            losses.append(float(module.loss))
            module.on_save_checkpoint({})
        else:
            with pytest.raises(RuntimeError, match="checkpoint after batch 1 of grad_accum_steps=2"):
                module.on_save_checkpoint({})
    weights = {name: gather_full(p.detach(), spec_of(p)) for name, p in module.model.named_parameters()}
    return losses, steps, weights


def module_of(mesh: nxd.Mesh, zero1: bool, lightning: Any) -> Any:
    """Returns a module, set up, with what it asks of a trainer."""

    class Module(lightning.NeuronLTModule):  # type: ignore[misc]
        trainer = SimpleNamespace(strategy=lightning.NeuronXLAStrategy(), loggers=[], is_last_batch=False)
        global_step = 0

        def optimizers(self) -> Any:
            return self.trainer.optimizers[0]

        def lr_schedulers(self) -> None:
            return None

        def log(self, *_: Any, **__: Any) -> None:
            pass

    config = config_of(mesh, Options(zero1=zero1))
    module = Module(
        config, torch.optim.SGD, None, (False,), opt_kwargs={"lr": 0.5}, model_fn=training.build, grad_accum_steps=2
    )
    module.setup("fit")
    module.trainer = SimpleNamespace(**vars(Module.trainer), optimizers=module.configure_optimizers())
    return module


def accumulated_plainly() -> Any:
    model = training.build(False)
    decay = {name: 0.0 if "norm" in name or "bias" in name else 0.01 for name, _ in model.named_parameters()}
    groups = [{"params": [p], "weight_decay": decay[name]} for name, p in model.named_parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    losses = []
    for batches in (BATCH[:2], BATCH[2:]):
        loss = sum(model(ids, ids.roll(-1, 1))[0] for ids in batches) / len(batches)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def test_a_second_fit_starts_without_what_the_first_has_accumulated(lightning: Any) -> None:
    def main() -> None:
        module = module_of(nxd.Mesh(1), False, lightning)
        module.training_step({"input_ids": BATCH[0], "labels": BATCH[0]}, 0)
        assert module._batches == 1 and any(param.grad.any() for param in module.model.parameters())
        module.setup("fit")
        module.on_train_start()
        assert module._batches == 0 and not any(module.averaged_loss)
        assert not any(param.grad is not None and param.grad.any() for param in module.model.parameters())

    comm.threads.run(nxd.Mesh(1), main)


def test_hooks_record_training_alone_and_are_removed(lightning: Any, tmp_path: Path) -> None:
    def main() -> None:
        layer = torch.nn.Linear(2, 2)
        options = training.hooks_of(str(tmp_path))
        options.target_layers = "0"
        callback = lightning.NeuronHooksCallback(options)
        module = SimpleNamespace(model=torch.nn.Sequential(layer), global_step=0, log=lambda *_, **__: None)
        trainer = SimpleNamespace(training=True, is_global_zero=True)
        for end in (callback.on_train_end, lambda *args: callback.on_exception(*args, KeyboardInterrupt())):
            callback.on_train_start(trainer, module)
            assert len(layer._forward_hooks) == len(layer._backward_hooks) == 1
            end(trainer, module)
            assert not layer._forward_hooks and not layer._backward_hooks
        callback.on_train_start(trainer, module)
        trainer.training = False
        layer(torch.ones(1, 2))
        assert not list(tmp_path.rglob("*.pt"))
        trainer.training = True
        layer(torch.ones(1, 2))
        assert len(list(tmp_path.rglob("*.pt"))) == 2

    comm.threads.run(nxd.Mesh(1), main)


def test_hyperparameters_that_would_not_load_are_left_out(lightning: Any, tmp_path: Path) -> None:
    def main() -> None:
        io = lightning.NeuronCheckpointIO()
        parameters = {"lr": 0.1, "opt": torch.optim.AdamW, "args": SimpleNamespace(a=1), "fn": lambda: None}
        checkpoint = {"hyper_parameters": parameters, "datamodule_hyper_parameters": {"path": tmp_path}}
        with pytest.warns(UserWarning) as warned:
            io.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
        assert checkpoint["hyper_parameters"] is parameters and len(parameters) == 4
        names = [str(warning.message).partition(",")[0].rpartition(" ")[2] for warning in warned]
        assert names == ["'opt'", "'args'", "'fn'", "'path'"]
        loaded = io.load_checkpoint(tmp_path / "a.ckpt")
        assert loaded == {"hyper_parameters": {"lr": 0.1}, "datamodule_hyper_parameters": {}}

    comm.threads.run(nxd.Mesh(1), main)


def test_a_checkpoint_of_zero1_without_it_and_the_reverse(lightning: Any, tmp_path: Path) -> None:
    """Both are refused, on each rank, with the call that loads the weights alone."""

    def main() -> None:
        io, module = lightning.NeuronCheckpointIO(), torch.nn.Linear(1, 1)
        for zero1, was in ((True, "with"), (False, "without")):
            path = tmp_path / f"{was}.ckpt"
            io.save_checkpoint({"state_dict": module.state_dict()}, path, master_dp_only=not zero1)
            with pytest.raises(FileNotFoundError, match=rf"saved {was} ZeRO-1.*zero_one_enabled is {not zero1} here"):
                io.load_checkpoint(path, master_dp_only=zero1)
            load(path, module, model_key="state_dict", master_dp_only=not zero1)
        with pytest.raises(FileNotFoundError, match="has no such folders"):
            io.load_checkpoint(tmp_path / "missing.ckpt")

    comm.threads.run(nxd.Mesh(2), main)
