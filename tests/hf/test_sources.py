"""Sources of weights: the file of a folder, whole tensors and slices of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from neuronx_dist.hf.sources import SafetensorsFiles, StateDict, checkpoint_files, has_weights, open_source
from neuronx_dist.hf.writing import copy_configs

A, B = torch.arange(12.0).view(3, 4), torch.arange(5)
KINDS = ["state dict", "safetensors", "bin", "index of safetensors", "index of bins"]


def _source(kind: str, folder: Path) -> Any:
    if kind == "state dict":
        return {"a": A, "b": B}
    save, ending = (save_file, "safetensors") if "safetensors" in kind else (torch.save, "bin")
    stem = "model" if ending == "safetensors" else "pytorch_model"
    if "index" not in kind:
        save({"a": A, "b": B}, folder / f"{stem}.{ending}")
    else:
        for name, tensor in (("a", A), ("b", B)):
            save({name: tensor}, folder / f"part-{name}.{ending}")
        index = {"weight_map": {"b": f"part-b.{ending}", "a": f"part-a.{ending}"}}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same(kind: str, tmp_path: Path) -> None:
    opened = open_source(_source(kind, tmp_path))
    assert isinstance(opened, SafetensorsFiles) == ("safetensors" in kind)
    assert opened.description == ("a state dict of 2 tensors" if kind == "state dict" else str(tmp_path))
    assert sorted(opened.names()) == ["a", "b"]
    assert opened.shape("a") == (3, 4) and opened.shape("b") == (5,)
    assert torch.equal(opened.read("a"), A) and torch.equal(opened.read("b"), B)
    assert torch.equal(opened.read("a", 1, 1, 3), A[:, 1:3]) and torch.equal(opened.read("a", 0, 1, 2), A[1:2])
    assert torch.equal(opened.read("b", 0, 3, 5), B[3:])
    assert not opened.read("a").requires_grad


def test_a_state_dict_of_parameters_is_read_without_gradients() -> None:
    weights = StateDict({"a": torch.nn.Parameter(A)}, "mine")
    assert weights.description == "mine" and not weights.read("a").requires_grad
    assert not weights.read("a", 0, 0, 1).requires_grad


ORDER = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_the_first_of_several_files_is_taken(first: int, variant: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    for name in ORDER[first:]:
        stem, _, ending = name.rpartition(".")
        name = name if variant is None else f"{stem}.{variant}.{ending}"
        (folder / name).write_text(json.dumps({"weight_map": {"x": f"part{first}", "y": f"part{first}"}}))
        (folder / f"part{first}").touch()
    options: Any = dict(subfolder="sub", variant=variant)
    files = checkpoint_files(tmp_path, **options)
    stem, _, ending = ORDER[first].rpartition(".")
    own = ORDER[first] if variant is None else f"{stem}.{variant}.{ending}"
    assert files == [folder / (f"part{first}" if ending == "json" else own)]
    assert has_weights(tmp_path, **options) and not has_weights(tmp_path)
    assert not has_weights(folder, variant="other") and has_weights(folder, variant=variant)
    assert checkpoint_files(folder / own) == [folder / own]


def test_the_files_of_an_index_each_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(a="2", b="1", c="2")}))
    for name in "12":
        (tmp_path / name).touch()
    assert checkpoint_files(tmp_path) == [tmp_path / "1", tmp_path / "2"]
    (tmp_path / "1").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors.index.json lists 1, missing"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret"])
def test_an_index_does_not_lead_out_of_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret").touch()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=f"index.json lists {name}, outside of its folder: do not trust"):
        checkpoint_files(tmp_path / "model")


@pytest.mark.parametrize("content", ["5", "null", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{"])
def test_an_index_of_other_content(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index.json \(\d+ bytes\) is cut off, .* or no index of weight files"):
        checkpoint_files(tmp_path)


def test_links_out_of_a_folder_are_not_copied(tmp_path: Path) -> None:
    """A link to the blobs of the hub's cache is what `hf download` writes."""
    snapshot = tmp_path / "models--a" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a" / "blobs").mkdir()
    (tmp_path / "models--a" / "blobs" / "1f").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1f")
    (tmp_path / "copy").mkdir()
    copy_configs(snapshot, tmp_path / "copy")
    copied = tmp_path / "copy" / "config.json"
    assert copied.read_text() == "{}" and not copied.is_symlink()
    (tmp_path / "secret.txt").write_text("s")
    (snapshot / "notes.json").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"notes.json is a symbolic link to .*secret.txt, outside of .*models--a"):
        copy_configs(snapshot, tmp_path / "copy")
    assert not (tmp_path / "copy" / "notes.json").exists()


def test_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"\(it has: \['a.txt', 'b.gguf'\]\)"):
        checkpoint_files(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"\(no such folder\)"):
        checkpoint_files(tmp_path, subfolder="nowhere")
