"""Runs of `neuronx-dist train` that are interrupted and go on: as if they had not been, to the bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm
from tests.support import forked
from tests.support.paths import ROOT

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.process


def metrics(out: Path) -> list[dict[str, Any]]:
    """Returns the metrics that a run has written of its steps, but for time and memory."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    computed = ("step", "loss", "grad_norm", "lr", "held_out_loss")
    return [{name: row[name] for name in computed if name in row} for row in rows]


def weights(out: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    return dict(model.state_dict())


def tags(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of runs in folders of `root` that have their names, one after another."""
    for name, hidden_size in (("model", 32), ("wider", 64)):
        model_config(hidden_size).save_pretrained(root / name)
    model_config(32, rms_norm_eps=1e-3).save_pretrained(root / "other_norm")
    (root / "text.md").write_text((ROOT / "LICENSE").read_text())
    (root / "foreign").mkdir()
    (root / "foreign" / "letter.txt").touch()
    (root / "full").mkdir()
    (root / "full" / "run.json").write_text("{}")
    (root / "full" / "checkpoints").write_text("a file, in which no checkpoint can be written")

    def flags(out: str | None, text: str = "", model: str = "model") -> list[str]:
        small = "--steps 6 --global-batch 4 --seq-len 32 --microbatches 2 --log-every 1 --warmup 2 --eval-every 2"
        where = [] if out is None else ["--out", str(root / out)]
        data = ["--model", str(root / model), "--data", str(root / "text.md")]
        return [*small.split(), "--no-check", *text.split(), *data, *where]

    every_2 = "--save-every 2 --keep 0"
    launch = {"TORCHELASTIC_RUN_ID": "a_launch", "TORCHELASTIC_RESTART_COUNT": "0"}
    restart = {**launch, "TORCHELASTIC_RESTART_COUNT": "1"}
    scenarios: dict[str, dict[str, Any]] = {
        "whole": {"flags": flags("whole")},
        "ended": {
            "flags": flags("ended", f"{every_2} --resume auto"),
            "signal": signal.SIGTERM,
            "at": "step 3/6",
            "copies": [str(root / name) for name in ("resumed", "tp", "dp", "overlap", "lr")],
        },
        "resumed": {"flags": flags("resumed", f"{every_2} --resume")},
        "tp": {"flags": flags("tp", f"{every_2} --resume --tp 2"), "ranks": 2},
        "dp": {"flags": flags("dp", "--resume step_2 --zero1 --recompute auto --memory 1GB"), "ranks": 2},
        "overlap": {"flags": flags("overlap", f"{every_2} --async-save --resume --zero1 --overlap"), "ranks": 2},
        "lr": {"flags": flags("lr", "--resume --steps 4 --lr 1e-4 --min-lr 1e-4 --seed 3 --eval-every 0")},
        "interrupted": {
            "flags": flags("interrupted", "--save-every 1 --keep 1 --async-save"),
            "signal": signal.SIGINT,
            "at": "step 3/6",
        },
        "killed": {"flags": flags(None, every_2), "signal": signal.SIGKILL, "at": "step 3/6", "environment": launch},
        "stranger": {"flags": flags(None, "--steps 1"), "environment": {**launch, "TORCHELASTIC_RUN_ID": "another"}},
        "restarted": {"flags": flags(None, every_2), "environment": restart},
        "check": {"flags": flags("check", "--tp 2 --check")},
        "check_recomputing": {"flags": flags("check", "--tp 2 --check --recompute full")},
        "wider": {"flags": flags("ended", "--resume", model="wider")},
        "other_norm": {"flags": flags("ended", "--resume", model="other_norm")},
        "no_tag": {"flags": flags("ended", "--resume step_5")},
        "nothing": {"flags": flags("nothing", "--resume")},
        "foreign": {"flags": flags("foreign", "--resume auto")},
        "over": {"flags": flags("whole", "--resume auto")},
        "full": {"flags": flags("full", "--resume auto --steps 2 --save-every 1")},
    }
    words = ["-m", "tests.train.forked_runs", json.dumps(list(scenarios.values()))]
    ended = forked.run(words, cwd=root, timeout=280)
    assert ended.codes == [0], ended.errors
    return dict(zip(scenarios, map(tuple, json.loads(ended.outputs[0].splitlines()[-1])), strict=True))


def model_config(hidden_size: int, **more: Any) -> Any:
    sizes = dict(hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **more)
    return transformers.LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes, bos_token_id=None, eos_token_id=0)


def last_line(result: tuple[int, str]) -> str:
    return result[1].splitlines()[-1]


def test_a_run_that_is_ended_saves_once_and_says_one_line(results: dict[str, tuple[int, str]], root: Path) -> None:
    code, text = results["ended"]
    assert code == 128 + signal.SIGTERM
    said = (
        f"neuronx-dist train: ended by SIGTERM after step 3 of 6 and saved; go on with --resume --out {root / 'ended'}"
    )
    assert text.splitlines()[-2].startswith("step 3/6") and last_line(results["ended"]) == said
    assert [row["step"] for row in metrics(root / "ended")] == [1, 2, 3] and (root / "ended" / "loss.png").exists()
    assert tags(root / "ended") == ["step_2", "step_3"] and not (root / "ended" / "model").exists()
    code, text = results["interrupted"]
    assert code == 128 + signal.SIGINT and text.count("interrupted after step 3 of 6 and saved") == 1
    assert last_line(results["interrupted"]).startswith("neuronx-dist train: interrupted")


def test_a_launch_without_a_check(results: dict[str, tuple[int, str]]) -> None:
    for name in ("whole", "tp"):
        code, text = results[name]
        assert code == 0 and "step 6/6" in text and "check ok" not in text and "not checked" not in text, text


def test_it_goes_on_to_the_bit(results: dict[str, tuple[int, str]], root: Path) -> None:
    code, text = results["resumed"]
    assert code == 0 and "resumed after step 3\n" in text, text
    assert metrics(root / "resumed") == metrics(root / "whole") and len(metrics(root / "whole")) == 6
    assert "mean loss of the last 6 steps" in text
    whole, resumed = weights(root / "whole"), weights(root / "resumed")
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    record = json.loads((root / "resumed" / "run.json").read_text())
    assert record["flags"]["resume"] == "auto" and [resumption["after_step"] for resumption in record["resumed"]] == [3]


@pytest.mark.parametrize("name, step", [("tp", 3), ("dp", 2), ("overlap", 3)])
def test_it_goes_on_in_another_layout(results: dict[str, tuple[int, str]], root: Path, name: str, step: int) -> None:
    """With `--resume step_2` step 3 is made again."""
    code, text = results[name]
    assert code == 0 and f"resumed after step {step}\n" in text, text
    whole = metrics(root / "whole")
    for row, expected in zip(metrics(root / name), whole, strict=True):
        assert row == {key: pytest.approx(value, rel=1e-6) for key, value in expected.items()}
    found, expected = weights(root / name), weights(root / "whole")
    assert all(torch.allclose(found[key], expected[key], rtol=1e-5, atol=1e-6) for key in expected)


def test_killed_ranks_are_started_again_and_go_on(results: dict[str, tuple[int, str]], root: Path) -> None:
    """Without --out they find their folder, and not that of a run which another launcher has started since then."""
    assert results["killed"][0] == -signal.SIGKILL and results["stranger"][0] == 0
    code, text = results["restarted"]
    assert code == 0 and "resumed after step 2\n" in text, text
    assert metrics(root / "runs" / "llama") == metrics(root / "whole")
    assert sorted(path.name for path in (root / "runs").iterdir()) == ["llama", "llama-2"]


def test_keep_is_how_many_checkpoints_stay(results: dict[str, tuple[int, str]], root: Path) -> None:
    assert tags(root / "interrupted") == ["step_3"]
    for name in ("resumed", "overlap"):
        assert tags(root / name) == ["step_2", "step_3", "step_4", "step_6"]


def test_a_tag_that_was_named_is_the_newest_from_then_on(results: dict[str, tuple[int, str]], root: Path) -> None:
    with comm.as_rank(Mesh(1), 0):
        assert nxd.load_checkpoint(root / "dp" / "checkpoints")["step"] == 2


def test_flags_that_have_changed_are_named_and_those_of_the_optimizer_are_used(
    results: dict[str, tuple[int, str]], root: Path
) -> None:
    changes = "--lr 0.002 -> 0.0001, --min-lr 0.0002 -> 0.0001, --seed 0 -> 3, --steps 6 -> 4"
    assert f"resumed after step 3; changed since then: {changes}\n" in results["lr"][1]
    assert [row["lr"] for row in metrics(root / "lr")] == [0.001, 0.002, 0.002, 1e-4]
    assert not any("held_out_loss" in row for row in metrics(root / "lr")[3:])


def test_what_cannot_be_resumed(results: dict[str, tuple[int, str]], root: Path) -> None:
    refusals = {
        "wider": "embed_tokens.weight has shape (256, 32) in the checkpoint and (256, 64) in this model",
        "other_norm": "is of another model: rms_norm_eps 1e-06 -> 0.001",
        "no_tag": "there is no checkpoint 'step_5'",
        "nothing": f"there is no complete checkpoint in {root / 'nothing' / 'checkpoints'}; --resume auto starts anew",
        "foreign": f"{root / 'foreign'} is not the folder of a run",
        "over": f"{root / 'whole'} has a run that has ended, and no checkpoint",
    }
    for name, words in refusals.items():
        code, text = results[name]
        assert code == 2 and words in last_line(results[name]) and "Traceback" not in text, (name, text)


def test_recompute_full_recomputes_the_layers(results: dict[str, tuple[int, str]]) -> None:
    """With tensor parallelism it repeats collectives of the forward."""
    counts = [int(results[name][1].split(" collectives, ")[0].split()[-1]) for name in ("check", "check_recomputing")]
    assert counts[1] > counts[0], results["check_recomputing"][1]


def test_training_goes_on_when_a_checkpoint_cannot_be_written(results: dict[str, tuple[int, str]], root: Path) -> None:
    code, text = results["full"]
    assert code == 0 and text.count("warning: training goes on without a checkpoint of step ") == 2, text
    assert [row["step"] for row in metrics(root / "full")] == [1, 2] and (root / "full" / "model").exists()
