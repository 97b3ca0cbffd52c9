"""The trainer: losses and weights are those of a plain loop in one process; checkpoints go on in any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, merge_state_dicts
from neuronx_dist.parallelize.cli import AggregatedOutputs, Trainer, TrainerArgs, TrainHook

pytestmark = pytest.mark.slow

WIDTH, ROWS = 8, 30
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
}


class Net(nn.Module):
    """An MLP that returns its loss; weights depend on no global generator."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2

    def forward(self, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        x = data["x"]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - data["y"]).square().mean(), 2


class Named(Net):
    """The same with a dict as result."""

    def forward(self, data: dict[str, torch.Tensor]) -> dict[str, Any]:  # type: ignore[override]
        return dict(zip(("loss", "tokens"), super().forward(data)))


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random rows in float64."""

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x, self.y = (torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[row], "y": self.y[row]}


def arguments(folder: Path, plan: int = 1, units: int = 1, policy: str = "dp", **options: Any) -> dict[str, Any]:
    optimizer, settings = OPTIMIZERS[options.pop("optimizer", "sgd")]
    reductions = options.pop("reductions", {})
    pas = options.pop("pas_config", {})
    zero = options.pop("use_zero", False)
    checkpoint = options.pop("checkpoint", {"no_save": True})
    return {
        "compute_config": ComputeConfig(plan, plan * units, use_end2end=True, use_zero=zero, pas_config=pas),
        "pas_policy": policy,
        "gen_savedir": str(folder / f"{policy}{plan}"),
        "model": {"type": Net},
        "optimizer": {"type": optimizer, "args": settings, "clip_gnorm": 0.05, **reductions},
        "dataset": {"type": Rows, "train_args": {"size": ROWS}, "val_args": {"size": 8, "seed": 1}},
        "dataloader": {"train_args": {"drop_last": True}},
        "lr_scheduler": {"type": torch.optim.lr_scheduler.StepLR, "args": {"step_size": 1, "gamma": 0.5}},
        "checkpoint": checkpoint,
        "micro_batch_size": 2,
        "grad_accumulation_steps": 2,
        "max_epochs": 2,
        "enable_progress_bar": False,
        "seed": 0,
        **options,
    }


class Run:
    """Losses and norms of a run, as hooks of a rank see them, and the weights at the end."""

    def __init__(self) -> None:
        self.train: list[float] = []
        self.val: list[float] = []
        self.norms: list[float] = []
        self.model: dict[str, torch.Tensor] = {}
        self.optimizer: dict[str, Any] = {}

    def hook(self) -> dict[str, Callable[..., None]]:
        def on_train_end(trainer: Trainer) -> None:
            self.model, self.optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()

        return {
            "after_aggregate_train_step_outputs": lambda trainer, outputs, loss: self.train.append(loss),
            "on_val_end": lambda trainer, loss: self.val.append(loss),
            "after_gnorm_clip": lambda trainer, norm: self.norms.append(float(norm)),
            "on_train_end": on_train_end,
        }


def trained(make: Callable[[], dict[str, Any]], stages: int = 1) -> tuple[Run, dict[str, torch.Tensor]]:
    """Trains on ranks as threads; returns what rank 0 has seen, and the merged weights."""

    def rank() -> Run:
        run = Run()
        Trainer(train_args={**make(), "hook": run.hook()}).run()
        return run

    runs = threads.run(make()["compute_config"].mesh(stages), rank)
    assert all(run.train == pytest.approx(runs[0].train, rel=1e-14) for run in runs)
    return runs[0], merge_state_dicts([run.model for run in runs], [run.optimizer for run in runs])[0]


def plain(
    units: int, optimizer: str = "sgd", epochs: int = 2, divide: Callable[[int], float] = float, rows: int = ROWS
) -> tuple[Run, Any]:
    """The same in one process: gradients of all microbatches of all units, divided by `divide(microbatches)`."""
    run, net = Run(), Net()
    cls, settings = OPTIMIZERS[optimizer]
    stepper = cls(net.parameters(), **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 1, 0.5)
    samplers = [DistributedSampler(Rows(rows), units, unit) for unit in range(units)]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [[*DataLoader(Rows(rows), 2, sampler=sampler, drop_last=True)] for sampler in samplers]
        for step in range(0, len(loaders[0]), 2):
            losses = [net(batch)[0] for loader in loaders for batch in loader[step : step + 2]]
            run.train.append(sum(map(float, map(torch.Tensor.detach, losses))) / len(losses))
            stepper.zero_grad()
            (sum(losses) / divide(len(losses))).backward()  # type: ignore[union-attr]
            run.norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.05)))
            stepper.step()
        scheduler.step()
        validation = [float(net(batch)[0].detach()) for batch in DataLoader(Rows(8, 1), 2)]
        run.val.append(sum(validation) / len(validation))
    return run, net.state_dict()


def assert_same(has: tuple[Run, Any], wanted: tuple[Run, Any]) -> None:
    for name in ("train", "val", "norms"):
        assert getattr(has[0], name) == pytest.approx(getattr(wanted[0], name), rel=1e-10), name
    torch.testing.assert_close(dict(has[1]), dict(wanted[1]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "plan, units, policy, stages, optimizer, options",
    [
        (1, 2, "dp", 1, "adam", {"use_zero": True}),
        (2, 1, "tp", 1, "adam", {}),
        (2, 2, "tp", 1, "sgd", {}),
        (2, 2, "pp", 2, "adam", {"model": {"type": Named}}),
    ],
)
def test_losses_and_weights_are_those_of_a_plain_loop(
    plan: int, units: int, policy: str, stages: int, optimizer: str, options: Any, tmp_path: Path
) -> None:
    """30 rows: an epoch ends within a step."""
    has = trained(lambda: arguments(tmp_path, plan, units, policy, optimizer=optimizer, **options), stages)
    assert_same(has, plain(units, optimizer))


class LossLast(Net):
    """The same with another scalar before the loss."""

    def forward(self, data: dict[str, torch.Tensor]) -> dict[str, Any]:  # type: ignore[override]
        loss = super().forward(data)[0]
        return {"doubled": 2 * loss, "loss": loss}


@pytest.mark.parametrize("policy", ["dp", "parallel_modules"])
def test_a_loss_that_is_not_the_first_result_is_refused(policy: str, tmp_path: Path) -> None:
    part = {"type": nn.Linear, "forward_args_gen_fn": linear_arguments}
    model = {"type": LossLast, "parallel_modules": [part] * (policy == "parallel_modules")}
    with pytest.raises(Exception, match="'doubled' before 'loss', but its first entry is trained on: put 'loss' first"):
        trained(partial(arguments, tmp_path, model=model))


def test_a_last_batch_of_fewer_rows_is_left_out(tmp_path: Path) -> None:
    """31 rows in batches of two, 9 of validation."""
    options = arguments(tmp_path, model={"type": Named})
    options["dataset"] = {"type": Rows, "train_args": {"size": 31}, "val_args": {"size": 9, "seed": 1}}
    with (
        pytest.warns(UserWarning, match="last batch of the train data set has 1 rows of each unit, not micro_batch"),
        pytest.warns(UserWarning, match="last batch of the val data set has 1 rows"),
    ):
        has = trained(lambda: {**options, "dataloader": {}})
    wanted = plain(1, rows=31)
    net = Net()
    net.load_state_dict(wanted[1])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))[:8]  # the sampler's
    batches = [{name: value[rows] for name, value in vars(Rows(9, 1)).items()} for rows in order.view(4, 2)]
    losses = [float(net(batch)[0].detach()) for batch in batches]
    wanted[0].val = [has[0].val[0], sum(losses) / 4]
    assert_same(has, wanted)
    options["dataset"] = {"type": Rows, "train_args": {"size": 1}}
    with pytest.raises(ValueError, match="the data set of training has no batch: it needs micro_batch_size rows"):
        trained(lambda: {**options, "dataloader": {}})


MIXED = {"type": "nnscaler.runtime.f16_optimizer.MixedPrecisionAdam", "args": {"lr": 1e-3}}


def test_fp32_copies_of_bf16_weights(tmp_path: Path) -> None:
    """Two units, with and without ZeRO, the second half from the other checkpoint: bit-equal to one process."""
    net = Net().bfloat16()
    copies = [nn.Parameter(parameter.detach().float()) for parameter in net.parameters()]
    adam, losses = torch.optim.Adam(copies, lr=1e-3), []
    samplers = [DistributedSampler(Rows(16), 2, unit, shuffle=False) for unit in range(2)]
    for step in range(4):
        gradients: list[list[torch.Tensor]] = []
        for sampler in samplers:
            for batch in [*DataLoader(Rows(16), 2, sampler=sampler)][step % 2 * 2 :][:2]:
                loss = net({name: value.bfloat16() for name, value in batch.items()})[0]
                loss.backward()
                losses.append(float(loss.detach()))
            gradients.append([parameter.grad for parameter in net.parameters()])  # type: ignore[misc]
            net.zero_grad()
        for copy, *of_units in zip(copies, *gradients):
            copy.grad = sum(of_units).float() / 4  # type: ignore[union-attr]
        adam.step()
        for copy, parameter in zip(copies, net.parameters()):
            parameter.data.copy_(copy.data)

    def options(zero: bool, steps: int) -> dict[str, Any]:
        checkpoint = saved(tmp_path, resume_from="last")
        made = arguments(
            tmp_path / str(zero), 1, 2, use_zero=zero, precision="bf16", checkpoint=checkpoint, max_train_steps=steps
        )
        made["dataset"] = {"type": Rows, "train_args": {"size": 16}}
        made["dataset_sampler"] = {"train_args": {"shuffle": False}}
        return {**made, "optimizer": MIXED, "lr_scheduler": None}

    with pytest.warns(UserWarning, match="training begins anew"):
        run = trained(lambda: options(False, 2))[0]
    then, weights = trained(lambda: options(True, 4))
    assert run.train + then.train == [sum(losses[step : step + 4]) / 4 for step in range(0, 16, 4)]
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    assert any(not torch.equal(copy, parameter) for copy, parameter in zip(copies, net.parameters()))


def counted(outputs: list[Any], group: Any) -> AggregatedOutputs:
    assert group.size == 2
    return AggregatedOutputs.aggregate(outputs, group, lambda output: output[0], lambda output: output[1])


@pytest.mark.parametrize("reduction, per_batch", [("sum", 0), ("mean", 1), ("per-token-mean", 2)])
def test_reductions(reduction: str, per_batch: int, tmp_path: Path) -> None:
    """`Net` counts two tokens in each microbatch."""
    reductions = dict(grad_reduction=reduction, loss_reduction=reduction, aggregate_outputs_fn=counted)
    run, weights = trained(lambda: arguments(tmp_path, 1, 2, reductions=reductions, max_epochs=1))
    wanted = plain(2, epochs=1, divide=lambda batches: batches * per_batch or 1)
    batches = [4, 4, 4, 2]
    wanted[0].train = [loss * n / (n * per_batch or 1) for loss, n in zip(wanted[0].train, batches, strict=True)]
    assert_same((run, weights), wanted)


def test_sums_over_the_units() -> None:
    def rank() -> AggregatedOutputs:
        outputs = [(torch.tensor(loss + comm.rank("dp")), 3) for loss in (1.0, 5.0)]
        return AggregatedOutputs.aggregate(outputs, ntokens_fn=lambda output: output[1])

    assert threads.run(Mesh(2), rank) == [AggregatedOutputs(14.0, 4, 12)] * 2


class Scheduled(Net, TrainHook):
    """A model and an optimizer that are hooks."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        Scheduled.seen.append(("model", self is trainer.model, self.layers[0].weight is not None))

    seen: ClassVar[list[Any]] = []


class Stepped(torch.optim.SGD, TrainHook):
    def after_optimizer_step(self, trainer: Trainer) -> None:
        Scheduled.seen.append(("optimizer", self.param_groups[0]["lr"]))


@pytest.mark.parametrize("zero", [False, True])
def test_models_and_optimizers_are_hooks(zero: bool, tmp_path: Path) -> None:
    """A parallel model is no object of the model's class, and ZeRO wraps the optimizer."""
    Scheduled.seen.clear()
    options = arguments(tmp_path, use_zero=zero, model={"type": Scheduled}, max_train_steps=1, lr_scheduler=None)
    hook = {"on_epoch_end": lambda trainer, epoch: Scheduled.seen.append("configured")}
    options |= {"optimizer": {"type": Stepped, "args": {"lr": 0.5}}, "hook": hook}
    threads.run(Mesh(1), lambda: Trainer(train_args=options).run())
    assert Scheduled.seen == [("optimizer", 0.5), ("model", True, True), "configured"]


def test_a_hook_may_be_an_object(tmp_path: Path) -> None:
    hook = Stepped([torch.zeros(1, requires_grad=True)], 0.1)
    assert TrainerArgs.from_dict(arguments(tmp_path, hook=hook)).create_hook() is hook
    for wrong in ("module.Hook", Stepped):
        with pytest.raises(ValueError, match="neither a TrainHook object nor a dict"):
            TrainerArgs.from_dict(arguments(tmp_path, hook=wrong))


def test_a_checkpoint_may_have_a_number_as_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume_from: 20240 does not exist"):
        TrainerArgs.from_dict(arguments(tmp_path, checkpoint={"resume_from": "20240"}))


def linear_arguments(args: TrainerArgs) -> dict[str, torch.Tensor]:
    return {"input": torch.zeros(args.micro_batch_size, WIDTH, dtype=torch.float64)}


def test_a_model_with_parallel_submodules(tmp_path: Path) -> None:
    """The layers of a model that is not divided, each with its weights, from one set of files."""
    part = {"type": nn.Linear, "forward_args_gen_fn": linear_arguments, "compute_config": {"use_zero": False}}
    options = {"model": {"type": Net, "parallel_modules": [part]}}
    assert_same(trained(partial(arguments, tmp_path, 2, 2, "tp", **options)), plain(2))


# Checkpoints.


def saved(folder: Path, **options: Any) -> dict[str, Any]:
    return {"save_dir": str(folder / "checkpoints"), **options}


@pytest.mark.parametrize("save_type", ["sharded", "deduped"])
def test_training_goes_on_in_another_layout(save_type: str, tmp_path: Path) -> None:
    """Training stops within an epoch, between two steps of the scheduler; the whole run is the plain loop's."""
    first = saved(tmp_path, save_type=save_type, every_n_train_steps=2, keep_last_n_checkpoints=1)
    options: dict[str, Any] = {"optimizer": "adam", "use_zero": True}
    before = trained(lambda: arguments(tmp_path, 2, 2, "tp", checkpoint=first, max_train_steps=6, **options))[0]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "0000-0002",
        "0001-0006",
        "best",
        "last",
    ]  # the best stays
    wanted = plain(2, "adam", epochs=3)
    layouts = [(2, 2, "tp", 1, None), (1, 2, "dp", 1, None), (2, 2, "pp", 2, None), (2, 2, "tp", 1, True)]
    for plan, units, policy, stages, merge in layouts:
        resume = {"resume_from": {"checkpoint": "last", "with_merged": merge}}
        later = {**options, "checkpoint": {**first, **resume, "no_save": True}, "max_epochs": 3}
        run, weights = trained(partial(arguments, tmp_path, plan, units, policy, **later), stages)
        run.train, run.norms = before.train + run.train, before.norms + run.norms
        run.val = wanted[0].val[:2] + run.val[-1:]
        assert_same((run, weights), wanted)


def test_files_of_an_earlier_run_on_more_ranks_and_of_other_steps(tmp_path: Path) -> None:
    """A run on two ranks goes on from one on four; files of two steps, as after a killed run, are refused."""
    options: dict[str, Any] = {"checkpoint": saved(tmp_path, resume_from="last", every_n_train_steps=2)}
    trained(lambda: arguments(tmp_path / "four", 2, 2, "tp", **options, max_train_steps=2))
    for steps in (4, 6):
        run = trained(partial(arguments, tmp_path, 2, 1, "tp", **options, max_train_steps=steps))[0]
        assert len(run.train) == 2
    file = tmp_path / "checkpoints/last/1.ckpt"
    file.unlink()
    file.symlink_to("../0000-0004/1.ckpt")
    with pytest.raises(Exception, match="last has files of different steps"):
        trained(lambda: arguments(tmp_path, 2, 1, "tp", **options, max_train_steps=8))


class Dropped(Net):
    """Whole values that draw random numbers, of a stream that the ranks of a unit share."""

    def forward(self, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return super().forward({**data, "x": nn.functional.dropout(data["x"], 0.3, self.training)})


def shuffled(dataset: Any, sampler: Any, **options: Any) -> DataLoader[Any]:
    """A loader whose order is drawn from torch's generator."""
    return DataLoader(dataset, shuffle=True, **options)


def test_training_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    """A run that stops within an epoch, after an additional validation, and goes on is bit-equal to one run."""
    options: dict[str, Any] = {"model": {"type": Dropped}, "val_every_n_train_steps": 4}
    options["dataloader"] = {"type": shuffled, "train_args": {"drop_last": True}}
    whole, weights = trained(lambda: arguments(tmp_path, 2, 1, "tp", **options))
    options["checkpoint"] = saved(tmp_path, resume_from="last")
    with pytest.warns(UserWarning, match="training begins anew"):
        first, _ = trained(lambda: arguments(tmp_path, 2, 1, "tp", **options, max_train_steps=11))
    then, weights_then = trained(lambda: arguments(tmp_path, 2, 1, "tp", **options))
    assert first.train + then.train == whole.train and len(first.train) == 11
    assert all(torch.equal(weights_then[name], value) for name, value in weights.items())


class Positioned(DataLoader[Any]):
    """A loader that goes on from its position, and the numbers of the batches that were read."""

    read: ClassVar[list[int]] = []
    start = 0

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.start:
                self.read.append(number)
                self.position = number + 1
                yield batch
        self.start = self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def test_a_loader_with_a_position_and_logs(tmp_path: Path) -> None:
    """One rank, two steps and then two more: no batch is read twice, and the curves are in the folder."""

    def train(steps: int) -> None:
        log = [{"type": "TensorBoardLogger", "args": {"name": "mine", "root_dir": str(tmp_path)}}]
        options = arguments(tmp_path, checkpoint=saved(tmp_path, resume_from="last"), max_train_steps=steps, log=log)
        options["dataloader"] = {"type": Positioned, "train_args": {"drop_last": True}}
        options["dataset"] = {"type": Rows, "train_args": {"size": ROWS}}
        Trainer(train_args=options).run()

    with pytest.warns(UserWarning, match="has no checkpoint 'last': training begins anew"):
        threads.run(Mesh(1), lambda: train(2))
    threads.run(Mesh(1), lambda: train(4))
    assert Positioned.read == [0, 0, 1, 2, 3, 0, 4, 5, 6, 7]  # a first one is recorded
    assert [path.name for path in (tmp_path / "mine/train").iterdir()]
    assert json.loads((tmp_path / "mine/config.json").read_text())["max_train_steps"] == 4


def test_merged_files_and_hooks_of_checkpoints(tmp_path: Path) -> None:
    """A merged file is one of the original model; what a hook saves comes back, by rank."""
    loaded: list[Any] = []

    def rank(**checkpoint: Any) -> None:
        hook = {
            "on_save_checkpoint": lambda trainer, content: content.update(mine=trainer.rank),
            "on_load_checkpoint": lambda trainer, content: loaded.append(content["mine"]),
        }
        options = arguments(tmp_path, 2, 1, "tp", checkpoint=saved(tmp_path, **checkpoint), max_train_steps=3)
        Trainer(train_args={**options, "hook": hook}).run()

    mesh = ComputeConfig(2, 2).mesh()
    threads.run(mesh, rank)
    folder = tmp_path / "checkpoints"
    Trainer.merge_checkpoint([folder / "last/0.ckpt", folder / "last/1.ckpt"], tmp_path / "merged.ckpt")
    merged = torch.load(tmp_path / "merged.ckpt")
    Net().load_state_dict(merged["model"])
    assert merged["train_status"]["finished_train_steps"] == 3 and merged["mine"] == [0, 1]
    threads.run(mesh, lambda: rank(resume_from=str(tmp_path / "merged.ckpt")))
    threads.run(mesh, lambda: rank(resume_from="best", save_best=False))
    assert sorted(loaded, key=str) == [0, 1, [0, 1], [0, 1]]
    (folder / "last/0.ckpt").unlink()
    with pytest.raises(Exception, match=r"last has the files of ranks \[1\]"):
        threads.run(mesh, lambda: rank(resume_from="last"))
