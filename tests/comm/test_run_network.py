"""Network addresses that `neuronx-dist run` finds."""

from __future__ import annotations

import os
import socket

import pytest

from neuronx_dist.comm import run_network
from neuronx_dist.comm.run_command import arguments
from neuronx_dist.comm.run_network import NetworkError, address_towards, complete, interface_of


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is 10.0.0.2 at eth7 in the network of 10.0.0.1, whose name is `first`; its own name is 127.0.1.1."""
    addresses = {"first": "10.0.0.1", "10.0.0.1": "10.0.0.1", "me": "127.0.1.1", "10.0.0.2": "10.0.0.2"}

    def towards(host: str, port: int) -> tuple[str, str]:
        assert port in (29500, 29400)
        other = addresses.get(host, "127.0.0.1")
        return ("127.0.0.1" if other.startswith("127.") else "10.0.0.2"), other

    monkeypatch.setattr(run_network, "address_towards", towards)
    monkeypatch.setattr(run_network, "interface_of", {"10.0.0.2": "eth7", "127.0.0.1": "lo"}.get)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def completed(words: str) -> tuple[str | None, str, str | None]:
    args = arguments().parse_args([*words.split(), "train.py"])
    complete(args)
    return args.local_addr, args.rdzv_conf, os.environ.get("GLOO_SOCKET_IFNAME")


C10D = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint"


@pytest.mark.parametrize(
    "words, expected",
    [
        (f"{C10D} first:29500", ("10.0.0.2", "is_host=0", "eth7")),
        (f"{C10D} first", ("10.0.0.2", "is_host=0", "eth7")),
        (f"{C10D} 10.0.0.2:29500", ("10.0.0.2", "is_host=1", "eth7")),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.2:29500", ("10.0.0.2", "is_host=1", "eth7")),
        (f"{C10D} localhost:29500", ("127.0.0.1", "is_host=1", "lo")),
        (f"{C10D} first:29500 --rdzv-conf is_host=1,join_timeout=9", ("10.0.0.2", "is_host=1,join_timeout=9", "eth7")),
        (f"{C10D} first:29500 --rdzv-conf join_timeout=9", ("10.0.0.2", "join_timeout=9,is_host=0", "eth7")),
        (f"{C10D} first:29500 --local-addr 10.9.9.9", ("10.9.9.9", "is_host=0", None)),
        ("--nnodes 2 --node-rank 1 --master-addr first", ("10.0.0.2", "", "eth7")),
        ("--nproc-per-node 4", ("127.0.0.1", "", None)),
        ("--standalone --nnodes 2", ("127.0.0.1", "", None)),
    ],
)
def test_addresses_come_from_the_rendezvous(network: None, words: str, expected: object) -> None:
    assert completed(words) == expected


def test_what_is_set_is_kept(network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert completed(f"{C10D} first:29500")[2] == "ib0"


@pytest.mark.parametrize(
    "words, message",
    [
        (f"{C10D} me:29500", "me resolves to 127.0.1.1 on this host, which no other host can reach"),
        ("--nnodes 2 --rdzv-backend c10d", "--rdzv-endpoint HOST:PORT, with the same values on all"),
    ],
)
def test_what_other_hosts_cannot_reach_is_refused(network: None, words: str, message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        completed(words)


def test_this_hosts_own_network() -> None:
    assert address_towards("127.0.0.1", 9) == ("127.0.0.1", "127.0.0.1")
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    assert interface_of("192.0.2.77") is None
    with pytest.raises(NetworkError, match="--rdzv-endpoint no.such.host.invalid: "):
        address_towards("no.such.host.invalid", 9)
