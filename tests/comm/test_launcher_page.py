"""Scripts and manifests of docs/launchers.md: run with a launcher's variables, or read by `run`'s parser."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from neuronx_dist.comm.run_command import arguments
from tests.support.paths import ROOT

# srun on a machine without SLURM: starts the tasks of a step on this host, with the variables that SLURM sets.
SRUN = """\
#!/bin/bash
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
wait -n && wait -n
"""
TRAIN = """\
import torch, neuronx_dist as nxd
nxd.init_distributed("cpu")
nxd.initialize_model_parallel(tensor_model_parallel_size=2)
total = nxd.comm.all_reduce(torch.ones(1), "tp")
print(f"rank {nxd.comm.rank('tp')} of {nxd.comm.size('tp')}: {total.item():g}", flush=True)
nxd.destroy_model_parallel()
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/launchers.md").read_text(), re.DOTALL)


@pytest.mark.process
def test_ranks_that_srun_starts_join_a_job(tmp_path):
    for name, text in {"srun": SRUN, "train.py": TRAIN, "job.sh": blocks("bash")[0]}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "srun").chmod(0o755)
    # SLURM_PROCID and SLURM_NTASKS are those of a batch script
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER", "RANK"))}
    variables |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "PYTHONPATH": str(ROOT)}
    variables["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{variables['PATH']}"
    command = ["bash", str(tmp_path / "job.sh")]
    job = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
    # both tasks write to one pipe: the end of a line may come after the other's text
    assert sorted(re.findall(r"rank \d of \d: \d", job.stdout)) == ["rank 0 of 2: 2", "rank 1 of 2: 2"]


def test_manifests_start_a_launcher_with_options_that_it_has():
    manifests = [manifest for text in blocks("yaml") for manifest in yaml.safe_load_all(text)]
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    replicas = by_kind["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 1}
    job, service = by_kind["Job"], by_kind["Service"]
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    for template, endpoint in ((replicas["Master"]["template"], "$MASTER_ADDR"), (job["spec"]["template"], first)):
        (container,) = template["spec"]["containers"]
        (line,) = container["args"]
        words = shlex.split(line)
        assert words[:3] == ["exec", "neuronx-dist", "run"]
        options = arguments().parse_args(words[3:])
        assert options.nnodes == "2" and options.rdzv_endpoint == f"{endpoint}:29400"
        assert options.training_script == "train.py" and options.training_script_args == ["--resume", "auto"]


def test_the_script_with_a_launcher_for_each_host_has_options_that_it_has():
    line = blocks("bash")[1].replace("\\\n", " ").splitlines()[-1]
    words = shlex.split(line)
    assert words[:3] == ["srun", "neuronx-dist", "run"]
    options = arguments().parse_args(words[3:])
    assert options.rdzv_endpoint == "$first:29400" and options.training_script == "train.py"
