"""Documents of unequal lengths, packed into rows of one length (arXiv:2107.02027).

A token of a row sees its document only: `position_ids` restart at each, which is how models of transformers, those of
`hf.swap` and attention over context-parallel ranks recognise packed documents. Labels at the first tokens are -100,
since losses of transformers predict a token from the one before it, here that of another document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["pack"]

_IGNORED = -100


def pack(
    examples: Mapping[str, Sequence[Sequence[int]]],
    length: int,
    *,
    strategy: str = "first_fit",
    long: str = "split",
    pad_token_id: int = 0,
) -> dict[str, list[list[int]]]:
    """Packs tokenised documents into rows of `length` tokens: columns `input_ids`, `labels` and `position_ids`.

    A function for `datasets`: `data.map(partial(pack, length=2048), batched=True, remove_columns=data.column_names)`,
    which packs the documents of a `batch_size` together. The end of a row is filled with padding: a document of its
    own, without labels.

    Args:
        examples: `input_ids` of each document and, where not all tokens are to be learned, `labels`. Other columns are
            left out. Empty documents, too.
        strategy: "first_fit": a document lies in the first row with enough room, the longest documents first, so that
            none is cut that fits a row; "wrapped": documents in their order, cut where rows end, without padding but in
            the last row.
        long: with "first_fit", treatment of documents of more than `length` tokens: "split" them, or "refuse" them.

    Raises:
        ValueError: a document is too long to be packed or has padding, or `labels` are not one for each token.
    """
    if strategy not in ("first_fit", "wrapped") or long not in ("split", "refuse"):
        raise ValueError(
            f'strategy={strategy!r} must be "first_fit" or "wrapped", and long={long!r} "split" or "refuse"'
        )
    if length < 1:
        raise ValueError(f"length={length}: a row has at least 1 token")
    documents = _documents(examples)
    if strategy == "first_fit":
        longest = max((len(ids) for ids, _ in documents), default=0)
        if longest > length and long == "refuse":
            raise ValueError(
                f'a document has {longest} tokens, and a row {length}: take longer rows, or long="split" to cut it'
            )
        pieces = [
            (ids[start : start + length], labels[start : start + length])
            for ids, labels in documents
            for start in range(0, len(ids), length)
        ]
        rows = _first_fit(pieces, length)
    else:
        rows = _wrapped(documents, length)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        padding = length - sum(len(ids) for ids, _ in row)
        if padding:
            row = [*row, ([pad_token_id] * padding, [_IGNORED] * padding)]
        columns["input_ids"].append([token for ids, _ in row for token in ids])
        columns["labels"].append([label for _, labels in row for label in (_IGNORED, *labels[1:])])
        columns["position_ids"].append([position for ids, _ in row for position in range(len(ids))])
    return columns


_Document = tuple[list[int], list[int]]  # tokens and labels


def _documents(examples: Mapping[str, Sequence[Sequence[int]]]) -> list[_Document]:
    ids: list[list[int]] = [list(map(int, tokens)) for tokens in examples["input_ids"]]
    labels: Any = examples.get("labels", ids)
    if padded := sum(0 in mask for mask in examples.get("attention_mask", ())):
        raise ValueError(
            f"{padded} of {len(ids)} documents have padding, by attention_mask: tokenise with padding=False"
        )
    documents = []
    for number, (tokens, targets) in enumerate(zip(ids, labels, strict=True)):
        if len(tokens) != len(targets):
            raise ValueError(
                f"document {number} has {len(tokens)} tokens and {len(targets)} labels: give each token a label, its "
                "id or -100"
            )
        if tokens:
            documents.append((tokens, list(map(int, targets))))
    return documents


def _first_fit(documents: list[_Document], length: int) -> list[list[_Document]]:
    rows: list[list[_Document]] = []
    room: list[int] = []
    for document in sorted(documents, key=lambda document: -len(document[0])):  # stable
        size = len(document[0])
        row = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(document)
        room[row] -= size
    return rows


def _wrapped(documents: list[_Document], length: int) -> list[list[_Document]]:
    rows: list[list[_Document]] = []
    room = 0
    for ids, labels in documents:
        start = 0
        while start < len(ids):
            if room == 0:
                rows.append([])
                room = length
            stop = min(len(ids), start + room)
            rows[-1].append((ids[start:stop], labels[start:stop]))
            room -= stop - start
            start = stop
    return rows
