"""Parts of `neuronx-dist train`: text, progress, flags."""

import argparse
import io
import json
import random
from argparse import Namespace

import pytest
import torch
from transformers import LlamaConfig

import neuronx_dist as nxd
from neuronx_dist.checkpoint import api
from neuronx_dist.metrics import JsonLines
from neuronx_dist.train.flags import check_flags, parser
from neuronx_dist.train.progress import Progress, centred_means, loss_curve
from neuronx_dist.train.run_checkpoints import _FLAGS, RunCheckpoints
from neuronx_dist.train.text_stream import ByteTokenizer, TextStream
from neuronx_dist.train.training_run import _writers_of


def some_text(size: int) -> str:
    return "".join(random.Random(size).choices("abcdef \n", k=size))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text" / "deep").mkdir(parents=True)
    (tmp_path / "text" / ".hidden").mkdir()
    (tmp_path / "text" / "a.txt").write_text(some_text(5000))
    (tmp_path / "text" / "deep" / "b.txt").write_text(some_text(3000))
    (tmp_path / "text" / "empty.txt").write_text("")
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "text" / ".hidden" / "c.txt").write_text("hidden" * 1000)
    return tmp_path / "text"


# --- text ---


def test_batches_depend_on_seed_and_step_only(folder):
    first = TextStream([folder], seq_len=16, global_batch=8, seed=3)
    again = TextStream([folder], seq_len=16, global_batch=8, seed=3)
    again.batch(7)  # the order of calls does not matter
    assert torch.equal(first.batch(5)["input_ids"], again.batch(5)["input_ids"])
    assert not torch.equal(first.batch(5)["input_ids"], first.batch(6)["input_ids"])
    other = TextStream([folder], seq_len=16, global_batch=8, seed=4)
    assert not torch.equal(first.batch(5)["input_ids"], other.batch(5)["input_ids"])
    assert first.batch(5)["input_ids"].shape == (8, 16) and first.batch(5)["input_ids"].dtype == torch.int64
    assert torch.equal(first.batch(5)["input_ids"], first.batch(5)["labels"])


def test_all_text_of_a_folder_is_read_and_part_of_it_held_out(folder):
    data = TextStream([folder], seq_len=16, global_batch=2)
    stream = 5000 + 3000 + 2  # an end after each document; no hidden, binary or empty file
    assert len(data.train) + len(data.held_out) == stream
    assert 0.03 < len(data.held_out) / stream < 0.07
    text = data.decode(data.train.tolist())
    assert "hidden" not in text and "PNG" not in text


def test_training_batches_hold_no_held_out_text(tmp_path):
    """With text that never repeats itself, no window of the held-out part occurs in the training part."""
    (tmp_path / "numbers.txt").write_text(" ".join(f"{n:06}" for n in range(3000)))
    data = TextStream([tmp_path], seq_len=32, global_batch=4)
    train = data.decode(data.train.tolist())
    held_out = data.decode(data.held_out.tolist())
    numbers = {text for text in held_out.split() if len(text) == 6}
    assert numbers and not [number for number in numbers if f" {number} " in train]


def test_held_out_batches_walk_through_the_held_out_text(folder):
    data = TextStream([folder], seq_len=16, global_batch=4)
    windows = len(data.held_out) // 16
    rows = torch.cat([data.held_out_batch(index)["input_ids"] for index in range(-(-windows // 4))])
    assert torch.equal(rows[:windows].flatten(), data.held_out[: windows * 16].long())
    assert torch.equal(rows[windows:], rows[: len(rows) - windows])  # then from the start


@pytest.mark.slow
def test_the_default_text_is_there_and_capped():
    data = TextStream(seq_len=64, global_batch=2, max_bytes=200_000)
    assert 190_000 < len(data.train) + len(data.held_out) < 210_000
    assert data.vocab_size == 256 and int(data.batch(0)["input_ids"].max()) < 256
    assert "import" in data.decode(data.train.tolist())


def test_it_says_how_much_was_read_of_how_much(folder):
    part = TextStream([folder], seq_len=16, global_batch=2, max_bytes=6000)
    assert part.summary.startswith("text: 0.01 of 0.01 MiB, from 2 of 4 files of ") and "--data-limit" in part.summary
    assert len(part.train) + len(part.held_out) == 6002
    whole = TextStream([folder], seq_len=16, global_batch=2, max_bytes=None)
    assert len(whole.train) + len(whole.held_out) == 8002


@pytest.mark.slow
def test_all_that_is_read_needs_no_hint(tmp_path):
    (tmp_path / "a.txt").write_text(some_text(3 << 20))
    assert "3.00 of 3.00 MiB, from 1 of 1 files" in TextStream([tmp_path], seq_len=16, global_batch=2).summary
    assert "limit" not in TextStream([tmp_path], seq_len=16, global_batch=2).summary
    less = TextStream([tmp_path], seq_len=16, global_batch=2, max_bytes=1 << 20)
    assert "1.00 of 3.00 MiB, from 1 of 1 files" in less.summary and "--data-limit" in less.summary


def test_bytes_round_trip(folder):
    data = TextStream([folder], seq_len=16, global_batch=2)
    assert data.decode(data.encode("naïve → ∑")) == "naïve → ∑"
    assert isinstance(data.tokenizer, ByteTokenizer)


def test_a_hugging_face_tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    model.train_from_iterator(
        [some_text(5000)], tokenizers.trainers.BpeTrainer(vocab_size=64, special_tokens=["?", "<end>"])
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?", eos_token="<end>")
    data = TextStream([folder], seq_len=16, global_batch=2, tokenizer=tokenizer)
    assert data.vocab_size == len(tokenizer) and int(data.train.max()) < data.vocab_size
    assert len(data.train) < 8000 * 0.95  # merges
    assert (torch.cat([data.train, data.held_out]) == tokenizer.eos_token_id).sum() == 2


def test_data_that_cannot_be_used(folder, tmp_path):
    with pytest.raises(ValueError, match="no file or folder .*nowhere"):
        TextStream([folder, tmp_path / "nowhere"], seq_len=16, global_batch=2)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no text in .*none"):
        TextStream([tmp_path / "none"], seq_len=16, global_batch=2)
    with pytest.raises(ValueError, match="a sequence takes 5,000.*seq_len of at most 400"):
        TextStream([folder], seq_len=5000, global_batch=2)


# --- progress ---


def run(progress, steps=4):
    with progress:
        for step in range(1, steps + 1):
            progress.step(step, loss=5.0 - step, grad_norm=1.5, lr=1e-3)
            if step % 2 == 0:
                progress.held_out(4.0)


@pytest.mark.slow
def test_metrics_hold_one_object_a_step(tmp_path, capsys):
    progress = Progress(4, 1000, out=tmp_path / "run", log_every=2, terminal=False)
    run(progress)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == [4.0, 3.0, 2.0, 1.0]
    assert all({"grad_norm", "lr", "tokens_per_s"} <= row.keys() for row in rows)
    assert ["held_out_loss" in row for row in rows] == [False, True, False, True]
    assert progress.mean_loss(2) == 1.5
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/4", "2/4", "4/4"]
    assert "loss 3.0000" in lines[1] and "grad norm 1.500" in lines[1] and "tokens/s" in lines[1] and "left" in lines[1]


def test_an_interrupted_run_leaves_what_it_has(tmp_path):
    progress = Progress(4, 1000, out=tmp_path, record={"flags": {"tp": 2}}, terminal=False)
    with progress:
        progress.step(1, loss=5.0, grad_norm=1.0, lr=1e-3)
        progress.step(2, loss=4.0, grad_norm=1.0, lr=1e-3)
        text = progress.interrupted()
    assert text == "after step 2 of 4"
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert (tmp_path / "loss.png").exists()
    assert json.loads((tmp_path / "run.json").read_text()) == {"flags": {"tp": 2}}
    assert Progress(4, 1000, active=False).interrupted() == "after step 0 of 4"


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_files(tmp_path, capsys):
    """Steps after the checkpoint are made again; what a killed run has left of a line is dropped."""
    record = {"flags": {"tp": 2}}
    with Progress(4, 1000, out=tmp_path, record=record, terminal=False) as progress:
        for step in (1, 2, 3):
            progress.step(step, loss=float(step), grad_norm=1.0, lr=1e-3)
    with open(tmp_path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 4, "lo')
    for again in ({"flags": {"tp": 1}}, {"flags": {"tp": 4}}):
        progress = Progress(4, 1000, out=tmp_path, record=again, terminal=False, done=2)
        assert [row["step"] for row in progress.rows] == [1, 2] and progress.done == 2
        with progress:
            progress.step(3, loss=30.0, grad_norm=1.0, lr=1e-3)
            assert progress.interrupted() == "after step 3 of 4"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    resumed = [{"after_step": 2, "flags": {"tp": 1}}, {"after_step": 2, "flags": {"tp": 4}}]
    assert json.loads((tmp_path / "run.json").read_text()) == {"flags": {"tp": 2}, "resumed": resumed}
    Progress(4, 1000, out=tmp_path, record=record, terminal=False)  # a new run in the same folder
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert json.loads((tmp_path / "run.json").read_text()) == record


def test_files_of_ranks_that_a_smaller_layout_lacks_keep_the_steps_before_it(tmp_path):
    for rank in (1, 2):
        lines = JsonLines(tmp_path / f"metrics.rank{rank}.jsonl")
        for step in (1, 2, 3):
            lines(step, {})
        lines.close()
    assert _writers_of(Namespace(out=str(tmp_path), tensorboard=False), world_size=2, done=2) == []
    steps = [(tmp_path / f"metrics.rank{rank}.jsonl").read_text().splitlines() for rank in (1, 2)]
    assert [len(lines) for lines in steps] == [3, 2]  # rank 1 is there, and shortens its file itself


def test_flush_writes_a_step_at_once(tmp_path):
    progress = Progress(4, 1000, out=tmp_path, terminal=False)
    progress.step(1, loss=5.0, grad_norm=1.0, lr=1e-3)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    progress.flush()
    progress.flush()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    progress.interrupted()


def test_metrics_survive_a_failure(tmp_path):
    with pytest.raises(RuntimeError), Progress(4, 1000, out=tmp_path, active=True, terminal=False) as progress:
        progress.step(1, loss=5.0, grad_norm=1.0, lr=1e-3)
        raise RuntimeError("a rank failed")
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_other_ranks_say_and_write_nothing(tmp_path, capsys):
    progress = Progress(4, 1000, out=tmp_path / "run", active=False, log_every=1)
    run(progress)
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()
    assert progress.mean_loss() == 2.5


def test_evaluation_time_counts_for_no_step(monkeypatch):
    clock = iter([0.0, 0.0, 0.0, 0.0, 1.0, 100.0, 101.0])
    monkeypatch.setattr("neuronx_dist.train.progress.time.perf_counter", lambda: next(clock))
    progress = Progress(2, 500, terminal=False, active=False)
    with progress:
        progress.step(1, loss=1.0, grad_norm=1.0, lr=1.0)
        progress.held_out(1.0)
        progress.step(2, loss=1.0, grad_norm=1.0, lr=1.0)
    assert [row["tokens_per_s"] for row in progress.rows] == [500.0, 500.0]


def test_a_terminal_has_one_line_of_steps(monkeypatch, capsys):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: Namespace(columns=60))
    run(Progress(4, 1000, terminal=True))
    shown = [part.removesuffix("\x1b[K") for part in capsys.readouterr().out.replace("\n", "\r").split("\r") if part]
    assert (
        shown[0].startswith("step 1/4  loss 4.0000  grad norm 1.500")
        and {*map(len, shown)} & {*range(60, 200)} == set()
    )
    assert shown[2:4] == ["held-out loss 4.0000 after step 2", shown[1]]  # and the line of the step below it
    assert shown[-1].startswith("step 4/4")


def test_the_mean_of_the_loss_curve_does_not_lag():
    """A straight line is its mean, at the ends too; a mean over the steps before would be shifted."""
    line = [3.0 - 0.5 * i for i in range(40)]
    assert centred_means(line) == pytest.approx(line)
    peak = centred_means([0.0] * 20 + [21.0] + [0.0] * 20)
    assert peak == [1.0 if 10 <= i <= 30 else 0.0 for i in range(41)]


def flags_of(words):
    flags = parser("", "").parse_args(words)
    del flags.words
    return flags


def test_flags_of_a_run_may_be_given_back(tmp_path, capsys):
    record = tmp_path / "run.json"
    flags = vars(flags_of(["--steps", "7", "--tp", "2", "--zero1", "--out", "x", "--peak", "1e12", "--resume", "t"]))
    record.write_text(json.dumps({"flags": flags}))
    again = flags_of(["--config", str(record), "--tp", "4"])
    assert (again.steps, again.tp, again.zero1, again.out, again.resume, again.peak) == (7, 4, True, None, None, 1e12)
    assert flags_of(["--config", str(record)]) == argparse.Namespace(
        **{**flags, "out": None, "resume": None, "config": str(record)}
    )
    again = flags_of(["--config", str(record), "--lr", "1e-4", "--steps", "50"])  # others follow from these
    assert (again.min_lr, again.eval_every) == (1e-5, 10)
    record.write_text(json.dumps({"flags": {**flags, "min_lr": 1e-5, "data": ["a", "b"]}}))
    again = flags_of(["--config", str(record), "--lr", "1e-3"])
    assert (again.min_lr, again.data) == (1e-5, ["a", "b"])
    for text, words in (
        ('{"flags": {"tq": 2}}', "this version has no --tq"),
        ('{"flags": {"dtype": "float16"}}', "invalid choice: 'float16'"),
        ("[]", "no run.json"),
        ("{", "Expecting"),
    ):
        record.write_text(text)
        with pytest.raises(SystemExit):
            flags_of(["--config", str(record)])
        assert words in capsys.readouterr().err
    for wrong, words in (
        (["--peak", "abacus"], "neither a number nor one of A100"),
        (["--peak", "0"], "above 0"),
        (["--profile", "9"], "--steps 11"),
    ):
        with pytest.raises(ValueError, match=words):
            check_flags(flags_of(["--steps", "10", *wrong]))


def test_a_loss_curve_of_one_step(tmp_path):
    loss_curve([{"step": 1, "loss": 5.5}], tmp_path / "one.png", "tp 2")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_metrics_that_could_not_be_written_are_written_later(tmp_path, capsys):
    """Half of a line is on the full disk; the run goes on, and says so once."""
    with Progress(4, 128, out=tmp_path, terminal=False) as progress:
        progress.step(1, loss=1.0, grad_norm=1.0, lr=1.0)
        progress.flush()
        (lines,) = progress._writers
        write = lines._file.write

        class Full(io.FileIO):
            def write(self, data):
                write(bytes(data)[:10])
                raise OSError(28, "No space left on device")

        whole, lines._file = lines._file, Full(tmp_path / "metrics.jsonl", "r+")
        for step in (2, 3):
            progress.step(step, loss=float(step), grad_norm=1.0, lr=1.0)
            progress.flush()
        lines._file.close()
        lines._file = whole
        progress.step(4, loss=4.0, grad_norm=1.0, lr=1.0)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2, 3, 4]
    assert (
        capsys.readouterr().out.count("warning: training goes on, metrics.jsonl waits: [Errno 28] No space left") == 1
    )


# --- checkpoints ---


def test_after_a_save_in_the_background_that_failed_the_last_complete_one_is_named(tmp_path, monkeypatch):
    args = Namespace(
        **{**dict.fromkeys(_FLAGS), "out": str(tmp_path), "async_save": True, "keep": 0, "save_every": 1, "steps": 9}
    )
    checkpoints = RunCheckpoints(args, LlamaConfig(), "text", lambda line: None)
    failing = []
    monkeypatch.setattr(api, "save_checkpoint", lambda *args, **options: None)
    run = Namespace(model=None, optimizer=None, schedule=None)

    def finalize() -> None:
        if failing:
            raise nxd.CheckpointError("no space left on device")

    monkeypatch.setattr(api, "finalize_checkpoint", finalize)
    assert checkpoints.left() == "there is no checkpoint (--save-every)"
    for step in (1, 2):
        checkpoints.after_step(step, run)
    assert checkpoints.left().startswith("step_1 is saved")  # step 2 is being written
    failing.append(True)
    checkpoints.finish()
    assert checkpoints.left().startswith("step_1 is saved")
    failing.clear()
    checkpoints.after_step(3, run)
    checkpoints.finish()
    assert checkpoints.left().startswith("step_3 is saved")
