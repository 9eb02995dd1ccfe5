"""Safe use of files: names that foreign files contain stay below their folder, and nothing is written through a link.

A foreign file is one that another person may have written: a manifest, a result.json, a log. Needs the standard library
only."""
from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished"             # begins the names of files and folders that get their final name when complete

class ToolError(Exception):
    """Says what was found, what was expected, and what to do about it."""

    def __init__(self, what: str, found: object, expected: object, hint: str) -> None:
        super().__init__(f"{what}\n  found:    {found}\n  expected: {expected}\n  hint:     {hint}")

def inside(folder: Path, name: object) -> Path:
    """Return the path of what a foreign file names in `folder`. Raises ToolError if the name is absolute, empty or has
    "..", or if a link leads out of the folder."""
    parts: tuple[str, ...] = ()
    if isinstance(name, str) and "\0" not in name:
        parts = Path(name).parts
    if parts and ".." not in parts and not os.path.isabs(name):
        path = folder / name
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            return path
    raise ToolError(f"name in a file of {folder}", found=repr(name),
                    expected="a path below this folder, without .. and without a link that leads out of it",
                    hint="do not trust the file; restore it, or leave it out")

def unfinished_name(folder: Path) -> Path:
    """Return a random name in `folder` for a file or folder that later gets its final name."""
    return folder / f"{UNFINISHED}-{secrets.token_hex(4)}"

def write_bytes(path: Path, data: bytes) -> None:
    """Write a file beside `path` and rename it to `path`. A link of this name is replaced, and its target is unchanged.
    Raises ToolError if a folder, a pipe or a device has the name."""
    if path.exists() and not path.is_file():
        raise ToolError(f"file {path}", found="a folder, a pipe or a device", expected="a file, or no such name",
                        hint="give another name")
    beside = unfinished_name(path.parent)
    file = open(beside, "xb")
    try:
        with file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise

def open_no_link(name: str, flags: int) -> int:
    """Open a file without following a link and, if it is a named pipe, without waiting."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

def open_to_append(path: Path) -> BinaryIO:
    """Open a file to read and to append to; it is created if it is missing. Raises ToolError for a link, a file with
    several names (hard links), a pipe or a device."""
    try:
        file = open(path, "ab+", opener=open_no_link)
    except OSError:
        if not path.is_symlink():
            raise
    else:
        about = os.fstat(file.fileno())
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            return file
        file.close()
    raise ToolError(f"file {path}", found="a link, a pipe or a device",
                    expected="a regular file with one name, or none", hint="move it away, or give another folder")
