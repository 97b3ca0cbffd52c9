"""How much memory each rank of a layout will need, before anything is allocated; and how much a run really took.

    print(estimate_memory(layout, config))     # a table with a column for each pipeline stage

    with measure_peak(parameters=model.local_parameters()) as memory:
        ...
    memory.peak                                # most bytes of tensors that were alive at one time

The estimate is no formula. One rank of every stage is played on fake tensors, which have shapes and no values: the same
model, pipeline, gradient reduction and optimizer as in training, without a process group, under the same meter that
measures real runs. So whatever the code holds is counted: microbatches in flight, buffers of messages, flat buckets, what
the optimizer makes on its way. What happens inside one operator (a matrix product's workspace), in the allocator
(fragments) and in the communication library is not.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import comm
from .comm.base import Communicator
from .comm.shapes import ShapesBackend, ShapesCommunicator
from .layout import Layout, format_bytes, format_count

__all__ = ["MemoryEstimate", "MemoryMeter", "Peak", "StageMemory", "estimate_memory", "measure_peak"]

PARAMETERS, GRADIENTS, OPTIMIZER, BATCH = "parameters", "gradients", "optimizer", "batch"
ACTIVATIONS, LOGITS, MESSAGES, BUFFERS = "activations", "logits", "messages", "buffers"
COMPUTE, REDUCTION, STEP = "forward and backward", "gradient reduction", "optimizer step"


# --- measuring ---------------------------------------------------------------------------------------------------------------


class Peak(NamedTuple):
    """The moment at which most bytes were alive: how many, and of which kind."""

    bytes: int
    kinds: dict[str, int]


class _Live(ref):  # type: ignore[type-arg]
    """A storage that is alive. It is its own weak reference: nothing is kept alive by being counted."""

    __slots__ = ("key", "kind", "nbytes")
    key: int
    kind: str
    nbytes: int


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of all tensors that operators of this thread make, backward included, until their memory is freed.

    Exact for what it sees: views count once, and memory counts as long as anything (autograd, an asynchronous collective)
    holds it. Memory freed by another thread counts as freed at this thread's next operator. Tensors on meta are not
    counted, fake tensors are, as if they were real.

    Attributes:
        kind: what new memory is called from now on.
        phases: the peak of each phase, by name; see `phase`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "other"
        self.current = 0
        self.kinds: dict[str, int] = {}
        self.phases: dict[str, Peak] = {}
        self._phase = ""
        self._highest = -1
        self._live: dict[int, _Live] = {}
        self._freed: deque[_Live] = deque()  # filled wherever memory is freed, emptied by this thread

    @property
    def peak(self) -> int:
        """Most bytes alive at one time since `reset`, in any phase."""
        return max((peak.bytes for peak in self.phases.values()), default=0)

    def phase(self, name: str) -> None:
        """Peaks are recorded under this name from now on."""
        self._phase = name
        self._highest = self.phases[name].bytes if name in self.phases else -1
        self._settle()

    def reset(self, phase: str = "") -> None:
        """Forgets the peaks, and starts a phase. What is alive stays counted."""
        self.phases = {}
        self.phase(phase)

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Counts tensors under `kind`: those that existed before too."""
        for tensor in tensors:
            if tensor is not None:
                live = self._note(tensor)
                if live is not None and live.kind != kind:
                    self.kinds[live.kind] -= live.nbytes
                    self.kinds[kind] = self.kinds.get(kind, 0) + live.nbytes
                    live.kind = kind
        self._settle()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self._note(item)
            elif isinstance(item, (tuple, list)):
                for tensor in item:
                    self._note(tensor)
        self._settle()
        return result

    def _note(self, tensor: torch.Tensor) -> _Live | None:
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return None
        self._drain()  # first: an address may be used again
        storage = tensor.untyped_storage()
        live = self._live.get(storage._cdata)
        if live is None:
            live = self._live[storage._cdata] = _Live(storage, self._freed.append)
            live.key, live.kind, live.nbytes = storage._cdata, self.kind, storage.nbytes()
            self._count(live.kind, live.nbytes)
        return live

    def _drain(self) -> None:
        while self._freed:
            live = self._freed.popleft()
            del self._live[live.key]
            self._count(live.kind, -live.nbytes)

    def _count(self, kind: str, nbytes: int) -> None:
        self.current += nbytes
        self.kinds[kind] = self.kinds.get(kind, 0) + nbytes

    def _settle(self) -> None:
        self._drain()
        if self.current > self._highest:
            self._highest = self.current
            self.phases[self._phase] = Peak(self.current, dict(self.kinds))


@contextmanager
def measure_peak(**existing: Iterable[torch.Tensor | None]) -> Iterator[MemoryMeter]:
    """Measures the peak of the memory of tensors in this thread.

    Args:
        existing: tensors that are there already and are to count, by what to call them:
            `measure_peak(parameters=model.local_parameters())`.
    """
    meter = MemoryMeter()
    for kind, tensors in existing.items():
        meter.label(tensors, kind)
    meter.reset()
    with meter:
        yield meter


# --- what comes out ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageMemory:
    """What a rank of one pipeline stage needs, in bytes.

    Attributes:
        num_parameters: that the rank holds.
        in_flight: most microbatches between their forward and their backward.
        phases: the peak of forward and backward, of the gradient reduction, and of the optimizer step.
    """

    num_parameters: int
    in_flight: int
    phases: dict[str, Peak]

    @property
    def peak(self) -> int:
        return max(peak.bytes for peak in self.phases.values())

    def held(self, kind: str) -> int:
        """Bytes of parameters, gradients or optimizer state (with master weights), when all of them are there."""
        return self.phases[STEP].kinds.get(kind, 0)

    def beside(self, phase: str, kind: str) -> int:
        """Bytes of a kind at the peak of a phase."""
        return self.phases[phase].kinds.get(kind, 0)


@dataclass(frozen=True)
class MemoryEstimate:
    """What every rank of a layout needs; `str()` of it is a table.

    Attributes:
        num_parameters: of the whole model; a tied weight counts once.
        stages: by pipeline stage; all ranks of a stage need the same.
    """

    num_parameters: int
    stages: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        """Bytes that the rank with the largest peak needs."""
        return max(stage.peak for stage in self.stages)

    def __str__(self) -> str:
        shown = list(range(len(self.stages)))
        if len(shown) > 8:
            shown = [*shown[:6], -1, shown[-1]]  # -1: the stages between
        rows = [
            ("memory of a rank, predicted", [f"stage {stage}" for stage in range(len(self.stages))]),
            ("number of parameters", [format_count(stage.num_parameters) for stage in self.stages]),
            ("parameters", [format_bytes(stage.held(PARAMETERS)) for stage in self.stages]),
            ("gradients", [format_bytes(stage.held(GRADIENTS)) for stage in self.stages]),
            ("optimizer state, master weights", [format_bytes(stage.held(OPTIMIZER)) for stage in self.stages]),
            ("microbatches in flight", [str(stage.in_flight) for stage in self.stages]),
        ]
        for label, kinds in (
            ("activations", [ACTIVATIONS]),
            ("logits and loss", [LOGITS]),
            ("messages between stages", [MESSAGES]),
        ):
            sizes = [sum(stage.beside(COMPUTE, kind) for kind in kinds) for stage in self.stages]
            if any(sizes):
                rows.append((label, [format_bytes(size) for size in sizes]))
        for label, phase in (("buckets of the reduction", REDUCTION), ("buffers of the optimizer step", STEP)):
            rows.append((label, [format_bytes(stage.beside(phase, BUFFERS)) for stage in self.stages]))
        for phase in (COMPUTE, REDUCTION, STEP):
            rows.append((f"peak in {phase}", [format_bytes(stage.phases[phase].bytes) for stage in self.stages]))
        rows.append(("peak", [format_bytes(stage.peak) for stage in self.stages]))
        width = max(len(label) for label, _ in rows)
        cells = [[label.ljust(width), *("…" if i < 0 else row[i] for i in shown)] for label, row in rows]
        widths = [max(len(line[column]) for line in cells) for column in range(len(shown) + 1)]
        lines = ["  ".join([line[0], *(x.rjust(w) for x, w in zip(line[1:], widths[1:]))]) for line in cells]
        return "\n".join([*lines, f"the whole model has {format_count(self.num_parameters)} parameters"])


# --- playing a rank ----------------------------------------------------------------------------------------------------------


def estimate_memory(
    layout: Layout,
    config: Any,
    *,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_options: dict[str, Any] | None = None,
    device: str | torch.device = "cpu",
) -> MemoryEstimate:
    """Predicts each rank's memory in a training step after the first, by playing it on fake tensors.

    Args:
        layout: with the batch and the dtype; `zero1` chooses between the two optimizers of `neuronx_dist.optimizer`.
        config: of a Hugging Face causal LM.
        optimizer_class, optimizer_options: what `NeuronZero1Optimizer` or `MasterWeightsOptimizer` will wrap.
        device: where the job will run. Kernels, and so what they keep for backward, differ between devices.

    Raises:
        LayoutError: the layout does not fit the model.
        UnsupportedModelError: the model cannot be swapped.
        ValueError: a CUDA device, and a torch without CUDA, which has no CUDA kernels to ask.
    """
    layout.check(config)
    device = torch.device(device)
    if device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(f"this torch ({torch.__version__}) has no CUDA: estimate the memory for device='cpu'")
    options = dict(optimizer_options or {})
    if device.type == "cuda" and options.get("fused") is None:
        options.setdefault("foreach", True)  # torch's own choice on CUDA, which it does not make for fake tensors
    stages, num_parameters = [], 0
    for stage in range(layout.pp):
        rank = layout.mesh().groups("pp")[0][stage]
        found, num_parameters = _play(layout, copy.deepcopy(config), stage, rank, device, optimizer_class, options)
        stages.append(found)
    return MemoryEstimate(num_parameters, tuple(stages))


def _play(
    layout: Layout,
    config: Any,
    stage: int,
    rank: int,
    device: torch.device,
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
) -> tuple[StageMemory, int]:
    """A step of one rank; also the number of parameters of the whole model."""
    from transformers import AutoModelForCausalLM

    from . import hf
    from .optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
    from .parallel_layers.grads import reduce_gradients
    from .pipeline import NxDPPModel
    from .pipeline.inputs import Batch
    from .pipeline.schedule import one_f_one_b

    meter = MemoryMeter()
    with ExitStack() as stack:
        stack.enter_context(comm.as_rank(layout.mesh(), rank, _WireBackend(meter, device.type == "cpu")))
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, layout.dtype))
        num_parameters = sum(param.numel() for param in module.parameters())
        hf.swap(module, sequence_parallel=layout.sequence_parallel, pad_heads=layout.pad_heads)
        # Once every stage that it talks to is in its steady state, a step repeats itself.
        num_microbatches = min(layout.num_microbatches, layout.pp - stage + 1 + (stage > 0))
        model = NxDPPModel(
            module,
            transformer_layer_cls=hf.transformer_layer_class(module),
            num_microbatches=num_microbatches,
            output_loss_value_spec={"loss": True, "logits": False},
            auto_partition=True,
            use_zero1_optimizer=layout.zero1,
        )
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, meter:
            meter.kind = PARAMETERS
            _make_fake(model, device)
            meter.kind = BATCH
            rows = layout.micro_batch * layout.num_microbatches
            batch = torch.zeros(2, rows, layout.seq_len, dtype=torch.long, device=device)
            batch = batch[:, : layout.micro_batch * num_microbatches]
            inputs = {"input_ids": batch[0], "labels": batch[1], "num_items_in_batch": torch.ones((), device=device)}
        with torch.enable_grad():
            model._program(Batch(inputs, None, num_microbatches))  # recorded at the first step
        stack.enter_context(fake)
        stack.enter_context(meter)
        params = [param for param in model.local_parameters() if param.requires_grad]
        meter.kind = OPTIMIZER
        wrapper = NeuronZero1Optimizer if layout.zero1 else MasterWeightsOptimizer
        optimizer = wrapper(params, optimizer_class, **options)
        for param in params:  # a first step, for the optimizer to make its state
            param.grad = torch.empty_like(param)
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.register_post_accumulate_grad_hook(lambda param: meter.label([param.grad], GRADIENTS))
        _label_logits(module, meter)

        meter.kind = ACTIVATIONS
        meter.reset(COMPUTE)
        with torch.enable_grad():
            model._run(inputs, one_f_one_b)
        meter.kind = BUFFERS
        meter.phase(REDUCTION)
        reduce_gradients(model, average_over_data=not layout.zero1)
        meter.phase(STEP)
        optimizer.step()
        return StageMemory(sum(param.numel() for param in params), model.peak_in_flight, meter.phases), num_parameters


def _make_fake(model: Any, device: torch.device) -> None:
    """Puts fake tensors on `device` in the place of this stage's parameters and buffers, which are on meta."""
    made: dict[int, torch.Tensor] = {}
    tables = [table for m in model.original_module.modules() for table in (m._parameters, m._buffers)]
    local = {id(x) for x in (*model.local_parameters(), *model.local_buffers())}
    originals = [(table, name, x) for table in tables for name, x in table.items() if x is not None and id(x) in local]
    for table, name, x in originals:
        if id(x) not in made:
            fake = torch.empty_like(x, device=device, requires_grad=False)
            if isinstance(x, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=x.requires_grad)
            fake.__dict__.update(x.__dict__)
            made[id(x)] = fake
        table[name] = made[id(x)]


def _label_logits(module: Any, meter: MemoryMeter) -> None:
    """From the head's forward until its input has a gradient, what is made is called logits."""

    def calculates(head: nn.Module, args: Sequence[Any]) -> None:
        def done(grad: torch.Tensor) -> None:
            meter.kind = ACTIVATIONS

        meter.kind = LOGITS
        args[0].register_hook(done)

    module.get_output_embeddings().register_forward_pre_hook(calculates)


class _Held:
    """Finished work that holds its buffers until it is awaited, as that of a real group does."""

    def __init__(self, *buffers: torch.Tensor) -> None:
        self.buffers = buffers

    def wait(self) -> None:
        return None


class _Wire(ShapesCommunicator):
    """No group, and buffers that live as long as with one."""

    def __init__(self, meter: MemoryMeter, is_gloo: bool, label: str, ranks: Sequence[int], global_rank: int) -> None:
        super().__init__(label, ranks, global_rank)
        self._meter = meter
        self._is_gloo = is_gloo

    def start_all_reduce(self, buffer: torch.Tensor, op: str) -> _Held:
        super().start_all_reduce(buffer, op)
        return _Held(buffer)

    def start_all_gather(self, gathered: torch.Tensor, x: torch.Tensor) -> _Held:
        super().start_all_gather(gathered, x)
        return _Held(gathered, x)

    def start_reduce_scatter(self, out: torch.Tensor, scattered: torch.Tensor, op: str) -> _Held:
        super().start_reduce_scatter(out, scattered, op)
        # On gloo it is an all-to-all and a sum: see comm/c10d.py.
        received = [torch.empty_like(scattered)] if self._is_gloo else []
        return _Held(out, scattered, *received)

    def start_send(self, x: torch.Tensor, dst: int, tag: int) -> _Held:
        self._meter.label([x], MESSAGES)
        return _Held(x)

    def start_recv(self, out: torch.Tensor, src: int, tag: int) -> _Held:
        self._meter.label([out], MESSAGES)
        return _Held(out)


class _WireBackend(ShapesBackend):
    def __init__(self, meter: MemoryMeter, is_gloo: bool) -> None:
        self._meter = meter
        self._is_gloo = is_gloo

    def communicator(
        self, label: str, groups: Sequence[Sequence[int]], global_rank: int, own: bool = False
    ) -> Communicator:
        ranks = next(group for group in groups if global_rank in group)
        return _Wire(self._meter, self._is_gloo, label, ranks, global_rank)
