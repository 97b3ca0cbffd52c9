"""`neuronx-dist plan`: the fastest layouts of a model on a cluster, as a table or as JSON."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ..command_line import command_parser, count, load_object, naming_lines_of
from ..planning.plan import Plan, PlanError
from .candidate import RECOMPUTED
from .cluster import PRESETS, Cluster, ClusterError
from .job_commands import measure, validate_plan
from .layout_plan import LayoutPlan
from .plans import CONSTRAINTS, Plans, plan
from .report import save_report
from .workload import MODELS

__all__ = ["arguments", "run"]

_EXAMPLES = f"""\
examples:

  $ neuronx-dist plan --model llama-8b --devices 8 --cluster h100 --batch 128 --seq-len 8192
  $ neuronx-dist plan --model llama-70b --devices 1024 --cluster h100 --batch 1024 --seq-len 8192 --tp 8 --explain
  $ neuronx-dist plan --model ./Llama-3.1-8B --devices 32 --cluster ours.json --batch 64 --seq-len 4096 --save a.json
  $ neuronx-dist plan --model llama-8b --devices 8 --cluster a100 --batch 64 --seq-len 4096 --why-not tp=4,pp=2

  $ torchrun --nproc-per-node 8 -m neuronx_dist plan measure --tp 8 --save ours.json
  $ torchrun --nproc-per-node 8 -m neuronx_dist plan validate --model ./Llama --plan a.plan.json --cluster ours.json

models: {", ".join(MODELS)}; a folder or file of a Hugging Face config; or
  file.py:model_fn, a function that returns a config or a Hugging Face model, which is built on meta
clusters: {", ".join(PRESETS)}; or the file of a measured one
"""
# Arguments of a task that are needed, and that it reads besides.
_TASKS: dict[str, tuple[list[str], list[str]]] = {
    "explain": (["model", "cluster", "plan"], ["devices", "json"]),
    "measure": ([], ["tp", "pp", "cp", "ep", "seconds", "save"]),
    "validate": (["model", "cluster", "plan"], ["devices", "steps", "save"]),
}
_FLAGS = ("sequence_parallel", "zero1", "fused_loss", "compiled", "overlap", "pad_heads", "pad_vocab")
_NUMBERS = ("tp", "pp", "cp", "ep", "dp", "num_microbatches", "micro_batch", "virtual_pipeline_size")


def arguments() -> argparse.ArgumentParser:
    """The argument parser of `plan`."""
    parser = command_parser("Finds the fastest layouts of a model on a cluster; needs no device.", _EXAMPLES)
    add = parser.add_argument
    add(
        "task",
        nargs="?",
        choices=["explain", "measure", "validate"],
        help="explain a saved plan; or, on every rank of a job, measure the cluster, or train steps of a saved plan; "
        "without it: plan",
    )
    add(
        "--model",
        help="a name, the folder or config.json of a Hugging Face model, or file.py:model_fn",
    )
    add("--cluster", metavar="NAME", help="a preset, or the JSON file of a cluster")
    add("--devices", type=count, help="number of devices; by default those of the cluster")
    add("--batch", type=count, help="sequences of a step, of all devices together")
    add("--seq-len", type=count, help="tokens of a sequence")
    add("--top", type=count, default=10, help="number of plans (%(default)s)")
    add("--explain", action="store_true", help="seconds by term and bytes by stage of the best plan")
    add("--why-not", metavar="NAME=VALUE,...", help="why the best plan has not these values")
    add("--pareto", action="store_true", help="the front of time against memory in place of the fastest plans")
    add("--save", metavar="FILE", help="write the best plan, the measured cluster, or the validation to a file")
    add("--seconds", type=float, default=20.0, help="of `measure`: about how long (%(default)s)")
    add("--plan", metavar="FILE", help="of `explain` and `validate`: a saved plan")
    add("--steps", type=count, default=5, help="of `validate`: number of timed steps (%(default)s)")
    add(
        "--report",
        metavar="FILE",
        help="write an HTML page, or its picture as PNG: ranks, a simulated step, memory, what would change it",
    )
    add("--no-check", action="store_true", help="show plans whose programs are not type-checked")
    add("--json", action="store_true", help="all figures as JSON")
    fixed = parser.add_argument_group("constraints: values that are not searched; several values: any of them")
    for name in _NUMBERS:
        fixed.add_argument(f"--{name.replace('_', '-')}", type=count, nargs="+", metavar="N")
    for name in _FLAGS:
        fixed.add_argument(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction)
    fixed.add_argument("--recompute", nargs="+", choices=["none", *RECOMPUTED[1:]])
    fixed.add_argument("--schedule", nargs="+", choices=CONSTRAINTS["schedule"])
    fixed.add_argument("--dtype", nargs="+", choices=CONSTRAINTS["dtype"])
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints plans, or runs `explain`, `measure` or `validate`; returns 0, 1 without a plan, or 2 for wrong arguments.

    Raises:
        argparse.ArgumentError: an argument is missing.
    """
    _check_flags(args)
    try:
        if args.task == "measure":
            measure(args)
            return 0
        cluster = _cluster(args.cluster, args.devices)
        if args.task == "validate":
            validate_plan(args, cluster, _model(args.model))
            return 0
        if args.task == "explain":
            planned = Plan.load(args.plan)
            ranks = planned.tp * planned.pp * planned.dp * (planned.job.cp if planned.job else 1)
            one = LayoutPlan.load(args.plan, _model(args.model), cluster if args.devices else cluster.of(ranks))
            print(json.dumps(one.as_dict(), indent=1) if args.json else one.explain(_folder(args.model)))
            return 0
        plans = plan(
            _model(args.model),
            global_batch=args.batch,
            seq_len=args.seq_len,
            cluster=cluster,
            constraints=_constraints(args),
            top_k=args.top,
            check=not args.no_check,
        )
        plans.on_check = lambda words: print(f"type-checking {words} (--no-check: do not)", file=sys.stderr)
        _show(plans, args)
    except BrokenPipeError:
        raise  # of the output's reader: no problem of the plan
    except (ValueError, OSError) as error:
        text = str(error).removeprefix("plan: ")
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            folder = Path(error.filename).parent
            absent = f"file {error.filename}" if folder.is_dir() else f"folder {folder}"
            text = f"there is no {absent} (seen from {Path.cwd()})"
        print(f"neuronx-dist plan: {text}", file=sys.stderr)
        return 1 if isinstance(error, PlanError) else 2
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Refuses flags that are missing, that the task does not read, or that contradict one another.

    Raises:
        argparse.ArgumentError: names the flags.
    """
    needed, others = _TASKS.get(args.task, (["model", "cluster", "batch", "seq_len"], None))
    flags = {name: f"--{name.replace('_', '-')}" for name in vars(args)}
    if missing := [flags[name] for name in needed if getattr(args, name) is None]:
        raise argparse.ArgumentError(None, f"the following arguments are required: {', '.join(missing)}")
    unread = {"plan", "seconds", "steps"} if others is None else {*flags} - {"task", *needed, *others}
    defaults = vars(arguments().parse_args([]))
    if refused := [flags[name] for name in flags if name in unread and getattr(args, name) != defaults[name]]:
        advice = f"leave it out of `plan {args.task}`" if args.task else f"name a task: {', '.join(_TASKS)}"
        raise argparse.ArgumentError(None, f"{refused[0]} has no effect: {advice}")
    for name in ("pareto", "explain") if args.why_not else ():
        if getattr(args, name):
            raise argparse.ArgumentError(None, f"--why-not and {flags[name]}: give one of them")
    for name in ("save", "report", "plan"):
        path = Path(getattr(args, name) or "-")
        if path.is_dir():
            raise argparse.ArgumentError(None, f"{flags[name]} {path} is a folder: name a file")
    if args.report and Path(args.report).suffix.lower() not in (".html", ".htm", ".png"):
        raise argparse.ArgumentError(None, f"--report {args.report}: the name must end in .html or .png")


def _show(plans: Plans, args: argparse.Namespace) -> None:
    written = []
    if args.save:
        plans[0].save(args.save)
        written.append(f"saved plan 1 as {args.save}")
    if args.report:
        save_report(plans, args.report)
        written.append(f"wrote the report {args.report}")
    if args.json and args.why_not:
        print(json.dumps({"why_not": plans.why_not(**_pairs(args.why_not))}))
        return
    if args.json:
        shown = plans.pareto() if args.pareto else plans
        print(json.dumps([one.as_dict() for one in shown], indent=1))
        return
    if args.why_not:
        print(plans.why_not(**_pairs(args.why_not)))
    else:
        print(plans.table(plans.pareto()) if args.pareto else plans)
        if args.explain:
            print(f"\nplan 1: {plans.explain(_folder(args.model))}")
    if written:
        print("\n" + "\n".join(written))


def _model(name: str) -> Any:
    """Returns the model or config that `file.py:function` builds, on meta; the file of a config; or else the name.

    Raises:
        ValueError: the file needs a function, the function returns something else, or the folder is not there.
    """
    path = Path(name)
    if path.suffix == ".py":
        raise ValueError(f"--model {name} names a file: write {name}:function, of one that returns a config or a model")
    if ":" in name and not path.exists():
        return _built(name)
    if "/" in name and not path.exists():
        if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):  # no name of the Hub
            raise ValueError(f"--model {name}: there is no such file or folder (seen from {Path.cwd()})")
        from transformers.utils.hub import cached_file

        file = cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
        if file is None:
            raise ValueError(
                f"--model {name}: there is no such folder (seen from {Path.cwd()}), and the cache of the Hugging Face "
                f"Hub has no config of it: run `hf download {name} config.json`, or pass one of {', '.join(MODELS)}"
            )
        return file
    return name


def _folder(model: str) -> str:
    """Returns the folder of `neuronx-dist train --model`: `model` if it is one."""
    return model if Path(model).is_dir() else "FOLDER"


def _built(name: str) -> Any:
    with naming_lines_of("--model", name):
        function = load_object(name)
        if not callable(function):
            raise ValueError(f"--model {name} is {function!r:.60}: name a function that returns a config or a model")
        needed = [
            str(param)
            for param in inspect.signature(function).parameters.values()
            if param.default is param.empty and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
        ]
        if needed:
            raise ValueError(
                f"--model {name} needs the argument {needed[0]}, and is called without any: give it a default, or name "
                "a function that needs none"
            )
        with torch.device("meta"):
            model = function()
    if not hasattr(getattr(model, "config", model), "get_text_config"):
        raise ValueError(f"--model {name} returned {model!r:.60}: return a Hugging Face config or model")
    return model


def _cluster(name: str, devices: int | None) -> Cluster:
    if name.endswith(".json") or Path(name).is_file():
        if not Path(name).is_file():
            raise ClusterError(f"--cluster {name}: there is no such file (seen from {Path.cwd()})")
        cluster = Cluster.load(name)
        return cluster if devices is None else cluster.of(devices)
    return Cluster.preset(name, devices)


def _constraints(args: argparse.Namespace) -> dict[str, Any]:
    constraints = {name: getattr(args, name) for name in CONSTRAINTS if getattr(args, name, None) is not None}
    if "recompute" in constraints:
        constraints["recompute"] = ["" if word == "none" else word for word in constraints["recompute"]]
    return constraints


def _pairs(text: str) -> dict[str, Any]:
    """Parses `tp=4,zero1=true`.

    Raises:
        ValueError: a name has no value.
    """
    pairs: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--why-not {text}: {pair!r} has no value: write name=value, such as tp=4,zero1=true")
        if name.strip().replace("-", "_") in pairs:
            raise ValueError(f"--why-not {text}: {name.strip()} has two values: give one")
        word = value.strip()
        known: dict[str, Any] = {"true": True, "false": False, "none": ""}
        pairs[name.strip().replace("-", "_")] = int(word) if word.isdecimal() else known.get(word.lower(), word)
    return pairs
