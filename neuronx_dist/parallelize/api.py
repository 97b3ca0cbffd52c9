"""`parallelize`: a module in, a parallel module out.

    recorded (record.py) -> divided (choose.py) -> emitted (emit.py) -> proven (verify.py) -> files (generation.py)

Rank 0 does this, unless there are files of an earlier run; every rank then makes its part of the module from them.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.utils._pytree as pytree
from torch import nn

from .. import comm
from ..comm.launch import init_distributed
from ..parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel
from ..pipeline.record.recording import TracingError
from ..planning.plan import Plan
from .compare import EmittedProgramError, OriginalError
from .config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from .constants import constants_from_text, constants_text
from .decompose import decomposed
from .emit import emit
from .files import Generated, GeneratedFilesError, GeneratedFolder
from .generation import Emitted, generate
from .keys import Key, key_of
from .module import ParallelModule, parallel_class
from .original import (
    check_outputs,
    checked_module,
    current_values,
    forward_failed,
    initial_values,
    named_tensors,
    with_gradient,
)
from .plans import plan_of
from .policies import divide, divide_like
from .program import Division, Program
from .record import record_program
from .recordings import programs_from_text, programs_text
from .source_text import program_text
from .stored import constants_of, stored_of
from .verify import Verdict, verify
from .whole_mesh import check_mesh

__all__ = ["parallelize"]

CODE = "gencode0.py"
CONSTANTS = "constants.json"
PROOF = "proof.txt"
PROGRAMS = "programs.json"
PLAN = "plan.json"


def parallelize(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: dict[str, Any],
    pas_policy: str | Callable[..., Any],
    compute_config: ComputeConfig,
    *,
    gen_savedir: str | Path = "./.nnscaler",
    reuse: ReuseType | str = ReuseType.MATCH,
    instance_name: str | None = None,
    load_module: bool = True,
    module_dtype: torch.dtype | None = None,
    module_fn: Callable[[], nn.Module] | None = None,
    init_module_params: bool = True,
    broadcast_strategy: str | BroadcastGenFilesStrategy = "none",
) -> None | ParallelModule | type[ParallelModule]:
    """Divides a module over the ranks of a unit: an object becomes an object, a class a class.

    Args:
        module_or_module_class: what is already parallel is returned as it is. May be on meta; the object form then has
            no initial weights.
        dummy_forward_args: arguments of forward by name: of tensors shapes and dtypes count (those of floating point
            have gradients, unless the module is end2end or for inference). What is left out has forward's default.
        pas_policy: the name of a policy, or a function `(IRGraph, ComputeConfig) -> IRGraph`.
        gen_savedir: where generated files are.
        reuse: what is done with files of an earlier run.
        instance_name: tells apart what is generated for one class; None: "_".
        load_module: False: generate files, and return None. Needs no process group.
        module_dtype: the module is taken to this dtype first, in place; None: as it is.
        module_fn: makes the module where a class is given; None: the class, without arguments.
        init_module_params: of an object: the initial values that it has on rank 0, also where files of an earlier run
            are used; False: empty parameters.
        broadcast_strategy: which newly generated files rank 0 sends to hosts that do not share its folder.

    Returns:
        The parallel module or class; None without `load_module`.

    Raises:
        TypeError: arguments that forward does not have, or an end2end module with a second required argument.
        ValueError: forward has positional-only arguments or fails on the dummy ones, the module has parallel ones
            inside, an unknown policy, a mesh of other sizes.
        GeneratedFilesError: files of something else, with `ReuseType.MATCH`; or none where none is generated.
        EmittedProgramError: a bug of this package; the file is kept.
    """
    is_class = isinstance(module_or_module_class, type)
    module_class = module_or_module_class if isinstance(module_or_module_class, type) else type(module_or_module_class)
    if issubclass(module_class, ParallelModule):
        return module_or_module_class  # type: ignore[return-value]
    if not isinstance(compute_config, ComputeConfig):
        raise TypeError(
            f"compute_config is a ComputeConfig, such as ComputeConfig(plan_ngpus=2), got {compute_config!r}"
        )
    is_own_mesh = load_module and _join(compute_config)
    if isinstance(dummy_forward_args, Mapping) and not (compute_config.use_end2end or compute_config.inference_only):
        dummy_forward_args = pytree.tree_map_only(torch.Tensor, with_gradient, dict(dummy_forward_args))

    @cache
    def original() -> nn.Module:
        return checked_module(module_or_module_class, module_fn, module_dtype, dummy_forward_args, compute_config)

    if not is_class:
        original()  # what is wrong with it is an error on every rank
    if load_module and comm.is_initialized():
        compute_config.check_mesh(comm.current().mesh)

    @cache
    def key() -> Key:
        return key_of(original(), dummy_forward_args, pas_policy, compute_config)

    def emitted() -> Emitted:
        recorded = _stored_programs(folder, key(), dummy_forward_args) if ReuseType.of(reuse) is ReuseType.GRAPH else []
        return _emitted(original(), dummy_forward_args, pas_policy, compute_config, Path(gen_savedir), recorded)

    folder = GeneratedFolder(gen_savedir, module_class, instance_name)
    generated = generate(
        folder,
        key,
        emitted,
        reuse=reuse,
        strategy=broadcast_strategy,
        load=load_module,
        values=lambda: None if is_class or not init_module_params else current_values(original()),
    )
    _save_plan(folder, pas_policy, compute_config)
    if generated is None:
        return None
    loaded = _loaded(generated, compute_config)
    if is_own_mesh and loaded.RANKS > 1:
        destroy_model_parallel()
        _join(compute_config, loaded.RANKS)
    return loaded if is_class else loaded(init_module_params)


def _save_plan(folder: GeneratedFolder, policy: Any, config: ComputeConfig) -> None:
    """Writes the plan of the files to where `autodist` is asked to save it, whether they are new or not."""
    path = config.pas_config.get("save_plan_path")
    if path and policy == "autodist" and not (comm.is_initialized() and comm.current().rank):
        Plan.load(folder.read().path / PLAN).save(path)


def _join(config: ComputeConfig, stages: int = 1) -> bool:
    """Joins the job that torchrun started, and makes its mesh where there is none yet; returns whether it made one."""
    if comm.is_initialized() or not torch.distributed.is_available():
        return False
    if not torch.distributed.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return False
        init_distributed()
    mesh = config.mesh(stages)
    initialize_model_parallel(mesh.tp, mesh.pp, topology=mesh.topology)
    return True


def _emitted(
    module: nn.Module,
    arguments: dict[str, Any],
    policy: Any,
    config: ComputeConfig,
    folder: Path,
    recorded: Sequence[Program],
) -> Emitted:
    """What is generated: recorded, divided, emitted, proven.

    Args:
        recorded: programs of an earlier recording of the same; what it lacks is recorded.
    """
    divisions = _divisions(module, arguments, policy, config, recorded)
    stored = stored_of(module, *divisions)
    source = emit(*divisions, name=type(module).__name__, stored=stored, signature=inspect.signature(module.forward))
    names = constants_of(*divisions)
    constants = {name: value.constant for value, name in names.items() if value.constant is not None}
    tensors = named_tensors(module)
    held = {name: tensors[name].detach() for name, each in stored.items() if each.kind in ("parameter", "buffer")}
    verdicts, mesh = _proven(source, divisions, module, constants, arguments, config, folder)
    files = {
        CODE: source,
        CONSTANTS: constants_text(constants),
        PROOF: "\n".join([*map(str, verdicts), f"mesh: {mesh}"]),
        PLAN: plan_of(divisions[0], units=config.units).text(),
    }
    for division in divisions:  # of a rank's program those of the whole
        names |= {whole: names[own] for own, whole in zip(division.program.constants, division.whole.constants)}
    programs = programs_text([division.whole for division in divisions], names)
    if programs is not None:
        files[PROGRAMS] = programs
    return Emitted(files, initial_values(type(module).__name__, held))


def _proven(
    source: str,
    divisions: Sequence[Division],
    module: nn.Module,
    constants: Mapping[str, torch.Tensor],
    arguments: Mapping[str, Any],
    config: ComputeConfig,
    folder: Path,
) -> tuple[list[Verdict], str]:
    """What was looked at in each division, and on the whole mesh; a warning says which values were not.

    Raises:
        ValueError: the original fails.
        EmittedProgramError: the source is refused; it is kept in `folder`.
    """
    try:
        verdicts = [verify(source, division, module, constants, arguments) for division in divisions]
        mesh = check_mesh(source, divisions, config, arguments, constants)
    except OriginalError as error:
        cause = error.__cause__
        assert isinstance(cause, Exception)
        raise forward_failed(module, arguments, cause) from cause
    except Exception as error:  # EmittedProgramError, or the file is no program, or the check crashed
        kept = folder / f"refused_{type(module).__name__}.py"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(source)
        text = str(error) if isinstance(error, EmittedProgramError) else f"{type(error).__name__}: {error}"
        raise EmittedProgramError(
            f"{text}\nThis is a bug of neuronx_dist, not of {type(module).__name__}: please report it with "
            f"{kept}, which was not loaded"
        ) from error
    not_run = next((verdict.not_run for verdict in verdicts if verdict.not_run), "")
    if not_run:
        warnings.warn(
            f"{type(module).__name__}: the types of its program are proven, its values are {not_run}. To prove them, "
            "call parallelize once with a smaller module of the same class (fewer or narrower layers) or smaller "
            "dummy_forward_args, and the same policy",
            stacklevel=3,
        )
    return verdicts, mesh


def _divisions(
    module: nn.Module, arguments: dict[str, Any], policy: Any, config: ComputeConfig, recorded: Sequence[Program]
) -> list[Division]:
    """The division in training mode, and that in evaluation mode if the module runs something else there."""
    programs = {program.training: program for program in recorded}
    wanted = (False,) if config.inference_only else (True, False)
    if wanted[0] not in programs:
        programs = {mode: _recorded(module, arguments, training=mode) for mode in wanted}
        if len(wanted) == 2 and program_text(programs[False]) == program_text(programs[True]):
            del programs[False]
    for program in programs.values():
        check_outputs(module, program, config)
    if config.inference_only:
        return [divide(programs[False], policy, config)]
    division = divide(programs[True], policy, config)
    return [division] if False not in programs else [division, divide_like(division, programs[False], config)]


def _stored_programs(folder: GeneratedFolder, key: Key, arguments: Mapping[str, Any]) -> list[Program]:
    """The programs that a folder has of the same module and arguments."""
    try:
        generated = folder.read()
    except GeneratedFilesError:
        return []
    if generated.key.program != key.program or PROGRAMS not in generated.files:
        return []
    constants = constants_from_text(generated.text(CONSTANTS))
    return programs_from_text(generated.text(PROGRAMS), arguments, constants) or []


def _recorded(module: nn.Module, arguments: dict[str, Any], *, training: bool) -> Program:
    """The program of a mode.

    Raises:
        ValueError: forward fails on these arguments.
    """
    try:
        return decomposed(record_program(module, arguments, training=training))
    except TracingError:
        raise
    except Exception as error:
        raise forward_failed(module, arguments, error) from error


def _loaded(generated: Generated, config: ComputeConfig) -> type[ParallelModule]:
    constants = constants_from_text(generated.text(CONSTANTS))
    loaded = parallel_class(generated.module(CODE), config, generated.weights, constants)
    loaded.SOURCE, loaded.PROOF = generated.text(CODE), generated.text(PROOF)
    return loaded
