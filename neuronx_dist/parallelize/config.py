"""The number of ranks of a parallel module and its training: `ComputeConfig`, and the options of `parallelize`.

    unit     `plan_ngpus` adjacent ranks, which together hold one model: rank r is part r % plan_ngpus
    units    `runtime_ngpus / plan_ngpus`, with different data: rank r is in unit r // plan_ngpus

Gradients are summed over the units. Names and defaults are nnScaler's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from .. import comm
from ..mesh import Mesh
from ..nearest import nearest
from ..topology import LINEAR, UNITS

__all__ = ["BroadcastGenFilesStrategy", "ComputeConfig", "Pipeline", "ReuseType", "divisors_near"]

Member = TypeVar("Member", bound=Enum)

TRACE_STRATEGIES = ("cuda_run_cpu_offload", "cpu", "cuda", "meta", "reuse_cache")
_OPTIONS = {"ReuseType": "reuse", "BroadcastGenFilesStrategy": "broadcast_strategy"}
_NUMBERS = "pipeline_nmicros", "pipeline_nstages", "pp_size", "seed", "max_partition_degree", "step_samples"
_DEGREES = "tp_size", "explore_axes"
# nnScaler's names of schedules, and those of `choose.stages.schedule_of`. 1f1b_plus differs from 1F1B for stages on all
# ranks of a unit, which no policy makes; infer_pipe is the forwards of 1F1B.
SCHEDULES = {
    "1f1b": "1f1b",
    "1f1b_plus": "1f1b",
    "gpipe": "gpipe",
    "1f1b_interleaved": "interleaved",
    "chimera_direct": "chimera_direct",
    "infer_pipe": "1f1b",
}


class _Option(Enum):
    """An option of `parallelize`, which may be passed by its name."""

    @classmethod
    def of(cls: type[Member], value: Member | str) -> Member:
        """Returns a member, or the member with this name in upper or lower case.

        Raises:
            ValueError: no member has the name; the message lists all names.
        """
        if isinstance(value, cls):
            return value
        by_name = {member.value: member for member in cls}
        if isinstance(value, str) and value.lower() in by_name:
            return by_name[value.lower()]
        near = f"; nearest: {nearest(value, by_name)}" if isinstance(value, str) else ""
        raise ValueError(f"{_OPTIONS[cls.__name__]}={value!r} is none of {', '.join(map(repr, by_name))}{near}")


class ReuseType(_Option):
    """The use that `parallelize` makes of files of an earlier run.

    MATCH: reuse files of the same module, config and policy; generate if there are no files; other files are an error.
    OVERRIDE: generate always.
    MOO: match or override: reuse files that match, generate otherwise.
    GRAPH: reuse the recorded programs of the module if they match, and choose and emit again.
    """

    MATCH = "match"
    OVERRIDE = "override"
    MOO = "moo"
    GRAPH = "graph"


class BroadcastGenFilesStrategy(_Option):
    """The newly generated files that rank 0 sends to the other ranks. Reused files are never sent.

    NONE: no files: ranks share a folder, or it is copied by hand.
    ALL: all files.
    NO_WEIGHTS: all but the initial weights: modules are made with `init_params=False`.
    CODE: the code and the constants that it loads: the same as NO_WEIGHTS.
    """

    NONE = "none"
    ALL = "all"
    NO_WEIGHTS = "no_weights"
    CODE = "code"


class Pipeline(NamedTuple):
    """The pipeline of a graph: stages, microbatches, schedule.

    Attributes:
        schedule: a name of `pipeline.schedule`, or "chimera_direct".
    """

    nstages: int
    nmicros: int
    schedule: str


@dataclass(frozen=True)
class ComputeConfig:
    """The ranks of a parallel module, and the options of its training.

    Attributes:
        plan_ngpus: ranks of a unit. None: the policy `autodist` chooses it, or a plan has it; the `compute_config` of
            the parallel module has the chosen number.
        runtime_ngpus: ranks of the job. None: those of the current mesh, else of `WORLD_SIZE`, else one unit.
        constant_folding, trace_strategy: accepted for compatibility: values that depend on no input and no parameter
            are computed on every rank, and recording runs on fake tensors whatever the device.
        use_zero: shard the optimizer's state over units (stage 1). None: chosen together with `plan_ngpus`, else False.
        zero_ngroups: number of groups of units, each of which shards one copy of the state; 1 without `use_zero`.
        zero_use_reduce_scatter: accepted for compatibility: ZeRO reduce-scatters gradients in any case.
        inference_only: the module has no backward.
        use_end2end: forward takes one sample and returns the loss; `train_step` and `infer_step` run it.
        use_async_reducer: reduce gradients while backward runs; only with `use_end2end`.
        reducer_bucket_cap_mb: MB of gradients that are reduced together; None or 0: 25 with `use_async_reducer`, else
            the default of `reduce_gradients`. A cap below the size of every gradient makes one bucket for each.
        pas_config: options of the policy, by name.
        user_config: further dependencies of generated code; a part of the key of generated files.

    Raises:
        ValueError: sizes do not divide one another (the message has the nearest that do), or options contradict.
        TypeError: a value has the wrong type.
    """

    plan_ngpus: int = None  # type: ignore[assignment]  # an int in every module
    runtime_ngpus: int | None = None
    constant_folding: bool = False
    trace_strategy: str = "cuda_run_cpu_offload"
    use_zero: bool | None = None
    zero_ngroups: int = 1
    zero_use_reduce_scatter: bool = False
    inference_only: bool = False
    use_end2end: bool = False
    use_async_reducer: bool = False
    reducer_bucket_cap_mb: float | None = None
    pas_config: dict[str, Any] = field(default_factory=dict)
    user_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.is_open:
            _positive("plan_ngpus", self.plan_ngpus)
        if self.runtime_ngpus is None:
            object.__setattr__(self, "runtime_ngpus", _ranks_of_job(1 if self.is_open else self.plan_ngpus))
        _positive("runtime_ngpus", self.runtime_ngpus)
        if not self.is_open and self.world_size % self.plan_ngpus:
            near = _multiples_near(self.world_size, self.plan_ngpus)
            raise ValueError(
                f"ComputeConfig: runtime_ngpus={self.runtime_ngpus} is not a multiple of plan_ngpus={self.plan_ngpus}: "
                f"a job consists of whole units; the nearest runtime_ngpus that work are {near}, the nearest "
                f"plan_ngpus {divisors_near(self.world_size, self.plan_ngpus)}"
            )
        self._check_options()
        self._check_zero()

    def _check_options(self) -> None:
        if self.trace_strategy not in TRACE_STRATEGIES:
            raise ValueError(
                f"ComputeConfig: unknown trace_strategy {self.trace_strategy!r}; there are "
                f"{', '.join(map(repr, TRACE_STRATEGIES))}"
            )
        if self.use_async_reducer and not self.use_end2end:
            raise ValueError(
                "ComputeConfig: use_async_reducer needs use_end2end=True: only train_step knows the last backward of a "
                "step"
            )
        cap = self.reducer_bucket_cap_mb
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap >= 0):
            raise ValueError(f"ComputeConfig: reducer_bucket_cap_mb must be a number of MB, at least 0, got {cap!r}")
        for name in ("pas_config", "user_config"):
            given = getattr(self, name)
            if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
                raise TypeError(f"ComputeConfig: {name} must be a dict with names as keys, got {given!r}")
            object.__setattr__(self, name, dict(given))
        self._check_pas_config()

    def _check_pas_config(self) -> None:
        """Checks the options that all policies read in the same way; each policy refuses unknown names."""
        config = self.pas_config
        for name in (*_NUMBERS, *_DEGREES):
            given = config.get(name)
            if given is None or (name == "pipeline_nstages" and given == "auto"):
                continue
            if name == "explore_axes" and isinstance(given, bool):
                continue
            listed = given if name in _DEGREES and isinstance(given, (list, tuple)) and given else [given]
            least = 0 if name == "seed" else 1
            is_no_list = name == "explore_axes" and listed is not given
            if is_no_list or any(
                type(number) is bool or not isinstance(number, int) or number < least for number in listed
            ):
                wanted = "a positive integer"
                if name in _DEGREES:
                    one = "True or False" if name == "explore_axes" else wanted
                    wanted = f"{one}, or a list of positive integers, the ranks along each axis"
                raise TypeError(f"ComputeConfig: pas_config[{name!r}] must be {wanted}, got {given!r}")
        if config.get("pipeline_scheduler") is not None:
            schedule_named(config["pipeline_scheduler"])

    def _check_zero(self) -> None:
        if self.is_open:
            if self.zero_ngroups != 1:
                raise ValueError("ComputeConfig: zero_ngroups counts groups of units: pass plan_ngpus, ranks of a unit")
            return
        if self.use_zero not in (0, 1, None):
            raise ValueError(
                f"ComputeConfig: use_zero={self.use_zero!r} is not supported: pass True for ZeRO stage 1 (sharded "
                "optimizer state), or False"
            )
        object.__setattr__(self, "use_zero", bool(self.use_zero))
        _positive("zero_ngroups", self.zero_ngroups)
        if not self.use_zero:
            object.__setattr__(self, "zero_ngroups", 1)
        if self.units % self.zero_ngroups:
            raise ValueError(
                f"ComputeConfig: zero_ngroups={self.zero_ngroups} does not divide the {self.units} units "
                f"(runtime_ngpus={self.runtime_ngpus} / plan_ngpus={self.plan_ngpus}); the nearest that work are "
                f"{divisors_near(self.units, self.zero_ngroups)}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks of the job: `runtime_ngpus`."""
        assert self.runtime_ngpus is not None
        return self.runtime_ngpus

    @property
    def is_open(self) -> bool:
        """Whether the ranks of a unit are not chosen yet."""
        return self.plan_ngpus is None

    def with_unit(self, ranks: int, use_zero: bool) -> ComputeConfig:
        """Returns the configuration with units of this many ranks, and ZeRO or not, if they are not chosen yet."""
        return replace(self, plan_ngpus=ranks, use_zero=use_zero) if self.is_open else self

    @property
    def units(self) -> int:
        """Number of units.

        Raises:
            ValueError: the ranks of a unit are not chosen yet.
        """
        if self.is_open:
            raise ValueError(
                "ComputeConfig: plan_ngpus is not chosen yet: pass it, or read the compute_config of the module that "
                "parallelize returns with the policy 'autodist'"
            )
        return self.world_size // self.plan_ngpus

    @property
    def module_dedup_group_size(self) -> int:
        """Number of ranks, from rank 0, that hold the whole module once: a unit."""
        return self.plan_ngpus

    @property
    def optimizer_dedup_group_size(self) -> int:
        """Number of ranks, from rank 0, that hold the optimizer's whole state once."""
        return self.world_size // self.zero_ngroups if self.use_zero else self.plan_ngpus

    def mesh(self, stages: int = 1) -> Mesh:
        """Returns the mesh of the job: units along dp, the ranks of a unit along pp (its stages) and tp.

        Raises:
            ValueError: the stages do not divide a unit.
        """
        if self.plan_ngpus % stages:
            raise ValueError(
                f"{stages} pipeline stages do not divide plan_ngpus={self.plan_ngpus}; the nearest that work are "
                f"{divisors_near(self.plan_ngpus, stages)}"
            )
        order = UNITS if stages > 1 and self.units > 1 else LINEAR
        return Mesh(self.world_size, tp=self.plan_ngpus // stages, pp=stages, topology=order)

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises ValueError unless a job of this mesh consists of these units."""
        if self.is_open:
            if mesh.world_size != self.runtime_ngpus:
                raise ValueError(f"the configuration is for {self.runtime_ngpus} ranks, but the job's mesh is {mesh}")
            return
        if mesh.dp != self.units or mesh.world_size != self.runtime_ngpus:
            raise ValueError(
                f"the configuration is for {self.units} units of {self.plan_ngpus} ranks, but the job's mesh is "
                f"{mesh}: initialize the job with ComputeConfig.mesh()"
            )

    def zero_groups(self, mesh: Mesh) -> list[list[int]] | None:
        """Returns the lists of ranks that share an optimizer's state under ZeRO; None: all units."""
        if self.zero_ngroups == 1:
            return None
        size = self.units // self.zero_ngroups
        return [
            list(group[start : start + size]) for group in mesh.groups("dp") for start in range(0, self.units, size)
        ]

    def get_sync_group(self) -> tuple[list[int], comm.Communicator]:
        """Returns the ranks with the same part of the model as this rank and other data, and their communicator.

        Raises:
            RuntimeError: there is no mesh; the message says what to call.
        """
        group = comm.communicator("dp")
        return list(group.ranks), group

    def apply_pipeline_scheduler(self, graph: Any, nstages: int, nmicros: int, name: str) -> Any:
        """Runs a graph as a pipeline: sets `graph.pipeline`, and returns the graph.

        Args:
            name: "1f1b", "1f1b_plus" (the same), "gpipe", "1f1b_interleaved", "chimera_direct" (4 stages, an even
                number of microbatches), or, with `inference_only`, "infer_pipe".

        Raises:
            ValueError: the schedule is unknown, or "infer_pipe" in training; the module is not end2end; the stages do
                not divide a unit.
        """
        _positive("nstages", nstages)
        _positive("nmicros", nmicros)
        if not self.use_end2end:
            raise ValueError("a pipeline needs ComputeConfig(use_end2end=True): train_step runs its schedule")
        schedule = schedule_named(name)
        if name == "infer_pipe" and not self.inference_only:
            raise ValueError(
                "pipeline schedule 'infer_pipe' has no backwards: pass ComputeConfig(inference_only=True) and call "
                "infer_step, or train by '1f1b', whose infer_step runs the same forwards"
            )
        if nstages < self.plan_ngpus or schedule != "interleaved":
            self.mesh(nstages)
        graph.pipeline = Pipeline(nstages, nmicros, schedule)
        return graph


def schedule_named(name: str) -> str:
    """Returns this package's name of a schedule of nnScaler; its name here stays as it is.

    Raises:
        ValueError: the schedule is unknown.
    """
    if name not in SCHEDULES and name not in SCHEDULES.values():
        raise ValueError(f"pipeline schedule {name!r} is unknown; there are {', '.join(map(repr, SCHEDULES))}")
    return SCHEDULES.get(name, name)


def _ranks_of_job(plan_ngpus: int) -> int:
    if comm.is_initialized():
        return comm.current().mesh.world_size
    return int(os.environ.get("WORLD_SIZE", plan_ngpus))


def _positive(name: str, number: Any) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"ComputeConfig: {name} must be a positive integer, got {number!r}")


def _multiples_near(number: int, factor: int) -> str:
    below = number // factor * factor
    return _listed([size for size in (below, below + factor) if size])


def divisors_near(number: int, wanted: int) -> str:
    """Returns the divisors of a number that are nearest to a wanted one, as text."""
    divisors = {part for low in range(1, math.isqrt(number) + 1) if not number % low for part in (low, number // low)}
    below = max(part for part in divisors if part <= wanted) if wanted >= 1 else 1
    above = min((part for part in divisors if part >= wanted), default=below)
    return _listed(sorted({below, above}))


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, numbers))
