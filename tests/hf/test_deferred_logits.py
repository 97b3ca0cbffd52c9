"""Fused loss of a swapped model: losses and weights of one process, and logits that are right when they are read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.utils.operations import convert_to_fp32
from torch import nn
from torch.overrides import handle_torch_function
from torch.utils.checkpoint import checkpoint

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import loss as of_swap
from neuronx_dist.hf.deferred_logits import DeferredLogits
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.lora import LoraConfig, get_lora_model
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.planning.meter import measure_peak
from tests.hf.models import batch, error, llama_config, reference_model, sum_partial_gradients
from tests.hf.parity import AllInFloat64
from tests.support.more_architectures import OF_TRANSFORMERS

TOLERANCE = 1e-10
BY_NAME = {architecture.name: architecture for architecture in OF_TRANSFORMERS}


@pytest.fixture
def fused(monkeypatch: Any) -> Iterator[list[int]]:
    """A list that gets the number of tokens of each fused loss."""
    losses: list[int] = []
    function = of_swap.parallel_linear_cross_entropy

    def counted(input: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        losses.append(labels.numel())
        return function(input, weight, labels, **options)

    monkeypatch.setattr(of_swap, "parallel_linear_cross_entropy", counted)
    yield losses


def llama(**options: Any) -> Any:
    return reference_model(llama_config(**options)).train()


def on_one(function: Any) -> Any:
    return threads.run(Mesh(1), function)[0]


def mixtral() -> Any:
    """With the auxiliary loss, which forward adds to the loss."""
    architecture = BY_NAME["Mixtral"]
    return replace(architecture, config={**architecture.config, "output_router_logits": True}).make(2)


def three_steps(model: Any, inputs: dict[str, torch.Tensor], sums: Any = None) -> tuple[list[torch.Tensor], Any]:
    """Losses and weights of three steps with SGD."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(3):
        with AllInFloat64():
            loss = model(**inputs).loss
            loss.backward()
        if sums is not None:
            sums(model)
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def tied() -> Any:
    return llama(tied=True)


@pytest.mark.parametrize(
    "make, tp, sequence_parallel",
    [(tied, 1, False), (tied, 2, False), (tied, 4, True), (mixtral, 1, False), (mixtral, 2, True), (mixtral, 4, False)],
)
@pytest.mark.slow
def test_three_steps_are_those_of_one_process(make: Any, tp: int, sequence_parallel: bool, fused: list[int]) -> None:
    whole = make()
    inputs = dict(zip(("input_ids", "labels"), batch(seq=8))) if make is not mixtral else BY_NAME["Mixtral"].inputs()
    if sequence_parallel and make is mixtral:
        inputs = {name: x[:, :4] for name, x in inputs.items()}
    state = copy.deepcopy(whole)
    losses, trained = three_steps(whole, inputs)

    def rank() -> Any:
        model = hf.swap(copy.deepcopy(state), sequence_parallel=sequence_parallel)
        found, model = three_steps(model, inputs, sum_partial_gradients)
        return found, hf.full_state_dict(model)

    for found, weights in threads.run(Mesh(tp, tp=tp), rank):
        assert all(error(a, b) < TOLERANCE for a, b in zip(found, losses, strict=True))
        for name, param in trained.named_parameters():
            assert error(weights[name], param.detach()) < TOLERANCE, name
    assert len(fused) == 3 * tp


@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, True)])
def test_logits_are_computed_when_their_values_are_read(tp: int, sequence_parallel: bool, fused: list[int]) -> None:
    """Values are the head's: this rank's columns; after backward too; by name and by position; padding is -inf."""
    whole, (ids, labels) = llama(vocab_size=97), batch(seq=8)
    expected = nn.functional.pad(whole(input_ids=ids).logits.detach(), (0, -97 % tp), value=-torch.inf)

    def rank() -> None:
        model = hf.swap(copy.deepcopy(whole), sequence_parallel=sequence_parallel, pad_vocab=True)
        wanted = expected.chunk(tp, -1)[comm.rank("tp")]
        output = model(input_ids=ids, labels=labels, output_hidden_states=True)
        assert isinstance(output.logits, DeferredLogits) and output.logits.shape == wanted.shape
        assert output.logits.dtype == torch.float64 and output.logits.requires_grad and len(output.hidden_states) == 3
        output.loss.backward()
        torch.testing.assert_close(output.logits.detach(), wanted, rtol=1e-10, atol=1e-10)
        _, logits = model(input_ids=ids, labels=labels, return_dict=False)[:2]
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
        logits.mul_(0.5)  # a write stays
        torch.testing.assert_close(copy.deepcopy(logits.detach()), 0.5 * wanted, rtol=1e-10, atol=1e-10)
        full = model(input_ids=ids).logits  # without labels: the full ones
        torch.testing.assert_close(full.detach(), expected[..., :97], rtol=1e-10, atol=1e-10)

    threads.run(Mesh(tp, tp=tp), rank)
    assert len(fused) == 2 * tp


def test_gradients_flow_through_logits_that_are_read(fused: list[int]) -> None:
    """A second loss of the same logits, by a function of torch and by one of this package."""
    whole, (ids, labels) = llama(), batch(seq=8)

    def gradients(model: Any, read: Any) -> list[torch.Tensor]:
        output = model(input_ids=ids, labels=labels)
        (output.loss + read(output.logits)).backward()
        return [param.grad for param in model.parameters()]

    def rank() -> None:
        for read in (
            lambda logits: logits.logsumexp(-1).square().mean(),
            lambda logits: hf.causal_lm_loss(logits, ids, 96),
            lambda logits: _Sum.apply(logits + 0),
        ):
            deferred = gradients(hf.swap(copy.deepcopy(whole)), read)
            kept = gradients(hf.swap(copy.deepcopy(whole), fused_loss=False), read)
            assert all(error(a, b) < TOLERANCE for a, b in zip(deferred, kept, strict=True))
        with pytest.raises(RuntimeError, match=r"a gradient \[2, 8, 96\] of logits that were not computed"):
            gradients(hf.swap(copy.deepcopy(whole)), _Sum.apply)

    on_one(rank)
    assert len(fused) == 5  # two of them of the second loss's call


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.new_zeros(()) if isinstance(x, DeferredLogits) else x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.expand(ctx.shape)


UPDATES: dict[str, Any] = {
    "SGD, foreach": lambda params: torch.optim.SGD(params, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "ZeRO-1": lambda params: NeuronZero1Optimizer(params, torch.optim.SGD),
    "ZeRO-1, fused": lambda params: NeuronZero1Optimizer(params, torch.optim.AdamW, fused=True),
}


def _written_past_autograd(param: torch.Tensor) -> None:
    param.data.add_(param.grad)


@pytest.mark.parametrize("update", [*UPDATES, "param.data", "input"])
def test_logits_of_operands_that_have_changed_are_refused(update: str) -> None:
    """Fused optimizers and writes to `param.data` leave the tensors' versions alone. A second loss is refused too."""
    whole, (ids, labels) = llama(), batch(seq=8)

    def rank() -> None:
        model = hf.swap(copy.deepcopy(whole))
        output = model(input_ids=ids, labels=labels, output_hidden_states=True)
        output.loss.backward()
        if update == "input":
            output.hidden_states[-1].detach().mul_(2)
        elif update in UPDATES:
            UPDATES[update](model.parameters()).step()
        else:
            _written_past_autograd(model.lm_head.weight)
        words = "input" if update == "input" else "weight"
        for read in (lambda: output.logits.argmax(-1), lambda: hf.causal_lm_loss(output.logits, labels, 96)):
            with pytest.raises(RuntimeError, match=rf"the logits \[2, 8, 96\] .* the head's {words} has changed"):
                read()

    on_one(rank)


def test_logits_of_other_weights_than_the_heads() -> None:
    """Weights of functional_call, of a parametrization, of inference mode, and of a copy of the head."""
    whole, (ids, labels) = llama(), batch(seq=8)

    def rank() -> None:
        model = hf.swap(copy.deepcopy(whole))
        wanted = model(input_ids=ids).logits.detach()
        doubled = {"lm_head.weight": 2 * model.lm_head.weight.detach()}
        output = torch.func.functional_call(model, doubled, (), dict(input_ids=ids, labels=labels))
        torch.testing.assert_close(output.logits.detach(), 2 * wanted)
        nn.utils.parametrizations.weight_norm(model.lm_head)
        output = model(input_ids=ids, labels=labels)
        with torch.no_grad():
            model.lm_head.parametrizations.weight.original0.mul_(2)
        torch.testing.assert_close(output.logits.detach(), wanted)
        with torch.inference_mode():
            model = hf.swap(copy.deepcopy(whole))
        with torch.no_grad():
            output = model(input_ids=ids, labels=labels)
        torch.testing.assert_close(output.logits, wanted)
        head = copy.copy(hf.swap(copy.deepcopy(whole)).lm_head)
        head._parameters = {"weight": nn.Parameter(torch.zeros_like(head.weight)), "bias": None}
        assert not head(torch.ones(1, 2, head.weight.shape[1], dtype=torch.float64)).any()

    on_one(rank)


def test_logits_are_read_in_the_modes_of_their_call() -> None:
    whole, (ids, labels) = llama(), batch(seq=8)

    def gradients(**options: Any) -> list[torch.Tensor]:
        model = hf.swap(copy.deepcopy(whole), **options)
        output = model(input_ids=ids, labels=labels)
        with torch.inference_mode():
            output.logits.argmax(-1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (output.logits + 0).dtype == torch.float64
        (output.loss + output.logits.logsumexp(-1).square().mean()).backward()
        return [param.grad for param in model.parameters()]

    def rank() -> None:
        for found, wanted in zip(gradients(), gradients(fused_loss=False), strict=True):
            assert error(found, wanted) < TOLERANCE
        model = hf.swap(copy.deepcopy(whole).float())
        model.model.norm = nn.Linear(32, 32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(input_ids=ids, labels=labels)
        assert torch.equal(hf.causal_lm_loss(output.logits, labels, 96), output.loss)  # outside of the autocast

    on_one(rank)


def test_gradients_of_logits_that_would_be_lost_are_refused() -> None:
    whole, (ids, labels) = llama(), batch(seq=8)

    def rank() -> None:
        model = hf.swap(copy.deepcopy(whole))
        asks: list[Any] = [
            lambda output: output.logits.retain_grad(),
            lambda output: output.logits.register_hook(lambda grad: grad),
            lambda output: output.logits.requires_grad_(),
            lambda output: output.logits.grad,
            lambda output: torch.autograd.grad(output.loss, output.logits, allow_unused=True),
        ]
        for ask in asks:
            with pytest.raises(RuntimeError, match=r"logits \[2, 8, 96\] after their loss.*fused_loss=False"):
                ask(model(input_ids=ids, labels=labels))
        hook: Any = lambda grad: grad  # noqa: E731
        hook.__module__ = "torch.distributed.fsdp"  # which needs a gradient of one output, and hooks all
        model(input_ids=ids, labels=labels).logits.register_hook(hook)
        embedded = model.model.embed_tokens(ids)
        _, logits = checkpoint(
            lambda x: model(inputs_embeds=x, labels=labels, return_dict=False)[:2], embedded, use_reentrant=True
        )
        with torch.no_grad():
            logits.argmax(-1)
        with pytest.raises(RuntimeError, match=r"\[2, 8, 96\] would be lost: a reentrant checkpoint"):
            logits.logsumexp(-1)

    on_one(rank)


def test_collectives_of_torch_and_backward_hooks_around_the_model() -> None:
    whole, (ids, labels) = llama(), batch(seq=8)

    def collective(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            return handle_torch_function(collective, (x,), out, x)
        assert not x.requires_grad  # with which gloo's all-gather into one tensor fails
        return out.copy_(x)

    collective.__module__ = "torch.distributed.distributed_c10d"

    def rank() -> None:
        model = hf.swap(copy.deepcopy(whole))
        logits = model(input_ids=ids, labels=labels).logits
        assert torch.equal(collective(torch.empty(2, 8, 96, dtype=torch.float64), logits), logits.detach())

        class Around(nn.Module):
            def forward(self, embedded: torch.Tensor) -> torch.Tensor:
                return model(inputs_embeds=embedded, labels=labels).logits

        around = Around()
        around.register_full_backward_hook(lambda module, inputs, outputs: None)
        with pytest.raises(RuntimeError, match=r"full backward hook of a module around the model.*output.logits \+ 0"):
            around(model.model.embed_tokens(ids)).sum().backward()

    on_one(rank)


def test_logits_of_another_dtype_do_not_see_later_writes(fused: list[int]) -> None:
    whole, (ids, labels) = llama().bfloat16(), batch(seq=8)

    def rank() -> None:
        output = hf.swap(whole)(input_ids=ids, labels=labels)
        logits = output.logits.float()
        output.logits.detach().zero_()
        assert logits.detach().all() and logits.dtype == torch.float32 and not output.logits.float().any()

    on_one(rank)


def test_functions_of_this_package_and_backward_hooks_take_logits(fused: list[int]) -> None:
    whole, (ids, labels) = llama(), batch(seq=8)

    def gradients(hooked: bool, **options: Any) -> list[torch.Tensor]:
        model = hf.swap(copy.deepcopy(whole), **options)
        if hooked:
            model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: None)
        output = model(input_ids=ids, labels=labels)
        (output.loss + nxd.parallel_entropy(output.logits).sum()).backward()
        return [param.grad for param in model.parameters()]

    def rank() -> None:
        for hooked in (False, True):
            for found, wanted in zip(gradients(hooked), gradients(hooked, fused_loss=False), strict=True):
                assert error(found, wanted) < TOLERANCE

    on_one(rank)
    assert len(fused) == 1


def test_accelerates_conversion_to_fp32_computes_nothing(fused: list[int]) -> None:
    whole, (ids, labels) = llama().bfloat16(), batch(seq=8)

    def rank() -> None:
        model = hf.swap(copy.deepcopy(whole))
        output = convert_to_fp32(model(input_ids=ids, labels=labels))
        assert isinstance(output.logits, DeferredLogits) and output.logits.dtype == torch.float32
        wanted = whole(input_ids=ids).logits.float()
        torch.testing.assert_close(output.logits.detach(), wanted.detach(), rtol=0.05, atol=0.05)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = hf.swap(copy.deepcopy(whole).float())(input_ids=ids, labels=labels)
        assert output.logits.dtype == torch.bfloat16 == (output.logits + 0).dtype and output.loss.dtype == torch.float32

    on_one(rank)
    assert len(fused) == 2


def test_no_rank_holds_all_logits() -> None:
    whole = reference_model(llama_config(vocab_size=2048, layers=1), dtype=torch.float32).train()
    ids = torch.arange(2048).view(8, 256)

    def rank() -> list[int]:
        peaks = []
        for fused_loss in (None, False):
            model = hf.swap(copy.deepcopy(whole), fused_loss=fused_loss)
            with measure_peak() as meter:
                model(input_ids=ids, labels=ids).loss.backward()
            peaks.append(meter.peak)
        return peaks

    fused, unfused = on_one(rank)
    assert unfused - fused > 1.4 * 2048 * 2048 * 4  # logits and gradient, but for 512 tokens


@pytest.mark.parametrize(
    "options", [{"num_items_in_batch": 7}, {"shift_labels": torch.arange(16).view(2, 8)}, {"ignore_index": 3}]
)
def test_arguments_of_the_loss(options: dict[str, Any], fused: list[int]) -> None:
    whole, (ids, _) = llama(), batch(seq=8)

    def rank() -> None:
        found = [
            hf.swap(copy.deepcopy(whole), fused_loss=fused_loss)(input_ids=ids, labels=ids, **options).loss
            for fused_loss in (True, False)
        ]
        assert error(found[0].detach(), found[1].detach()) < TOLERANCE

    on_one(rank)
    assert len(fused) == 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_log_probabilities_and_entropy_of_a_model(sequence_parallel: bool) -> None:
    """The program of docs/models.md."""
    whole, (ids, _) = llama(), batch(seq=8)
    labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    all_log_p = (whole(input_ids=ids).logits / 0.7).log_softmax(-1)
    log_p = all_log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels >= 0)
    (log_p.sum() - (all_log_p.exp() * all_log_p).sum()).backward()

    def rank() -> None:
        model = hf.swap(copy.deepcopy(whole), sequence_parallel=sequence_parallel)
        hidden = model.model(ids).last_hidden_state
        options: dict[str, Any] = dict(sequence_dimension=1) if sequence_parallel else {}
        found, entropy = nxd.parallel_linear_logprobs(hidden, model.lm_head.weight, labels, temperature=0.7, **options)
        model.zero_grad()
        (found.sum() + entropy.sum()).backward()
        sum_partial_gradients(model)
        gradients = hf.full_state_dict(model, gradients=True)
        assert error(found.detach(), log_p.detach()) < TOLERANCE
        assert all(error(gradients[name], param.grad) < TOLERANCE for name, param in whole.named_parameters())

    threads.run(Mesh(2, tp=2), rank)


def _read_by_a_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.clamp(max=30.0))


def _with_an_adapter(model: Any) -> None:
    get_lora_model(model, LoraConfig(target_modules=["lm_head"]))


@pytest.mark.parametrize("change", [_read_by_a_hook, _with_an_adapter, lambda model: model.eval()])
def test_the_loss_of_logits_where_something_reads_them(change: Any, fused: list[int]) -> None:
    whole, (ids, labels) = llama(), batch(seq=8)

    def rank() -> None:
        model = copy.deepcopy(hf.swap(copy.deepcopy(whole)))
        change(model)
        output = model(input_ids=ids, labels=labels)
        assert error(output.loss.detach(), whole(input_ids=ids, labels=labels).loss.detach()) < 1e-6  # of float32
        assert type(output.logits) is torch.Tensor

    on_one(rank)
    assert not fused


def test_a_fused_loss_that_is_asked_for_is_refused_where_it_cannot_be() -> None:
    ids, labels = batch(seq=8)

    def rank() -> None:
        bert = BY_NAME["BERT (masked language model)"].make(2)
        with pytest.raises(hf.UnsupportedModelError, match="BertForMaskedLM: fused_loss=True needs the loss of"):
            hf.swap(bert, fused_loss=True)
        cohere = BY_NAME["Cohere"]
        with pytest.raises(
            RuntimeError, match=r"CohereForCausalLM reads its logits .* before the loss, by Tensor.*mul"
        ):
            hf.swap(cohere.make(2), fused_loss=True)(**cohere.inputs())
        model = hf.swap(llama(), fused_loss=True)
        assert model(input_ids=ids).logits.shape == (2, 8, 96)
        assert model(input_ids=ids, labels=labels).logits.sum().requires_grad  # after the loss

    on_one(rank)
