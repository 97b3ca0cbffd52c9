"""Contents and use of the wheel, costs of its import, and dependencies between its parts, in one direction only."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.sources import nodes_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "neuronx_dist"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def run(*command, cwd=ROOT, **env):
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def python(code):
    return run(sys.executable, "-c", code, PYTHONPATH=str(ROOT))


def pyproject():
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml takes Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line and line[0] != "#")


# --- importing ---


def test_import_pulls_in_nothing_optional():
    loaded = python("import sys, neuronx_dist; print(*sys.modules)").split()
    heavy = ("transformers", "torch_xla", "torch.distributed.tensor", "torch.distributed.checkpoint", "safetensors")
    assert [name for name in loaded if name in heavy or name.startswith(tuple(f"{h}." for h in heavy))] == []


def test_import_adds_at_most_0_3_s_to_torch():
    code = "import torch, time; t = time.process_time(); import neuronx_dist; print(time.process_time() - t)"
    python(code)  # writes the byte code
    assert min(float(python(code)) for _ in range(3)) <= 0.3


FIRST_USES = """
import sys, torch, neuronx_dist as nxd
from torch import nn
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nxd.ColumnParallelLinear(8, 16, gather_output=False)
        self.down = nxd.RowParallelLinear(16, 8, input_is_parallel=True)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x).square().mean()

def rank():
    comm.all_reduce(torch.ones(2), "tp")
    Model()(torch.ones(4, 8, requires_grad=True)).backward()
    nxd.parallel_cross_entropy(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))

def others():
    return {name for name in sys.modules if not name.startswith("neuronx_dist")}

threads.run(nxd.Mesh(2, tp=2), rank)
with comm.as_rank(nxd.Mesh(1), 0):
    model = nxd.NxDPPModel(Model(), transformer_layer_cls=Block, num_microbatches=2, output_loss_value_spec=True)
    print(*others())
    import torch._dynamo
    before = others()
    model.run_train(x=torch.ones(4, 8))
    print(*others() - before)
"""


@pytest.mark.slow
def test_first_uses_import_nothing_large():
    """A layer, a collective, a loss, a pipeline's model: none of torch's compiler, which takes a second.

    `run_train` needs its fake tensors, for which torch imports it, as it does for the first optimizer; and no more.
    """
    before, by_run_train = python(FIRST_USES).splitlines()
    compiler = {"sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"}
    large = compiler | {"torch.distributed.tensor", "transformers"}
    assert large.isdisjoint(before.split())
    assert len(by_run_train.split()) < 20, by_run_train


@pytest.mark.parametrize("module", ["mesh", "planning.layout", "pipeline.schedule"])
def test_what_runs_before_torch_needs_no_torch(module):
    """Modules of pure Python, loaded without the package around them, import no torch."""
    code = f"""
import importlib, sys, types
package = types.ModuleType("neuronx_dist")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["neuronx_dist"] = package
importlib.import_module("neuronx_dist.{module}")
print("torch" in sys.modules)
"""
    assert python(code).strip() == "False"


# --- what only comm does ---


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


COLLECTIVES = re.compile(
    r"(i?all_(reduce|gather|to_all)\w*|reduce_scatter\w*|i?(send|recv)(_object_list)?|broadcast\w*|gather(_object)?|reduce"
    r"|scatter\w*|barrier|monitored_barrier|batch_isend_irecv|P2POp)"
)
BACKENDS = {"gloo", "nccl", "xla", "mpi", "ucc"}


def test_only_comm_calls_collectives_and_names_backends():
    wrong = []
    for path in SOURCES:
        if part_of(path) == "comm":
            continue
        aliases = {"torch.distributed", "torch_xla.core.xla_model"}
        for node in nodes_of(path):
            names = node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
            aliases |= {
                a.asname or a.name
                for a in names
                if f"{base}{a.name}" in ("torch.distributed", "torch_xla.core.xla_model")
            }
        for node in nodes_of(path):
            if (
                isinstance(node, ast.Attribute)
                and COLLECTIVES.fullmatch(node.attr)
                and ast.unparse(node.value) in aliases
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node)}")
            if isinstance(node, ast.Constant) and node.value in BACKENDS:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} names the backend {node.value!r}")
    assert wrong == []


# --- what is shipped ---


@pytest.mark.process
def test_the_wheel_of_the_sdist_holds_the_package_and_works_when_installed(tmp_path):
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "neuronx_dist", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_nothing.py").touch()
    backend = "from setuptools import build_meta; build_meta.build_sdist('out')"
    run(sys.executable, "-c", backend, cwd=tmp_path)
    (archive,) = (tmp_path / "out").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path / "out"))
    run(sys.executable, "-m", "pip", "wheel", ".", *options, cwd=source)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert wheel.name.startswith("neuronx_dist-0.1.0-py3-none-any")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {str(path.relative_to(ROOT)) for path in SOURCES} | {"neuronx_dist/py.typed"}
    metadata = zipfile.ZipFile(wheel).read("neuronx_dist-0.1.0.dist-info/METADATA").decode()
    for line in (
        "Name: neuronx_dist",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.10",
        "Provides-Extra: hf",
    ):
        assert line in metadata
    unconditional = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert unconditional == ["Requires-Dist: torch>=2.9", "Requires-Dist: fsspec", "Requires-Dist: xxhash>=3.0"]
    use_installed(wheel, tmp_path / "environment")


def use_installed(wheel, environment):
    """Installs a wheel into an environment with torch and nothing of this checkout, and starts two ranks there."""
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    (packages,) = environment.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(packages), str(wheel))
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = environment / "train.py"
    script.write_text(
        "import torch, neuronx_dist as nxd\n"
        "nxd.init_distributed('cpu')\n"
        "nxd.initialize_model_parallel(tensor_model_parallel_size=2)\n"
        "layer = nxd.RowParallelLinear(4, 2, input_is_parallel=True)\n"
        "layer(torch.ones(1, 2)).sum().backward()\n"
        "open(f'rank_{nxd.comm.rank(\"tp\")}.txt', 'w').write(nxd.__file__)\n"
    )
    ranks = "-m neuronx_dist run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 train.py".split()
    run(str(environment / "bin" / "python"), *ranks, cwd=environment, GLOO_SOCKET_IFNAME="lo")
    used = [(environment / f"rank_{rank}.txt").read_text() for rank in (0, 1)]
    assert used == [str(packages / "neuronx_dist" / "__init__.py")] * 2


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in SOURCES}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_setup_py_still_answers():
    assert run(sys.executable, "setup.py", "--name", "--version").split()[-2:] == ["neuronx_dist", "0.1.0"]


def test_one_version_everywhere():
    version = pyproject()["project"]["version"]
    changelog = re.search(r"^## \[?(\d[^\] ]*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert changelog and changelog[1] == version
    assert python("import neuronx_dist; print(neuronx_dist.__version__)").strip() == version


def test_the_pinned_environment_has_what_the_extras_ask_for():
    extras = pyproject()["project"]["optional-dependencies"]
    names = {
        re.split(r"[<>=!~\[ ]", requirement)[0].lower()
        for extra in ("hf", "dev", "lightning", "plot", "s3")
        for requirement in extras[extra]
    }
    assert names <= pins().keys()
    assert extras["xla"] == ["torch==2.9.0", "torch_xla==2.9.0"]
    assert f"TORCH_XLA ?= {' '.join(extras['xla'])}\n" in (ROOT / "Makefile").read_text()


# Optional packages that no extra installs, where the package imports them.
UNDECLARED = {
    "PIL": "comes with matplotlib",
    "jax": "replays of XLA programs: docs/xla.md",
    "jaxlib": "replays of XLA programs: docs/xla.md",
    "ml_dtypes": "comes with jax",
    "numpy": "comes with jax, gguf and matplotlib",
    "torchmetrics": "comes with lightning",
}


@pytest.mark.slow
def test_every_package_that_is_imported_is_declared():
    project = pyproject()["project"]
    required = [re.split(r"[<>=]", name)[0] for name in project["dependencies"]]
    optional = [
        re.split(r"[<>=]", name)[0]
        for extra, names in project["optional-dependencies"].items()
        if extra != "dev"
        for name in names
    ]
    at_top, anywhere = set(), set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        extends = path.parent.name == "lightning" or path.match("hf/trainer/*.py") or path.name == "accelerator.py"
        top = anywhere if extends else at_top
        for statements, names in ((tree.body, top), (ast.walk(tree), anywhere)):
            for node in statements:
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names.add(str(node.module).partition(".")[0])
    inside = sys.stdlib_module_names | {"neuronx_dist"}
    assert at_top - inside <= {*required}, "imported at the top of a file, and not in dependencies"
    assert anywhere - inside <= {*required, *optional, *UNDECLARED}, "imported, and in no extra"
    assert {*required, *UNDECLARED} <= anywhere, "declared, and not imported"


def test_messages_and_pages_name_packages_that_pip_finds():
    """The project is on no package index: an extra of it is installed from a checkout alone."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *SOURCES, *(ROOT / "examples").rglob("*.py")]
    assert [str(path) for path in pages if re.search(r"install\s+\S?neuronx_dist\[", path.read_text())] == []


# --- the commands ---


def test_make_alone_lists_the_targets():
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    listed = re.findall(r"^  make ([a-z-]+) +[a-z]", run("make", "--no-print-directory", MAKEFLAGS=""), re.M)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony and set(phony[1].split()) <= set(listed)


def last_command(*words):
    """Returns the last command that `make train` would run; MAKEFLAGS: these tests run under make themselves."""
    commands = run("make", "--no-print-directory", "-n", "train", *words, MAKEFLAGS="").replace("\\\n", "")
    return " ".join(commands.splitlines()[-1].split())


def test_make_train_starts_one_process_for_each_rank():
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    small = last_command("MODEL=", "TP=4", "PP=1", "ARGS=--steps 3")
    assert "--nproc-per-node 4 " in small and small.endswith("examples/train_llama.py --tp 4 --pp 1 --steps 3")
    assert "--nproc-per-node 8 " in last_command("TP=2", "PP=2", "NPROC=8")
    fine_tuned = last_command("MODEL=build/smollm2", "ARGS=--steps 3")
    assert "--model build/smollm2 --pad-heads --steps 8 " in fine_tuned and fine_tuned.endswith(" --steps 3")


def test_ci_is_one_executable_file():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    run("bash", "-n", str(script))


def test_the_license_is_the_whole_apache_2_0_text():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text and len(text) > 11_000
