"""Text for a causal LM: files or folders as one stream of tokens, and batches that depend on (seed, step) only.

Without a tokenizer a token is a byte and the vocabulary is 256. Without paths the text is Python's own library sources,
which every machine has. Every 20th block of the stream is held out for evaluation.
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["ByteTokenizer", "TextStream"]

HELD_OUT = 20  # one block in so many
BLOCK = 32768  # tokens


class ByteTokenizer:
    """A token is a byte; 0, which no text holds, ends a document."""

    vocab_size = 256
    eos_token_id = 0

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class TextStream:
    """A token stream in memory, cut into training text and held-out text.

    Args:
        paths: files and folders (with all the text files below them); None or empty for Python's library sources.
        global_batch: sequences in a batch, over all data-parallel ranks.
        tokenizer: a Hugging Face tokenizer, or None for bytes.
        max_bytes: how much text is read, from files in an order that is shuffled but always the same; None: all.

    Attributes:
        summary: a line that says how much was read, of how much.

    Raises:
        ValueError: a path does not exist, there is no text, or too little for one sequence of `seq_len` tokens.
    """

    def __init__(
        self,
        paths: Sequence[str | Path] | None = None,
        *,
        seq_len: int,
        global_batch: int,
        seed: int = 0,
        tokenizer: Any = None,
        max_bytes: int | None = 4 << 20,
    ) -> None:
        self.seq_len, self.global_batch, self.seed = seq_len, global_batch, seed
        self.tokenizer = tokenizer if tokenizer is not None else ByteTokenizer()
        source = ", ".join(map(str, paths)) if paths else "Python's library sources"
        files = _files(paths) if paths else _library_sources()
        whole = sum(path.stat().st_size for path in files)
        self._bytes_read = 0
        documents = list(self._tokens(files, whole if max_bytes is None else max_bytes))
        if not documents:
            raise ValueError(f"data: no text in {source}; give text files, or folders that hold some")
        read_mb, whole_mb = self._bytes_read / 2**20, whole / 2**20
        self.summary = f"text: {read_mb:.2f} of {whole_mb:.2f} MiB, from {len(documents):,} of {len(files):,} files of "
        self.summary += source + (" (--data-limit sets how much is read)" if self._bytes_read < whole else "")
        stream = torch.cat(documents)

        block = max(1, min(BLOCK, len(stream) // HELD_OUT))
        held = (torch.arange(len(stream)) // block) % HELD_OUT == HELD_OUT - 1
        self.train, self.held_out = stream[~held], stream[held]
        shortest = min(len(self.train), len(self.held_out))
        if shortest < seq_len:
            raise ValueError(
                f"data: {source} gives {len(self.train):,} tokens to train on and {len(self.held_out):,} held out, "
                f"and a sequence takes {seq_len:,}; give more text, or use a seq_len of at most {shortest:,}"
            )

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else self.tokenizer.vocab_size

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The global batch of a training step: `input_ids` and `labels`, [global_batch, seq_len] each.

        They are equal: the loss shifts.
        """
        draw = random.Random(f"{self.seed}/{step}")  # a string, so that seed 1 step 2 has nothing of seed 2 step 1
        starts = [draw.randrange(len(self.train) - self.seq_len + 1) for _ in range(self.global_batch)]
        return self._windows(self.train, starts)

    def held_out_batch(self, index: int = 0) -> dict[str, torch.Tensor]:
        """Batch `index` of the held-out text: windows one after another, from the start again after the last."""
        count = len(self.held_out) // self.seq_len
        rows = range(index * self.global_batch, (index + 1) * self.global_batch)
        return self._windows(self.held_out, [row % count * self.seq_len for row in rows])

    @property
    def checksum(self) -> str:
        """Checksum of the tokens: two runs with equal checksum, seed and sizes train on the same batches."""
        return f"{zlib.crc32(self.train.numpy().data):08x}"

    def encode(self, text: str) -> list[int]:
        if isinstance(self.tokenizer, ByteTokenizer):
            return self.tokenizer.encode(text.encode())
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def continuation(self, folder: str | Path, prompt: str | None) -> str:
        """Returns a prompt and its likeliest continuation by a saved model, loaded as any Hugging Face model.

        Args:
            prompt: None: a random continuation of "def ".
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.tensor([self.encode("def " if prompt is None else prompt)])
        options: dict[str, Any] = dict(max_new_tokens=160, do_sample=True, temperature=0.7, top_k=20)
        if prompt is not None:
            options = dict(max_new_tokens=64, do_sample=False)
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=self.tokenizer.eos_token_id, **options
        )
        return self.decode(tokens[0].tolist())

    def _windows(self, stream: torch.Tensor, starts: list[int]) -> dict[str, torch.Tensor]:
        rows = torch.stack([stream[start : start + self.seq_len] for start in starts]).long()
        return {"input_ids": rows, "labels": rows.clone()}

    def _tokens(self, paths: list[Path], max_bytes: int) -> Iterator[torch.Tensor]:
        """The documents as tensors, each ended by the end-of-text token if the tokenizer has one."""
        end, left = self.tokenizer.eos_token_id, max_bytes
        for path in paths:
            text = path.read_bytes()[:left]
            if not text or b"\0" in text:  # empty, or not text
                continue
            left -= len(text)
            self._bytes_read += len(text)
            if isinstance(self.tokenizer, ByteTokenizer):
                yield torch.frombuffer(bytearray(text + bytes([end])), dtype=torch.uint8)
            else:
                tokens = self.encode(text.decode("utf-8", errors="replace"))
                yield torch.tensor(tokens + ([] if end is None else [end]), dtype=torch.int32)
            if left <= 0:
                return


def _library_sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    return _shuffled(path for path in root.rglob("*.py") if not skip & set(path.relative_to(root).parts))


def _files(paths: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = (p for p in path.rglob("*") if p.is_file())
            files += _shuffled(p for p in below if not any(part[0] == "." for part in p.relative_to(path).parts))
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(f"data: no file or folder {path} (seen from {Path.cwd()}); give paths that exist")
    return files


def _shuffled(paths: Iterable[Path]) -> list[Path]:
    """Sorted, then shuffled in a fixed way: the first megabytes of a folder are then a sample of all of it."""
    ordered = sorted(paths)
    random.Random(0).shuffle(ordered)
    return ordered
