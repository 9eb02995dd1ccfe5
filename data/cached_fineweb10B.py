"""Download FineWeb in GPT-2 tokens: shards of 100 million tokens (200 MB) each.

    python data/cached_fineweb10B.py [N] [--out data/fineweb10B] [--jobs 4]

N training shards, 0 to 103, by default 9, and the validation shard. Whole shards are kept without asking the network,
others are fetched again; what was cut goes on where it stopped (`*.part`), in a later call too. A shard gets its name
when its header, its length and, where the server tells it, its SHA-256 are right: a `*.bin` is always whole.
`manifest.json` keeps the hashes, so that damage is noticed later. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what
they mean to huggingface_hub. Data set: kjj0/fineweb10B-gpt2 (Keller Jordan), from FineWeb (Hugging Face).
"""
from __future__ import annotations

import argparse
import os
import re
import sys
import time
from functools import partial
from io import FileIO
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from shard_files import (MANIFEST, DataError, as_program, check_content, describe, errors_in_words, folder_name,
                         lock_folder, note, read_header, read_manifest, regular_file, say, write_manifest)

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
RETRIES = 5                                  # of a shard, after 1, 2, 4, 8, 16 s or what the server asks for
CHUNK = 1 << 20                              # bytes that a cut can lose; the hub's own 10 MB are long on a slow line
SHA256 = re.compile("[0-9a-f]{64}")
PASSING = (408, 416, 425, 429)               # of the HTTP statuses 400 to 499, those that may be better next time
LATER = "the same command goes on where this one stopped"
ADVICE = {401: "set a valid HF_TOKEN, or unset it",
          403: "set an HF_TOKEN with access",
          404: "look at HF_ENDPOINT"}


class Part(FileIO):
    """An unfinished shard: moves the bar; a full disk cannot pass for a fault of the network."""

    def __init__(self, path: Path, bar: Any) -> None:
        if os.path.lexists(path):
            regular_file(path, "an unfinished shard", "remove it")
        super().__init__(path, "a+")
        self.bar = bar
        self.announced = 0                   # bytes to come that bar.total holds already

    def size(self) -> int:
        return self.seek(0, os.SEEK_END)

    def clear(self) -> None:
        self.truncate(self.seek(0))

    def expect(self, coming: int) -> None:
        """Tell the bar how many bytes are still to come."""
        self.bar.total += coming - self.announced
        self.announced = coming

    def write(self, data: bytes) -> int:
        done = 0
        try:
            while done < len(data):          # a disk that fills up still takes a piece
                done += super().write(data[done:])
        except OSError as error:
            raise DataError(f"{self.name}: found {error.strerror!r} at {self.tell():,} bytes, expected room for the "
                            f"shard; make room, {LATER}") from None
        self.announced -= done
        self.bar.update(done)
        return done


def fault(path: Path, manifest: dict[str, dict]) -> str:
    """What is wrong with a shard, its content included where the manifest knows it; "" if nothing. Raises DataError."""
    if not os.path.lexists(path):
        return f"{path.name}: not here"
    regular_file(path, "a shard", "remove it")
    try:
        read_header(path)
        check_content(path, manifest)
    except DataError as error:
        return str(error)
    return ""


def attempt(url: str, part: Part) -> dict[str, Any]:
    """Fetch what the part lacks and check the whole; http_get itself resumes after most cuts.

    Returns the shard's entry of the manifest. Raises ValueError if the whole is wrong.
    """
    from huggingface_hub import file_download, utils
    about = file_download.get_hf_file_metadata(url)
    if about.size and part.size() > about.size:
        part.clear()
    have = part.size()
    part.expect((about.size or have) - have)
    headers = utils.build_hf_headers() | {"Accept-Encoding": "identity"}
    file_download.http_get(url, part, resume_size=have, expected_size=about.size, headers=headers)

    entry = describe(Path(part.name))
    wrong = fault(Path(part.name), {})
    if not wrong and SHA256.fullmatch(about.etag or "") and about.etag != entry["sha256"]:
        wrong = f"found SHA-256 {entry['sha256'][:16]}..., expected {about.etag[:16]}..."
    if wrong:
        part.clear()
        raise ValueError(wrong)
    return entry


def status_of(error: Exception) -> int:
    """The server's answer that an error came from; 0 if there was none."""
    answer = getattr(error, "response", None)
    return getattr(answer, "status_code", 0)


def words_for(error: Exception) -> str:
    """What was found, for the message."""
    first_line = str(error).split("\n")[0]
    if isinstance(error, ValueError):        # of `attempt`: a whole shard that is wrong
        return first_line
    status = status_of(error)
    return f"found {f'HTTP {status}' if status else first_line or type(error).__name__!r}, expected the shard"


def seconds_to_wait(error: Exception, failures: int) -> int:
    """What the server asks for, else 1, 2, 4, ... s."""
    asked = error.response.headers.get("Retry-After", "") if status_of(error) else ""
    return int(asked) if asked.isdigit() else 2 ** max(0, failures - 1)


def fetch(name: str, out: Path, endpoint: str | None, bar: Any) -> tuple[str, dict[str, Any]]:
    """Get one shard, trying again where that may help. Returns its entry of the manifest.

    An attempt that got further does not count as failed. Raises DataError.
    """
    from huggingface_hub import errors, hf_hub_url
    url = hf_hub_url(REPO, name, repo_type="dataset", endpoint=endpoint)
    failures = 0
    entry = None
    with Part(out / f"{name}.part", bar) as part:
        while entry is None:
            before = part.size()
            try:
                entry = attempt(url, part)
            except DataError:
                raise
            except Exception as error:       # every version of the hub has its own kinds for a cut connection
                if part.size() <= before:
                    failures += 1
                found = words_for(error)
                status = status_of(error)
                refused = 400 <= status < 500 and status not in PASSING
                if refused or failures > RETRIES or isinstance(error, errors.OfflineModeIsEnabled):
                    advice = ADVICE.get(status, f"look at the network; {LATER}")
                    raise DataError(f"{name} from {url}: {found}; {advice}") from error
                if status == 416:            # the server has less than we kept
                    part.clear()
                wait = seconds_to_wait(error, failures)
                tell(bar, f"{name}: {found}; trying again in {wait} s")
                time.sleep(wait)
        os.fsync(part.fileno())
    os.replace(part.name, out / name)
    tell(bar, f"{name}: {entry['bytes']:,} bytes, checked")
    return name, entry


def tell(bar: Any, text: str) -> None:
    """A line on stderr that does not tear the bar."""
    with bar.external_write_mode(file=sys.stderr):
        note(text)


def download(names: list[str], out: Path, endpoint: str | None, jobs: int) -> dict[str, dict]:
    """Get shards; returns their entries. The first to fail for good ends it; parts are kept."""
    from huggingface_hub import constants, utils
    from tqdm import tqdm
    utils.disable_progress_bars()            # one bar here instead of one per shard
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK
    with ThreadPool(jobs) as pool, tqdm(total=0, unit="B", unit_scale=True, disable=None) as bar:
        get = partial(fetch, out=out, endpoint=endpoint, bar=bar)
        return dict(pool.imap_unordered(get, names))


def get_shards(names: list[str], args: argparse.Namespace) -> None:
    """Bring the folder to the state in which all named shards are whole. Raises DataError."""
    args.out.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(args.out)             # a second download waits, then finds all
    try:
        (args.out / f"{MANIFEST}.part").unlink(missing_ok=True)
        manifest = read_manifest(args.out)
        with ThreadPool(args.jobs) as pool:
            found = pool.map(partial(fault, manifest=manifest), [args.out / name for name in names])
        faults = {name: wrong for name, wrong in zip(names, found) if wrong}
        for wrong in faults.values():
            note(f"{wrong}: fetching it")
        fetched = download(list(faults), args.out, args.endpoint, args.jobs) if faults else {}

        entries = manifest | fetched
        for name in set(names) - entries.keys():              # fetched by an older version
            entries[name] = describe(args.out / name)
        try:
            if entries != manifest:
                write_manifest(args.out, entries)
        except DataError as error:
            if fetched:
                raise
            note(f"{error}")                 # a folder that may only be read serves all the same
    finally:
        if lock is not None:
            os.close(lock)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", metavar="N", type=int, nargs="?", default=9, help="training shards, 0 to 103")
    parser.add_argument("--out", type=folder_name, default=Path(__file__).parent / "fineweb10B",
                        help="data/fineweb10B")
    parser.add_argument("--jobs", type=int, default=4, help="shards at a time, 4")
    parser.add_argument("--endpoint", help="server, instead of HF_ENDPOINT or the Hugging Face hub")
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= TRAIN_SHARDS or args.jobs < 1:
        parser.error(f"found N={args.shards} --jobs={args.jobs}, expected N from 0 to {TRAIN_SHARDS}, 1 job or more")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{number:06d}.bin" for number in range(1, args.shards + 1)]
    try:
        with errors_in_words():
            get_shards(names, args)
            say(f"{os.path.relpath(args.out)}: {args.shards} training shards and the validation shard, whole")
    except ImportError as error:
        sys.exit(f"error: found {str(error)!r}, expected huggingface_hub and tqdm; pip install -r requirements.txt")
    except KeyboardInterrupt as interrupt:
        note(f"\ninterrupted; {LATER}")
        status = interrupt.args[0] if interrupt.args else 130
        os._exit(status)                     # closing connections that threads still read from may hang


if __name__ == "__main__":
    sys.exit(as_program(main))
