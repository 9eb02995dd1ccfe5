"""Download FineWeb in GPT-2 tokens: N training shards and the validation shard, 100 million tokens (200 MB) each.

    python data/cached_fineweb10B.py [N] [--out data/fineweb10B] [--jobs 4]

N is 0 to 103, by default 9. Whole shards are kept without asking the network, others are fetched again; what was cut
goes on where it stopped (`*.part`), in a later call too. A shard gets its name when its header, its length and, where
the server tells it, its SHA-256 are right: a `*.bin` is always whole. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean
what they mean to huggingface_hub. Data set: kjj0/fineweb10B-gpt2 (Keller Jordan), from FineWeb (Hugging Face).
"""
from __future__ import annotations

import argparse
import hashlib
import os
import re
import struct
import sys
import time
from functools import partial
from io import FileIO
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

REPO, TRAIN_SHARDS = "kjj0/fineweb10B-gpt2", 103
RETRIES = 5                                  # of a shard, after 1, 2, 4, 8, 16 s or what the server asks for
CHUNK = 1 << 20                              # bytes that a cut can lose; the hub's own 10 MB are long on a slow line
LATER = "the same command goes on where this one stopped"
ADVICE = {401: "set a valid HF_TOKEN, or unset it", 403: "set an HF_TOKEN with access", 404: "look at HF_ENDPOINT"}


class DownloadError(Exception):
    """Trying again will not help; the message says what was found, what was expected, and what to do."""


class Part(FileIO):
    """An unfinished shard: moves the bar, and a full disk cannot pass for a fault of the network."""
    def __init__(self, path: Path, bar: Any) -> None:
        super().__init__(path, "a+")
        self.bar, self.left = bar, 0         # bytes to come that bar.total holds already

    def write(self, data: bytes) -> int:
        done = 0
        try:
            while done < len(data):          # a disk that fills up still takes a piece
                done += super().write(data[done:])
        except OSError as error:
            raise DownloadError(f"{self.name}: found {error.strerror!r} at {self.tell():,} bytes, expected room for "
                                f"the shard; make room, {LATER}") from None
        self.left -= done
        self.bar.update(done)
        return done


def fault(path: Path) -> str:
    """What is wrong with a shard, "" if nothing; the format is in data/README.md."""
    if not path.exists():
        return "not here"
    with path.open("rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    size, expected = path.stat().st_size, 1024 + 2 * tokens
    if (magic, version) != (20240520, 1):
        return f"found header words {magic} and {version}, expected 20240520 and 1"
    return "" if size == expected > 1024 else f"found {size:,} bytes, expected {expected:,} as its header says"


def attempt(url: str, part: Part) -> None:
    """Fetch what the part lacks, check the whole; http_get resumes by itself after most cuts. Raises ValueError."""
    from huggingface_hub import file_download, utils
    about = file_download.get_hf_file_metadata(url)
    have = part.seek(0, os.SEEK_END)
    if have > (about.size or have):
        have = part.truncate(part.seek(0))
    coming = (about.size or have) - have
    part.bar.total += coming - part.left
    part.left = coming
    file_download.http_get(url, part, resume_size=have, expected_size=about.size,
                           headers=utils.build_hf_headers() | {"Accept-Encoding": "identity"})
    part.seek(0)
    digest, wrong = hashlib.file_digest(part, "sha256").hexdigest(), fault(Path(part.name))
    if not wrong and re.fullmatch("[0-9a-f]{64}", about.etag or "") and about.etag != digest:
        wrong = f"found SHA-256 {digest[:16]}..., expected {about.etag[:16]}..."
    if wrong:
        part.truncate(part.seek(0))
        raise ValueError(wrong)


def fetch(name: str, out: Path, endpoint: str | None, bar: Any) -> None:
    """Get one shard, trying again where that may help; an attempt that got further does not count as failed."""
    from huggingface_hub import errors, hf_hub_url
    url, failures = hf_hub_url(REPO, name, repo_type="dataset", endpoint=endpoint), 0
    with Part(out / f"{name}.part", bar) as part:
        while True:
            before = part.seek(0, os.SEEK_END)
            try:
                attempt(url, part)
                break
            except DownloadError:
                raise
            except Exception as error:       # every version of the hub has its own kinds for a cut connection
                failures += part.seek(0, os.SEEK_END) <= before
                answer = getattr(error, "response", None)
                status = getattr(answer, "status_code", 0)
                text = f"HTTP {status}" if status else str(error).split("\n")[0] or type(error).__name__
                found = text if isinstance(error, ValueError) else f"found {text!r}, expected the shard"
                lasting = 400 <= status < 500 and status not in (408, 416, 425, 429)
                if lasting or isinstance(error, errors.OfflineModeIsEnabled) or failures > RETRIES:
                    advice = ADVICE.get(status, f"look at the network; {LATER}")
                    raise DownloadError(f"{name} from {url}: {found}; {advice}") from error
                if status == 416:            # the server has less than we kept
                    part.truncate(part.seek(0))
                asked = answer.headers.get("Retry-After", "") if status else ""
                wait = int(asked) if asked.isdigit() else 2 ** max(0, failures - 1)
                bar.write(f"{name}: {found}; trying again in {wait} s", file=sys.stderr)
                time.sleep(wait)
    os.replace(part.name, out / name)
    bar.write(f"{name}: {(out / name).stat().st_size:,} bytes, checked", file=sys.stderr)


def download(names: list[str], out: Path, endpoint: str | None, jobs: int) -> None:
    """Get the shards that are not whole. The first to fail for good ends it; the others keep their parts."""
    from huggingface_hub import constants, utils
    from tqdm import tqdm
    utils.disable_progress_bars()            # one bar here instead of one per shard
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK
    with (utils.WeakFileLock(out / ".lock"), ThreadPool(jobs) as pool,      # a second download waits, then finds all
          tqdm(total=0, unit="B", unit_scale=True, disable=None) as bar):
        missing = [name for name in names if fault(out / name)]
        for _ in pool.imap_unordered(partial(fetch, out=out, endpoint=endpoint, bar=bar), missing):
            pass


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", metavar="N", type=int, nargs="?", default=9, help="training shards, 0 to 103")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fineweb10B", help="data/fineweb10B")
    parser.add_argument("--jobs", type=int, default=4, help="shards at a time, 4")
    parser.add_argument("--endpoint", help="server, instead of HF_ENDPOINT or the Hugging Face hub")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= TRAIN_SHARDS or args.jobs < 1:
        parser.error(f"found N={args.shards} --jobs={args.jobs}, expected N from 0 to {TRAIN_SHARDS}, 1 job or more")
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{n:06d}.bin" for n in range(1, args.shards + 1)]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        faults = {name: wrong for name in names if (wrong := fault(args.out / name))}
        for name, wrong in faults.items():
            print(f"{name}: {wrong}; fetching it", file=sys.stderr)
        if faults:
            download(names, args.out, args.endpoint, args.jobs)
        print(f"{os.path.relpath(args.out)}: {args.shards} training shards and the validation shard, whole")
    except ImportError as error:
        sys.exit(f"error: found {str(error)!r}, expected huggingface_hub and tqdm; pip install -r requirements.txt")
    except (DownloadError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"\ninterrupted; {LATER}", file=sys.stderr, flush=True)
        os._exit(130)                        # closing connections that threads still read from may hang


if __name__ == "__main__":
    main()
