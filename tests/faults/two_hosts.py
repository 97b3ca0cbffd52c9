"""Two hosts on one machine: network namespaces with a link between them, and host names that stand for nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

_BECOME = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"


class Host(NamedTuple):
    """A host: its network namespace, its address and the interface that has it."""

    namespace: str
    address: str
    interface: str

    def start(self, words: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Starts a Python command there, which neither knows this machine's name nor sees another network."""
        before = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", sys.executable, "-c", _BECOME]
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **environment,
        }
        if "GLOO_SOCKET_IFNAME" not in environment:
            variables.pop("GLOO_SOCKET_IFNAME", None)
        with open(output, "wb") as stream:
            command = [*before, f"host-{self.interface}", sys.executable, *words]
            return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=stream, stderr=subprocess.STDOUT)


class NoHosts(Exception):
    """Two hosts cannot be made here; the message says why."""


@contextmanager
def linked_hosts() -> Iterator[list[Host]]:
    """Two hosts, for as long as the block lasts.

    Raises:
        NoHosts: there is no right or no tool to make them.
    """
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        raise NoHosts("network namespaces take root, ip (iproute2) and unshare (util-linux)")
    pid = os.getpid()
    first, second = (Host(f"nxd{pid}{name}", f"10.77.0.{n}", f"nx{name}{pid}") for n, name in ((1, "a"), (2, "b")))
    hosts = [first, second]
    with ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
        ends = [first.interface, "netns", first.namespace, "type", "veth", "peer", "name", second.interface]
        _ip("link", "add", *ends, "netns", second.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield hosts


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes that a process has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise NoHosts(f"ip {' '.join(words)}: {done.stderr.strip()}")
