"""Findings about the network inside this host, which every job uses: loopback, torchrun's port, the host's name."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

from .findings import Finding

__all__ = ["host_name", "loopback", "port"]

_SECONDS = 5.0  # for an answer
_PORT = 29500  # torchrun's default


def loopback() -> Iterator[Finding]:
    """Sends a byte from this process to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            number = server.getsockname()[1]
            server.settimeout(_SECONDS)
            with socket.create_connection(("127.0.0.1", number), timeout=_SECONDS) as there, server.accept()[0] as here:
                here.settimeout(_SECONDS)
                there.sendall(b"x")
                received = here.recv(1)
        if received != b"x":
            raise OSError("the byte did not arrive")
    except OSError as error:
        remedy = "look at the firewall, and at the interface lo (ip address show lo)"
        yield Finding("failed", "loopback", f"127.0.0.1 cannot be reached: {error}", remedy)
    else:
        yield Finding("ok", "loopback", f"127.0.0.1, port {number}")


def port() -> Iterator[Finding]:
    """Finds whether the default port of torchrun is free."""
    try:
        with socket.create_server(("127.0.0.1", _PORT)):
            yield Finding("ok", f"port {_PORT}", "free (torchrun's default)")
    except OSError as error:
        remedy = "another job may use it: pass --master-port, or --standalone, which takes a free one"
        yield Finding("missing", f"port {_PORT}", f"torchrun's default, in use: {error.strerror}", remedy)


def host_name() -> Iterator[Finding]:
    """Finds whether the name of this host resolves, which gloo needs unless GLOO_SOCKET_IFNAME names an interface."""
    name, chosen = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME")
    names = [interface for _, interface in socket.if_nameindex()]
    if chosen is not None:
        absent = [interface for interface in chosen.split(",") if interface not in names]
        if absent:
            remedy = f"set it to one of {', '.join(names)}"
            yield Finding("failed", "GLOO_SOCKET_IFNAME", f"{chosen}: no interface {', '.join(absent)}", remedy)
        else:
            yield Finding("ok", "GLOO_SOCKET_IFNAME", f"{chosen} of {', '.join(names)}")
        return
    address = _resolved(name)
    if address is None:
        remedy = f"add it to /etc/hosts, or export GLOO_SOCKET_IFNAME, one of {', '.join(names)}"
        yield Finding("missing", "host name", f"{name} does not resolve within {_SECONDS:.0f} s", remedy)
    else:
        yield Finding("ok", "host name", f"{name} is {address}")


def _resolved(name: str) -> str | None:
    """Returns the address of a name; None if there is none, or no answer in time."""
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(socket.gethostbyname(name))
        except OSError:
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return answers[0] if answers else None
