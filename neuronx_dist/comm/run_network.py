"""Network between the hosts of a job, found by `neuronx-dist run` from the address of the rendezvous.

torchrun and gloo use the address that a host's name resolves to. The name may not resolve, or resolve to 127.0.1.1,
which no other host reaches. Here the address is the one from which this host sends to the rendezvous.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import struct
from contextlib import suppress

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

__all__ = ["NetworkError", "address_towards", "complete", "interface_of"]

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


class NetworkError(ValueError):
    """This address does not reach other hosts."""


def complete(args: argparse.Namespace) -> None:
    """Fills in what the user left out: this host's address, of several hosts also the rendezvous and gloo's interface.

    Args:
        args: the arguments of torchrun; `local_addr` and `rdzv_conf` are changed.

    Raises:
        NetworkError: the name of the rendezvous does not resolve, or resolves to this host alone.
    """
    if args.standalone or not any(number.isdecimal() and int(number) > 1 for number in args.nnodes.split(":")):
        if args.local_addr is None:
            args.local_addr = "127.0.0.1"  # the store of one host, which torchrun would serve on its network
        return
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        host, port = args.master_addr, args.master_port or 29500
    elif args.rdzv_endpoint:
        host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=29400)
    else:
        raise NetworkError(
            "several hosts need --rdzv-backend c10d --rdzv-endpoint HOST:PORT, with the same values on all hosts"
        )
    local_address, other = address_towards(host, port)
    if local_address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        raise NetworkError(
            f"{host} resolves to {other} on this host, which no other host can reach: pass this host's network "
            "address in --rdzv-endpoint on all hosts"
        )
    if args.local_addr is None:
        args.local_addr = local_address
    if args.rdzv_backend == "c10d" and "is_host" not in args.rdzv_conf:
        is_host = local_address == other or local_address.startswith("127.")
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"is_host={int(is_host)}"]))
    interface = interface_of(args.local_addr)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def address_towards(host: str, port: int) -> tuple[str, str]:
    """Returns this host's address on the route to `host`, and the address of `host`; sends nothing.

    Raises:
        NetworkError: there is no such host, or no route to it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]), str(address[0])
    except OSError as error:
        raise NetworkError(f"--rdzv-endpoint {host}: {error.strerror or error}") from error


def interface_of(address: str) -> str | None:
    """Returns the network interface that has an IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
