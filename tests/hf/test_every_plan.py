"""Models of transformers' tensor-parallel plans, all of them, tiny: loss, logits and gradients of one process at tp 2.

The whole list is in the full tier; what it leaves out is listed with the reason, and is not silently wrong.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.hf import swap
from neuronx_dist.mesh import Mesh
from tests.hf.every_plan import SEQ, VOCAB, classes_with_plans, inputs_of, model_of
from tests.hf.parity import differences
from tests.hf.test_architectures import wrong

FULL = os.environ.get("NXD_FULL") == "1"
SAMPLE = ("ApertusConfig", "GemmaConfig", "InklingTextConfig", "LongcatFlashConfig", "Llama4TextConfig")
REFUSED = {
    "DogeConfig": "model.layers.*.self_attn (not in the plan)",
    # Its plan shards the output of linear attention, whose input it leaves whole.
    "Glm5NextTextConfig": "o_proj of Glm5NextTextModel: the input [2, 8, 8192]",
    "NeoMMEConfig": "layers.*.self_attn.exclusive_self_attention (not in the plan)",
}
# No tiny model of these is made here: parts of another model, that need images or states of it, or whole ones with
# several towers.
NOT_MADE = """
    DeepseekOcr2VisionEncoderConfig Dots3NoteVisionConfig EmbeddingGemma2TextConfig Ernie4_5_VLMoeVisionConfig
    Ernie4_5_VLMoeTextConfig Ernie4_5_VL_MoeTextConfig Ernie4_5_VL_MoeVisionConfig Gemma4VisionConfig Llama4Config
    MuseGlimmerVisionConfig MuseGlimmerConfig MuseGlimmerAssistantConfig MuseSparkConfig Phi4MultimodalConfig
    T5GemmaModuleConfig T5Gemma2TextConfig T5Gemma2DecoderConfig VoxtralRealtimeTextConfig
""".split()
# Refused with sequence parallelism: why.
NOT_CUT = {
    "DeepseekV4Config": "several streams of hidden states (model.layers.0.attn_hc)",
    "Gemma3nTextConfig": "several streams of hidden states (model.layers.0.altup)",
    "HYV4Config": "several streams of hidden states (model.layers.0.attn_hc)",
    "HiggsAudioV2Config": "passes audio_token_mask to its layers",
    "Inkling2TextConfig": "passes block_states to its layers",
    "Llama4VisionConfig": "a sequence of 17 tokens is not divisible by tp=2",  # patches in a square, and a class
    "Qwen4ExpTextConfig": "passes ple_input_ids to its layers",
}
# Take another row of packed documents for one: why.
NOT_SEPARATED = {
    "DiffusionGemmaTextConfig": "always has a cache",
    "Glm4vTextConfig": "makes masks without position_ids",
}
pytestmark = pytest.mark.slow


def _names() -> list[str]:
    if not FULL:
        return [*SAMPLE]
    return [name for name in classes_with_plans() if name not in REFUSED and name not in NOT_MADE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _names())
def test_a_model_with_a_plan_is_that_of_one_process(name: str) -> None:
    model = model_of(name)
    assert wrong(differences(model, inputs_of(model), 2)) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _names() if FULL else ["Gemma4TextConfig", "HYV4Config", "Llama4TextConfig"])
def test_with_sequence_parallelism(name: str) -> None:
    model = model_of(name)
    try:
        found = differences(model, inputs_of(model), 2, sequence_parallel=True)
    except ValueError as error:
        words = NOT_CUT.get(name, "sequence_parallel=True needs")
        assert words in str(error) and "sequence" in str(error)
    else:
        assert name not in NOT_CUT
        assert wrong(found) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED if FULL else ["DogeConfig"])
def test_a_model_that_its_plan_does_not_fit_is_refused(name: str) -> None:
    model: Any = model_of(name)
    with pytest.raises(ValueError) as error:
        differences(model, inputs_of(model), 2)
    assert REFUSED[name] in str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _names() if FULL else [*NOT_SEPARATED])
def test_a_token_sees_no_other_document_of_its_row(name: str) -> None:
    """The results of a document do not change with the document before it, or the rows are refused."""
    model: Any = model_of(name)
    if not {"input_ids", "position_ids"} <= set(inspect.signature(model.forward).parameters) or "Talker" in name:
        pytest.skip("takes no token ids with their positions")
    rows = torch.randint(3, VOCAB, (2, 2, SEQ), generator=torch.Generator().manual_seed(0))
    rows[1, :, SEQ // 2 :] = rows[0, :, SEQ // 2 :]
    positions = torch.arange(SEQ).remainder(SEQ // 2).repeat(2, 1)
    with comm.as_rank(Mesh(1), 0), torch.no_grad():
        swap(model)
        try:
            first, second = (model(input_ids=ids, position_ids=positions)[0][:, SEQ // 2 :] for ids in rows)
        except ValueError as error:
            assert "got rows of packed documents" in str(error) and NOT_SEPARATED.get(name, "") in str(error)
        else:
            assert name not in NOT_SEPARATED
            torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not FULL, reason="reads every configuration: make test-full")
def test_at_least_125_plans() -> None:
    assert len(_names()) >= 125
