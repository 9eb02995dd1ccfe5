"""Download FineWeb in GPT-2 tokens: shards of 100 million tokens (200 MB) each.

    python data/cached_fineweb10B.py [N] [--out data/fineweb10B]

Downloads N training shards (0 to 103, default 9) and the validation shard. Complete shards are not downloaded again
and need no network. A shard gets its final name once its header, its length and, if the server sends one, its SHA-256
are correct. `manifest.json` stores the hashes, so that a later call detects and replaces damaged shards. HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE work as in huggingface_hub. Data set: kjj0/fineweb10B-gpt2 (Keller Jordan), from FineWeb.
"""
import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

from shard_files import (DataError, check, check_shard, manifest_entry, parse_folder, partial_path, print_result,
                         print_status, read_manifest, run_main, write_manifest)

REPO = {"repo_id": "kjj0/fineweb10B-gpt2", "repo_type": "dataset"}
TRAIN_SHARDS = 103

def find_problem(path: Path) -> str:
    """Return what is wrong with a shard, or "" for an intact one. Compares the hash if the manifest lists it."""
    if not path.exists():
        return f"{path.name} is missing"
    try:
        check_shard(path)
    except DataError as error:
        return str(error)
    return ""

def download(name: str, folder: Path, endpoint: str | None) -> tuple[Path, str]:
    """Download a shard to a new folder. Returns its path, and its SHA-256 by the server, or "" if it sends none."""
    url = hf_hub_url(filename=name, endpoint=endpoint, **REPO)
    try:
        etag = get_hf_file_metadata(url).etag or ""
        path = hf_hub_download(filename=name, endpoint=endpoint, local_dir=folder, **REPO)
    except Exception as error:               # the library does not export the error types of its HTTP client
        if isinstance(error, OSError) and error.errno:        # of this machine, such as a full disk
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"{url}: {reason}: check the network, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE; repeat the "
                        "command to do the rest") from None
    return Path(path), etag * (len(etag) == 64)

def fetch(name: str, out: Path, endpoint: str | None) -> dict[str, Any]:
    """Download and check one shard. Returns its manifest entry."""
    folder = partial_path(out / name)
    try:
        path, sha256 = download(name, folder, endpoint)
        entry = manifest_entry(path)
        problem = find_problem(path)
        if not problem and sha256 not in ("", entry["sha256"]):
            problem = f"{path} has another SHA-256 than the server states"
        check(not problem, f"{problem}: repeat the command, or give another --endpoint")
        os.replace(path, out / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return entry

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
    args.out.mkdir(parents=True, exist_ok=True)
    entries = read_manifest(args.out)
    for name in ["fineweb_val_000000.bin", *(f"fineweb_train_{n:06d}.bin" for n in range(1, args.shards + 1))]:
        problem = find_problem(args.out / name)
        if problem:
            print_status(f"{problem}; downloading it")
            entries[name] = fetch(name, args.out, args.endpoint)
            write_manifest(args.out, entries)
    print_result(f"{args.out}: {args.shards} training shards and the validation shard, complete")


if __name__ == "__main__":
    sys.exit(run_main(main))
