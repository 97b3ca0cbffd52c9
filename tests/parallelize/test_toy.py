"""Programs that are too large to run are compared at toy sizes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist.parallelize import ComputeConfig, EmittedProgramError, parallelize
from neuronx_dist.parallelize import api as api_module
from neuronx_dist.parallelize import toy as toy_module
from neuronx_dist.parallelize import verify as verify_module
from neuronx_dist.parallelize.choose import choose
from neuronx_dist.parallelize.compare import check_program, check_values
from neuronx_dist.parallelize.decompose import decomposed
from neuronx_dist.parallelize.emit import emit
from neuronx_dist.parallelize.fold import folded
from neuronx_dist.parallelize.program import Division
from neuronx_dist.parallelize.record import record_program
from neuronx_dist.parallelize.same_text import text_difference
from neuronx_dist.parallelize.stored import constants_of
from neuronx_dist.parallelize.toy import Toy, check_toy, toy_of
from tests.parallelize.hf_models import HF_MODELS, hf_model
from tests.parallelize.models import MODELS, Block, model
from tests.parallelize.mutants import EAGER, mutants
from tests.parallelize.test_mutants import BUGS


class Large(nn.Module):
    """A normalised MLP, whose loss is a mean over tokens: 1e13 operations."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50257, 4096)
        self.norm = nn.LayerNorm(4096)
        self.up, self.down = nn.Linear(4096, 16384), nn.Linear(16384, 4096)
        self.head = nn.Linear(4096, 50264, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.001 * x.square().mean()


def large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        tokens = torch.empty(4, 4096, dtype=torch.long)
        return Large(), {"tokens": tokens, "labels": tokens}


def proof_of(module: nn.Module, arguments: dict[str, Any], folder: Path, config: ComputeConfig) -> str:
    """What is written of the proof, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(module, arguments, "tp", config, gen_savedir=folder, load_module=False)
    return next(folder.rglob("proof.txt")).read_text()


@cache
def divided(name: str, size: int = 2) -> tuple[Division, nn.Module, dict[str, Any], Toy]:
    """A model of the tables, everything cut that can be, and its toy."""
    module, arguments = model(name) if name in MODELS else hf_model(name)
    division = choose(decomposed(record_program(module, arguments, training=True)), "tp", size, costs=EAGER)
    return division, module, arguments, toy_of(division, module, arguments)


def test_a_large_program_is_compared_at_toy_sizes(tmp_path: Path) -> None:
    proof = proof_of(*large(), tmp_path, ComputeConfig(2, 2))
    assert "values: equal to one process; largest error " in proof
    assert "at toy sizes: 4096 as 6 (dim 1 of tokens), 16384 as 8 (dim 0 of up.weight), 50257 as 9 " in proof
    assert "as it is" not in proof


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
def test_llama_3_8b(ranks: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "use_cache": False}
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        tokens = torch.empty(1, 4096, dtype=torch.long)
    proof = proof_of(module, {"input_ids": tokens, "labels": tokens}, tmp_path, ComputeConfig(ranks, ranks))
    assert "values: equal to one process; largest error " in proof
    assert "128256 as " in proof and "14336 as " in proof and "4096 as " in proof
    assert "as it is" not in proof


# Which sizes stay as they are: Mamba's scan is a call for each position; T5's buckets of distances are computed; half
# of the image would be one patch.
AS_IT_IS = {"mamba": {8, 9, 11}, "t5": {32}, "vit": {8}}


@pytest.mark.slow
@pytest.mark.parametrize("name", HF_MODELS)
def test_hugging_face_models(name: str) -> None:
    division, _, _, toy = divided(name)
    error, coarse = check_toy(emit(division), toy)
    assert 0 < error < 1 and not coarse
    assert {int(each) for each in re.findall(r"(\d+) as it is", toy.sizes)} == AS_IT_IS.get(name, set())
    assert re.search(r"\d as \d", toy.sizes)


@pytest.mark.parametrize("name", ["mlp", "pair"])
def test_mutants_get_the_same_verdict_at_toy_sizes(name: str) -> None:
    assert_same_verdicts(name, every=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "rotary"])
def test_mutants_of_models_get_the_same_verdict_at_toy_sizes(name: str) -> None:
    assert_same_verdicts(name, every=4)


def assert_same_verdicts(name: str, every: int) -> None:
    division, module, arguments, toy = divided(name)
    constants = {key: value.constant for value, key in constants_of(division).items() if value.constant is not None}
    pairs = list(zip(mutants(emit(division)), mutants(toy.source), strict=True))
    different = []
    for whole, small in pairs[::every]:
        assert whole.edit == small.edit
        one = verdict(check_values, typed(whole.source), division, module, constants, arguments)
        two = verdict(check_program, typed(small.source), toy.division, toy.constants, toy.tensors)
        different += [f"{whole.edit}: {whole.line}: {one} and at toy sizes {two}"] if one != two else []
    assert not different


@pytest.mark.parametrize("bug", [name for name, bug in BUGS.items() if bug.by == "values"])
def test_injected_bugs_are_refused_at_toy_sizes(bug: str) -> None:
    toy = divided(BUGS[bug].program)[3]
    source = BUGS[bug].edited(toy.source)
    with pytest.raises(EmittedProgramError, match="computes something else|fails"):
        check_program(source, toy.division, toy.constants, toy.tensors)


def typed(source: str) -> str:
    return source.replace("import I, P, R, S", "import I, P, R, S, V")


def verdict(check: Callable[..., object], *args: Any) -> str:
    try:
        check(*args)
    except EmittedProgramError:
        return "refused"
    return "passed"


def half(match: re.Match[str]) -> str:
    return f"torch.div({match[1]}, {int(match[2]) // 2})"


WRONG: dict[str, Callable[[str], str]] = {
    "a factor": lambda source: re.sub(r"= (spmd\.all_reduce\([^)]*\))", r"= 1.000001 * \1", source, count=1),
    "a count in a mean": lambda source: re.sub(r"torch\.div\((\w+), (\d+)\)", half, source, count=1),
    "a doubled sum": lambda source: re.sub(r"spmd\.all_reduce\((\w+),", r"spmd.all_reduce(\1 + \1,", source, count=1),
    "a count of ranks": lambda source: re.sub(r"count=(\d+)", lambda m: f"count={int(m[1]) // 2}", source, count=1),
}


@pytest.mark.parametrize("edit", WRONG)
def test_wrong_constants_of_a_large_program_are_refused(
    edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = []

    def wrong(*args: Any, **kwargs: Any) -> str:
        right = emit(*args, **kwargs)
        edited.append(WRONG[edit](right) != right)
        return WRONG[edit](right)

    for module in (api_module, toy_module):
        monkeypatch.setattr(module, "emit", wrong)
    config = ComputeConfig(2, 2, pas_config={"costs": EAGER})
    refused = "computes something else than one process; errors over|is not the program that is compared"
    with pytest.raises(EmittedProgramError, match=refused):
        parallelize(*large(), "autodist", config, gen_savedir=tmp_path, load_module=False)
    assert edited == [True, True]
    assert (tmp_path / "refused_Large.py").exists()


def test_the_text_is_that_of_the_whole() -> None:
    division, _, _, toy = divided("gpt")
    source = emit(division)
    assert source != toy.source
    assert text_difference(source, toy.source, training=True, integers=toy.integers) == ""
    number, line = next((n, x) for n, x in enumerate(source.splitlines()) if "spmd.all_reduce(" in x)
    for wrong in (line.replace("= spmd", "= 2 * spmd"), line.replace("src=P", "src=R"), line + "\n" + line, ""):
        lines = source.splitlines()
        lines[number] = wrong
        with pytest.raises(
            EmittedProgramError, match="is not the program that is compared at toy sizes: forward, line"
        ):
            check_toy("\n".join(lines), toy)
    for before, _ in toy.integers:
        other = re.sub(rf"\b{before}\b(?=[^#\n]*\)  #)", str(before + 1), source)
        if other != source:
            assert text_difference(other, toy.source, training=True, integers=toy.integers)


class Blocks(nn.Module):
    """Equal blocks; with `other` one of them is of another width."""

    def __init__(self, count: int, other: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(2 if other and number == 2 else 4) for number in range(count)])
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


def blocks_of(module: nn.Module) -> tuple[Division, nn.Module, dict[str, Any]]:
    arguments = {"x": torch.rand(8, 8, 16, dtype=torch.float64, requires_grad=True)}
    program = decomposed(record_program(module.double(), arguments, training=True))
    return choose(program, "tp", 2, costs=EAGER), module, arguments


def test_of_equal_blocks_two_are_compared() -> None:
    few, many = blocks_of(Blocks(3)), blocks_of(Blocks(6))
    for division, left_out in ((few, 1), (many, 4)):
        whole, small = division[0], folded(division[0])
        a_block = (len(many[0].program.calls) - len(few[0].program.calls)) // 3
        assert len(whole.program.calls) - len(small.program.calls) == left_out * a_block
        assert [value.path.split(".")[1] for value in small.program.parameters if "norm_1.weight" in value.path] == [
            "0", str(left_out + 1),
        ]  # fmt: skip
        toy = toy_of(*division)
        assert toy.sizes.startswith(f"{left_out * a_block} of {len(whole.program.calls)} calls are in blocks equal to")
        assert check_toy(emit(whole), toy)[0] < 1


def test_blocks_that_differ_stay() -> None:
    division = blocks_of(Blocks(5, other=True))[0]
    assert folded(division) is division
    tied = Blocks(5)
    tied.blocks[2].up.weight = tied.blocks[1].up.weight
    division = blocks_of(tied)[0]
    assert folded(division) is division
    division = blocks_of(Blocks(2))[0]
    assert folded(division) is division


@pytest.mark.slow
def test_every_line_of_the_blocks_that_are_left_out_is_compared() -> None:
    division, module, arguments = blocks_of(Blocks(5))
    toy = toy_of(division, module, arguments)
    lines = emit(division).splitlines()
    assert check_toy("\n".join(lines), toy)
    start, stop = (next(n for n, x in enumerate(lines) if f"self.blocks[{k}].norm_1" in x) for k in (2, 3))
    wrong = 0
    for number in range(start, stop):
        line = lines[number]
        if " = " not in line or line.strip().startswith("#"):
            continue
        name, _, text = line.partition(" = ")
        text = text.partition("  #")[0]
        edits = [f"{name} = 2 * ({text})", f"{name} = {text}\n{name} = {text}"]
        edits += [line.replace("blocks[2]", "blocks[1]")] if "blocks[2]" in line else []
        for edit in edits:
            with pytest.raises(EmittedProgramError, match="is not the program that is compared at toy sizes"):
                check_toy("\n".join([*lines[:number], edit, *lines[number + 1 :]]), toy)
            wrong += 1
    assert wrong > 40


def test_two_axes_and_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "MOST_ELEMENTS", 7000)
    module, arguments = model("gpt")
    proof = proof_of(module, arguments, tmp_path / "2", ComputeConfig(4, 4, pas_config={"tp_size": 2}))
    assert "at toy sizes: " in proof
    options = {"pipeline_nstages": 2, "pipeline_nmicros": 2}
    module, arguments = model("mlp")
    monkeypatch.setattr(verify_module, "MOST_ELEMENTS", 1000)
    config = ComputeConfig(4, 4, use_end2end=True, pas_config=options)
    parallelize(module, arguments, "hybrid", config, gen_savedir=tmp_path / "p", load_module=False)
    assert "at toy sizes: " in next((tmp_path / "p").rglob("proof.txt")).read_text()
