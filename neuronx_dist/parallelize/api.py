"""`parallelize`: from a module to a parallel module.

    recorded (program/) -> divided (policy/, choose/) -> emitted (emit/) -> proven (prove/) -> files (generated/)

Rank 0 does this, unless there are files of an earlier run; afterwards every rank builds its part from the files.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from .. import comm
from ..comm.launch import init_distributed
from ..parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel
from ..planning.plan import Plan
from ..program.program import Division, Program
from ..program.recording import TracingError
from .config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from .emit.emitted_class import EmittedProgram, emitted_program
from .emit.source_text import constants_from_text, constants_text, program_text
from .example import Example
from .generated.generated_files import Generated, GeneratedFilesError, GeneratedFolder
from .generated.generation import Emitted, generate
from .generated.keys import Key, key_of
from .generated.saved_programs import programs_from_text, programs_text
from .original import (
    check_outputs,
    current_values,
    example_of,
    initial_values,
    named_tensors,
    smaller_example_of,
    unsynchronised_norm,
    with_module_paths,
)
from .policy.plans import plan_of
from .policy.policies import divide, divide_like
from .prove.smaller import lines_not_compared, smaller_program
from .prove.value_comparison import EmittedProgramError, OriginalError, RecordingError
from .prove.verify import HOW, NOT_COMPARED, too_large, verify
from .prove.whole_mesh import check_mesh
from .train.loaded_class import parallel_class
from .train.parallel_module import ParallelModule

__all__ = ["parallelize"]

CODE = "gencode0.py"
CONSTANTS = "constants.json"
PROOF = "proof.txt"
PROGRAMS = "programs.json"
PLAN = "plan.json"
GEN_SAVEDIR = "./.nnscaler"
EVALUATION = "evaluation"  # in a key: objects of the class begin in evaluation mode


def parallelize(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: dict[str, Any],
    pas_policy: str | Callable[..., Any],
    compute_config: ComputeConfig,
    *,
    gen_savedir: str | Path = GEN_SAVEDIR,
    reuse: ReuseType | str = ReuseType.MATCH,
    instance_name: str | None = None,
    load_module: bool = True,
    module_dtype: torch.dtype | None = None,
    module_fn: Callable[[], nn.Module] | None = None,
    init_module_params: bool = True,
    broadcast_strategy: str | BroadcastGenFilesStrategy = "none",
    verify_with: nn.Module | None = None,
    verify_args: dict[str, Any] | None = None,
) -> None | ParallelModule | type[ParallelModule]:
    """Divides a module over the ranks of a unit: returns an object for an object, a class for a class.

    Args:
        module_or_module_class: a parallel module or class is returned as it is. May be on meta; an object then has no
            initial weights.
        dummy_forward_args: arguments of forward by name. Shapes and dtypes of tensors count; floating-point tensors
            have gradients, unless the module is end2end or for inference. Missing arguments have forward's defaults.
        pas_policy: the name of a policy, or a function `(IRGraph, ComputeConfig) -> IRGraph`.
        gen_savedir: the folder of all generated files, whose code runs. A folder other than the default one is trusted;
            in the default one, code that another user could have written is refused.
        reuse: the use of files of an earlier run.
        instance_name: distinguishes several sets of files of one class; None: "_".
        load_module: False: generate files, and return None. Needs no process group.
        module_dtype: converts the module to this dtype first, in place; None: no conversion.
        module_fn: makes the module if a class is passed; None: the class is called without arguments.
        init_module_params: an object gets the values of the module on rank 0, also if files of an earlier run are used;
            False: empty parameters.
        broadcast_strategy: selects the newly generated files that rank 0 sends to hosts without access to its folder.
        verify_with: a smaller module of the same class, divided and emitted in the same way, whose values are compared
            with one process where the module is too large for that. None: the module itself, with `verify_args`.
        verify_args: arguments of forward for `verify_with`; None: `dummy_forward_args`. Without both the values of a
            module that is too large are not compared, and a warning says so.

    Returns:
        The parallel module, in the mode (`training`) and on the device of the module (the CPU for one on meta), or the
        class, whose objects begin in the mode of the result of `module_fn`; None without `load_module`.

    Raises:
        TypeError: arguments that forward does not take, an end2end module with a second required argument, or a
            `verify_with` of another class.
        ValueError: forward has positional-only arguments or fails on the dummy ones, the module has parallel ones
            inside, an unknown policy, a mesh of other sizes, a `verify_with` that cannot be divided in the same way.
        GeneratedFilesError: with `ReuseType.MATCH` the files do not match; or files are missing on this host.
        EmittedProgramError: a bug of this package; the file is saved.
    """
    is_class = isinstance(module_or_module_class, type)
    module_class = module_or_module_class if isinstance(module_or_module_class, type) else type(module_or_module_class)
    if issubclass(module_class, ParallelModule):
        return module_or_module_class  # type: ignore[return-value]
    if not isinstance(compute_config, ComputeConfig):
        raise TypeError(
            f"compute_config must be a ComputeConfig, such as ComputeConfig(plan_ngpus=2), got {compute_config!r}"
        )
    is_own_mesh = load_module and _join(compute_config)
    if verify_with is not None and not _is_of(verify_with, module_class, module_fn is not None):
        what = (
            f"the class {verify_with.__name__}" if isinstance(verify_with, type) else f"a {type(verify_with).__name__}"
        )
        raise TypeError(
            f"verify_with must be a smaller module of the parallelized class {module_class.__name__}, got {what}"
        )

    @cache
    def example() -> Example:
        return example_of(module_or_module_class, module_fn, module_dtype, dummy_forward_args, compute_config)

    @cache
    def smaller() -> Example | None:
        if verify_with is None and verify_args is None:
            return None
        arguments, origin = (
            (verify_args, "verify_args") if verify_args is not None else (dummy_forward_args, "dummy_forward_args")
        )
        module = example().module if verify_with is None else verify_with
        return smaller_example_of(module, arguments, module_dtype, compute_config, origin)

    if not is_class:
        example()  # errors in the module or its arguments are raised on every rank
    if not is_class or verify_with is not None:
        smaller()
    if load_module and comm.is_initialized():
        compute_config.check_mesh(comm.current().mesh)

    @cache
    def key() -> Key:
        if is_class and not example().module.training:  # an object is in the mode that it is passed in
            return key_of(example(), pas_policy, compute_config, mode=EVALUATION)
        return key_of(example(), pas_policy, compute_config)

    def emitted() -> Emitted:
        recorded = _stored_programs(folder, key(), example()) if ReuseType.of(reuse) is ReuseType.GRAPH else []
        return _emitted(example(), smaller(), pas_policy, compute_config, Path(gen_savedir), recorded)

    is_named = os.fspath(gen_savedir) != GEN_SAVEDIR
    folder = GeneratedFolder(gen_savedir, module_class, instance_name, only_owned=not is_named)
    generated = generate(
        folder,
        key,
        emitted,
        reuse=reuse,
        strategy=broadcast_strategy,
        load=load_module,
        values=lambda: None if is_class or not init_module_params else current_values(example().module),
        is_complete=lambda files: smaller() is None or NOT_COMPARED not in files.text(PROOF),
    )
    _save_plan(folder, pas_policy, compute_config)
    if generated is None:
        return None
    loaded = _loaded(generated, compute_config)
    if comm.is_initialized() and compute_config.is_open and not is_own_mesh:
        loaded.compute_config.check_mesh(comm.current().mesh)
    if is_own_mesh and (loaded.RANKS > 1 or compute_config.is_open):
        destroy_model_parallel()
        _join(loaded.compute_config, loaded.RANKS)
    return loaded if is_class else _on_device_of(example().module, loaded(init_module_params))


def _on_device_of(module: nn.Module, parallel: ParallelModule) -> ParallelModule:
    """Returns the parallel module in the mode of a module, and on its device if that is one, and is not meta."""
    devices = {x.device for x in (*module.parameters(), *module.buffers())}
    if len(devices) == 1 and (device := devices.pop()).type != "meta":
        parallel.to(device)
    return parallel.train(module.training)


def _save_plan(folder: GeneratedFolder, policy: Any, config: ComputeConfig) -> None:
    """Writes the plan of new or reused files to `save_plan_path`, an option of `autodist`."""
    path = config.pas_config.get("save_plan_path")
    if path and policy == "autodist" and not (comm.is_initialized() and comm.current().rank):
        Plan.load(folder.read().path / PLAN).save(path)


def _join(config: ComputeConfig, stages: int = 1) -> bool:
    """Joins the job that torchrun started, and makes its mesh if there is none yet; returns whether it made one."""
    if comm.is_initialized() or not torch.distributed.is_available():
        return False
    if not torch.distributed.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return False
        init_distributed()
    mesh = config.with_unit(1, False).mesh(stages)
    initialize_model_parallel(mesh.tp, mesh.pp, topology=mesh.topology)
    return True


def _is_of(module: Any, module_class: type, is_made: bool) -> bool:
    """Returns whether a module is of a class, or, if a function makes modules of the class, of a subclass."""
    return isinstance(module, module_class) if is_made else type(module) is module_class


def _emitted(
    example: Example,
    smaller: Example | None,
    policy: Any,
    config: ComputeConfig,
    folder: Path,
    recorded: Sequence[Program],
) -> Emitted:
    """Records, divides, emits and proves a module; returns its files.

    Args:
        smaller: the module whose values are compared where the program is too large to run.
        recorded: programs that were recorded earlier of the same module; missing ones are recorded.
    """
    divisions = _divisions(example, policy, config, recorded)
    config = config.with_unit(divisions[0].ranks * divisions[0].pipeline_ranks, divisions[0].zero1)
    emitted = emitted_program(example, divisions)
    compared = None
    if smaller is not None and any(too_large(division.whole) for division in divisions):
        compared = smaller_program(divisions, smaller, config)
    proof = _proven(emitted, compared, config, folder)
    files = {
        CODE: emitted.source,
        CONSTANTS: constants_text(emitted.constants),
        PROOF: "\n".join(proof),
        PLAN: plan_of(divisions[0], units=config.units, zero1=bool(config.use_zero), with_costs=True).text(),
    }
    names = dict(emitted.names)
    for division in divisions:  # the names of constants in the whole program, for a program of a rank
        names |= {whole: names[local] for local, whole in zip(division.program.constants, division.whole.constants)}
    programs = programs_text([division.whole for division in divisions], names)
    if programs is not None:
        files[PROGRAMS] = programs
    tensors = named_tensors(example.module)
    held = {name: tensors[name].detach() for name, x in emitted.stored.items() if x.kind in ("parameter", "buffer")}
    return Emitted(files, initial_values(example.name, held))


def _proven(emitted: EmittedProgram, smaller: EmittedProgram | None, config: ComputeConfig, folder: Path) -> list[str]:
    """Proves an emitted program in each mode, then on the whole mesh; a warning says which values were not compared.

    Returns:
        The lines of the proof.

    Raises:
        ValueError: the original fails.
        TracingError: two recordings of the original differ.
        EmittedProgramError: the source is refused; it is saved in `folder`.
    """
    example = emitted.example
    try:
        verdicts = verify(emitted, smaller)
        mesh = check_mesh(emitted.source, emitted.divisions, config, example.arguments, emitted.constants)
    except OriginalError as error:
        cause = error.__cause__
        assert isinstance(cause, Exception)
        raise error.example.failure(cause, error.direction) from cause
    except TracingError:
        raise
    except Exception as error:  # EmittedProgramError, or the file is no program, or the check crashed
        file = folder / f"refused_{example.name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(emitted.source)
        text = str(error) if isinstance(error, EmittedProgramError) else f"{type(error).__name__}: {error}"
        whose = f"This is a bug of neuronx_dist, not of {example.name}"
        if isinstance(error, RecordingError):
            whose = (
                "If forward computes other values for tensors of another class, or in its second call, make it a "
                "function of its arguments, parameters and buffers; otherwise this is a bug of neuronx_dist"
            )
        raise EmittedProgramError(f"{text}\n{whose}: report it with the emitted file {file} (not loaded)") from error
    proof = [*map(str, verdicts), f"mesh: {mesh}"]
    not_run = next((verdict.not_run for verdict in verdicts if verdict.not_run), "")
    if not_run:
        text = f"{example.name}: types are proven, {NOT_COMPARED}: {not_run}; {HOW}, and the same policy"
        warnings.warn(text, stacklevel=3)
    call = unsynchronised_norm(example.module, emitted.divisions[0].whole) if config.units > 1 else None
    if call is not None:
        text = (
            f"{example.name}: {call.where}: batch norm takes its statistics of the batch of one unit, and there are "
            f"{config.units}, so that results and running statistics differ from those of the global batch. The ranks "
            "inside a unit share statistics; for statistics over all units pass "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)"
        )
        proof.append(text)
        warnings.warn(text, stacklevel=3)
    lines = [] if smaller is None else lines_not_compared(emitted.source, smaller.source)
    if lines:
        proof.append("\n  ".join(["lines like no line of the module of verify_with, not compared:", *lines]))
        text = f"{example.name}: {len(lines)} kinds of lines are not in the program of verify_with, such as {lines[0]}"
        warnings.warn(f"{text}; {PROOF} lists them", stacklevel=3)
    return proof


def _divisions(example: Example, policy: Any, config: ComputeConfig, recorded: Sequence[Program]) -> list[Division]:
    """Returns the division of the training program, and of the evaluation program if that differs."""
    programs = {program.training: program for program in recorded}
    wanted = (False,) if config.inference_only else (True, False)
    if wanted[0] not in programs:
        programs = {mode: example.program(training=mode) for mode in wanted}
        if len(wanted) == 2 and program_text(programs[False]) == program_text(programs[True]):
            del programs[False]
    config = with_module_paths(config, example.module)
    for program in programs.values():
        check_outputs(example.module, program, config)
    if config.inference_only:
        return [divide(programs[False], policy, config)]
    division = divide(programs[True], policy, config)
    config = config.with_unit(division.ranks * division.pipeline_ranks, division.zero1)
    return [division] if False not in programs else [division, divide_like(division, programs[False], config)]


def _stored_programs(folder: GeneratedFolder, key: Key, example: Example) -> list[Program]:
    """Returns the programs of a folder that were recorded of the same module and arguments."""
    try:
        generated = folder.read()
    except GeneratedFilesError:
        return []
    if generated.key.program != key.program or PROGRAMS not in generated.files:
        return []
    constants = constants_from_text(generated.text(CONSTANTS))
    return programs_from_text(generated.text(PROGRAMS), example, constants) or []


def _loaded(generated: Generated, config: ComputeConfig) -> type[ParallelModule]:
    if config.is_open:
        plan = json.loads(generated.text(PLAN))
        config = config.with_unit(plan["tp"] * plan["pp"], plan["zero1"])
    constants = constants_from_text(generated.text(CONSTANTS))
    loaded = parallel_class(generated.module(CODE), config, generated.weights, constants)
    loaded.IN_EVALUATION = generated.key.choice.get("mode") == repr(EVALUATION)
    loaded.SOURCE, loaded.PROOF, loaded.PLAN = map(generated.text, (CODE, PROOF, PLAN))
    return loaded
