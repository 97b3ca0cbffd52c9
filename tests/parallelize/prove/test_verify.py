"""Proofs of an emitted program, and the reasons where there is none."""

from __future__ import annotations

import io
import math
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist.parallelize import ComputeConfig, EmittedProgramError, parallelize
from neuronx_dist.parallelize.emit import emitted_class as source_module
from neuronx_dist.parallelize.prove import value_comparison as compare_module
from neuronx_dist.parallelize.prove import verify as verify_module
from neuronx_dist.program.recording import TracingError
from tests.parallelize.support.models import model

pytestmark = pytest.mark.slow


class NotANumber(nn.Linear):
    """A module whose gradients are nan."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 0


def generated(tmp_path: Path, dtype: torch.dtype) -> str:
    """The record of what was proven of a GPT on two ranks."""
    module, arguments = model("gpt")
    config = ComputeConfig(2, 2)
    parallelize(module.to(dtype), arguments, "tp", config, gen_savedir=tmp_path, load_module=False)
    return next(tmp_path.rglob("proof.txt")).read_text()


def scaled(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """From now on emitted programs scale what they all-reduce first."""
    edit(monkeypatch, r"= (spmd\.all_reduce\([^)]*\))", rf"= {factor} * \1")


def edit(monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str) -> None:
    """From now on the first text of `pattern` in emitted programs is replaced."""
    right: Any = vars(source_module)["emit"]

    def wrong(*args: Any, **kwargs: Any) -> str:
        source: str = right(*args, **kwargs)
        return re.sub(pattern, replacement, source, count=1)

    monkeypatch.setattr(source_module, "emit", wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_small_programs_are_compared_with_one_process(dtype: torch.dtype, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proof = generated(tmp_path, dtype)
    assert "values: equal to one process; largest error " in proof
    assert "not compared" not in proof


@pytest.mark.parametrize("wrong", [0.0, math.inf])
def test_nan_is_equal_to_nan_alone(wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = NotANumber()
    parallelize(
        module, {"input": torch.zeros(4, 4)}, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False
    )
    right: Any = vars(compare_module)["_grad"]
    main = threading.main_thread()

    def other(x: torch.Tensor) -> torch.Tensor:
        grad: torch.Tensor = right(x)
        return grad if threading.current_thread() is main else torch.full_like(grad, wrong)

    monkeypatch.setattr(compare_module, "_grad", other)
    folder = tmp_path / "wrong"
    with pytest.raises(EmittedProgramError, match="the gradient of weight on rank 0"):
        parallelize(
            module, {"input": torch.zeros(4, 4)}, "tp", ComputeConfig(2, 2), gen_savedir=folder, load_module=False
        )


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0005, 1.000001])
def test_a_small_wrong_factor_is_found_in_every_dtype(
    factor: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(monkeypatch, factor)
    with pytest.raises(EmittedProgramError, match="computes other values than one process"):
        generated(tmp_path, dtype)


def test_functions_that_are_not_for_float64_are_compared_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = vars(compare_module)["run_program"]

    def refusing(program: Any, tensors: Any, *changed: Any) -> Any:
        if any(x.dtype == torch.float64 for x in tensors.values()):
            raise RuntimeError("not for float64")
        return right(program, tensors, *changed)

    monkeypatch.setattr(compare_module, "run_program", refusing)
    proof = generated(tmp_path, torch.float32)
    assert "equal to one process" in proof and "; not compared in float64: RuntimeError: not for float64" in proof
    scaled(monkeypatch, 1.05)
    with pytest.raises(EmittedProgramError, match="computes other values than one process"):
        generated(tmp_path / "wrong", torch.float32)


@pytest.mark.parametrize("limit", ["MOST_FLOPS", "MOST_ELEMENTS"])
def test_a_program_that_is_too_large_to_run_says_so(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, limit, 10)
    module, arguments = model("mlp")
    config = ComputeConfig(1, 1)
    with pytest.warns(
        UserWarning, match="Mlp: types are proven, values were not compared at this size: .* pass verify_with"
    ):
        parallel: Any = parallelize(module, arguments, "dp", config, gen_savedir=tmp_path)
    assert "\nvalues were not compared at this size: forward has " in parallel.PROOF
    with warnings.catch_warnings():  # of files that are used again the module still knows
        warnings.simplefilter("error")
        again: Any = parallelize(module, arguments, "dp", config, gen_savedir=tmp_path)
    assert again.PROOF == parallel.PROOF


class Forgetful(nn.Linear):
    """A module whose first forward returns one tensor more, or less, than later ones: no recording represents it."""

    def __init__(self, first: int, later: int) -> None:
        super().__init__(4, 4)
        self.counts = (first, later)
        self.calls = io.BytesIO()  # state that the recorder does not look into

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = super().forward(input)
        return (x,) * self.counts[min(self.calls.write(b"x") and self.calls.tell(), 2) - 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_the_module_itself_is_what_an_emitted_program_is_compared_with(
    counts: tuple[int, int], device: str, tmp_path: Path
) -> None:
    with torch.device(device):
        module = Forgetful(*counts)
    config = ComputeConfig(2, 2, inference_only=True)
    with pytest.raises(TracingError, match="the result of forward: two recordings of Forgetful.forward differ here"):
        parallelize(module, {"input": torch.zeros(4, 4)}, "tp", config, gen_savedir=tmp_path, load_module=False)


class AsksForClass(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (2.0 if type(input) is torch.Tensor else 3.0)


def test_a_recording_of_other_values_than_the_module(tmp_path: Path) -> None:
    with pytest.raises(
        EmittedProgramError,
        match="the recording of AsksForClass.forward computes other values than forward: (.|\n)*of another class",
    ):
        arguments = {"input": torch.ones(4, 4)}
        parallelize(AsksForClass(4, 4), arguments, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False)
    assert (tmp_path / "refused_AsksForClass.py").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_running_mean_that_is_zero_but_for_rounding(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear layer between two batch norms, as MobileNetV2 has: another order of additions leaves no equal digit."""
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)]
    module, arguments = nn.Sequential(*layers).to(dtype), {"input": torch.randn(16, 8, dtype=dtype)}
    config = ComputeConfig(2, 2)
    parallelize(module, arguments, "data", config, gen_savedir=tmp_path / "right", load_module=False)
    assert "values: equal to one process" in next(tmp_path.rglob("proof.txt")).read_text()
    edit(
        monkeypatch, r"composites\.batch_norm\(linear_1,", "composites.batch_norm(linear_1 + 1e-3,"
    )  # only the mean differs
    with pytest.raises(
        EmittedProgramError, match="explains: buffer 3.running_mean on rank 0: [^,]*, buffer 3.running_m"
    ):
        parallelize(module, arguments, "data", config, gen_savedir=tmp_path / "wrong", load_module=False)


def test_values_that_rounding_changes_by_more_than_the_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norm over nearly equal values leaves 8 of 16 digits, as that of two pixels does in a deep network."""
    module = nn.Sequential(nn.Hardtanh(-2, 2), nn.BatchNorm1d(8)).double()
    arguments = {"input": 1 + 1e-8 * torch.randn(4, 8, dtype=torch.float64)}
    config = ComputeConfig(2, 2)
    parallelize(module, arguments, "data", config, gen_savedir=tmp_path / "right", load_module=False)
    proof = next(tmp_path.rglob("proof.txt")).read_text()
    assert "values: equal to one process" in proof
    edit(monkeypatch, r"= (composites\.batch_norm\(.*\))", r"= 1.0001 * \1")
    with pytest.raises(EmittedProgramError, match="errors larger than rounding explains: result"):
        parallelize(module, arguments, "data", config, gen_savedir=tmp_path / "wrong", load_module=False)


@pytest.mark.each_value
@pytest.mark.parametrize("use_cache", [False, True])  # a program leaves out the cache, which is no tensor
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hooks_that_the_first_forward_registers_are_registered_once(
    device: str, use_cache: bool, tmp_path: Path
) -> None:
    """Hidden states of transformers: a second set of hooks would return each of them twice."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "use_cache": use_cache, "output_hidden_states": True}
    with torch.device(device):
        module = transformers.LlamaModel(transformers.LlamaConfig(**sizes, **heads))
    hooks = sum(len(child._forward_hooks) for child in module.modules())
    tokens = torch.zeros(2, 8, dtype=torch.long)
    parallelize(module, {"input_ids": tokens}, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path, load_module=False)
    source = next(tmp_path.rglob("gencode0.py")).read_text()
    (states,) = re.findall(r"hidden_states=\(([^)]*)\)", source)  # training and evaluation are one program
    assert len(states.split(", ")) == 3
    assert "values: equal to one process" in next(tmp_path.rglob("proof.txt")).read_text()
    assert sum(len(child._forward_hooks) for child in module.modules()) == hooks
