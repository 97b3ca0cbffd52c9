"""NxD's trainer: training by it equals one process on all kinds of layouts; its options, defaults and errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, trainer
from neuronx_dist.gradients.accumulation import adding_to_reduced
from neuronx_dist.gradients.reduce import complete_reduction
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.lora import LoraConfig
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.support.synthetic import relative_error
from tests.trainer.nxd_model import BATCH, Block, LanguageModel, Options, check, config_of

LAYOUTS = [
    (Mesh(1), Options()),
    (Mesh(2, tp=2), Options(sequence_parallel=True)),
    (Mesh(4, tp=4), Options(optimizer="adamw")),
    (Mesh(4, tp=2), Options(sequence_parallel=True, checkpoint=Block)),
    (Mesh(4), Options(zero1=True, optimizer="adamw")),
    (Mesh(4, tp=2), Options(zero1=True, sequence_parallel=True)),
    (Mesh(2, pp=2), Options(checkpoint="full")),
    (Mesh(4, pp=2), Options(zero1=True)),
    (Mesh(4, pp=2), Options(optimizer="adamw", meta=True)),
    (Mesh(4, tp=2, pp=2), Options(sequence_parallel=True, zero1=True, meta=True)),
    (Mesh(2, tp=2), Options(meta=True)),
    (Mesh(4, tp=2), Options(zero1=True, sequence_parallel=True, optimizer="muon")),
    (Mesh(4, tp=2, pp=2), Options(zero1=True, meta=True, optimizer="muon")),
]


@pytest.mark.parametrize(("mesh", "options"), LAYOUTS, ids=str)
@pytest.mark.slow
def test_training_is_that_of_one_process(mesh: Mesh, options: Options) -> None:
    check(mesh, options)


@pytest.mark.parametrize("average", [True, False])
def test_a_reduction_that_is_left_out_is_seen(average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mean over the data, and without the sum over tp."""
    original = complete_reduction

    def left_out(params: Any, average_over_data: bool = True) -> None:
        if not average:
            params = [param for param in params if not spec_of(param).sequence_parallel]
            original(params, average_over_data)

    monkeypatch.setattr("neuronx_dist.trainer.optimizer.complete_reduction", left_out)
    with pytest.raises((AssertionError, RuntimeError)):
        check(Mesh(4, tp=2), Options(sequence_parallel=True))


@pytest.mark.parametrize("zero1", [False, True])
def test_a_parameter_that_one_rank_does_not_use_counts_as_zero_there(zero1: bool) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

        def forward(self) -> torch.Tensor:
            return self.a.sum() if comm.rank("dp") == 0 else 10 * self.b.sum()

    def main() -> tuple[float, float]:
        config = trainer.neuronx_distributed_config(
            optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False}
        )
        model = trainer.initialize_parallel_model(config, Either)
        optimizer = trainer.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=1.0)
        model.run_train()
        optimizer.step()
        return float(model.a[0].detach()), float(model.b[0].detach())

    assert comm.threads.run(Mesh(2), main) == [(-0.5, -5.0)] * 2


def test_two_steps_of_one_backward_are_refused() -> None:
    def main() -> None:
        config = config_of(Mesh(2), Options())
        model = trainer.initialize_parallel_model(config, LanguageModel)
        optimizer = trainer.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=1.0)
        ids = torch.zeros(4, 8, dtype=torch.long)
        model.run_train(input_ids=ids, labels=ids)
        optimizer.step()
        with pytest.raises(RuntimeError, match="stepped on, already: call zero_grad"):
            optimizer.step()

    comm.threads.run(Mesh(2), main)


def test_defaults_are_those_of_nxd() -> None:
    config = trainer.neuronx_distributed_config()
    assert config["optimizer_config"] == {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
    assert config["model_init_config"] == {
        "sequential_move_factor": 11,
        "meta_device_init": False,
        "param_init_fn": None,
    }
    off = {"use_master_weights": False, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": False}
    assert config["mixed_precision_config"] == off
    zero1 = trainer.neuronx_distributed_config(optimizer_config={"zero_one_enabled": True})
    assert zero1["mixed_precision_config"] == {**off, "use_master_weights": True, "use_fp32_grad_acc": True}
    assert zero1["optimizer_config"]["max_grad_norm"] == 1.0


def test_the_sections_of_the_caller_are_not_changed() -> None:
    section = {"zero_one_enabled": True}
    trainer.neuronx_distributed_config(optimizer_config=section)
    assert section == {"zero_one_enabled": True}


def test_gradients_are_zeros_after_zero_grad() -> None:
    """Zeros are upstream's default; torch's is None."""

    def main() -> None:
        config = config_of(Mesh(1), Options())
        model = trainer.initialize_parallel_model(config, LanguageModel)
        optimizer = trainer.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=1.0)
        ids = torch.zeros(4, 8, dtype=torch.long)
        for options, is_none in (({}, False), ({"set_to_none": True}, True)):
            model.run_train(input_ids=ids, labels=ids)
            optimizer.step()
            optimizer.zero_grad(**options)
            grads = [param.grad for param in model.parameters()]
            assert all(grad is None if is_none else not grad.any() for grad in grads)

    comm.threads.run(Mesh(1), main)


class TiedModel(LanguageModel):
    """A model whose head has the weight of its embedding."""

    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__(sequence_parallel)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(4, tp=2, pp=2), Mesh(4, pp=2), Mesh(2, tp=2)], ids=str)
@pytest.mark.slow
def test_several_batches_of_a_step_add_up(mesh: Mesh, zero1: bool) -> None:
    """With sequence parallelism and a tied weight, whose gradients each `run_train` of a pipeline sums over ranks."""
    batches = BATCH[:2]

    def train(options: Options) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = config_of(comm.current().mesh, options)
        model = trainer.initialize_parallel_model(config, TiedModel, False, options.sequence_parallel)
        optimizer = trainer.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.01)
        for _ in range(2):
            for ids in batches:
                mine = ids.chunk(comm.size("dp"))[comm.rank("dp")]
                model.run_train(input_ids=mine, labels=mine.roll(-1, 1))
            optimizer.step()
            optimizer.zero_grad()
        return {name: gather_full(param, spec_of(param)) for name, param in model.named_parameters()}

    (expected,) = comm.threads.run(Mesh(1), train, Options())
    options = Options(zero1=zero1, sequence_parallel=mesh.tp > 1)
    seen = {}
    for weights in comm.threads.run(mesh, train, options):
        seen |= weights
    for name, weight in seen.items():
        assert relative_error(weight, expected[name.replace("head", "embed")]) < 1e-10, name


def test_an_optimizer_is_copied_with_its_model() -> None:
    def main() -> None:
        config = config_of(Mesh(1), Options())
        model = trainer.initialize_parallel_model(config, LanguageModel)
        optimizer = trainer.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)
        ids = torch.zeros(4, 8, dtype=torch.long)
        model.run_train(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
        other, its = copy.deepcopy((model, optimizer))
        loaded = pickle.loads(pickle.dumps(optimizer))
        assert loaded.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
        assert isinstance(its, trainer.NxDOptimizer) and its.param_groups[0]["params"][0] is next(other.parameters())
        losses = []
        for trained, steps in ((model, optimizer), (other, its)):
            trained.run_train(input_ids=ids, labels=ids)
            steps.step()
            steps.zero_grad()
            losses.append(trained.run_train(input_ids=ids, labels=ids))
        assert torch.equal(*losses)

    comm.threads.run(Mesh(1), main)


def test_a_typo_in_an_argument_is_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="no option 'tensor_paralel_size'; nearest: tensor_parallel_size"):
        trainer.neuronx_distributed_config(tensor_paralel_size=2)


BAD = {
    "unknown option": (dict(optimizer_config={"zero_1_enabled": True}), ValueError, "nearest: zero_one_enabled"),
    "no dict": (dict(mixed_precision_config=True), TypeError, "mixed_precision_config is a dict of use_master_weights"),
    "pipeline": (dict(pipeline_config={"num_micro_batches": 4}), ValueError, "nearest: num_microbatches"),
    "no boolean": (dict(optimizer_config={"zero_one_enabled": "False"}), TypeError, "is True or False, got 'False'"),
    "no init": (dict(model_init_config={"meta_device_init": True}), ValueError, "needs a param_init_fn"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_section_is_refused(case: str) -> None:
    sections, error, message = BAD[case]
    with pytest.raises(error, match=message):
        trainer.neuronx_distributed_config(**sections)


def _model(mesh: Mesh, **changes: Any) -> nxd.NxDModel:
    return trainer.initialize_parallel_model(config_of(mesh, Options(), **changes), LanguageModel)


REFUSED = {
    "padding in a pipeline": (Mesh(2, pp=2), dict(pad_model=True), ValueError, "pad in model_fn"),
    "padding without heads": (Mesh(1), dict(pad_model=True), ValueError, "no config.num_attention_heads"),
    "no known layers": (
        Mesh(1),
        dict(activation_checkpoint_config="full"),
        ValueError,
        "pass their class as activation",
    ),
    "unknown layers": (Mesh(1), dict(activation_checkpoint_config="Blok"), ValueError, "no layer 'Blok'; nearest"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_a_configuration_does_not_fit_is_refused(case: str) -> None:
    mesh, changes, error, message = REFUSED[case]

    def rank_main() -> None:
        config = {**config_of(mesh, Options()), **changes}
        with pytest.raises(error, match=message):
            trainer.initialize_parallel_model(config, LanguageModel)

    comm.threads.run(mesh, rank_main)


def test_a_pipeline_needs_its_config() -> None:
    def rank_main() -> None:
        config = {**config_of(Mesh(2, pp=2), Options()), "pipeline_config": None}
        with pytest.raises(ValueError, match="pipeline_parallel_size=2 needs a pipeline_config"):
            trainer.initialize_parallel_model(config, LanguageModel)

    comm.threads.run(Mesh(2, pp=2), rank_main)


def test_parameters_that_param_init_fn_leaves_are_reported() -> None:
    def main() -> None:
        section = {"meta_device_init": True, "param_init_fn": lambda module, device: None}
        config = trainer.neuronx_distributed_config(model_init_config=section)
        with pytest.warns(UserWarning, match="gave 18 parameters no value, such as embed.weight: they are NaN until"):
            trainer.initialize_parallel_model(config, LanguageModel)

    comm.threads.run(Mesh(1), main)


def test_master_weights_need_zero1() -> None:
    def rank_main() -> None:
        config = config_of(Mesh(1), Options(), mixed_precision_config={"use_master_weights": True})
        model = trainer.initialize_parallel_model(config, LanguageModel)
        with pytest.raises(RuntimeError, match="use_master_weights need ZeRO-1"):
            trainer.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters())

    comm.threads.run(Mesh(1), rank_main)


def test_a_closure_is_refused_where_its_gradients_would_not_be_reduced() -> None:
    def rank_main() -> None:
        config = config_of(Mesh(1), Options())
        model = trainer.initialize_parallel_model(config, LanguageModel)
        optimizer = trainer.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters())
        with pytest.raises(ValueError, match="by run_train before step"):
            optimizer.step(lambda: None)

    comm.threads.run(Mesh(1), rank_main)


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2, pp=2)], ids=str)
def test_names_are_those_of_the_model_inside(mesh: Mesh) -> None:
    def rank_main() -> set[str]:
        model = _model(mesh)
        assert isinstance(model.original_module(), LanguageModel)
        assert model.pp_enabled == (mesh.pp > 1)
        assert all(name.partition(".")[0] in ("embed", "blocks", "head") for name in model.state_dict())
        assert dict(model.named_parameters()).keys() == model.state_dict().keys()
        assert [*model.parameters()] and len(model.local_modules()) > 0
        assert model.dtype == torch.float64
        ids = torch.zeros(4, 8, dtype=torch.long)
        loss = model.run_eval(input_ids=ids, labels=ids)
        assert loss is None or (loss if mesh.pp > 1 else loss[0]).numel() == 1
        assert all(param.grad is None for param in model.parameters())
        return set(model.state_dict())

    names = set().union(*comm.threads.run(mesh, rank_main))
    with comm.as_rank(Mesh(1), 0):
        assert names == set(LanguageModel().state_dict())


def test_modes_and_conversions_reach_the_model_inside() -> None:
    with comm.as_rank(Mesh(1), 0):
        model = trainer.initialize_parallel_model(trainer.neuronx_distributed_config(), Result)
        assert model.eval() is model and not model.module.training and not model.training
        assert model.train().module.training
        assert model.to(torch.float64) is model and model.module.weight.dtype == torch.float64
        seen: list[nn.Module] = []
        model.apply(seen.append)
        assert seen == [model.module]


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2, pp=2)], ids=str)
def test_the_mode_is_that_of_the_layers(mesh: Mesh) -> None:
    """Lightning sets modes back by `named_modules`, which are those of the model inside."""

    def main() -> None:
        model = trainer.initialize_parallel_model(config_of(mesh, Options()), LanguageModel)
        assert model.training
        layers = dict(model.named_modules())
        assert model.eval() is model and not model.training and not any(layer.training for layer in layers.values())
        for layer in layers.values():
            layer.training = True
        assert model.training
        model.training = False
        assert not model.training

    comm.threads.run(mesh, main)


def test_a_failed_run_leaves_the_gradients_of_those_before() -> None:
    mesh = Mesh(2, pp=2)

    def main() -> None:
        model = trainer.initialize_parallel_model(config_of(mesh, Options()), LanguageModel)
        model.run_train(input_ids=BATCH[0], labels=BATCH[0])
        before = {name: param.grad.clone() for name, param in model.named_parameters()}
        assert any(grad.any() for grad in before.values())
        with pytest.raises(KeyboardInterrupt), adding_to_reduced(model.module):
            assert any(param.grad is None for param in model.parameters())
            raise KeyboardInterrupt
        for name, param in model.named_parameters():
            assert param.grad is not None and param.grad.equal(before[name]), name

    comm.threads.run(mesh, main)


class Result(nn.Module):
    """Returns its loss in the form that a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, form: str) -> Any:
        loss = self.weight * 2
        return {"tensor": loss, "tuple": (loss, 1), "dict": {"loss": loss}, "nothing": {"logits": loss}}[form]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_the_loss_is_found_in_a_result(form: str) -> None:
    with comm.as_rank(Mesh(1), 0):
        model = trainer.initialize_parallel_model(trainer.neuronx_distributed_config(), Result)
        assert float(model.run_train(form).detach()) == 2.0
        assert float(model.module.weight.grad) == 2.0


def test_a_result_without_a_loss_is_refused() -> None:
    with comm.as_rank(Mesh(1), 0):
        model = trainer.initialize_parallel_model(trainer.neuronx_distributed_config(), Result)
        with pytest.raises(TypeError, match="must return the loss.*got a dict"):
            model.run_train("nothing")


@pytest.mark.slow
def test_a_checkpoint_continues_in_another_layout(tmp_path: Any) -> None:
    """A step, saved with ZeRO-1 on tp x dp; loaded into a pipeline, the next step is that of the run."""

    def run(mesh: Mesh, options: Options, load: bool) -> tuple[dict[str, torch.Tensor], Any]:
        torch.manual_seed(1 if load else 0)
        config = config_of(mesh, options)
        model = trainer.initialize_parallel_model(config, LanguageModel)
        optimizer = trainer.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.1)
        if load:
            content = nxd.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        else:
            ids = torch.arange(64).view(8, 8) % 24
            model.run_train(input_ids=ids, labels=ids)
            optimizer.step()
            nxd.save_checkpoint(tmp_path, "one", model, optimizer, user_content={"step": 1}, num_kept_ckpts=-1)
            content = {"step": 1}
        optimizer.zero_grad()
        ids = torch.arange(64).view(8, 8) % 23
        model.run_train(input_ids=ids, labels=ids)
        optimizer.step()
        return {name: _whole(param) for name, param in model.named_parameters()}, content

    saved = comm.threads.run(Mesh(4, tp=2), run, Mesh(4, tp=2), Options(zero1=True), False)[0][0]
    for weights, content in comm.threads.run(Mesh(2, pp=2), run, Mesh(2, pp=2), Options(), True):
        assert content == {"step": 1}
        for name, weight in weights.items():
            assert relative_error(weight, saved[name]) < 1e-10, name


def _whole(param: nn.Parameter) -> torch.Tensor:
    return gather_full(param, spec_of(param))


CHECKED = [(Mesh(4, tp=2), Options(sequence_parallel=True)), (Mesh(4, tp=2, pp=2), Options(zero1=True, meta=True))]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), CHECKED, ids=str)
@pytest.mark.parametrize("stepwise", [False, True])
def test_a_trained_model_is_checked(mesh: Mesh, options: Options, stepwise: bool) -> None:
    def model_fn() -> tuple[nxd.NxDModel, nxd.NxDOptimizer]:
        config = config_of(mesh, options)
        model = trainer.initialize_parallel_model(config, LanguageModel, False, options.sequence_parallel)
        return model, trainer.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=0.1)

    def step(model: nxd.NxDModel, optimizer: nxd.NxDOptimizer, inputs: dict[str, torch.Tensor]) -> None:
        model.run_train(**inputs)
        optimizer.step()
        optimizer.zero_grad()

    ids = torch.zeros(8, 8, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    report = nxd.spmd.check(model_fn, inputs, mesh, step=step if stepwise else None)
    assert report.ok, str(report)


def test_a_step_around_the_trainer_is_refused_by_the_check() -> None:
    """The optimizer inside steps on gradients that nobody has reduced."""
    mesh, options = CHECKED[0]

    def model_fn() -> tuple[nxd.NxDModel, nxd.NxDOptimizer]:
        config = config_of(mesh, options)
        model = trainer.initialize_parallel_model(config, LanguageModel, False, True)
        return model, trainer.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=0.1)

    def step(model: nxd.NxDModel, optimizer: nxd.NxDOptimizer, inputs: dict[str, torch.Tensor]) -> None:
        model.run_train(**inputs)
        optimizer.optimizer.step()

    ids = torch.zeros(8, 8, dtype=torch.long)
    report = nxd.spmd.check(model_fn, {"input_ids": ids, "labels": ids}, mesh, step=step)
    assert not report.ok
    assert "reduce_gradients" in str(report)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(2, tp=2), Mesh(4, tp=2, pp=2)], ids=str)
def test_adapters_are_put_into_the_model(mesh: Mesh, meta: bool) -> None:
    """Adapters are trained, and nothing else; a model that was built on meta begins as one that was not."""

    def main(mesh: Mesh) -> tuple[list[float | None], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        lora = LoraConfig(lora_rank=2, target_modules=["up", "down"])
        config = config_of(mesh, Options(meta=meta), lora_config=lora)
        model = trainer.initialize_parallel_model(config, LanguageModel)
        optimizer = trainer.initialize_parallel_optimizer(
            config, torch.optim.SGD, [param for param in model.parameters() if param.requires_grad], lr=0.5
        )
        before = {name: _whole(param).clone() for name, param in model.named_parameters()}
        ids = torch.arange(64).view(8, 8) % 24
        losses = []
        for _ in range(3):
            loss = model.run_train(input_ids=ids, labels=ids)
            losses.append(None if loss is None else loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, before, {name: _whole(param) for name, param in model.named_parameters()}

    losses, start, end = comm.threads.run(Mesh(1), main, Mesh(1))[0]
    assert any("lora_A" in name and "up" in name for name in start)
    assert all(bool(value.any()) == ("lora_B" not in name) for name, value in start.items() if "lora_" in name)
    for name in start:
        assert torch.equal(start[name], end[name]) != ("lora_" in name), name
    for found, before, after in comm.threads.run(mesh, main, mesh):
        assert found[0] is None or found == pytest.approx(losses, abs=1e-10)
        for name, value in before.items():
            assert torch.equal(value, start[name]), name
        for name, value in after.items():
            assert relative_error(value, end[name]) < 1e-10, name
