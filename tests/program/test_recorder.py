"""Recordings do what the model does: layers get the same arguments, None included; no branch on values."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import TracingError
from neuronx_dist.pipeline.cut.splitting import split
from neuronx_dist.pipeline.cut.stage import StageFunction
from neuronx_dist.program.recorder import record
from neuronx_dist.program.recording import Recording
from tests.support.pipeline_models import Block, Model, batch, check_parity, make, on_ranks

THIS = Path(__file__).name


def recorded(model: nn.Module, inputs: dict[str, Any], leaf_classes: Any = (Block,)) -> Recording:
    with comm.as_rank(Mesh(1), 0):
        return record(model, inputs, leaf_classes)


def replay(model: nn.Module, recording: Recording, inputs: dict[str, Any]) -> Any:
    """Runs a recording as one stage, on other inputs than it was made with."""
    stage = StageFunction(split(recording, [])[0])
    _, outputs = stage.run(model, dict(enumerate(pytree.tree_leaves(inputs))), [])
    return pytree.tree_unflatten(outputs, recording.structure)


def calls(model: nn.Module, run: Callable[[], Any]) -> list[tuple[str, Any, Any]]:
    """Every call of a decoder layer, norm, embedding and head: its name and arguments."""
    seen: list[tuple[str, Any, Any]] = []
    hooks = []
    for name, module in model.named_modules():
        if name.count(".") <= 2 and name not in ("", "model", "model.layers", "model.rotary_emb"):

            def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                seen.append((name, copy.deepcopy(pytree.tree_map(_detached, args)), pytree.tree_map(_detached, kwargs)))

            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _detached(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.mark.each_value
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("given", ["nothing", "mask", "labels", "mask and labels", "positions"])
def test_llama_layers_get_what_the_model_gives_them(given: str, attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from tests.support.llama import tiny_llama

    config = tiny_llama(vocab_size=48, num_hidden_layers=3, attn_implementation=attention)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    assert config.use_cache, "recording must switch the cache off by itself"

    def inputs(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 48, (2, 8), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : 2 + seed] = 0
        found: dict[str, Any] = {"input_ids": ids, "attention_mask": mask if "mask" in given else None}
        if "labels" in given:
            found["labels"] = ids
        if given == "positions":
            found["position_ids"] = torch.arange(8).expand(2, -1)
        return found

    recording = recorded(model, inputs(0), [LlamaDecoderLayer])
    assert config.use_cache
    assert [str(node.target) for node in recording.calls()] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head",
    ]  # fmt: skip
    assert recording.calls()[1].kwargs["past_key_values"] is None

    fresh = inputs(1)  # not the values that were there when it was recorded
    results: list[Any] = []
    eager = calls(model, lambda: results.append(model(**fresh, use_cache=False)))
    ours = calls(model, lambda: results.append(replay(model, recording, fresh)))
    assert [name for name, _, _ in ours] == [name for name, _, _ in eager]
    signature = inspect.signature(LlamaDecoderLayer.forward)
    for (name, args, kwargs), (_, eager_args, eager_kwargs) in zip(ours, eager):
        if given == "positions" and "layers" in name:
            # The model looks for packed sequences in given positions; recorded, it always makes the mask.
            kwargs.pop("attention_mask"), eager_kwargs.pop("attention_mask")
        assert list(kwargs) == list(eager_kwargs)
        assert ("attention_mask" in kwargs) is ("layers" in name and given != "positions")
        torch.testing.assert_close((args, kwargs), (eager_args, eager_kwargs), rtol=0, atol=0, equal_nan=True)
        assert all(key in signature.parameters or key == "num_items_in_batch" for key in kwargs)
    if given == "nothing" and attention == "sdpa":
        assert all(kwargs["attention_mask"] is None for name, _, kwargs in ours if "layers" in name)
    assert type(results[1]) is type(results[0])
    torch.testing.assert_close(results[1].logits, results[0].logits, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert (results[1].loss is None) is (results[0].loss is None)


class Branching(Model):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.way == "bool" and (x > 0).all():  # line of bool
            x = x + 1
        if self.way == "item":
            x = x * x.mean().item()  # line of item
        if self.way == "numpy":
            x = x + x.detach().numpy().shape[0]  # line of numpy
        if self.way == "index":
            x = x + x[x > 0].sum()  # line of index
        return x


@pytest.mark.parametrize("way", ["bool", "item", "numpy", "index"])
def test_a_branch_on_values_names_its_line(way: str) -> None:
    lines = inspect.getsource(inspect.getmodule(Branching)).splitlines()  # type: ignore[arg-type]
    line = next(number for number, text in enumerate(lines, 1) if text.endswith(f"# line of {way}"))
    with pytest.raises(TracingError, match=rf"{THIS}:{line}: .*needs the values of a tensor"):
        recorded(make(Branching, way=way), batch())


def test_bounds_of_slices_that_are_known_tensors() -> None:
    class Sliced(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layers[0](x) * 1.0
            y[:, : torch.tensor(3)] = 0
            return super().body(y[:, torch.arange(2).max() :])

        def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().loss(x, labels[:, 1:])

    check_parity(Mesh(2, pp=2), make(Sliced), batch(), 2)

    class Unknown(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x[:, : x.abs().sum().long()])

    class UnknownOfKnown(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x + torch.arange(6)[: x.abs().sum().long()])

    for model_class in (Unknown, UnknownOfKnown):
        with pytest.raises(TracingError, match="__getitem__ needs the values of a tensor that depends on the model's"):
            recorded(make(model_class), batch())


def test_a_branch_on_values_inside_a_pipeline_ends_all_ranks() -> None:
    with pytest.raises(TracingError, match=rf"{THIS}:\d+"):
        on_ranks(
            Mesh(2, pp=2), make(Branching, way="bool"), lambda pipeline: pipeline.run_train(**batch()),
            output_loss_value_spec=True,
        )  # fmt: skip


def test_nothing_changes_and_no_random_number_is_drawn() -> None:
    class Keeping(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x
            self.register_buffer("seen", x.detach())
            return super().body(nn.functional.dropout(x, 0.5) + torch.rand(x.shape[1], 1))

    model = make(Keeping)
    before, attributes, generator = copy.deepcopy(model.state_dict()), set(vars(model)), torch.get_rng_state()
    apply = vars(torch.autograd.Function)["apply"]
    recorded(model, batch())
    assert set(vars(model)) == attributes and "seen" not in model._buffers
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert vars(torch.autograd.Function)["apply"] is apply


def test_random_calls_are_drawn_anew_on_one_stage() -> None:
    class Noisy(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            # One number for each position would be a constant over hidden, which the layers' norms remove.
            noise = torch.rand(x.shape[1], x.shape[2], dtype=x.dtype)
            for layer in self.layers:
                x = layer(x) + noise
            return x

    model = make(Noisy)
    recording = recorded(model, batch())
    plans = split(recording, ["layers.0", "layers.1"])
    assert [sum(node.name == "rand" for node in plan.nodes) for plan in plans] == [1, 0, 0]
    assert "rand" in [node.name for node in plans[1].received]
    assert not torch.equal(replay(model, recording, batch()), replay(model, recording, batch()))


def test_typed_collectives_are_recorded_as_themselves() -> None:
    class Reducing(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(spmd.all_reduce(x, "tp", src=spmd.P, dst=spmd.R) / 2)

    with comm.as_rank(Mesh(2, tp=2), 1):
        recording = record(make(Reducing), batch(), [Block])
    (node,) = [node for node in recording.graph.nodes if node.target is spmd.all_reduce]
    assert node.args[1] == "tp"


def test_hidden_tensors_are_refused() -> None:
    class Box:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Boxed(Model):
        def loss(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return Box(super().loss(x, labels))

    with pytest.raises(TracingError, match="the result of the model|a Box that holds tensors"):
        recorded(make(Boxed), batch())


def test_a_model_on_meta_is_recorded_for_the_device_of_its_inputs() -> None:
    model = make().to("meta")
    recording = recorded(model, batch())
    assert recording.result.device.type == "cpu"
    assert len(recording.calls()) == 7


@pytest.mark.parametrize("around", [False, True])
def test_autocast_of_another_device_is_refused(around: bool) -> None:
    """Nothing says which calls it is for once the model is elsewhere. Around the whole forward it is no block."""

    @contextmanager
    def autocast_of_cuda(enabled: bool) -> Iterator[None]:  # torch.autocast leaves it off where there is no such device
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", enabled)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before)

    class Elsewhere(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            with autocast_of_cuda(not around):
                x = x * 2
            return super().body(x)

    with autocast_of_cuda(around):
        with pytest.raises(
            TracingError, match=rf'{THIS}:\d+.*torch.autocast\("cuda"\) has no effect.*recorded, on cpu'
        ):
            recorded(make(Elsewhere), batch())
        recorded(make(), batch())


def test_autocast_regions_are_kept() -> None:
    class Mixed(Model):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.layers[0](x.float())
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                scale = x @ x.mT
            return super().body(x.float() + scale.sum().float())

    model = make(Mixed).float()
    inputs = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recording = recorded(model, inputs)
        assert torch.equal(replay(model, recording, inputs), model(**inputs))
    recording = recorded(model, inputs)
    assert torch.equal(replay(model, recording, inputs), model(**inputs))
