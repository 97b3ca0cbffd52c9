"""Modules by layouts: trained by `parallelize` on every rank, and in one process on the samples of all units."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, ParallelModule, build_optimizer, parallelize
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support import hf_models, models

STEPS = 8 if os.environ.get("NXD_FULL") == "1" else 3
MAX_NORM = 0.5  # what SGD's gradients are clipped to: below the norms of most steps; AdamW's are not
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
}
NAMES = [*models.MODELS, *hf_models.HF_MODELS]


class Layout(NamedTuple):
    """The division of a module.

    Attributes:
        plan, units: ranks of a unit, and their number.
        pp: groups of ranks of a unit on which stages lie.
        micro: samples of a unit in a step; 0: not end2end, and one.
        pas: options of the policy.
        options: of `ComputeConfig`.
    """

    policy: str
    plan: int
    units: int = 1
    pp: int = 1
    micro: int = 0
    pas: dict[str, Any] = {}
    options: dict[str, Any] = {}

    @property
    def config(self) -> ComputeConfig:
        pas = {"pipeline_nmicros": self.micro} if self.pp > 1 else {}
        options = {"use_end2end": self.micro > 0, "pas_config": {**pas, **self.pas}, **self.options}
        return ComputeConfig(self.plan, self.plan * self.units, **options)


ZERO = {"use_zero": True}
ASYNC = {"use_async_reducer": True}
LAYOUTS = {
    "dp1": Layout("dp", 1),
    "tp2": Layout("tp", 2),
    "tp4": Layout("tp", 4),
    "data2": Layout("data", 2),
    "autodist2": Layout("autodist", 2),
    "autodist2 dp2": Layout("autodist", 2, 2),
    "dp2": Layout("dp", 1, 2),
    "dp4": Layout("dp", 1, 4),
    "tp2 dp2": Layout("tp", 2, 2),
    "zero2": Layout("dp", 1, 2, options=ZERO),
    "zero4 in 2 groups": Layout("dp", 1, 4, options={**ZERO, "zero_ngroups": 2}),
    "tp2 zero2": Layout("tp", 2, 2, options=ZERO),
    "data2 zero2": Layout("data", 2, 2, options=ZERO),
    "end2end tp2 dp2": Layout("tp", 2, 2, micro=2),
    "end2end dp2": Layout("dp", 1, 2, micro=2),
    "end2end tp2 zero2": Layout("tp", 2, 2, micro=2, options=ZERO),
    "end2end pp2 dp2": Layout("hybrid", 2, 2, pp=2, micro=2),
    "async dp2": Layout("dp", 1, 2, micro=2, options=ASYNC),
    "async tp2 dp2": Layout("tp", 2, 2, micro=2, options={**ASYNC, "reducer_bucket_cap_mb": 1e-6}),
    "async tp2 zero2": Layout("tp", 2, 2, micro=2, options={**ASYNC, **ZERO}),
    "async pp2 dp2": Layout("hybrid", 2, 2, pp=2, micro=2, options=ASYNC),
    "pp2": Layout("pp", 2, pp=2, micro=2),
    "pp4": Layout("pp", 4, pp=4, micro=4),
    "pp2 gpipe": Layout("pp", 2, pp=2, micro=4, pas={"pipeline_scheduler": "gpipe"}),
    "pp2 interleaved": Layout(
        "hybrid", 2, pp=2, micro=4,
        pas={"pipeline_nstages": 4, "pp_size": 2, "pipeline_scheduler": "1f1b_interleaved"},
    ),
    "pp2 tp2": Layout("hybrid", 4, pp=2, micro=2, pas={"pipeline_nstages": 2}),
    "pp2 zero2": Layout("hybrid", 2, 2, pp=2, micro=2, options=ZERO),
    "autodist4": Layout("autodist", 4),
    "2 x 2": Layout("tp", 4, pas={"tp_size": 2}),
    "2 x 2 zero2": Layout("data", 4, 2, pas={"tp_size": 2}, options=ZERO),
    "pp2 2 x 2": Layout("hybrid", 8, pp=2, micro=2, pas={"pipeline_nstages": 2, "tp_size": 2}),
}  # fmt: skip


class Sampled(nn.Module):
    """A module of one sample: its arguments in a dict. It returns the loss, and all that the module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        results = self.inner(**data)
        return {"loss": loss_of(results), "results": results}


class Case(NamedTuple):
    """A module of the table, its arguments, and how exact one process is met."""

    module: nn.Module
    arguments: dict[str, Any]
    tolerance: float


_added: dict[str, Callable[[], Case]] = {}


def add_case(name: str, make: Callable[[], Case]) -> None:
    """Adds a module to the table."""
    _added[name] = make


@cache
def case(name: str, dtype: torch.dtype = torch.float64) -> Case:
    if name in _added:
        module, arguments, tolerance = _added[name]()
    elif name in hf_models.HF_MODELS:
        module, arguments = hf_models.hf_model(name)
        tolerance = 1e-5 if name in hf_models.IN_FLOAT32 else 1e-9
    else:
        module, arguments = models.model(name)
        tolerance = 1e-9
    if dtype != torch.float64:
        module, tolerance = copy.deepcopy(module).to(dtype), 1e-5
        arguments = pytree.tree_map_only(torch.Tensor, lambda x: _cast(x, dtype), arguments)
    return Case(module, arguments, tolerance)


def has_tied_weights(name: str) -> bool:
    module = case(name).module
    return len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)])


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x


def sample(arguments: dict[str, Any], step: int, unit: int, micro: int) -> dict[str, Any]:
    """Arguments of the same shapes: their elements, in another order."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * unit + micro)

    def shuffled(x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.numel(), generator=generator)
        return x.detach().flatten()[order].reshape(x.shape).requires_grad_(x.requires_grad)

    shuffle: dict[str, Any] = pytree.tree_map_only(torch.Tensor, shuffled, arguments)
    return shuffle


def loss_of(results: Any) -> torch.Tensor:
    """The loss among a module's results; of one without, the means of their squares, added up."""
    tensors = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return tensors[0] if not tensors[0].dim() else sum(x.pow(2).mean() for x in tensors)


class Run(NamedTuple):
    """Results of training, by name.

    Attributes:
        results: of each sample of the first step, by unit, what forward returned, and gradients of inputs.
        losses: of all samples, by unit.
        gradients: of the first step, summed over samples and units; None: that parameter has none.
        norms: of all gradients, of each step.
        weights: the state dict at the end.
    """

    results: dict[int, list[Any]]
    losses: dict[int, list[float]]
    gradients: dict[str, torch.Tensor | None]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def _bound(optimizer: str) -> float | None:
    return MAX_NORM if optimizer == "SGD" else None


@cache
def in_one_process(name: str, optimizer: str, units: int, micro: int, dtype: torch.dtype = torch.float64) -> Run:
    """Trains on the samples of all units, whose gradients are added up."""
    module, arguments, _ = case(name, dtype)
    module = copy.deepcopy(Sampled(module) if micro else module)
    stepper = OPTIMIZERS[optimizer](module.parameters())
    run = Run({unit: [] for unit in range(units)}, {unit: [] for unit in range(units)}, {}, [], {})
    for step in range(STEPS):
        module.zero_grad()
        for unit in range(units):
            for number in range(micro or 1):
                given = sample(arguments, step, unit, number)
                _backward(run, module(given) if micro else module(**given), given, unit, step, bool(micro))
        if not step:
            run.gradients.update({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
        norm = nn.utils.clip_grad_norm_(module.parameters(), _bound(optimizer) or float("inf"))
        run.norms.append(float(norm))
        stepper.step()
    run.weights.update(copy.deepcopy(module.state_dict()))
    return run


def _backward(run: Run, results: Any, given: dict[str, Any], unit: int, step: int, end2end: bool) -> None:
    loss = results["loss"] if end2end else loss_of(results)
    loss.backward()
    _keep(run, results, loss, {} if end2end else given, unit, step)


def _keep(run: Run, results: Any, loss: torch.Tensor, given: dict[str, Any], unit: int, step: int) -> None:
    run.losses[unit].append(loss.item())
    if not step:
        inputs = [x.grad for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
        copies = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (results, inputs))
        run.results[unit].append(pytree.tree_leaves(copies))


def on_rank(
    name: str, layout: str, folder: Any, dtype: torch.dtype = torch.float64, optimizers: Iterable[str] = OPTIMIZERS
) -> list[Run]:
    """Trains on a rank; of each optimizer what is there, whole."""
    return [_on_rank(name, LAYOUTS[layout], optimizer, folder, dtype) for optimizer in optimizers]


def compiled(name: str, layout: Layout, folder: Any, dtype: torch.dtype = torch.float64) -> None:
    """Writes the files that ranks load: those that wait for the first one would give up on a machine that is busy."""
    whole, given = _whole(name, layout, dtype)
    parallelize(whole, given, layout.policy, layout.config, gen_savedir=folder, load_module=False)


def _whole(name: str, layout: Layout, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    module, arguments, _ = case(name, dtype)
    return (Sampled(module), {"data": arguments}) if layout.micro else (module, arguments)


def built(
    name: str, layout: Layout, optimizer: str, folder: Any, dtype: torch.dtype = torch.float64
) -> tuple[ParallelModule, Any]:
    """The parallel module of a rank, and its optimizer."""
    whole, given = _whole(name, layout, dtype)
    parallel = parallelize(whole, given, layout.policy, layout.config, gen_savedir=folder)
    assert isinstance(parallel, ParallelModule)
    return parallel, build_optimizer(parallel, OPTIMIZERS[optimizer])


def _on_rank(name: str, layout: Layout, optimizer: str, folder: Any, dtype: torch.dtype) -> Run:
    parallel, stepper = built(name, layout, optimizer, folder, dtype)
    arguments, unit = case(name, dtype).arguments, comm.rank("dp")
    run = Run({unit: []}, {unit: []}, {}, [], {})
    for step in range(STEPS):
        stepper.zero_grad()
        samples = [sample(arguments, step, unit, number) for number in range(layout.micro or 1)]
        if layout.micro:
            for result in parallel.train_step(samples):
                _keep(run, result, result["loss"], {}, unit, step)
        else:
            _backward(run, parallel(**samples[0]), samples[0], unit, step, False)
        if not step:
            run.gradients.update(_gradients(parallel, stepper, layout))
        run.norms.append(float(stepper.clip_gnorm(_bound(optimizer))))
        stepper.step()
    run.weights.update(whole_weights(parallel))
    return run


def whole_weights(parallel: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a rank, with parameters gathered."""
    held = dict(parallel.named_parameters(remove_duplicate=False))
    state = parallel.state_dict()
    return {key: (gather_full(x, spec_of(held[key])) if key in held else x).clone() for key, x in state.items()}


def _gradients(parallel: nn.Module, stepper: Any, layout: Layout) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Whole; under ZeRO a parameter has its unit's own."""
    is_sharded = layout.config.use_zero
    if not is_sharded:
        stepper.sync_shard_grad()
    for name, p in parallel.named_parameters():
        grad = p.grad if p.grad is None or not is_sharded else comm.all_reduce(p.grad, "dp")
        yield name, None if grad is None else gather_full(grad, spec_of(p)).clone()


def on_threads(
    name: str, layout: str, folder: Any, dtype: torch.dtype = torch.float64, optimizers: Iterable[str] = OPTIMIZERS
) -> list[list[Run]]:
    """Returns the runs of the optimizers, by rank."""
    mesh = LAYOUTS[layout].config.mesh(LAYOUTS[layout].pp)
    compiled(name, LAYOUTS[layout], folder, dtype)
    return threads.run(mesh, on_rank, name, layout, folder, dtype, optimizers)


def assert_same(ranks: list[Run], wanted: Run, tolerance: float) -> None:
    """Every rank's results, gradients, norms and weights; and together the ranks hold all parameters."""
    assert {name for run in ranks for name in run.gradients} == set(wanted.gradients)
    assert {name for run in ranks for name in run.weights} == set(wanted.weights)
    units = len(wanted.losses)
    for run in ranks:
        (unit,) = run.losses
        assert len(run.results[unit]) == len(wanted.results[unit]) > 0
        for number, (has, want) in enumerate(zip(run.results[unit], wanted.results[unit])):
            close(f"results of sample {number}", has, want, tolerance)
        close("losses", torch.tensor(run.losses[unit]), torch.tensor(wanted.losses[unit]), tolerance)
        # Norms are added up over stages in any case; a rank without parameters has them in float32.
        norms = (tolerance or 1e-12) if run.gradients else 1e-6
        close("norms", torch.tensor(run.norms), torch.tensor(wanted.norms), norms)
        for what, found, other in (
            ("gradient", run.gradients, wanted.gradients), ("weight", run.weights, wanted.weights)
        ):  # fmt: skip
            scale = max((float(x.double().norm()) for x in other.values() if x is not None), default=0.0)
            for name, x in found.items():
                if units == 1 or not ("running" in name or "tracked" in name):  # of several units each has its own
                    close(f"{what} of {name}", x, other[name], tolerance, scale)


def close(what: str, has: Any, wanted: Any, tolerance: float, scale: float = 0.0) -> None:
    """Alike relative to the norm of each tensor, or to a ten-thousandth of the largest norm (`scale`)."""
    if isinstance(wanted, list):
        assert len(has) == len(wanted), what
        for index, (x, y) in enumerate(zip(has, wanted)):
            close(f"{what}, leaf {index}", x, y, tolerance, scale)
    elif isinstance(wanted, torch.Tensor):
        assert isinstance(has, torch.Tensor), what
        assert (has.shape, has.dtype) == (wanted.shape, wanted.dtype), what
        error = float((has.double() - wanted.double()).norm())
        norm = max(float(wanted.double().norm()), 1e-4 * scale, 1e-30)
        assert error <= tolerance * norm, f"{what}: {error / norm:.2g}"
    else:
        assert has == wanted, what
