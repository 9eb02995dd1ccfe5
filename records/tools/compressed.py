"""Files that may be compressed: reading NAME returns the contents of NAME, or of NAME.gz if only that exists.

Hashes in a record are of contents, so compressing or decompressing a file changes neither its name nor its hash. This
module imports the standard library only, as `tests/dry_run/price.py` does.
"""
from __future__ import annotations

import errno
import gzip
import zlib
from pathlib import Path

from tools import files

SUFFIX = ".gz"
LIMIT_MIB = 256                        # largest decompressed size; the largest file of the records has 1.7 MiB

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

    Raises OSError, also if a .gz file is damaged or decompresses to more than LIMIT_MIB: a foreign file of a few KB can
    expand to several GB.
    """
    path = stored(path)
    if path.suffix != SUFFIX:
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            data = file.read((LIMIT_MIB << 20) + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EINVAL, f"not a whole gzip file ({error})", str(path)) from None
    if len(data) > LIMIT_MIB << 20:
        raise OSError(errno.EFBIG, f"more than {LIMIT_MIB} MiB when decompressed", str(path))
    return data

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
