"""Models of transformers' tensor-parallel plans, all of them, tiny: loss, logits and gradients of one process at tp 2.

The whole list is in the full tier; what it leaves out is listed with the reason, and is not silently wrong.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from neuronx_dist.hf.model_plan import UnsupportedModelError
from tests.hf.every_plan import classes_with_plans, inputs_of, model_of
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
# Their layers take a second tensor of the sequence's length, which the cut leaves whole: the shapes do not fit.
NOT_CUT = """
    DeepseekV4Config Gemma3nTextConfig Gemma4TextConfig HiggsAudioV2Config HYV4Config Inkling2TextConfig
    Llama4VisionConfig Qwen4ExpTextConfig
""".split()
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
@pytest.mark.parametrize("name", [n for n in _names() if n not in NOT_CUT] if FULL else ["Llama4TextConfig"])
def test_with_sequence_parallelism(name: str) -> None:
    model = model_of(name)
    try:
        found = differences(model, inputs_of(model), 2, sequence_parallel=True)
    except UnsupportedModelError as error:
        assert "sequence_parallel=True needs" in str(error)
    else:
        assert wrong(found) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED if FULL else ["DogeConfig"])
def test_a_model_that_its_plan_does_not_fit_is_refused(name: str) -> None:
    model: Any = model_of(name)
    with pytest.raises(ValueError) as error:
        differences(model, inputs_of(model), 2)
    assert REFUSED[name] in str(error.value)


@pytest.mark.skipif(not FULL, reason="reads every configuration: make test-full")
def test_at_least_125_plans() -> None:
    assert len(_names()) >= 125
