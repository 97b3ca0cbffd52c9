"""Stores of one host, which listen on its loopback interface alone.

torch's TCPStore listens on every interface, whatever host it is called by. Whoever reaches a store can join the job,
and its ranks unpickle what they find there.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

__all__ = ["local_tcp_store", "of_environment"]


def local_tcp_store(
    host: str, port: int, world_size: int | None = None, is_master: bool = False, *args: Any, **options: Any
) -> Any:
    """Makes a TCPStore, with its arguments; a server of a loopback address listens there alone.

    Raises:
        RuntimeError: the port is in use.
    """
    address = _loopback_of(host) if is_master else None
    if address is not None:
        try:
            listener = socket.create_server((address, port))
        except OSError as error:  # as TCPStore does
            raise RuntimeError(f"{host}:{port} cannot be listened on: {error}") from error
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()  # the store closes it
    return dist.TCPStore(host, port, world_size, is_master, *args, **options)  # type: ignore[attr-defined]


def of_environment(timeout: Any) -> dict[str, Any]:
    """Returns the arguments of `init_process_group` with the store of a job on one host; {} for other jobs.

    All ranks of the job pass theirs: torch gives a prefix to the keys of a store that it makes itself.
    """
    place = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the launcher serves it
    if is_agents or not all(place) or _loopback_of(place[2]) is None:
        return {}
    rank, ranks = int(place[0]), int(place[1])
    store = local_tcp_store(place[2], int(place[3]), ranks, rank == 0, timeout, multi_tenant=True)
    return {"store": store, "rank": rank, "world_size": ranks}


def _loopback_of(host: str) -> str | None:
    """Returns the IPv4 address of a host that is this host's loopback interface; None for another one."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    return address if address.startswith("127.") else None
