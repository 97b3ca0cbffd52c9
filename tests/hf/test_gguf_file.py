"""GGUF files into any layout: the bits that transformers reads, of quantized and of permuted tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from neuronx_dist import comm, hf
from neuronx_dist.checkpoint.convert.weights import convert
from neuronx_dist.hf.gguf_file import gguf_file, open_gguf
from neuronx_dist.mesh import Mesh
from tests.hf.gguf_writing import HIDDEN, TOKENS, write_gguf


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are quantized to 8 bits. Rows of a Llama's query and key are permuted in such files."""
    architecture = request.param
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, architecture)
    return path


@pytest.fixture(scope="module")
def expected(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
@pytest.mark.slow
def test_into_layouts(file: Path, expected: Any, tp: int, as_folder: bool) -> None:
    def rank() -> None:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        hf.load_pretrained(hf.swap(model), file.parent if as_folder else file)
        for name, value in hf.full_state_dict(model).items():
            assert torch.equal(value, expected.state_dict()[name]), name

    comm.threads.run(Mesh(tp, tp=tp), rank)


def test_slices_are_those_of_the_whole_tensor(file: Path, expected: Any) -> None:
    weights = open_gguf(file, expected)
    assert set(weights.names()) == set(expected.state_dict())
    for name, whole in expected.state_dict().items():
        assert weights.shape(name) == tuple(whole.shape) and weights.dtype(name) == torch.float32
        assert torch.equal(weights.read(name), whole), name
        assert torch.equal(weights.read(name, 0, 3, 19), whole[3:19]), name
        if whole.dim() > 1:
            assert torch.equal(weights.read(name, 1, 3, 19), whole[:, 3:19]), name


def test_a_slice_dequantizes_its_rows_alone(file: Path, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_gguf(file, expected)
    rows = []
    dequantize = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, dtype: rows.append(len(data)) or dequantize(data, dtype))
    weights.read("model.layers.1.mlp.up_proj.weight", 0, 8, 24)
    weights.read("model.layers.1.mlp.down_proj.weight", 1, 8, 24)
    assert rows == [16, HIDDEN]


def test_convert(file: Path, expected: Any, tmp_path: Path) -> None:
    assert convert(file, tmp_path / "hf") == "hf"
    convert(file.parent, tmp_path / "ours", to="ours")
    convert(tmp_path / "ours", tmp_path / "again", config=file)
    for folder in ("hf", "again"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(value, expected.state_dict()[name]) for name, value in loaded.state_dict().items())
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert tokenizer("abcab!").input_ids[-3:] == [TOKENS.index(token) for token in ("abc", "ab", "!")]


def test_what_is_refused(tmp_path: Path) -> None:
    assert gguf_file(tmp_path) is None
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    (tmp_path / "a.gguf").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"a.gguf \(7 bytes\) cannot be read as GGUF"):
        hf.load_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="pass a model of transformers, not a Linear"):
        hf.load_pretrained(torch.nn.Linear(2, 2), tmp_path / "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match="has 2 GGUF files, a.gguf, b.gguf: pass the path of one"):
        hf.load_pretrained(model, tmp_path)
