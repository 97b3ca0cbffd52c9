"""Generated files: their folder, the key that they were generated from, and their reuse.

    gen_savedir/_parallel_modules/<module>/<qualname>/<instance_name or _>/
        manifest.json                  the key of these files, their sizes and digests
        *.py, *.json                   what `parallelize` emitted
        weights/model.safetensors      initial parameters and buffers, whole

    folder = GeneratedFolder("./.nnscaler", type(module))
    key = key_of(Example(module, arguments), policy, config)
    folder.state(key)                              # "empty", "same", "same program", "different"
    folder.write(key, {"gencode0.py": source}, weights)
    generated = folder.read(key)                   # a `Generated`
    generated.module("gencode0.py").some_name      # runs the code, if it is what was written
    generated.weights()["layers.0.weight"]

A folder is written beside the old one and swapped in, so that it is always complete: a failure leaves the old one, and
of two processes that write at once the last one wins.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import xxhash

from ...folder_names import leading_out
from ...hf.sources import StateDict, WeightSource, open_source
from ...hf.writing import write_weights
from ...weights.host_memory import as_bytes
from .fingerprint import digest
from .keys import Key
from .ownership import writable_by_others

__all__ = ["MANIFEST", "WEIGHTS", "ForeignFilesError", "Generated", "GeneratedFilesError", "GeneratedFolder", "Weights"]

_WRITER, _FORMAT = "neuronx_dist.parallelize", 1
MANIFEST = "manifest.json"
WEIGHTS = "weights"


class GeneratedFilesError(RuntimeError):
    """Generated files that belong to another module, are damaged or missing; the message says what to do."""


class ForeignFilesError(GeneratedFilesError):
    """A folder with files that `parallelize` did not write, or another user could have; it never removes them."""


class Weights(Mapping[str, torch.Tensor]):
    """Unsharded initial weights by name, each read at its first use, and compared with its checksum."""

    def __init__(self, source: WeightSource, checksums: Mapping[str, str], folder: Path) -> None:
        self._source, self._checksums, self._folder = source, checksums, folder

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._checksums:
            raise KeyError(f"{self._folder} has no weight {name!r}")
        tensor = self._source.read(name)
        if _checksum(tensor) != self._checksums[name]:
            raise _damaged(self._folder, f"the values of {name!r} differ from those that were written")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._checksums)

    def __len__(self) -> int:
        return len(self._checksums)


class Generated:
    """The files of a folder at the time when it was read.

    Attributes:
        path: the folder.
        key: the key that the files were generated from.
        files: contents of all files but the weights, by name.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], files: dict[str, bytes]) -> None:
        self.path, self.files, self.manifest = path, files, manifest
        self._weights: Weights | None = None
        self.key = Key(manifest["program"], manifest["choice"])

    def text(self, name: str) -> str:
        """Returns the text of a file.

        Raises:
            GeneratedFilesError: no file has this name.
        """
        if name not in self.files:
            raise GeneratedFilesError(f"{self.path} has no {name}; it has {', '.join(sorted(self.files))}")
        return self.files[name].decode()

    def module(self, name: str) -> ModuleType:
        """Imports a file as a Python module; each call runs its code, which was compared with its digest."""
        text = self.text(name)
        module = ModuleType(f"parallel_modules.{digest(str(self.path / name) + text)[:16]}")
        module.__file__ = str(self.path / name)
        sys.modules[module.__name__] = module  # `inspect` and pickle look there
        exec(compile(text, module.__file__, "exec"), vars(module))
        return module

    @property
    def has_weights(self) -> bool:
        """Returns whether the initial weights were written, and sent to this host."""
        names = [name for name in self.manifest["files"] if name.startswith(WEIGHTS + "/")]
        return bool(names) and all((self.path / name).is_file() for name in names)

    @property
    def values_digest(self) -> str:
        """A digest of the initial weights; "" without initial weights."""
        checksums = self.manifest["weights"]
        return digest(json.dumps(checksums, sort_keys=True)) if checksums else ""

    def has_values(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Returns whether these are the initial weights; `tensors` may have more. A module without tensors has none."""
        checksums = self.manifest["weights"]
        return bool(checksums) == bool(tensors) and all(
            _checksum(tensors[name].detach().cpu()) == checksums[name] for name in checksums
        )

    def weights(self) -> Weights:
        """Opens the initial weights, once: an open file stays as it was when another run replaces the folder.

        Raises:
            GeneratedFilesError: the weights are not here, or damaged.
        """
        if self._weights is None:
            self._weights = self._opened()
        return self._weights

    def _opened(self) -> Weights:
        if not self.has_weights:
            raise GeneratedFilesError(
                f"{self.path} has no initial weights: broadcast_strategy did not send them to this rank, or the module "
                "was built on meta. Pass init_module_params=False, and load weights or call broadcast_weights(module)"
            )
        try:
            source = open_source(self.path / WEIGHTS)
            if {*source.names()} != self.manifest["weights"].keys():
                raise ValueError(f"{WEIGHTS} and {MANIFEST} have different names")
            return Weights(source, self.manifest["weights"], self.path)
        except (ValueError, OSError) as error:
            raise _damaged(self.path, str(error)) from error


class GeneratedFolder:
    """The folder of one module class and instance name; see the top of this file.

    Args:
        gen_savedir: where all generated files are.
        module_class: the class of the module.
        instance_name: tells apart what is generated for one class; None: "_".
        only_owned: refuse files that another user could have written, since their code runs; False where the user has
            named the folder.

    Attributes:
        path: of the folder.

    Raises:
        ValueError: the instance name is no identifier.
    """

    def __init__(
        self,
        gen_savedir: str | os.PathLike[str],
        module_class: type,
        instance_name: str | None = None,
        *,
        only_owned: bool = False,
    ) -> None:
        name = "_" if instance_name is None else instance_name
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                f"instance_name {instance_name!r} becomes part of a module's name, so it must be a Python identifier: "
                f"use letters, digits and _, such as {re.sub(r'[^0-9a-zA-Z_]', '_', f'_{name}')!r}"
            )
        parts = [*module_class.__module__.split("."), *module_class.__qualname__.split("."), name]
        self.path = Path(gen_savedir, "_parallel_modules", *(re.sub(r"[^\w]", "_", part) for part in parts)).resolve()
        self._base = Path(gen_savedir).resolve() if only_owned else None

    def state(self, key: Key) -> str:
        """Compares the folder's key with a key: "empty", "same", "same program" (another choice), "different".

        Raises:
            GeneratedFilesError: the files are damaged, or were written by another program.
        """
        generated = self._read()
        if generated is None:
            return "empty"
        if generated.key == key:
            return "same"
        return "same program" if generated.key.program == key.program else "different"

    def read(self, key: Key | None = None) -> Generated:
        """Reads the folder's files, and compares them with their digests.

        Raises:
            GeneratedFilesError: there are no files, or they have another key (the message says what differs), are
                damaged, or were written by another program.
        """
        generated = self._read()
        if generated is None:
            raise GeneratedFilesError(
                f"{self.path} has no generated files: parallelize generates them on rank 0; share the folder, copy it, "
                "or pass broadcast_strategy='all'"
            )
        if key is not None:
            self.check_same(generated.key, key)
        return generated

    def check_same(self, written: Key, key: Key) -> None:
        """Refuses files of another key.

        Raises:
            GeneratedFilesError: the keys differ; the message says in which parts.
        """
        lines = written.differences(key)
        if lines:
            more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
            raise GeneratedFilesError(
                f"{self.path} was generated from other inputs (generated from -> now):\n  "
                + "\n  ".join(lines[:8])
                + f"{more}\nPass reuse='override' (or 'moo', which reuses what matches), another instance_name or "
                "gen_savedir"
            )

    def write(
        self,
        key: Key,
        files: Mapping[str, str],
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        keep_weights: bool = False,
        replace: bool = True,
    ) -> None:
        """Replaces the folder by new files.

        Args:
            weights: whole initial parameters and buffers, those that are not persistent too; None: there are none.
            keep_weights: keep the weights of the folder.
            replace: False: refuse to replace files of another key, which another process may have written meanwhile.

        Raises:
            GeneratedFilesError: the folder has files that are not ours, or with replace=False of another key.
        """
        with self.beside() as new:
            for name, text in files.items():
                (new / name).write_text(text)
            checksums: dict[str, str] = {}
            if keep_weights and (old := self._read()) is not None and old.has_weights:
                shutil.copytree(self.path / WEIGHTS, new / WEIGHTS, copy_function=_link)
                checksums = old.manifest["weights"]
            elif weights:
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
                write_weights(StateDict(tensors), new / WEIGHTS)
                checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
            manifest = {
                "written by": _WRITER,
                "format": _FORMAT,
                **asdict(key),
                "files": {name: _file_entry(new, name) for name in _names_in(new)},
                "weights": checksums,
            }
            (new / MANIFEST).write_text(json.dumps(manifest, indent=1))
            self.swap(new, None if replace else key)

    @contextmanager
    def beside(self) -> Iterator[Path]:
        """Makes a new folder beside this one, and removes it at the end if it is still there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.new")
        new.mkdir()  # with the mode that the user's umask says
        try:
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def swap(self, new: Path, only_over: Key | None = None) -> None:
        """Replaces this folder by another one."""
        with self._locked():
            try:
                old = self._read_locked()
            except ForeignFilesError:
                raise
            except GeneratedFilesError:  # damaged
                old = None
            if only_over is not None and old is not None:
                self.check_same(old.key, only_over)
            backup = self._backup
            shutil.rmtree(backup, ignore_errors=True)
            if self.path.exists():
                self.path.rename(backup)
            new.rename(self.path)
            shutil.rmtree(backup, ignore_errors=True)

    @property
    def _backup(self) -> Path:
        return self.path.with_name(f".{self.path.name}.old")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks this folder for one process or thread, if the file system has locks."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_name(f".{self.path.name}.lock"), "a") as stream:
            with suppress(OSError):  # some network file systems have none
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _read(self) -> Generated | None:
        fault = "" if self._base is None else writable_by_others(self._base, self.path)
        if fault:
            raise ForeignFilesError(
                f"{fault}: code in it does not run. Remove {self._base}, or name the folder that you trust by "
                "gen_savedir="
            )
        if not self.path.exists() and not self._backup.exists():
            return None
        with self._locked():
            return self._read_locked()

    def whole_files(self) -> set[str]:
        """Returns the names of files that agree with their manifest, whatever their key; weights by their size."""
        try:
            generated = self._read()
        except GeneratedFilesError:
            return set()
        return (
            set()
            if generated is None
            else {name for name in generated.manifest["files"] if (self.path / name).is_file()}
        )

    def _read_locked(self) -> Generated | None:
        if not self.path.exists() and self._backup.exists():  # a process ended between two renames
            self._backup.rename(self.path)
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return None
        manifest = _manifest(self.path)
        files = {}
        for name, entry in manifest["files"].items():
            path = self.path / name
            if name.startswith(WEIGHTS + "/"):  # large: their size, and each tensor when it is read
                if path.exists() and path.stat().st_size != entry["bytes"]:
                    raise _damaged(self.path, f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}")
                continue
            if not path.is_file():
                raise _damaged(self.path, f"{name} is missing")
            files[name] = path.read_bytes()
            if digest(files[name]) != entry["sha256"]:
                raise _damaged(self.path, f"{name} differs from what was written")
        return Generated(self.path, manifest, files)


def _manifest(path: Path) -> dict[str, Any]:
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else ["a file"]
    foreign = ForeignFilesError(
        f"{path} holds {', '.join(names[:4])}, which parallelize did not write and will not remove: "
        "choose another gen_savedir or instance_name, or remove the folder"
    )
    if MANIFEST not in names:
        raise foreign
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("written by") != _WRITER:
        raise foreign
    if manifest.get("format") != _FORMAT or not {"program", "choice", "files", "weights"} <= manifest.keys():
        raise _damaged(path, f"{MANIFEST} is of format {manifest.get('format')}, this package reads {_FORMAT}")
    files, weights = manifest["files"], manifest["weights"]
    entries = [*files.values()] if isinstance(files, dict) else []
    tables = [manifest["program"], manifest["choice"], files, weights, *entries]
    texts = [manifest["program"], manifest["choice"], weights]
    if (
        not all(isinstance(table, dict) for table in tables)
        or not all(isinstance(text, str) for table in texts for text in table.values())
        or not all(isinstance(entry.get("bytes"), int) for entry in entries)
        or not all(isinstance(files[name].get("sha256"), str) for name in files if not name.startswith(WEIGHTS + "/"))
    ):
        raise _damaged(path, f"{MANIFEST} has entries of other types than this package writes")
    outside = leading_out(files)
    if outside:
        raise _damaged(path, f"{MANIFEST} names {', '.join(outside[:3])}, outside of the folder: do not trust it")
    return manifest


def _damaged(path: Path, what: str) -> GeneratedFilesError:
    return GeneratedFilesError(f"{path} is damaged: {what}. Pass reuse='override' to generate it anew, or remove it")


def _names_in(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def _file_entry(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if name.startswith(WEIGHTS + "/"):
        return {"bytes": path.stat().st_size}
    return {"bytes": path.stat().st_size, "sha256": digest(path.read_bytes())}


def _checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(as_bytes(tensor.contiguous()))


def _link(source: str, target: str) -> None:
    """Links a file, which nobody writes to, under a second name; copies it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
