"""Files that other people may have written: paths inside a directory, escaped text, compressed logs.

Reading NAME returns the contents of NAME, or of NAME.gz if only that exists, and hashes are of contents. This module
imports the standard library only, as `tests/dry_run/price.py` does.
"""
from __future__ import annotations

import errno
import gzip
import hashlib
import os
import secrets
import zlib
from pathlib import Path
from typing import TextIO

SUFFIX = ".gz"
# What reading a foreign file may raise: missing, no text, no JSON, nested too deeply, values of other types.
FOREIGN_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

class ToolError(Exception):
    """One sentence that says what is wrong, and what would work."""

def one_line(text: str) -> str:
    """Escape all characters that are not printable: line ends, terminal escapes, bytes without UTF-8."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

def say(text: str, file: TextIO | None = None) -> None:
    """Print a text of one or several lines, escaped."""
    print("\n".join(map(one_line, text.split("\n"))), file=file, flush=True)

def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

def inside(folder: Path, name: object) -> Path:
    """Return the path in `folder` that a foreign file names; ToolError if it is not below it, also through links."""
    if isinstance(name, str) and "\0" not in name and ".." not in Path(name).parts:
        path = folder / name
        real, above = os.path.realpath(path), os.path.realpath(folder)
        if path != folder and Path(real).is_relative_to(above) and not os.path.isabs(name):
            return path
    raise ToolError(f"a file of {folder} names {name!r}, which must be a path below this directory: restore the file")

def unfinished_name(folder: Path) -> Path:
    """Return a random path in `folder` for a file or directory that is renamed when it is complete."""
    return folder / f".unfinished-{secrets.token_hex(4)}"

def stored(path: Path) -> Path:
    """Return the path of a file as it is stored: `path`, or its compressed form if only that exists."""
    compressed = path.parent / (path.name + SUFFIX)       # path may be ".", without a name
    if compressed.exists() and not path.exists():
        return compressed
    return path

def uncompressed(path: Path) -> Path:
    """Return the path without .gz, the name under which hashes and tools list the file."""
    return path.with_suffix("") if path.suffix == SUFFIX else path

def read_bytes(path: Path) -> bytes:
    """Return the contents of a regular file, compressed or not; OSError if damaged."""
    path = stored(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))      # opening a pipe would block
    opener = {SUFFIX: gzip.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            return file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EINVAL, f"not a whole gzip file ({error})", str(path)) from None

def sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()

def write_bytes(path: Path, data: bytes) -> None:
    """Write a file beside `path` and rename it, so no link is followed; compress it if the name ends in .gz."""
    if path.suffix == SUFFIX:
        data = gzip.compress(data, 9, mtime=0)                            # equal data give equal bytes
    beside = unfinished_name(path.parent)
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
