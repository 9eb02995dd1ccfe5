"""Shared code of the data tools: read and write shards, manifests and data sets; print results and errors.

A tool writes a data set to a new folder `FOLDER.part-<8 random digits>`, with a manifest of all files, and then renames
it. So a failed call, for example on a full disk, changes nothing. data/README.md describes the formats.
"""
import argparse
import base64
import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any, Callable, Iterable, Iterator

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024                          # 256 little-endian int32; the first five are used
TOKEN_BYTES = 2                              # size of a token: little-endian uint16
TRAIN, VAL = "train", "val"                  # the two splits; also in the names of shards
ALL_BYTES = [bytes([byte]) for byte in range(256)]            # the first pieces of the vocabulary of pocket/
VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
REPORT_FILE = "pocket.json"                  # written by pocket.py: Python version and counts
SHARD_TOKENS = 100_000_000                   # of a full shard
# Settings of the trainer's preset pocket.
POCKET_VAL_TOKENS, POCKET_VAL_BATCH = 65_536, 8192
VAL_BATCH_MULTIPLE = 128                     # 8 sequences, each with a multiple of 16 tokens
MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
# File names and text of other people may contain control characters, which a terminal executes.
ESCAPED_CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}

class DataError(Exception):
    """Files or flags that cannot be used. The message says what is wrong, and which value would work."""

def check(ok: object, message: str) -> None:
    if not ok:
        raise DataError(message)

def parse_folder(text: str) -> Path:
    """Make --out absolute. An empty name, as from an unset shell variable, is refused."""
    path = Path(os.path.realpath(text))
    if not text or not path.name:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a folder")
    return path

def file_problem(path: Path) -> str:
    """Return what is wrong with a path that should be a regular file, else "". Opening a named pipe would block."""
    if path.is_file():
        return ""
    return "not a regular file" if path.exists() else "no file"

def escape_folder(pattern: str) -> str:
    """Escape the brackets in the folder of a glob pattern if this folder exists."""
    folder, name = os.path.split(pattern)
    if os.path.isdir(folder):
        folder = glob.escape(folder)
    return os.path.join(folder, name)

def manifest_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}

def read_manifest(folder: Path) -> dict[str, dict]:
    """Read the manifest of a folder: {file name: entry}, or {} without a manifest."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != MANIFEST_FORMAT:
            raise ValueError("another format")
        return {name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
                for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is not a manifest of format {MANIFEST_FORMAT}: move it away") from None

def check_shard(path: Path) -> None:
    """Raise DataError if a shard is damaged by its header, its length or the manifest in its folder."""
    with path.open("rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    check((magic, version) == (MAGIC, VERSION), f"{path} is not a token shard: it has magic number {magic}, version "
          f"{version} instead of {MAGIC}, {VERSION}")
    size = path.stat().st_size
    expected = HEADER_BYTES + TOKEN_BYTES * tokens
    check(tokens > 0 and size == expected, f"{path} is damaged: it has {size:,} bytes, {expected:,} with the "
          f"{tokens:,} tokens of its header; create it again")
    entry = read_manifest(path.parent).get(path.name)
    check(not entry or entry == manifest_entry(path), f"{path} is not the file that {MANIFEST_FILE} describes: it is "
          "damaged or from another data set; create the data again")

def shard_header(num_tokens: int, vocab_size: int, bos_id: int) -> bytes:
    return struct.pack(f"<5i{HEADER_BYTES - 20}x", MAGIC, VERSION, num_tokens, vocab_size, bos_id)

def write_shard(path: Path, tokens: bytes, vocab_size: int) -> None:
    """Write a shard: header, then tokens (little-endian uint16). The BOS id is the last id of the vocabulary."""
    with path.open("xb") as file:
        file.write(shard_header(len(tokens) // TOKEN_BYTES, vocab_size, vocab_size - 1))
        file.write(tokens)

class ShardWriter:
    """Writes the shards of one split, as the tokens come, to `folder`. stem: their final path up to the number."""
    def __init__(self, folder: Path, stem: Path, vocab_size: int, bos_id: int) -> None:
        self.folder = folder
        self.stem = stem
        self.vocabulary = vocab_size, bos_id
        self.sizes: list[int] = []           # tokens of each shard
        self.file: IO[bytes] | None = None

    def add(self, tokens: bytes) -> None:
        """Add whole documents, each with its BOS."""
        count = len(tokens) // TOKEN_BYTES
        if self.file is None or self.sizes[-1] + count > SHARD_TOKENS:
            self.close()
            self.file = (self.folder / f"{self.stem.name}_{len(self.sizes):06d}.bin").open("xb")
            self.file.write(bytes(HEADER_BYTES))
            self.sizes.append(0)
        self.file.write(tokens)
        self.sizes[-1] += count

    def close(self) -> str:
        """Complete the last shard. Returns the counts to print."""
        if self.file:
            self.file.seek(0)
            self.file.write(shard_header(self.sizes[-1], *self.vocabulary))
            self.file.close()
        return f"{self.stem}_*.bin: {len(self.sizes)} shards, {sum(self.sizes):,} tokens"

    def pattern(self) -> str:
        """Return the glob pattern of the shards, quoted for the shell. Brackets in names are escaped."""
        return shlex.quote(f"{glob.escape(str(self.stem))}_*.bin")

def training_command(train: ShardWriter, val: ShardWriter) -> str:
    """Return the ./run.sh command that trains on these shards, and repeats them as often as necessary."""
    # The trainer reads whole batches of a validation shard, and two tokens are no inputs.
    largest = (max(val.sizes, default=0) - 2) // VAL_BATCH_MULTIPLE * VAL_BATCH_MULTIPLE
    if largest <= 0:
        return (f"too little for ./run.sh: {sum(val.sizes):,} validation tokens, at least {VAL_BATCH_MULTIPLE + 2:,} "
                "are needed; give more text, or --val_files")
    flags = ["--preset=pocket", f"--train_files={train.pattern()}", f"--val_files={val.pattern()}", "--epochs=0"]
    block = min(POCKET_VAL_BATCH, largest)
    whole = sum((size - 2) // block * block for size in val.sizes)
    if whole < POCKET_VAL_TOKENS:
        flags += [f"--val_tokens={whole}", f"--val_batch_tokens={block}"]
    return " ".join(["./run.sh", *flags])

def write_vocabulary(folder: Path, token_bytes: Iterable[bytes]) -> None:
    """Write vocab.txt: the bytes of each token but BOS, which has none, in the order of the ids."""
    lines = [b"%s %d\n" % (base64.b64encode(piece), number) for number, piece in enumerate(token_bytes) if piece]
    (folder / VOCAB_FILE).write_bytes(b"".join(lines))

def write_manifest(folder: Path, entries: dict[str, dict]) -> None:
    """Write or replace the manifest of a folder. All files in `entries` must be complete."""
    partial = partial_path(folder / MANIFEST_FILE)
    try:
        partial.write_text(json.dumps({"format": MANIFEST_FORMAT, "files": entries}, indent=1) + "\n")
        os.replace(partial, folder / MANIFEST_FILE)
    finally:
        partial.unlink(missing_ok=True)

def partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.part-{secrets.token_hex(4)}")

@contextlib.contextmanager
def new_data_set(folder: Path, stem: str, replace: bool) -> Iterator[Path]:
    """Yield an empty folder to write to. If the block succeeds, add a manifest and rename the folder to `folder`.

    With `replace` (--force), an existing data set whose shards are named after `stem` is replaced, and nothing else.
    """
    check_replaceable(folder, stem, replace)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(folder)
    old = partial_path(folder)
    partial.mkdir()
    try:
        yield partial
        write_manifest(partial, {path.name: manifest_entry(path) for path in sorted(partial.iterdir())})
        check_replaceable(folder, stem, replace)              # somebody may have written there meanwhile
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
    finally:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)

def check_replaceable(folder: Path, stem: str, replace: bool) -> None:
    """Raise DataError if the folder has any file, or with `replace` one that is not of a data set named `stem`."""
    others = "|".join((VOCAB_FILE, TOKENIZER_FILE, MANIFEST_FILE, REPORT_FILE))
    own_name = re.compile(rf"{re.escape(stem)}_(train|val)_\d{{6,}}\.bin|{others}")
    names = []
    if os.path.lexists(folder):
        names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if not own_name.fullmatch(name) or not (folder / name).is_file()]
    check(not foreign, f"{folder} has {foreign[:1]}, which is no file of a data set named {stem}: give another --out")
    check(replace or not names, f"{folder} has a data set: give another --out, or replace it with --force")

def print_result(*lines: str) -> None:
    """Print results. Control characters, and characters that the console cannot encode, are escaped."""
    sys.stdout.reconfigure(errors="backslashreplace")
    print("\n".join(lines).translate(ESCAPED_CONTROLS), flush=True)

def print_status(text: str) -> None:
    print(text.translate(ESCAPED_CONTROLS), file=sys.stderr, flush=True)

def raise_interrupt(signum: int, _: Any) -> None:
    """Handle a signal: raise KeyboardInterrupt with the exit status of shells."""
    raise KeyboardInterrupt(128 + signum)

def run_main(main: Callable[[], None]) -> int:
    """Run the main function of a tool, and return its exit status. An error that the user can fix is one sentence."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:    # nohup sets SIG_IGN
            signal.signal(signum, raise_interrupt)
    try:
        main()
    except KeyboardInterrupt as interrupt:
        print_status("\ninterrupted: files with their final names are complete; repeat the command to do the rest")
        return interrupt.args[0]
    except (DataError, OSError) as error:
        print_status(f"error: {error}")
        return 1
    return 0
