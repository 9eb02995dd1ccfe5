"""What the data tools share: one reader and one writer of shards, one manifest, ends in words.

A tool writes its files under temporary names (`NAME.part`) and flushes them to the disk. Only when all are there do
they get their names, and last of all comes `manifest.json` with the size and the SHA-256 of each. So a call that fails,
on a full disk too, leaves what was there before; and where a kill fell between two names, `manifest.json.part` or a
hash tells it to every reader. The formats are in data/README.md.
"""
from __future__ import annotations

import argparse
import base64
import contextlib
import glob
import hashlib
import json
import os
import re
import signal
import stat
import struct
import sys
from pathlib import Path
from typing import Any, Callable

MAGIC, VERSION = 20240520, 1
HEADER_WORDS = 256                           # little-endian int32
HEADER_BYTES = 4 * HEADER_WORDS
TOKEN_BYTES = 2                              # little-endian uint16
GPT2_VOCAB_SIZE = 50_257                     # header word 3 is 0 in shards made before it had a meaning
TRAIN, VAL = "train", "val"                  # the two splits, in names of shards too
ALL_BYTES = [bytes([byte]) for byte in range(256)]            # the first pieces of every learned vocabulary
VOCABULARY = "vocab.txt"
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
         stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: ""}


class DataError(Exception):
    """The message says what was found, what was expected, and what to do."""


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


# Reading shards and manifests

def read_header(path: Path) -> tuple[int, int]:
    """A shard's number of tokens and its vocabulary size; its length is checked. Raises DataError."""
    regular_file(path, "a shard", "remove it, or give another one")
    with path.open("rb") as file:
        words = struct.unpack("<5i", file.read(20).ljust(20, b"\0"))
    magic, version, tokens, vocab_size, _ = words
    if (magic, version) != (MAGIC, VERSION):
        raise DataError(f"{path}: found header words {magic} and {version}, expected {MAGIC} and {VERSION}; "
                        f"give a token shard, or make this one again")
    size = path.stat().st_size
    expected = HEADER_BYTES + TOKEN_BYTES * tokens
    if size != expected or tokens < 1:
        raise DataError(f"{path}: found {size:,} bytes, expected {expected:,} for the {tokens:,} tokens of its header; "
                        f"make the file again")
    return tokens, vocab_size or GPT2_VOCAB_SIZE


def find_shards(pattern: str) -> list[Path]:
    """The files that a pattern means, in name order; brackets may also be just that. Raises DataError."""
    paths = glob.glob(pattern) or glob.glob(pattern.replace("[", "[[]"))
    if not paths:
        raise DataError(f"found no file for {pattern!r}, expected token shards; run: python data/pocket.py")
    return [Path(path) for path in sorted(paths)]


def describe(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_manifest(folder: Path) -> dict[str, dict]:
    """Entries of the files that tools wrote, by name; none without a manifest. Raises DataError."""
    part = folder / f"{MANIFEST}.part"
    if os.path.lexists(part):
        raise DataError(f"{part}: found it, expected a finished data set; a call was stopped while it gave the files "
                        f"their names: make the data again")
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}
    expected = f"sizes and hashes (format {MANIFEST_FORMAT}) of the files beside it"
    do = "make the data again with --force, or move it away"
    regular_file(path, expected, do)
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != MANIFEST_FORMAT:
            raise ValueError("another format")
        return {name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
                for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path}: found nothing that a data tool wrote, expected {expected}; {do}") from None


def check_content(path: Path, entries: dict[str, dict]) -> None:
    """A file that the manifest names must be the one that was written. Raises DataError."""
    if path.name in entries and entries[path.name] != describe(path):
        raise DataError(f"{path}: found other content than {MANIFEST} names, expected what was written with the files "
                        f"beside it; it is damaged or of another call, so make the data again")


# Writing: whole or untouched

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
        raise DataError(f"{path}: found {error.strerror!r}, expected room for the file; make room, or give another "
                        f"--out") from None
    return {"bytes": sum(map(len, pieces)), "sha256": digest.hexdigest()}


def write_manifest_part(folder: Path, entries: dict[str, dict]) -> Path:
    content = {"format": MANIFEST_FORMAT, "files": entries}
    part = folder / f"{MANIFEST}.part"
    write_whole(part, json.dumps(content, indent=1).encode() + b"\n")
    return part


def write_manifest(folder: Path, entries: dict[str, dict]) -> None:
    """Replace the manifest of files that have their names already. Raises DataError."""
    try:
        os.replace(write_manifest_part(folder, entries), folder / MANIFEST)
    finally:
        (folder / f"{MANIFEST}.part").unlink(missing_ok=True)
    flush_folder(folder)


class Output:
    """A folder in which the files of one call appear together with `publish`, or not at all.

    own      names that the files of this data set have, or had in an earlier call
    replace  whether what is there of these names, and another vocabulary, may be replaced (--force)
    """

    def __init__(self, folder: Path, own: re.Pattern, replace: bool) -> None:
        self.folder = folder
        self.own = own
        self.replace = replace
        self.entries: dict[str, dict] = {}   # of the files written so far, for the manifest
        self.earlier: dict[str, dict] = {}   # the manifest that is there
        self.new_folders: list[Path] = []    # made by this call, deepest first
        self.lock: int | None = None
        self.naming = False                  # whether files are written whole and get their names
        self.published = False

    def __enter__(self) -> Output:
        try:
            self.open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def open(self) -> None:
        """Make the folder, wait until no other call writes there, clear what a killed one left. Raises DataError."""
        above = (self.folder, *self.folder.parents)
        self.new_folders = [folder for folder in above if not folder.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(self.folder)
        for path in sorted(self.folder.iterdir()):
            stem = path.name.removesuffix(".part")
            if stem != path.name and (stem == MANIFEST or self.own.fullmatch(stem)):
                path.unlink()
            elif self.own.fullmatch(path.name):
                regular_file(path, "a file of this data set", "move it away, or give another --out")
        try:
            self.earlier = read_manifest(self.folder)
        except DataError:
            if kind_of(self.folder / MANIFEST) or not self.replace:           # --force replaces a damaged one
                raise

    def own_files(self) -> list[Path]:
        """What is there of this data set, in name order."""
        return sorted(path for path in self.folder.iterdir() if self.own.fullmatch(path.name))

    def check_free(self, do: str) -> None:
        """Without --force shards of these names stay as they are. Raises DataError."""
        shards = [path for path in self.own_files() if path.suffix == ".bin"]
        if shards and not self.replace:
            raise DataError(f"{self.folder}: found {shards[0].name}, expected no shards of this name; {do}, or --force "
                            f"to replace them")

    def write_vocabulary(self, ids: dict[bytes, int]) -> Path:
        """Nobody's vocab.txt gets lost, and other shards there keep theirs. Raises DataError."""
        lines = [b"%s %d\n" % (base64.b64encode(piece), number) for piece, number in ids.items()]
        vocabulary = b"".join(lines)
        path = self.folder / VOCABULARY
        there = path.read_bytes() if path.exists() else b""
        if there != vocabulary:
            names = {path.name for path in self.folder.glob("*.bin")} | self.earlier.keys()
            others = sorted(name for name in names if not self.own.fullmatch(name))
            if others:
                raise DataError(f"{self.folder}: found {others[0]}, expected no data set that has another vocabulary; "
                                f"give another --out")
            if there and not self.replace:
                raise DataError(f"{path}: found another vocabulary, expected none; give another --out, or --force to "
                                f"replace it")
        return self.write(VOCABULARY, vocabulary)

    def write_shard(self, name: str, tokens: bytes, vocab_size: int) -> None:
        """Header and tokens; the document start is the last id of the vocabulary."""
        words = [MAGIC, VERSION, len(tokens) // TOKEN_BYTES, vocab_size, vocab_size - 1]
        words += [0] * (HEADER_WORDS - len(words))
        self.write(name, struct.pack(f"<{HEADER_WORDS}i", *words), tokens)

    def write(self, name: str, *pieces: bytes) -> Path:
        """Write a file whole under its temporary name, which is returned. Raises DataError."""
        self.entries[name] = {}              # so that what a full disk leaves of it is removed
        self.entries[name] = write_whole(self.folder / f"{name}.part", *pieces)
        return self.folder / f"{name}.part"

    def publish(self) -> None:
        """Give all files their names, drop those of an earlier call, and the manifest last."""
        stale = [path for path in self.own_files() if path.name not in self.entries]
        others = {name: entry for name, entry in self.earlier.items() if not self.own.fullmatch(name)}
        manifest = write_manifest_part(self.folder, self.entries | others)
        self.naming = True
        for name in self.entries:
            os.replace(self.folder / f"{name}.part", self.folder / name)
        for path in stale:
            path.unlink()
        flush_folder(self.folder)
        os.replace(manifest, self.folder / MANIFEST)
        self.published = True
        flush_folder(self.folder)

    def __exit__(self, kind: type | None = None, *_: Any) -> None:
        """Leave nothing half-made; manifest.json.part stays where naming failed half-way."""
        parts = [self.folder / f"{name}.part" for name in self.entries]
        began = self.naming and not all(part.exists() for part in parts)      # a file may have its name already
        for part in parts:
            part.unlink(missing_ok=True)
        if not began:
            with contextlib.suppress(NotADirectoryError):
                (self.folder / f"{MANIFEST}.part").unlink(missing_ok=True)
            if kind is KeyboardInterrupt:
                note("\nnothing was written or replaced")
        if self.lock is not None:
            os.close(self.lock)
        if not self.published:
            for folder in self.new_folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()


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

def say(*lines: str) -> None:
    """Print a result now, escaping what the console cannot encode. Raises DataError if it could not be printed."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = "".join(f"{line}\n" for line in lines).encode(encoding, "backslashreplace").decode(encoding)
    try:
        if sys.stdout is None:
            raise ValueError("it closed")
        print(text, end="", flush=True)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError, AttributeError):       # else Python tries again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise DataError(f"stdout: found {str(error)!r}, expected to print the result there; all else is done: give the "
                        f"output another place, and run this again to see it") from None


def note(text: str) -> None:
    """Tell the user on stderr; where that cannot be written, the work goes on without."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def errors_in_words() -> Any:
    """Ends the program with status 1 and the message of an error that a user can mend."""
    try:
        yield
    except DataError as error:
        sys.exit(f"error: {error}")
    except MemoryError:
        sys.exit("error: found too little memory, expected room for the files that are read; give smaller ones")
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        sys.exit(f"error: {place}found {error.strerror!r}, expected files to read and a folder to write into; mend "
                 f"that, or give another path")


def end(number: int, _: Any) -> None:
    """What a signal does: the tool ends through its clean-up, with the status that shells use."""
    raise KeyboardInterrupt(128 + number)


def as_program(main: Callable[[], None]) -> int:
    """Run a tool's main; returns its exit status."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)                  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:        # nohup ignores it
            signal.signal(number, end)
    try:
        main()
    except KeyboardInterrupt as interrupt:
        note("\ninterrupted")
        return interrupt.args[0] if interrupt.args else 130
    return 0
