"""Forwards whose calls Python's state, random numbers or `requires_grad` decide: refused by name, or recorded.

Nothing of a recorded module is different afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from neuronx_dist.program.record import record_program
from neuronx_dist.program.recording import TracingError
from tests.hf.models import llama_config, reference_model

WIDTH = 4
_GLOBAL = {"calls": 0}
_MODE = "double"


class Plain(nn.Module):
    """Has what the modules below read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.last: Any = None
        self.seen: list[int] = []
        self.generator = random.Random(0)


class Counter(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class WarmUp(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) if self.calls < 2 else x


class LastOutput(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = y if self.last is None else y + self.last
        self.last = y.detach()
        return y


class StoredBias(Plain):
    """Computes a bias of a weight in the first call, as timm's LeViT in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is None:
            self.last = self.linear.weight.exp()
        return self.linear(x) @ self.last


class Forgetful(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "calls"):
            del self.calls
            return self.linear(x)
        return x


class Listed(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))
        return self.linear(x) + len(self.seen)


class Global(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _GLOBAL["calls"] += 1
        return self.linear(x) * _GLOBAL["calls"]


class Hooked(Plain):
    """Installs a hook with each call, as transformers do for hidden states in the first one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.register_forward_hook(lambda module, args, output: output * 2)
        return self.linear(x)


class LayerDrop(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if random.random() < 0.5 else x


class LayerDropByNumpy(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(np.random.rand())


class HeldGenerator(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.generator.random()


class Seeds(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return self.linear(x) + torch.rand_like(x)


class ByRequiresGrad(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.requires_grad else x * 2


class ByGradMode(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if torch.is_grad_enabled() else x * 2


REFUSED: dict[type[Plain], str] = {
    Counter: "depends on state that its last call left .*calls: 0 -> 1.*register_buffer",
    WarmUp: "depends on state that its last call left .*calls: 0 -> 1",
    LastOutput: "depends on state that its last call left .*last: None -> ",
    StoredBias: r"(?s)last: None.*second call fails, TracingError: [^\n]*recorded\.\n.*in each call.*override",
    Forgetful: "depends on state that its last call left .*calls: 0 -> absent",
    Listed: r"depends on state that its last call left .*seen\[0\]",
    Global: r"depends on state that its last call left .*_GLOBAL.calls: 0 -> 1",
    Hooked: "depends on state that its last call left .*_forward_hooks",
    LayerDrop: "draws from the generator of random.*torch.where",
    LayerDropByNumpy: "draws from the generator of numpy.random",
    HeldGenerator: "depends on state that its last call left .*generator.state",
    Seeds: "seeds the random numbers of torch|that forward has seeded",
    ByRequiresGrad: "reads requires_grad of a tensor that depends on its arguments",
    ByGradMode: r"reads torch.is_grad_enabled\(\)",
}


@pytest.mark.parametrize("cls", REFUSED)
def test_what_one_call_decides_for_ever_is_refused(cls):
    module = cls()
    with pytest.raises(TracingError, match=REFUSED[cls]):
        record_program(module, {"x": torch.randn(2, WIDTH)}, training=cls is not ByGradMode)
    assert (module.calls, module.last, module.seen, _GLOBAL["calls"]) == (0, None, [], 0)
    assert not module.linear._forward_hooks and module.generator.random() == random.Random(0).random()


class Statistics(Plain):
    """Counts calls, and keeps outputs, which nothing reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(x)
        self.last = y
        self.seen.append(tuple(y.shape))
        return y


class Table(Plain):
    """Computes a table in the first call, and reads it in others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is None:
            self.last = torch.arange(WIDTH).cos()
        return self.linear(x) * self.last


class SeedsItself(Plain):
    """Seeds Python's generator by itself: each call has the same outcome."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.Random(3).random()
        return self.linear(x) * drawn


class MayRequireGrad(Plain):
    """Reads `requires_grad`, and calls the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not x.requires_grad or torch.is_grad_enabled()
        return self.linear(x)


class ReadsGlobal(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if _MODE == "double" else 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cls", [Statistics, Table, SeedsItself, MayRequireGrad, ReadsGlobal])
def test_state_that_decides_nothing_is_accepted(cls, training):
    module = cls()
    assert record_program(module, {"x": torch.randn(2, WIDTH)}, training=training).calls
    assert (module.calls, module.last, module.seen) == (0, None, [])


def state(module: nn.Module) -> dict[str, Any]:
    """All that a program can read of a module, by name, and the generators of random numbers."""
    found: dict[str, Any] = {"random": random.getstate(), "numpy": np.random.get_state()[1].tolist()}
    found["torch"] = torch.get_rng_state().tolist()
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            found[f"{name}.{key}"] = {**value} if isinstance(value, dict) else value
        for key, tensor in (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)):
            found[f"{name}.{key}, values"] = (id(tensor), tensor._version, tensor.tolist())
    for config in (getattr(module, "config", None), getattr(module, "generation_config", None)):
        found[type(config).__name__] = repr(config)
    return found


def llama() -> nn.Module:
    return reference_model(llama_config(), dtype=torch.float32)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    )


def bert() -> nn.Module:
    return transformers.BertModel(
        transformers.BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))


IDS = torch.arange(16).view(2, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "statistics": (Statistics, {"x": torch.ones(2, WIDTH)}),
    "convolutions": (convolutions, {"input": torch.ones(2, 3, 8, 8)}),
    "llama": (llama, {"input_ids": IDS, "use_cache": False}),
    "llama, hidden states": (llama, {"input_ids": IDS, "use_cache": False, "output_hidden_states": True}),
    "llama, attentions": (llama, {"input_ids": IDS, "use_cache": False, "output_attentions": True}),
    "llama, labels": (llama, {"input_ids": IDS, "labels": IDS, "use_cache": False}),
    "gpt2, hidden states": (gpt2, {"input_ids": IDS, "use_cache": False, "output_hidden_states": True}),
    "bert": (bert, {"input_ids": IDS, "output_hidden_states": True, "output_attentions": True}),
}
FAST = ("statistics", "convolutions", "llama")


@pytest.mark.one_in(2)
@pytest.mark.each_value
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in MODELS])
def test_nothing_of_a_module_is_different_afterwards(name, training):
    build, arguments = MODELS[name]
    torch.manual_seed(0)
    module = build().train(not training)
    before = state(module)
    programs = [record_program(module, arguments, training=training) for _ in range(3)]
    after = state(module)
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert after[key] == value, key
    first, *others = (len(program.outputs) for program in programs)
    assert others == [first, first]


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_outputs_of_a_model_that_never_ran(asked):
    """transformers install hooks when they are first asked for hidden states."""
    recorded, ran = llama(), llama()
    arguments = {"input_ids": IDS, "use_cache": False, asked: True}
    record_program(recorded, arguments, training=False)
    number = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}[asked]
    assert len(recorded(**arguments)[number]) == len(ran(**arguments)[number])
