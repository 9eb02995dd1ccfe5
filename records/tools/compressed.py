"""Files that may be stored compressed: a reader of NAME gets the contents of NAME, or of NAME.gz if only this exists.

Hashes in a record are of contents, so a file keeps its name and its hash when it is compressed or decompressed. Needs
the standard library only, as `tests/price.py` does."""
from __future__ import annotations

import errno
import gzip
import zlib
from pathlib import Path

from tools import files

SUFFIX = ".gz"
LIMIT_MIB = 256                        # decompressed size of a file that is read; the largest of the records: 1.7 MiB

def stored(path: Path) -> Path:
    """The path itself, or the path of its compressed form if only this exists."""
    compressed = path.with_name(path.name + SUFFIX)
    if compressed.exists() and not path.exists():
        return compressed
    return path

def uncompressed(path: Path) -> Path:
    """The path without .gz: the name by which hashes and tools know the file."""
    return path.with_suffix("") if path.suffix == SUFFIX else path

def read_bytes(path: Path) -> bytes:
    """The contents of a file in either form. Raises OSError, also if a .gz is damaged or decompresses to more than the
    limit, because a foreign file of a few KB may expand to many GB."""
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
    """Write a file, compressed if its name ends in .gz. Equal data give equal bytes, because the gzip header has no
    time and no file name. A link of this name is replaced. Raises OSError for more data than read_bytes accepts."""
    if path.suffix == SUFFIX:
        if len(data) > LIMIT_MIB << 20:
            raise OSError(errno.EFBIG, f"more than {LIMIT_MIB} MiB to compress", str(path))
        data = gzip.compress(data, 9, mtime=0)
    files.write_bytes(path, data)
