"""The trainer's configuration: a file, a command line, variables and types; and what is refused, by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist.compat.nnscaler
from neuronx_dist import parallelize
from neuronx_dist.parallelize import ComputeConfig, cli
from neuronx_dist.parallelize.cli.arg_parser import load_type, merge_args, parse_args, resolve_args
from neuronx_dist.parallelize.cli.train_hook import EVENTS, AggregatedTrainHook, TrainHook
from neuronx_dist.parallelize.cli.trainer_args import HookConfig, OptionalComputeConfig

YAML = """
vars: {dim: 16, scale: {__type: fractions.Fraction, numerator: 1, denominator: 4}}
compute_config: {plan_ngpus: 2, runtime_ngpus: 4, use_end2end: true, pas_config: {pipeline_nmicros: 2}}
pas_policy: tp
max_epochs: 4
seed: 0
micro_batch_size: 2
global_batch_size: 8
model: {type: torch.nn.Linear, args: {in_features: $(vars.dim), out_features: $(vars.dim)}}
optimizer: {type: torch.optim.Adam, args: {lr: 0.01}}
dataset: {type: torch.randn, train_args: {size: $(vars.dim)}}
log: [{type: TensorBoardLogger, args: {name: '$(model.type)-${MINE}'}}]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MINE", "run")
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    return str(path)


def test_a_file_and_a_command_line(file: str) -> None:
    words = ["--max_epochs=2", "--vars.dim", "32", "--compute_config.use_zero", "--precision.param", "bf16"]
    words += ["--optimizer.args.betas", "(0.5, 0.75)", "--optimizer.args.lr!", "--checkpoint.resume_from", file]
    words += ["--hook.on_epoch_end", "builtins.print", "--dataset.val_args.x.__value_type", "str"]
    words += ["--dataset.val_args.x.value", "1", "--instance-name.__type", "str", "--instance-name.object", "$(seed)"]
    args = cli.TrainerArgs.from_cli(["-f", file, *words])
    assert args.compute_config == ComputeConfig(
        2, 4, use_zero=True, use_end2end=True, pas_config={"pipeline_nmicros": 2}
    )
    assert (args.max_epochs, args.update_freq, args.model.args["in_features"], args.gen_reuse) == (2, 2, 32, "match")
    assert args.optimizer.args == {"betas": (0.5, 0.75)} and args.instance_name == "0"
    assert args.log[0].args["name"] == "torch.nn.Linear-run"
    assert args.checkpoint.resume_from is not None and args.checkpoint.resume_from.checkpoint == file
    assert args.precision == {"param": "bf16", "buffer": "none", "input": "none"}
    assert args.create_model().weight.dtype is torch.bfloat16 and args.create_kwarg(args.dataset.val_args) == {"x": "1"}
    assert args.create_hook().on_epoch_end is print and args.to_dict()["vars"]["scale"]["numerator"] == 1
    args.vars["object"] = object()
    assert args.to_dict()["vars"]["object"] == "<object object>"  # equal on all ranks
    value = args.create_kwarg(["$!(vars.scale)", "$!{self}"])
    assert float(value[0]) == 0.25 and value[1] is args
    assert load_type(args.log[0].type) is load_type("nnscaler.cli.loggers.TensorBoardLogger") is cli.TensorBoardLogger


@pytest.mark.parametrize(
    "words, message",
    [
        (["--max_epoch", "2"], "TrainerArgs has no member 'max_epoch'; nearest: max_epochs"),
        (["--seed"], "TrainerArgs.seed: invalid literal for int() with base 10: 'true'"),
        (["--max_epochs", "0"], "config.yaml: max_epochs must be at least 1, got 0"),
        (["--pas_policy", "tpp"], "pas_policy 'tpp' is none of "),
        (["--max_epochs", "two"], "TrainerArgs.max_epochs: invalid literal"),
        (["--seed", "$(vars.dime)"], "variable vars.dime is neither in the arguments nor in the environment"),
        (["--seed", "$(max_epochs)", "--max_epochs", "$(seed)"], "depends on itself: seed -> max_epochs -> seed"),
        (["--global_batch_size", "6"], "global_batch_size=6 is not micro_batch_size=2 times 2 units times"),
        (["--compute_config.use_end2end", "false"], "compute_config is required, with use_end2end=True"),
        (["--optimizer.grad_reduction", "token"], "grad_reduction 'token' is none of 'mean', 'sum', 'per-token-mean'"),
        (["--optimizer.loss_reduction", "per-token-mean"], "needs aggregate_outputs_fn, which counts the tokens"),
        (["--checkpoint.save_type", "merged"], "save_type 'merged' is what Trainer.merge_checkpoint writes"),
        (["--checkpoint.every_n_epochs", "0"], "every_n_epochs must be at least 1, got 0"),
        (["--checkpoint.resume_from", "/nowhere"], "resume_from: /nowhere does not exist"),
        (["--hook.on_epoch", "print"], "hook: there is no event 'on_epoch'; nearest: on_epoch"),
        (["--precision", "fp8"], "precision of 'param' 'fp8' is none of 'fp32'"),
        (["--model.type", "torch.nn.Linea"], "torch.nn has no 'Linea'; nearest: Linear"),
        (["--optimizer.type!"], "OptimizerConfig.type is required"),
        (["2"], "argument '2' has no option before it"),
        (["--log", "[1"], ": TrainerArgs.log: '[1' is no Python list"),
        (["--log", "3"], "TrainerArgs.log: it is a list, got 3"),
        (["--log.x", "3"], "TrainerArgs.log: it is a list, whose items have numbers from 0, and no 'x'"),
        (["--optimizer.args", "3"], "OptimizerConfig.args: it is a dict, got 3"),
        (["--seed=1", "--seed.a", "2"], "--seed.a: --seed has a value already"),
        (["--lr_scheduler.type", "x", "--lr_scheduler.interval", "day"], "interval 'day' is none of 'epoch', 'step'"),
    ],
)
def test_errors_name_the_option(file: str, words: list[str], message: str) -> None:
    with pytest.raises((ValueError, KeyError, RuntimeError)) as error:
        args = cli.TrainerArgs.from_cli(["-f", file, *words])
        assert args.resolved_pas_policy == "tp"
        args.create_model()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("- a\n- b", "a.yaml: it is the list ['a', 'b']: write members by name, as max_epochs: 4"),
        ("hello", "a.yaml: it is the str 'hello': write"),
        ("a: [1,\nb: }", "a.yaml: it is no YAML: while parsing a flow node expected the node content, but found '}'"),
        (None, "-f has no file after it: write -f config.yaml"),
    ],
)
def test_files_that_hold_no_members_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text or "")
    with pytest.raises(ValueError, match=re.escape(message)):
        cli.TrainerArgs.from_cli(["-f", *[str(path)] * (text is not None)])


def test_lists_of_the_command_line() -> None:
    args: dict[str, Any] = {"log": [{"a": 1}, {"a": 2}], "x": r"$\(y)${log.1.a}", "z": "$(log)"}
    merge_args(args, ["--log.0!", "--log.1.b", "3", "--log.2.a", "4"])
    resolve_args(args)
    assert args["log"] == [None, {"a": 2, "b": "3"}, {"a": "4"}] == args["z"] and args["x"] == "$(y)2"
    assert parse_args(["--a.b-c", "1", "--flag", "--a.d="]) == {"a": {"b_c": "1", "d": ""}, "flag": "true"}


def test_nnscalers_names_are_this_packages() -> None:
    import nnscaler
    from nnscaler.cli.loggers.tensorboard import TensorBoardLogger
    from nnscaler.cli.trainer import Trainer
    from nnscaler.graph import IRGraph
    from nnscaler.graph.parser.register import register_op
    from nnscaler.parallel import build_optimizer
    from nnscaler.utils import set_default_logger_level

    assert Trainer is cli.Trainer and build_optimizer is parallelize.build_optimizer is nnscaler.build_optimizer
    assert TensorBoardLogger is cli.TensorBoardLogger and register_op is parallelize.register_op
    assert load_type("nnscaler.cli.loggers.tensorboard.TensorBoardLogger") is TensorBoardLogger
    assert callable(set_default_logger_level)
    assert IRGraph is nnscaler.IRGraph is parallelize.IRGraph
    neuronx_dist.compat.nnscaler.install()  # twice is once
    part = OptionalComputeConfig(use_zero=False)
    assert part.resolve(ComputeConfig(1, 2, use_zero=True, use_end2end=True)) == ComputeConfig(1, 2)


def test_hooks_are_called_in_order() -> None:
    seen: list[Any] = []

    class Mine(TrainHook):
        def __init__(self, args: dict[str, Any]) -> None:
            self.args = args

        def on_val_end(self, trainer: Any, val_loss: float) -> None:
            super().on_val_end(trainer, val_loss)  # type: ignore[misc]
            seen.append((self.args, trainer, val_loss))

    HookConfig(Mine, {})
    hooks = AggregatedTrainHook([Mine({"first": 1}), Mine({"second": 2})])
    for event in EVENTS:
        getattr(hooks, event)("trainer", 0.5)
    assert seen == [({"first": 1}, "trainer", 0.5), ({"second": 2}, "trainer", 0.5)]
    with pytest.raises(AttributeError):
        hooks.on_nothing  # noqa: B018


@pytest.mark.slow
def test_compiling_writes_files_without_training(tmp_path: Path) -> None:
    def sample(args: cli.TrainerArgs) -> torch.Tensor:
        return torch.ones(4, 8)

    args = {
        "compute_config": ComputeConfig(2, 4, use_end2end=True), "pas_policy": "tp", "run_mode": "compile",
        "gen_savedir": str(tmp_path), "dummy_sample_gen_fn": sample, "max_train_steps": 1, "seed": 0,
        "model": {"type": Loss}, "optimizer": {"type": "torch.optim.SGD"}, "dataset": {"type": "list"},
    }  # fmt: skip
    trainer = cli.Trainer(train_args=args)
    trainer.run()
    assert trainer.model is None and len([*tmp_path.rglob("plan.json")]) == 1


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()
