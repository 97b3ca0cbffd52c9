"""`neuronx-dist doctor`: versions, devices, backends and network of this machine, and a probe by two processes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from ...command_line import command_parser
from . import machine, network, pair
from .findings import Finding, text_of

__all__ = ["arguments", "run"]

_SECONDS = 45.0  # of the probe; the command takes at most a minute
_EXAMPLE = """\
examples:

  $ neuronx-dist doctor
  ok       torch: 2.13.0+cpu; the tests ran on 2.9, 2.13, 2.14, 2.15
  missing  torch_xla: not installed (for device xla: Trn1, TPU); pip install torch==2.9.0 torch_xla==2.9.0, ...
  ok       two processes on cpu: all_reduce: works

  $ neuronx-dist doctor --device cuda           # two processes on two GPUs
  $ neuronx-dist doctor --no-probe --json       # no processes, for machines

ok: works. missing: jobs run without it. failed: jobs that need it fail. Each line ends with what to do.
The exit code is 1 if an all-reduce of two processes fails, else 0.
"""


def arguments() -> argparse.ArgumentParser:
    """Builds the parser of the arguments of `doctor`."""
    parser = command_parser("Looks at what a job needs of this machine, and tries it on two processes.", _EXAMPLE)
    parser.add_argument("--device", default="cpu", help="device type of the two processes (cpu: gloo)")
    parser.add_argument("--json", action="store_true", help="print JSON: ok, and a list of findings")
    parser.add_argument("--no-probe", action="store_true", help="start no processes")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if the all-reduce of the two processes failed."""
    found: list[Finding] = []
    for finding in _findings(args.device, probes=not args.no_probe):
        found.append(finding)
        if not args.json:
            print(text_of(finding), flush=True)
    failed = any(f.status == "failed" and f.subject.endswith(f": {pair.ALL_REDUCE}") for f in found)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": [finding._asdict() for finding in found]}, indent=2))
    return int(failed)


def _findings(device: str, *, probes: bool) -> Iterator[Finding]:
    for look in (machine.versions, machine.packages, machine.devices, machine.backends):
        yield from look()
    for look in (network.loopback, network.port, network.host_name, machine.shared_memory, machine.threads):
        yield from look()
    if probes:
        yield from pair.findings(device, _SECONDS)
