"""Generated files: what they depend on, when they are reused, and what becomes of damaged ones."""

from __future__ import annotations

import importlib
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuronx_dist import rules
from neuronx_dist.parallelize import api, choose, emit
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.example import Example
from neuronx_dist.parallelize.generated import fingerprint, keys
from neuronx_dist.parallelize.generated.generated_files import ForeignFilesError, GeneratedFilesError, GeneratedFolder
from neuronx_dist.parallelize.generated.keys import key_of
from neuronx_dist.program import recorder
from neuronx_dist.sharded_functions import norms
from neuronx_dist.spmd import rows

FACTOR = 2.0


def helper(x):
    return x * FACTOR


class Net(nn.Module):
    bias = 0.5

    def __init__(self, width=4, scale=3.0, buffer=1.0):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale
        self.register_buffer("shift", torch.full((2,), buffer))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.scale * helper(F.relu(self.linear(x))) + self.bias


def policy(graph, config):
    return graph


def policy_of(number):
    def chosen(graph, config):
        return graph, number

    return chosen


def keyed(module=None, x=None, chosen=policy, **options):
    torch.manual_seed(0)
    arguments = {"x": torch.zeros(2, 4) if x is None else x}
    return key_of(Example(module or Net(), arguments), chosen, ComputeConfig(options.pop("plan", 2), 4, **options))


def edited(function, monkeypatch):
    monkeypatch.setitem(globals(), function.__name__, function)


def changes(monkeypatch):
    """Changes of what generated code depends on, by what the message says of each."""

    def other_helper(x):
        return x / FACTOR

    other_helper.__name__ = "helper"

    class Other(nn.Module):
        def forward(self, x):
            return super().forward(x)

    frozen = Net()
    frozen.dropout.eval()
    hooked = Net()
    hooked.linear.register_forward_hook(lambda module, args, output: output + 1)
    part = Net()
    part.linear.weight.requires_grad_(False)
    yield "parameter linear.weight", lambda: keyed(Net(width=8), torch.zeros(2, 8))
    yield "module (the whole)", lambda: keyed(Net(scale=4.0))
    yield "buffer shift", lambda: keyed(Net(buffer=2.0))
    yield "module dropout", lambda: keyed(frozen)
    yield "module linear", lambda: keyed(hooked)
    yield "parameter linear.weight", lambda: keyed(part)
    yield "argument x", lambda: keyed(x=torch.zeros(3, 4))
    yield "argument x", lambda: keyed(x=torch.zeros(2, 4, dtype=torch.float64))
    yield "argument x", lambda: keyed(x=torch.zeros(2, 4, requires_grad=True))
    yield "plan_ngpus: 2 -> 4", lambda: keyed(plan=4)
    yield "user_config", lambda: keyed(user_config={"layers": 3})
    yield "policy", lambda: keyed(chosen="tp")
    yield "policy", lambda: keyed(chosen=policy_of(1))


def test_every_change_is_another_key(monkeypatch):
    key = keyed()
    assert keyed() == key and keyed().digest == key.digest and not key.differences(keyed())
    for text, other in changes(monkeypatch):
        lines = key.differences(other())
        assert any(line.startswith(text) for line in lines), (text, lines)
        assert other().digest == other().digest != key.digest


def test_unlike_hooks_and_persistence_are_unlike_keys():
    """Each pair differs in nothing else."""

    def hooked(hook, *registers):
        module = Net()
        for register in registers:
            getattr(module.linear, register)(hook)
        return keyed(module)

    def one(module, args, output):
        return output + 1

    def two(module, args, output):
        return output + 2

    two.__name__, two.__qualname__ = one.__name__, one.__qualname__
    forward = [hooked(hook, "register_forward_hook") for hook in (one, two, one)]
    assert forward[0].digest == forward[2].digest != forward[1].digest
    before = hooked(lambda module, args: (args[0] + 1,), "register_forward_pre_hook")
    backward = hooked(lambda module, *grads: None, "register_full_backward_hook")
    both = hooked(one, "register_forward_hook", "register_forward_hook")
    assert len({key.digest for key in (*forward[:2], before, backward, both, keyed())}) == 6
    hidden = Net()
    hidden.register_buffer("shift", hidden.shift, persistent=False)
    (line,) = keyed().differences(keyed(hidden))
    assert line.startswith("buffer shift") and "persistent=True" in line and "persistent=False" in line


def test_tied_parameters_count():
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    key = keyed(pair)
    pair[1].weight = pair[0].weight
    lines = key.differences(keyed(pair))
    assert len(lines) == 1 and lines[0].startswith("parameter 1.weight") and "tied to 0.weight" in lines[0]


class Generation:
    def __init__(self, length, number):
        self.length, self._original_object_hash = length, number


def test_what_is_of_one_process_alone_does_not_count():
    """A generation config's `hash()` of itself is another number in each process; a lock is held now and then."""

    def with_state(number):
        net = Net()
        net.generation = Generation(20, number)
        net.lock = threading.Lock()
        return net

    key = keyed(with_state(1))
    assert keyed(with_state(2)) == key
    net = with_state(1)
    with net.lock:
        assert keyed(net) == key
    net.generation.length = 21
    assert keyed(net) != key


def test_closures_globals_and_called_functions_count(monkeypatch):
    assert keyed(chosen=policy_of(1)) == keyed(chosen=policy_of(1))
    assert keyed(chosen=policy_of(1)).differences(keyed(chosen=policy_of(2)))
    key = keyed()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "FACTOR", 3.0)
        assert any("helper" in line for line in key.differences(keyed()))
    with monkeypatch.context() as patch:
        patch.setattr(Net, "bias", 0.25)
        assert any("Net" in line for line in key.differences(keyed()))
    with monkeypatch.context() as patch:
        patch.setattr(helper, "__code__", (lambda x: x + FACTOR).__code__)
        assert any("helper" in line for line in key.differences(keyed()))
    with monkeypatch.context() as patch:
        patch.setattr(keys, "package_digest", lambda: "another version")
        assert key.differences(keyed()) == [next(line for line in key.differences(keyed()) if "this package" in line)]
    assert keyed() == key


def test_the_digest_of_the_package_reads_the_files_that_determine_generated_code(monkeypatch):
    read, read_bytes = set(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.add(path), read_bytes(path))[1])
    fingerprint.package_digest.__wrapped__()
    assert {
        Path(module.__file__) for module in (api, choose.exact, emit.body, rules.spec, norms, recorder, rows)
    } <= read


@pytest.mark.parametrize("of", [str, Path])
def test_the_content_of_a_plan_file_counts(tmp_path, of):
    file = tmp_path / "plan.json"
    for keyed_by in (lambda: keyed(chosen=of(file)), lambda: keyed(pas_config={"load_plan_path": of(file)})):
        file.write_text("one")
        key = keyed_by()
        assert keyed_by() == key
        file.write_text("two")
        lines = key.differences(keyed_by())
        assert len(lines) == 1 and "plan.json" not in lines[0] and "file" in lines[0], lines
    moved = file.rename(tmp_path / "moved.json")
    assert keyed(chosen=of(moved)) == keyed(chosen=of(moved.rename(file)))


def test_only_the_policy_and_config_leave_the_program_the_same(tmp_path):
    folder = GeneratedFolder(tmp_path, Net)
    assert folder.state(keyed()) == "empty"
    folder.write(keyed(), {"gencode0.py": "x = 1"})
    assert folder.state(keyed()) == "same"
    assert folder.state(keyed(chosen="dp")) == folder.state(keyed(plan=4)) == "same program"
    assert folder.state(keyed(Net(scale=1.0))) == "different"


def test_what_is_written_is_read(tmp_path):
    folder = GeneratedFolder(tmp_path, Net, "small")
    assert folder.path == (tmp_path / "_parallel_modules").joinpath(*Net.__module__.split("."), "Net", "small")
    weights = {"a": torch.arange(6.0).view(2, 3).bfloat16(), "b": torch.tensor(3), "t": torch.randn(3, 2).T}
    folder.write(keyed(), {"gencode0.py": "x = 41 + 1", "plan.json": "{}"}, weights)
    generated = folder.read(keyed())
    assert generated.text("plan.json") == "{}" and generated.module("gencode0.py").x == 42
    assert generated.has_weights and set(generated.weights()) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(generated.weights()[name], tensor) and generated.weights()[name].dtype == tensor.dtype
    with pytest.raises(GeneratedFilesError, match="has no gencode1.py; it has gencode0.py, plan.json"):
        generated.text("gencode1.py")
    with pytest.raises(GeneratedFilesError, match="(?s)plan_ngpus: 2 -> 4.*reuse='override'"):
        folder.read(keyed(plan=4))
    assert not any(tmp_path.rglob("*.new")) and not any(tmp_path.rglob("*.old"))


def test_weights_are_kept_for_another_choice(tmp_path):
    folder = GeneratedFolder(tmp_path, Net)
    folder.write(keyed(), {"gencode0.py": "x = 1"}, {"a": torch.ones(3)})
    folder.write(keyed(chosen="dp"), {"gencode1.py": "x = 2"}, keep_weights=True)
    generated = folder.read(keyed(chosen="dp"))
    assert set(generated.files) == {"gencode1.py"} and torch.equal(generated.weights()["a"], torch.ones(3))
    folder.write(keyed(), {"gencode0.py": "x = 1"})
    with pytest.raises(GeneratedFilesError, match="has no initial weights.*init_module_params=False"):
        folder.read().weights()


def test_a_failure_while_writing_harms_nothing(tmp_path):
    folder = GeneratedFolder(tmp_path, Net)
    folder.write(keyed(), {"gencode0.py": "x = 1"})
    with pytest.raises(ValueError, match="complex64"):
        folder.write(keyed(plan=4), {"gencode0.py": "x = 2"}, {"a": torch.zeros(2, dtype=torch.complex64)})
    assert folder.read(keyed()).module("gencode0.py").x == 1
    assert sorted(path.name for path in folder.path.parent.iterdir() if path.name != "._.lock") == ["_"]


def test_an_interrupted_swap_is_finished(tmp_path):
    folder = GeneratedFolder(tmp_path, Net)
    folder.write(keyed(), {"gencode0.py": "x = 1"})
    folder.path.rename(folder.path.with_name("._.old"))  # the process ended here
    assert folder.read(keyed()).module("gencode0.py").x == 1


def test_two_that_write_at_once_leave_one_whole_folder(tmp_path):
    by_name = {name: keyed(chosen=name) for name in ("dp", "tp")}
    start, errors = threading.Barrier(4), []

    def work(name):
        folder = GeneratedFolder(tmp_path, Net)
        start.wait()
        try:
            for _ in range(10):
                folder.write(by_name[name], {f"{name}{i}.py": f"x = '{name}'" for i in range(4)}, {name: torch.ones(2)})
        except BaseException as error:
            errors.append(error)

    def read():
        folder = GeneratedFolder(tmp_path, Net)
        start.wait()
        try:
            for _ in range(20):
                if folder.state(by_name["dp"]) != "empty":
                    assert len(set(folder.read().files.values())) == 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in by_name]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    generated = GeneratedFolder(tmp_path, Net).read()
    name = next(iter(generated.weights()))
    assert generated.key == by_name[name] and all(file.startswith(name) for file in generated.files)


def test_match_does_not_replace_what_came_meanwhile(tmp_path):
    folder = GeneratedFolder(tmp_path, Net)
    folder.write(keyed(), {"gencode0.py": "x = 1"})
    with pytest.raises(GeneratedFilesError, match="plan_ngpus"):
        folder.write(keyed(plan=4), {"gencode0.py": "x = 2"}, replace=False)
    assert folder.read(keyed()).module("gencode0.py").x == 1


WRONG_TYPES = [
    *({"files": files} for files in ([], {"gencode0.py": 5}, {"gencode0.py": {}})),
    *({part: 1} for part in ("weights", "program", "choice")),
]
OUTSIDE = ["../x", "/etc/x", "weights/../../x"]


@pytest.mark.parametrize(
    "damage, text",
    [
        (
            lambda path: (path / "gencode0.py").write_text("import os; x = 2"),
            "gencode0.py differs from what was written",
        ),
        (lambda path: (path / "gencode0.py").unlink(), "gencode0.py is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda path: _edit_manifest(path, format=99), "is of format 99, this package reads 1"),
        *((lambda path, wrong=wrong: _edit_manifest(path, **wrong), "entries of other types") for wrong in WRONG_TYPES),
        *((lambda path, name=name: _add_file(path, name), "names .*/x, outside of the folder") for name in OUTSIDE),
        (lambda path: _truncate(path / "weights" / "model.safetensors"), "model.safetensors has 9 bytes"),
    ],
)
def test_damaged_folders_are_refused_and_can_be_replaced(tmp_path, damage, text):
    folder = GeneratedFolder(tmp_path, Net)
    folder.write(keyed(), {"gencode0.py": "x = 1"}, {"a": torch.ones(3)})
    damage(folder.path)
    for look in (folder.read, lambda: folder.state(keyed())):
        with pytest.raises(GeneratedFilesError, match=f"is damaged: .*{text}.*reuse='override'"):
            look()
    folder.write(keyed(), {"gencode0.py": "x = 3"})
    assert folder.read(keyed()).module("gencode0.py").x == 3


def _edit_manifest(path, **entries):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **entries}))


def _add_file(path, name):
    files = json.loads((path / "manifest.json").read_text())["files"]
    _edit_manifest(path, files={**files, name: files["gencode0.py"]})


def _truncate(path):
    path.write_bytes(path.read_bytes()[:9])


def test_a_flipped_bit_in_a_weight_is_found(tmp_path):
    folder = GeneratedFolder(tmp_path, Net)
    folder.write(keyed(), {"gencode0.py": "x = 1"}, {"a": torch.ones(3), "b": torch.ones(3)})
    path = folder.path / "weights" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    weights = folder.read().weights()
    assert torch.equal(weights["a"], torch.ones(3))
    with pytest.raises(GeneratedFilesError, match="values of 'b' differ from those that were written"):
        weights["b"]


@pytest.mark.parametrize("content", [None, "{}", "[1]"])
def test_files_of_others_are_never_removed(tmp_path, content):
    folder = GeneratedFolder(tmp_path, Net)
    folder.path.mkdir(parents=True)
    name = "thesis.tex" if content is None else "manifest.json"
    (folder.path / name).write_text(content or "mine")
    for look in (folder.read, lambda: folder.write(keyed(), {"gencode0.py": "x = 1"})):
        with pytest.raises(ForeignFilesError, match=f"holds {name}, which parallelize did not write"):
            look()
    assert (folder.path / name).read_text() == (content or "mine")


@pytest.mark.parametrize("name", ["my module", "3d", "", "a-b", "../x"])
def test_an_instance_name_is_an_identifier(tmp_path, name):
    with pytest.raises(ValueError, match="must be a Python identifier"):
        GeneratedFolder(tmp_path, Net, name)


def test_no_files_at_all(tmp_path):
    with pytest.raises(GeneratedFilesError, match="has no generated files.*broadcast_strategy='all'"):
        GeneratedFolder(tmp_path, Net).read()


LIBRARY = """
import functools, torch
_TABLE = {}

class Options:
    def __init__(self):
        self.factor = 2.0

    @functools.cached_property
    def doubled(self):
        return 2 * self.factor

def scaled(x, options):
    return x * _TABLE.setdefault(tuple(x.shape), options.doubled)
"""


class Memoising(nn.Linear):
    """Calls a function of a library that has a memo table, as einops has, with an object of its that has a memo."""

    def __init__(self, library):
        super().__init__(4, 4)
        self.options, self.scaled = library.Options(), library.scaled

    def forward(self, x):
        return self.scaled(super().forward(x), self.options)


@pytest.mark.parametrize("installed", [True, False])
def test_memo_tables_of_libraries_do_not_count(installed, tmp_path, monkeypatch):
    """Installed is what a distribution's metadata lists, in any folder of the path; all else is the user's."""
    name = f"memoising_{'library' if installed else 'script'}"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    if installed:
        (tmp_path / "memoising-1.0.dist-info").mkdir()
        (tmp_path / "memoising-1.0.dist-info" / "RECORD").write_text(f"{name}.py,sha256=,1\nother.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = Memoising(importlib.import_module(name))
    before = keyed(module)
    module(torch.zeros(2, 4))
    differences = keyed(module).differences(before)
    assert vars(module.options)["doubled"] == 4.0
    assert (
        differences == []
        if installed
        else [line.partition(":")[0] for line in differences] == [f"source of {name}.scaled"]
    )


def _changed(folder, base, what, monkeypatch):
    """Makes a folder one that another user could write."""
    if what == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif what == "link":
        (base / "_parallel_modules").rename(base.parent / "elsewhere")
        (base / "_parallel_modules").symlink_to(base.parent / "elsewhere")
    elif what == "file":
        (folder.path / "gencode0.py").chmod(0o666)
    else:
        monkeypatch.setattr(os, "getegid", lambda: 12345)
        (folder.path if what == "group" else folder.path.parent).chmod(0o775 if what == "group" else 0o777)


@pytest.mark.parametrize("what", ["owner", "link", "file", "group", "folder above"])
def test_code_that_another_user_could_have_written_does_not_run(what, tmp_path, monkeypatch):
    """In the default folder; the one that is named by gen_savedir= is trusted."""
    base = tmp_path / "generated"
    GeneratedFolder(base, Net).write(keyed(), {"gencode0.py": "VALUE = 1"})
    assert GeneratedFolder(base, Net, only_owned=True).read().module("gencode0.py").VALUE == 1
    _changed(GeneratedFolder(base, Net), base, what, monkeypatch)
    refused = GeneratedFolder(base, Net, only_owned=True)
    for use in (refused.read, lambda: refused.state(keyed())):
        with pytest.raises(ForeignFilesError, match=r": code in it does not run\. .* by gen_savedir="):
            use()
    assert GeneratedFolder(base, Net).read().module("gencode0.py").VALUE == 1


def test_the_default_folder_is_checked_and_a_named_one_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    class Noted(GeneratedFolder):
        def __init__(self, *args, **options):
            calls.append(options["only_owned"])
            raise ZeroDivisionError

    monkeypatch.setattr(api, "GeneratedFolder", Noted)
    for options in ({}, {"gen_savedir": "./.nnscaler"}, {"gen_savedir": tmp_path}):
        with pytest.raises(ZeroDivisionError):
            api.parallelize(Net(), {"x": torch.zeros(2, 4)}, "tp", ComputeConfig(2, 2), load_module=False, **options)
    assert calls == [True, True, False]


@pytest.mark.parametrize("umask, mode", [(0o077, 0o700), (0o022, 0o755), (0o002, 0o775)])
def test_folders_have_the_mode_of_the_umask(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        folder = GeneratedFolder(tmp_path / "generated", Net)
        folder.write(keyed(), {"gencode0.py": "VALUE = 1"})
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o777 == mode
    assert (folder.path / "gencode0.py").stat().st_mode & 0o777 == mode & 0o666
