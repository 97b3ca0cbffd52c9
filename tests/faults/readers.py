"""Readers of files that strangers may have damaged: each writes a small folder, and reads it as plain values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.checkpoint.convert.weights import convert
from neuronx_dist.checkpoint.run_state import collect
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import checkpointing
from neuronx_dist.parallelize.generated.generated_files import GeneratedFolder
from neuronx_dist.parallelize.generated.keys import Key
from neuronx_dist.pipeline.timeline.recorded import recorded
from neuronx_dist.planning.plan import CallPlan, Plan, TensorPlan
from neuronx_dist.scripts.convert_zero_checkpoints import convert_zero_checkpoints
from tests.checkpoint import nxd_folder, nxd_runs
from tests.checkpoint.small_run import Run
from tests.checkpoint.test_dcp import Plain
from tests.hf.gguf_writing import write_gguf


class Reader(NamedTuple):
    """A reader of the package.

    Attributes:
        write: writes its files into a new folder.
        read: returns plain values and tensors.
        sums: the format has checksums, so that no damage stays unnoticed.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    sums: bool = False


def on_one_rank(function: Callable[[], Any]) -> Any:
    return threads.run(Mesh(1), function)[0]


# --- checkpoints


def _write_ours(folder: Path) -> None:
    def rank() -> None:
        run = Run()
        run.train()
        run.save(folder, "a")

    on_one_rank(rank)


def _read_ours(folder: Path) -> Any:
    def rank() -> Any:
        run = Run(seed=1)
        run.train()
        before = run.values()
        try:
            content = run.load(folder, "a")
        except Exception:
            assert all(map(torch.equal, before, run.values())), "the run was changed"
            raise
        return run.values(), content

    return on_one_rank(rank)


def _plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return model, optimizer


def _write_dcp(folder: Path) -> None:
    model, optimizer = _plain()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "a", no_dist=True)


def _read_dcp(folder: Path) -> Any:
    def rank() -> Any:
        model = Plain()
        optimizer = torch.optim.AdamW(model.parameters())
        nxd.load_checkpoint(folder, "a", model, optimizer)
        return model.state_dict(), optimizer.state_dict()

    return on_one_rank(rank)


def _write_nxd(folder: Path, xser: bool = False) -> None:
    nxd_runs.write(folder / "a", xser=xser, user_content={"step": 1})


def _read_nxd(folder: Path) -> Any:
    def rank() -> Any:
        model, optimizer, content = nxd_runs.load(folder, "a")
        return {key: tensor.tensor for key, tensor in collect(model, optimizer).tensors.items()}, content

    return on_one_rank(rank)


def _write_first_way(folder: Path) -> None:
    on_one_rank(lambda: checkpointing.save({"model": Run().model.state_dict(), "step": 3}, folder))


def _read_first_way(folder: Path) -> Any:
    def rank() -> Any:
        model = Run(seed=1).model
        return checkpointing.load(folder, model), model.state_dict()

    return on_one_rank(rank)


# --- models


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(4)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )


def _write_safetensors(folder: Path) -> None:
    _llama().save_pretrained(folder, max_shard_size="2KB")


def _write_bin(folder: Path) -> None:
    model = _llama()
    model.config.save_pretrained(folder)
    state = model.state_dict()
    names = sorted(state)
    for number, part in enumerate((names[:9], names[9:])):
        torch.save({name: state[name] for name in part}, folder / f"pytorch_model-{number}.bin")
    weight_map = {name: f"pytorch_model-{int(name in names[9:])}.bin" for name in names}
    index = {"metadata": {"total_size": 4}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _read_model(folder: Path) -> Any:
    with torch.device("meta"):
        model = LlamaForCausalLM(_llama().config)
    return comm.threads.run(Mesh(1), lambda: hf.load_pretrained(model, folder).state_dict())[0]


def _write_converted(folder: Path, **options: Any) -> None:
    """Our conversions, which have checksums."""
    source = folder.with_name("source")
    shutil.rmtree(source, ignore_errors=True)
    _llama().save_pretrained(source)
    convert(source, folder, tag="a", **options) if options["to"] == "nxd" else convert(source, folder, **options)


def _read_converted_to_nxd(folder: Path) -> Any:
    with comm.as_rank(Mesh(1), 0), torch.device("meta"):
        model = hf.swap(LlamaForCausalLM(_llama().config))

    def rank() -> Any:
        nxd.load_checkpoint(folder, "a", model)
        return model.state_dict()

    return on_one_rank(rank)


def _read_by_convert(folder: Path) -> Any:
    """Weights by the config, which says how they are divided and named."""
    out = folder.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    convert(folder, out, to="nxd")
    path = out / "converted" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    return dict(torch.load(path, weights_only=True))


def _read_gguf(folder: Path) -> Any:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return on_one_rank(lambda: hf.load_pretrained(model, folder / "model.gguf").state_dict())


def _write_zero_states(folder: Path) -> None:
    nxd_folder.write(folder / "a", nxd_runs.parameters(), 1, 1, 2, masters=True)


def _read_zero_states(folder: Path) -> Any:
    """The states of ZeRO-1 at another dp."""
    out = folder.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    convert_zero_checkpoints(str(folder / "a"), str(out), 1)
    return torch.load(out / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)


# --- others


def _write_trace(folder: Path) -> None:
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}]
    for rank in range(2):
        args = {"step": 0, "stage": rank}
        for number, category in enumerate(("forward", "forward", "backward", "backward")):
            task = {"chunk": 0, "microbatch": number % 2}
            times = {"ts": 3000.0 * number, "dur": 2000.0}
            events.append({"ph": "X", "pid": rank, "tid": 1, "cat": category, "args": {**args, **task}, **times})
        step = {"stages": 2, "microbatches": 2, "chunks": 1}
        events.append({"ph": "X", "pid": rank, "tid": 0, "cat": "step", "args": {**args, **step}, "ts": 0, "dur": 9})
    (folder / "trace.json").write_text(json.dumps(events))


def _read_trace(folder: Path) -> Any:
    chart = recorded([str(folder / "trace.json")])
    return [[(str(bar.task), bar.start, bar.end) for bar in bars] for bars in chart.stages]


def _write_plan(folder: Path) -> None:
    calls = (CallPlan("linear", "up", "column"), CallPlan("linear", "down", "row"))
    tensors = {
        "up.weight": TensorPlan((16, 8), "float32", "S(0)"),
        "down.weight": TensorPlan((8, 16), "float32", "S(1)"),
    }
    Plan(tp=2, dp=2, calls=calls, parameters=tensors, inputs={"x": TensorPlan((4, 8), "float32", "R")}).save(
        folder / "plan.json"
    )


KEY = Key({"class": "Net"}, {"policy": "tp"})


def _write_generated(folder: Path) -> None:
    generated = GeneratedFolder(folder, nn.Linear)
    generated.write(KEY, {"gencode0.py": "VALUE = 7\n", "notes.json": "[1]"}, {"weight": torch.arange(12.0)})


def _read_generated(folder: Path) -> Any:
    generated = GeneratedFolder(folder, nn.Linear).read(KEY)
    return generated.module("gencode0.py").VALUE, generated.text("notes.json"), dict(generated.weights())


READERS = {
    "save_checkpoint": Reader(_write_ours, _read_ours, sums=True),
    "torch.distributed.checkpoint": Reader(_write_dcp, _read_dcp),
    "NxD": Reader(_write_nxd, _read_nxd),
    "NxD, xser": Reader(lambda folder: _write_nxd(folder, xser=True), _read_nxd),
    "checkpointing.load": Reader(_write_first_way, _read_first_way),
    "safetensors": Reader(_write_safetensors, _read_model),
    ".bin": Reader(_write_bin, _read_model),
    "converted to Hugging Face": Reader(partial(_write_converted, to="hf"), _read_model, sums=True),
    "converted to NxD": Reader(partial(_write_converted, to="nxd"), _read_converted_to_nxd, sums=True),
    "converted to NxD, xser": Reader(partial(_write_converted, to="nxd", xser=True), _read_converted_to_nxd, sums=True),
    "convert with config.json": Reader(_write_safetensors, _read_by_convert),
    "GGUF": Reader(lambda folder: write_gguf(folder / "model.gguf", "llama"), _read_gguf),
    "nxd_convert_zero_checkpoints": Reader(_write_zero_states, _read_zero_states),
    "trace": Reader(_write_trace, _read_trace),
    "plan": Reader(_write_plan, lambda folder: Plan.load(folder / "plan.json")),
    "generated files": Reader(_write_generated, _read_generated, sums=True),
}
