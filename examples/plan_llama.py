"""Asks the planner for the layout of a Llama, without a device: the plan, its terms, what another costs, a file.

python examples/plan_llama.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import neuronx_dist as nxd
from neuronx_dist.planner import Cluster, LayoutPlan


def main() -> None:
    cluster = Cluster.preset("h100", 16)
    plans = nxd.plan("llama-8b", global_batch=128, seq_len=8192, cluster=cluster, top_k=5)
    print(plans)
    print("\nthe best one:", plans.explain(), sep="\n")
    print("\nwhy not tp 8?", plans.why_not(tp=8), sep="\n")
    print("\nless memory for more time:", plans.table(plans.pareto()), sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama.plan.json"
        plans[0].save(path)
        assert LayoutPlan.load(path, "llama-8b", cluster) == plans[0]


if __name__ == "__main__":
    main()
