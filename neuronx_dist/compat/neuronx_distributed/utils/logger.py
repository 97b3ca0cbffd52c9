"""NxD's logger: to standard output, of rank 0, at the level of `NXD_LOG_LEVEL`."""

from __future__ import annotations

import logging
import os
import sys

import torch

__all__ = ["PackagePathFilter", "get_log_level", "get_logger"]

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.FATAL,
    "off": logging.FATAL + 1,
}


def get_log_level() -> int:
    """Returns the level of `NXD_LOG_LEVEL`: trace, debug, info (the default), warning, error, fatal, off."""
    name = os.environ.get("NXD_LOG_LEVEL", "info").lower()
    if name not in _LEVELS:
        raise ValueError(f"NXD_LOG_LEVEL is one of {', '.join(_LEVELS)}, got {name!r}")
    return _LEVELS[name]


class PackagePathFilter(logging.Filter):
    """Sets `relativepath` of a record: the path of its file, relative to the entry of `sys.path` that contains it."""

    def filter(self, record: logging.LogRecord) -> bool:
        folders = sorted((os.path.join(os.path.abspath(path), "") for path in sys.path), key=len, reverse=True)
        found = next((folder for folder in folders if record.pathname.startswith(folder)), None)
        record.relativepath = record.pathname[len(found) :] if found else record.pathname
        return True


class _Rank0(logging.Filter):
    """Passes records of rank 0 only, which may be known later than the logger is made."""

    def filter(self, record: logging.LogRecord) -> bool:
        running = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_rank() if running else int(os.environ.get("RANK", "0"))) == 0


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """Returns a logger to standard output, of rank 0 or of all ranks."""
    logger = logging.getLogger(f"{name}[{0 if rank0_only else ''}]")
    if not logger.handlers:
        hides_time = os.environ.get("NXD_LOG_HIDE_TIME", "false").lower() in ("true", "1")
        time = "" if hides_time else "%(asctime)s.%(msecs)03d: "
        handler = logging.StreamHandler(sys.stdout)
        text = f"[{time}%(levelname).1s %(relativepath)s:%(lineno)d] %(message)s"
        handler.setFormatter(logging.Formatter(text, "%Y-%m-%d %H:%M:%S"))
        handler.addFilter(PackagePathFilter())
        logger.addHandler(handler)
        if rank0_only:
            logger.addFilter(_Rank0())
        logger.setLevel(get_log_level())
        logger.propagate = False
    return logger
