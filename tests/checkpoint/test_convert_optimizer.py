"""`neuronx-dist convert --optimizer`: AdamW's state and master weights between ours and NxD's ZeRO-1, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.__main__ import main
from neuronx_dist.checkpoint.convert.convert_optimizer import read_piece
from neuronx_dist.checkpoint.convert.weights import convert
from neuronx_dist.checkpoint.dcp.flattened_groups import JoinedGroups
from neuronx_dist.checkpoint.dcp.reading import CheckpointFiles
from neuronx_dist.checkpoint.errors import CheckpointMismatch
from neuronx_dist.checkpoint.run_state import collect
from neuronx_dist.checkpoint.storage import LocalStorage
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MuonAdamW, muon_groups
from tests.checkpoint import nxd_folder
from tests.support.llama import tiny_llama

pytestmark = pytest.mark.slow


def model_of(folder: Path, dtype: torch.dtype) -> Any:
    return hf.swap(LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).to(dtype), pad_vocab=True)


def adamw(model: Any, several_groups: bool = False, muon: bool = False) -> Any:
    if muon:
        return nxd.NeuronZero1Optimizer(muon_groups(model), MuonAdamW, lr=0.125, grad_clipping=False)
    params: Any = list(model.parameters())
    if several_groups:
        norms = [param for name, param in model.named_parameters() if "norm" in name]
        others = [param for name, param in model.named_parameters() if "norm" not in name]
        params = [{"params": others, "weight_decay": 0.5}, {"params": norms, "weight_decay": 0.0}]
    return nxd.NeuronZero1Optimizer(params, torch.optim.AdamW, lr=0.125, betas=(0.5, 0.75), grad_clipping=False)


def trained(
    folder: Path, tied: bool = False, several_groups: bool = False, dtype: Any = torch.bfloat16, **options: Any
) -> Path:
    """A run of a Llama of three layers, saved at tp 2 and dp 2: `folder/run/a`; its config lies in `folder`."""
    config = tiny_llama(vocab_size=31, hidden_size=16, num_hidden_layers=3, tie_word_embeddings=tied)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)

    def rank() -> None:
        model = hf.load_pretrained(model_of(folder, dtype), folder)
        optimizer = adamw(model, several_groups, **options)
        for step in range(2):
            for name, param in sorted(model.named_parameters()):
                seed = comm.rank("tp") + 10 * step + sum(map(ord, name))
                if param.shape == (16,):
                    seed -= comm.rank("tp")  # replicated ones have one gradient
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
            optimizer.step()
        nxd.save_checkpoint(folder / "run", "a", model, optimizer)

    comm.threads.run(Mesh(4, tp=2), rank)
    return folder / "run"


def contents(root: Path, tag: str = "a") -> tuple[dict[str, torch.Tensor], Any]:
    source = JoinedGroups(CheckpointFiles(LocalStorage(root), tag, True))
    groups = source.object(source.catalog.objects["optimizer.param_groups"])
    return {key: read_piece(source, key) for key in source.catalog.tensors}, groups


def assert_same_run(first: Path, second: Path) -> None:
    (tensors, groups), (expected, expected_groups) = contents(first), contents(second)
    assert set(expected) >= set(tensors) and len(tensors) > 60
    assert {
        key for key in set(expected) - set(tensors) if "lm_head" not in key
    } == set()  # another name of a tied weight
    assert [key for key, value in tensors.items() if not torch.equal(value, expected[key])] == []
    for mine, theirs in zip(groups, expected_groups, strict=True):
        assert {**mine, "params": set(mine["params"])} == {**theirs, "params": set(theirs["params"])}


@pytest.mark.parametrize(
    "several_groups, options",
    [
        (False, dict(tp=2, pp=2, dp=3)),
        (True, dict(tp=4, pp=3, dp=2, fused="weight_q", kv_size_multiplier=2, xser=True)),
        (True, dict(tp=4, pp=1, dp=3, fused="weight_qkv", kv_size_multiplier=2, hw_backend="trn2")),
    ],
    ids=["plain", "weight_q-xser", "weight_qkv-trn2"],
)
def test_there_and_back(several_groups: bool, options: dict[str, Any], tmp_path: Path) -> None:
    run = trained(tmp_path / "hf", several_groups=several_groups)
    assert convert(run, tmp_path / "nxd", to="nxd", config=tmp_path / "hf", optimizer=True, **options) == "nxd"
    groups: Sequence[str] = ["norm"] if several_groups else []
    convert(tmp_path / "nxd", tmp_path / "ours", to="ours", config=tmp_path / "hf", optimizer=True, groups=groups)
    assert any("optimizer.master." in key for key in contents(run)[0])
    assert_same_run(tmp_path / "ours", run)


def test_muon_has_momentum_alone_and_adamw_its_moments(tmp_path: Path) -> None:
    run = trained(tmp_path / "hf", muon=True)
    convert(run, tmp_path / "nxd", to="nxd", config=tmp_path / "hf", optimizer=True, tp=2, pp=2, dp=3)
    groups = ["embed_tokens|lm_head|norm"]
    convert(tmp_path / "nxd", tmp_path / "ours", to="ours", config=tmp_path / "hf", optimizer=True, groups=groups)
    entries = {key.rpartition(".")[2] for key in contents(run)[0] if "q_proj" in key and ".state." in key}
    assert entries == {"momentum_buffer"}
    assert_same_run(tmp_path / "ours", run)


def test_tied_weights(tmp_path: Path) -> None:
    """Two stages have the weight, and each its state."""
    run = trained(tmp_path / "hf", tied=True)
    convert(run, tmp_path / "nxd", to="nxd", config=tmp_path / "hf", optimizer=True, tp=2, pp=2, dp=2)
    for stage in range(2):
        file = tmp_path / "nxd" / "a" / "optim" / f"dp_rank_00_tp_rank_00_pp_rank_{stage:02d}.pt"
        shapes = torch.load(file, weights_only=True)["shape_info"]
        assert (16, 16) in [tuple(shape) for shape in shapes.values()]
    convert(tmp_path / "nxd", tmp_path / "ours", to="ours", config=tmp_path / "hf", optimizer=True)
    assert_same_run(tmp_path / "ours", run)


def test_what_is_written_loads(tmp_path: Path) -> None:
    """NxD's folder gives each rank what ours gives it."""
    run = trained(tmp_path / "hf")
    options: dict[str, Any] = dict(tp=4, pp=2, dp=3, fused="weight_qkv", kv_size_multiplier=2, xser=True)
    convert(run, tmp_path / "nxd", to="nxd", config=tmp_path / "hf", optimizer=True, **options)

    def rank() -> None:
        states = []
        for folder in (run, tmp_path / "nxd"):
            model = model_of(tmp_path / "hf", torch.bfloat16)
            optimizer = adamw(model)
            nxd.load_checkpoint(folder, "a", model, optimizer)
            states.append({key: x.tensor for key, x in collect(model, optimizer).tensors.items()})
        assert states[0].keys() == states[1].keys()
        assert [key for key, value in states[0].items() if not torch.equal(value, states[1][key])] == []

    comm.threads.run(Mesh(4, tp=2), rank)


def test_it_is_what_nxd_writes(tmp_path: Path) -> None:
    """File for file, as the fixture makes it of whole tensors by the facts of the format."""
    run = trained(tmp_path / "hf", dtype=torch.float32)
    convert(run, tmp_path / "nxd", to="nxd", config=tmp_path / "hf", optimizer=True, tp=2, pp=2, dp=2)
    tensors, _ = contents(run)
    parameters = {}
    for name in (key.removeprefix("model.") for key in tensors if key.startswith("model.")):
        dim = 1 if "o_proj" in name or "down_proj" in name else None if "norm" in name else 0
        stage = 0 if name.startswith(("model.embed", "model.layers.0")) else 1
        entries = {entry: tensors[f"optimizer.state.{name}.{entry}"] for entry in ("step", "exp_avg", "exp_avg_sq")}
        values = {"": tensors[f"model.{name}"], **entries}
        if "embed" in name or "lm_head" in name:
            values = {key: torch.cat([x, torch.zeros(1, 16)]) if x.dim() else x for key, x in values.items()}
        parameters[name] = nxd_folder.Parameter(values.pop(""), dim, 1, stage, values)
    order = torch.load(tmp_path / "nxd" / "a" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
    order |= torch.load(tmp_path / "nxd" / "a" / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt", weights_only=True)
    nxd_folder.write(tmp_path / "expected", {name: parameters[name] for name in order}, 2, 2)
    files = sorted((tmp_path / "expected" / "optim").iterdir())
    assert len(files) == 8
    for file in files:
        written = torch.load(tmp_path / "nxd" / "a" / "optim" / file.name, weights_only=True)
        expected = torch.load(file, weights_only=True)
        assert written.keys() == expected.keys() and written["shape_info"] == expected["shape_info"]
        assert written["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
        assert (written["param_groups"][0]["lr"], written["param_groups"][0]["betas"]) == (0.125, (0.5, 0.75))
        for number, entries in expected["base_state"].items():
            assert written["base_state"][number].keys() == entries.keys()
            assert all(torch.equal(written["base_state"][number][entry], entries[entry]) for entry in entries), number


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = trained(tmp_path / "hf"), ["--config", str(tmp_path / "hf")]
    to_nxd = ["--to", "nxd", "--tp", "4", "--dp", "2", "--optimizer", "--xser", *config]
    fused = ["--fused", "weight_q", "--kv-size-multiplier", "2", "--hw-backend", "trn2"]
    assert main(["convert", str(run), str(tmp_path / "nxd"), *to_nxd, *fused]) == 0
    assert (tmp_path / "nxd" / "a" / "optim" / "dp_rank_01_tp_rank_03_pp_rank_00.pt.tensors").is_dir()
    back = ["--to", "ours", "--optimizer", *config]
    assert main(["convert", str(tmp_path / "nxd"), str(tmp_path / "ours"), *back]) == 0
    assert_same_run(tmp_path / "ours", run)
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "nxd"), str(tmp_path / "x"), *back, "--groups", "norm"]) == 1
    assert "has 1 parameter groups, but this one has 2" in (message := capsys.readouterr().err)
    assert "--groups REGEX ... says which parameters the groups behind the first one have" in message


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused parameters: their parts, and the tensor that joins them."""
    import weakref

    from neuronx_dist.checkpoint.convert import convert_optimizer

    run = trained(tmp_path / "hf")
    alive: list[Any] = []
    most = 0
    read = convert_optimizer.read_piece

    def watched(*args: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        value = read(*args)
        alive.append(weakref.ref(value))
        return value

    monkeypatch.setattr(convert_optimizer, "read_piece", watched)
    convert(run, tmp_path / "nxd", to="nxd", config=tmp_path / "hf", optimizer=True, tp=2, fused="weight_q")
    assert len(alive) > 80 and most <= 1


def test_what_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path / "hf")
    for source, options, message in (
        (tmp_path / "hf", dict(to="ours"), "Hugging Face folders have no optimizer"),
        (run, dict(to="hf"), "Hugging Face folders have no optimizer"),
        (run, dict(to="ours", dp=2), "dp, fused, kv_size_multiplier and xser apply to nxd"),
        (run, dict(to="nxd", fused="all"), "fused is one of weight_q, weight_qkv"),
        (run, dict(to="nxd", tp=2, fused="weight_q", kv_size_multiplier=3), "2 key/value heads, 3 times each: choose"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "x", config=tmp_path / "hf", optimizer=True, **options)  # type: ignore[arg-type]
        assert not (tmp_path / "x").exists()
    convert(tmp_path / "hf", tmp_path / "weights")
    with pytest.raises(CheckpointMismatch, match="was saved without an optimizer: convert the weights alone"):
        convert(tmp_path / "weights", tmp_path / "y", to="nxd", config=tmp_path / "hf", optimizer=True)
