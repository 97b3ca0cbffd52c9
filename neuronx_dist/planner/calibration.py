"""Errors of predictions, and the correction of a cluster by measured steps.

    mape(predicted, measured)                 # mean of |predicted / measured - 1|
    rank_correlation(predicted, measured)     # Spearman's: 1 if both order the layouts equally
    regret(predicted, measured)               # measured seconds of the predicted best over the measured best, less 1

    calibrated(cluster, predict, measured)    # the cluster's speeds, corrected by measured steps

Steps of a few layouts correct the speeds of a cluster for all others: collectives between products, products of a
model's sizes and Python's time are in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from statistics import mean
from typing import Any

import torch

from .cluster import Cluster, Link

__all__ = ["LINK_SPEEDS", "SPEEDS", "calibrated", "fit_factors", "mape", "rank_correlation", "regret", "scaled"]

SPEEDS = ("flops", "attention", "bandwidth", "launch")
LINK_SPEEDS = ("bandwidth", "latency", "sum", "message")
PRIOR = 0.02  # weight of a factor's squared logarithm beside one observation's: what no observation shows stays


def mape(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns the mean absolute relative error of predictions."""
    return mean(abs(one / other - 1) for one, other in zip(predicted, measured, strict=True))


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns Spearman's rank correlation; equal values share the mean of their ranks."""
    one, other = _ranks(predicted), _ranks(measured)
    centre = (len(one) - 1) / 2
    covariance = sum((a - centre) * (b - centre) for a, b in zip(one, other, strict=True))
    variances = sum((a - centre) ** 2 for a in one) * sum((b - centre) ** 2 for b in other)
    return covariance / variances**0.5 if variances else 1.0


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns by which part the layout with the best prediction is slower than the best measured one."""
    chosen = min(range(len(predicted)), key=predicted.__getitem__)
    return measured[chosen] / min(measured) - 1


def _ranks(values: Sequence[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    return [rank + (values.count(value) - 1) / 2 for rank, value in zip(below, values)]


def calibrated(
    cluster: Cluster, predict: Callable[[Cluster, Any], float], observed: Sequence[tuple[Any, float]]
) -> Cluster:
    """Returns the cluster with its speeds scaled so that predictions fit observed steps.

    Args:
        predict: returns the predicted seconds of a case on a cluster.
        observed: cases and their measured seconds.
    """
    return scaled(cluster, fit_factors(lambda factors, case: predict(scaled(cluster, factors), case), observed))


def fit_factors(
    predict: Callable[[Mapping[str, float], Any], float], observed: Sequence[tuple[Any, float]], *, links: int = 4
) -> dict[str, float]:
    """Returns factors of speeds with which predictions fit observed steps; see `scaled`.

    They minimize the squared relative errors (of logarithms), with a weak preference of 1 (Levenberg's and Marquardt's
    method): factors are positive, and what no step shows stays 1.

    Args:
        predict: returns the predicted seconds of a case with these factors.
        links: number of links that have factors.
    """
    names = [*SPEEDS, *(f"{name}[{link}]" for link in range(links) for name in LINK_SPEEDS)]
    units = torch.eye(len(names), dtype=torch.float64)

    def factors_at(logs: torch.Tensor) -> dict[str, float]:
        return {name: exp(max(-5.0, min(5.0, value))) for name, value in zip(names, logs.tolist())}

    def errors(logs: torch.Tensor) -> torch.Tensor:
        factors = factors_at(logs)
        return torch.tensor([log(predict(factors, case) / seconds) for case, seconds in observed], dtype=torch.float64)

    def loss(values: torch.Tensor, logs: torch.Tensor) -> float:
        return float(values.square().sum() + PRIOR * logs.square().sum())

    logs, damping, move = torch.zeros(len(names), dtype=torch.float64), 0.1, 1e-3
    now = errors(logs)
    while damping < 1e6:
        jacobian = torch.stack([(errors(logs + move * unit) - now) / move for unit in units], dim=1)
        gradient = jacobian.T @ now + PRIOR * logs
        candidate = logs - torch.linalg.solve(jacobian.T @ jacobian + (PRIOR + damping) * units, gradient).clamp(-1, 1)
        then = errors(candidate)
        gain = loss(now, logs) - loss(then, candidate)
        if gain > 0:
            logs, now, damping = candidate, then, damping / 3
            if gain < 1e-7:
                break
        else:
            damping *= 4
    return factors_at(logs)


def scaled(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Returns the cluster with its speeds multiplied by factors; products stay below the peak, links below the memory.

    Args:
        factors: by name, of `SPEEDS`, and of `LINK_SPEEDS` of a link, as "bandwidth[0]"; missing ones are 1. The factor
            of "latency" is that of `Link.in_step` and of gathers in `Link.between` too, "sum" that of its all_reduce,
            "message" that of its messages and all_to_all.
    """
    bandwidth = cluster.bandwidth * factors.get("bandwidth", 1.0)
    links = []
    for number, link in enumerate(cluster.links):
        faster, longer, summed, sent = (factors.get(f"{name}[{number}]", 1.0) for name in LINK_SPEEDS)
        speed = min(link.bandwidth * faster, bandwidth)
        of_verb = {"all_reduce": summed, "send": sent, "all_to_all": sent}
        between = {verb: seconds * of_verb.get(verb, longer) for verb, seconds in link.between.items()}
        links.append(Link(link.span, speed, link.latency * longer, link.in_step * longer, between))
    return replace(
        cluster,
        flops={dtype: min(x * factors.get("flops", 1.0), cluster.peak[dtype]) for dtype, x in cluster.flops.items()},
        attention=cluster.attention * factors.get("attention", 1.0),
        bandwidth=bandwidth,
        launch=cluster.launch * factors.get("launch", 1.0),
        links=tuple(links),
    )
