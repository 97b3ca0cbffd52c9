"""Arguments of transformers' `from_pretrained` serve `load_pretrained`: the same bits, in any layout."""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import full_state_dict, has_weights, load_pretrained, save_pretrained, swap
from neuronx_dist.hf import weights as hf_weights
from neuronx_dist.hf.sources import StateDict
from neuronx_dist.mesh import Mesh
from tests.hf.models import Stage, llama_config, meta_model, reference_model

FP32 = torch.float32
BERT = BertConfig(
    vocab_size=96,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)


def _rewrite(folder: Path, change: Any) -> None:
    """Replaces the tensors of a folder's `model.safetensors` by what `change` makes of them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, file, metadata={"format": "pt"})


def _as_bin(folder: Path, files: int = 1) -> None:
    """Replaces a folder's `model.safetensors` by `.bin` files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = list(tensors)
    weight_map = {name: f"pytorch_model-{1 + index % files:05d}.bin" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _same_as_transformers(
    folder: Path, model_class: Any, degrees: tuple[int, ...] = (1,), new: tuple[str, ...] = (), **options: Any
) -> None:
    """Whatever is not `new` is what transformers reads; new values are the same at each degree."""
    expected = model_class.from_pretrained(folder, dtype=FP32, **options)
    results = []
    for tp in degrees:

        def rank(tp: int = tp) -> Any:
            model = meta_model(expected.config, model_class, FP32)
            return full_state_dict(load_pretrained(swap(model) if tp > 1 else model, folder, **options))

        results.append(threads.run(Mesh(tp, tp=tp), rank)[0])
    for loaded in results:
        tied = set(getattr(expected, "all_tied_weights_keys", {}))
        assert loaded.keys() | tied == expected.state_dict().keys()
        for name, weight in loaded.items():
            assert torch.equal(weight, results[0][name] if name in new else expected.state_dict()[name]), name


# --- names -----------------------------------------------------------------------------------------------------------


def test_buffers_of_old_checkpoints_are_passed_over_in_silence(tmp_path: Path) -> None:
    reference_model(BERT, BertForMaskedLM, FP32).save_pretrained(tmp_path)
    _rewrite(tmp_path, lambda tensors: {**tensors, "bert.embeddings.position_ids": torch.arange(16).expand(1, -1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _same_as_transformers(tmp_path, BertForMaskedLM)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_the_base_model_alone(tmp_path: Path, tied: bool) -> None:
    """Names of the base model have no prefix. An untied head is new, which is said, and the same at every degree."""
    config = llama_config(kv_heads=4, tied=tied)
    reference_model(config, LlamaModel, FP32).save_pretrained(tmp_path)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        _same_as_transformers(tmp_path, LlamaForCausalLM, (1, 2, 4), () if tied else ("lm_head.weight",))
    told = [str(warning.message) for warning in caught if "load_pretrained" in str(warning.message)]
    assert len(told) == (0 if tied else 3)  # by one rank of each job
    assert all("missing there, so newly initialised: lm_head.weight" in message for message in told)


def test_a_new_head_is_the_same_on_the_last_stage_of_a_pipeline() -> None:
    config = llama_config()
    state = reference_model(config, LlamaModel, FP32).state_dict()

    def rank(partial: bool) -> Any:
        model: Any = swap(meta_model(config, dtype=FP32))
        return full_state_dict(load_pretrained(Stage(model) if partial else model, state, seed=3))

    with pytest.warns(UserWarning, match="lm_head"):
        whole = threads.run(Mesh(1), rank, False)[0]
        for loaded in threads.run(Mesh(4, tp=2, pp=2), rank, True):
            assert loaded.keys() == whole.keys()
            assert all(torch.equal(weight, whole[name]) for name, weight in loaded.items())


def test_all_ranks_gather_where_a_gather_is_in_a_program_of_all(tmp_path: Path, monkeypatch: Any) -> None:
    """Threads as on XLA: ranks that write nothing make the same calls, and fetch their results."""
    monkeypatch.setattr(hf_weights, "device_has_own_program", lambda: True)
    state = reference_model(llama_config(), LlamaForCausalLM, FP32).state_dict()

    def rank() -> list[str]:
        model: Any = load_pretrained(swap(meta_model(llama_config(), dtype=FP32)), state)
        with comm.record() as calls:
            save_pretrained(model, tmp_path)
        return [call.verb for call in calls]

    first, *others = threads.run(Mesh(4, tp=2), rank)
    assert "all_gather" in first and all(verbs == first for verbs in others)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)


def test_a_checkpoint_with_a_head_into_the_base_model(tmp_path: Path) -> None:
    reference_model(llama_config(), LlamaForCausalLM, FP32).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"not used: lm_head.weight"):
        _same_as_transformers(tmp_path, LlamaModel)


def test_another_head_and_a_pooler_are_new_and_the_old_head_is_left(tmp_path: Path) -> None:
    reference_model(BERT, BertForMaskedLM, FP32).save_pretrained(tmp_path)
    new = tuple(f"{module}.{name}" for module in ("bert.pooler.dense", "classifier") for name in ("weight", "bias"))
    with pytest.warns(UserWarning, match=r"newly initialised.*bert\.pooler.*classifier.*not used: cls\.predictions"):
        _same_as_transformers(tmp_path, BertForSequenceClassification, new=new)


def test_a_real_model_keeps_the_values_of_what_is_missing(tmp_path: Path) -> None:
    reference_model(BERT, BertModel, FP32).save_pretrained(tmp_path)
    model = reference_model(BERT, BertForSequenceClassification, FP32)
    before = copy.deepcopy(model.classifier.weight)
    with torch.no_grad():
        model.bert.pooler.dense.weight.zero_()

    with pytest.warns(UserWarning, match="classifier"):  # without a mesh too
        load_pretrained(model, tmp_path)
    assert torch.equal(model.classifier.weight, before) and model.bert.pooler.dense.weight.any()


def test_old_names_of_layer_norms(tmp_path: Path) -> None:
    reference_model(BERT, BertForMaskedLM, FP32).save_pretrained(tmp_path)

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    _rewrite(tmp_path, lambda tensors: {old(name): tensor for name, tensor in tensors.items()})
    assert any(name.endswith("gamma") for name in load_file(tmp_path / "model.safetensors"))
    _same_as_transformers(tmp_path, BertForMaskedLM)


def test_old_names_of_weight_norms(tmp_path: Path) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes: Any = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=8)
    convolutions: Any = dict(conv_dim=(8,), conv_kernel=(3,), conv_stride=(2,), num_feat_extract_layers=1)
    config = Wav2Vec2Config(**sizes, **convolutions, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    reference_model(config, Wav2Vec2Model, FP32).save_pretrained(tmp_path)

    def old(name: str) -> str:
        name = name.replace(".parametrizations.weight.original0", ".weight_g")
        return name.replace(".parametrizations.weight.original1", ".weight_v")

    _rewrite(tmp_path, lambda tensors: {old(name): tensor for name, tensor in tensors.items()})
    assert any(name.endswith("weight_g") for name in load_file(tmp_path / "model.safetensors"))
    _same_as_transformers(tmp_path, Wav2Vec2Model)


def test_tensors_that_transformers_joins(tmp_path: Path) -> None:
    """Experts are stored apart, and are one parameter of the model."""
    sizes: Any = dict(vocab_size=96, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    config = MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=3)
    reference_model(config, MixtralForCausalLM, FP32).save_pretrained(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in load_file(tmp_path / "model.safetensors")
    _same_as_transformers(tmp_path, MixtralForCausalLM)


def test_tensors_that_transformers_splits(tmp_path: Path, monkeypatch: Any) -> None:
    """One tensor of the file becomes three of the model, of which a rank keeps slices; it is read once."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    names = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    converter = WeightConverter("self_attn.qkv.weight", list(names), operations=[Chunk(dim=0)])
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # builds the table
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", [converter])
    reference = reference_model(llama_config(heads=4, kv_heads=4), LlamaForCausalLM, FP32)
    reference.save_pretrained(tmp_path)
    fused = load_file(tmp_path / "model.safetensors")
    assert fused["model.layers.1.self_attn.qkv.weight"].shape == (96, 32)
    reads: list[str] = []
    original = StateDict.read
    monkeypatch.setattr(StateDict, "read", lambda self, name, *rest: reads.append(name) or original(self, name, *rest))
    _same_as_transformers(tmp_path, LlamaForCausalLM, (1, 2))
    threads.run(Mesh(1), lambda: load_pretrained(meta_model(reference.config, dtype=FP32), fused))
    assert sorted(name for name in reads if "qkv" in name) == [f"model.layers.{i}.self_attn.qkv.weight" for i in (0, 1)]


def test_names_that_the_user_maps(tmp_path: Path) -> None:
    reference_model(llama_config(), LlamaForCausalLM, FP32).save_pretrained(tmp_path)
    _rewrite(tmp_path, lambda tensors: {f"wrapped.{name}": tensor for name, tensor in tensors.items()})
    _same_as_transformers(tmp_path, LlamaForCausalLM, (1, 2), key_mapping={r"^wrapped\.": ""})
    with pytest.raises(ValueError, match="key_mapping needs a model of transformers, not a Linear"):
        load_pretrained(torch.nn.Linear(2, 2), {}, key_mapping={"a": "b"})


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 3])
def test_bin_files(tmp_path: Path, monkeypatch: Any, files: int) -> None:
    """Mapped into memory, and no code in them is run."""
    reference_model(llama_config(), LlamaForCausalLM, FP32).save_pretrained(tmp_path)
    _as_bin(tmp_path, files)
    assert has_weights(tmp_path)
    options: list[Any] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: options.append(kwargs) or load(*args, **kwargs))
    _same_as_transformers(tmp_path, LlamaForCausalLM, (1, 2))
    ours = [kwargs for kwargs in options if isinstance(kwargs.get("mmap"), bool)][-3 * files :]
    assert all(kwargs["mmap"] and kwargs["weights_only"] for kwargs in ours) and len(ours) == 3 * files


class _Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_a_bin_file_of_more_than_tensors_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": _Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin holds more than tensors and plain data; nothing was executed: .*mkdir"
    ):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path)
    assert not (tmp_path / "harm").exists()
    torch.save({"model": {"weight": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is no state dict: 'model' is a dict"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path)
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is no state dict: it holds a list"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path)


def test_bin_files_of_old_torch_are_read_whole(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    torch.save(layer.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    other = threads.run(Mesh(1), lambda: load_pretrained(torch.nn.Linear(2, 2), tmp_path))[0]
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_variants_and_subfolders(tmp_path: Path, max_shard_size: str) -> None:
    model = reference_model(llama_config(), LlamaForCausalLM, FP32)
    model.save_pretrained(tmp_path / "text", variant="fp16", max_shard_size=max_shard_size)
    assert not has_weights(tmp_path / "text") and not has_weights(tmp_path, variant="fp16")
    assert has_weights(tmp_path, subfolder="text", variant="fp16")
    _same_as_transformers(tmp_path, LlamaForCausalLM, (1, 2), subfolder="text", variant="fp16")


def test_a_single_file(tmp_path: Path) -> None:
    model = reference_model(llama_config(), LlamaForCausalLM, FP32)
    model.save_pretrained(tmp_path)
    meta = meta_model(model.config, dtype=FP32)
    threads.run(Mesh(1), lambda: load_pretrained(meta, tmp_path / "model.safetensors"))
    assert torch.equal(meta.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("stored,wanted", [(torch.bfloat16, FP32), (torch.float16, FP32), (FP32, torch.bfloat16)])
def test_other_dtypes_than_the_files(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    reference_model(llama_config(), LlamaForCausalLM, stored).save_pretrained(tmp_path)
    expected = LlamaForCausalLM.from_pretrained(tmp_path, dtype=wanted)

    def rank() -> Any:
        built = swap(meta_model(expected.config, dtype=wanted))
        given = swap(meta_model(expected.config, dtype=stored))
        return [full_state_dict(load_pretrained(model, tmp_path, dtype=wanted)) for model in (built, given)]

    for loaded in threads.run(Mesh(2, tp=2), rank)[0]:
        for name, weight in expected.state_dict().items():
            assert loaded[name].dtype == wanted and torch.equal(loaded[name], weight), name


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"none of model.safetensors, .*pytorch_model.bin.*notes.txt"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none of model.fp16.safetensors, model.safetensors.index.fp16.json"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path, variant="fp16")
    assert not has_weights(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder.* Download a model of the Hub first"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path / "nowhere")
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (tmp_path / index).write_text(json.dumps({"weight_map": {"a": "one-of-two.safetensors", "b": "two"}}))
        with pytest.raises(FileNotFoundError, match=f"{index} lists one-of-two.safetensors, two, missing"):
            load_pretrained(torch.nn.Linear(2, 2), tmp_path)
        (tmp_path / index).unlink()


@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1\n", "{}", "[]"])
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index.json \(\d+ bytes\) is cut off, a Git LFS pointer, or no index"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_is_cut_off_or_a_pointer_to_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n")
    with pytest.raises(ValueError, match=rf"{name} .*is .*a Git LFS pointer"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path)


def test_the_generation_config_goes_through(tmp_path: Path) -> None:
    model = reference_model(llama_config(), LlamaForCausalLM, FP32)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(tmp_path / "in")

    def rank() -> None:
        loaded = load_pretrained(swap(meta_model(model.config, dtype=FP32)), tmp_path / "in")
        save_pretrained(loaded, tmp_path / "out")

    threads.run(Mesh(2, tp=2), rank)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").generation_config.max_new_tokens == 17


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.txt").write_text("saved")


def test_the_tokenizer_is_saved_with_the_model(tmp_path: Path) -> None:
    def rank() -> None:
        save_pretrained(swap(reference_model(llama_config(), LlamaForCausalLM, FP32)), tmp_path, Tokenizer())

    threads.run(Mesh(1), rank)
    assert (tmp_path / "tokenizer.txt").read_text() == "saved"


# --- what does not fit -----------------------------------------------------------------------------------------------


def _refusal(config: Any, state: dict[str, torch.Tensor]) -> str:
    def rank() -> Any:
        model = meta_model(config, dtype=FP32)
        with pytest.raises(ValueError) as caught:
            load_pretrained(model, state)
        assert all(param.is_meta for param in model.parameters())
        return str(caught.value)

    message: str = threads.run(Mesh(1), rank)[0]
    return message


def test_what_is_missing_in_the_base_model_is_an_error_with_the_nearest_name() -> None:
    state = reference_model(llama_config(), LlamaForCausalLM, FP32).state_dict()
    misspelt = {name.replace("mlp.up_proj", "mlp.up_porj"): tensor for name, tensor in state.items()}
    message = _refusal(llama_config(), misspelt)
    name = "model.layers.1.mlp.up_p{}.weight"
    assert f"{name.format('roj')} [48, 32] (there is {name.format('orj')})" in message
    wrapped = _refusal(llama_config(), {f"module.{name}": tensor for name, tensor in state.items()})
    assert "model.norm.weight [32] (there is module.model.norm.weight)" in wrapped
    assert "unexpected (21): " in wrapped and wrapped.endswith(" and 1 more") and "lm_head.weight [96" not in wrapped


def test_a_tied_weight_with_two_values_is_an_error() -> None:
    state = dict(reference_model(llama_config(tied=True), LlamaForCausalLM, FP32).state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    message = _refusal(llama_config(tied=True), state)
    assert "model.embed_tokens.weight and lm_head.weight with different values" in message
    assert "tie_word_embeddings=False" in message


def test_what_the_class_ignores_is_neither_asked_for_nor_told(monkeypatch: Any) -> None:
    state = dict(reference_model(llama_config(), LlamaForCausalLM, FP32).state_dict())
    del state["model.norm.weight"]
    state["model.unused"] = torch.zeros(1)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", {r"model\.norm"}, raising=False)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", {r"unused$"}, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = threads.run(Mesh(1), lambda: load_pretrained(meta_model(llama_config(), dtype=FP32), state))[0]
    assert torch.equal(model.model.norm.weight, torch.ones(32))
