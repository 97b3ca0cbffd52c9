"""`parallelize` as it is called: objects and classes, modes, steps, initial values, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, EmittedProgramError, ParallelModule, parallelize
from neuronx_dist.parallelize.emit import emitted_class as source_module
from neuronx_dist.weights.shard_spec import spec_of
from tests.parallelize.support.models import WIDTH, Mlp, model


def parallelized(
    module: Any, arguments: dict[str, Any], tmp_path: Path, config: ComputeConfig | None = None, **options: Any
) -> Any:
    """Returns the result of `parallelize` in a world of one."""
    return parallelize(module, arguments, "dp", config or ComputeConfig(1, 1), gen_savedir=tmp_path, **options)


def on_two(module: Any, arguments: dict[str, Any], tmp_path: Path, function: Any, **config: Any) -> list[Any]:
    """Returns what a function returns of the parallel module on each of two ranks."""

    def rank() -> Any:
        compute = ComputeConfig(2, 2, **config)
        return function(parallelize(module, arguments, "tp", compute, gen_savedir=tmp_path))

    return threads.run(Mesh(2, tp=2), rank)


@pytest.mark.slow
def test_a_world_of_one_needs_no_process_group(tmp_path: Path) -> None:
    module, arguments = model("gpt")
    parallel = parallelized(module, arguments, tmp_path)
    assert isinstance(parallel, ParallelModule)
    torch.testing.assert_close(parallel(**arguments), module(**arguments), rtol=1e-12, atol=1e-12)


def test_a_class_becomes_a_class(tmp_path: Path) -> None:
    _, arguments = model("mlp")
    parallel_class = parallelized(Mlp, arguments, tmp_path, module_dtype=torch.float64, module_fn=Mlp)
    assert issubclass(parallel_class, ParallelModule)
    assert next(parallel_class().parameters()).dtype == torch.float64
    assert parallelized(parallel_class, arguments, tmp_path) is parallel_class  # it is parallel already


@pytest.mark.slow
def test_without_loading_nothing_is_returned_and_no_group_is_needed(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Mlp().double()
    _, arguments = model("mlp")
    config = ComputeConfig(4, 8, use_end2end=True)
    assert parallelize(module, arguments, "tp", config, gen_savedir=tmp_path, load_module=False) is None
    (code,) = tmp_path.rglob("gencode0.py")
    assert "spmd.all_reduce" in code.read_text()


def test_both_modes_are_recorded(tmp_path: Path) -> None:
    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(self.norm(x))
            return y.tanh() if self.training else y * 2

    torch.manual_seed(0)
    module, x = Modes().double(), torch.randn(8, WIDTH).double()
    parallel = parallelized(module, {"x": x}, tmp_path)
    for training in (True, False, True):
        module.train(training), parallel.train(training)
        torch.testing.assert_close(parallel(x), module(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parallel.norm.running_var, module.norm.running_var)


def test_a_module_without_parameters(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().sum()

    x = torch.randn(3)
    for _ in range(2):
        parallel = parallelized(Bare(), {"x": x}, tmp_path)
        assert torch.equal(parallel(x), x.relu().sum()) and not parallel.state_dict()
    (code,) = tmp_path.rglob("gencode0.py")
    before = code.stat().st_ino
    parallelized(Bare(), {"x": x}, tmp_path)
    assert code.stat().st_ino == before  # it was used again


def test_a_device_among_the_arguments_is_that_of_the_module(tmp_path: Path) -> None:
    cpu = torch.device("cpu")

    class Moved(nn.Linear):
        def forward(
            self, x: torch.Tensor, device: torch.device = cpu, other: torch.device | None = None
        ) -> torch.Tensor:
            return super().forward(x.to(device)) + torch.ones(4, device=other)

    module, x = Moved(4, 4), torch.randn(2, 4)
    parallel = parallelized(module, {"x": x, "other": cpu}, tmp_path)
    assert torch.equal(parallel(x, other=cpu), module(x, other=cpu))
    assert torch.equal(parallel(x, torch.device("cpu", 0)), module(x))


def test_a_forward_that_is_wrapped_in_the_instance(tmp_path: Path) -> None:
    """The function closes over the module itself, as those of accelerate and PEFT do."""
    module, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)

    def wrapped(inner: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        forward = inner.forward
        return lambda input: forward(input) * (1 + len([*inner.children()]))

    for part in (module[0], module):
        part.forward = wrapped(part)
    parallel = parallelized(module, {"input": x}, tmp_path)
    torch.testing.assert_close(parallel(x), module(x))


def test_modes_that_differ_in_a_constant_alone_are_two(tmp_path: Path) -> None:
    constants = {True: torch.arange(4.0), False: torch.ones(4)}

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * constants[self.training]

    module, x = Scaled(4, 4), torch.ones(2, 4)
    parallel = parallelized(module, {"x": x}, tmp_path)
    for training in (True, False):
        module.train(training), parallel.train(training)
        torch.testing.assert_close(parallel(x), module(x))


def test_autocast_is_of_the_device_that_the_module_is_on(tmp_path: Path) -> None:
    """In the file as `self.device.type`: recorded on CPU, it runs on a GPU."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.linear(x)
            return y.float() * x

    module, x = Mixed(), torch.randn(8, WIDTH)
    parallel = parallelized(module, {"x": x}, tmp_path)
    (code,) = tmp_path.rglob("gencode0.py")
    lines = [line.strip() for line in code.read_text().splitlines() if "autocast" in line]
    assert {*lines} == {"with torch.autocast(self.device.type, torch.bfloat16, enabled=True):"}
    assert torch.equal(parallel(x), module(x))


class Mode(IntEnum):
    SUM = 0
    ROWS = 1


def test_numbers_of_other_classes_are_written_as_numbers(tmp_path: Path) -> None:
    """Members of enums and NumPy's scalars, whose own text is none that Python reads."""

    class Numbers(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return (
                torch.sum(self.weight * x * np.float64(8.0), Mode.ROWS),
                Mode.SUM,
                np.float64(0.5),
                np.complex128(1 + 2j),
            )

    module, x = Numbers(WIDTH, 4, bias=False), torch.ones(4, WIDTH)
    first, *others = parallelized(module, {"x": x}, tmp_path)(x)
    assert torch.equal(first, module(x)[0]) and others == [0, 0.5, 1 + 2j]


def test_train_step(tmp_path: Path) -> None:
    module, arguments = model("mlp")
    (sample,) = arguments.values()
    other = {name: x.flip(0) * 0.5 for name, x in sample.items()}
    losses = [module(x) for x in (sample, other)]
    (losses[0] + 3 * losses[1]).backward()
    whole = {name: p.grad.clone() for name, p in module.named_parameters()}

    def step(parallel: Any) -> Any:
        scales = iter([1, 3])
        results = parallel.train_step([sample, other], scale_fn=lambda loss: loss * next(scales))
        first = {name: p.grad.clone() for name, p in parallel.named_parameters()}
        parallel.train_step([other, sample], is_dummy_batch=[True, False])  # in place of the gradients before
        second = [p.grad.clone() for p in parallel.parameters()]
        alone = parallel.train_step(sample)  # one sample is a list of one
        for p, grad in zip(parallel.parameters(), second, strict=True):
            assert torch.equal(p.grad, grad)
        index = {name: spec_of(p).local_slice(whole[name], parallel._index) for name, p in parallel.named_parameters()}
        return results, alone, parallel.infer_step([sample, other]), first, index

    for results, alone, inferred, gradients, expected in on_two(module, arguments, tmp_path, step, use_end2end=True):
        torch.testing.assert_close(results, [x.detach() for x in losses], rtol=1e-12, atol=1e-12)
        assert all(not x.requires_grad and x.shape == () for x in (*results, *inferred))
        torch.testing.assert_close([*alone, *inferred[1:]], results, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def test_only_dummy_batches_leave_zeros(tmp_path: Path) -> None:
    module, arguments = model("mlp")
    parallel = parallelized(module, arguments, tmp_path, ComputeConfig(1, 1, use_end2end=True))
    parallel.train_step(arguments["data"], is_dummy_batch=[True])
    assert all(not p.grad.any() for p in parallel.parameters())


def test_initial_values(tmp_path: Path) -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("kept", torch.ones(3))
            self.inner.register_buffer("scratch", torch.full((3,), 2.0), persistent=False)
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.inner.kept + self.inner.scratch * self.weight

    module, x = Buffers(), torch.ones(3)
    parallel_class = type(parallelized(module, {"x": x}, tmp_path))
    torch.testing.assert_close(parallel_class()(x), module(x))
    empty = parallel_class(init_params=False)
    with pytest.raises(RuntimeError, match="buffer 'inner.kept' has no value.*load a state dict"):
        empty(x)
    empty.load_state_dict(module.state_dict())
    with pytest.raises(RuntimeError, match="buffer 'inner.scratch' has no value.*in no state dict"):
        empty(x)
    assert list(empty.state_dict()) == list(module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("reuse", ["match", "moo", "graph", "override"])
def test_an_object_gives_its_own_values_to_code_of_an_earlier_run(reuse: str, tmp_path: Path) -> None:
    module, arguments = model("gpt")
    tokens = {name: x.clone() for name, x in arguments.items()}

    def loss(parallel: Any) -> float:
        return float(parallel(**tokens).detach())

    on_two(module, arguments, tmp_path, loss)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    config = ComputeConfig(2, 2)

    def rank() -> float:
        # What other ranks have does not count: one model has one set of values.
        local = module if comm.current().rank == 0 else model("gpt")[0]
        return loss(parallelize(local, arguments, "tp", config, gen_savedir=tmp_path, reuse=reuse))

    assert threads.run(Mesh(2, tp=2), rank) == pytest.approx([float(module(**tokens).detach())] * 2, rel=1e-12)


def test_an_end2end_module_has_no_forward(tmp_path: Path) -> None:
    module, arguments = model("mlp")
    parallel = parallelized(module, arguments, tmp_path, ComputeConfig(1, 1, use_end2end=True))
    with pytest.raises(RuntimeError, match="end2end: call train_step or infer_step"):
        parallel(arguments["data"])
    with pytest.raises(ValueError, match="2 samples, but is_dummy_batch has 1"):
        parallel.train_step([arguments["data"]] * 2, is_dummy_batch=[False])


def test_steps_are_for_end2end_modules(tmp_path: Path) -> None:
    module, arguments = model("mlp")
    parallel = parallelized(module, arguments, tmp_path)
    with pytest.raises(RuntimeError, match="train_step needs an end2end module"):
        parallel.train_step([arguments["data"]])


class Refusal(NamedTuple):
    change: dict[str, Any]
    error: type[Exception]
    message: str


X = torch.zeros(8, WIDTH).double()
REFUSALS = {
    "unknown argument": Refusal({"arguments": {"x": X, "y": X, "scal": 2.0}}, TypeError, "no argument 'scal'.*scale"),
    "missing argument": Refusal({"arguments": {"x": X}}, TypeError, "needs y, missing"),
    "two samples": Refusal({"config": ComputeConfig(1, 1, use_end2end=True)}, TypeError, "end2end.*requires x, y"),
    "no module": Refusal({"module": object()}, TypeError, "takes a torch.nn.Module"),
    "instance name": Refusal({"instance_name": "a-b"}, ValueError, "must be a Python identifier"),
    "policy": Refusal({"policy": "tq"}, ValueError, "unknown policy 'tq'"),
    "reuse": Refusal({"reuse": "moon"}, ValueError, "moo"),
    "broadcast": Refusal({"broadcast_strategy": "all"}, RuntimeError, "no process group"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path) -> None:
    module, arguments = model("pair")
    options: dict[str, Any] = {"module": module, "arguments": arguments, "policy": "dp", "config": ComputeConfig(1, 1)}
    options |= REFUSALS[case].change
    given = [options.pop(name) for name in ("module", "arguments", "policy", "config")]
    with pytest.raises(REFUSALS[case].error, match=REFUSALS[case].message):
        parallelize(*given, gen_savedir=tmp_path, **options)


def test_arguments_of_other_shapes_and_values_are_refused(tmp_path: Path) -> None:
    module, arguments = model("pair")
    parallel = parallelized(module, arguments, tmp_path)
    with pytest.raises(ValueError, match=r"x is \[4, 16\] torch.float64, but the program was recorded with \[8, 16\]"):
        parallel(arguments["x"][:4], arguments["y"])
    with pytest.raises(ValueError, match="scale=3.0, but the program was recorded with 2.0"):
        parallel(arguments["x"], arguments["y"], scale=3.0)


def test_a_parallel_module_inside_is_refused(tmp_path: Path) -> None:
    module, arguments = model("mlp")
    outer = nn.Sequential(parallelized(module, arguments, tmp_path))
    norm = nn.Sequential(nn.SyncBatchNorm(4, process_group=object()))
    with pytest.raises(ValueError, match="Sequential: SyncBatchNorm 0 has a process_group, .* process_group=None"):
        parallelized(norm, {"input": X}, tmp_path)
    with pytest.raises(ValueError, match="Sequential: submodule 0 is already parallelized"):
        parallelized(outer, {"input": X}, tmp_path)


def test_a_divided_module_needs_its_mesh(tmp_path: Path) -> None:
    module, arguments = model("mlp")
    with pytest.raises(RuntimeError, match="divided over 2 ranks, but there is no mesh"):
        parallelize(module, arguments, "tp", ComputeConfig(2, 2), gen_savedir=tmp_path)


def test_a_wrong_program_is_kept_and_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, arguments = model("mlp")
    right = source_module.emit

    def wrong(*args: Any, **kwargs: Any) -> str:
        source: str = right(*args, **kwargs)
        return source.replace("torch.sigmoid(", "torch.tanh(")

    monkeypatch.setattr(source_module, "emit", wrong)
    with pytest.raises(EmittedProgramError, match="bug of neuronx_dist, not of Mlp.*refused_Mlp.py"):
        parallelized(module, arguments, tmp_path)
    assert "tanh" in (tmp_path / "refused_Mlp.py").read_text()
    assert not list(tmp_path.rglob("gencode0.py"))


@pytest.mark.parametrize("broken", ["is no Python (", "raise KeyError('x')"])
def test_a_file_that_does_not_run_is_our_bug(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, arguments = model("mlp")
    monkeypatch.setattr(source_module, "emit", lambda *args, **kwargs: broken)
    with pytest.raises(EmittedProgramError, match="^(SyntaxError|KeyError): (.|\n)*bug of neuronx_dist, not of Mlp"):
        parallelized(module, arguments, tmp_path)
    assert (tmp_path / "refused_Mlp.py").read_text() == broken


class FailsOnValues(nn.Linear):
    """Nothing is known of values when it is recorded."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input[torch.full((8,), 99)])


def test_an_original_that_fails_on_its_values_is_not_our_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FailsOnValues.forward fails on dummy_forward_args .* at .*: IndexError"):
        parallelized(FailsOnValues(16, 4).double(), {"input": X}, tmp_path)
    assert not list(tmp_path.glob("refused_*"))


@pytest.mark.parametrize("first", [pytest.param("neuronx_dist", marks=pytest.mark.full), "neuronx_dist.parallelize"])
@pytest.mark.process
def test_imports_in_either_order(first: str) -> None:
    second = {"neuronx_dist": "neuronx_dist.parallelize", "neuronx_dist.parallelize": "neuronx_dist"}[first]
    code = f"import {first}, {second}; from neuronx_dist.parallelize import parallelize; assert callable(parallelize)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_module_is_that_of_the_parallel_one(training: bool, tmp_path: Path) -> None:
    """A module of `from_pretrained` is in evaluation mode: the parallel one would train, with dropout, in its place."""
    module, x = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).double(), torch.ones(8, 16).double()
    parallel = parallelized(module.train(training), {"input": x}, tmp_path)
    assert parallel.training == training and module.training == training
    assert bool((parallel(x) == 0).any()) == training
    assert parallelized(module.train(not training), {"input": x}, tmp_path).training != training  # from the same files


@pytest.mark.parametrize("training", [True, False])
def test_objects_of_a_class_begin_in_the_mode_of_module_fn(training: bool, tmp_path: Path) -> None:
    for _ in range(2):  # from new files, and from these
        parallel_class = parallelized(
            Mlp, model("mlp")[1], tmp_path, module_dtype=torch.float64, module_fn=lambda: Mlp().train(training)
        )
        assert parallel_class().training == training
        assert all(child.training == training for child in parallel_class().modules())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.mark.slow
@pytest.mark.parametrize("units", [1, 2])
def test_batch_norm_over_units_is_warned_of(units: int, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = ComputeConfig(2, 2 * units)
        parallelize(Normed(), {"x": torch.ones(8, 4)}, "tp", config, gen_savedir=tmp_path, load_module=False)
    texts = [str(warning.message) for warning in caught if "batch norm" in str(warning.message)]
    assert (
        len(texts) == units - 1 == next(tmp_path.rglob("proof.txt")).read_text().count("batch norm takes its statist")
    )
    assert all(re.search(r"^Normed: .*test_parallelize.py:\d+: .* of one unit, and there are 2", x) for x in texts)


def test_a_parallel_module_is_copied_and_not_pickled(tmp_path: Path) -> None:
    parallel, x = (
        parallelized(nn.Sequential(nn.Linear(16, 16)).double(), {"input": X}, tmp_path),
        torch.ones(8, 16).double(),
    )
    copied = copy.deepcopy(parallel)
    assert type(copied) is type(parallel) and torch.equal(copied(x), parallel(x))
    nn.init.zeros_(next(iter(copied.parameters())))
    assert not torch.equal(copied(x), parallel(x)) and copy.copy(parallel)(x).equal(parallel(x))
    for save in (pickle.dumps, lambda module: torch.save({"model": module}, io.BytesIO())):
        with pytest.raises(pickle.PicklingError, match=r"^Sequential is a parallel module, .* save its state_dict\(\)"):
            save(parallel)
