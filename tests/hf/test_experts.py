"""Models with experts over ep and tp beside transformers' own forward and backward in one process."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import (
    UnsupportedModelError,
    full_state_dict,
    load_pretrained,
    materialize,
    save_pretrained,
    swap,
    transformer_layer_class,
)
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.parallel_layers.grads import global_num_items, reduce_gradients
from neuronx_dist.pipeline import NxDPPModel
from tests.hf.every_plan import VOCAB, model_of
from tests.hf.models import error
from tests.hf.parity import AllInFloat64
from tests.support.more_architectures import OF_TRANSFORMERS

STEPS, SEQ = 5, 6
MODELS = [
    "MixtralConfig",
    "Qwen2MoeConfig",
    "Qwen3MoeConfig",
    "OlmoeConfig",
    "DeepseekV3Config",
    "gpt-oss",
    "Glm4MoeConfig",
    "Ernie4_5_MoeConfig",
    "MiniMaxConfig",
    "Qwen3NextConfig",
    "HunYuanMoEV1Config",
    "Llama4TextConfig",
]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four rows, of which each data rank has some: ids, labels and a mask, with other numbers of labels in each."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (4, SEQ), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :4] = labels[3, 5:] = -100
    mask[1, :2] = 0
    labels[1, :3] = -100
    return ids, labels, mask


def model(name: str, auxiliary: bool, implementation: str) -> Any:
    found = {architecture.name: architecture for architecture in OF_TRANSFORMERS}
    whole: Any = found[name].make(2 * len(found[name].layers)) if name in found else model_of(name)
    whole.config._experts_implementation = implementation
    if auxiliary:
        whole.config.output_router_logits, whole.router_aux_loss_coef = True, 0.5
    return whole


def compare(
    name: str,
    ep: int,
    tp: int,
    edp: int = 1,
    *,
    auxiliary: bool = False,
    implementation: str = "eager",
    recompute: bool = False,
    dtype: torch.dtype = torch.float64,
    ep_of_swap: int | None = None,
    **options: Any,
) -> None:
    """Losses, gradients and weights after steps of SGD."""
    whole = model(name, auxiliary, implementation).to(dtype)
    wide = AllInFloat64() if dtype is torch.float64 else nullcontext()
    if recompute:
        whole.gradient_checkpointing_enable({"use_reentrant": False})
    state = copy.deepcopy(whole)

    def step_of(model: Any, optimizer: Any, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ids, labels, mask = (part.chunk(comm.size("dp"))[comm.rank("dp")] for part in batch(step))
        inputs = {"attention_mask": mask} if auxiliary else {}
        items = global_num_items(labels, dtype=dtype)
        with wide:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=items, **inputs).loss
            loss.backward()
        reduce_gradients(model)
        gradients = full_state_dict(model, gradients=True)
        optimizer.step()
        optimizer.zero_grad()
        return comm.all_reduce(loss.detach(), "dp") / comm.size("dp"), gradients

    def train(model: Any) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        return [*(step_of(model, optimizer, step) for step in range(STEPS)), full_state_dict(model)]

    (*expected, weights) = threads.run(Mesh(1), lambda: train(whole))[0]

    def rank() -> None:
        (*steps, local) = train(swap(copy.deepcopy(state), ep=ep_of_swap, **options))
        for (loss, gradients), (loss_1, gradients_1) in zip(steps, expected):
            close(loss, loss_1, "loss")
            assert gradients.keys() == gradients_1.keys()
            for key in gradients_1:
                close(gradients[key], gradients_1[key], f"gradient of {key}")
        for key, value in weights.items():
            close(local[key], value, key)

    threads.run(Mesh(edp * ep * tp, tp=tp, ep=ep), rank, timeout=60.0)


def close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = min(error(actual, expected), (actual - expected).norm().item() / 1e-3)
    assert difference < (1e-10 if actual.dtype is torch.float64 else 1e-5), f"{what} is {difference:.1e} away"


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("ep, tp", [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_one_process(name: str, ep: int, tp: int) -> None:
    compare(name, ep, tp)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.slow
def test_other_implementations_of_experts(implementation: str) -> None:
    compare("MixtralConfig", 2, 1, implementation=implementation, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MixtralConfig", "Qwen3MoeConfig", "gpt-oss"])
@pytest.mark.parametrize("ep, tp, edp", [(1, 1, 2), (2, 2, 1), (2, 1, 2)])
def test_the_auxiliary_loss_counts_the_tokens_of_all_ranks(name: str, ep: int, tp: int, edp: int) -> None:
    compare(name, ep, tp, edp, auxiliary=True)


def test_all_experts_on_every_rank() -> None:
    compare("MixtralConfig", 2, 1, ep_of_swap=1)


@pytest.mark.slow
@pytest.mark.parametrize("name, ep", [("MixtralConfig", 2), ("Llama4TextConfig", 1)])
def test_sequence_parallel(name: str, ep: int) -> None:
    """Llama 4 returns the tokens of its experts as `[batch * seq, hidden]`, of several rows here."""
    compare(name, ep, 2, sequence_parallel=True)


def test_recomputed_layers() -> None:
    compare("MixtralConfig", 2, 1, recompute=True, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name, tp", [("MixtralConfig", 1), ("MixtralConfig", 2), ("Llama4TextConfig", 1)])
def test_pipelines(name: str, tp: int) -> None:
    """Two stages and two microbatches: the module of experts runs whole, and communicates inside."""
    whole = model(name, False, "eager").float()
    state = copy.deepcopy(whole)
    ids, labels, _ = batch(0)
    expected = whole(input_ids=ids, labels=labels, num_items_in_batch=(labels[:, 1:] != -100).sum()).loss
    expected.backward()

    def rank() -> None:
        swapped = swap(copy.deepcopy(state))
        pipeline = NxDPPModel(
            swapped,
            transformer_layer_cls=transformer_layer_class(swapped),
            num_microbatches=2,
            input_names=["input_ids", "labels", "num_items_in_batch"],
            output_loss_value_spec={"loss": True, "logits": False},
            auto_partition=True,
        )
        mine = [part.chunk(comm.size("dp"))[comm.rank("dp")] for part in (ids, labels)]
        items = global_num_items(mine[1], 2).expand(2)
        loss = pipeline.run_train(input_ids=mine[0], labels=mine[1], num_items_in_batch=items)
        if loss is not None:
            close(comm.all_reduce(loss.detach(), "dp") / comm.size("dp"), expected.detach(), "loss")
        for name, gradient in full_state_dict(pipeline, gradients=True).items():
            close(gradient, whole.get_parameter(name).grad, f"gradient of {name}")

    threads.run(Mesh(4 * tp, pp=2, ep=2, tp=tp), rank, timeout=60.0)


@pytest.mark.slow
def test_weights_in_and_out_of_files(tmp_path: Path) -> None:
    """A folder of ep 2 x tp 2 has all experts, and loads into ep 4; weights drawn there are those of one process."""
    config = model_of("Qwen3MoeConfig").config

    def rank(folder: Path | None) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        swap(model)
        if folder is None:
            save_pretrained(materialize(model, 0), tmp_path)
        else:
            load_pretrained(model, folder)
        return full_state_dict(model)

    saved, one = threads.run(Mesh(4, tp=2, ep=2), partial(rank, None))[0], threads.run(Mesh(1), partial(rank, tmp_path))
    loaded = threads.run(Mesh(4, ep=4), partial(rank, tmp_path))[0]
    drawn = threads.run(Mesh(1), partial(rank, None))[0]
    for name, value in drawn.items():
        assert all(torch.equal(other[name], value) for other in (saved, one[0], loaded)), name


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", [{"dp": 4, "tp": 2, "ep": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name, implementation", [("MixtralConfig", "grouped_mm"), ("Llama4TextConfig", "eager")])
def test_types_are_proved(name: str, implementation: str, mesh: dict[str, int]) -> None:
    """Without values tokens travel in slots of equal numbers, and transformers' grouped products run on them."""
    config = model(name, False, implementation).config

    def make() -> Any:
        with torch.device("meta"):
            return swap(AutoModelForCausalLM.from_config(config, dtype=torch.float32))

    ids = batch(0)[0]
    assert spmd.check(make, {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.ones(())}, mesh).ok


RELOADED = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "assigned": lambda model: _assigned(model, {key: value.clone() for key, value in model.state_dict().items()}),
}


def _assigned(model: Any, state: dict[str, torch.Tensor]) -> Any:
    model.load_state_dict(state, assign=True)
    return model


def _zero1_step(again: Any, average_over_data: bool = False) -> dict[str, torch.Tensor]:
    local = again(swap(model("MixtralConfig", False, "eager").double()))
    optimizer = NeuronZero1Optimizer(local.parameters(), torch.optim.SGD, lr=0.1)
    ids, labels, _ = (part.chunk(comm.size("dp"))[comm.rank("dp")] for part in batch(0))
    local(input_ids=ids, labels=labels).loss.backward()
    reduce_gradients(local, average_over_data)
    optimizer.step()
    return full_state_dict(local)


@pytest.mark.slow
@pytest.mark.parametrize("again", RELOADED)
def test_experts_stay_those_of_their_ep_rank(again: str) -> None:
    """Copies or loads a model between swap and optimizer, which sees parameters alone."""

    def rank() -> None:
        expected = _zero1_step(lambda model: model)
        for key, value in _zero1_step(RELOADED[again]).items():
            assert torch.equal(value, expected[key]), key

    threads.run(Mesh(4, ep=2), rank)


def test_weights_of_another_ep_rank_are_refused() -> None:
    def rank() -> None:
        local = swap(model("MixtralConfig", False, "eager"))
        states = comm.gather_objects(local.state_dict(), "ep")
        local.load_state_dict(states[comm.rank("ep")])
        with pytest.raises(ValueError, match=r"shard \d of 2, and rank \d holds shard \d of 2"):
            local.load_state_dict(states[1 - comm.rank("ep")])

    threads.run(Mesh(2, ep=2), rank)


def test_zero1_refuses_gradients_of_experts_that_are_averaged() -> None:
    with pytest.raises(RuntimeError, match="experts were averaged over the data ranks already.*use_zero1_optimizer"):
        threads.run(Mesh(2, ep=2), lambda: _zero1_step(lambda model: model, average_over_data=True))


@pytest.mark.parametrize("of_user", [False, True])
def test_an_auxiliary_loss_in_a_tuple_is_refused(of_user: bool) -> None:
    """A user's subclass stands in another module than the function of the loss, and is refused too."""

    def rank() -> None:
        local = model("MixtralConfig", True, "eager")
        local.__class__ = type("OfAUser", (type(local),), {}) if of_user else type(local)
        local = swap(local)
        ids, labels, _ = (part.chunk(2)[comm.rank("dp")] for part in batch(0))
        with pytest.raises(ValueError, match="leave return_dict at True"):
            local(input_ids=ids, labels=labels, return_dict=False)

    threads.run(Mesh(2, ep=2), rank)


def test_bad_input_is_refused() -> None:
    def rank() -> None:
        with pytest.raises(ValueError, match="ep=3 is neither 1 nor the ep of the mesh, 2"):
            swap(model_of("MixtralConfig"), ep=3)
        with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no module with num_experts.*pass ep=1"):
            swap(model_of("LlamaConfig"))
        odd = model_of("MixtralConfig")
        odd.config.num_local_experts = 3
        with pytest.raises(ValueError, match="3 experts are not divisible by ep=2"):
            swap(type(odd)(odd.config))

    threads.run(Mesh(2, ep=2), rank)


@pytest.mark.parametrize("num_beams, auxiliary", [(1, True), (2, False)])
def test_ranks_generate_until_all_have_ended(num_beams: int, auxiliary: bool) -> None:
    """Sequences of one ep rank end after other steps than those of another; each is that of one process."""
    whole = model("MixtralConfig", auxiliary, "eager").to(torch.float64).eval()
    prompts, lengths = [torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 10]])], [3, 9]
    options: Any = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False, "num_beams": num_beams}
    expected = [whole.generate(prompts[n], max_new_tokens=lengths[n], **options) for n in range(2)]

    def rank() -> None:
        original, number = swap(copy.deepcopy(whole)), comm.rank("ep")
        copied = copy.deepcopy(original)
        original.get_output_embeddings().weight.data.zero_()
        found = copied.generate(prompts[number], max_new_tokens=lengths[number], **options)
        assert torch.equal(found, expected[number])

    threads.run(Mesh(2, ep=2), rank, timeout=20.0)
