"""`neuronx-dist convert`: weights between Hugging Face's folders, ours and NeuronX Distributed's, bit for bit."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.__main__ import main
from neuronx_dist.checkpoint.convert.weights import SavedWeights, convert
from neuronx_dist.checkpoint.dcp import writing
from neuronx_dist.checkpoint.dcp.reading import CheckpointFiles
from neuronx_dist.checkpoint.errors import CheckpointError, CheckpointMismatch
from neuronx_dist.checkpoint.storage import LocalStorage
from neuronx_dist.hf.sources import StateDict, open_source
from neuronx_dist.hf.writing import write_weights
from neuronx_dist.mesh import Mesh
from tests.checkpoint import nxd_folder
from tests.support.llama import tiny_llama


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A Llama of three layers, and its folder as transformers writes it. At tp 2 the vocabulary is padded."""
    torch.manual_seed(3)
    config = tiny_llama(vocab_size=31, hidden_size=16, num_hidden_layers=3, tie_word_embeddings=request.param)
    whole = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("llama")
    whole.save_pretrained(folder)
    yield whole, folder


def divided(model: Any) -> dict[str, nxd_folder.Parameter]:
    """The model's parameters as NeuronX Distributed divides them over tp=2 and pp=2."""
    parameters = {}
    for name, value in model.state_dict().items():
        dim = 1 if "o_proj" in name or "down_proj" in name else None if "norm" in name else 0
        stage = 0 if name.startswith(("model.embed", "model.layers.0")) else 1
        if "embed" in name or "lm_head" in name:
            value = torch.cat([value, torch.zeros(1, 16)])
        parameters[name] = nxd_folder.Parameter(value, dim, 1, stage)
    return parameters


def assert_is(folder: Path, model: Any) -> None:
    """transformers loads the model from the folder."""
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_there_and_back_through_ours(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = model
    assert convert(folder, tmp_path / "ours") == "ours"
    assert nxd.has_checkpoint(tmp_path / "ours")

    def rank() -> None:
        loaded = hf.swap(LlamaForCausalLM(whole.config), pad_vocab=True)
        nxd.load_checkpoint(tmp_path / "ours", model=loaded)
        for name, value in hf.full_state_dict(loaded).items():
            assert torch.equal(value, whole.state_dict()[name]), name

    comm.threads.run(Mesh(2, tp=2), rank)
    assert convert(tmp_path / "ours", tmp_path / "hf", config=folder) == "hf"
    assert_is(tmp_path / "hf", whole)


def test_what_save_checkpoint_wrote(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = model

    def rank() -> None:
        swapped = hf.load_pretrained(hf.swap(LlamaForCausalLM(whole.config), pad_vocab=True), folder)
        for tag in ("a", "b"):
            nxd.save_checkpoint(tmp_path / "run", tag, swapped)
            with torch.no_grad():
                for param in swapped.parameters():
                    param.zero_()

    comm.threads.run(Mesh(2, tp=2), rank)
    convert(tmp_path / "run", tmp_path / "a", tag="a", config=folder)
    assert_is(tmp_path / "a", whole)
    assert ("lm_head.weight" in open_source(tmp_path / "a").names()) is not whole.config.tie_word_embeddings
    convert(tmp_path / "run", tmp_path / "b", config=folder)
    assert not any(value.any() for value in AutoModelForCausalLM.from_pretrained(tmp_path / "b").parameters())


def test_to_nxd(model: tuple[Any, Path], tmp_path: Path) -> None:
    """Converted files equal those that NeuronX Distributed would have written of the same model."""
    whole, folder = model
    convert(folder, tmp_path / "nxd", to="nxd", tp=2, pp=2, tag="step_1")
    nxd_folder.write(tmp_path / "expected" / "step_1", divided(whole), 2, 2, optimizer="none")
    written, expected = (
        {
            str(path.relative_to(root)): path
            for root in [tmp_path / name]
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }
        for name in ("nxd", "expected")
    )
    assert written.pop("step_1/SHA256SUMS")
    assert written.keys() == expected.keys()
    for name in expected:
        if not name.endswith(".pt"):
            assert written[name].read_text() == expected[name].read_text()
            continue
        mine, theirs = (torch.load(files[name], weights_only=True) for files in (written, expected))
        assert set(mine) == set(theirs)
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("first_way", [False, True], ids=["trainer", "checkpointing"])
@pytest.mark.slow
def test_from_nxd(model: tuple[Any, Path], first_way: bool, tmp_path: Path) -> None:
    whole, folder = model
    if first_way:
        nxd_folder.write_first_way(tmp_path / "nxd", divided(whole), 2, 2)
    else:
        nxd_folder.write(tmp_path / "nxd" / "step_1", divided(whole), 2, 2, xser=True)
    with pytest.raises(CheckpointMismatch, match=r"has 2 tp ranks, .* \(--config FOLDER\)"):
        convert(tmp_path / "nxd", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    convert(tmp_path / "nxd", tmp_path / "hf", config=folder)
    assert_is(tmp_path / "hf", whole)
    convert(tmp_path / "nxd", tmp_path / "ours", to="ours", config=folder)
    convert(tmp_path / "ours", tmp_path / "again", config=folder)
    assert_is(tmp_path / "again", whole)


@pytest.mark.parametrize("to", ["hf", "ours", "nxd"])
@pytest.mark.parametrize("first_way", [False, True], ids=["trainer", "checkpointing"])
def test_a_missing_tp_rank_is_noticed_by_the_shapes(
    model: tuple[Any, Path], to: str, first_way: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the file of tp rank 1 the file names say tp=1, and half of each weight was written as the whole."""
    whole, folder = model
    parameters = {name: replace(parameter, stage=0) for name, parameter in divided(whole).items()}
    if first_way:
        nxd_folder.write_first_way(tmp_path / "nxd", parameters, 2, 1)
        shutil.rmtree(tmp_path / "nxd" / "tp_rank_01_pp_rank_00")
    else:
        nxd_folder.write(tmp_path / "nxd" / "a", parameters, 2, 1, optimizer="none")
        (tmp_path / "nxd" / "a" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt").unlink()
    command = ["convert", str(tmp_path / "nxd"), str(tmp_path / "x"), "--to", to, "--config", str(folder)]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "lacks the files of ranks" in error and "embed_tokens.weight is (16, 16) in place of (31, 16)" in error
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("to", ["hf", "ours", "nxd"])
def test_every_target_compares_names_and_shapes(model: tuple[Any, Path], to: str, tmp_path: Path) -> None:
    whole, folder = model
    is_tied = whole.config.tie_word_embeddings
    values = {name: value for name, value in whole.state_dict().items() if name != "lm_head.weight" or not is_tied}
    name = "model.layers.1.mlp.up_proj.weight"
    for number, (changed, message) in enumerate(
        [
            ({**values, name: values[name][:-1]}, rf"1 parameters have other shapes; {name} is \(47, 16\)"),
            (
                {key: value for key, value in values.items() if key != name},
                f"other parameter names .*: {name} is missing",
            ),
        ]
    ):
        source = tmp_path / f"src{number}"
        source.mkdir()
        write_weights(StateDict(changed), source)
        with pytest.raises(CheckpointMismatch, match=message):
            convert(source, tmp_path / "x", to=to, config=folder)
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("fused", [False, True], ids=["weight_q", "weight_qkv"])
@pytest.mark.slow
def test_from_nxd_with_fused_projections(model: tuple[Any, Path], fused: bool, tmp_path: Path) -> None:
    """At tp 4 each of two key/value heads is on two ranks (`kv_size_multiplier=2`), in trn1's order: 0 1 0 1.

    Of query heads 0 1 (which use 0) and 2 3 (which use 1) a rank has one whose key it has: 0 2 1 3.
    """
    whole, folder = model
    parameters = divided(whole)
    for layer in range(3):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        stage = parameters[f"{attention}.o_proj.weight"].stage
        query, key, value = (parameters.pop(f"{attention}.{name}_proj.weight").value for name in "qkv")
        key, value = key.repeat(2, 1), value.repeat(2, 1)
        query = torch.cat([query.chunk(4)[head] for head in (0, 2, 1, 3)])
        output = parameters[f"{attention}.o_proj.weight"]
        output.value = torch.cat([output.value.chunk(4, 1)[head] for head in (0, 2, 1, 3)], 1)
        if fused:
            shards = [torch.cat([weight.chunk(4)[rank] for weight in (query, key, value)]) for rank in range(4)]
            parameters[f"{attention}.qkv_proj.weight_qkv"] = nxd_folder.Parameter(torch.cat(shards), 0, 1, stage)
        else:
            for name, weight in zip("qkv", (query, key, value)):
                parameters[f"{attention}.qkv_proj.weight_{name}"] = nxd_folder.Parameter(weight, 0, 1, stage)
        gate_up = torch.cat([parameters.pop(f"{mlp}.{name}_proj.weight").value for name in ("gate", "up")])
        parameters[f"{mlp}.gate_up_proj.weight"] = nxd_folder.Parameter(gate_up, 0, 2, stage)
    nxd_folder.write(tmp_path / "nxd" / "step_1", parameters, 4, 2, xser=True)
    convert(tmp_path / "nxd", tmp_path / "hf", config=folder)
    assert_is(tmp_path / "hf", whole)


def test_several_files_and_every_dtype(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.tensor(7),
        "d": torch.zeros(0, 2),
        "e": torch.tensor([True, False]),
        "f": torch.randn(4).to(torch.float8_e4m3fn),
        "g": torch.randn(2, 3).t(),
    }
    seen: list[int] = []
    write_weights(StateDict(tensors), tmp_path, 60, seen.append)
    assert seen == list(range(1, 8))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors) and len(set(index["weight_map"].values())) > 1
    weights = open_source(tmp_path)
    for name, value in tensors.items():
        read = weights.read(name)
        assert weights.dtype(name) == read.dtype == value.dtype and read.shape == value.shape
        assert torch.equal(
            read.view(torch.uint8) if read.dim() else read,
            value.contiguous().view(torch.uint8) if value.dim() else value,
        )


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two whole tensors are alive when a third is read."""
    import weakref

    from safetensors.torch import save_file

    (tmp_path / "src").mkdir()
    save_file({f"w{n}": torch.full((64, 64), float(n)) for n in range(9)}, tmp_path / "src" / "model.safetensors")
    alive: list[Any] = []
    most = 0
    read = hf.sources.SafetensorsFiles.read

    def watched(self: Any, *args: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        value = read(self, *args)
        alive.append(weakref.ref(value))
        return value

    monkeypatch.setattr(hf.sources.SafetensorsFiles, "read", watched)
    for to in ("ours", "hf"):
        convert(tmp_path / "src", tmp_path / to, to=to)
    assert len(alive) == 18 and most <= 1


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here of 40 bytes: a row of 12 numbers is more."""
    monkeypatch.setattr(writing, "_MAX_PIECE", 40)
    tensors = {"a": torch.randn(3, 12), "b": torch.randn(21), "c": torch.tensor(3.0)}
    (tmp_path / "src").mkdir()
    write_weights(StateDict(tensors), tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "ours")
    source = CheckpointFiles(LocalStorage(tmp_path / "ours"), "converted")
    assert len(source.catalog.tensors["model.a"].chunks) == 6
    weights = SavedWeights(source, "ours")
    assert all(torch.equal(weights.read(name), value) for name, value in tensors.items())
    assert torch.equal(weights.read("a", 1, 5, 11), tensors["a"][:, 5:11])


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    write_weights(StateDict({"a": torch.zeros(2)}), tmp_path / "src")

    def failing(*args: Any) -> torch.Tensor:
        raise OSError("the disk is gone")

    monkeypatch.setattr(hf.sources.SafetensorsFiles, "read", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        convert(tmp_path / "src", tmp_path / "ours")
    assert not list((tmp_path / "ours").iterdir())
    (tmp_path / "empty").mkdir()
    for target in ("runs/new", "empty"):
        with pytest.raises(OSError, match="the disk is gone"):
            convert(tmp_path / "src", tmp_path / target, to="hf")
    assert {path.name for path in tmp_path.iterdir()} == {"src", "ours", "empty"} and not any(
        (tmp_path / "empty").iterdir()
    )


@pytest.mark.parametrize("options", [{"to": "hf"}, {"to": "nxd"}, {"to": "nxd", "tp": 2, "xser": True}])
@pytest.mark.slow
def test_conversions_have_checksums(model: tuple[Any, Path], options: dict[str, Any], tmp_path: Path) -> None:
    """Each file of weights is listed; one that differs is refused before anything is changed; without sums all load."""
    whole, folder = model
    convert(folder, tmp_path / "out", tag="a", **options)
    written = tmp_path / "out" if options["to"] == "hf" else tmp_path / "out" / "a"
    lines = (written / "SHA256SUMS").read_text().splitlines()
    listed = {line[66:]: line[:64] for line in lines}
    assert all(hashlib.sha256((written / name).read_bytes()).hexdigest() == digest for name, digest in listed.items())
    suffixes = (".safetensors", ".pt")
    assert {str(path.relative_to(written)) for path in written.rglob("*") if path.suffix in suffixes} == listed.keys()

    def load() -> list[torch.Tensor]:
        loaded = hf.swap(LlamaForCausalLM(whole.config), pad_vocab=True)
        before = [param.detach().clone() for param in loaded.parameters()]
        try:
            hf.load_pretrained(loaded, written) if options["to"] == "hf" else nxd.load_checkpoint(
                written.parent, "a", loaded
            )
        except (ValueError, CheckpointError):
            assert all(map(torch.equal, before, loaded.parameters()))
            raise
        return [param.detach() for param in loaded.parameters()]

    expected = comm.threads.run(Mesh(1), load)[0]
    names = random.Random(0).sample(sorted(listed), min(len(listed), 3))
    for name in names:
        content = bytearray((written / name).read_bytes())
        content[len(content) // 2] ^= 1
        (written / name).write_bytes(content)
        for use in (
            lambda: comm.threads.run(Mesh(1), load),
            lambda: convert(written, tmp_path / "again", config=folder),
        ):
            with pytest.raises((ValueError, CheckpointError), match=f"{re.escape(name)} "):
                use()
        content[len(content) // 2] ^= 1
        (written / name).write_bytes(content)
    (written / "SHA256SUMS").unlink()
    assert all(map(torch.equal, comm.threads.run(Mesh(1), load)[0], expected))


def test_a_folder_that_is_saved_again_has_no_old_checksums(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = model
    convert(folder, tmp_path / "out", to="hf")

    def rank() -> None:
        loaded = hf.load_pretrained(hf.swap(LlamaForCausalLM(whole.config)), tmp_path / "out")
        with torch.no_grad():
            loaded.model.norm.weight.add_(1)
        hf.save_pretrained(loaded, tmp_path / "out")
        hf.load_pretrained(loaded, tmp_path / "out")

    comm.threads.run(Mesh(1), rank)
    assert not (tmp_path / "out" / "SHA256SUMS").exists()


def test_the_command(model: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, folder = model
    assert main(["convert", str(folder), str(tmp_path / "nxd"), "--to", "nxd", "--tp", "2", "--pp", "3"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'nxd'}: written as nxd\n"
    assert main(["convert", str(tmp_path / "nxd"), str(tmp_path / "hf"), "--config", str(folder)]) == 0
    assert_is(tmp_path / "hf", whole)
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "nxd"), str(tmp_path / "hf"), "--config", str(folder)]) == 1
    assert "exists already, and is not empty" in capsys.readouterr().err
    assert main(["convert", str(folder), str(tmp_path / "x"), "--tp", "0"]) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(to="hf", tp=2), "tp and pp apply to nxd only"),
        (dict(to="nxd", tp=4), "tp=4 does not divide the heads of model.layers.0.self_attn."),
        (dict(to="nxd", pp=4), "pp=4 is more than the 3 layers"),
        (dict(to="pt"), "to is one of hf, nxd, ours, not 'pt'"),
        (dict(to="nxd", tag="a/b"), "tag 'a/b' cannot name"),
        (dict(to="hf", target="memory://x"), "'hf' is written to a local folder"),
    ],
)
def test_what_is_refused(model: tuple[Any, Path], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert(model[1], **{"target": tmp_path / "x", **options})
    assert not (tmp_path / "x").exists()


def test_sources_that_are_refused(model: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = model
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no weights of Hugging Face's, no complete checkpoint and no files"):
        convert(tmp_path / "empty", tmp_path / "x")
    parameters = divided(whole)
    parameters["other.weight"] = parameters.pop("model.layers.1.mlp.up_proj.weight")
    nxd_folder.write(tmp_path / "nxd" / "a", parameters, 2, 2, optimizer="none")
    with pytest.raises(
        CheckpointMismatch, match=r"other parameter names .*: model.layers.1.mlp.up_proj.weight is .*other.weight"
    ):
        convert(tmp_path / "nxd", tmp_path / "x", config=folder)
    (tmp_path / "plain").mkdir()
    shutil.copy(folder / "model.safetensors", tmp_path / "plain")
    with pytest.raises(ValueError, match=r"tp and pp need the model's layers.*--config FOLDER"):
        convert(tmp_path / "plain", tmp_path / "x", to="nxd", tp=2)
    convert(folder, tmp_path / "ours", tag="a")
    with pytest.raises(CheckpointError, match="ours/a exists already: choose another --tag"):
        convert(folder, tmp_path / "ours", tag="a")
