"""A rank of a job, whose launcher and ranks must listen on loopback: rank 0 prints where else they listen.

neuronx-dist run ... -m tests.comm.listening_job
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import neuronx_dist as nxd
from neuronx_dist import comm


def addresses(process: int) -> list[str]:
    """The addresses that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except FileNotFoundError:  # the descriptor of the iteration
            continue
    found = []
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{process}/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # LISTEN
                words = bytes.fromhex(fields[1].partition(":")[0])
                raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.append(socket.inet_ntop(family, raw))
    return found


def main() -> None:
    nxd.init_distributed("cpu")
    nxd.initialize_model_parallel()
    processes = comm.gather_objects(os.getpid())
    if comm.rank("world") == 0:
        found = [address for process in (*processes, os.getppid()) for address in addresses(process)]
        print("listening:", len(found), "elsewhere:", [address for address in found if address != "127.0.0.1"])
    comm.barrier()


if __name__ == "__main__":
    main()
