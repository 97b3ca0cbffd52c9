"""`hf.Accelerator` in a user's loop: losses, norms, weights, metrics, files are those of accelerate in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm
from tests.hf.models import SIZES, VOCAB, llama_config, reference_loss, reference_model
from tests.strangers.test_wrappers import launched, without_torch_xla
from tests.strangers.toy import Net, batch, message_of
from tests.support.pool import processes
from tests.support.synthetic import relative_error

pytest.importorskip("accelerate")
pytestmark = without_torch_xla
ROWS, HELD_OUT, SEQ, ACCUMULATED, BATCHES = 32, 29, 8, 2, 8  # rows held out do not fill their last batch


def rows() -> list[dict[str, torch.Tensor]]:
    """Rows with unequal numbers of labels."""
    ids = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : row % 7] = -100
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(ROWS)]


def losses_of(model: Any, batch: dict[str, Any], is_parallel: bool) -> torch.Tensor:
    if not is_parallel:
        return reference_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])
    return model(**batch, num_items_in_batch=nxd.global_num_items(batch["labels"])).loss


def train(folder: str, sizes: dict[str, int] | None = None, resumed: bool = False, dp: int = 1) -> dict[str, Any]:
    """The loop of accelerate's guide; returns what it saw, and whole weights.

    Args:
        sizes: of the mesh; None: by accelerate alone.
        resumed: begin at the state that a call with this folder has saved after half of the batches.
        dp: number of data-parallel ranks, for which a scheduler steps.
    """
    import accelerate
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    model: Any = reference_model(llama_config())
    options: Any = {"gradient_accumulation_steps": ACCUMULATED, "cpu": True}
    options["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(**options) if sizes is None else nxd.hf.Accelerator(**sizes, **options)
    if sizes is not None:
        nxd.hf.swap(model)
    size = 4 // (1 if sizes is None else comm.size("dp"))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if sizes is not None and "tp" not in sizes:
        optimizer = nxd.NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, grad_clipping=False, lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(rows(), batch_size=size, shuffle=True)
    held_out = DataLoader(rows()[:HELD_OUT], batch_size=size)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    losses, norms, rates, batches = [], [], [], loader
    if resumed:
        accelerator.load_state(folder)
        batches = accelerator.skip_first_batches(loader, BATCHES // 2)
    for index, part in enumerate(batches, BATCHES // 2 if resumed else 0):
        with accelerator.accumulate(model):
            loss = losses_of(model, part, sizes is not None)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            for _ in range(dp if sizes is None else 1):
                scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        rates.append(scheduler.get_last_lr()[0])
        if index == BATCHES // 2 - 1 and sizes is not None and not resumed:
            accelerator.save_state(folder)
    model.eval()
    seen = [accelerator.gather_for_metrics(part["input_ids"]) for part in held_out]
    words = [accelerator.gather_for_metrics([str(row) for row in part["labels"]]) for part in held_out]
    rest = [accelerator.gather_for_metrics(part["input_ids"]) for part in accelerator.skip_first_batches(held_out, 1)]
    assert torch.equal(torch.cat(rest), torch.cat(seen[1:]))
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "seen": torch.cat(seen),
        "words": sum(words, []),
        "weights": {name: weight.clone() for name, weight in accelerator.get_state_dict(model).items()},
    }


def train_launched(*arguments: Any) -> dict[str, Any]:
    with launched():
        return train(*arguments)


@cache
def alone(dp: int) -> dict[str, Any]:
    (result,) = processes(1).run(train, "", None, False, dp)
    return result


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("layouts", [[(4, {"tp": 2}), (2, {})], [(2, {}), (4, {"tp": 2})]], ids=str)
def test_training_and_resuming_in_another_layout_are_those_of_one_process(
    layouts: list[tuple[int, dict[str, int]]], tmp_path: Path
) -> None:
    """At dp 2, with ZeRO-1 at tp 1."""
    (ranks, sizes), (later_ranks, later_sizes) = layouts
    expected = alone(2)
    before = dict(reference_model(llama_config()).named_parameters())
    assert min(relative_error(expected["weights"][name], before[name].detach()) for name in before) > 1e-3
    assert torch.equal(expected["seen"], torch.stack([row["input_ids"] for row in rows()[:HELD_OUT]]))
    results = processes(ranks).run(train_launched, str(tmp_path / "state"), sizes, mesh=sizes)
    for result in results:
        check(result, expected)
    rest = {
        **expected,
        "losses": expected["losses"][BATCHES // 2 :],
        "rates": expected["rates"][BATCHES // 2 :],
        "norms": expected["norms"][BATCHES // 2 // ACCUMULATED :],
    }
    for result in processes(later_ranks).run(
        train_launched, str(tmp_path / "state"), later_sizes, True, mesh=later_sizes
    ):
        check(result, rest)


def check(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("losses", "norms", "rates"):
        assert result[key] == pytest.approx(expected[key], rel=1e-10)
    assert torch.equal(result["seen"], expected["seen"]) and result["words"] == expected["words"]
    assert result["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert relative_error(result["weights"][name], weight) < 1e-10, name


# (mesh, model, mixed precision)
VARIANTS: list[tuple[dict[str, int], str, str]] = [
    ({"cp": 2}, "llama", "no"),
    ({"ep": 2}, "mixtral", "no"),
    ({"tp": 2}, "llama", "bf16"),
]


def variants(folder: str, is_parallel: bool) -> list[dict[str, Any]]:
    """Returns losses and norms of two steps, and the weights that `save_model` writes."""
    import accelerate
    from accelerate.state import AcceleratorState

    results = []
    for number, (sizes, name, precision) in enumerate(VARIANTS):
        torch.manual_seed(0)
        config: Any = llama_config() if name == "llama" else MixtralConfig(**SIZES, num_hidden_layers=1)
        config._experts_implementation = "eager"
        model: Any = (LlamaForCausalLM if name == "llama" else MixtralForCausalLM)(config)
        model = model.double() if precision == "no" else model
        AcceleratorState._reset_state(reset_partial_state=True)
        options: Any = dict(cpu=True, mixed_precision=precision)
        nxd.destroy_model_parallel()
        accelerator = nxd.hf.Accelerator(**sizes, **options) if is_parallel else accelerate.Accelerator(**options)
        if is_parallel:
            nxd.hf.swap(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        size = 4 // comm.size("dp") if is_parallel else 4
        loader = DataLoader(rows()[: 4 * 2], batch_size=size)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses, norms = [], []
        for part in loader:
            if is_parallel:
                part = nxd.get_batch_on_this_context_parallel_rank(dict(part))
            loss = losses_of(model, part, is_parallel)
            accelerator.backward(loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        accelerator.save_model(model, f"{folder}/{number}")
        accelerator.wait_for_everyone()
        results.append({"losses": losses, "norms": norms, "weights": load_file(f"{folder}/{number}/model.safetensors")})
    return results


def variants_launched(folder: str) -> list[dict[str, Any]]:
    with launched():
        return variants(folder, True)


@pytest.mark.slow
@pytest.mark.process
def test_sequences_experts_and_bf16_are_those_of_one_process(tmp_path: Path) -> None:
    (expected,) = processes(1).run(variants, str(tmp_path / "alone"), False)
    for result in processes(2).run(variants_launched, str(tmp_path / "parallel"), initialize=False):
        for (_, _, precision), found, alone in zip(VARIANTS, result, expected):
            tolerance = 1e-10 if precision == "no" else 1e-2
            assert found["losses"] == pytest.approx(alone["losses"], rel=tolerance)
            assert found["norms"] == pytest.approx(alone["norms"], rel=tolerance)
            assert found["weights"].keys() == alone["weights"].keys()
            for name, weight in alone["weights"].items():
                assert relative_error(found["weights"][name], weight) < tolerance, name


def adversarial(sizes: dict[str, int] | None = None) -> dict[str, torch.Tensor]:
    """Returns whole weights of two models, several losses of which are backpropagated in a step."""
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    accelerator: Any = accelerate.Accelerator(cpu=True) if sizes is None else nxd.hf.Accelerator(**sizes, cpu=True)
    size = 4 if sizes is None else 4 // comm.size("dp")
    models = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).double() for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    loader = DataLoader(torch.randn(8, 4, dtype=torch.float64), batch_size=size)
    generator, critic, optimizer, critics, loader = accelerator.prepare(*models, *optimizers, loader)
    for real in loader:
        fake = generator(real)
        critic.zero_grad()
        accelerator.backward((critic(real) - 1).square().mean())
        accelerator.backward(critic(fake.detach()).square().mean())
        critics.step()
        generator.zero_grad()
        accelerator.backward((critic(fake) - 1).square().mean())
        optimizer.step()
    weights = [accelerator.get_state_dict(model) for model in (generator, critic)]
    return {f"{index}.{name}": weight.clone() for index, part in enumerate(weights) for name, weight in part.items()}


def adversarial_launched(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    with launched():
        return adversarial(sizes)


@pytest.mark.process
def test_several_losses_and_models_in_a_step_are_those_of_one_process() -> None:
    (expected,) = processes(1).run(adversarial)
    for result in processes(2).run(adversarial_launched, {}):
        for name, weight in expected.items():
            assert relative_error(result[name], weight) < 1e-10, name


def test_other_kinds_of_parallelism_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Accelerator\(fsdp_plugin=\) is another kind of parallelism: .* pass tp"):
        nxd.hf.Accelerator(fsdp_plugin=object())


def refusals() -> list[str]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with launched():
        accelerator = nxd.hf.Accelerator(cpu=True)
        pipeline = nxd.NxDPPModel(torch.nn.Sequential(torch.nn.Linear(2, 2)), input_names=["input"])
        model = accelerator.prepare(Net(sequence_parallel=True))

        def on_reduced() -> None:
            accelerator.backward(model(**batch(0)))
            with accelerator.no_sync(model):
                accelerator.backward(model(**batch(0)))

        if comm.rank("world") == 1:
            accelerator.set_trigger()
        assert accelerator.check_trigger() and not accelerator.check_trigger()
        calls = [
            lambda: accelerator.prepare(pipeline),
            accelerator.save_state,
            on_reduced,
            lambda: accelerator.split_between_processes([1]),
        ]
        return [message_of(call) for call in calls]


@pytest.mark.process
def test_what_would_train_wrongly_is_refused_by_name() -> None:
    for messages in processes(2).run(refusals, mesh={"tp": 2}):
        pipeline, no_folder, on_reduced, split = messages
        assert "inputs[accelerator.process_index :: accelerator.num_processes]" in split
        assert "a NxDPPModel trains by its run_train, not by backward(loss)" in pipeline
        assert "save_state: pass a folder" in no_folder
        assert "gradients of the previous step are still present" in on_reduced and "with no_sync(model)" in on_reduced
