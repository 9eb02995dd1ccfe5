"""Turn your own text into token shards for train_gpt.py: text files, JSON lines, Parquet.

    python data/tokenize_text.py notes/*.txt --out=data/mine                  # vocabulary learned from the text
    python data/tokenize_text.py web.jsonl --out=data/web --tokenizer=gpt2    # --ranks=FILE spares a download

A document is a line of .jsonl or .ndjson, a row of .parquet, or a text file, with --document_separator what stands
between two of them; plain text goes on in a further document after 16 KiB. After --max_doc_tokens any document goes on
in a further one, for the trainer reads no more of one. A hash of its text decides whether a document is for validation.
Order is kept, so shuffle sorted text before; blank documents are left out. NAME_train_000000.bin and so on,
NAME_val_000000.bin and vocab.txt get their names when all is whole: a call that fails leaves and replaces nothing.
"""
from __future__ import annotations

import argparse
import base64
import functools
import gzip
import hashlib
import json
import mmap
import os
import signal
import struct
import sys
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import numpy as np
from tqdm import tqdm

from pocket import PIECE, DataError

SPLITS, MAX_VOCAB = ("train", "val"), 65_535
LEARN_BYTES, PLAIN_BYTES, PORTION = 16 << 20, 16 << 10, 1 << 20    # to learn from; a document; for a worker at a time
PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".json", ".pdf"}
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"     # of openai/gpt-2
Encoder = Callable[[bytes], Any]             # UTF-8 text -> token ids, document start not among them


def read_pieces(path: Path) -> dict[bytes, int]:
    """Ids of pieces from lines of base64 and id, plain or gzip: a vocab.txt, or ranks in tiktoken's format."""
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).splitlines()
        ids = {base64.b64decode(code, validate=True): int(number) for code, number in map(bytes.split, lines)}
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: found {error}, expected lines of base64, a space, an id; give another file") from None
    if sorted(ids.values()) != list(range(len(ids))) or not ids.keys() >= {bytes([byte]) for byte in range(256)}:
        raise DataError(f"{path}: found {len(ids):,} pieces, expected all 256 bytes among them and ids from 0 without "
                        f"a gap; give another file")
    return ids


def learned_pieces(texts: Iterable[bytes], size: int) -> dict[bytes, int]:
    """256 bytes, then the most common pieces of the first 16 MB, as in pocket.py; `size` with the document start."""
    counts, seen = Counter(), 0
    for text in texts:
        counts.update(piece for piece in PIECE.findall(text) if len(piece) > 1)
        if (seen := seen + len(text)) >= LEARN_BYTES:
            break
    common = sorted(counts, key=lambda piece: (-counts[piece], piece))[:size - 257]
    return {piece: number for number, piece in enumerate([bytes([byte]) for byte in range(256)] + common)}


def gpt2_pieces(ranks: Path | None) -> dict[bytes, int]:
    """Ids of GPT-2's 50,256 pieces, from a file, else from where tiktoken gets them. Raises DataError."""
    try:
        import tiktoken
        ids = read_pieces(ranks) if ranks else {
            tiktoken.get_encoding("gpt2").decode_single_token_bytes(number): number for number in range(50_256)}
    except ImportError:
        raise DataError("found no tiktoken, expected it for --tokenizer=gpt2; python -m pip install tiktoken") from None
    except OSError as error:
        raise DataError(f"found {type(error).__name__} on fetching GPT-2's ranks, expected network or a "
                        f"file; give --ranks=FILE") from None
    if len(ids) != 50_256 or make_encoder("gpt2", ids)(b"Hello world") != [15496, 995]:
        raise DataError(f"{ranks}: found {len(ids):,} other pieces, expected GPT-2's 50,256; give another file")
    return ids


def make_encoder(kind: str, ids: dict[bytes, int]) -> Encoder:
    if kind == "bytes":
        return lambda text: np.frombuffer(text, np.uint8)
    if kind == "gpt2":
        import tiktoken
        encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ids, special_tokens={})
        return lambda text: encoding.encode_ordinary(text.decode())
    return lambda text: [number for piece in PIECE.findall(text) for number in (
        (ids[piece],) if piece in ids else (ids[bytes((byte,))] for byte in piece))]


@functools.cache
def encoder(kind: str, vocabulary: Path) -> tuple[Encoder, int]:
    """With the document start. Made once in every worker, for it is too large to be sent with each portion."""
    ids = read_pieces(vocabulary)
    return make_encoder(kind, ids), len(ids)


def encode(kind: str, vocabulary: Path, longest: int, texts: list[tuple[str, bytes]]) -> list[tuple[str, int, bytes]]:
    """A worker's portion: (split, text) -> (split, bytes of text, tokens in little-endian uint16)."""
    (spell, start), done = encoder(kind, vocabulary), []
    for split, text in texts:
        tokens = np.asarray(spell(text), "<u2")
        borders = np.arange(0, len(tokens), longest - 1 if longest else len(tokens))
        done.append((split, len(text), np.insert(tokens, borders, start).tobytes()))
    return done


def utf8(text: bytes, path: Path, at: int) -> bytes:
    """The text, if it is UTF-8. `at`: where it begins in the file."""
    try:
        text.decode()
        return text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: found byte 0x{text[error.start]:02x} at byte {at + error.start:,}, expected UTF-8; "
                        f"convert it (iconv -f LATIN1 -t UTF-8) or leave it out") from None


def field(record: Any, key: str, place: str) -> bytes:
    """The text of a record; null counts as blank, and half a surrogate pair, which JSON can write, becomes a "?"."""
    if not isinstance(record, dict) or not isinstance(record.get(key, 0), (str, type(None))):
        raise DataError(f"{place}: found {str(record)[:80]}, expected text under {key!r}; give another --text_key")
    return (record[key] or "").encode(errors="replace")


def plain_documents(path: Path, separator: bytes) -> Iterator[tuple[bytes, float]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = 0
        while at < len(text):
            limit, skip = at + PLAIN_BYTES, len(separator)
            end = text.find(separator, at, limit + skip) if separator else -1
            if end < 0:
                end, skip = len(text) if len(text) <= limit else text.rfind(b"\n", at, limit) + 1 or limit, 0
                while limit - 3 < end < len(text) and text[end] & 0xC0 == 0x80:     # not inside of a character
                    end -= 1
            yield utf8(text[at:end], path, at), end + skip - at
            at = end + skip


def json_documents(path: Path, key: str) -> Iterator[tuple[bytes, float]]:
    at = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(utf8(line, path, at).decode("utf-8-sig")) if line.strip() else {key: None}
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: line {number:,}: found {error.msg!r} at column {error.colno}, expected an "
                                f"object; mend the line, or leave it out") from None
            yield field(record, key, f"{path}: line {number:,}"), len(line)
            at += len(line)


def parquet_documents(path: Path, key: str) -> Iterator[tuple[bytes, float]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path}: found no pyarrow, expected it for Parquet; python -m pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            if key not in file.schema_arrow.names:
                field(dict.fromkeys(file.schema_arrow.names), key, f"{path}: columns")
            rows = (row for batch in file.iter_batches(256, columns=[key]) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield field(row, key, f"{path}: row {number:,}"), path.stat().st_size / file.metadata.num_rows
    except ArrowException as error:
        raise DataError(f"{path}: found {error}, expected a Parquet file; write it again") from None


def documents(files: dict[Path, str], args: argparse.Namespace) -> Iterator[tuple[str, bytes, float]]:
    """(split, text, bytes of the file it took) in order. `files`: with their split where it is fixed."""
    readers = {".parquet": parquet_documents, ".jsonl": json_documents, ".ndjson": json_documents}
    separator = args.document_separator.replace("\\n", "\n").replace("\\t", "\t").encode()
    for path, fixed in files.items():
        reader, how = (readers[path.suffix], args.text_key) if path.suffix in readers else (plain_documents, separator)
        for text, step in reader(path, how) if path.stat().st_size else ():
            text = text.removeprefix(b"\xef\xbb\xbf")                        # a byte order mark
            draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
            yield fixed or SPLITS[draw < args.val_share], text, step


def portions(docs: Iterable[tuple[str, bytes, float]]) -> Iterator[tuple[list[tuple[str, bytes]], float]]:
    """Documents that are not blank, about 1 MiB together, and the bytes of the files they took."""
    texts, size, steps = [], 0, 0.0
    for split, text, step in docs:
        texts += [(split, text)] * bool(text.strip())
        size, steps = size + len(text), steps + step
        if size >= PORTION:
            yield texts, steps
            texts, size, steps = [], 0, 0.0
    yield texts, steps


def in_order(work: Callable, items: Iterable[tuple[Any, float]], jobs: int) -> Iterator[tuple[Any, float]]:
    """(work(item), step) in the order of the items; few are under way, so that memory is bounded."""
    pool = ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    waiting: deque = deque()
    try:
        for item, step in items:
            waiting.append((pool.submit(work, item), step))
            if len(waiting) > 3 * jobs:
                yield waiting[0][0].result(), waiting.popleft()[1]
        for job, step in waiting:
            yield job.result(), step
    finally:
        pool.shutdown(cancel_futures=True)


class Shards:
    """One split's shards under temporary names; every one begins with a document."""
    def __init__(self, stem: Path, words: tuple[int, int], limit: int) -> None:
        self.stem, self.words, self.limit = stem, words, limit               # header words 3 and 4; tokens of a shard
        self.parts, self.waiting, self.totals = [], bytearray(), Counter()

    def add(self, size: int, tokens: bytes) -> None:
        if len(self.waiting) + len(tokens) > 2 * self.limit:
            self.flush()
        self.waiting += tokens
        self.totals.update(documents=1, tokens=len(tokens) // 2, bytes=size)

    def flush(self) -> None:
        if self.waiting:
            self.parts.append(Path(f"{self.stem}_{len(self.parts):06d}.bin.part"))
            with self.parts[-1].open("wb") as file:
                file.write(struct.pack("<256i", 20240520, 1, len(self.waiting) // 2, *self.words, *[0] * 251))
                file.write(self.waiting)
            self.waiting.clear()


def input_files(args: argparse.Namespace) -> dict[Path, str]:
    """Every file once, with the split that --val_files fixes. Raises DataError."""
    files = dict.fromkeys(args.val_files, "val")
    files |= {path: "train" if args.val_files else "" for path in args.inputs if path not in files}
    for path in files:
        if not path.is_file() or path.suffix in PACKED:
            found = f"a {path.suffix} file" if path.is_file() else "no file"
            raise DataError(f"{path}: found {found}, expected text, .jsonl, .ndjson or .parquet; unpack or convert it, "
                            f"or give another path")
    return files


def run(args: argparse.Namespace) -> None:
    """Read, encode, write, give the names. Raises DataError or OSError."""
    files, name, there = input_files(args), args.name or args.out.resolve().name, set(args.out.glob("*.bin"))
    old = {path for split in SPLITS for path in args.out.glob(f"{name}_{split}_*.bin")}
    if there - old or old and not args.force:
        raise DataError(f"{args.out}: found {min(there - old or old).name}, expected no shards; give another --out"
                        + ", or --force to replace those of this name" * (there == old))
    training_text = (text for split, text, _ in documents(files, args) if split == "train")
    ids = (gpt2_pieces(args.ranks) if args.tokenizer == "gpt2" else read_pieces(args.vocab) if args.vocab else
           learned_pieces(training_text, args.vocab_size) if args.tokenizer == "pocket" else learned_pieces((), 257))
    if len(ids) >= MAX_VOCAB:
        raise DataError(f"found a vocabulary of {len(ids) + 1:,}, expected at most {MAX_VOCAB:,}; give a smaller one")
    args.out.mkdir(parents=True, exist_ok=True)
    vocabulary = args.out / "vocab.txt.part"
    train, val = (Shards(args.out / f"{name}_{split}", (len(ids) + 1, len(ids)), args.shard_tokens) for split in SPLITS)
    try:
        vocabulary.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(piece), ids[piece]) for piece in ids))
        work = functools.partial(encode, args.tokenizer, vocabulary, args.max_doc_tokens)
        with tqdm(total=sum(path.stat().st_size for path in files), unit="B", unit_scale=True, disable=None) as bar:
            for done, step in in_order(work, portions(documents(files, args)), args.jobs):
                for split, size, tokens in done:
                    (val if split == "val" else train).add(size, tokens)
                bar.update(step)
        for split, shards in zip(SPLITS, (train, val)):
            shards.flush()
            if not shards.parts and (shards is train or args.val_files or args.val_share):
                raise DataError(f"found no {split} document, expected one; give more or smaller documents "
                                f"(--document_separator), --val_files, or --val_share=0")
        for path in old:
            path.unlink()
        for path in (*train.parts, *val.parts, vocabulary):
            os.replace(path, path.with_suffix(""))
    finally:
        for path in (*train.parts, *val.parts, vocabulary):
            path.unlink(missing_ok=True)
    for shards in filter(lambda shards: shards.parts, (train, val)):
        total = shards.totals
        print(f"{shards.stem}_*.bin: {len(shards.parts)} shards, {total['documents']:,} documents, {total['tokens']:,} "
              f"tokens, {total['bytes']:,} bytes, {total['bytes'] / total['tokens']:.3f} bytes per token")
    print(f"./run.sh --train_files='{train.stem.resolve()}_*.bin' --val_files='{val.stem.resolve()}_*.bin'")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("inputs", type=Path, nargs="+", help="text, .jsonl, .ndjson, .parquet")
    add("--out", type=Path, required=True, help="folder of the data set")
    add("--name", help="first part of the shards' names; else that of the folder")
    add("--tokenizer", choices=("pocket", "gpt2", "bytes"), default="pocket", help="default pocket")
    add("--vocab", type=Path, help="pocket: an existing vocab.txt, else one is learned")
    add("--vocab_size", type=int, default=2048, help="pocket: largest learned vocabulary, document start included")
    add("--ranks", type=Path, help="gpt2: a local ranks file of tiktoken, plain or .gz")
    add("--text_key", default="text", help="field of .jsonl, column of .parquet")
    add("--document_separator", default="", help=r"of plain text, for instance '\n\n' or '<|endoftext|>'")
    add("--max_doc_tokens", type=int, help="document start included, 0: no limit; default 2048 with gpt2, else 256, "
        "as the trainer's --max_doc_len in its presets record and pocket")
    add("--val_share", type=float, default=0.05, help="of the documents; default 0.05")
    add("--val_files", type=Path, nargs="+", default=[], help="these for validation, all others for training")
    add("--shard_tokens", type=int, default=100_000_000, help="default 100 million")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default all cores")
    add("--force", action="store_true", help="replace the shards of this name in --out")
    args = parser.parse_args(argv)
    if args.max_doc_tokens is None:
        args.max_doc_tokens = 2048 if args.tokenizer == "gpt2" else 256
    for flag, low, high in (("vocab_size", 257, MAX_VOCAB), ("val_share", 0, 0.99), ("jobs", 1, 1000),
                            ("shard_tokens", 1, 10**9), ("max_doc_tokens", 0, 10**9)):
        if not low <= getattr(args, flag) <= high or args.max_doc_tokens == 1:
            parser.error(f"found --{flag}={getattr(args, flag)}, expected {low} to {high:,}")
    try:
        run(args)
    except BrokenProcessPool:
        sys.exit("error: found a worker that died, expected enough memory for all; give fewer --jobs")
    except OSError as error:
        sys.exit(f"error: {error.filename or args.out}: found {error.strerror!r}, expected files to read and room to "
                 f"write; make room, or give another path")
    except DataError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written or replaced", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
