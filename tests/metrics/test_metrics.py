"""Figures of steps: counts by hand and on meshes, writers that strict readers take, the profile, Trainer's logs."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Trainer, TrainingArguments

import neuronx_dist as nxd
from neuronx_dist import accelerator, comm, hf, metrics
from neuronx_dist.comm.backends import threads
from tests.support.llama import tiny_llama
from tests.support.pipeline_models import Block, Model, batch


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# --- FLOPs ---


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_llama_by_hand(tied: bool) -> None:
    h, f, layers, vocab, heads, kv, e, s = 32, 44, 3, 60, 8, 4, 6, 100
    sizes = dict(num_attention_heads=heads, num_key_value_heads=kv, hidden_size=h, head_dim=e, intermediate_size=f)
    config = tiny_llama(num_hidden_layers=layers, vocab_size=vocab, tie_word_embeddings=tied, **sizes)
    found = metrics.training_flops(on_meta(config), s)
    matrices = layers * (2 * h * heads * e + 2 * h * kv * e + 3 * h * f) + vocab * h
    active = matrices + (2 * layers + 1) * h
    assert found.active == active and found.parameters == active + (not tied) * vocab * h
    assert found.per_token == 6 * active + 12 * layers * heads * e * s
    assert str(found).endswith(f"12 · 3 layers · 48 · 100 tokens = {found.per_token:,}")


def test_flops_count_matrices_as_torch_does() -> None:
    """Measured by torch's counter, forward and backward of a model whose attention sees the whole sequence."""
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    config = tiny_llama(num_hidden_layers=2, vocab_size=61, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(61, (2, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    found = metrics.training_flops(model, 24)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert counter.get_total_flops() == 48 * (found.per_token - 6 * vectors)


def test_of_experts_those_count_that_a_token_takes() -> None:
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=32)
    config = MixtralConfig(num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, **sizes)
    model = on_meta(config)
    found = metrics.training_flops(model, 10)
    assert found.parameters - found.active == 32 * 16 + 2 * 6 * 3 * 16 * 24
    with pytest.raises(ValueError, match=r"how many of its experts a token takes \(num_experts_per_tok=None"):
        metrics.training_flops(model, 10, config=SimpleNamespace(num_local_experts=8))


def test_latent_attention_has_two_sizes_of_heads() -> None:
    """Keys of 16 + 8 and values of 12 numbers, where the config's head_dim is that of the rotary part."""
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=32)
    latent = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, n_group=1, topk_group=1)
    config = DeepseekV3Config(num_key_value_heads=4, first_k_dense_replace=2, **sizes, **latent, **experts)
    assert metrics.training_flops(on_meta(config), 10).width == 4 * (16 + 8 + 12) / 2


def test_a_sharded_model_is_refused() -> None:
    with comm.as_rank(nxd.Mesh(2, tp=2), 0), pytest.raises(ValueError, match="is a shard: call training_flops before"):
        metrics.training_flops(hf.swap(on_meta(tiny_llama())), 8)


def test_peaks() -> None:
    with pytest.raises(ValueError, match="peak=0: pass the FLOPs"):
        metrics.StepMeter(peak=0)
    assert metrics.peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and metrics.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert metrics.peak_flops("NVIDIA A100-SXM4-40GB") == 312e12 and metrics.peak_flops("trn2") == 83.4e12
    assert metrics.peak_flops("NVIDIA GeForce GTX 1080") is None
    with pytest.raises(ValueError, match="no peak is known of 'abacus': pass the FLOPs per second"):
        metrics.StepMeter(peak="abacus", devices=1)


# --- steps ---


@pytest.mark.parametrize(
    "mesh", [nxd.Mesh(1), nxd.Mesh(4, tp=2), nxd.Mesh(4, pp=2), nxd.Mesh(8, tp=2, cp=2), nxd.Mesh(4)]
)
def test_each_token_counts_once(mesh: nxd.Mesh) -> None:
    def rank() -> tuple[int, float]:
        rows = {"input_ids": torch.zeros(8 // comm.size("dp"), 12, dtype=torch.long)}
        part = nxd.get_batch_on_this_context_parallel_rank(rows)
        tokens = metrics.global_tokens(part["input_ids"])
        return tokens, metrics.StepMeter().figures(tokens, 0.5)["tokens_per_s_per_device"]

    assert threads.run(mesh, rank) == [(96, 192 / mesh.world_size)] * mesh.world_size


def test_ranks_without_a_mesh_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of `DistributedDataParallel`, as of Trainer."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    tokens = metrics.global_tokens(torch.zeros(2, 12))
    assert tokens == 96 and metrics.StepMeter().figures(tokens, 0.5)["tokens_per_s_per_device"] == 48


def test_figures_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 100.0, 104.0, 0.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    flops = metrics.TrainingFlops(2000, 1000, 2, 10, 50)  # 18,000 FLOPs per token
    meter = metrics.StepMeter(flops=flops, peak=36e6, devices=4, predicted_memory=123)
    row = meter.step(8000)
    memory = row.pop("peak_memory")
    expected = {"seconds": 2.0, "tokens_per_s": 4000.0, "tokens_per_s_per_device": 1000.0, "tflops_per_device": 18.0e-6}
    assert row == {**expected, "mfu": 0.5, "predicted_memory": 123} and memory > 1e8
    meter.mark()
    assert meter.step(8000)["seconds"] == 4.0
    assert "mfu" not in metrics.StepMeter(devices=1).figures(1, 1)


def test_an_accelerators_memory_and_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"get_device_name": lambda: "NVIDIA H200", "max_memory_allocated": lambda: 7 << 30}
    monkeypatch.setattr(accelerator, "module_of", lambda kind: SimpleNamespace(**(functions if kind == "cuda" else {})))
    monkeypatch.setattr(accelerator, "current_type", lambda: "cuda")
    row = metrics.StepMeter(flops=metrics.TrainingFlops(0, 989, 0, 0, 0), devices=1).figures(1e12, 12.0)
    assert row["mfu"] == 0.5 and row["peak_memory"] == 7 << 30
    assert metrics.peak_memory(torch.device("xpu")) is None


# --- writers ---


def strict(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.rank1.jsonl"
    write = metrics.JsonLines(path)
    for step, loss in enumerate([3.0, math.nan, -math.inf], 1):
        write(step, {"loss": loss})
        assert len(strict(path)) == step  # at once
    assert strict(path)[1] == {"step": 2, "loss": None, "nonfinite": {"loss": "nan"}}
    write(3, {"loss": 1.0, "norms": {"up": [2.0, math.nan]}})
    assert strict(path)[3] == {"step": 3, "loss": 1.0, "norms": {"up": [2.0, None]}, "nonfinite": {"norms.up.1": "nan"}}
    assert metrics.JsonLines(path, after=3).rows[3] == {"step": 3, "loss": 1.0, "norms": {"up": [2.0, None]}}
    write.close()
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # of a killed run
    resumed = metrics.JsonLines(path, after=2)
    assert [row["step"] for row in resumed.rows] == [1, 2] and math.isnan(resumed.rows[1]["loss"])
    resumed(3, {"loss": 1.0})
    resumed.close()
    assert [row["loss"] for row in strict(path)] == [3.0, None, 1.0]
    assert metrics.JsonLines(path).rows == [] and path.read_text() == ""


def test_a_full_disk_loses_no_step(tmp_path: Path) -> None:
    class Full:
        closed = False

        def truncate(self, size: int) -> None:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    write: Any = metrics.JsonLines(tmp_path / "metrics.jsonl", warn=said.append)
    write(1, {})
    file, write._file = write._file, Full()
    write(2, {})
    write(3, {})
    write._file = file
    write(4, {})
    assert [row["step"] for row in strict(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert said == ["warning: training goes on, metrics.jsonl waits: [Errno 28] No space left on device"]


def test_tensorboard(tmp_path: Path) -> None:
    write = metrics.TensorBoard(tmp_path)
    write(1, {"loss": 2.5, "step": 1, "text": "no curve", "tokens": 3})
    write.close()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert b"loss" in content and b"tokens" in content and b"no curve" not in content


# --- profile ---


def test_a_profile_has_tasks_collectives_and_the_timeline(tmp_path: Path) -> None:
    def rank() -> None:
        torch.manual_seed(0)
        options: Any = dict(transformer_layer_cls=Block, num_microbatches=2, output_loss_value_spec=True)
        model = nxd.NxDPPModel(Model(), **options, auto_partition=True)
        profile = metrics.profile_steps(tmp_path / f"profile.rank{comm.rank('world')}.json", 1, pipeline=model)
        with profile as profiler:
            for _ in range(4):
                model.run_train(**batch())
                for param in model.parameters():
                    param.grad = None
                profiler.step()
        assert model.trace_file_path is None

    with comm.as_rank(nxd.Mesh(1), 0):  # torch profiles a process, not a thread
        rank()
    events = json.loads((tmp_path / "profile.rank0.json").read_text())["traceEvents"]
    tasks = {"F0", "B0", "F1", "B1"}
    profiled = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    timeline = {event["name"]: event for event in events if event["pid"] == "pipeline rank 0"}
    assert tasks <= profiled.keys() and tasks <= timeline.keys()
    for name in tasks:
        ends = [event["ts"] + event["dur"] for event in (profiled[name], timeline[name])]
        assert abs(ends[0] - ends[1]) < 1000  # microseconds


def test_an_error_in_a_profiled_step_waits_for_no_rank(tmp_path: Path) -> None:
    pipeline = SimpleNamespace(trace_file_path=None)
    profile = metrics.profile_steps(tmp_path / "profile.json", 2, skip=0, pipeline=pipeline)
    with comm.as_rank(nxd.Mesh(2, pp=2), 0), pytest.raises(ZeroDivisionError), profile as profiler:
        profiler.step()  # a barrier would wait for rank 1
        assert pipeline.trace_file_path is not None
        raise ZeroDivisionError
    assert (tmp_path / "profile.json").exists() and pipeline.trace_file_path is None
    profile = metrics.profile_steps(tmp_path / "other.json", 2)
    with pytest.warns(UserWarning, match="the loop made less than 3 steps"), profile as profiler:
        profiler.step()


def test_collectives_are_ranges_of_the_profiler() -> None:
    from neuronx_dist.comm import recording
    from neuronx_dist.metrics.step_profiler import _Names

    with comm.as_rank(nxd.Mesh(2), 0), torch.profiler.profile() as profiler:
        names = _Names(0)
        recording.attach(names)
        comm.all_reduce(torch.ones(4), "dp")
        comm.all_gather(torch.ones(4), "dp")
        recording.detach(names)
        comm.all_reduce(torch.ones(4), "dp")
    ranges = [event.name for event in profiler.events() if event.name.endswith(" dp")]
    assert ranges == ["all_reduce dp", "all_gather dp"]


# --- Trainer ---


@pytest.mark.slow
def test_trainers_logs(tmp_path: Path) -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.ones(3), "labels": torch.ones(1)}

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.line(x) - labels).square().mean()}

    options: Any = dict(
        per_device_train_batch_size=4,
        logging_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    seen: list[Any] = []
    trainer = Trainer(Line(), TrainingArguments(str(tmp_path), num_train_epochs=1, **options), train_dataset=Rows())
    flops = metrics.TrainingFlops(2000, 1000, 0, 0, 0)
    callback = metrics.trainer_callback(tokens_per_step=40, flops=flops, peak=1e9, devices=2, predicted_memory=5)
    callback.add_to(trainer)
    printer = trainer.callback_handler.callbacks[-1]
    printer.on_log = lambda args, state, control, logs=None, **kwargs: seen.append(dict(logs))
    trainer.train()
    losses = [row for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 2
    for row, shown in zip(losses, seen):
        assert row["tokens_per_s_per_device"] == pytest.approx(40 / row["seconds"] / 2)
        assert row["mfu"] == pytest.approx(6000 * row["tokens_per_s_per_device"] / 1e9)
        assert row["peak_memory"] > 0 and row["predicted_memory"] == 5 and shown["mfu"] == row["mfu"]
