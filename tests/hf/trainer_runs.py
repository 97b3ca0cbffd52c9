"""A small run of Trainer, ours on several ranks or transformers' own in one process, and what it leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import accelerate.utils.memory
import datasets
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.lora import LoraConfig, get_lora_model
from tests.support.llama import tiny_llama
from tests.support.pool import processes

__all__ = [
    "EndAt",
    "Rows",
    "Stream",
    "evaluate",
    "exchanges",
    "on_ranks",
    "ranks",
    "tiny_model",
    "train",
    "train_adapters",
]

LENGTH = 12

# Trainer collects garbage in each run, among all objects of transformers: half of the CPU time of a run.
accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random ids; row n has n % 5 labels fewer than the next."""

    def __init__(self, count: int, vocabulary: int = 96) -> None:
        self.ids = torch.randint(0, vocabulary, (count, LENGTH), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        labels = self.ids[row].clone()
        labels[: 1 + row % 5 * 2] = -100
        return {"input_ids": self.ids[row], "labels": labels}


def tiny_model(kind: str = "llama", **config: Any) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(tiny_llama(**config))
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, **config))
    config.pop("use_cache", None)
    model = BertForSequenceClassification if kind == "bert" else BertForTokenClassification
    return model(BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=96))


def loss_in_float64(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
    """The loss of transformers, without its conversion of the logits to float32."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    total = F.cross_entropy(logits.reshape(-1, vocab_size), targets, ignore_index=-100, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else (targets != -100).sum())


def accuracy(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != -100].mean()), "rows": len(labels)}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The rows in their order, without a length."""

    def __init__(self, count: int) -> None:
        self.rows = Rows(count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.rows[row] for row in range(len(self.rows)))


class EndAt(transformers.TrainerCallback):
    """Saves and ends the run after a step, or kills one rank in it."""

    def __init__(self, step: int, kill: int | None = None) -> None:
        self.step, self.kill = step, kill

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.kill is not None and state.global_step == self.step - 1 and comm.rank("world") == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def train(
    folder: Path,
    ours: bool,
    *,
    resume: Any = None,
    dtype: Any = torch.float64,
    rows: Any = 32,
    model: dict[str, Any] | None = None,
    unlabelled: bool = False,
    **options: Any,
) -> Any:
    """Trains, and returns the log, the weights and the predictions of 7 rows.

    Args:
        unlabelled: also compares the predictions with those of rows without labels.
    """
    settings: dict[str, Any] = dict(
        per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=1e-2, max_steps=4, logging_steps=1
    )
    settings |= dict(
        lr_scheduler_type="cosine", warmup_steps=2, use_cpu=True, report_to=[], log_level="error", save_strategy="no"
    )
    settings |= dict(disable_tqdm=True, optim="adamw_torch", weight_decay=0.1) | options
    callbacks = settings.pop("callbacks", None)
    package: Any = nxd.hf if ours else transformers
    module = tiny_model(**(model or {})).to(dtype)
    if not ours and dtype == torch.float64 and not isinstance(module, BertForSequenceClassification):
        module.loss_function = loss_in_float64
    arguments = package.TrainingArguments(str(folder), **settings)
    trainer = package.Trainer(
        model=module,
        args=arguments,
        train_dataset=Rows(rows) if isinstance(rows, int) else rows,
        eval_dataset=Rows(7),
        compute_metrics=accuracy,
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    result = trainer.train(resume_from_checkpoint=resume)
    predicted = trainer.predict(Rows(7))
    if unlabelled:
        without = trainer.predict([{"input_ids": row["input_ids"]} for row in Rows(7)])
        assert abs(without.predictions - predicted.predictions).max() < 1e-12
    weights = nxd.hf.full_state_dict(trainer.pipeline or trainer.model) if ours else trainer.model.state_dict()
    logs = [
        {key: log[key] for key in ("loss", "grad_norm", "learning_rate", "epoch")}
        for log in trainer.state.log_history
        if "loss" in log
    ]
    return {
        "logs": logs,
        "train_loss": result.training_loss,
        "flos": result.metrics["total_flos"],
        "weights": {name: value.clone() for name, value in weights.items()},
        "predictions": torch.as_tensor(predicted.predictions),
        "metrics": {
            key: value for key, value in predicted.metrics.items() if key in ("test_loss", "test_accuracy", "test_rows")
        },
    }


def train_adapters(folder: Path, ours: bool, *, resume: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """Trains adapters on rows with a column that forward does not take; returns them, as they were saved last."""
    settings: dict[str, Any] = dict(per_device_train_batch_size=4, learning_rate=1e-2, max_steps=4, save_steps=2)
    settings |= dict(use_cpu=True, report_to=[], log_level="error", disable_tqdm=True)
    package: Any = nxd.hf if ours else transformers
    args = package.TrainingArguments(str(folder), **settings | options)
    model = tiny_model().to(torch.float64)
    if ours:
        args.start()
        nxd.hf.swap(model)
    else:
        model.loss_function = loss_in_float64
    adapted: Any = get_lora_model(model, LoraConfig(lora_rank=2, target_modules=["q_proj", "v_proj"]))
    for name, param in adapted.named_parameters():
        if "lora_" in name:  # lora_B is zeros
            param.data.copy_(torch.linspace(-0.1, 0.1, param.numel()).reshape(param.shape) * (".lora_A" in name))
    rows = [Rows(16)[row] for row in range(16)]
    columns = {name: [row[name].tolist() for row in rows] for name in rows[0]}
    data = datasets.Dataset.from_dict({**columns, "text": ["unused"] * 16})
    trainer = package.Trainer(adapted if ours else adapted.get_base_model(), args, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    if not ours:
        state = model.state_dict()
        return {f"base_model.model.{name}": weight for name, weight in state.items() if "lora_" in name}
    if options.get("pp", 1) > 1:
        with pytest.raises(RuntimeError, match=r"generate at pp=2: .* call trainer.save_model\(folder\)"):
            trainer.model.generate(torch.zeros(1, 2, dtype=torch.long))
    assert not (folder / "checkpoint-4" / "model.safetensors").exists()
    return load_file(folder / "checkpoint-4" / "adapter_model.safetensors")


class _ConfidentTrainer(transformers.Trainer):
    """Has a loss that reads the logits beside the model's loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        logarithms = outputs.logits.log_softmax(-1)
        loss = outputs.loss - 0.1 * (logarithms.exp() * logarithms).sum(-1).mean()
        return (loss, outputs) if return_outputs else loss


class _ConfidentParallelTrainer(nxd.hf.ParallelTrainerMixin, _ConfidentTrainer):
    pass


def evaluate(folder: Path, ours: bool, kind: str, rows: Any, **options: Any) -> list[float]:
    """Returns the loss of an evaluation; of "confident" also a step's gradient norm, and the loss after the step."""
    settings: dict[str, Any] = dict(per_device_eval_batch_size=4, per_device_train_batch_size=4, max_steps=1)
    settings |= dict(
        use_cpu=True, report_to=[], log_level="error", save_strategy="no", disable_tqdm=True, logging_steps=1
    )
    package: Any = nxd.hf if ours else transformers
    trainers = {"confident": _ConfidentParallelTrainer if ours else _ConfidentTrainer}
    model = tiny_model(kind if kind.startswith("bert") else "llama", use_cache=False).to(torch.float64)
    if not ours and not kind.startswith("bert"):
        model.loss_function = loss_in_float64
    arguments = package.TrainingArguments(str(folder), **settings | options)
    trainer = trainers.get(kind, package.Trainer)(
        model=model,
        args=arguments,
        train_dataset=Rows(4),
        eval_dataset=Rows(rows) if isinstance(rows, int) else rows,
        data_collator=transformers.DataCollatorWithFlattening() if kind == "flattened" else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    values = [trainer.evaluate()["eval_loss"]]
    if kind == "confident":
        trainer.train()
        values += [trainer.state.log_history[-2]["grad_norm"], trainer.evaluate()["eval_loss"]]
    return [float(value) for value in values]


def _rank(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    with patch.dict(os.environ, {name: str(value) for name, value in zip(names, (size, rank, rank, size))}):
        result = function(*args, **options)
    return result if rank == 0 else None


def on_ranks(size: int, function: Any, *args: Any, backend: str = "gloo", **options: Any) -> Any:
    """Calls a function on the processes of a job, as torchrun starts them; returns what rank 0 does."""
    return processes(size).run(_rank, function, args, options, initialize=False, backend=backend)[0]


def ranks(size: int, folder: Path, **options: Any) -> Any:
    return on_ranks(size, train, folder, True, **options)


def exchanges() -> None:
    """Compares what ranks exchange around the loop, on threads; a case of the tests of mutations."""
    from neuronx_dist.hf.trainer.exchanges import (
        by_data_rank,
        compare_batches,
        from_last_stage,
        mean_over_data,
        whole_logits,
    )
    from neuronx_dist.trainer.accelerator import rows_of_all

    whole = torch.arange(48.0).reshape(1, 4, 12)

    def data() -> None:
        rank = comm.rank("dp") + 1.0
        assert mean_over_data(torch.tensor(rank)) == 1.5 and by_data_rank(torch.tensor(rank)) == 0.75
        assert rows_of_all(torch.tensor([[rank]])).tolist() == [[1.0], [2.0]]
        trainer: Any = SimpleNamespace(current_flos=rank, state=SimpleNamespace(total_flos=1.0))
        nxd.hf.ParallelTrainerMixin.store_flos(trainer)
        assert (trainer.state.total_flos, trainer.current_flos) == (7.0, 0)

    def logits() -> None:
        places = torch.tensor([[0, 3], [1, 2]][comm.rank("cp")])
        local = whole[:, places].chunk(2, -1)[comm.rank("tp")]
        assert torch.equal(whole_logits(local, 12, places), whole)

    def stages() -> None:
        here = whole if comm.rank("pp") == 1 else None
        assert torch.equal(from_last_stage(here, 1, torch.device("cpu")), whole)
        compare_batches([whole], 1)
        try:
            compare_batches([whole + comm.rank("pp")], 1)
        except RuntimeError:
            return
        raise AssertionError("other batches were not noticed")

    comm.threads.run(Mesh(4, cp=2), data)
    comm.threads.run(Mesh(4, tp=2, cp=2), logits)
    comm.threads.run(Mesh(2, pp=2), stages)
