"""What the data tools share: headers of shards, output whole or untouched, results that are seen.

A tool writes its files under temporary names (`NAME.part`) and flushes them to the disk. Only when
all are there do they get their names, and last of all comes `manifest.json` with the size and the
SHA-256 of each. So a call that fails, on a full disk too, leaves what was there before; and where a
kill fell between two names, `manifest.json.part` or a hash tells it to every reader. The formats
are in data/README.md.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import stat
import struct
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

MAGIC = 20240520
VERSION = 1
HEADER_WORDS = 256                           # little-endian int32
HEADER_BYTES = 4 * HEADER_WORDS
TOKEN_BYTES = 2                              # little-endian uint16
TRAIN = "train"                              # the two splits, in names of shards too
VAL = "val"
ALL_BYTES = [bytes([byte]) for byte in range(256)]            # the first pieces of every learned vocabulary
VOCABULARY = "vocab.txt"
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
         stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: ""}


class DataError(Exception):
    """The message says what was found, what was expected, and what to do."""


def shard_header(tokens: int, vocab_size: int, document_start: int) -> bytes:
    words = [MAGIC, VERSION, tokens, vocab_size, document_start]
    words += [0] * (HEADER_WORDS - len(words))
    return struct.pack(f"<{HEADER_WORDS}i", *words)


# What lies at a path

def folder_name(text: str) -> Path:
    """What --out gives: an empty name, of an unset variable say, would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("found an empty name, expected a folder; . is this one")
    return Path(text)


def kind_of(path: Path) -> str:
    """What a path leads to, in words, without opening it; "" for a regular file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link that leads nowhere" if path.is_symlink() else "no file"
    except OSError as error:                 # a loop of links, a folder that may not be read
        return repr(error.strerror)
    except ValueError as error:              # a zero byte in the name
        return repr(str(error))
    return KINDS.get(stat.S_IFMT(mode), "no regular file")


def regular_file(path: Path, expected: str, do: str) -> Path:
    """The path, if a regular file is there: opening a named pipe would wait. Raises DataError."""
    found = kind_of(path)
    if found:
        raise DataError(f"{path}: found {found}, expected {expected}; {do}")
    return path


def describe(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_manifest(folder: Path) -> dict[str, dict]:
    """Entries of the files that tools wrote, by name; none without a manifest. Raises DataError."""
    part = folder / f"{MANIFEST}.part"
    if os.path.lexists(part):
        raise DataError(f"{part}: found it, expected a finished data set; a call was stopped while "
                        f"it gave the files their names: make the data again")
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}

    expected = f"sizes and hashes (format {MANIFEST_FORMAT}) of the files beside it"
    do = "make the data again with --force, or move it away"
    regular_file(path, expected, do)
    try:
        return manifest_entries(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path}: found nothing that a data tool wrote, expected {expected}; "
                        f"{do}") from None


def manifest_entries(content: Any) -> dict[str, dict]:
    """The entries of a manifest that was read; fails in many ways if it is none."""
    if content["format"] != MANIFEST_FORMAT:
        raise ValueError("another format")
    for entry in content["files"].values():
        if not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
            raise TypeError("no entry")
    return content["files"]


def manifest_content(entries: dict[str, dict]) -> bytes:
    content = {"format": MANIFEST_FORMAT, "files": entries}
    return json.dumps(content, indent=1).encode() + b"\n"


def write_whole(path: Path, *pieces: bytes) -> dict[str, Any]:
    """Write a file, flushed to the disk; returns its entry in the manifest. Raises DataError."""
    digest = hashlib.sha256()
    try:
        path.unlink(missing_ok=True)
        with path.open("xb") as file:        # x: never through somebody's link
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(f"{path}: found {error.strerror!r}, expected room for the file; make room, "
                        f"or give another --out") from None
    return {"bytes": sum(map(len, pieces)), "sha256": digest.hexdigest()}


def write_manifest(folder: Path, entries: dict[str, dict]) -> None:
    """Replace the manifest of files that have their names already. Raises DataError."""
    part = folder / f"{MANIFEST}.part"
    try:
        write_whole(part, manifest_content(entries))
        os.replace(part, folder / MANIFEST)
    finally:
        part.unlink(missing_ok=True)
    flush_folder(folder)


def check_content(path: Path, entries: dict[str, dict]) -> None:
    """A file that the manifest names must be the one that was written. Raises DataError."""
    expected = entries.get(path.name)
    if expected is None:                     # a shard that somebody else made
        return
    if path.stat().st_size == expected["bytes"] and describe(path)["sha256"] == expected["sha256"]:
        return
    raise DataError(f"{path}: found other content than {MANIFEST} names, expected what was written "
                    f"with the files beside it; it is damaged or of another call, so make the data "
                    f"again")


# Output that is whole or untouched

class Output:
    """A folder in which the files of one call appear together, or not at all. See `output_folder`.

    own      names that the files of this data set have, or had in an earlier call
    replace  whether what others left there may be replaced (--force)
    """

    def __init__(self, folder: Path, own: re.Pattern, replace: bool) -> None:
        self.folder = folder
        self.own = own
        self.replace = replace
        self.entries: dict[str, dict] = {}   # of the files written so far, for the manifest
        self.parts: list[Path] = []          # their temporary names
        self.earlier: dict[str, dict] = {}   # the manifest that is there
        self.new_folders: list[Path] = []    # made by this call, deepest first
        self.lock: int | None = None
        self.published = False

    def open(self) -> None:
        """Make the folder, wait until no other call writes there, clear what a killed one left."""
        above = (self.folder, *self.folder.parents)
        self.new_folders = [folder for folder in above if not folder.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(self.folder)

        for path in sorted(self.folder.iterdir()):
            if self.is_leftover(path.name):
                path.unlink()
            elif self.own.fullmatch(path.name):
                regular_file(path, "a file of this data set", "move it away, or give another --out")
        try:
            self.earlier = read_manifest(self.folder)
        except DataError:
            regular = not kind_of(self.folder / MANIFEST)
            if not (regular and self.replace):                # --force replaces a damaged one
                raise

    def is_leftover(self, name: str) -> bool:
        """Whether a killed call of this tool left it; an older version put a process id into it."""
        stem = re.sub(r"(\.\d+)?\.part$", "", name)
        if stem == MANIFEST or self.own.fullmatch(stem):
            return stem != name
        return False

    def own_files(self) -> list[Path]:
        """What is there of this data set, in name order."""
        return sorted(path for path in self.folder.iterdir() if self.own.fullmatch(path.name))

    def check_vocabulary(self, vocabulary: bytes) -> None:
        """Nobody's vocab.txt gets lost, and other shards there keep theirs. Raises DataError."""
        path = self.folder / VOCABULARY
        there = path.read_bytes() if path.exists() else b""
        if there == vocabulary:
            return

        names = {path.name for path in self.folder.glob("*.bin")} | self.earlier.keys()
        others = sorted(name for name in names if not self.own.fullmatch(name))
        if others:
            raise DataError(f"{self.folder}: found {others[0]}, expected no data set that has "
                            f"another vocabulary; give another --out")
        if there and not self.replace:
            raise DataError(f"{path}: found another vocabulary, expected none; give another --out, "
                            f"or --force to replace it")

    def write(self, name: str, *pieces: bytes) -> Path:
        """Write a file whole under its temporary name, which is returned. Raises DataError."""
        part = self.folder / f"{name}.part"
        self.parts.append(part)
        self.entries[name] = write_whole(part, *pieces)
        return part

    def publish(self) -> None:
        """Give all files their names, drop those of an earlier call, and the manifest last."""
        names = list(self.entries)
        stale = [path for path in self.own_files() if path.name not in names]
        all_entries = dict(self.entries)
        for name, entry in self.earlier.items():
            if not self.own.fullmatch(name):
                all_entries[name] = entry    # of another data set
        manifest = self.write(MANIFEST, manifest_content(all_entries))

        with deferred_signals():
            for name in names:
                os.replace(self.folder / f"{name}.part", self.folder / name)
            for path in stale:
                path.unlink()
            flush_folder(self.folder)
            os.replace(manifest, self.folder / MANIFEST)
            flush_folder(self.folder)
            self.published = True

    def naming_began(self) -> bool:
        """Whether a file has its name already."""
        return not all(part.exists() for part in self.parts)

    def close(self) -> None:
        """Leave nothing half-made; manifest.json.part stays where naming failed half-way."""
        kept = f"{MANIFEST}.part" if self.naming_began() else ""
        for part in self.parts:
            if part.name != kept:
                part.unlink(missing_ok=True)
        if self.lock is not None:
            os.close(self.lock)
        if self.published:
            return
        for folder in self.new_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def output_folder(folder: Path, own: re.Pattern, replace: bool) -> Iterator[Output]:
    """The folder for one call's files. If the call ends without `publish`, it is as before."""
    output = Output(folder, own, replace)
    try:
        output.open()
        yield output
    except KeyboardInterrupt:
        if not output.naming_began():
            note("\nnothing was written or replaced")
        raise
    finally:
        output.close()


def lock_folder(folder: Path) -> int | None:
    """Wait until no other call writes there. Returns what to close; None if it cannot be locked."""
    try:
        import fcntl
    except ImportError:                      # Windows
        return None
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(f"{folder}: another call writes there; waiting for its end")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:                          # a network drive without locks
        pass
    return lock


def flush_folder(folder: Path) -> None:
    """The names onto the disk too, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Results that are seen, and ends in words

def write_text(stream: Any, text: str) -> None:
    """Write all of it now, escaping what the stream cannot encode. Raises OSError or ValueError."""
    encoding = getattr(stream, "encoding", None)
    if encoding:
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):        # else Python tries the rest again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def say(*lines: str) -> None:
    """Print a result. Raises DataError if it could not be printed."""
    found = "it closed"
    try:
        if sys.stdout is not None:
            write_text(sys.stdout, "".join(f"{line}\n" for line in lines))
            return
    except OSError as error:
        found = repr(error.strerror)
    except ValueError as error:              # closed by somebody in this process
        found = repr(str(error))
    raise DataError(f"stdout: found {found}, expected to print the result there; all else is done: "
                    f"give the output another place, and run this again to see it")


def note(text: str) -> None:
    """Tell the user on stderr; where that cannot be written, the work goes on without."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            write_text(sys.stderr, f"{text}\n")


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """Ends the program with status 1 and the message of an error that a user can mend."""
    try:
        yield
    except DataError as error:
        sys.exit(f"error: {error}")
    except MemoryError:
        sys.exit("error: found too little memory, expected room for the files that are read; give "
                 "smaller ones")
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        sys.exit(f"error: {place}found {error.strerror!r}, expected files to read and a folder to "
                 f"write into; mend that, or give another path")


class Signals:
    """What a signal does: the tool ends through its clean-up, with the status that shells use."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.deferred = False

    def arrive(self, number: int, frame: Any) -> None:
        self.seen.append(number)
        if not self.deferred:
            self.check()

    def check(self) -> None:
        if self.seen:
            raise KeyboardInterrupt(128 + self.seen[0])


SIGNALS = Signals()                          # of the process


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """What is inside is done as a whole: a fork, where Python would lose the signal, or renaming."""
    SIGNALS.deferred = True
    try:
        yield
    finally:
        SIGNALS.deferred = False
    SIGNALS.check()


def as_program(main: Callable[[], None]) -> int:
    """Run a tool's main; returns its exit status, 1 too if its output was lost."""
    if sys.stderr is None:                   # closed by the caller; a progress bar wants a file
        sys.stderr = open(os.devnull, "w")
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)                  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:        # nohup ignores it
            signal.signal(number, SIGNALS.arrive)

    status = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            note(end.code)
            status = 1
        elif end.code:
            status = end.code
    except KeyboardInterrupt as interrupt:
        note("\ninterrupted")
        status = interrupt.args[0]

    for stream in (sys.stdout, sys.stderr):                   # the help text, for instance
        try:
            if stream is not None:
                write_text(stream, "")
        except (OSError, ValueError):
            status = max(status, 1)
    return status
