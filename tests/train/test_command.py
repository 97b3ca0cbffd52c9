"""`neuronx-dist train` before there are ranks: what it refuses, and what it starts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import neuronx_dist as nxd
from neuronx_dist import __main__
from neuronx_dist.checkpoint.tags import DONE, MARKER
from neuronx_dist.comm import run_command
from neuronx_dist.planner import Cluster
from neuronx_dist.train import command, training_run
from neuronx_dist.train.causal_lm import load_config
from neuronx_dist.train.flags import layout_of


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Arguments of `neuronx-dist run`, which is not run, or of the rank that this process would be."""
    calls: list[argparse.Namespace] = []
    monkeypatch.setattr(run_command, "run", lambda args: calls.append(args) or 7)
    monkeypatch.setattr(command.rank_exit, "start", lambda **_: None)
    monkeypatch.setattr(training_run, "run_rank", lambda args: calls.append(args) or 0)
    return calls


@pytest.mark.parametrize(
    "flags, count",
    [("--tp 2 --pp 2", 4), ("--cp 2 --ep 4", 4), ("--nproc 6 --tp 2 --global-batch 24", 6), ("--nproc auto", 8)],
)
def test_ranks_of_this_host(flags: str, count: int, started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The degrees, or --nproc, say how many; the words of the command line go to each."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    words = [*flags.split(), "--experts", "4", "--global-batch", "96"]
    assert __main__.main(["train", *words]) == 7
    (call,) = started
    assert (call.nproc_per_node, call.standalone, call.no_python) == (str(count), True, True)
    assert call.training_script == sys.executable and call.training_script_args[3:] == ["train", *words]


def test_a_rank_starts_no_ranks(started: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A rank of a launcher, one process alone, and a check of any number of ranks."""
    assert __main__.main(["train"]) == __main__.main(["train", "--tp", "8", "--check", "64"]) == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert __main__.main(["train", "--tp", "2", "--nproc", "2"]) == 0
    assert [args.tp for args in started] == [1, 8, 2] and not hasattr(started[0], "words")
    assert __main__.main(["train", "--nproc", "4"]) == 2
    assert "--nproc 4: the launcher has started 2 ranks; leave --nproc out" in capsys.readouterr().err


def test_auto_takes_the_fastest_plan(started: Any, capsys: Any) -> None:
    """The flags of the plan go to the ranks, after those that are given."""
    assert __main__.main("train --nproc 4 --auto --tp 2 --steps 3 --global-batch 32".split()) == 7
    (call,) = started
    words = call.training_script_args[3:]
    assert words[:7] == "train --nproc 4 --tp 2 --steps 3".split() and "--auto" not in words
    args = command.arguments().parse_args(words[1:])
    best = nxd.plan(
        load_config(args)[0],
        global_batch=32,
        seq_len=128,
        cluster=Cluster.of_this_host(4, "cpu"),
        constraints={"tp": 2, "dtype": "float32"},
        top_k=1,
        check=False,
    )[0]
    layout = layout_of(args, 4)
    assert replace(layout, schedule=best.layout.schedule) == best.layout and args.fused_loss
    out = capsys.readouterr().out
    assert f"--auto: {best.words()}\n" in out and "s a step by the cpu preset" in out and "the next one: +" in out
    assert __main__.main("train --nproc 4 --auto --tp 3".split()) == 2
    assert "tp 3 excludes all; without it: " in capsys.readouterr().err
    assert __main__.main("train --auto".split()) == 2
    assert "torch sees no accelerator: give --nproc" in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_ranks_start(started: Any, tmp_path: Path, capsys: Any) -> None:
    LlamaConfig(num_attention_heads=6, hidden_size=24, intermediate_size=32).save_pretrained(tmp_path / "model")
    (tmp_path / "nested").mkdir()
    nested = {"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4}}
    (tmp_path / "nested" / "config.json").write_text(json.dumps(nested))
    (tmp_path / "run.json").write_text(json.dumps({"flags": {"tp": 3}}))
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    for name in (MARKER, DONE):
        (tmp_path / "checkpoints" / "step_3" / name).touch()
    for flags, message in (
        ("--tp 3", "4 key/value heads (shared by 8 query heads) cannot be split over tp 3"),
        (f"--config {tmp_path / 'run.json'}", "cannot be split over tp 3"),
        ("--nproc 3 --tp 2", "3 processes are not divisible by tp 2"),
        ("--nproc auto", "torch sees none on this host: give a number"),
        ("--nproc 0", "expected an integer of at least 1, or auto, got 0"),
        ("--tp 0", "--tp must be at least 1, not 0"),
        ("--tp 2 --cp -2", "--cp must be at least 1, not -2"),
        ("--tp 2 --schedule zb_v", "--schedule zb_v is of a pipeline, and --pp is 1"),
        ("--config /no/run.json", "--config /no/run.json: no such file; give the run.json of an earlier run"),
        (f"--config {__file__}", "no run.json: it is not JSON ("),
        ("--sequence-parallel", "--sequence-parallel shards along tp, and --tp is 1: give --tp 2 or more"),
        ("--global-batch 6", "a global batch of 6 is not divisible by dp 1 × 4 microbatches = 4"),
        ("--pp 5", "5 pipeline stages for 4 layers"),
        ("--data /no/such/folder", "no file or folder /no/such/folder"),
        ("--out .", ". exists, and a run does not write over another"),
        ("--model /no/such/model", "has no config.json"),
        ("--model a.gguf", "which `neuronx-dist convert` writes from a GGUF file"),
        (f"--model {tmp_path / 'model'} --tp 4", "6 attention heads"),
        (f"--model {tmp_path / 'nested'} --pp 3", "3 pipeline stages for 2 layers"),
        ("--resume", "--resume needs --out"),
        (f"--tp 2 --out {tmp_path / 'new'} --resume", "there is no complete checkpoint in"),
        (f"--tp 2 --out {tmp_path} --resume step_4", "step_4: there is no checkpoint 'step_4' in"),
        ("--overlap", "--overlap needs --zero1"),
        ("--steps 0", "--steps must be at least 1, not 0"),
        ("--seq-len 1", "--seq-len must be at least 2, not 1: each token is predicted from those before it"),
        ("--data-limit -1", "--data-limit must be at least 0, not -1.0"),
    ):
        assert __main__.main(["train", *flags.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and "neuronx-dist train: " in error, (flags, error)
    assert started == []
