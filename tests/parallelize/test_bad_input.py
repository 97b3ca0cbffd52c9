"""Refusals of `parallelize` and `build_optimizer`, as a user sees them: the name, the numbers, the nearest that works.

The parts have their own: test_config.py (sizes), test_graph.py (a policy's verbs), test_files.py (damaged folders),
test_policies.py (plans), test_optimizer.py and test_pipeline.py (steps), test_arguments.py (dummy arguments).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import (
    ComputeConfig,
    IRGraph,
    build_optimizer,
    load_merged_state_dict,
    merge_state_dicts,
    parallelize,
)
from neuronx_dist.parallelize.generated.generated_files import ForeignFilesError, GeneratedFilesError
from neuronx_dist.program.recording import TracingError
from tests.support import forked
from tests.support.pool import processes

X = torch.zeros(8, 16)
TWO = ComputeConfig(2, 2)
END2END = ComputeConfig(1, 1, use_end2end=True)


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) * scale)


class Loss(Net):
    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return (super().forward(data["x"]) - data["y"]).square().mean()


class Squares(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x).square()


class Nothing(Net):
    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        return None


class Sized(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)


class OfTheClock(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * time.perf_counter()


class OfAGenerator(Net):
    generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * torch.rand(16, generator=self.generator)


class NotDifferentiable(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) // 2


class OfALocalFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        class Copied(torch.autograd.Function):
            forward = staticmethod(lambda ctx, x: x.clone())  # type: ignore[assignment]
            backward = staticmethod(lambda ctx, gradient: gradient)  # type: ignore[assignment]

        return super().forward(Copied.apply(x))


@torch.library.custom_op("neuronx_dist_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
torch.library.register_autograd("neuronx_dist_tests::twice", lambda context, grad: grad * 2)


class Custom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.down(twice(self.up(x)))


SAMPLE = {"x": X, "y": X}


def compiled(
    folder: Path,
    module: Any = None,
    arguments: Any = None,
    policy: Any = "tp",
    config: Any = None,
    load_module: bool = False,
    **options: Any,
) -> Any:
    module, arguments = Net() if module is None else module, {"x": X} if arguments is None else arguments
    config = TWO if config is None else config
    return parallelize(module, arguments, policy, config, gen_savedir=folder, load_module=load_module, **options)


# --- arguments --------------------------------------------------------------------------------------------------------


def algorithm(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    node = graph.select(name="linear")[0]
    graph.partition(node, node.algorithm("dam"), idx=0, dim=0, num=2)
    return graph


def forgets(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    graph.assign(graph.replicate(graph.select(name="relu")[0], times=2)[0], 0)
    return graph


def twice_assigned(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    part = graph.replicate(graph.select(name="relu")[0], times=2)[0]
    graph.assign(part, 0)
    graph.assign(part, 1)
    return graph


def cuts_what_has_no_rule(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    node = graph.select(name="twice.default")[0]
    graph.partition(node, node.algorithm("dim"), idx=0, dim=0, num=2)
    return graph


class Case(NamedTuple):
    options: dict[str, Any]
    error: type[Exception]
    message: str


CASES = {
    "config": Case({"config": {"plan_ngpus": 2}}, TypeError, r"ComputeConfig\(plan_ngpus=2\), got \{'plan_ngpus': 2\}"),
    "dtype": Case({"module_dtype": "float16"}, TypeError, "a torch.dtype, such as torch.bfloat16, got 'float16'"),
    "class without module_fn": Case(
        {"module": Sized}, TypeError, r"Sized's constructor needs arguments \(width\): pass modul"
    ),
    "argument that is no dict": Case(
        {"arguments": X}, TypeError, r"arguments of forward of Net must be a dict from names.* got Tens"
    ),
    "wrong shape": Case(
        {"arguments": {"x": torch.zeros(8, 17)}},
        ValueError,
        r"Net.forward fails on dummy_forward_args \{'x': Tensor\[8, 17\]\} at .*test_bad_input.py:\d+: .*\[16, 32\]",
    ),
    "wrong dtype": Case(
        {"arguments": {"x": torch.zeros(8, 16).long()}},
        ValueError,
        r"Net.forward fails on dummy_forward_args \{'x': Tensor\[8, 16\]\} at .*input.py:\d+: .*Long and Float",
    ),
    "clock": Case(
        {"module": OfTheClock()}, TracingError, r"input.py:\d+: .*perf_counter\(\).*: two recordings of OfTheClo"
    ),
    "generator of random numbers": Case(
        {"module": OfAGenerator()},
        ValueError,
        r"input.py:\d+: a Generator cannot be written.*: draw without generator=",
    ),
    "derivative that torch lacks": Case(
        {"module": NotDifferentiable()},
        ValueError,
        r"^NotDifferentiable.backward fails on dummy_forward_args \{'x': Tensor\[8, 16\]\}: .*derivative for .*div",
    ),
    "autograd function without a name": Case(
        {"module": OfALocalFunction()},
        ValueError,
        r"input.py:\d+: .*Copied'> cannot be imported by an emitted file: define it at the top level of a module",
    ),
    "no tensor returned": Case({"module": Nothing()}, ValueError, "Nothing.forward returns no computed tensor"),
    "loss that is no scalar": Case(
        {"module": Squares(), "config": END2END},
        ValueError,
        r"Squares.forward returns a tensor of shape \[8, 16\] first",
    ),
    "second argument of an end2end module": Case(
        {"arguments": {"x": X, "scale": 2.0}, "config": END2END}, TypeError, "sets 'scale', .* leave 'scale' at its def"
    ),
    "tensor beside the sample": Case(
        {"arguments": {"x": X, "scale": torch.ones(())}, "config": END2END}, TypeError, "sets 'scale', .* leave 'scale'"
    ),
    "option of the policy": Case(
        {"config": ComputeConfig(2, 2, pas_config={"mem_constrain": 1})},
        ValueError,
        r"pas_config\['mem_constrain'\] is",
    ),
    "pipeline that is not end2end": Case(
        {"policy": "pp", "config": ComputeConfig(2, 2, pas_config={"pipeline_nmicros": 2})}, ValueError, "use_end2end=T"
    ),
    "algorithm": Case({"policy": algorithm}, ValueError, "linear.* has no algorithm 'dam'; there is \"dim\""),
    "forgotten device": Case({"policy": forgets}, ValueError, r"relu.*parts \[1\] of 2 have no device"),
    "assigned twice": Case({"policy": twice_assigned}, ValueError, "relu.*assigned twice: to device 0, and to 1"),
    "function without a rule": Case(
        {"module": Custom(), "policy": cuts_what_has_no_rule}, ValueError, "twice.*cannot be cut .*register_op"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_when_compiled(case: str, tmp_path: Path) -> None:
    options, error, message = CASES[case]
    with pytest.raises(error, match=message):
        compiled(tmp_path, **options)
    assert not list(tmp_path.rglob("gencode0.py"))


def test_a_function_without_a_rule_is_computed_by_all(tmp_path: Path) -> None:
    module = Custom()
    parallel = compiled(tmp_path, module, config=ComputeConfig(1, 1), load_module=True)
    torch.testing.assert_close(parallel(X), module(X))
    compiled(tmp_path / "two", module)
    (code,) = (tmp_path / "two").rglob("gencode0.py")
    assert "torch.ops.neuronx_dist_tests.twice.default(" in code.read_text()


@pytest.mark.parametrize("config", [ComputeConfig(1, 2), ComputeConfig(2, 4)])
def test_a_mesh_of_other_sizes_is_refused_on_all_ranks(config: ComputeConfig, tmp_path: Path) -> None:
    def rank() -> str:
        with pytest.raises(ValueError) as refusal:
            compiled(tmp_path, config=config, load_module=True)
        return str(refusal.value)

    for text in threads.run(Mesh(2, tp=2), rank):
        assert f"for 2 units of {config.plan_ngpus} ranks, but the job's mesh is Mesh(pp=1 × dp=1 × tp=2)" in text


PLANS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "model": (lambda: {"module": Loss(), "arguments": {"data": SAMPLE}}, "input data.x .* is here and not in the plan"),
    "shape": (lambda: {"module": Net(32), "arguments": {"x": torch.zeros(8, 32)}}, r"up.weight: float32\[32, 16\] in"),
    "batch": (lambda: {"arguments": {"x": torch.zeros(4, 16)}}, r"input x: float32\[8, 16\] in the plan, float32\[4"),
    "ranks": (lambda: {"config": ComputeConfig(4, 4)}, "tp=2 x pp=1 in the plan, 4 here"),
    "units": (lambda: {"config": ComputeConfig(2, 4)}, "units: dp=1 in the plan, 2 here"),
}


@pytest.mark.parametrize("other", PLANS)
def test_a_plan_file_of_another(other: str, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    saving = ComputeConfig(2, 2, pas_config={"save_plan_path": plan})
    for _ in range(2):  # files that are used again write their plan, too
        compiled(tmp_path, policy="autodist", config=saving)
        assert Path(plan).read_bytes() == next(tmp_path.rglob("_/plan.json")).read_bytes()
        Path(plan).rename(f"{plan}.first") if not Path(f"{plan}.first").exists() else None
    compiled(tmp_path / "same", policy=plan)
    options, message = PLANS[other]
    with pytest.raises(ValueError, match=f"plan was made for another job or model:(.|\n)*{message}"):
        compiled(tmp_path / "other", policy=plan, **options())


@pytest.mark.parametrize("content", [b"{", b'{"a": 1}', bytes(range(256))])
def test_a_file_that_is_no_plan(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="plan.json is no plan"):
        compiled(tmp_path, policy=path)


# --- what is loaded ---------------------------------------------------------------------------------------------------


def test_wrong_samples(tmp_path: Path) -> None:
    parallel = compiled(tmp_path, Loss(), {"data": SAMPLE}, config=END2END, load_module=True)
    with pytest.raises(ValueError, match="got no samples: .*is_dummy_batch"):
        parallel.train_step([])
    for samples in ([{"x": X}], {"x": X}, [X, X], None):
        with pytest.raises(ValueError, match=r"Loss: data\.[xy] is missing, .* recorded with \[8, 16\]"):
            parallel.train_step(samples)
    with pytest.raises(ValueError, match="2 samples, but is_dummy_batch has 1"):
        parallel.train_step([SAMPLE, SAMPLE], [True])


def test_an_argument_that_was_not_recorded_is_described_in_one_line(tmp_path: Path) -> None:
    parallel = compiled(tmp_path, config=ComputeConfig(1, 1), load_module=True)
    with pytest.raises(ValueError, match=r"scale=Tensor\[8, 16\], but the program was recorded with 1.0"):
        parallel(X, scale=X)


class Kind(Enum):
    PLUS = "plus"
    TIMES = "times"


class Branching(Net):
    def forward(self, x: torch.Tensor, kind: Any = Kind.PLUS) -> torch.Tensor:
        y = super().forward(x)
        return y + 1 if kind is Kind.PLUS else y * 2


@pytest.mark.parametrize("given", [{}, {"kind": Kind.TIMES}])
def test_a_member_of_an_enum_is_compared(given: dict[str, Any], tmp_path: Path) -> None:
    module = Branching()
    parallel = compiled(tmp_path, module, {"x": X, **given}, config=ComputeConfig(1, 1), load_module=True)
    torch.testing.assert_close(parallel(X, **given), module(X, **given))
    other = Kind.PLUS if given else Kind.TIMES
    with pytest.raises(ValueError, match=f"kind=.*Kind.{other.name}.*the program was recorded with "):
        parallel(X, kind=other)


@pytest.mark.parametrize("path, value", [("kind", object()), ("kind.a.0", {"a": [object()]})])
def test_an_argument_that_no_file_can_name_is_refused(path: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"argument {path} is <object .*cannot be written"):
        compiled(tmp_path, Branching(), {"x": X, "kind": value})


class Summing(Net):
    def forward(self, data: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        return sum(map(super().forward, data["x"]), start=torch.zeros(()))


@pytest.mark.parametrize("sample, more", [({"x": [X, X, X]}, "data.x has 2"), ({"x": [X, X], "y": X}, "data has 'y'")])
def test_more_in_a_sample_than_was_recorded_is_refused(sample: dict[str, Any], more: str, tmp_path: Path) -> None:
    parallel = compiled(tmp_path, Summing(), {"data": {"x": [X, X]}}, config=ComputeConfig(1, 1), load_module=True)
    parallel({"x": [X, X]})
    with pytest.raises(ValueError, match=f"Summing: {more}, but the program was recorded with only "):
        parallel(sample)


def test_weights_of_another_model(tmp_path: Path) -> None:
    parallel = compiled(tmp_path, config=ComputeConfig(1, 1), load_module=True)
    before = {name: x.clone() for name, x in parallel.state_dict().items()}
    with pytest.raises(ValueError, match=r"'up.weight' has shape \[32, 32\] in the state dict but \[32, 16\]"):
        load_merged_state_dict(parallel, Net(32).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*up\.weight(.|\n)*Unexpected key.*weight"):
        load_merged_state_dict(parallel, nn.Linear(3, 3).state_dict())
    assert all(torch.equal(x, before[name]) for name, x in parallel.state_dict().items())
    with pytest.raises(ValueError, match="got no state dicts"):
        merge_state_dicts([], None)


def test_arguments_of_build_optimizer(tmp_path: Path) -> None:
    parallel = compiled(tmp_path, config=ComputeConfig(1, 1), load_module=True)
    adam: Any = torch.optim.Adam
    with pytest.raises(TypeError, match="takes the module, not its parameters: got list"):
        build_optimizer(list(parallel.parameters()), adam)  # type: ignore[arg-type]
    for given in ("adam", adam(parallel.parameters())):
        with pytest.raises(TypeError, match=f"such as torch.optim.AdamW.*got a {type(given).__name__}"):
            build_optimizer(parallel, given)
    with pytest.raises(TypeError, match="a ComputeConfig or None, got {'use_zero': True}"):
        build_optimizer(parallel, adam, {"use_zero": True})  # type: ignore[arg-type]


# --- folders ----------------------------------------------------------------------------------------------------------


def cut_weights(folder: Path) -> None:
    (path,) = folder.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-10])


def edit_code(folder: Path) -> None:
    (path,) = folder.rglob("gencode0.py")
    path.write_text(path.read_text() + "\nimport os\n")


def remove_manifest(folder: Path) -> None:
    next(folder.rglob("manifest.json")).unlink()


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (cut_weights, GeneratedFilesError, r"is damaged: weights/model.safetensors has \d+ bytes, not \d+.*override"),
        (edit_code, GeneratedFilesError, "is damaged: gencode0.py differs from what was written.*override"),
        (remove_manifest, ForeignFilesError, "holds .*, which parallelize did not write.*choose another gen_savedir"),
    ],
)
def test_damaged_and_foreign_folders(
    damage: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    one = ComputeConfig(1, 1)
    compiled(tmp_path, config=one)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        compiled(tmp_path, config=one, load_module=True)
    if error is GeneratedFilesError:
        assert isinstance(compiled(tmp_path, config=one, load_module=True, reuse="override"), nn.Module)


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    compiled(tmp_path)
    with pytest.raises(GeneratedFilesError, match=r"parameter up.weight: .*\(32, 16\).*\(32, 32\)(.|\n)*override"):
        compiled(tmp_path, Net(32), {"x": torch.zeros(8, 32)})


COMPILES = """
import os, sys, time, torch
from pathlib import Path
from neuronx_dist.parallelize import ComputeConfig, parallelize
from tests.parallelize.support.models import model
rank = os.environ["RANK"]
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]  # a job of its own
module, arguments = model("mlp")
folder, ready = map(Path, sys.argv[1:])
(ready / rank).touch()
while len(os.listdir(ready)) < 2:
    time.sleep(0.001)
parallel = parallelize(module, arguments, "dp", ComputeConfig(1, 1), gen_savedir=folder)
assert torch.equal(parallel(**arguments), module(**arguments))
"""


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_compile_one_folder_at_once(tmp_path: Path) -> None:
    folder, ready = tmp_path / "files", tmp_path / "ready"
    ready.mkdir()
    both = forked.run(["-c", COMPILES, str(folder), str(ready)], ranks=2, timeout=120)
    assert both.codes == [0, 0], "\n".join(both.errors)
    assert len(list(folder.rglob("gencode0.py"))) == 1
    assert not [path for path in folder.rglob("*") if "tmp" in path.name]


# --- ranks ------------------------------------------------------------------------------------------------------------


def fails(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    raise ZeroDivisionError("no such layer")


def fail_on_rank_0(folder: str) -> tuple[int, str, float]:
    try:
        compiled(Path(folder), policy=fails, load_module=True)
    except Exception as error:
        return comm.current().rank, f"{type(error).__name__}: {error}", time.monotonic()
    raise AssertionError("it was not refused")


def check_failures(failures: list[tuple[int, str, float]]) -> None:
    for rank, text, _ in failures:
        assert text == ("" if rank == 0 else "RuntimeError: parallelize failed on rank 0: ") + (
            "ZeroDivisionError: no such layer"
        )
    assert abs(failures[1][2] - failures[0][2]) < 10  # seconds


def test_a_failure_of_rank_0_is_raised_on_all_threads(tmp_path: Path) -> None:
    check_failures(threads.run(Mesh(2, tp=2), fail_on_rank_0, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.process
def test_a_failure_of_rank_0_is_raised_in_all_processes(tmp_path: Path) -> None:
    check_failures(processes(2).run(fail_on_rank_0, str(tmp_path), mesh={"tp": 2}))
