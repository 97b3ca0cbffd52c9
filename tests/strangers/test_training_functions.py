"""torch's own clipping and optimizers, and state dicts of other ranks, on models that are spread over ranks."""

from __future__ import annotations

import io
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.checkpointing import get_sharded_model_dict
from tests.strangers.toy import BATCH, HIDDEN, Net, batch, local_batch, trained_alone, whole_weights


def on_threads(mesh: Mesh, function: Any, *args: Any) -> list[Any]:
    return comm.threads.run(mesh, lambda: function(*args))


def clipped(zero1: bool = False) -> str:
    model = Net()
    model(**local_batch(0)).backward()
    nxd.reduce_gradients(model, average_over_data=not zero1)
    grads = [param.grad.clone() for param in model.parameters()]
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    except RuntimeError as error:
        assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), grads))
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", [Mesh(2, tp=2), Mesh(4, tp=4), Mesh(4, tp=2)], ids=str)
def test_clipping_of_shards_is_refused(mesh):
    for message in on_threads(mesh, clipped):
        assert re.search(
            rf"gradients are shards, of {mesh.tp};.*call neuronx_dist.clip_grad_norm\(parameters, max_norm\)", message
        ), message


def test_clipping_before_zero1_is_refused():
    for message in on_threads(Mesh(2), clipped, True):
        assert "not averaged over the 2 data-parallel ranks" in message
        assert "pass max_norm to NeuronZero1Optimizer" in message


def test_clipping_of_whole_gradients_is_torchs():
    assert on_threads(Mesh(2), clipped) == ["", ""]


def _error(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


class Stages(nn.Module):
    """Layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def stage(**options: Any) -> Any:
    model = nxd.NxDPPModel(
        Stages(),
        transformer_layer_cls=nn.Linear,
        num_microbatches=2,
        auto_partition=True,
        input_names=["x"],
        output_loss_value_spec=True,
        **options,
    )
    torch.manual_seed(comm.rank("dp"))
    model.run_train(x=torch.randn(BATCH, HIDDEN, dtype=torch.float64))
    return model


def test_clipping_of_a_stage_is_refused():
    def clip() -> str:
        model = stage()
        return _error(lambda: torch.nn.utils.clip_grad_norm_(model.local_parameters(), 0.1))

    for message in on_threads(Mesh(2, pp=2), clip):
        assert "the model has 2 pipeline stages" in message


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(4, pp=2)], ids=str)
def test_a_plain_optimizer_in_place_of_zero1_is_refused(mesh):
    def step(zero1: bool) -> str:
        model = stage(use_zero1_optimizer=zero1)
        before = [param.clone() for param in model.local_parameters()]
        optimizer = torch.optim.SGD(model.local_parameters(), lr=0.1)
        message = _error(optimizer.step)
        assert message == "" or all(map(torch.equal, before, model.local_parameters()))
        return message

    for message in on_threads(mesh, step, True):
        assert "SGD.step: the gradients are not averaged over the 2 data-parallel ranks" in message
        assert "use NeuronZero1Optimizer" in message
    assert {*on_threads(mesh, step, False)} == {""}


def test_a_plain_optimizer_without_the_sum_over_tp_warns_once():
    """Warns of the gradient of a sequence-parallel norm: not at tp 1, nor after a reduction and scaling in place."""

    def steps(reduces: bool) -> None:
        norm = nxd.parallel_layers.LayerNorm(4, sequence_parallel_enabled=True)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
        for _ in range(2):
            norm(torch.ones(2, 4)).sum().backward()
            if reduces:
                nxd.reduce_gradients(norm)
                norm.weight.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    for mesh, reduces, count in ((Mesh(2, tp=2), True, 0), (Mesh(2), False, 0), (Mesh(2, tp=2), False, 2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            on_threads(mesh, steps, reduces)
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == count
        for message in messages:
            assert "SGD.step: the gradient of parameter 0 (4,) is of this rank's part" in message
            assert "over the 2 tp ranks" in message and "reduce_gradients(model) after backward" in message


def test_the_step_after_a_mean_of_the_scripts_own_is_taken():
    """The script averages gradients itself."""
    losses, weights = trained_alone()

    def train() -> tuple[list[float], dict[str, torch.Tensor]]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(3):
            loss = model(**local_batch(step))
            loss.backward()
            nxd.reduce_gradients(model, average_over_data=False)
            for param in model.parameters():
                param.grad = comm.all_reduce(param.grad, "dp") / comm.size("dp")
            optimizer.step()
            optimizer.zero_grad()
            losses.append(comm.all_reduce(loss.detach(), "dp").item() / comm.size("dp"))
        return losses, whole_weights(model)

    for local_losses, local_weights in on_threads(Mesh(4, tp=2), train):
        assert local_losses == pytest.approx(losses, rel=1e-12)
        for name, weight in local_weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-10, atol=1e-12)


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
}


def trained(make_optimizer: Any, parts: bool) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = make_optimizer(model.parameters())
    for step in range(3):
        model(**(local_batch(step) if parts else batch(step))).backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elementwise_optimizers_train_shards(name):
    with comm.as_rank(Mesh(1), 0):
        reference = trained(OPTIMIZERS[name], parts=False)
    for weights in on_threads(Mesh(4, tp=2), trained, OPTIMIZERS[name], True):
        for key, weight in weights.items():
            torch.testing.assert_close(weight, reference[key], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LBFGS"])
def test_other_optimizers_refuse_shards(name):
    def step() -> str:
        model = Net()
        params = [param for param in model.parameters() if param.ndim == 2]
        optimizer = getattr(torch.optim, name)(params, lr=0.1)
        model(**batch(0)).backward()
        before = [param.clone() for param in params]
        message = _error(lambda: optimizer.step(*([lambda: model(**batch(0))] if name == "LBFGS" else [])))
        assert all(map(torch.equal, before, params)) or not message
        return message

    for message in on_threads(Mesh(2, tp=2), step):
        assert f"{name} cannot work on shards of parameters: it " in message and "SGD, Adam, AdamW" in message
    with comm.as_rank(Mesh(1), 0):
        assert step() == ""


def scaled(with_zero1: bool, infinite: str) -> dict[str, torch.Tensor]:
    """Weights after three steps with `torch.amp.GradScaler`, in whose second step one rank has an infinite gradient."""
    model = Net()
    options = {"lr": 0.5, "grad_clipping": False}
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    if with_zero1:
        optimizer = nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        scaler.scale(model(**local_batch(step))).backward()
        if step == 1 and comm.rank(infinite) == comm.size(infinite) - 1:
            model.head.weight.grad[0, 0] = float("inf")
        nxd.reduce_gradients(model, average_over_data=not with_zero1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0
    return whole_weights(model)


@pytest.mark.each_pair
@pytest.mark.parametrize("mesh", [Mesh(2, tp=2), Mesh(2), Mesh(4, tp=2)], ids=str)
@pytest.mark.parametrize("with_zero1", [False, True])
@pytest.mark.parametrize("infinite", ["tp", "dp"])
def test_a_gradient_scaler_leaves_steps_out_on_all_ranks(mesh, with_zero1, infinite):
    with comm.as_rank(Mesh(1), 0):
        reference = scaled(False, infinite)
    for weights in on_threads(mesh, scaled, with_zero1, infinite):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, reference[name], rtol=1e-10, atol=1e-12)


def saved(model: nn.Module, by_file: bool) -> Any:
    if not by_file:
        return model.state_dict()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("by_file", [False, True])
def test_a_state_dict_of_another_rank_is_refused(by_file):
    first = on_threads(Mesh(2, tp=2), lambda: saved(Net(), by_file))[0]

    def load() -> str:
        model = Net()
        before = [param.clone() for param in model.parameters()]
        message = _error(lambda: model.load_state_dict(first))
        assert all(map(torch.equal, before, model.parameters()))
        return message

    messages = on_threads(Mesh(2, tp=2), load)
    assert messages[0] == ""
    assert "embed.weight of the state dict is shard 0 of 2, and rank 1 holds shard 1 of 2" in messages[1]


def test_weights_of_the_whole_model_are_refused_and_loaded_by_what_the_error_names():
    with comm.as_rank(Mesh(1), 0):
        whole = Net().state_dict()

    def load() -> tuple[str, bool]:
        model = Net()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        message = _error(lambda: model.load_state_dict(whole))
        model.load_state_dict(get_sharded_model_dict(model, whole))
        return message, all(torch.equal(weight, whole[name]) for name, weight in whole_weights(model).items())

    for message, equal in on_threads(Mesh(2, tp=2), load):
        assert "embed.weight of the state dict has shape [32, 16], and this rank holds a shard of" in message
        assert "hf.load_pretrained(model, state_dict) or model.load_state_dict(get_sharded_model_dict(" in message
        assert equal


@pytest.mark.parametrize("by_file", [False, True])
def test_a_rank_loads_its_state_dict(by_file):
    def load() -> bool:
        source, target = Net(), Net()
        with torch.no_grad():
            for param in source.parameters():
                param.add_(1 + comm.rank("tp"))
        target.load_state_dict(saved(source, by_file))
        return all(map(torch.equal, source.parameters(), target.parameters()))

    assert on_threads(Mesh(4, tp=2), load) == [True] * 4
    with comm.as_rank(Mesh(1), 0):
        assert load()
