"""NxD's `utils.utils`: names of hardware, and a JSON file as a dict."""

from __future__ import annotations

import json
import os
from enum import Enum
from typing import Any

__all__ = ["HloMetadataLevel", "get_dict_from_json", "hardware"]


class hardware(Enum):
    """Generations of Neuron devices: `hardware("trn1")`, with `inf2` and `trn1n` as TRN1."""

    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"

    @classmethod
    def _missing_(cls, value: object) -> hardware | None:
        return cls.TRN1 if value in ("trn1n", "inf2") else None


class HloMetadataLevel(Enum):
    """Levels of the metadata that Neuron's compiler writes: True is DEBUG, False INFO."""

    DEBUG = "debug"
    INFO = "info"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> HloMetadataLevel | None:
        return {True: cls.DEBUG, False: cls.INFO}.get(value) if isinstance(value, bool) else None


def get_dict_from_json(json_file: str | os.PathLike[str]) -> dict[Any, Any]:
    """Reads a JSON file.

    Raises:
        ValueError: there is no such file, or it is no JSON.
    """
    try:
        with open(json_file, encoding="utf-8") as file:
            content: dict[Any, Any] = json.load(file)
    except FileNotFoundError as error:
        raise ValueError(f"JSON file not found at {json_file!r}") from error
    except ValueError as error:
        raise ValueError(f"Failed to parse JSON file {json_file!r}: {error}") from error
    return content
