"""Download FineWeb in GPT-2 tokens: shards of 100 million tokens (200 MB) each.

    python data/cached_fineweb10B.py [N] [--out data/fineweb10B]

N training shards, 0 to 103, by default 9, and the validation shard. Whole shards are kept without asking the network;
what was cut goes on where it stopped (`*.part`), in a later call too. A shard gets its name when its header, its length
and, where the server tells it, its SHA-256 are right; `manifest.json` keeps the hashes, so that damage is noticed later
and mended. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are those of the Hugging Face hub. Data set: kjj0/fineweb10B-gpt2
(Keller Jordan), from FineWeb (Hugging Face).
"""
import argparse
import errno
import os
import sys
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import HTTPErrorProcessor, Request, build_opener, urlopen

from tqdm import tqdm

from shard_files import (DataError, as_program, check_content, describe, errors_in_words, folder_name, kind_of, locked,
                         need, note, read_header, read_manifest, regular_file, say, write_manifest)

REPO = "datasets/kjj0/fineweb10B-gpt2/resolve/main"
TRAIN_SHARDS = 103
RETRIES = 5                                  # of a shard, after 1, 2, 4, 8, 16 s or what the server asks for
TIMEOUT = 60                                 # seconds without a byte, after which a connection counts as cut
CHUNK = 1 << 20                              # bytes
LATER = "the same command goes on where this one stopped"
# HTTP statuses and errors of the system that will not be better next time.
ADVICE = {401: "set a valid HF_TOKEN, or unset it", 403: "set an HF_TOKEN with access", 404: "look at HF_ENDPOINT",
          errno.ENOSPC: f"make room, {LATER}", errno.EDQUOT: f"make room, {LATER}", errno.EFBIG: f"make room, {LATER}"}

class FirstAnswer(HTTPErrorProcessor):
    """Redirects are not followed: the hub's own answer tells size and hash, and its token is not for others."""

    def http_response(self, request: Request, response: Any) -> Any:
        return response if 300 <= response.status < 400 else super().http_response(request, response)

    https_response = http_response

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

def ask(url: str) -> Any:
    """Return the headers of the hub's first answer."""
    request = Request(url, method="HEAD")
    if os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {os.environ['HF_TOKEN']}")
    with build_opener(FirstAnswer).open(request, timeout=TIMEOUT) as answer:
        return answer.headers

def clear(file: Any) -> None:
    file.truncate(file.seek(0))

def receive(url: str, file: Any, total: int) -> None:
    """Append to the file what it lacks of `total` bytes; 0: unknown."""
    request = Request(url, headers={"Range": f"bytes={file.tell()}-"} if file.tell() else {})
    with urlopen(request, timeout=TIMEOUT) as answer:
        if answer.status != 206:             # the server sends all of it
            clear(file)
        with tqdm(initial=file.tell(), total=total, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            while block := answer.read(CHUNK):
                while block:                 # a disk that fills up still takes a piece
                    written = file.write(block)
                    block = block[written:]
                    bar.update(written)
    if file.tell() < total:
        raise ConnectionError(f"{file.tell():,} of {total:,} bytes")

def attempt(url: str, file: Any) -> dict[str, Any]:
    """Fetch what the part lacks and check the whole. Returns the shard's entry of the manifest. Raises ValueError."""
    headers = ask(url)
    total = int(headers.get("X-Linked-Size", 0))
    if total and file.tell() > total:
        clear(file)
    if not total or file.tell() < total:
        receive(urljoin(url, headers.get("Location", "")), file, total)
    entry = describe(Path(file.name))
    wrong = fault(Path(file.name))
    sha256 = headers.get("X-Linked-Etag", "").strip('"')
    if not wrong and len(sha256) == 64 and sha256 != entry["sha256"]:
        wrong = f"found SHA-256 {entry['sha256'][:16]}..., expected {sha256[:16]}..."
    if wrong:
        clear(file)
        raise ValueError(wrong)
    return entry

def fetch(name: str, out: Path, endpoint: str) -> dict[str, Any]:
    """Get one shard, trying again where that may help. Returns its entry of the manifest. Raises DataError.

    An attempt that got further does not count as failed.
    """
    url = f"{endpoint}/{REPO}/{name}"
    path = out / f"{name}.part"
    if os.path.lexists(path):
        regular_file(path, "an unfinished shard", "remove it")
    failures = 0
    entry = None
    with path.open("ab", buffering=0) as file:
        while entry is None:
            before = file.tell()
            try:
                entry = attempt(url, file)
            except (OSError, HTTPException, ValueError) as error:
                failures += file.tell() <= before
                status = getattr(error, "code", error.errno if isinstance(error, OSError) else None)
                found = f"HTTP {status}" if isinstance(error, HTTPError) else f"{error}" or type(error).__name__
                if status in ADVICE or failures > RETRIES:
                    advice = ADVICE.get(status, f"look at the network; {LATER}")
                    raise DataError(f"{name} from {url}", repr(found), "the shard", advice) from None
                if status == 416:            # the server has less than we kept
                    clear(file)
                wait = 2 ** max(0, failures - 1)
                if isinstance(error, HTTPError) and error.headers.get("Retry-After", "").isdigit():
                    wait = int(error.headers["Retry-After"])
                note(f"{name}: {found}; trying again in {wait} s")
                time.sleep(wait)
        os.fsync(file.fileno())
    os.replace(path, out / name)
    note(f"{name}: {entry['bytes']:,} bytes, checked")
    return entry

def get_shards(names: list[str], out: Path, endpoint: str) -> None:
    """Bring the folder to the state in which all named shards are whole. Raises DataError."""
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    entries = read_manifest(out)
    for name in names:
        wrong = fault(out / name)
        if wrong:
            need(not offline, name, "HF_HUB_OFFLINE set and no whole shard", "to fetch it", "unset that")
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
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    parser.add_argument("--endpoint", default=hub, help="server, instead of HF_ENDPOINT or the Hugging Face hub")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"found N={args.shards}, expected 0 to {TRAIN_SHARDS}")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{number:06d}.bin" for number in range(1, args.shards + 1)]
    with locked(args.out):
        get_shards(names, args.out, args.endpoint.rstrip("/"))
    say(f"{args.out}: {args.shards} training shards and the validation shard, whole")


if __name__ == "__main__":
    sys.exit(as_program(main))
