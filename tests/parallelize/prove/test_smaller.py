"""Programs that are too large to run are compared by a smaller module of the same class, divided in the same way."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist.parallelize import ComputeConfig, EmittedProgramError, parallelize
from neuronx_dist.parallelize.emit import emitted_class as source_module
from neuronx_dist.parallelize.emit.emitted_class import EmittedProgram, emit, emitted_program
from neuronx_dist.parallelize.example import Example
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.parallelize.prove import verify as verify_module
from neuronx_dist.parallelize.prove.smaller import lines_not_compared, smaller_program
from neuronx_dist.parallelize.prove.verify import verify
from neuronx_dist.planning.plan import Plan
from neuronx_dist.program.recording import TracingError
from tests.parallelize.support.mutants import EAGER, mutants

pytestmark = pytest.mark.slow

COMPARED = "values: equal to one process by the module of verify_with; largest error "


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Normalised MLPs; the loss is a mean over tokens. As it is: 2e14 operations on 8e8 elements."""

    def __init__(self, width: int = 4096, words: int = 50264, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.table(data["tokens"])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), data["labels"].flatten()) + 0.001 * x.square().mean()


def large(layers: int = 3) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        tokens = torch.empty(4, 4096, dtype=torch.long)
        return Net(layers=layers), {"data": {"tokens": tokens, "labels": tokens}}


def small(width: int = 8, words: int = 16, layers: int = 2) -> dict[str, Any]:
    """The options of `parallelize` that compare a small net."""
    tokens = torch.randint(words, (4, 8), generator=torch.Generator().manual_seed(0))
    data = {"tokens": tokens, "labels": tokens.flip(1)}
    return {"verify_with": Net(width, words, layers), "verify_args": {"data": data}}


def proof_of(policy: Any, config: ComputeConfig, folder: Path, **options: Any) -> str:
    """Returns the proof text of the large net, and asserts that there is no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(*large(), policy, config, gen_savedir=folder, load_module=False, **(options or small()))
    return next(folder.rglob("proof.txt")).read_text()


def programs(layers: int = 3, policy: str = "autodist") -> tuple[EmittedProgram, EmittedProgram]:
    """The large program, everything cut that can be, and the small one that is divided as it is."""
    config = ComputeConfig(2, 2, pas_config={"costs": EAGER})
    example = Example(*large(layers))
    division = divide(example.program(training=True), policy, config)
    options = small(layers=layers)
    smaller = smaller_program([division], Example(options["verify_with"], options["verify_args"]), config)
    return emitted_program(example, [division]), smaller


CONFIGS: dict[str, tuple[str, ComputeConfig]] = {
    "tp": ("tp", ComputeConfig(2, 2)),
    "autodist": ("autodist", ComputeConfig(8, 8)),
    "two axes": ("tp", ComputeConfig(4, 4, pas_config={"tp_size": 2})),
    "recomputed": ("autodist", ComputeConfig(2, 2, pas_config={"recompute_modules": "layers.0,layers.1"})),
    "stages": ("hybrid", ComputeConfig(4, 4, use_end2end=True, pas_config={"pp_size": 2, "pipeline_nmicros": 2})),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in ("tp", "recomputed"))) for name in CONFIGS]
)
def test_a_large_program_is_compared_by_a_smaller_module(name: str, tmp_path: Path) -> None:
    policy, config = CONFIGS[name]
    proof = proof_of(policy, config, tmp_path, **small(16))
    assert COMPARED in proof and "not compared" not in proof


def test_a_plan_of_the_large_program_is_that_of_the_smaller_one(tmp_path: Path) -> None:
    proof_of("tp", ComputeConfig(2, 2), tmp_path / "policy")
    plan = Plan.load(next((tmp_path / "policy").rglob("plan.json")))
    assert COMPARED in proof_of(plan, ComputeConfig(2, 2), tmp_path / "plan")


def test_the_smaller_program_is_divided_as_the_large_one() -> None:
    """Whatever would be chosen for it at its sizes: nothing is worth cutting there."""
    whole, smaller = programs()
    division = divide(smaller.example.program(training=True), "autodist", ComputeConfig(2, 2))
    assert "spmd.all_reduce" not in emit(division) and "spmd.all_reduce" in whole.source
    assert lines_not_compared(whole.source, smaller.source) == []
    assert lines_not_compared(whole.source, emit(division)) != []


def test_what_is_recomputed_is_recomputed_in_the_smaller_program() -> None:
    config = ComputeConfig(2, 2, pas_config={"recompute_modules": "layers.1"})
    division = divide(Example(*large()).program(training=True), "autodist", config)
    options = small()
    smaller = smaller_program([division], Example(options["verify_with"], options["verify_args"]), config)
    (inside,) = re.findall(r"def recomputed_0\(.*?\n( {12}.*?)\n\n", smaller.source, re.DOTALL)
    assert "self.layers[1].up" in inside and "self.layers[0]" not in inside


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 8])
def test_llama_3_8b(ranks: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def llama(hidden: int, inner: int, words: int, layers: int, heads: tuple[int, int]) -> nn.Module:
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": words, "num_hidden_layers": layers}
        heads_of = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "use_cache": False}
        module: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads_of))
        return module

    with torch.device("meta"):
        module = llama(4096, 14336, 128256, 4, (32, 8))
        tokens = torch.empty(1, 4096, dtype=torch.long)
    few = torch.randint(48, (1, 16))
    options = {"verify_with": llama(64, 96, 48, 2, (16, 8)), "verify_args": {"input_ids": few, "labels": few}}
    arguments = {"input_ids": tokens, "labels": tokens}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ComputeConfig(ranks, ranks)
        parallelize(module, arguments, "autodist", config, gen_savedir=tmp_path, load_module=False, **options)
    proof = next(tmp_path.rglob("proof.txt")).read_text()
    assert COMPARED in proof and "not compared" not in proof


# --- faults -----------------------------------------------------------------------------------------------------------


def halved(match: re.Match[str]) -> str:
    return f"torch.div({match[1]}, {int(match[2]) // 2})"


WRONG: dict[str, Callable[[str], str]] = {
    "a factor": lambda source: re.sub(r"= (spmd\.all_reduce\([^)]*\))", r"= 1.000001 * \1", source, count=1),
    "a count in a mean": lambda source: re.sub(r"torch\.div\((\w+), (\d+)\)", halved, source, count=1),
    "a doubled sum": lambda source: re.sub(r"spmd\.all_reduce\((\w+),", r"spmd.all_reduce(\1 + \1,", source, count=1),
    "a count of ranks": lambda source: re.sub(r"count=(\d+)", lambda m: f"count={int(m[1]) // 2}", source, count=1),
}


@pytest.mark.parametrize("edit", WRONG)
def test_faults_of_the_emitter_are_refused(edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited = []

    def wrong(*args: Any, **kwargs: Any) -> str:
        right = emit(*args, **kwargs)
        edited.append(WRONG[edit](right) != right)
        return WRONG[edit](right)

    monkeypatch.setattr(source_module, "emit", wrong)
    config = ComputeConfig(2, 2, pas_config={"costs": EAGER})
    with pytest.raises(EmittedProgramError, match="computes other values than one process; errors larger"):
        parallelize(*large(), "autodist", config, gen_savedir=tmp_path, load_module=False, **small())
    assert edited == [True, True]
    assert (tmp_path / "refused_Net.py").exists()


@pytest.mark.slow
def test_every_mutant_of_a_large_program_is_refused() -> None:
    """Each edit of a line of the large source, and of the line of the smaller one that is like it."""
    whole, smaller = programs(layers=1)
    pairs = list(zip(mutants(whole.source), mutants(smaller.source), strict=True))
    assert len(pairs) > 20
    missed = []
    for mutant, small_mutant in pairs:
        assert mutant.operator == small_mutant.operator
        sources = [text.edited.replace("import I, P, R, S", "import I, P, R, S, V") for text in (mutant, small_mutant)]
        try:
            verify(whole._replace(source=sources[0]), smaller._replace(source=sources[1]))
        except EmittedProgramError:
            continue
        missed.append(f"{mutant.operator}: {mutant.line}")
    assert not missed


def with_fault(monkeypatch: pytest.MonkeyPatch, pattern: str, text: str) -> None:
    """From now on a line of a net of three layers, which the smaller net has not, is emitted wrong."""

    def wrong(*args: Any, **kwargs: Any) -> str:
        right = emit(*args, **kwargs)
        if "for i in range(3):" not in right:
            return right
        changed, count = re.subn(pattern, text, right, count=1)
        assert count
        return changed

    monkeypatch.setattr(source_module, "emit", wrong)


def test_a_line_that_only_the_large_program_has_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The types of a sum that is scaled are right."""
    with_fault(monkeypatch, r"linear_S2 = spmd", "linear_S2 = 2 * spmd")
    config = ComputeConfig(2, 2, pas_config={"costs": EAGER})
    message = r"Net: 1 kinds of lines are not in the program of verify_with, such as linear_S2 = 2 \*"
    with pytest.warns(UserWarning, match=message):
        parallelize(*large(), "tp", config, gen_savedir=tmp_path, load_module=False, **small())
    listed = r"lines like no line of the module of verify_with, not compared:\n  linear_S2 = 2 \* spmd\.reduce_scatter"
    assert re.search(listed, next(tmp_path.rglob("proof.txt")).read_text())


def test_the_weight_of_another_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong weight has the right types, and so has its line: it is refused with a smaller module and without."""
    with_fault(monkeypatch, r"self\.layers\[i\]", "self.layers[min(i, 1)]")
    with pytest.raises(
        EmittedProgramError, match=r"does not read layers.2.down.bias, .* but the module's forward does"
    ):
        parallelize(*large(), "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False)


class Forgetful(nn.Linear):
    """Each forward returns one tensor more than the one before: no recording is this module."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.outputs = io.BytesIO()  # state that the recorder does not look into

    def forward(self, input: torch.Tensor) -> list[torch.Tensor]:
        self.outputs.write(b"x")
        x = super().forward(input)
        return [x for _ in self.outputs.getvalue()]


def test_a_large_program_whose_recording_is_wrong_is_refused(tmp_path: Path) -> None:
    options = {"verify_with": Forgetful(4), "verify_args": {"input": torch.rand(4, 4)}}
    with torch.device("meta"):
        module, arguments = Forgetful(2**14), {"input": torch.empty(4, 2**14)}
    with pytest.raises(TracingError, match="the result of forward: two recordings of Forgetful.forward differ here"):
        parallelize(module, arguments, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False, **options)


# --- files that are used again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", ["match", "moo"])
def test_files_whose_values_were_not_compared_are_compared_later(
    reuse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "MOST_ELEMENTS", 1500)
    arguments = small(16, 32)["verify_args"]

    def proof(**options: Any) -> tuple[str, str]:
        parallelize(
            lambda_class, arguments, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False, reuse=reuse,
            module_fn=lambda: Net(16, 32, 1), **options,
        )  # fmt: skip
        weights = next(tmp_path.rglob("model.safetensors")).read_bytes()
        return next(tmp_path.rglob("proof.txt")).read_text(), weights.hex()

    lambda_class = Net
    with pytest.warns(UserWarning, match="values were not compared at this size"):
        before, weights = proof()
    assert COMPARED not in before
    compared, same_weights = proof(**small(8, 16, 1))
    assert COMPARED in compared and same_weights == weights
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert proof() == proof(**small(8, 16, 1)) == (compared, weights)


def test_arguments_that_are_smaller_are_enough(tmp_path: Path) -> None:
    module, tokens = Net(8, 16), torch.empty(2**16, 2**10, dtype=torch.long, device="meta")
    arguments = {"data": {"tokens": tokens, "labels": tokens}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(
            module, arguments, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False,
            verify_args=small()["verify_args"],
        )  # fmt: skip
    assert COMPARED in next(tmp_path.rglob("proof.txt")).read_text()


# --- what does not fit ------------------------------------------------------------------------------------------------

TOKENS = torch.zeros(4, 8, dtype=torch.long)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another class": (
        {"verify_with": nn.Linear(2, 2)},
        TypeError,
        "verify_with must be a smaller module of the parallelized class Net, got a Linear",
    ),
    "a class": ({"verify_with": Net}, TypeError, "parallelized class Net, got the class Net"),
    "no module": ({"verify_with": {"width": 8}}, TypeError, "parallelized class Net, got a dict"),
    "other arguments": (
        {**small(), "verify_args": {"tokens": TOKENS}},
        TypeError,
        "verify_with, with the arguments of verify_args: forward of Net takes no argument 'tokens'. Did you mean data",
    ),
    "no arguments by name": (
        {**small(), "verify_args": TOKENS},
        TypeError,
        "verify_with, with the arguments of verify_args: the dummy arguments of forward of Net must be a dict from",
    ),
    "arguments on which forward fails": (
        {**small(), "verify_args": {"data": {"tokens": TOKENS}}},
        ValueError,
        r"Net.forward fails on verify_args \{.* at .*test_smaller.py:\d+: KeyError: 'labels'",
    ),
    "words that are not in the table": (
        {**small(), "verify_args": {"data": {"tokens": TOKENS + 99, "labels": TOKENS}}},
        ValueError,
        r"Net.forward fails on verify_args \{.*IndexError",
    ),
    "too large": (
        {"verify_with": small()["verify_with"]},
        ValueError,
        "verify_with, called with the arguments of dummy_forward_args, is too large to compare values: forward has .* "
        "operations",
    ),
    "an operation that cannot be divided so": (
        small(width=9),
        ValueError,
        r"verify_with cannot be divided in the same way as the large Net: embedding\(.*",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    options, error, message = BAD[name]
    arguments = large()
    if name == "too large":
        arguments[1]["data"] = {
            key: torch.empty(2**16, 2**10, dtype=torch.long, device="meta") for key in ("tokens", "labels")
        }
    with pytest.raises(error, match=message):
        parallelize(*arguments, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False, **options)
    assert not list(tmp_path.rglob("*.py"))
