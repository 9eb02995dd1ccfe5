"""Download FineWeb in GPT-2 tokens: shards of 100 million tokens (200 MB) each.

    python data/cached_fineweb10B.py [N] [--out data/fineweb10B]

Downloads N training shards (0 to 103, default 9) and the validation shard. Complete shards are not downloaded again
and need no network. Interrupted downloads (`*.part`) are resumed, also by a later call. A shard gets its final name
once its header, its length and, if the server sends one, its SHA-256 are correct. `manifest.json` stores the hashes, so
that a later call detects and replaces damaged shards. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as in
huggingface_hub. Data set: kjj0/fineweb10B-gpt2 (Keller Jordan), from FineWeb (Hugging Face).
"""
import argparse
import os
import sys
from pathlib import Path
from typing import Any, Callable

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff
from tqdm import tqdm

from shard_files import (DataError, check, check_content, locked, manifest_entry, parse_folder, print_result,
                         print_status, read_header, read_manifest, run_main, write_manifest)

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
# Size of one request. An interruption loses at most one request. Requests are sequential, and each one waits an
# estimated 0.4 to 0.7 s for a redirect and the first byte. 10 shards (2 GB) take 30 requests of 64 MiB, or 240 of
# 8 MiB.
REQUEST_BYTES = 64 << 20
RESUME_HINT = "repeat the command to resume"

def find_problem(path: Path) -> str:
    """Return what is wrong with a shard, or "" for an intact one. Compares the hash if the manifest lists it."""
    if not path.exists():
        return f"{path.name} is missing"
    try:
        read_header(path)
        check_content(path)
    except DataError as error:
        return str(error)
    return ""

def request(function: Callable, url: str, **options: Any) -> Any:
    """Call a function of the library, which retries. Any error becomes a DataError."""
    try:
        return function(url, **options)
    except Exception as error:               # the library does not export the error types of its HTTP client
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"{url}: {reason}: check the network, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE; "
                        f"{RESUME_HINT}") from None

def get(url: str, **options: Any) -> bytes:
    response = http_backoff("GET", url, timeout=HF_HUB_DOWNLOAD_TIMEOUT, **options)
    hf_raise_for_status(response)
    return response.content

def download_rest(url: str, path: Path) -> str:
    """Download the missing rest of a file. Returns its expected SHA-256, or "" if the server does not send one.

    hf_hub_download is less code, but it deletes the partial file of an interrupted call.
    """
    metadata = request(get_hf_file_metadata, url, retry_on_errors=True)
    check(metadata.size, f"{url}: no size in the response: check HF_ENDPOINT")
    with (path.open("ab") as file,
          tqdm(initial=file.tell(), total=metadata.size, unit="B", unit_scale=True, leave=False, disable=None) as bar):
        while file.tell() < metadata.size:
            last = min(file.tell() + REQUEST_BYTES, metadata.size) - 1
            content = request(get, url, headers=build_hf_headers() | {"Range": f"bytes={file.tell()}-{last}"})
            check(content, f"{url}: an empty response: {RESUME_HINT}")
            file.write(content)
            file.flush()
            bar.update(len(content))
    return metadata.etag if len(metadata.etag or "") == 64 else ""

def fetch(name: str, out: Path, endpoint: str | None) -> dict[str, Any]:
    """Download one shard, with a second attempt if it is damaged. Returns its manifest entry."""
    url = hf_hub_url(REPO, name, repo_type="dataset", endpoint=endpoint)
    path = out / f"{name}.part"
    for _ in range(2):
        sha256 = download_rest(url, path)
        entry = manifest_entry(path)
        problem = find_problem(path)
        if not problem and sha256 and sha256 != entry["sha256"]:
            problem = f"{path} has another SHA-256 than the server states"
        if not problem:
            os.replace(path, out / name)
            print_status(f"{name}: {entry['bytes']:,} bytes, verified")
            return entry
        path.unlink()
        print_status(f"{problem}; removed it")
    raise DataError(f"{url}: the shard is damaged on the server: try again later, or give another --endpoint")

def get_shards(names: list[str], out: Path, endpoint: str | None) -> None:
    """Download all named shards that are missing or damaged, and update the manifest."""
    entries = read_manifest(out)
    for name in names:
        problem = find_problem(out / name)
        if problem:
            print_status(f"{problem}; downloading it")
            entries[name] = fetch(name, out, endpoint)
        elif name in entries:
            continue
        else:
            entries[name] = manifest_entry(out / name)    # downloaded by an older version
        write_manifest(out, entries)

def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", metavar="N", type=int, nargs="?", default=9,
                        help="number of training shards, 0 to 103 [9]")
    parser.add_argument("--out", type=parse_folder, default=Path(__file__).resolve().parent / "fineweb10B",
                        help="folder to write to [data/fineweb10B]")
    parser.add_argument("--endpoint", help="server [HF_ENDPOINT, or the Hugging Face hub]")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"N={args.shards}: give 0 to {TRAIN_SHARDS}")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{number:06d}.bin" for number in range(1, args.shards + 1)]
    with locked(args.out):
        get_shards(names, args.out, args.endpoint)
    print_result(f"{args.out}: {args.shards} training shards and the validation shard, complete")


if __name__ == "__main__":
    sys.exit(run_main(main))
