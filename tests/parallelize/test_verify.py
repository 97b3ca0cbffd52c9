"""What is proven of an emitted program, and what is said where it is not."""

from __future__ import annotations

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
from neuronx_dist.parallelize import api as api_module
from neuronx_dist.parallelize import compare as compare_module
from neuronx_dist.parallelize import verify as verify_module
from tests.parallelize.models import model


class NotANumber(nn.Linear):
    """Its gradients are nan."""

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
    right: Any = vars(api_module)["emit"]

    def wrong(*args: Any, **kwargs: Any) -> str:
        source: str = right(*args, **kwargs)
        return re.sub(r"= (spmd\.all_reduce\([^)]*\))", rf"= {factor} * \1", source, count=1)

    monkeypatch.setattr(api_module, "emit", wrong)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0005, 1.000001])
def test_a_small_wrong_factor_is_found_in_every_dtype(
    factor: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(monkeypatch, factor)
    with pytest.raises(EmittedProgramError, match="computes something else than one process"):
        generated(tmp_path, dtype)


def test_functions_that_are_not_for_float64_are_compared_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = vars(compare_module)["run_program"]

    def refusing(program: Any, tensors: Any) -> Any:
        if any(x.dtype == torch.float64 for x in tensors.values()):
            raise RuntimeError("not for float64")
        return right(program, tensors)

    monkeypatch.setattr(compare_module, "run_program", refusing)
    proof = generated(tmp_path, torch.float32)
    assert "equal to one process" in proof and "; not compared in float64: RuntimeError: not for float64" in proof
    scaled(monkeypatch, 1.05)
    with pytest.raises(EmittedProgramError, match="computes something else than one process"):
        generated(tmp_path / "wrong", torch.float32)


@pytest.mark.parametrize("limit", ["MOST_FLOPS", "MOST_ELEMENTS"])
def test_a_program_that_is_too_large_to_run_says_so(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, limit, 10)
    module, arguments = model("mlp")
    config = ComputeConfig(1, 1)
    with pytest.warns(UserWarning, match=r"Mlp: the types .* proven, its values are not compared .* smaller module"):
        parallel: Any = parallelize(module, arguments, "dp", config, gen_savedir=tmp_path)
    assert "values: not compared with one process" in parallel.PROOF
    with warnings.catch_warnings():  # of files that are used again the module still knows
        warnings.simplefilter("error")
        again: Any = parallelize(module, arguments, "dp", config, gen_savedir=tmp_path)
    assert again.PROOF == parallel.PROOF
