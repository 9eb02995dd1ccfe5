"""Shared code of the data tools: read and write shards, manifests and data sets; print results and errors.

A data set is a folder. A tool writes it to a new folder `FOLDER.part-<8 random digits>`, with a `manifest.json` that
contains the size and the SHA-256 of each file, and flushes it to the disk. Then it renames the folder. Therefore a
failed call, for example on a full disk, changes nothing. The tools remove only files that they have written: those of
the current call, and the folders of killed calls, which contain a marker file. data/README.md describes the formats.
"""
import argparse
import base64
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import struct
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024                          # 256 little-endian int32; the first five are used
TOKEN_BYTES = 2                              # size of a token: little-endian uint16
GPT2_VOCAB_SIZE = 50_257                     # used if header word 3 is 0, as in older shards
TRAIN, VAL = "train", "val"                  # the two splits; also in the names of shards
ALL_BYTES = [bytes([byte]) for byte in range(256)]            # the first pieces of every learned vocabulary
VOCAB_FILE = "vocab.txt"
REPORT_FILE = "pocket.json"                  # written by pocket.py: Python version and counts
MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
SHARD_PREFIX = struct.pack("<2i", MAGIC, VERSION)         # the first bytes of every shard
MAX_SMALL_FILE_BYTES = 64 << 20              # of a manifest, a vocabulary or a report; GPT-2's vocabulary has 0.8 MB
# {character: escape sequence}, for `str.translate`. File names and text of other people's files may contain control
# characters, which a terminal executes. All characters except line breaks and tabs are escaped.
ESCAPED_CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}
PART_INFIX = ".part-"                        # unfinished output: final name, this, 8 random digits
MARKER_FILE = "unfinished.txt"               # in a folder of unfinished output; contains its name

class DataError(Exception):
    """An error that says what is wrong, what was found, what was expected, and how to fix it."""

    def __init__(self, what: object, found: object, expected: str, hint: str) -> None:
        super().__init__(str(what), str(found), expected, hint)

    def __str__(self) -> str:
        what, found, expected, hint = self.args
        return f"{what}\n  found:    {found}\n  expected: {expected}\n  hint:     {hint}"

def check(ok: object, what: object, *, found: object, expected: str, hint: str) -> None:
    """Raise DataError unless `ok`."""
    if not ok:
        raise DataError(what, found=found, expected=expected, hint=hint)

def parse_folder(text: str) -> Path:
    """Parse --out into an absolute path. Raises ArgumentTypeError for an empty name and for `/`.

    An empty name, for example from an unset shell variable, otherwise means the current folder.
    """
    path = Path(text).resolve()
    if not text or not path.name:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected the name of a folder")
    return path

def file_problem(path: Path) -> str:
    """Return what is at a path if it is not a regular file or a link to one, else "". Does not open the file."""
    if path.is_file():
        return ""
    if path.exists():
        return "a directory" if path.is_dir() else "a pipe or a device"
    return "a link that leads nowhere" if path.is_symlink() else "no file"

def check_regular_file(path: Path, expected: str, hint: str) -> None:
    """Raise DataError if the path is not a regular file. Opening a named pipe blocks."""
    check(not file_problem(path), path, found=file_problem(path), expected=expected, hint=hint)

@contextlib.contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Give an OSError of the body the name of the file. An error of read() has none, unlike an error of open()."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise

def escape_folder(pattern: str) -> str:
    """Escape the brackets in the folder of a glob pattern if this folder exists, as the trainer does."""
    folder, name = os.path.split(pattern)
    if os.path.isdir(folder):
        folder = glob.escape(folder)
    return os.path.join(folder, name)

def is_readable_folder(path: Path) -> bool:
    """Return whether a path is a folder whose names can be listed. glob and rglob skip other folders silently."""
    try:
        os.scandir(path).close()
    except OSError:
        return False
    return True

def unreadable_folders(pattern: str) -> list[Path]:
    """List the folders that a glob pattern would search, and that cannot be read."""
    levels = [Path(pattern), *Path(pattern).parents]
    found: list[Path] = []
    for level, parent in zip(levels, levels[1:]):
        if glob.has_magic(str(level)):
            found += map(Path, glob.glob(str(parent), recursive=True))
    return [path for path in found if path.is_dir() and not is_readable_folder(path)]

def read_small_file(path: Path, expected: str, hint: str) -> bytes:
    """Read a manifest, a vocabulary or a report. Raises DataError unless it is a regular file of at most 64 MiB."""
    check_regular_file(path, expected, hint)
    size = path.stat().st_size
    check(size <= MAX_SMALL_FILE_BYTES, path, found=f"{size:,} bytes",
          expected=f"{expected}; at most {MAX_SMALL_FILE_BYTES:,} bytes", hint=hint)
    return path.read_bytes()

def read_header(path: Path) -> tuple[int, int]:
    """Read a shard's number of tokens and vocabulary size, and check its length.

    Raises DataError if the file is not a shard, or is truncated or too long.
    """
    check_regular_file(path, "a shard", "remove it, or give another path")
    with name_file(path), path.open("rb") as file:
        magic, version, tokens, vocab_size, _ = struct.unpack("<5i", file.read(20).ljust(20, b"\0"))
    check((magic, version) == (MAGIC, VERSION), path, found=f"magic number {magic}, version {version}",
          expected=f"magic number {MAGIC}, version {VERSION}", hint="give a token shard, or create this one again")
    size = path.stat().st_size
    expected = HEADER_BYTES + TOKEN_BYTES * tokens
    check(tokens > 0, path, found=f"{tokens:,} tokens in its header", expected="at least one token",
          hint="create the file again")
    check(size == expected, path, found=f"{size:,} bytes",
          expected=f"{expected:,} bytes, for the {tokens:,} tokens of its header", hint="create the file again")
    return tokens, vocab_size or GPT2_VOCAB_SIZE

def manifest_entry(path: Path) -> dict[str, Any]:
    """Build the manifest entry of a file: its size and SHA-256. Raises DataError if it is not a regular file."""
    check_regular_file(path, "a file of a data set", "remove it, or give another path")
    with name_file(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}

def read_manifest(folder: Path) -> dict[str, dict]:
    """Read the manifest of a folder: {file name: entry}, or {} without a manifest.

    Raises DataError if the manifest is invalid or has another format.
    """
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        return {}
    expected = f"a manifest of format {MANIFEST_FORMAT}: sizes and hashes of the files in its folder"
    hint = "move it away"
    try:
        content = json.loads(read_small_file(path, expected, hint))
        if content["format"] != MANIFEST_FORMAT:
            raise ValueError("another format")
        return {name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
                for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(path, found="not a manifest of a data tool", expected=expected, hint=hint) from None

def check_content(path: Path) -> None:
    """Raise DataError if the manifest in the file's folder lists the file with another content."""
    entry = read_manifest(path.parent).get(path.name)
    if entry:
        check(entry == manifest_entry(path), path, found=f"content that differs from {MANIFEST_FILE}",
              expected=f"the content that {MANIFEST_FILE} describes",
              hint="the file is damaged or from another data set; create the data again")

@contextlib.contextmanager
def disk_errors(path: Path, hint: str) -> Iterator[None]:
    """Turn an OSError of the block, which writes to `path`, into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(path, found=repr(error.strerror), expected="enough disk space",
                        hint=hint) from None

def write_file(path: Path, *pieces: bytes) -> None:
    """Write a new file and flush it to the disk.

    Raises OSError if the path exists, even as a dangling link, and DataError if the disk is full.
    """
    file = path.open("xb")
    with disk_errors(path, "free disk space, or give another --out"), file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())

def write_shard(path: Path, tokens: bytes, vocab_size: int) -> None:
    """Write a shard: header, then tokens (little-endian uint16). The BOS id is the last id of the vocabulary.

    Raises DataError.
    """
    words = MAGIC, VERSION, len(tokens) // TOKEN_BYTES, vocab_size, vocab_size - 1
    write_file(path, struct.pack(f"<5i{HEADER_BYTES - 20}x", *words), tokens)

def write_vocabulary(folder: Path, ids: dict[bytes, int]) -> None:
    """Write vocab.txt, with the pieces in the order of their ids. Raises DataError."""
    lines = [b"%s %d\n" % (base64.b64encode(piece), ids[piece]) for piece in sorted(ids, key=ids.get)]
    write_file(folder / VOCAB_FILE, *lines)

def write_manifest(folder: Path, entries: dict[str, dict]) -> None:
    """Write or replace the manifest of a folder. All files in `entries` must be complete. Raises DataError."""
    content = json.dumps({"format": MANIFEST_FORMAT, "files": entries}, indent=1)
    partial = partial_path(folder / MANIFEST_FILE)
    try:
        write_file(partial, f"{content}\n".encode())
        os.replace(partial, folder / MANIFEST_FILE)
    finally:
        partial.unlink(missing_ok=True)
    fsync_folder(folder)

def partial_path(path: Path) -> Path:
    """Return a random path in the same folder, for output that is later renamed to `path`."""
    return path.with_name(f"{path.name}{PART_INFIX}{secrets.token_hex(4)}")

def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if the file system supports that."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)

@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder, and hold an exclusive lock on it during the block. Waits for other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):   # a network drive may not support locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print_status(f"waiting: another process is writing to {folder}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

@contextlib.contextmanager
def new_data_set(folder: Path, stem: str, replace: bool) -> Iterator[Path]:
    """Yield an empty folder to write to. If the block succeeds, add a manifest and rename the folder to `folder`.

    With `replace` (--force), replace an existing data set whose shards are named after `stem`. Nothing else is ever
    replaced. The caller must hold the lock of the parent folder (`locked`). Raises DataError.
    """
    for leftover in find_unfinished(folder):
        remove_unfinished(leftover, folder)
    check_replaceable(folder, stem, replace)
    partial = partial_path(folder)
    partial.mkdir()
    try:
        write_file(partial / MARKER_FILE, marker_text(partial))
        new = partial / "new"
        new.mkdir()
        yield new
        write_manifest(new, {path.name: manifest_entry(path) for path in sorted(new.iterdir())})
        if folder.exists():
            os.replace(folder, partial / "old")
        os.replace(new, folder)
        fsync_folder(folder.parent)
    finally:
        remove_unfinished(partial, folder)

def marker_text(partial: Path) -> bytes:
    """Return the content of the marker file of a folder of unfinished output.

    It contains the folder's random name. Therefore neither a copy of the file nor a renamed copy of the folder is
    mistaken for unfinished output.
    """
    return os.fsencode(partial.name) + b": an unfinished data set, which the next call of the same tool removes\n"

def find_unfinished(folder: Path) -> list[Path]:
    """List the folders that killed calls have left while they were writing the data set `folder`."""
    found = []
    for partial in sorted(folder.parent.glob(f"{glob.escape(folder.name)}{PART_INFIX}*")):
        mark = partial / MARKER_FILE
        with contextlib.suppress(OSError, DataError):         # do not remove a folder that cannot be read
            if not partial.is_symlink() and read_small_file(mark, "", "") == marker_text(partial):
                found.append(partial)
    return found

def remove_unfinished(partial: Path, folder: Path) -> None:
    """Remove a folder of unfinished output. Move the old data set in it, if any, back if it was not replaced."""
    if not os.path.lexists(folder) and (partial / "old").exists():
        os.replace(partial / "old", folder)
    shutil.rmtree(partial, ignore_errors=True)

def check_replaceable(folder: Path, stem: str, replace: bool) -> None:
    """Raise DataError if the folder may not be replaced.

    That is a mount point, a folder with files that do not belong to a data set named `stem`, or, without `replace`, any
    folder that is not empty.
    """
    if not os.path.lexists(folder):
        return
    check(not os.path.ismount(folder), folder, found="a mount point", expected="a folder that can be renamed",
          hint="give a folder below it")
    own_name = re.compile(rf"{re.escape(stem)}_(train|val)_\d{{6,}}\.bin|{VOCAB_FILE}|{MANIFEST_FILE}|{REPORT_FILE}")
    paths = sorted(folder.iterdir())
    for path in paths:
        check(not file_problem(path) and own_name.fullmatch(path.name), folder, found=path.name,
              expected=f"a new folder, or one that contains only a data set named {stem}", hint="give another --out")
    check(replace or not paths, folder, found=[path.name for path in paths], expected="a new or empty folder",
          hint="give another --out, or replace the data set with --force")

def print_result(*lines: str, hint: str = "repeat the command for the result") -> None:
    """Print and flush results; escape control characters, and characters that the console cannot encode.

    hint: how to get the result if it cannot be printed now. Raises DataError if stdout is closed or cannot be written.
    """
    try:
        sys.stdout.reconfigure(errors="backslashreplace")
        print("\n".join(lines).translate(ESCAPED_CONTROLS), flush=True)
    except (OSError, AttributeError) as error:                # sys.stdout is None if stdout is closed
        sys.stdout = None                    # otherwise Python flushes it again at exit
        raise DataError("stdout", found=repr(str(error)), expected="a stdout that accepts the result",
                        hint=f"all other work is done; redirect stdout, and {hint}") from None

def print_status(text: str) -> None:
    """Print a message to stderr. Continue without it if stderr cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(text.translate(ESCAPED_CONTROLS), file=sys.stderr, flush=True)

@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a DataError or OSError of the block, and exit with status 1. The user can fix these."""
    try:
        yield
    except (DataError, OSError) as error:
        if isinstance(error, OSError):
            error = DataError(error.filename or "access to a file", found=repr(error.strerror),
                              expected="readable files and a writable folder", hint="fix that, or give another path")
        sys.exit(f"error: {error}".translate(ESCAPED_CONTROLS))

def raise_interrupt(signum: int, _: Any) -> None:
    """Handle a signal: raise KeyboardInterrupt with the exit status of shells, so that the tool cleans up."""
    raise KeyboardInterrupt(128 + signum)

def run_main(main: Callable[[], None]) -> int:
    """Run the main function of a tool, with signal handlers, and return its exit status."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:    # nohup sets SIG_IGN
            signal.signal(signum, raise_interrupt)
    try:
        main()
    except KeyboardInterrupt as interrupt:
        print_status("\ninterrupted: files with their final names are complete; repeat the command to do the rest")
        return interrupt.args[0]
    return 0
