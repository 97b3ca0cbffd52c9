"""Whole checkpoints into any layout and back: bit-equal, strict, a slice at a time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import (
    full_state_dict,
    gather_full,
    has_weights,
    load_pretrained,
    materialize,
    save_pretrained,
    swap,
)
from neuronx_dist.hf.sources import SafetensorsFiles
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.lora import LoraConfig, get_lora_model
from neuronx_dist.spmd import ShardSpec, set_spec, spec_of
from tests.hf.models import VOCAB, Stage, batch, error, llama_config, meta_model, reference_model, swapped
from tests.support.llama import tiny_llama
from tests.support.pool import processes


def _saved(folder: Any, **options: Any) -> Any:
    model = reference_model(llama_config(**options), dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


@pytest.mark.parametrize(
    "mesh,heads,kv_heads,tied",
    [
        (Mesh(1), 4, 2, False),
        (Mesh(2, tp=2), 4, 2, True),
        (Mesh(4, tp=2), 4, 2, False),
        (Mesh(4, tp=4), 4, 4, True),
        (Mesh(2, tp=2), 9, 3, True),
        (Mesh(4, tp=4), 9, 3, False),
        (Mesh(8, tp=4), 8, 2, True),  # each key/value head on two ranks
        (Mesh(4, tp=4), 6, 2, False),  # and groups of 3 padded to 4
        (Mesh(4, tp=4), 4, 1, False),
    ],
)
@pytest.mark.slow
def test_round_trip(tmp_path: Any, mesh: Mesh, heads: int, kv_heads: int, tied: bool) -> None:
    """Folder -> any layout -> folder -> transformers: the same bits, also where heads are padded."""
    reference = _saved(tmp_path / "in", heads=heads, kv_heads=kv_heads, tied=tied)
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()

    def rank() -> None:
        model = swap(meta_model(reference.config, dtype=torch.float32), pad_heads=True)
        load_pretrained(model, tmp_path / "in")
        for name, full in full_state_dict(model).items():
            assert torch.equal(full, reference.state_dict()[name]), name
        save_pretrained(model, tmp_path / "out")

    threads.run(mesh, rank)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(reference) and again.dtype == torch.float32
    assert again.config.num_attention_heads == heads
    for name, weight in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_only_slices_of_a_file_are_read(tmp_path: Any, monkeypatch: Any) -> None:
    reference = _saved(tmp_path / "in", heads=4, kv_heads=2)
    assert has_weights(tmp_path / "in")
    reads: list[tuple[str, int]] = []
    original = SafetensorsFiles.read

    def read(self: Any, name: str, *slice_: Any) -> torch.Tensor:
        tensor = original(self, name, *slice_)
        reads.append((name, tensor.numel()))
        return tensor

    monkeypatch.setattr(SafetensorsFiles, "read", read)
    threads.run(Mesh(2, tp=2), lambda: swapped_from(reference.config, tmp_path / "in"))
    for name, count in reads:
        whole = reference.state_dict()[name].numel()
        assert count == (whole if "norm" in name else whole // 2), name


def swapped_from(config: Any, source: Any, **options: Any) -> Any:
    return load_pretrained(swap(meta_model(config, dtype=torch.float32), **options), source)


def test_fills_a_real_model_in_place(tmp_path: Any) -> None:
    reference = _saved(tmp_path / "in")
    other = copy.deepcopy(reference)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()

    def rank() -> Any:
        model = swap(copy.deepcopy(other))
        before = [id(param) for param in model.parameters()]
        load_pretrained(model, tmp_path / "in")
        assert before == [id(param) for param in model.parameters()]
        return full_state_dict(model)

    for name, weight in threads.run(Mesh(2, tp=2), rank)[0].items():
        assert torch.equal(weight, reference.state_dict()[name]), name


def test_shards_do_not_keep_whole_tensors_alive() -> None:
    config = llama_config()
    state = reference_model(config, dtype=torch.float32).state_dict()

    def rank() -> None:
        for param in swapped(config, state).parameters():
            assert param.untyped_storage().nbytes() == param.numel() * param.element_size()
            assert param.is_contiguous()

    threads.run(Mesh(2, tp=2), rank)


@pytest.mark.slow
def test_a_tied_head_under_either_name(tmp_path: Any) -> None:
    """A checkpoint may hold the shared weight as the embedding, as the head, or as both."""
    config = llama_config(tied=True)
    state = reference_model(config, dtype=torch.float32).state_dict()
    for left_out in ("lm_head.weight", "model.embed_tokens.weight", "neither"):
        partial = {name: weight for name, weight in state.items() if name != left_out}

        def rank(partial: Any = partial) -> Any:
            model = swapped(config, partial)
            assert model.lm_head.weight is model.model.embed_tokens.weight
            return full_state_dict(model)["model.embed_tokens.weight"]

        assert torch.equal(threads.run(Mesh(2, tp=2), rank)[0], state["model.embed_tokens.weight"])


def test_dtype_and_old_rotary_buffers() -> None:
    config = llama_config()
    state = dict(reference_model(config, dtype=torch.float32).state_dict())
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    def rank() -> None:
        model = load_pretrained(swap(meta_model(config, dtype=torch.float32)), state, dtype=torch.bfloat16)
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    threads.run(Mesh(1), rank)


def test_all_that_does_not_fit_is_listed_and_nothing_is_loaded() -> None:
    config = llama_config()
    state = dict(reference_model(config).state_dict())
    del state["model.norm.weight"]
    state["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    state["lm_head.weight"] = state["lm_head.weight"][:-1]

    def rank() -> Any:
        model = swap(meta_model(config))
        with pytest.raises(ValueError) as caught:
            load_pretrained(model, state)
        assert all(param.is_meta for param in model.parameters())
        return str(caught.value)

    message = threads.run(Mesh(1), rank)[0]
    assert "missing (1): model.norm.weight [32]" in message
    assert "unexpected (1): model.layers.7.mlp.up_proj.weight" in message
    assert f"of another shape (1): lm_head.weight [{VOCAB - 1}, 32], needs [{VOCAB}, 32]" in message


def test_saving_over_an_older_folder_leaves_no_stale_files(tmp_path: Any) -> None:
    """Stale files are those that more pipeline stages wrote."""
    config = llama_config()
    state = reference_model(config, dtype=torch.float32).state_dict()
    (tmp_path / "model-00002-of-00004.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "notes.txt").touch()
    threads.run(Mesh(2, tp=2), lambda: save_pretrained(swapped(config, state), tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    }


def test_saving_gathers_one_parameter_at_a_time() -> None:
    """Ranks of other replicas take no part, and nothing but the parameter is gathered."""
    config = llama_config()
    state = reference_model(config, dtype=torch.float32).state_dict()

    def rank(folder: Any) -> Any:
        model = swapped(config, state)
        with comm.record() as calls:
            save_pretrained(model, folder)
        return [call.verb for call in calls].count("all_gather")

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        counts = threads.run(Mesh(4, tp=2), rank, folder)
        with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
            assert set(file.keys()) == set(state)
    assert counts == [2 + 2 * 7, 2 + 2 * 7, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages(tmp_path: Any, tied: bool) -> None:
    """Each stage reads its part and writes its file; a weight tied over stages is written by the first."""
    reference = _saved(tmp_path / "in", tied=tied)

    def rank() -> None:
        stage: Any = Stage(swap(meta_model(reference.config, dtype=torch.float32)))
        load_pretrained(stage, tmp_path / "in")
        model = stage.original_module
        assert model.model.layers[1 - comm.rank("pp")].mlp.up_proj.weight.is_meta
        assert not model.lm_head.weight.is_meta if tied else model.lm_head.weight.is_meta == (comm.rank("pp") == 0)
        save_pretrained(stage, tmp_path / "out")
        for name, weight in full_state_dict(stage).items():
            assert torch.equal(weight, reference.state_dict()[name]), name

    threads.run(Mesh(8, tp=2, pp=2), rank)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(param.numel() for param in reference.parameters())
    assert index["weight_map"]["model.layers.0.mlp.up_proj.weight"] == "model-00001-of-00002.safetensors"
    assert index["weight_map"]["model.norm.weight"] == "model-00002-of-00002.safetensors"
    assert ("lm_head.weight" in index["weight_map"]) != tied
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_the_index_counts_the_bytes_that_are_written(tmp_path: Path) -> None:
    """Elements are of bf16, two bytes each."""
    config = llama_config()
    state = reference_model(config, dtype=torch.bfloat16).state_dict()

    def rank() -> None:
        stage: Any = Stage(swap(meta_model(config, dtype=torch.bfloat16)))
        save_pretrained(load_pretrained(stage, state), tmp_path)

    threads.run(Mesh(2, pp=2), rank)
    metadata = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
    count = sum(tensor.numel() for tensor in state.values())
    assert metadata == {"total_size": 2 * count, "total_parameters": count}


@pytest.mark.slow
def test_one_rank_writes_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    """A single rank writes, of all that hold the same weights: over dp, and over cp."""
    import safetensors.torch

    config = llama_config()
    state = reference_model(config, dtype=torch.float32).state_dict()
    writers: list[int] = []
    save = safetensors.torch.save_file

    def save_file(*args: Any, **kwargs: Any) -> None:
        writers.append(comm.rank("world"))
        save(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    threads.run(Mesh(8, tp=2, cp=2), lambda: save_pretrained(swapped(config, state), tmp_path))
    assert writers == [0]


def _save_fully_sharded(folder: Path) -> None:
    model = swapped(llama_config(), reference_model(llama_config(), dtype=torch.float32).state_dict())
    data = DeviceMesh.from_group(nxd.parallel_state.get_data_parallel_group(), "cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    save_pretrained(fully_shard(model, mesh=data), folder)
    with pytest.raises(ValueError, match="DTensor.*load the weights first, and call fully_shard then"):
        load_pretrained(model, folder)


@pytest.mark.process
@pytest.mark.slow
def test_a_model_of_fully_shard_is_written_whole(tmp_path: Path) -> None:
    processes(4).run(_save_fully_sharded, tmp_path, mesh=dict(tp=2))
    reference = reference_model(llama_config(), dtype=torch.float32).state_dict()
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert all(torch.equal(weight, reference[name]) for name, weight in again.state_dict().items())


@pytest.mark.slow
def test_stages_materialise_one_model(tmp_path: Any) -> None:
    config = llama_config(tied=True, pad_token_id=3)

    def rank() -> Any:
        return full_state_dict(materialize(swap(meta_model(config, dtype=torch.float32)), seed=5))

    def stage_rank() -> Any:
        stage: Any = materialize(Stage(swap(meta_model(config, dtype=torch.float32))), seed=5)  # type: ignore[arg-type]
        return full_state_dict(stage), gather_full(
            stage.original_module.lm_head.weight, spec_of(stage.original_module.lm_head.weight)
        )

    whole = threads.run(Mesh(1), rank)[0]
    for weights, head in threads.run(Mesh(4, tp=2, pp=2), stage_rank):
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weight, whole[name]) for name, weight in weights.items())
        assert torch.equal(head, whole["model.embed_tokens.weight"])


def test_logits_after_the_round_trip(tmp_path: Any) -> None:
    reference = _saved(tmp_path / "in")
    ids, _ = batch()

    def rank() -> None:
        save_pretrained(swapped_from(reference.config, tmp_path / "in", sequence_parallel=True), tmp_path / "out")

    threads.run(Mesh(2, tp=2), rank)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert error(again(ids).logits, reference(ids).logits) == 0


@pytest.mark.parametrize("rows", [12, 10], ids=["even", "padded"])
def test_a_rank_reads_its_slices_of_fused_blocks(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has a piece of each of two blocks of rows, one behind the other, and reads no more."""
    whole = torch.randn(2 * rows, 3)
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    sizes: list[int] = []
    read = SafetensorsFiles.read

    def counted(self: Any, *args: Any) -> torch.Tensor:
        sizes.append(len(value := read(self, *args)))
        return value

    monkeypatch.setattr(SafetensorsFiles, "read", counted)
    for rank in range(4):
        with comm.as_rank(Mesh(4, tp=4), rank):
            spec = ShardSpec("tp", 0, 2, 4, (24, 3), 2 * rows)
            model = torch.nn.Linear(3, 6, bias=False, device="meta")
            set_spec(model, "weight", spec)
            load_pretrained(model, tmp_path)
        assert torch.equal(model.weight, spec.local_slice(whole, rank))
        start, stop = spec.positions(rank)
        assert sizes == [stop - start] * 2
        sizes.clear()


def test_a_bias_that_the_head_shares_with_its_parent(tmp_path: Path) -> None:
    """BERT's `decoder.bias` is `predictions.bias` too: one parameter in checkpoints, and after the swap."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    rates = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, **rates, is_decoder=True))
    with torch.no_grad():
        model.cls.predictions.bias.copy_(torch.arange(8.0) + 1)
    model.save_pretrained(tmp_path)

    def rank_main() -> tuple[torch.Tensor, bool]:
        with torch.device("meta"):
            local = transformers.BertLMHeadModel(model.config)
        load_pretrained(swap(local), tmp_path)
        bias = local.cls.predictions.decoder.bias
        return bias.detach(), bias is local.cls.predictions.bias

    results = threads.run(Mesh(2, tp=2), rank_main)
    assert torch.equal(torch.cat([bias for bias, _ in results]), torch.arange(8.0) + 1)
    assert all(is_shared for _, is_shared in results)


def test_merged_adapters_are_in_the_folder_and_others_are_refused(tmp_path: Path) -> None:
    """Loads the folder by transformers, whose logits are those of the model with adapters."""
    ids = torch.arange(6).unsqueeze(0)

    def rank() -> torch.Tensor:
        torch.manual_seed(1)
        local = swap(LlamaForCausalLM(tiny_llama(vocab_size=32)))
        with pytest.raises(RuntimeError, match="the shards of one rank: call neuronx_dist.hf.save_pretrained"):
            local.save_pretrained(tmp_path)
        model = get_lora_model(local, LoraConfig(lora_rank=2, target_modules=["q_proj", "o_proj"]))
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.fill_(0.05)
        with pytest.raises(ValueError, match="4 layers have adapters that are not merged"):
            save_pretrained(model, tmp_path)
        model.eval().merge_lora()
        save_pretrained(model, tmp_path)
        return model(input_ids=ids).logits.detach()

    logits = threads.run(Mesh(2, tp=2), rank)[0]
    loaded, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, logits)
