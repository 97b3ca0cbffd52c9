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
from tests.lightning import training
from tests.lightning.exchanges import strategy_collectives
from tests.support.pool import processes
from tests.support.synthetic import relative_error
from tests.trainer.nxd_model import STEPS, Options

pytest.importorskip("lightning")
FIRST = "epoch=0-step=3.ckpt"

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
    with pytest.raises(ValueError, match=r"devices=4\): 1 processes run on this host"):
        Trainer(strategy=lightning.NeuronXLAStrategy(config), devices=4, logger=False)
    with pytest.raises(TypeError, match="has no storage_options"):
        lightning.NeuronCheckpointIO().save_checkpoint({}, tmp_path, storage_options=1)
    with pytest.raises(ValueError, match="grad_accum_steps must be at least 1, got 0"):
        lightning.NeuronLTModule(config, torch.optim.SGD, None, grad_accum_steps=0)
    pipeline = nxd.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config={})
    with pytest.raises(ValueError, match="manual_opt=False in a pipeline"):
        lightning.NeuronLTModule(pipeline, torch.optim.SGD, None, manual_opt=False)
    with pytest.raises(ValueError, match=r"Trainer\(gradient_clip_val=1.0\).*set max_grad_norm"):
        lightning.NeuronXLAPrecisionPlugin().clip_gradients(None, 1.0)
    with pytest.raises(ValueError, match="hooks_interval must be at least 1 step, got 0"):
        lightning.NeuronHooksCallback(SimpleNamespace(hooks=True, target_layers="a", hooks_interval=0))
    with pytest.raises(ValueError, match="reduce_op is 'sum', 'mean' or 'avg', got 'max'"):
        lightning.NeuronXLAStrategy().reduce(1.0, reduce_op="max")


def test_automatic_optimization_needs_an_optimizer_that_reduces(lightning: Any) -> None:
    model = SimpleNamespace(automatic_optimization=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match="by a SGD would not reduce gradients over ranks: return neuronx_dist"):
        lightning.NeuronXLAPrecisionPlugin().optimizer_step(optimizer, model, lambda: None)


def test_a_module_without_model_fn_says_so(lightning: Any) -> None:
    module = lightning.NeuronLTModule(nxd.neuronx_distributed_config(), torch.optim.SGD, None)
    with pytest.raises(ValueError, match="needs model_fn"):
        module.setup("fit")


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

    comm.threads.run(nxd.Mesh(1), main)
    assert Writer.rows == [("loss", 3.0, 7), ("loss", 1.0, 5)]
