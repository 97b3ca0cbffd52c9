"""Files of `torch.save`, read without running code, and without more memory than they have bytes."""

from __future__ import annotations

import io
import re
import warnings
import zipfile
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..torch_internals.tensors import pytree

__all__ = ["read_plain"]

# A tensor that `expand` made has fewer bytes in the file than in memory: position ids, masks. Above it is refused.
MAX_EXPANDED_BYTES = 64 << 20


def read_plain(source: str | PathLike[str] | bytes | memoryview, name: str = "", *, mmap: bool = False) -> Any:
    """Reads tensors on the CPU and plain data (numbers, strings, lists, dicts).

    Args:
        source: a file, or its content.
        name: of the content, for error messages.
        mmap: map the file into memory, if it is a zip (older than torch 1.6 it is none): pages are read on first use.

    Raises:
        ValueError: the fault of the file in one line, which begins with its name.
        FileNotFoundError: there is no such file.
    """
    content: Any = io.BytesIO(source) if isinstance(source, (bytes, memoryview)) else Path(source)
    try:
        is_zip = zipfile.is_zipfile(content)
        if is_zip:
            _check_zip(content)
        if isinstance(content, io.BytesIO):
            content.seek(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            value = torch.load(content, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
        for leaf in pytree.tree_leaves(value):
            _check_bytes(leaf)
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged bytes become errors of any class
        raise ValueError(f"{name or content} {_reason(content, error)}") from error
    return value


def _check_zip(content: Any) -> None:
    """Raises a ValueError if a file is larger in memory than on disk: `torch.save` compresses nothing."""
    with zipfile.ZipFile(content) as file:
        compressed = [entry.filename for entry in file.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise ValueError(f"is a zip with a compressed entry, {compressed[0][:100]}, which torch.save does not write")


def _check_bytes(leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_quantized:
        return
    nbytes, stored = leaf.numel() * leaf.element_size(), leaf.untyped_storage().nbytes()
    if nbytes > max(stored, MAX_EXPANDED_BYTES):
        raise ValueError(
            f"has a tensor {tuple(leaf.shape)} of {nbytes} bytes, of which {stored} are in the file; more than "
            f"{MAX_EXPANDED_BYTES} (MAX_EXPANDED_BYTES) are not expanded: save it contiguous, or do not trust this file"
        )


def _reason(content: Any, error: Exception) -> str:
    """One line that says what is wrong with a file that `torch.load` refused."""
    text = " ".join(str(error).split())
    if not isinstance(content, io.BytesIO):
        if content.is_dir():
            return "is a folder"
        with content.open("rb") as file:
            start, size = file.read(64), content.stat().st_size
    else:
        start, size = content.getvalue()[:64], len(content.getvalue())
    if not size:
        return "is empty"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer: fetch the file itself with `git lfs pull`"
    name = re.search(r"GLOBAL ([\w.]+)", text)
    if name:
        return f"holds more than tensors and plain data; nothing was executed: it refers to {name[1].rstrip('.')}"
    if isinstance(error, ValueError) and text.startswith(("is ", "has ")):
        return text
    if start.startswith(b"\x80"):
        return "is a plain pickle, or a damaged file of torch before 1.6; nothing was executed: save it by torch.save"
    if not start.startswith(b"PK\3\4"):
        return f"is no file of torch.save, or is damaged: its {size} bytes begin with {start[:8]!r}"
    return f"is truncated or damaged ({size} bytes, {type(error).__name__} while it was read): copy it again"
