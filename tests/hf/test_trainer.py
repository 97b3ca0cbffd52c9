"""`hf.Trainer` on several ranks beside transformers' Trainer in one process: losses, norms, weights, predictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from neuronx_dist import comm, destroy_model_parallel, hf
from neuronx_dist.modules.lora import LoraConfig, get_lora_model
from tests.hf.trainer_runs import EndAt, Rows, Stream, evaluate, on_ranks, ranks, tiny_model, train, train_adapters
from tests.support.paths import ROOT
from tests.support.pool import WorkerFailure

pytestmark = [pytest.mark.process, pytest.mark.slow]

HALF: dict[str, Any] = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2)  # of the rows, on each of dp 2
_references: dict[str, Any] = {}


def reference(folder: Path, **options: Any) -> Any:
    """The same run by transformers' Trainer in one process, computed once."""
    key = repr(options)
    if key not in _references:
        _references[key] = train(folder / "one_process", False, **options)
    return _references[key]


def compare(found: Any, expected: Any, tolerance: float = 1e-10, step_tolerance: float = 1e-5) -> None:
    """Compares runs; Trainer sums the losses that it logs in float32."""
    assert [log.keys() for log in found["logs"]] == [log.keys() for log in expected["logs"]]
    for mine, theirs in zip(found["logs"], expected["logs"]):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=step_tolerance)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
        assert (mine["learning_rate"], mine["epoch"]) == (theirs["learning_rate"], theirs["epoch"])
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=step_tolerance)
    assert found["flos"] == expected["flos"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        # A key's bias has no gradient but roundings.
        assert (found["weights"][name] - weight).norm() <= tolerance * max(weight.norm(), 1e-3), name
    difference = (found["predictions"] - expected["predictions"]).norm()
    assert difference <= tolerance * expected["predictions"].norm()
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=tolerance)


LAYOUTS: list[Any] = [
    (2, dict(tp=2)),
    (2, dict(pp=2)),
    (2, dict(cp=2)),
    pytest.param(2, dict(**HALF), marks=pytest.mark.full),
    (2, dict(zero1=True, **HALF)),
    (2, dict(tp=2, sequence_parallel=True, recompute="full", zero1=True)),
    (4, dict(tp=2, pp=2, microbatches=2)),
    pytest.param(4, dict(pp=2, zero1=True, schedule="gpipe", **HALF), marks=pytest.mark.full),
]


@pytest.mark.parametrize("size,layout", LAYOUTS, ids=lambda value: str(value).replace("per_device_", ""))
def test_a_layout_trains_as_one_process(size: int, layout: dict[str, Any], tmp_path: Path) -> None:
    found = ranks(size, tmp_path, unlabelled="cp" not in layout, **layout)  # over cp labels are needed
    compare(found, reference(tmp_path))


def _chosen(folder: Path, **options: Any) -> tuple[Any, list[str]]:
    """Trains with layout="auto", and returns the run, and what a rank logs."""
    said: list[str] = []
    logger = transformers.logging.get_logger("transformers.trainer")
    with patch.object(logger, "warning", said.append):
        return train(folder, True, layout="auto", **options), said


@pytest.mark.full
@pytest.mark.parametrize("limits", [{}, dict(pp=2)], ids=str)
def test_the_layout_that_is_chosen_trains_as_one_process(limits: dict[str, Any], tmp_path: Path) -> None:
    """A step has the rows that it has without a plan, 4 on each of 2 ranks: 8, as in one process."""
    options: dict[str, Any] = dict(rows=[Rows(32)[row] for row in range(32)])
    expected = reference(tmp_path, per_device_train_batch_size=8, per_device_eval_batch_size=8, **options)
    found, said = on_ranks(2, _chosen, tmp_path, **limits, **options)
    compare(found, expected)
    (words,) = said
    assert words.startswith("layout='auto': ") and words.count("\n") == 3, words
    assert all(f"{name} {size}" in words for name, size in limits.items())


def test_the_layout_that_is_chosen_divides_accumulation_anew(tmp_path: Path) -> None:
    """2 ranks x 2 rows, one at a time: 4 rows a step, which a pipeline loads at once; 13 rows are 4 steps in any way.

    The epoch in the log counts batches: 4/13 after a step of four batches of a row, 1/4 after one of 4 rows.
    """
    options: dict[str, Any] = dict(rows=[Rows(13)[row] for row in range(13)], num_train_epochs=1, max_steps=-1)
    one = dict(per_device_train_batch_size=1, per_device_eval_batch_size=4)
    found, (words,) = on_ranks(2, _chosen, tmp_path, pp=2, gradient_accumulation_steps=2, **one, **options)
    assert words.startswith("layout='auto': pp 2, ") and words.count("\n") == 3, words
    options["per_device_eval_batch_size"] = 8
    compare(found, reference(tmp_path, per_device_train_batch_size=4, **options))
    assert [log["epoch"] for log in found["logs"]] == [0.25, 0.5, 0.75, 1.0]
    by_rows = reference(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **options)
    for log, batches in zip(by_rows["logs"], (4, 8, 12, 13), strict=True):
        assert log["epoch"] == pytest.approx(batches / 13, abs=1e-4)
    for log, other in zip(found["logs"], by_rows["logs"], strict=True):
        log["epoch"] = other["epoch"]
    compare(found, by_rows)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2), dict(cp=2), dict(zero1=True, **HALF)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        dict(gradient_accumulation_steps=3, rows=44, max_steps=5),  # the last step of an epoch has 2 batches
        dict(optim="sgd", max_grad_norm=0.0, num_train_epochs=2, max_steps=-1, rows=20),
    ],
    ids=str,
)
def test_options_of_a_run(options: dict[str, Any], layout: dict[str, Any], tmp_path: Path) -> None:
    compare(ranks(2, tmp_path, **options, **layout), reference(tmp_path, **options))


@pytest.mark.parametrize("layout", [pytest.param(dict(tp=2), marks=pytest.mark.full), dict(pp=2), dict(cp=2)], ids=str)
def test_label_smoothing(layout: dict[str, Any], tmp_path: Path) -> None:
    """Transformers sums logarithms over the vocabulary in float32."""
    options: dict[str, Any] = dict(label_smoothing_factor=0.2)
    compare(ranks(2, tmp_path, **options, **layout), reference(tmp_path, **options), tolerance=1e-6)


@pytest.mark.parametrize(
    "layout",
    [HALF, dict(pp=2, microbatches=2, per_device_train_batch_size=2, gradient_accumulation_steps=2)],
    ids=["dp", "pp, accumulated"],
)
def test_a_loss_that_is_a_mean_over_its_batch(layout: dict[str, Any], tmp_path: Path) -> None:
    """The parts of a batch, whose numbers of labels differ, have the loss of the batch in one piece."""
    options: dict[str, Any] = dict(model=dict(kind="bert tokens"))
    compare(ranks(2, tmp_path, **options, **layout), reference(tmp_path, **options))


def test_a_stream_of_rows_is_divided_over_dp(tmp_path: Path) -> None:
    compare(ranks(2, tmp_path, rows=Stream(16), **HALF), reference(tmp_path, rows=Stream(16)))


@pytest.mark.parametrize(
    "layout,kind,rows",
    [
        (HALF, "bert tokens", 5),  # the last batch has one row, and no label on rank 1
        (dict(pp=2), "bert tokens", 5),
        (dict(tp=2), "llama", Stream(7)),
        (dict(tp=2), "confident", 7),
        (HALF, "flattened", 9),  # the last batch has one document
    ],
    ids=["dp", "pp", "stream", "logits", "flattened"],
)
def test_the_loss_of_an_evaluation(layout: dict[str, Any], kind: str, rows: Any, tmp_path: Path) -> None:
    """Compares losses that are means over their batch, of a stream, and of a `compute_loss` that reads the logits."""
    expected = evaluate(tmp_path, False, kind, rows)
    assert on_ranks(2, evaluate, tmp_path, True, kind, rows, **layout) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    "layout", [dict(tp=2, fused_loss=True), pytest.param(dict(pp=2), marks=pytest.mark.full)], ids=str
)
def test_the_loss_of_transformers_in_float32(layout: dict[str, Any], tmp_path: Path) -> None:
    options = dict(dtype=torch.float32, optim="adamw_torch_fused")
    compare(ranks(2, tmp_path, **options, **layout), reference(tmp_path, **options), 1e-5)


def test_checkpoints_resume_in_other_layouts(tmp_path: Path) -> None:
    """A run goes on from tp 2 in pp 2, in dp 2 with ZeRO-1, and in one process, as one that was never interrupted."""
    options: dict[str, Any] = dict(max_steps=8, rows=20)  # 5 steps an epoch
    parts: list[tuple[int, dict[str, Any]]] = [(2, dict(tp=2)), (2, dict(pp=2)), (2, dict(zero1=True, **HALF)), (1, {})]
    for number, (size, layout) in enumerate(parts):
        layout = dict(layout, callbacks=[EndAt(2 * number + 2)], resume=number > 0)
        found = ranks(size, tmp_path / "run", **options, **layout)
    expected = reference(tmp_path, **options)
    compare({**found, "train_loss": expected["train_loss"]}, expected)


def test_a_killed_run_resumes_in_another_layout(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(save_strategy="steps", save_steps=2, save_total_limit=1)
    with pytest.raises(WorkerFailure):
        ranks(2, tmp_path / "run", tp=2, callbacks=[EndAt(4, kill=1)], **options)
    (tmp_path / "run" / "checkpoint-3").mkdir()  # one that was not completed
    found = ranks(2, tmp_path / "run", resume=True, zero1=True, **HALF, **options)
    expected = reference(tmp_path)
    compare({**found, "train_loss": expected["train_loss"]}, expected)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in found["weights"].items())


@pytest.mark.parametrize("layout", [pytest.param(dict(tp=2), marks=pytest.mark.full), dict(pp=2)], ids=str)
def test_the_best_model_is_loaded_at_the_end(layout: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    options |= dict(load_best_model_at_end=True, metric_for_best_model="accuracy", learning_rate=0.3)
    compare(ranks(2, tmp_path, **options, **layout), reference(tmp_path, **options), tolerance=1e-8)


def test_bfloat16_is_autocast_in_a_pipeline_too(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(dtype=torch.float32, bf16=True, optim="sgd", microbatches=1)
    found, expected = (
        ranks(2, tmp_path, pp=2, **options),
        reference(tmp_path, dtype=torch.float32, bf16=True, optim="sgd"),
    )
    compare(found, expected, tolerance=2e-2, step_tolerance=1e-3)
    assert found["logs"][0]["loss"] == pytest.approx(expected["logs"][0]["loss"], rel=1e-6)  # 3e-5 from float32's


def test_experts_over_ep(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(model=dict(kind="mixtral"), dtype=torch.float32)  # as grouped_mm of the CPU
    compare(ranks(2, tmp_path, ep=2, **HALF, **options), reference(tmp_path, **options), 1e-5)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    """In the same layout a resumed run with dropout has the bits of one that was not interrupted."""
    options: dict[str, Any] = dict(tp=2, model=dict(attention_dropout=0.3), rows=20, max_steps=6)
    whole = ranks(2, tmp_path / "whole", **options)
    ranks(2, tmp_path / "run", callbacks=[EndAt(3)], **options)
    again = ranks(2, tmp_path / "run", resume=True, **options)
    assert all(torch.equal(again["weights"][name], weight) for name, weight in whole["weights"].items())


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(fsdp="full_shard"), "fsdp=.* is not supported here: the model is sharded by this package: use zero1=True"),
    (dict(fp16=True), "fp16=True is not supported here: .*: use bf16=True"),
    (dict(auto_find_batch_size=True), "auto_find_batch_size=True .*: set per_device_train_batch_size"),
    (dict(push_to_hub=True), r"push_to_hub=True .*: upload the folder of save_model\(\)"),
    (dict(torch_compile=True), "torch_compile=True .*: compile layers of the model"),
    (dict(layout="fast"), "layout='fast': use 'auto', or None and tp, pp"),
    (dict(microbatches=0), "microbatches=0 is to be at least 1, or None"),
    (dict(layout="auto", tp=3), "keeps tp=3: (?s:.*)1 processes are not divisible by tp 3 .*: start 3 processes"),
    (
        dict(layout="auto", microbatches=2),
        "chooses microbatches, and microbatches=2 is given: leave one of the",
    ),
    (dict(layout="auto", schedule="gpipe"), "with schedule='gpipe': the planner knows '1f1b', .*: use one of them"),
    (dict(layout="auto", recompute="attention"), "with recompute='attention': the planner knows 'norms', 'full'"),
    (dict(layout="auto", schedule="1f1b", virtual_pipeline_size=2), "keeps .*virtual_pipeline_size=2.*: use 1; sched"),
    (dict(accelerator_config={"split_batches": True}), "accelerator_config with split_batches=True"),
    (dict(accelerator_config={"even_batches": False}), "even_batches=False .*: use dataloader_drop_last=True"),
]


@pytest.mark.parametrize("options,message", REFUSED, ids=lambda value: str(value)[:30])
def test_arguments_that_would_be_wrong_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"TrainingArguments: .*{message}"):
        hf.TrainingArguments(str(tmp_path), use_cpu=True, **options)
    if torch.distributed.is_initialized():  # transformers checks its options after the job is joined
        torch.distributed.destroy_process_group()


def _refusals(folder: str) -> None:
    def trainer(args: dict[str, Any] | None = None, **options: Any) -> Any:
        settings = dict(use_cpu=True, report_to=[], save_strategy="no", log_level="error", disable_tqdm=True)
        arguments = hf.TrainingArguments(folder, **{"pp": 2, **settings, **(args or {})})
        return hf.Trainer(**{"model": tiny_model(), "args": arguments, "train_dataset": Rows(16), **options})

    plain = transformers.TrainingArguments(folder, use_cpu=True)
    with pytest.raises(TypeError, match=r"pass neuronx_dist.hf.TrainingArguments \(or a subclass of it\)"):
        hf.Trainer(model=tiny_model(), args=plain)
    with pytest.raises(
        ValueError, match="compute_loss_func computes the loss of LlamaForCausalLM from logits, which no"
    ):
        trainer(compute_loss_func=len)
    auto: dict[str, Any] = dict(layout="auto", pp=1)
    with pytest.raises(ValueError, match="layout='auto' is chosen by Trainer: pass tp, pp, ... to start before"):
        hf.TrainingArguments(folder, use_cpu=True, **auto).start()
    with pytest.raises(ValueError, match="plans by the config of a model of transformers, got model_init: pass model="):
        trainer(auto, model=None, model_init=tiny_model)
    with pytest.raises(ValueError, match="length of sequences from input_ids of train_dataset, which this Stream does"):
        trainer(auto, train_dataset=Stream(4))
    with pytest.raises(ValueError, match=r"layout='auto' keeps tp=3: (?s:.*)2 processes are not divisible by tp 3 "):
        trainer(auto | dict(tp=3), train_dataset=[Rows(8)[row] for row in range(8)])
    with pytest.raises(ValueError, match="2 processes are not divisible by tp 3 × pp 1 .*\n.* works: --tp 2$"):
        trainer(dict(pp=1, tp=3))
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="optimizers has a SGD.*pass optimizer_cls_and_kwargs"):
        trainer(model=model, optimizers=(optimizer, None)).create_optimizer()
    with pytest.raises(ValueError, match="Adafactor cannot work on shards of parameters"):
        trainer(dict(optim="adafactor")).create_optimizer()
    bert, rows = tiny_model("bert"), [{"input_ids": torch.zeros(4, dtype=torch.long), "next_sentence_label": 0}] * 8
    with pytest.raises(ValueError, match="have no labels to count.*use more microbatches"):
        trainer(dict(gradient_accumulation_steps=2), model=bert, train_dataset=rows).train()
    torch.manual_seed(comm.rank("world"))  # the order of the rows depends on it
    with pytest.raises(RuntimeError, match=r"ranks of one replica \(pp=2, cp=1, tp=1\) loaded different batches"):
        shuffled = Rows(16)
        shuffled.ids = shuffled.ids[torch.randperm(16)]
        trainer(train_dataset=shuffled).train()
    adapted = get_lora_model(tiny_model(), LoraConfig(lora_rank=2))
    with pytest.raises(ValueError, match="this LlamaForCausalLM has adapters, .*: pass the result of get_lora_model"):
        trainer(model=adapted.get_base_model())
    destroy_model_parallel()
    model = tiny_model()
    model.forward = model.forward
    with pytest.raises(ValueError, match="the forward of this LlamaForCausalLM was replaced.*use tp=1"):
        trainer(dict(pp=1, tp=2), model=model)


def test_runs_that_would_be_wrong_are_refused(tmp_path: Path) -> None:
    on_ranks(2, _refusals, str(tmp_path))


def test_adapters_are_saved_as_peft_does_and_resume_in_another_layout(tmp_path: Path) -> None:
    expected = train_adapters(tmp_path / "one_process", False, save_strategy="no")
    layouts: list[dict[str, Any]] = [dict(tp=2), dict(pp=2, resume=str(tmp_path / "checkpoint-2"))]
    for layout in layouts:
        found = on_ranks(2, train_adapters, tmp_path, True, **layout)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert (found[name] - weight).norm() <= 1e-10 * weight.norm(), name


def _page(folder: Path, **layout: Any) -> int:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trainer.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"folder": folder, "layout": {"disable_tqdm": True, "log_level": "error", **layout}}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/trainer.md, block {number}", "exec"), names)
    return len(blocks)


@pytest.mark.parametrize(
    "size,layout",
    [pytest.param(1, {}, marks=pytest.mark.full), (2, dict(pp=2, zero1=True, microbatches=2))],
    ids=str,
)
def test_the_blocks_of_the_page_run(size: int, layout: dict[str, Any], tmp_path: Path) -> None:
    assert on_ranks(size, _page, tmp_path, **layout) == 4
