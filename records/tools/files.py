"""Safe access to foreign files: paths, contents and text that another person may have written.

Foreign files are logs, manifests, a result.json, patches and trainers. Paths that they contain stay below their
directory, only regular files of a bounded size are read, their text is escaped before it is printed, and no write
follows a link.

Files may be compressed: reading NAME returns the contents of NAME, or of NAME.gz if only that exists. Hashes in a
record are of contents, so compressing or decompressing a file changes neither its name nor its hash. This module
imports the standard library only, as `tests/dry_run/price.py` does.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

SUFFIX = ".gz"
UNFINISHED = ".unfinished"             # name prefix of files and directories that are renamed when they are complete

LOCK_WAIT_S = 3.0                      # a run needs a moment to end after its tool was killed
LIMIT_MIB = 256                        # largest file that is read, and its largest decompressed size
# What reading a foreign file may raise, if it is missing, too large, no text, no JSON, nested too deeply, or JSON with
# values of other types than expected.
FOREIGN_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

def one_line(text: str) -> str:
    """Escape all characters that are not printable: line ends, terminal escapes, and bytes of a name without UTF-8."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

def say(text: str, file: TextIO | None = None) -> None:
    """Print a text of one or several lines, escaped."""
    print("\n".join(map(one_line, text.split("\n"))), file=file, flush=True)

def counted(number: int, noun: str) -> str:
    """Return a number with its noun, for example "1 run" or "2 runs"."""
    return f"{number} {noun}{'s' * (number != 1)}"

class ToolError(Exception):
    """An error that says what is wrong, what was found, what was expected, and how to fix it."""

    def __init__(self, what: str, found: object, expected: object, hint: str) -> None:
        parts = (str(part).replace("\n", "\n" + " " * 12) for part in (found, expected, hint))
        super().__init__("{}\n  found:    {}\n  expected: {}\n  hint:     {}".format(one_line(what), *parts))

def inside(folder: Path, name: object) -> Path:
    """Return the path in `folder` that a foreign file names.

    Raises ToolError if the name is absolute, empty or not a string, contains ".." or a NUL, or if a link leads out of
    the directory.
    """
    parts: tuple[str, ...] = ()
    if isinstance(name, str) and "\0" not in name:
        parts = Path(name).parts
    if parts and ".." not in parts and not os.path.isabs(name):
        path = folder / name
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            return path
    raise ToolError(f"path in a file of {folder}", found=repr(name),
                    expected="a path below this directory, without .. and without links that lead out of it",
                    hint="do not trust the file: restore it, or leave it out")

def unfinished_name(folder: Path) -> Path:
    """Return a random path in `folder` for a file or directory that is renamed when it is complete."""
    return folder / f"{UNFINISHED}-{secrets.token_hex(4)}"

def stored(path: Path) -> Path:
    """Return the path of a file as it is stored: `path`, or its compressed form if only that exists."""
    compressed = path.with_name(path.name + SUFFIX)
    return compressed if compressed.exists() and not path.exists() else path

def uncompressed(path: Path) -> Path:
    """Return the path without .gz, the name under which hashes and tools list the file."""
    return path.with_suffix("") if path.suffix == SUFFIX else path

def write_bytes(path: Path, data: bytes) -> None:
    """Write a temporary file in the same directory, and rename it to `path`; compress it if its name ends in .gz.

    Equal data give equal bytes, because the gzip header has no time and no file name. A link at `path` is replaced, and
    its target does not change. Raises ToolError if `path` is a directory, a pipe or a device, and OSError for more data
    to compress than `read_bytes` accepts.
    """
    if path.suffix == SUFFIX:
        if len(data) > LIMIT_MIB << 20:
            raise OSError(errno.EFBIG, f"more than {LIMIT_MIB} MiB to compress", str(path))
        data = gzip.compress(data, 9, mtime=0)
    if path.exists() and not path.is_file():
        raise ToolError(f"file {path}", found="a directory, a pipe or a device", expected="a file, or no file",
                        hint="choose another name")
    beside = unfinished_name(path.parent)
    file = open(beside, "xb")
    try:
        with file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise

def open_without_waiting(name: str, flags: int) -> int:
    """Open a file without blocking if it is a named pipe; an `opener` for open()."""
    return os.open(name, flags | os.O_NONBLOCK)

@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; every OSError in the block names it.

    Raises OSError for a directory, a pipe or a device.
    """
    try:
        with open(path, "rb", opener=open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            yield file
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from None

def read_bytes(path: Path) -> bytes:
    """Return the contents of a file, compressed or not.

    Raises OSError, also if the file is not a regular one, is damaged, or has more than LIMIT_MIB before or after it is
    decompressed: a foreign file of a few KB can expand to several GB.
    """
    path = stored(path)
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > LIMIT_MIB << 20:
            raise OSError(errno.EFBIG, f"more than {LIMIT_MIB} MiB")
        if path.suffix != SUFFIX:
            return file.read()
        try:
            data = gzip.GzipFile(fileobj=file).read((LIMIT_MIB << 20) + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(errno.EINVAL, f"not a whole gzip file ({error})") from None
        if len(data) > LIMIT_MIB << 20:
            raise OSError(errno.EFBIG, f"more than {LIMIT_MIB} MiB when decompressed")
        return data

def sha256(path: Path) -> str:
    """Return the sha256 of the contents of a file, compressed or not; a file of any size needs little memory.

    Raises OSError as `read_bytes` does, but has no limit for files that are not compressed.
    """
    path = stored(path)
    if path.suffix == SUFFIX:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def open_no_link(name: str, flags: int) -> int:
    """Open a file without following a link, and without blocking if it is a named pipe; an `opener` for open()."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

def open_to_append(path: Path) -> BinaryIO:
    """Open a file for reading and appending; create it if it is missing.

    Raises ToolError for a link, a file with several names (hard links), a pipe or a device.
    """
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
    raise ToolError(f"file {path}", found="a link, a pipe, a device, or a file with several names (hard links)",
                    expected="a regular file with one name, or no file", hint="move it, or choose another directory")

@contextlib.contextmanager
def locked(folder: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[int]:
    """Hold an exclusive lock on a directory during the block, and yield the descriptor of the lock.

    A process that inherits the descriptor holds the lock until it ends. Raises ToolError if another process holds the
    lock for more than wait_s.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ToolError(f"directory {folder}", expected="one process at a time",
                                    found="another process is using it, or a run that it started",
                                    hint="wait until it has ended") from None
                time.sleep(0.05)
            except OSError:                                                  # a network drive may not support locks
                break
        yield descriptor
    finally:
        os.close(descriptor)
