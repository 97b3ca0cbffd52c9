"""The network between the hosts of a job, as far as `neuronx-dist run` finds it by the address of the rendezvous.

torchrun and gloo take the address that a host's own name stands for. That name may stand for nothing, or for 127.0.1.1,
which no other host reaches. Here it is the address with which this host sends to the rendezvous.
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
    """Other hosts cannot be reached with this address."""


def complete(args: argparse.Namespace) -> None:
    """For several hosts: this host's address, who has the rendezvous, and gloo's interface, where nobody has said so.

    Args:
        args: torchrun's; `local_addr` and `rdzv_conf` are changed.

    Raises:
        NetworkError: the name of the rendezvous is not known, or stands for this host alone.
    """
    if args.standalone or not any(number.isdecimal() and int(number) > 1 for number in args.nnodes.split(":")):
        return
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        host, port = args.master_addr, args.master_port or 29500
    elif args.rdzv_endpoint:
        host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=29400)
    else:
        raise NetworkError("several hosts take --rdzv-backend c10d --rdzv-endpoint HOST:PORT, the same on all of them")
    own, other = address_towards(host, port)
    if own.startswith("127.") and host != "localhost" and not host.startswith("127."):
        raise NetworkError(
            f"{host} is {other} on this host, which no other host can reach: give the address that it has in the "
            f"network of the hosts as --rdzv-endpoint, on all of them"
        )
    if args.local_addr is None:
        args.local_addr = own
    if args.rdzv_backend == "c10d" and "is_host" not in args.rdzv_conf:
        is_host = own == other or own.startswith("127.")
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"is_host={int(is_host)}"]))
    interface = interface_of(args.local_addr)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def address_towards(host: str, port: int) -> tuple[str, str]:
    """This host's address on the way to `host`, and that of `host`; nothing is sent.

    Raises:
        NetworkError: there is no such host, or no way to it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]), str(address[0])
    except OSError as error:
        raise NetworkError(f"--rdzv-endpoint {host}: {error.strerror or error}") from error


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None if it is not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
