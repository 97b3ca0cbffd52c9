"""`validate` on ranks as threads, its file, and the commands `plan measure` and `plan validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.__main__ import main
from neuronx_dist.gradients.reduce import reduce_gradients
from neuronx_dist.mesh import Mesh
from neuronx_dist.planner import Cluster, LayoutPlan
from neuronx_dist.planner.validation import TrainingJob, Validation, validate
from neuronx_dist.planning.memory import estimate_memory


def config() -> Any:
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=16)
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)


def plan(**constraints: Any) -> LayoutPlan:
    fixed = dict(tp=1, num_microbatches=1, dtype="float32", recompute="")
    plans = nxd.plan(
        config(),
        global_batch=4,
        seq_len=16,
        cluster=Cluster.preset("cpu", constraints["dp"]),
        constraints={**fixed, **constraints},
        check=False,
    )
    return plans[0]


@pytest.mark.slow
def test_all_ranks_get_prediction_and_measurement(tmp_path: Path) -> None:
    """The measured peak of one rank is the played step's; the file returns what was appended."""
    one = plan(dp=2, zero1=True)
    results = comm.threads.run(one.layout.mesh(), lambda: validate(one, config(), steps=2, warmup=1))
    result = results[0]
    assert results[1] == result
    assert (result.predicted, len(result.steps)) == (one.seconds.total, 2)
    assert result.error == result.predicted / result.measured - 1
    alone = plan(dp=1)
    measured = comm.threads.run(alone.layout.mesh(), lambda: TrainingJob(alone.layout, config()).measure(1))[0]
    assert measured.peak == pytest.approx(estimate_memory(alone.layout, config(), fused_loss=True).peak, rel=0.01)
    assert "dp 2, ZeRO-1" in str(result) and "measured elsewhere" not in str(result)
    result.append(tmp_path / "results.jsonl")
    result.append(tmp_path / "results.jsonl")
    assert Validation.load(tmp_path / "results.jsonl") == [result, result]


@pytest.mark.parametrize("overlap", [True, False])
def test_with_overlap_weights_are_awaited_in_the_next_run(overlap: bool) -> None:
    """The wait for gathers is in the next run, as the planner counts; that for sums of gradients is not in a run."""
    one = plan(dp=2, zero1=True, overlap=overlap, num_microbatches=2)

    def waits() -> tuple[set[str], set[str]]:
        job = TrainingJob(one.layout, config(), overlap=one.candidate.overlap)
        job.step()
        with comm.record(waits=True) as in_run:
            job.model.run(job.model.training_schedule, job.inputs)
        reduce_gradients(job.model, average_over_data=False)
        with comm.record(waits=True) as in_step:
            job.optimizer.step()
        return {call.verb for call in in_run}, {call.verb for call in in_step}

    for in_run, in_step in comm.threads.run(one.layout.mesh(), waits):
        assert ("wait:all_gather" in in_run, "wait:all_gather" in in_step) == (overlap, not overlap)
        assert "wait:reduce_scatter" in in_step - in_run


def test_another_mesh_and_compiled_code_are_refused() -> None:
    one = plan(dp=2)

    def wrong() -> None:
        with pytest.raises(ValueError, match=r"the job's mesh is Mesh.*tp=2.*the layout's Mesh"):
            TrainingJob(one.layout, config())

    comm.threads.run(Mesh(2, tp=2), wrong)
    with pytest.raises(ValueError, match="the plan is of compiled code"):
        validate(plan(dp=2, compiled=True), config())


def test_missing_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "validate", "--model", "llama-8b", "--cluster", "cpu"]) == 2
    assert "required: --plan" in capsys.readouterr().err
    assert main(["plan", "--model", "llama-8b", "--cluster", "cpu", "--batch", "8"]) == 2
    assert "required: --seq-len" in capsys.readouterr().err
    assert main(["plan", "--model", "llama-8b"]) == 2
    assert "required: --cluster, --batch, --seq-len" in capsys.readouterr().err


def test_validate_asks_for_the_folder_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "validate", "--model", "llama-8b", "--cluster", "cpu", "--plan", "a.json"]) == 2
    assert "neuronx-dist plan: there is no config llama-8b: pass the folder" in capsys.readouterr().err
