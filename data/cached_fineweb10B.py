"""Download FineWeb in GPT-2 tokens: shards of 100 million tokens (200 MB) each.

    python data/cached_fineweb10B.py [N] [--out data/fineweb10B]

Downloads N training shards (0 to 103, default 9) and the validation shard. Complete shards are not downloaded again
and need no network. Interrupted downloads (`*.part`) are resumed, also by a later call. A shard gets its final name
once its header, its length and, if the server sends one, its SHA-256 are correct. `manifest.json` stores the hashes, so
that a later call detects and replaces damaged shards. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as in
huggingface_hub. Data set: kjj0/fineweb10B-gpt2 (Keller Jordan), from FineWeb (Hugging Face).
"""
import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any, Iterator

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff
from tqdm import tqdm

from shard_files import (SHARD_PREFIX, DataError, check, check_content, check_regular_file, disk_errors, exit_on_error,
                         file_problem, locked, manifest_entry, name_file, parse_folder, print_result, print_status,
                         read_header, read_manifest, run_main, write_manifest)

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
# Size of one request. An interruption loses at most one request. Requests are sequential, and each one waits an
# estimated 0.4 to 0.7 s for a redirect and the first byte. 10 shards (2 GB) take 30 requests of 64 MiB, or 240 of
# 8 MiB.
REQUEST_BYTES = 64 << 20
MOVE_HINT = "move it away, or give another --out"
RESUME_HINT = "repeat the command to resume"

def find_problem(path: Path) -> str:
    """Return what is wrong with a shard, or "" for an intact one. Compares the hash if the manifest lists it.

    Raises DataError if the path is a directory, a pipe, a device or a dangling link.
    """
    if file_problem(path) == "no file":
        return f"{path.name}: missing"
    check_regular_file(path, "a shard", "remove it")
    try:
        read_header(path)
        check_content(path)
    except DataError as error:
        what, found, expected, _ = error.args
        return f"{what}: found {found}, expected {expected}"
    return ""

@contextlib.contextmanager
def hub_errors(url: str) -> Iterator[None]:
    """Turn any error of a request, after the retries of the library, into a DataError."""
    try:
        yield
    except Exception as error:               # the library does not export the error types of its HTTP client
        found = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(url, found=repr(found), expected="the shard",
                        hint=f"check the network, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE; {RESUME_HINT}") from None

def read_prefix(path: Path) -> bytes:
    """Read the first bytes of a file: SHARD_PREFIX if it is a shard, or fewer bytes if the shard is truncated."""
    with name_file(path), path.open("rb") as file:
        return file.read(len(SHARD_PREFIX))

def check_unfinished_shard(path: Path) -> None:
    """Raise DataError for a link, for a file with hard links, and for a file that does not begin like a shard.

    Appending to these would change a file of the user.
    """
    if not os.path.lexists(path):
        return
    found = "a symbolic link" if path.is_symlink() else file_problem(path)
    if not found:
        prefix = read_prefix(path)
        num_links = path.stat().st_nlink
        if num_links > 1:
            found = f"a file with {num_links} hard links"
        elif not SHARD_PREFIX.startswith(prefix):
            found = f"a file that begins with {prefix!r}"
    check(not found, path, found=found, hint=MOVE_HINT,
          expected="an unfinished shard: a regular file without hard links that begins like a shard")

def download_rest(url: str, path: Path) -> str:
    """Download the missing rest of a file. Returns its expected SHA-256, or "" if the server does not send one.

    hf_hub_download is less code, but it deletes the partial file of an interrupted call. Raises DataError.
    """
    with hub_errors(url):
        metadata = get_hf_file_metadata(url, retry_on_errors=True)
    check(metadata.size, url, found="no size in the response", expected="the size of the shard",
          hint="check HF_ENDPOINT")
    check_unfinished_shard(path)
    file = path.open("ab")
    with (disk_errors(path, f"free disk space; {RESUME_HINT}"), file,
          tqdm(initial=file.tell(), total=metadata.size, unit="B", unit_scale=True, leave=False, disable=None) as bar):
        while file.tell() < metadata.size:
            last = min(file.tell() + REQUEST_BYTES, metadata.size) - 1
            headers = build_hf_headers() | {"Range": f"bytes={file.tell()}-{last}"}
            with hub_errors(url):
                response = http_backoff("GET", url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT)
                hf_raise_for_status(response)
            check(response.content, url, found="an empty response", expected="the shard", hint=RESUME_HINT)
            file.write(response.content)
            file.flush()
            bar.update(len(response.content))
        os.fsync(file.fileno())
    return metadata.etag if len(metadata.etag or "") == 64 else ""

def fetch(name: str, out: Path, endpoint: str | None) -> dict[str, Any]:
    """Download one shard, with a second attempt if it is damaged. Returns its manifest entry. Raises DataError."""
    url = hf_hub_url(REPO, name, repo_type="dataset", endpoint=endpoint)
    path = out / f"{name}.part"
    for _ in range(2):
        sha256 = download_rest(url, path)
        entry = manifest_entry(path)
        problem = find_problem(path)
        if not problem and sha256 and sha256 != entry["sha256"]:
            problem = f"{path}: found SHA-256 {entry['sha256'][:16]}..., expected {sha256[:16]}..."
        if not problem:
            os.replace(path, out / name)
            print_status(f"{name}: {entry['bytes']:,} bytes, verified")
            return entry
        path.unlink()
        print_status(f"{problem}; removed it")
    raise DataError(url, found=repr(problem), expected="an intact shard",
                    hint="try again later, or give another --endpoint")

def get_shards(names: list[str], out: Path, endpoint: str | None) -> None:
    """Download all named shards that are missing or damaged, and update the manifest. Raises DataError."""
    entries = read_manifest(out)
    for name in names:
        problem = find_problem(out / name)
        if problem:
            if (out / name).exists() and name not in entries:
                check(SHARD_PREFIX.startswith(read_prefix(out / name)), out / name,
                      found="a file that is not a token shard", expected="a shard", hint=MOVE_HINT)
            print_status(f"{problem}; downloading it")
            entries[name] = fetch(name, out, endpoint)
        elif name in entries:
            continue
        else:
            entries[name] = manifest_entry(out / name)    # downloaded by an older version
        write_manifest(out, entries)

@exit_on_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", metavar="N", type=int, nargs="?", default=9,
                        help="number of training shards, 0 to 103 [9]")
    parser.add_argument("--out", type=parse_folder, default=Path(__file__).resolve().parent / "fineweb10B",
                        help="folder to write to [data/fineweb10B]")
    parser.add_argument("--endpoint", help="server [HF_ENDPOINT, or the Hugging Face hub]")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"N: found {args.shards}, expected 0 to {TRAIN_SHARDS}")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{number:06d}.bin" for number in range(1, args.shards + 1)]
    with locked(args.out):
        get_shards(names, args.out, args.endpoint)
    print_result(f"{args.out}: {args.shards} training shards and the validation shard, complete")


if __name__ == "__main__":
    sys.exit(run_main(main))
