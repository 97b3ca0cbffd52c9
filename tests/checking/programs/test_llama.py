"""Hugging Face models, swapped, in every layout and option: they check clean, and their forgotten parts do not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import spmd
from neuronx_dist.parallel_layers.linear import RowParallelLinear
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank_of_a_kind_is_confirmed")]

transformers = pytest.importorskip("transformers")

ROWS, SEQ = 8, 16


def build(
    sequence_parallel: bool = False,
    pipeline: bool = True,
    optimizer: str = "zero1",
    kind: str = "llama",
    pad_heads: bool = False,
    pad_vocab: bool = False,
    dtype: torch.dtype = torch.float32,
    change: Any = None,
    **config: Any,
) -> tuple[Any, Any]:
    """Model and optimizer as a training script has them."""
    from neuronx_dist import hf

    nxd.model_parallel_manual_seed(0)
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQ,
    )
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **config})
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    hf.swap(model, sequence_parallel=sequence_parallel, pad_heads=pad_heads, pad_vocab=pad_vocab)
    if change is not None:
        change(model)
    if pipeline:
        model = nxd.NxDPPModel(
            model,
            transformer_layer_cls=hf.transformer_layer_class(model),
            num_microbatches=4,
            output_loss_value_spec={"loss": True, "logits": False},
            auto_partition=True,
            broadcast_and_average_loss=True,
            use_zero1_optimizer=optimizer == "zero1",
        )
    params = list(model.local_parameters() if pipeline else model.parameters())
    if optimizer == "plain":
        return model, torch.optim.AdamW(params)
    wrapper = nxd.NeuronZero1Optimizer if optimizer == "zero1" else nxd.MasterWeightsOptimizer
    return model, wrapper(params, torch.optim.AdamW)


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.zeros(ROWS, SEQ, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "num_items_in_batch": nxd.global_num_items(ids, 4)}


CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"tp": 4}, {}),
    "tp-sp": ({"tp": 4}, dict(sequence_parallel=True)),
    "tp-dp-plain": ({"tp": 2, "dp": 2}, dict(optimizer="plain")),
    "tp-dp-master-bf16": ({"tp": 2, "dp": 2}, dict(optimizer="master", dtype=torch.bfloat16)),
    "pp-tp-sp-dp-zero1-bf16": (
        {"pp": 2, "tp": 2, "dp": 2},
        dict(sequence_parallel=True, dtype=torch.bfloat16),
    ),
    "pp4-dp": ({"pp": 4, "dp": 2}, dict(num_hidden_layers=4)),
    "tied-pp-sp": ({"pp": 2, "tp": 2}, dict(tie_word_embeddings=True, sequence_parallel=True)),
    "tied-pp-dp-master": ({"pp": 2, "tp": 2, "dp": 2}, dict(tie_word_embeddings=True, optimizer="master")),
    "padded-heads": (
        {"tp": 2, "dp": 2},
        dict(pad_heads=True, num_attention_heads=9, num_key_value_heads=3, hidden_size=36, head_dim=4),
    ),
    "padded-vocabulary": (
        {"pp": 2, "tp": 4},
        dict(pad_vocab=True, vocab_size=61, tie_word_embeddings=True, sequence_parallel=True),
    ),
    "padded-vocabulary-no-pipeline": ({"tp": 2, "dp": 2}, dict(pad_vocab=True, vocab_size=61, pipeline=False)),
    "attention-dropout": ({"tp": 2, "dp": 2}, dict(attention_dropout=0.1)),
    "no-pipeline": ({"tp": 4, "dp": 2}, dict(pipeline=False)),
    "no-pipeline-sp-eager": ({"tp": 2}, dict(pipeline=False, sequence_parallel=True, attn_implementation="eager")),
    "biases": ({"tp": 2, "dp": 2}, dict(attention_bias=True, mlp_bias=True)),
    "qwen2-sp": ({"pp": 2, "tp": 2}, dict(kind="qwen2", sequence_parallel=True)),
    "qwen3": ({"tp": 2, "dp": 2}, dict(kind="qwen3", head_dim=8)),
    "data-only": ({"dp": 4}, {}),
    "replicated-kv": ({"tp": 8, "dp": 2}, {}),
    "replicated-kv-sp-eager": ({"tp": 8}, dict(sequence_parallel=True, attn_implementation="eager")),
    "replicated-kv-one-head": ({"tp": 4}, dict(num_key_value_heads=1, sequence_parallel=True)),
    "replicated-kv-padded-biases": (
        {"pp": 2, "tp": 4, "dp": 2},
        dict(pad_heads=True, num_attention_heads=6, num_key_value_heads=2, hidden_size=24, attention_bias=True),
    ),
    "replicated-kv-qwen3": ({"tp": 8, "dp": 2}, dict(kind="qwen3", head_dim=8, sequence_parallel=True)),
}


# With NXD_FULL=1: each of their options is in another case, or in test_hf_clean.py (biases, eager attention).
FULL_ONLY = {"tp", "padded-vocabulary-no-pipeline", "no-pipeline-sp-eager", "biases", "replicated-kv"}
FULL_ONLY |= {"replicated-kv-sp-eager", "replicated-kv-qwen3", "tp-sp", "qwen2-sp", "data-only", "pp4-dp"}
FULL_ONLY |= {"tp-dp-master-bf16"}
RUN = [case for case in CASES if os.environ.get("NXD_FULL") == "1" or case not in FULL_ONLY]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", RUN)
def test_a_training_step_is_clean(case):
    mesh, options = CASES[case]
    report = spmd.check(build, inputs, mesh, options=options)
    assert report.ok, str(report)


def test_a_loss_that_each_rank_divides_by_its_own_count_is_refused():
    """Without `num_items_in_batch` the loss is the mean over a rank's own labels, and the mean of means is another."""
    ids = torch.zeros(ROWS, SEQ, dtype=torch.long)
    report = spmd.check(build, {"input_ids": ids, "labels": ids}, {"tp": 2, "dp": 2})
    assert {problem.kind for problem in report.problems} == {"types"} and "on dp" in str(report)


def test_a_row_layer_that_does_not_reduce_is_refused():
    def change(model: Any) -> None:
        layer = model.model.layers[1].mlp.down_proj
        assert isinstance(layer, RowParallelLinear)
        layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)

    report = spmd.check(build, inputs, {"pp": 2, "tp": 2}, options=dict(change=change))
    (problem,) = report.problems
    assert problem.kind == "types" and "P on tp" in problem.message and "down_proj" in problem.message
    assert problem.ranks[0] == 2  # of the stage that has layer 1


def test_forgotten_sequence_parallel_marks_are_refused_by_the_gate():
    def change(model: Any) -> None:
        norm = model.model.layers[1].input_layernorm
        norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
        norm.__dict__.pop("_shard_specs", None)

    options = dict(sequence_parallel=True, change=change, optimizer="plain")
    report = spmd.check(build, inputs, {"tp": 2}, options=options)
    (problem,) = report.problems
    assert problem.kind == "types" and "layers.1.input_layernorm" in problem.message, problem.message


def test_the_example_checks_a_large_model_and_says_how_long_it_took():
    """Layers of the largest size, which are as wide as they are many: a rank's weights alone would take 1.7 GiB."""
    code = "import sys, check_llama; check_llama.SIZES['70b']['num_hidden_layers'] = 4; sys.exit(check_llama.main())"
    options = ["--size", "70b", "--tp", "4", "--pp", "2", "--dp", "2", "--sequence-parallel"]
    done = forked.run(["-c", code, *options], PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "examples")]))
    assert done.codes == [0], done.outputs + done.errors
    report, cost = done.outputs[0].splitlines()
    assert report.startswith("check ok: 16 ranks, level G: gradients, collectives and pipeline messages agree")
    assert " s, " in cost and float(cost.split(" s, ")[1].split()[0]) < 1.0  # GiB
