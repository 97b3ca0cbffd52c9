"""`neuronx-dist train`, run as a user runs it."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import neuronx_dist
from tests.support import forked

pytest.importorskip("transformers")

pytestmark = pytest.mark.process

SMALL = ["--steps", "4", "--global-batch", "4", "--seq-len", "32", "--microbatches", "2", "--log-every", "1"]


def run(*flags, ranks=1):
    """Runs the command on so many ranks; (exit code, output)."""
    result = forked.run(["-m", "neuronx_dist", "train", *flags], ranks)
    return max(result.codes), "".join(result.outputs + result.errors)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run in one process."""
    out = tmp_path_factory.mktemp("train") / "run"
    code, text = run(*SMALL, "--out", str(out))
    assert code == 0, text
    return out, text


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_one_process_without_torchrun_leaves_metrics_curve_and_model(trained):
    from transformers import AutoModelForCausalLM

    out, text = trained
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all({"loss", "grad_norm", "lr", "tokens_per_s"} <= row.keys() for row in rows)
    assert 5.3 < rows[0]["loss"] < 5.8  # log 256 = 5.55: an untrained model knows nothing
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    _, report = AutoModelForCausalLM.from_pretrained(out / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for part in ("1 rank", "parameters", "held-out loss", "the model goes on"):
        assert part in text, text


def test_a_run_records_what_it_was_made_with(trained):
    out, text = trained
    record = json.loads((out / "run.json").read_text())
    assert record["flags"]["steps"] == 4 and record["flags"]["out"] == str(out) and record["flags"]["lr"] == 2e-3
    assert {"world_size": 1, "tp": 1, "pp": 1, "dp": 1, "num_microbatches": 2}.items() <= record["layout"].items()
    assert record["versions"]["torch"] == torch.__version__ and record["versions"]["python"] in sys.version
    assert record["versions"]["neuronx_dist"] == neuronx_dist.__version__
    assert record["command"].endswith(f"--out {out}") and "run.json" in text
    assert re.search(r"text: 4\.00 of \d+\.\d\d MiB, from .* files of Python's library sources \(--data-limit", text)


def test_processes_give_the_losses_of_one(trained, tmp_path):
    """With the flags of the run's record, and all that measures switched on."""
    out = tmp_path / "run"
    flags = ["--config", str(trained[0] / "run.json"), "--tp", "2", "--pp", "2", "--sequence-parallel"]
    code, text = run(*flags, "--tensorboard", "--peak", "1e12", "--profile", "1", "--out", str(out), ranks=4)
    assert code == 0, text
    assert losses(out) == pytest.approx(losses(trained[0]), rel=1e-5)
    assert "FLOPs per token: 6 · 1,672,896 of 1,722,048 parameters + 12 · 4 layers" in text
    assert re.search(
        r"peak memory of a rank: .* MiB measured \(of the process, with its imports\), .* MiB predicted", text
    )
    rows = [json.loads(line) for line in (out / "metrics.rank3.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(row["mfu"] > 0 and row["peak_memory"] > 0 for row in rows)
    assert any((out / "tensorboard").iterdir())
    events = json.loads((out / "profile.rank3.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events if event.get("cat") == "user_annotation"}
    assert {"F0", "B0", "all_reduce world", "recv pp_forward", "reduce_scatter tp"} <= names
    assert {f"pipeline rank {rank}" for rank in range(4)} <= {event.get("pid") for event in events}


def test_a_saved_folder_is_trained_further_in_another_layout_in_bfloat16_with_muon(trained, tmp_path):
    out = tmp_path / "run"
    flags = ["--model", str(trained[0] / "model"), "--zero1", "--dtype", "bfloat16", "--optimizer", "muon"]
    code, text = run(*SMALL, *flags, "--out", str(out), ranks=2)
    assert code == 0, text
    assert losses(out)[0] < losses(trained[0])[-1] + 0.1  # it goes on from where the first run ended


def test_verify_prints_a_table_and_agrees(tmp_path):
    code, text = run(*SMALL, "--steps", "2", "--verify", "--fused-loss", ranks=2)
    assert code == 0, text
    assert "one process" in text and "tp 2 × pp 1 × dp 1 + sequence parallel" in text
    assert "tp 1 × pp 1 × dp 1 × cp 2 + ZeRO-1 + fused loss + recompute full" in text
    assert "all layouts agree to 1e-05" in text
    assert not (Path.cwd() / "runs").exists() or "runs" not in text


def test_what_a_rank_alone_can_refuse(tmp_path):
    from transformers import CodeGenConfig

    unplanned = tmp_path / "codegen"
    CodeGenConfig(n_layer=4, n_embd=32, n_head=4, rotary_dim=4, vocab_size=256).save_pretrained(unplanned)
    refusals = [
        (["--model", str(unplanned), "--out", str(tmp_path / "run")], ["CodeGenForCausalLM", "qkv_proj"]),
        (["--device", "xla"], ["device 'xla'"]),
    ]
    for flags, messages in refusals:
        code, text = run(*flags)
        assert code == 2 and all(message in text for message in messages) and "Traceback" not in text, (flags, text)


DIVERGING = [*SMALL, "--lr", "1e20", "--warmup", "1", "--save-every", "1"]


def strict(out):
    """The rows of metrics.jsonl, which has to be JSON without NaN."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    out = tmp_path / "run"
    code, text = run(*DIVERGING, "--pp", "2", "--out", str(out), ranks=2)
    (line,) = [line for line in text.splitlines() if line.startswith("neuronx-dist train: step")]
    assert code == 1 and "Traceback" not in text
    assert re.search(
        r"step 2 of 4: the loss is nan, the gradient norm nan .*pipeline stage 0, 1\).*step_1 is saved", line
    )
    assert [row["loss"] is None for row in strict(out)] == [False, True]
    assert not (out / "model").exists() and [path.name for path in (out / "checkpoints").glob("step_*")] == ["step_1"]


def test_a_run_may_go_on_after_a_loss_that_is_not_finite(tmp_path):
    out = tmp_path / "run"
    code, text = run(*DIVERGING, "--allow-nonfinite", "--out", str(out))
    assert code == 0 and "the last loss is not finite: the model writes no text" in text, text
    assert [row["loss"] is None for row in strict(out)] == [False, True, True, True]
