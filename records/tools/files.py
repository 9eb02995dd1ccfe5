"""Files that other people may have written: paths inside a directory, escaped text, compressed logs.

Reading NAME returns the contents of NAME, or of NAME.gz if only that exists, and hashes are of contents.
"""
import gzip
import hashlib
import zlib
from pathlib import Path
from typing import TextIO

SUFFIX = ".gz"
# What reading a foreign file may raise: missing, not all of it, no text or JSON, other types.
FOREIGN_ERRORS = OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError

class ToolError(Exception):
    """One sentence that says what is wrong, and what would work."""

def one_line(text: str) -> str:
    """Escape all characters that are not printable: line ends, terminal escapes, bytes without UTF-8."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

def say(text: str, file: TextIO | None = None) -> None:
    print("\n".join(map(one_line, text.split("\n"))), file=file, flush=True)

def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

def inside(folder: Path, name: str) -> Path:
    """Return the path in `folder` that a foreign file names; ToolError if it is not below it, also through links."""
    path = folder / name
    if folder.resolve() not in path.resolve().parents:
        raise ToolError(f"a file of {folder} names {name!r}, which must be a path below this directory")
    return path

def stored(path: Path) -> Path:
    """Return the path of a file as it is stored: `path`, or its compressed form if only that exists."""
    compressed = path.parent / (path.name + SUFFIX)       # path may be ".", without a name
    if compressed.exists() and not path.exists():
        return compressed
    return path

def read_bytes(path: Path) -> bytes:
    """Return the contents of a regular file, compressed or not; one of FOREIGN_ERRORS if damaged."""
    path = stored(path)
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")                    # opening a pipe would block
    with {SUFFIX: gzip.open}.get(path.suffix, open)(path, "rb") as file:
        return file.read()

def sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()

def write_bytes(path: Path, data: bytes) -> None:
    """Write a file beside `path` and rename it, so no link is followed; compress it if the name ends in .gz."""
    if path.suffix == SUFFIX:
        data = gzip.compress(data, 9, mtime=0)                            # equal data give equal bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".unfinished-{path.name}")
    beside.unlink(missing_ok=True)                                        # of a tool that was killed; or a link
    beside.write_bytes(data)
    beside.replace(path)
