"""Files that may be compressed: reading NAME returns the contents of NAME, or of NAME.gz if only that exists.

Hashes in a record are of contents, so compressing or decompressing a file changes neither its name nor its hash. This
module imports the standard library only, as `tests/dry_run/price.py` does.
"""
from __future__ import annotations

import errno
import gzip
import hashlib
import io
import zlib
from pathlib import Path

from tools import files
from tools.files import LIMIT_MIB

SUFFIX = ".gz"

def stored(path: Path) -> Path:
    """Return the path of a file as it is stored: `path`, or its compressed form if only that exists."""
    compressed = path.with_name(path.name + SUFFIX)
    if compressed.exists() and not path.exists():
        return compressed
    return path

def uncompressed(path: Path) -> Path:
    """Return the path without .gz, the name under which hashes and tools list the file."""
    return path.with_suffix("") if path.suffix == SUFFIX else path

def read_bytes(path: Path) -> bytes:
    """Return the contents of a file, compressed or not.

    Raises OSError, also if the file is not a regular one, is damaged, or has more than LIMIT_MIB when decompressed: a
    foreign file of a few KB can expand to several GB.
    """
    path = stored(path)
    data = files.read_bytes(path, LIMIT_MIB)
    if path.suffix != SUFFIX:
        return data
    try:
        with gzip.open(io.BytesIO(data)) as file:
            data = file.read((LIMIT_MIB << 20) + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EINVAL, f"not a whole gzip file ({error})", str(path)) from None
    if len(data) > LIMIT_MIB << 20:
        raise OSError(errno.EFBIG, f"more than {LIMIT_MIB} MiB when decompressed", str(path))
    return data

def sha256(path: Path) -> str:
    """Return the sha256 of the contents of a file, compressed or not; a file of any size needs little memory.

    Raises OSError as `read_bytes` does, but has no limit for files that are not compressed.
    """
    path = stored(path)
    if path.suffix == SUFFIX:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    with files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, compressed if its name ends in .gz.

    Equal data give equal bytes, because the gzip header has no time and no file name. A link at `path` is replaced.
    Raises OSError for more data than `read_bytes` accepts.
    """
    if path.suffix == SUFFIX:
        if len(data) > LIMIT_MIB << 20:
            raise OSError(errno.EFBIG, f"more than {LIMIT_MIB} MiB to compress", str(path))
        data = gzip.compress(data, 9, mtime=0)
    files.write_bytes(path, data)
