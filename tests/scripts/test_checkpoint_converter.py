"""`CheckpointConverterBase`: what NxD's flags and hooks make of a tiny Llama, and of a mixture of experts."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.checkpoint.convert.weights import convert
from neuronx_dist.checkpoint.errors import CheckpointCorrupted
from neuronx_dist.mesh import Mesh
from neuronx_dist.scripts.checkpoint_converter import CheckpointConverterBase
from tests.support.llama import tiny_llama

HEADS, KV, HEAD_DIM, HIDDEN = 4, 2, 4, 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(3)
    sizes = dict(hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV)
    whole = LlamaForCausalLM(tiny_llama(num_hidden_layers=3, **sizes))
    folder = tmp_path_factory.mktemp("llama")
    whole.save_pretrained(folder)
    return whole, folder


def arguments(converter: CheckpointConverterBase, source: Path, target: Path, config: Path, *flags: str) -> Namespace:
    required = ["--input_dir", str(source), "--output_dir", str(target), "--config", str(config)]
    return converter.get_arg_parser().parse_args([*required, *flags])


def run(converter: CheckpointConverterBase, source: Path, target: Path, config: Path, *flags: str) -> Path:
    converter.run(arguments(converter, source, target, config, *flags))
    return target


def assert_same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


@pytest.mark.slow  # together more than the fast tier has room for
@pytest.mark.each_pair
@pytest.mark.parametrize("backend", ["trn1", "trn2"])
@pytest.mark.parametrize("fuse", [False, True], ids=["weight_q", "weight_qkv"])
@pytest.mark.parametrize("xser", [False, True], ids=["pt", "xser"])
def test_there_and_back(llama: tuple[Any, Path], xser: bool, fuse: bool, backend: str, tmp_path: Path) -> None:
    """tp 4 over two key/value heads, each twice; every form is also what our own reader takes."""
    whole, folder = llama
    layout = ["--tp_size", "4", "--pp_size", "2", "--qkv_linear", "1", "--kv_size_multiplier", "2"]
    layout += ["--fuse_qkv", str(fuse), "--save_xser", str(xser), "--load_xser", str(xser), "--hw_backend", backend]
    converter, config = CheckpointConverterBase(), folder / "config.json"
    divided = run(converter, folder, tmp_path / "nxd" / "a", config, *layout, "--convert_from_full_state")
    merged = run(converter, divided / "model", tmp_path / "full", config, *layout, "--convert_to_full_state")
    assert_same(merged, whole.state_dict())
    convert(divided, tmp_path / "hf", config=folder)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole.state_dict().items())


def test_each_rank_has_the_query_heads_of_its_key_value_heads(llama: tuple[Any, Path], tmp_path: Path) -> None:
    """A rank of GQAQKVColumnParallelLinear computes the attention of these heads, and o_proj takes their columns."""
    whole, folder = llama
    attention = whole.model.layers[1].self_attn
    query, key, output = (getattr(attention, f"{name}_proj").weight.detach() for name in ("q", "k", "o"))
    flags = ["--tp_size", "4", "--qkv_linear", "true", "--kv_size_multiplier", "2", "--convert_from_full_state"]
    for backend in ("trn1", "trn2"):
        path = run(
            CheckpointConverterBase(),
            folder,
            tmp_path / backend,
            folder / "config.json",
            *flags,
            "--hw_backend",
            backend,
        )
        seen = []
        for rank in range(4):
            state = torch.load(path / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", weights_only=True)
            prefix = "model.layers.1.self_attn"
            own_query, own_key = (state[f"{prefix}.qkv_proj.weight_{letter}"] for letter in "qk")
            (head,) = [h for h in range(HEADS) if torch.equal(own_query, query.chunk(HEADS)[h])]
            kv_head = rank % KV if backend == "trn1" else rank // KV
            assert torch.equal(own_key, key.chunk(KV)[kv_head]) and head // (HEADS // KV) == kv_head
            assert torch.equal(state[f"{prefix}.o_proj.weight"], output.chunk(HEADS, 1)[head])
            gate, up = (
                getattr(whole.model.layers[1].mlp, f"{name}_proj").weight.chunk(4)[rank] for name in ("gate", "up")
            )
            assert torch.equal(state["model.layers.1.mlp.gate_up_proj.weight"], torch.cat([gate, up]))
            seen.append(head)
        assert sorted(seen) == list(range(HEADS))


def test_load_checkpoint_reads_it(llama: tuple[Any, Path], tmp_path: Path) -> None:
    whole, folder = llama
    flags = [
        "--tp_size",
        "4",
        "--pp_size",
        "2",
        "--virtual_pp_size",
        "1",
        "--qkv_linear",
        "1",
        "--kv_size_multiplier",
        "2",
    ]
    run(CheckpointConverterBase(), folder, tmp_path / "a", folder / "config.json", *flags, "--convert_from_full_state")

    def rank() -> None:
        model = hf.swap(LlamaForCausalLM(whole.config))
        nxd.load_checkpoint(tmp_path, "a", model)
        for name, value in hf.full_state_dict(model).items():
            assert torch.equal(value, whole.state_dict()[name]), name

    comm.threads.run(Mesh(2, tp=2), rank)


@pytest.mark.parametrize("virtual, expected", [("1", [[0, 1], [2, 3]]), ("2", [[0, 2], [1, 3]])])
def test_stages(virtual: str, expected: list[list[int]], tmp_path: Path) -> None:
    """Layers by NxD's rule; interleaved, stages take turns."""
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(4)]
    ends = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    torch.save({name: torch.randn(2, 2) for name in names + ends}, tmp_path / "whole.pt")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 1, "hidden_size": 2}))
    flags = ["--pp_size", "2", "--virtual_pp_size", virtual, "--convert_from_full_state"]
    args = (tmp_path / "whole.pt", tmp_path / "a", tmp_path / "config.json")
    path = run(CheckpointConverterBase(), *args, *flags)
    for stage, layers in enumerate(expected):
        state = torch.load(path / "model" / f"dp_rank_00_tp_rank_00_pp_rank_{stage:02d}.pt", weights_only=True)
        assert [int(name.split(".")[2]) for name in state if "layers" in name] == layers
        assert [name for name in ends if name in state] == (ends[1:] if stage else ends[:1])
    with pytest.raises(ValueError, match=r"--pp_size 5 times --virtual_pp_size . is more than the 4 layers"):
        run(CheckpointConverterBase(), *args, "--pp_size", "5", *flags[2:])


def test_one_projection_of_equal_heads(tmp_path: Path) -> None:
    """`--coalesce_qkv`, without grouped queries."""
    torch.manual_seed(1)
    whole = LlamaForCausalLM(tiny_llama(num_hidden_layers=1, num_key_value_heads=4))
    whole.save_pretrained(tmp_path / "hf")
    flags, config = ["--tp_size", "2", "--coalesce_qkv", "1"], tmp_path / "hf" / "config.json"
    path = run(CheckpointConverterBase(), tmp_path / "hf", tmp_path / "a", config, *flags, "--convert_from_full_state")
    state = torch.load(path / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt", weights_only=True)
    attention = whole.model.layers[0].self_attn
    expected = torch.cat([getattr(attention, f"{name}_proj").weight.chunk(2)[1] for name in "qkv"])
    assert torch.equal(state["model.layers.0.self_attn.qkv_proj.weight"], expected)
    merged = run(CheckpointConverterBase(), path, tmp_path / "b", config, *flags, "--convert_to_full_state")
    assert_same(merged, whole.state_dict())


def test_to_and_from_xser(llama: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = llama
    converter, config = CheckpointConverterBase(), folder / "config.json"
    flags = ["--tp_size", "2", "--pp_size", "1"]
    plain = run(converter, folder, tmp_path / "a", config, *flags, "--convert_from_full_state")
    xser = run(converter, plain, tmp_path / "b", config, *flags, "--convert_to_xser")
    assert (xser / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt.tensors" / "tensor_0.pt").is_file()
    again = run(converter, xser, tmp_path / "c", config, *flags, "--convert_from_xser")
    for path in (plain / "model").iterdir():
        first, second = (torch.load(root / "model" / path.name, weights_only=True) for root in (plain, again))
        assert first.keys() == second.keys() and all(torch.equal(second[name], first[name]) for name in first)


class ConverterOfExperts(CheckpointConverterBase):
    """A user's model: experts stacked as `[experts, hidden, width]`, and a config with its own names."""

    attribute_map = {
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "attn_config.kv_n_heads",
        "hidden_size": "d_model",
    }
    gate_up_proj_partition_dim = 2
    down_proj_partition_dim = 1
    layer_name_pattern = r"^(transformer\.blocks\.\d+)"

    def get_arg_parser(self) -> Any:
        parser = super().get_arg_parser()
        parser.add_argument("--experts", type=int, default=4)
        return parser

    def pre_process_full_state_before_tp_conversion(self, state_dict: Any, args: Any) -> Any:
        for layer in range(2):
            path = f"transformer.blocks.{layer}.ffn"
            for name in ("gate_proj", "up_proj", "down_proj"):
                parts = [state_dict.pop(f"{path}.experts.{number}.{name}").t() for number in range(args.experts)]
                state_dict[f"{path}.expert_mlps.mlp_op.{name}.weight"] = torch.stack(parts)
        return state_dict

    def post_process_full_state_after_tp_conversion(self, state_dict: Any, args: Any) -> Any:
        for layer in range(2):
            path = f"transformer.blocks.{layer}.ffn"
            for name in ("gate_proj", "up_proj", "down_proj"):
                stacked = state_dict.pop(f"{path}.expert_mlps.mlp_op.{name}.weight")
                for number, value in enumerate(stacked):
                    state_dict[f"{path}.experts.{number}.{name}"] = value.t()
        return state_dict


@pytest.mark.parametrize("xser", ["0", "1"], ids=["pt", "xser"])
def test_a_subclass_of_a_user(xser: str, tmp_path: Path) -> None:
    """Hooks, partition dims, names of the config and a flag of its own; tp 2, pp 2 and ep 2."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"n_heads": 4, "d_model": 8, "attn_config": {"kv_n_heads": 2}}))
    whole = {"transformer.wte.weight": torch.randn(6, 8), "lm_head.weight": torch.randn(6, 8)}
    for layer in range(2):
        path = f"transformer.blocks.{layer}"
        whole[f"{path}.norm.weight"] = torch.randn(8)
        whole[f"{path}.attn.q_proj.weight"] = torch.randn(8, 8)
        whole[f"{path}.attn.k_proj.weight"] = torch.randn(4, 8)
        whole[f"{path}.attn.v_proj.weight"] = torch.randn(4, 8)
        whole[f"{path}.attn.o_proj.weight"] = torch.randn(8, 8)
        for number in range(4):
            for name, shape in (("gate_proj", (6, 8)), ("up_proj", (6, 8)), ("down_proj", (8, 6))):
                whole[f"{path}.ffn.experts.{number}.{name}"] = torch.randn(shape)
    torch.save({"model": whole}, tmp_path / "whole.pt")
    flags = ["--tp_size", "2", "--pp_size", "2", "--ep_size", "2", "--qkv_linear", "1", "--save_xser", xser]
    converter = ConverterOfExperts()
    divided = run(converter, tmp_path / "whole.pt", tmp_path / "a", config, *flags, "--convert_from_full_state")
    files = sorted(path.name for path in (divided / "model").glob("*.pt") if not path.name.endswith(".info.pt"))
    assert len(files) == 8 and files[-1] == "dp_rank_00_ep_rank_01_tp_rank_01_pp_rank_01.pt"
    if xser == "0":
        state = torch.load(divided / "model" / files[-1], weights_only=True)
        path = "transformer.blocks.1.ffn.expert_mlps.mlp_op"
        assert list(state) == [f"{path}.gate_up_proj.weight", f"{path}.down_proj.weight"]
        gate_up = torch.cat(
            [
                torch.stack([whole[f"transformer.blocks.1.ffn.experts.{n}.{name}"].t() for n in (2, 3)]).chunk(2, 2)[1]
                for name in ("gate_proj", "up_proj")
            ],
            2,
        )
        assert torch.equal(state["transformer.blocks.1.ffn.expert_mlps.mlp_op.gate_up_proj.weight"], gate_up)
    merged = run(converter, divided / "model", tmp_path / "b", config, *flags, "--convert_to_full_state")
    assert_same(merged, whole)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("action", ["convert_from_full_state", "convert_to_full_state", "convert_to_xser"])
def test_nothing_in_a_file_runs(llama: tuple[Any, Path], action: str, tmp_path: Path) -> None:
    witness, source = tmp_path / "was run", tmp_path / "source"
    (source / "model").mkdir(parents=True)
    torch.save({"model": Malicious(witness)}, source / "checkpoint.pt")
    torch.save(Malicious(witness), source / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    with pytest.raises((CheckpointCorrupted, ValueError), match="holds more than tensors and plain data"):
        run(CheckpointConverterBase(), source, tmp_path / "x", llama[1] / "config.json", f"--{action}")
    assert not witness.exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], r"pass exactly one of the --convert_\* flags, not 0"),
        (["--convert_to_xser", "--convert_to_full_state"], r"flags, not 2: --convert_to_full_state, --convert_to_xser"),
        (["--convert_from_full_state", "--config", ""], "pass --config, the model's config.json"),
        (["--convert_from_full_state", "--tp_size", "3"], r"is not divisible by --tp_size 3"),
        (["--convert_from_full_state", "--model_style", "megatron"], "--model_style megatron .* not supported"),
        (["--convert_from_full_state", "--hw_backend", "trn3"], "--hw_backend must be trn1 or trn2, got 'trn3'"),
        (["--convert_from_full_state", "--qkv_linear", "1", "--kv_size_multiplier", "3"], "do not divide"),
    ],
)  # fmt: skip
def test_what_is_refused(llama: tuple[Any, Path], flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(CheckpointConverterBase(), llama[1], tmp_path / "x", llama[1] / "config.json", *flags)


def test_another_layout_than_that_of_the_files(llama: tuple[Any, Path], tmp_path: Path) -> None:
    converter, config = CheckpointConverterBase(), llama[1] / "config.json"
    path = run(converter, llama[1], tmp_path / "a", config, "--tp_size", "2", "--convert_from_full_state")
    with pytest.raises(ValueError, match=r"has tp=2 and pp=1, not --tp_size 4 and --pp_size 1"):
        run(converter, path, tmp_path / "b", config, "--tp_size", "4", "--convert_to_full_state")


def test_flags_of_truth(capsys: pytest.CaptureFixture[str]) -> None:
    """Upstream takes "False" for true."""
    parser = CheckpointConverterBase().get_arg_parser()
    for text, value in (("True", True), ("1", True), ("False", False), ("0", False)):
        assert parser.parse_args(["--output_dir", "x", "--qkv_linear", text]).qkv_linear is value
    with pytest.raises(SystemExit):
        parser.parse_args(["--output_dir", "x", "--qkv_linear", "maybe"])
    assert "must be 1 or 0, true or false, got 'maybe'" in capsys.readouterr().err
