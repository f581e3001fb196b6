"""Read untrusted JSON, TOML and files within limits, write files atomically, open many of them."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_NESTING_LEVELS = 100  # of tables and lists; hand-written files have fewer than ten

# tomllib's memory is quadratic in the parts of a key: 6,000 parts, 12 KB of text, took 150 MB
_KEY = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_DOTTED_KEY = re.compile(rf"(?<![\w.-]){_KEY}(?:[ \t]*\.[ \t]*{_KEY}){{{MAX_NESTING_LEVELS}}}")

# of URLs that are opened: file systems that read what the URL names
_SCHEMES = (
    *("file", "memory", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"),
    *("hdfs", "webhdfs", "ftp", "sftp", "ssh", "smb", "hf", "oci", "oss"),
)


def parse_json(content: str | bytes) -> Any:
    """Parse JSON; raises ValueError if it is invalid or nested deeper than MAX_NESTING_LEVELS."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raises ValueError if it is invalid or nested deeper than MAX_NESTING_LEVELS."""
    if _LONG_DOTTED_KEY.search(text):
        raise ValueError(f"a dotted key has more than {MAX_NESTING_LEVELS} parts")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(table)
    return table


def _check_depth(value: Any) -> None:
    """Raise ValueError if lists and tables nest so deeply that recursive code could overflow."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(MAX_NESTING_LEVELS):
        if not level:
            return
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in (dict, list)
        ]
    if level:
        raise ValueError(f"nested too deeply: more than {MAX_NESTING_LEVELS} levels")


def read_regular_file(path: str | Path, max_bytes: int | None = None) -> bytes:
    """Read a file; raises OSError for a FIFO or a device, and for more than `max_bytes`."""
    mode = os.stat(path).st_mode  # before open(), which has effects on some devices
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    with open(path, "rb") as file:
        content = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes", str(path))
    return content


def write_file_atomically(path: Path, content: bytes) -> None:
    """Replace the content of `path`; a crash or an OSError leaves the old or the new content."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def make_private_folder(parent: Path | None = None) -> Path:
    """This user's folder in `parent`, or in the temporary folder.

    Raises OSError if others can write to it: its name can be guessed, so they may have made it.
    """
    folder = (parent or Path(tempfile.gettempdir())) / f"titanlite_{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "other users can write to it", str(folder))
    return folder


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files, sockets included, to the hard one; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a sandbox may forbid it, and macOS has a lower maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def fsync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_url(url: str) -> None:
    """Raise ValueError for a URL that fsspec may read elsewhere than it says.

    These are a chain (`a::b`), and a scheme whose files refer to other URLs, as `reference://`.
    """
    if url.partition("://")[0] not in _SCHEMES or "::" in url:
        raise ValueError(f"it is not one URL of {', '.join(_SCHEMES)}")
