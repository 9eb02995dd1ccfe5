"""Download FineWeb in GPT-2 tokens: shards of 100 million tokens (200 MB) each.

    python data/cached_fineweb10B.py [N] [--out data/fineweb10B]

N training shards, 0 to 103, by default 9, and the validation shard. Whole shards are kept without asking the network;
what was cut goes on where it stopped (`*.part`), in a later call too. A shard gets its name when its header, its length
and, where the server tells it, its SHA-256 are right; `manifest.json` keeps the hashes, so that damage is noticed later
and mended. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to huggingface_hub. Data set:
kjj0/fineweb10B-gpt2 (Keller Jordan), from FineWeb (Hugging Face).
"""
import argparse
import contextlib
import os
import stat
import sys
from io import FileIO
from pathlib import Path
from typing import Any, Iterator

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff
from tqdm import tqdm

from shard_files import (SHARD_START, DataError, as_program, check_content, describe, errors_in_words, folder_name,
                         kind_of, locked, check, note, read_header, read_manifest, regular_file, say, starts_as_shard,
                         write_manifest)

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
# Bytes of one request, and the most that an interruption loses. Requests follow each other, and each one waits for a
# redirect and the first byte, an estimated 0.4 to 0.7 s. 10 shards (2 GB) take 30 requests of 64 MiB, but 240 of 8 MiB.
BLOCK = 64 << 20
MOVE = "move it away, or give another --out"
LATER = "the same command goes on where this one stopped"

def fault(path: Path) -> str:
    """Say what is wrong with a shard, its content included where the manifest knows it; "" if nothing."""
    if kind_of(path) == "no file":
        return f"{path.name}: not here"
    regular_file(path, "a shard", "remove it")
    try:
        read_header(path)
        check_content(path)
    except DataError as error:
        return str(error)
    return ""

@contextlib.contextmanager
def hub_in_words(url: str) -> Iterator[None]:
    """Raise DataError for what the library could not get in spite of its retries."""
    try:
        yield
    except Exception as error:               # also those of the library's HTTP client, which have no name in its own
        found = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(url, found=repr(found), expected="the shard",
                        hint=f"look at the network, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE; {LATER}") from None

def check_own(path: Path, entries: dict[str, dict]) -> None:
    """Raise DataError if a file that a download would replace is neither in the manifest nor a piece of a shard."""
    if path.exists():
        check(path.name in entries or starts_as_shard(path), path, found="a file that is no token shard",
              expected="a shard", hint=MOVE)

def open_no_link(name: str, flags: int) -> int:
    """Open a file without following a link and, if it is a named pipe, without waiting."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

@contextlib.contextmanager
def unfinished_shard(path: Path) -> Iterator[FileIO]:
    """Open an unfinished shard to append to, or a new file. Raises DataError for a link and for any other file."""
    expected = "an unfinished shard: a file with one name, which begins as a shard does"
    try:
        file = open(path, "a+b", buffering=0, opener=open_no_link)
    except OSError as error:
        found = "a link" if path.is_symlink() else kind_of(path) or repr(error.strerror)
        raise DataError(path, found=found, expected=expected, hint=MOVE) from None
    with file:
        about = os.fstat(file.fileno())
        check(stat.S_ISREG(about.st_mode), path, found=kind_of(path), expected=expected, hint=MOVE)
        check(about.st_nlink == 1, path, found=f"a file with {about.st_nlink} names (hard links)", expected=expected,
              hint=MOVE)
        first = os.pread(file.fileno(), len(SHARD_START), 0)
        check(SHARD_START.startswith(first), path, found=f"a file that begins with {first!r}", expected=expected,
              hint=MOVE)
        yield file

def append(file: FileIO, block: bytes) -> None:
    """Write all of a block. Raises DataError at a full disk, which still takes a piece."""
    try:
        while block:
            block = block[file.write(block):]
    except OSError as error:
        raise DataError(file.name, found=repr(error.strerror), expected="room for the shard",
                        hint=f"make room; {LATER}") from None

def receive(url: str, path: Path) -> str:
    """Fetch what a file lacks. Returns the SHA-256 that it should have; "" if the server does not tell it.

    hf_hub_download would be less code, but it removes what an interrupted call has fetched.
    """
    with hub_in_words(url):
        about = get_hf_file_metadata(url, retry_on_errors=True)
    check(about.size, url, found="no size", expected="that of the shard", hint="look at HF_ENDPOINT")
    with (unfinished_shard(path) as file,
          tqdm(initial=file.tell(), total=about.size, unit="B", unit_scale=True, leave=False, disable=None) as bar):
        while file.tell() < about.size:
            last = min(file.tell() + BLOCK, about.size) - 1
            headers = build_hf_headers() | {"Range": f"bytes={file.tell()}-{last}"}
            with hub_in_words(url):
                answer = http_backoff("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT)
                hf_raise_for_status(answer)
            check(answer.content, url, found="an empty answer", expected="the shard", hint=LATER)
            append(file, answer.content)
            bar.update(len(answer.content))
        os.fsync(file.fileno())
    return about.etag if len(about.etag or "") == 64 else ""

def fetch(name: str, out: Path, endpoint: str | None) -> dict[str, Any]:
    """Get one shard, once more if what came is wrong. Returns its entry of the manifest. Raises DataError."""
    url = hf_hub_url(REPO, name, repo_type="dataset", endpoint=endpoint)
    path = out / f"{name}.part"
    for _ in range(2):
        sha256 = receive(url, path)
        entry = describe(path)
        wrong = fault(path)
        if not wrong and sha256 and sha256 != entry["sha256"]:
            wrong = f"{path}: found SHA-256 {entry['sha256'][:16]}..., expected {sha256[:16]}..."
        if not wrong:
            os.replace(path, out / name)
            note(f"{name}: {entry['bytes']:,} bytes, checked")
            return entry
        path.unlink()
        note(f"{wrong}: removed")
    raise DataError(url, found=repr(wrong), expected="a whole shard", hint="try again later, or another --endpoint")

def get_shards(names: list[str], out: Path, endpoint: str | None) -> None:
    """Bring the folder to the state in which all named shards are whole. Raises DataError."""
    entries = read_manifest(out)
    for name in names:
        wrong = fault(out / name)
        if wrong:
            check_own(out / name, entries)
            note(f"{wrong}: fetching it")
            entries[name] = fetch(name, out, endpoint)
        elif name in entries:
            continue
        else:
            entries[name] = describe(out / name)              # fetched by an older version
        write_manifest(out, entries)

@errors_in_words()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", metavar="N", type=int, nargs="?", default=9, help="training shards, 0 to 103")
    parser.add_argument("--out", type=folder_name, default=Path(__file__).resolve().parent / "fineweb10B",
                        help="data/fineweb10B")
    parser.add_argument("--endpoint", help="server, instead of HF_ENDPOINT or the Hugging Face hub")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"found N={args.shards}, expected 0 to {TRAIN_SHARDS}")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{number:06d}.bin" for number in range(1, args.shards + 1)]
    with locked(args.out):
        get_shards(names, args.out, args.endpoint)
    say(f"{args.out}: {args.shards} training shards and the validation shard, whole")


if __name__ == "__main__":
    sys.exit(as_program(main))
