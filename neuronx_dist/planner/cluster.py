"""`Cluster`: the speeds and sizes of the devices of a job, and the seconds of a collective on their links.

    cluster = Cluster.preset("h100", devices=1024)
    cluster.collective("all_gather", 64 << 20, size=8)             # tp of 8: inside a host
    cluster.collective("all_reduce", 64 << 20, size=16, stride=8)  # dp of 16, one rank of each host
    cluster.save("ours.json")                                      # edited by hand, `Cluster.load`ed again

Presets are data sheets times an efficiency (`PRESETS`); `measure.py` measures a cluster.

A link joins `span` adjacent ranks; links are listed innermost first. The ranks of a group are `stride` apart. Of a
collective over n ranks, of which m are inside one part of a link's parts, a rank sends over that link

    all_gather, reduce_scatter, broadcast   bytes (1 - 1 / n) / m     a ring through all ranks, divided over m ranks
    all_reduce                              bytes 2 (1 - m / n) / m   a tree of the parts, whose ranks add up first
    all_to_all                              bytes (1 - m / n)
    send, recv, permute, exchange           bytes: every rank sends to its neighbour, and the slowest link counts alone

Chunks pass all links at once, so that the slowest link counts. Latencies add up: each link's as often as a ring or an
all_to_all crosses it (n - 1 hops, of which n / m - 1 between parts), or log2 of its number of parts times in a tree.
`in_step` of the outermost counts once. (Thakur et al., Optimization of Collective Communication Operations in MPICH,
2005; NCCL gathers and scatters by rings, and reduces by trees between hosts.) The latency of an all_reduce's level is
that of a hop: 197 us on gloo beside 217 us of an all_gather of 2 ranks, back to back. Between products verbs differ:
`Link.between` of a measured link replaces `latency` and `in_step`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from .. import accelerator, comm
from ..nearest import nearest
from ..planning.costs import Costs
from .measure import device_memory, fingerprint, measure_groups, measure_speeds
from .presets import PRESETS, Link, hops

__all__ = ["PRESETS", "Cluster", "ClusterError", "Link"]

FORMAT = "neuronx_dist.cluster"
VERSION = 2  # 1: latencies of a doubling of the ranks, not of a hop
RINGS = ("all_gather", "broadcast", "reduce_scatter")
MESSAGES = ("exchange", "permute", "recv", "send")
VERBS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", *MESSAGES)


class ClusterError(ValueError):
    """Error: a cluster's numbers are missing, impossible or contradict one another; the message names the number."""


@dataclass(frozen=True)
class Cluster:
    """Devices of a job. A device is what one rank has: a GPU, a (logical) NeuronCore, a core.

    Attributes:
        devices: number of devices; the job may use fewer.
        devices_per_host: number of devices that share a host.
        memory: bytes of a device.
        flops: achieved floating-point operations per second of large products, by dtype ("bfloat16").
        peak: the same of the data sheet, by which MFU is counted.
        bandwidth: achieved bytes per second of the device's memory.
        launch: seconds of a call that computes nothing, its Python and autograd included.
        links: levels of the network, innermost first; the last one joins all devices.
        attention: speed of the products of attention, relative to `flops`.
        fingerprint: where the numbers were measured: host, device, torch; empty for a preset.
    """

    name: str
    devices: int
    devices_per_host: int
    memory: float
    flops: Mapping[str, float]
    peak: Mapping[str, float]
    bandwidth: float
    launch: float
    links: tuple[Link, ...]
    attention: float = 1.0
    fingerprint: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [*self._wrong_numbers()] or [*self._contradictions()]
        if problems:
            raise ClusterError("\n  - ".join([f"cluster {self.name}:", *problems]))

    def __hash__(self) -> int:
        speeds = (*self.flops.values(), self.attention, self.bandwidth, self.launch)
        return hash((self.name, self.devices, speeds, self.links))

    @classmethod
    def preset(cls, name: str, devices: int | None = None) -> Cluster:
        """Returns a cluster of a device in `PRESETS`, by data sheets.

        Args:
            name: "a100", "h100", "h200", "b200", "gb200", "trn1", "trn2", "v5p", "cpu".
            devices: number of devices; None: those of one host.

        Raises:
            ClusterError: no preset has the name, or `devices` is no whole number of hosts.
        """
        device = PRESETS.get(name.lower().replace("tpu-", "").replace("tpu", ""))
        if device is None:
            raise ClusterError(
                f"there is no cluster {name!r}: use one of {', '.join(PRESETS)} (nearest: "
                f"{nearest(name.lower(), PRESETS)}), or the file of `neuronx-dist plan measure`"
            )
        count = device.per_host if devices is None else devices
        return cls(
            name=name.lower(),
            devices=count,
            devices_per_host=min(device.per_host, count),
            memory=device.memory,
            flops={dtype: peak * device.efficiency for dtype, peak in device.peak.items()},
            peak=device.peak,
            bandwidth=device.bandwidth,
            launch=device.launch,
            links=_links(device.links, count),
            attention=device.attention,
        )

    @classmethod
    def of_this_host(cls, devices: int, device_type: str | None = None) -> Cluster:
        """Returns the preset of this machine's accelerator, or of the cpu, with so many devices.

        Args:
            device_type: "cuda", "cpu", ...; None: the accelerator's, or "cpu".

        Raises:
            ClusterError: no preset is of this accelerator.
        """
        device_type = device_type or accelerator.current_type() or "cpu"
        if device_type == "cpu":
            one = cls.preset("cpu")
            links = (replace(one.links[0], span=devices),)
            return replace(one, devices=devices, devices_per_host=devices, links=links)
        name = torch.cuda.get_device_name() if device_type == "cuda" else device_type
        preset = _preset_of(name)
        if preset is None:
            raise ClusterError(
                f"no preset has the speeds of {name}: use `neuronx-dist plan measure`, and its plan's flags"
            )
        return cls.preset(preset, devices)

    @classmethod
    def measure(cls, name: str = "measured", *, seconds: float = 20.0) -> Cluster:
        """Measures this job's devices, and the links of its mesh's groups; alone, without a mesh, this device.

        Every rank calls it, and gets the same cluster. `save` it on one rank.

        Args:
            seconds: about how long it takes; more is steadier.
        """
        in_job = comm.is_initialized()
        device = comm.current().backend.device if in_job else torch.device(accelerator.current_type() or "cpu")
        marks = fingerprint(device)
        hosts = comm.gather_objects(marks["host"]) if in_job else [marks["host"]]
        speeds = measure_speeds(device, seconds / 2)
        groups = measure_groups(device, seconds / 2) if in_job else []
        per_host = hosts.count(hosts[0])
        spans: dict[int, list[Link]] = {}
        for size, stride, bandwidth, latency, in_step, between in groups:
            link = Link(size * stride, min(bandwidth, speeds.bandwidth), latency, in_step, between)
            spans.setdefault(size * stride, []).append(link)
        links = measured_links([max(links, key=_latency) for _, links in sorted(spans.items())], per_host)
        preset = _preset_of(marks["device"])
        known = PRESETS[preset].peak if preset else {}
        return cls(
            name=name,
            devices=len(hosts),
            devices_per_host=per_host,
            memory=device_memory(device, per_host),
            flops=speeds.flops,
            peak={dtype: max(best, known.get(dtype, best)) for dtype, best in speeds.best.items()},
            bandwidth=speeds.bandwidth,
            launch=speeds.launch,
            links=tuple(links) or (Link(1, speeds.bandwidth, 0.0),),
            attention=speeds.attention,
            fingerprint=marks,
        )

    def of(self, devices: int) -> Cluster:
        """Returns the cluster with another number of devices: the outermost link joins those beyond."""
        if devices == self.devices:
            return self
        per_host = min(self.devices_per_host, devices)
        return replace(self, devices=devices, devices_per_host=per_host, links=_links(self.links, devices))

    def link(self, size: int, stride: int = 1) -> Link:
        """Returns the innermost link that joins `size` ranks, `stride` apart."""
        return next((link for link in self.links if (size - 1) * stride < link.span), self.links[-1])

    def collective(
        self, kind: str, nbytes: float, size: int, stride: int = 1, *, between_products: bool = True
    ) -> float:
        """Returns the seconds of a collective over `size` ranks that are `stride` apart.

        Args:
            kind: a verb of `comm`: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", ...
            nbytes: bytes of the larger one of a rank's input and result, as `comm.record` counts them.
            between_products: add `Link.in_step`, or take `Link.between`.

        Raises:
            ClusterError: there is no such collective, or the group does not fit the cluster.
        """
        if kind not in VERBS:
            raise ClusterError(f"there is no collective {kind!r}: use {', '.join(VERBS)}")
        if size == 1:
            return 0.0
        if (size - 1) * stride >= self.devices:
            raise ClusterError(
                f"a group of {size} ranks {stride} apart has no place on the {self.devices} devices of {self.name}"
            )
        passes = 2 if kind == "all_reduce" else 1
        slowest = latency = in_step = 0.0
        inside = 1  # ranks of the group in one part of the link
        for link in self.links:
            joined = min(size, max(1, link.span // stride))
            if joined > inside:
                measured = link.between.get("send" if kind in MESSAGES else kind) if between_products else None
                start, in_step = (link.latency, link.in_step) if measured is None else (measured, 0.0)
                if kind in MESSAGES:
                    slowest = max(slowest, nbytes / link.bandwidth + start)
                else:
                    slowest = max(slowest, nbytes * _share(kind, size, inside) / link.bandwidth)
                    latency += start * hops(kind, size, inside, joined)
                inside = joined
        return passes * slowest + latency + (in_step if between_products else 0.0)

    def costs(self, size: int = 1, stride: int = 1, *, dtype: str = "float32") -> Costs:
        """Returns the speeds that `parallelize` chooses by, of one axis: `size` ranks, `stride` apart."""
        link = self.link(size, stride)
        latency = link.latency + link.in_step
        is_cpu = self.name == "cpu" or self.fingerprint.get("device", "").startswith("cpu:")
        device_type = "cpu" if is_cpu else "cuda"
        speed = self.speed(dtype)
        return Costs(speed, self.bandwidth, self.launch, link.bandwidth, latency, device_type=device_type)

    def speed(self, dtype: str) -> float:
        """Returns the achieved floating-point operations per second of products in a dtype.

        Raises:
            ClusterError: the cluster has no figure for the dtype.
        """
        if dtype not in self.flops:
            raise ClusterError(
                f"cluster {self.name} has no flops of {dtype}: plan with the dtype {' or '.join(self.flops)} (--dtype)"
            )
        return self.flops[dtype]

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of the cluster's file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the cluster to a JSON file, atomically."""
        temporary = Path(f"{path}.new")
        temporary.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Cluster:
        """Reads a cluster.

        Raises:
            ClusterError: the file is no cluster, or a number is missing, impossible or contradicts another one.
            FileNotFoundError: there is no such file.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:
            raise ClusterError(f"{path} is no cluster: it is not JSON ({error})") from None
        return cls.of_dict(content, str(path))

    @classmethod
    def of_dict(cls, content: Any, where: str = "the content") -> Cluster:
        """Returns the cluster of a file's content; `where`: its name in errors.

        Raises:
            ClusterError: as `load`.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ClusterError(f'{where} is no cluster: it has no "format": "{FORMAT}"')
        values = {name: value for name, value in content.items() if name not in ("format", "version")}
        if content.get("version") != VERSION:
            version = content.get("version")
            raise ClusterError(
                f"{where} is a cluster of version {version}; this package reads version {VERSION}: measure it again"
            )
        _compare_names(values, cls, where)
        links = values["links"]
        if not isinstance(links, (list, tuple)) or not all(isinstance(link, dict) for link in links):
            raise ClusterError(f"{where}: links must be a list of objects, got {links!r:.80}")
        for number, link in enumerate(links):
            _compare_names(link, Link, f"{where}: links[{number}]")
        try:
            return cls(**{**values, "links": tuple(Link(**link) for link in links)})
        except ClusterError as error:
            raise ClusterError(f"{where}: {error}") from None

    def _wrong_numbers(self) -> list[str]:
        """Returns a sentence for each number that is none, or has the wrong sign."""
        problems = []
        for name in ("devices", "devices_per_host"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name} must be a positive integer, got {value!r}")
        numbers = {name: getattr(self, name) for name in ("memory", "bandwidth", "launch", "attention")}
        for name in ("flops", "peak"):
            table = getattr(self, name)
            if not isinstance(table, Mapping) or not table:
                problems.append(f'{name} must have a number for each dtype, as {{"bfloat16": 4e14}}, got {table!r}')
            else:
                numbers.update({f"{name}[{dtype}]": value for dtype, value in table.items()})
        if not self.links:
            problems.append("links must have at least one link, which joins all devices")
        for number, link in enumerate(self.links):
            if not isinstance(link.span, int) or isinstance(link.span, bool) or link.span < 1:
                problems.append(f"links[{number}].span must be a positive integer, got {link.span!r}")
            names = ("bandwidth", "latency", "in_step")
            numbers.update({f"links[{number}].{name}": getattr(link, name) for name in names})
            if not isinstance(link.between, Mapping):
                problems.append(
                    f'links[{number}].between must have seconds by verb, as {{"send": 1e-05}}, got {link.between!r}'
                )
                continue
            known = [verb for verb in VERBS if verb == "send" or verb not in MESSAGES]
            problems += [
                f"links[{number}].between has {verb!r}, which nothing reads: use {', '.join(known)}"
                for verb in link.between
                if verb not in known
            ]
            numbers.update({f"links[{number}].between[{verb}]": value for verb, value in link.between.items()})
        for name, value in numbers.items():
            may_be_zero = name.endswith(("latency", "in_step", "launch")) or ".between[" in name
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < inf:
                quotes = ": write it without quotes" * isinstance(value, str)
                problems.append(f"{name} must be a number of at least 0, got {value!r}{quotes}")
            elif value == 0 and not may_be_zero:
                problems.append(f"{name} must be more than 0, got 0")
        return problems

    def _contradictions(self) -> list[str]:
        """Returns a sentence for each pair of numbers that exclude one another."""
        problems = []
        for dtype, achieved in self.flops.items():
            if dtype not in self.peak:
                problems.append(f"flops has {dtype}, peak has not: add peak[{dtype}]")
            elif achieved > self.peak[dtype]:
                problems.append(f"flops[{dtype}] = {achieved:.4g} is more than peak[{dtype}] = {self.peak[dtype]:.4g}")
        if self.devices > self.devices_per_host and self.devices % self.devices_per_host:
            problems.append(
                f"{self.devices} devices are no whole number of hosts of {self.devices_per_host}: use "
                f"{self.devices // self.devices_per_host * self.devices_per_host} or "
                f"{(self.devices // self.devices_per_host + 1) * self.devices_per_host}"
            )
        spans = [link.span for link in self.links]
        if spans != sorted(set(spans)):
            problems.append(f"links must be listed innermost first, by ascending spans, got {spans}")
        elif spans[-1] < self.devices:
            problems.append(f"the outermost link joins {spans[-1]} of {self.devices} devices: its span must be larger")
        for number, link in enumerate(self.links):
            if link.bandwidth > self.bandwidth:
                problems.append(
                    f"links[{number}].bandwidth = {link.bandwidth:.4g} is more than bandwidth = {self.bandwidth:.4g}, "
                    "that of the memory from which a link sends"
                )
        return problems


def _preset_of(name: str) -> str | None:
    """Returns the name of the preset of a device's name, such as "NVIDIA A100-SXM4-80GB"; None: there is none."""
    return next((key for key in PRESETS if key.upper() in name.upper().replace("-", " ").split()), None)


def _share(kind: str, size: int, inside: int) -> float:
    """Returns the part of a collective's bytes that a rank sends over a link, in one pass."""
    if kind in RINGS:
        return (1 - 1 / size) / inside
    return (1 - inside / size) / (inside if kind == "all_reduce" else 1)


def _compare_names(content: Mapping[str, Any], cls: type, where: str) -> None:
    """Raises a ClusterError if fields of a dataclass are missing, or there are others."""
    known = {item.name for item in fields(cls)}
    optional = {"attention", "fingerprint", "in_step", "between"}
    missing = [name for name in sorted(known - optional) if name not in content]
    unknown = [name for name in content if name not in known]
    if missing:
        raise ClusterError(f"{where}: {missing[0]} is missing")
    if unknown:
        raise ClusterError(f"{where}: there is no {unknown[0]!r}; did you mean {nearest(unknown[0], known)}?")


def _links(links: tuple[Link, ...], devices: int) -> tuple[Link, ...]:
    """Returns the links that `devices` need: inner ones, and one that joins all."""
    inner = [link for link in links[:-1] if link.span < devices]
    outermost = links[len(inner)]
    return (*inner, replace(outermost, span=max(devices, outermost.span if outermost is not links[-1] else 1)))


def _latency(link: Link) -> float:
    return link.latency + link.in_step


def measured_links(links: Sequence[Link], per_host: int) -> list[Link]:
    """Joins neighbouring links of a host that are equally fast up to a factor of 2: they are one, measured twice."""
    found: list[Link] = []
    for link in links:
        if found and link.span <= per_host:
            inner = found[-1]
            pairs = ((inner.bandwidth, link.bandwidth), (_latency(inner), _latency(link)))
            if all(max(pair) <= 2 * min(pair) for pair in pairs):
                names = ("bandwidth", "latency", "in_step")
                means = {name: (getattr(inner, name) * getattr(link, name)) ** 0.5 for name in names}
                between = {verb: (inner.between[verb] * link.between[verb]) ** 0.5 for verb in inner.between}
                found[-1] = Link(link.span, **means, between=between)
                continue
        found.append(link)
    return found
