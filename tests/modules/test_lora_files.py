"""Adapters that are merged, saved and loaded: states, checkpoints, and files in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.lora import LoraConfig, LoraModel, get_lora_model
from neuronx_dist.modules.lora.files import saved_config
from tests.modules.test_lora import CONFIG, DATA, HIDDEN, Net, adapted


def test_merging_changes_no_output() -> None:
    def main() -> None:
        model = adapted(True, HIDDEN // 2, 2)
        before, weight = model(DATA[0]), model.gate_up.base_layer.weight.clone()
        model.merge_lora()
        model.merge_lora()
        assert not torch.equal(weight, model.gate_up.base_layer.weight)
        torch.testing.assert_close(model(DATA[0]), before, rtol=1e-12, atol=1e-12)
        model.unmerge_lora()
        torch.testing.assert_close(model.gate_up.base_layer.weight, weight, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(model(DATA[0]), before, rtol=1e-12, atol=1e-12)

    comm.threads.run(Mesh(4, tp=4), main)


def test_a_state_that_is_saved_or_loaded_while_merged_means_the_same(tmp_path: Path) -> None:
    def main() -> None:
        model, other = adapted(False).eval(), adapted(False).eval()
        before = model(DATA[0])
        model.merge_lora()
        assert model.is_lora_merged
        state = {name: value.clone() for name, value in model.state_dict().items()}
        nxd.save_checkpoint(tmp_path, "merged", model)
        other.load_state_dict(state)
        torch.testing.assert_close(other(DATA[0]), before, rtol=1e-12, atol=1e-12)
        other = adapted(False).eval()
        nxd.load_checkpoint(tmp_path, "merged", other)
        torch.testing.assert_close(other(DATA[0]), before, rtol=1e-12, atol=1e-12)
        fresh = adapted(False).eval()
        model.load_state_dict(fresh.state_dict())  # while it is merged
        assert not model.is_lora_merged
        model.unmerge_lora()
        torch.testing.assert_close(model(DATA[0]), fresh(DATA[0]), rtol=1e-12, atol=1e-12)
        model.merge_lora()
        with pytest.raises(ValueError, match=r"call unmerge_lora\(\) before saving"):
            model.save_lora(tmp_path)
        model.train()(DATA[0]).sum().backward()  # which unmerges
        assert not model.is_lora_merged and model.head.lora_B.weight.grad is not None

    comm.threads.run(Mesh(2, tp=2), main)


def test_a_base_models_checkpoint_loads_into_a_model_with_adapters(tmp_path: Path) -> None:
    def main() -> None:
        torch.manual_seed(7)
        base = Net(False)
        expected = base(DATA[0]).detach()
        state = {name: value.clone() for name, value in base.state_dict().items()}
        nxd.save_checkpoint(tmp_path, "base", base)
        for load in (
            lambda model: model.load_state_dict(state, strict=False),
            lambda model: nxd.load_checkpoint(tmp_path, "base", model, strict=False),
        ):
            model = get_lora_model(Net(False), CONFIG)
            assert not torch.allclose(model(DATA[0]), expected)
            load(model)
            torch.testing.assert_close(model(DATA[0]), expected, rtol=1e-12, atol=1e-12)

    comm.threads.run(Mesh(2, tp=2), main)


def test_what_else_is_trained_is_saved_too(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(lora_rank=3, target_modules=["o_proj"], modules_to_save=["head"], bias="all")

    def main() -> None:
        model = get_lora_model(Net(False), LoraConfig(**options))
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(1.0)
        model.save_lora(tmp_path)
        torch.manual_seed(4)
        other = get_lora_model(Net(False), LoraConfig(**options))
        for name, param in model.named_parameters():
            if not param.requires_grad:
                with torch.no_grad():
                    other.get_parameter(name).copy_(param)
        other.load_lora(tmp_path)
        torch.testing.assert_close(other(DATA[0]), model(DATA[0]), rtol=1e-12, atol=1e-12)
        few = get_lora_model(Net(False), LoraConfig(**{**options, "modules_to_save": None}))
        with pytest.raises(ValueError, match="tensors that the model has no place for, such as base_model.model.head"):
            few.load_lora(tmp_path)

    comm.threads.run(Mesh(2, tp=2), main)


def test_tied_weights_are_not_merged_and_one_layer_of_two_names_stays_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight
            self.first = self.second = nn.Linear(4, 4)

    with comm.as_rank(Mesh(1), 0):
        model: Any = get_lora_model(Tied(), LoraConfig(target_modules=["head", "first", "second"]))
        assert model.module.first is model.module.second
        with pytest.raises(ValueError, match="head cannot be merged, because its weight is tied"):
            model.merge_lora()


def test_files_are_pefts_and_load_in_any_layout(tmp_path: Path) -> None:
    def save() -> torch.Tensor:
        model = adapted(False)
        model.save_lora(tmp_path, "one")
        return model(DATA[0]).detach()

    def load() -> torch.Tensor:
        torch.manual_seed(0)
        config = LoraConfig(**{**CONFIG.__dict__, "load_lora_from_ckpt": True})
        config.lora_save_dir, config.lora_load_tag = str(tmp_path), "one"
        return LoraModel(Net(True), config)(DATA[0]).detach()

    expected = comm.threads.run(Mesh(2, tp=2), save)[0]
    for out in comm.threads.run(Mesh(4, tp=4), load):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    file = tmp_path / "one/adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "init_lora_weights": False}))  # as PEFT's adapters that were drawn
    assert saved_config(tmp_path, "one").lora_rank == 3
    assert config["r"] == 3 and config["peft_type"] == "LORA"
    assert config["target_modules"] == ["down", "gate_up", "head", "k_proj", "o_proj", "q_proj", "v_proj"]
    tensors = load_file(tmp_path / "one/adapter_model.safetensors")
    assert tensors["base_model.model.q_proj.lora_B.weight"].shape == (HIDDEN, 3)
    assert torch.equal(*(tensors[f"base_model.model.{x}_proj.lora_A.weight"] for x in "qv"))


def test_files_name_the_model_that_pefts_auto_classes_load(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4
    )
    with comm.as_rank(Mesh(1), 0):
        hf.save_pretrained(AutoModelForCausalLM.from_config(config), tmp_path)
        model = hf.load_pretrained(hf.swap(AutoModelForCausalLM.from_config(config)), tmp_path)
        get_lora_model(model, LoraConfig(lora_rank=2)).save_lora(tmp_path, "lm")
    saved = json.loads((tmp_path / "lm/adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path) and saved["task_type"] == "CAUSAL_LM"


def test_pefts_config_is_taken_or_refused() -> None:
    peft = {"r": 4, "lora_alpha": 8, "target_modules": {"v", "q"}, "init_lora_weights": True, "use_rslora": True}
    config = LoraConfig.of({**peft, "fan_in_fan_out": True})  # in PEFT's files of GPT-2
    assert (config.lora_rank, config.target_modules, config.scaling) == (4, ["q", "v"], 4.0)
    with pytest.raises(ValueError, match="use_dora=True of PEFT's LoraConfig is not possible"):
        LoraConfig.of({**peft, "use_dora": True})
    with pytest.raises(TypeError, match="adapters need a LoraConfig, or PEFT's LoraConfig, got int"):
        LoraConfig.of(3)
