"""Turn your own text into token shards for train_gpt.py: text files, JSON lines, Parquet.

    python data/tokenize_text.py notes/*.txt --out=data/mine           # vocabulary learned from the text
    python data/tokenize_text.py web.jsonl --out=data/web --tokenizer=gpt2    # --ranks=FILE spares a download

A document is a line of .jsonl or .ndjson, a row of .parquet, or a text file, with
--document_separator what stands between two of them; plain text goes on in a further document after
16 KiB. After --max_doc_tokens any document goes on in a further one, for the trainer reads no more
of one. A hash of its text decides whether a document is for validation; if it chose none, the end
of the last document is. Order is kept, so shuffle sorted text before; blank documents are left out.
NAME_train_000000.bin and so on, NAME_val_000000.bin, vocab.txt and manifest.json get their names
when all is whole: a call that fails leaves and replaces nothing.
"""
from __future__ import annotations

import argparse
import base64
import functools
import glob
import gzip
import hashlib
import json
import mmap
import multiprocessing
import os
import re
import reprlib
import shlex
import signal
import sys
import threading
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import numpy as np
from tqdm import tqdm

from pocket import MAX_DOC_LEN, PIECE, most_common, vocabulary_lines
from shard_files import (ALL_BYTES, TOKEN_BYTES, TRAIN, VAL, VOCABULARY, DataError, Output,
                         as_program, deferred_signals, errors_in_words, folder_name,
                         output_folder, regular_file, say, shard_header)

MAX_VOCAB = 65_535
MIN_VOCAB = len(ALL_BYTES) + 1               # and the document start, which is the last id
LEARN_BYTES = 16 << 20                       # of training text, to learn a vocabulary from
PLAIN_BYTES = 16 << 10                       # of plain text in a document
SHORT_VAL_BYTES = 1 << 10                    # for validation from a short text, if it has twice that
PORTION = 1 << 20                            # bytes of text for a worker at a time
PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".json", ".pdf"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"     # of openai/gpt-2
GPT2_PIECES = 50_256
GPT2_MAX_DOC_LEN = 2048                      # --max_doc_len of the preset record
Encoder = Callable[[bytes], Any]             # UTF-8 text -> token ids, document start not among them


class Document(NamedTuple):
    split: str                               # TRAIN or VAL
    text: bytes
    step: float                              # bytes of its file, for the progress bar


# Vocabularies

def read_pieces(path: Path) -> dict[bytes, int]:
    """Ids of pieces from lines of base64 and id, maybe packed: a vocab.txt, or tiktoken's ranks."""
    regular_file(path, "lines of base64, a space, an id", "give another file")
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        ids = {}
        for line in content.splitlines():
            code, number = line.split()
            ids[base64.b64decode(code, validate=True)] = int(number)
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: found {error}, expected lines of base64, a space, an id; give "
                        f"another file") from None
    if sorted(ids.values()) != list(range(len(ids))) or not ids.keys() >= set(ALL_BYTES):
        raise DataError(f"{path}: found {len(ids):,} pieces, expected all 256 bytes among them and "
                        f"ids from 0 without a gap; give another file")
    return ids


def learned_pieces(texts: Iterable[bytes], size: int) -> dict[bytes, int]:
    """256 bytes, then the most common pieces of the first 16 MB; `size` with the document start."""
    counts = Counter()
    seen = 0
    for text in texts:
        counts.update(piece for piece in PIECE.findall(text) if len(piece) > 1)
        seen += len(text)
        if seen >= LEARN_BYTES:
            break
    pieces = ALL_BYTES + most_common(counts, size - MIN_VOCAB)
    return {piece: number for number, piece in enumerate(pieces)}


def gpt2_pieces(ranks: Path | None) -> dict[bytes, int]:
    """Ids of GPT-2's pieces, from a file, else from where tiktoken gets them. Raises DataError."""
    try:
        import tiktoken
        if ranks:
            ids = read_pieces(ranks)
        else:
            encoding = tiktoken.get_encoding("gpt2")
            ids = {encoding.decode_single_token_bytes(n): n for n in range(GPT2_PIECES)}
    except ImportError:
        raise DataError("found no tiktoken, expected it for --tokenizer=gpt2; "
                        "python -m pip install tiktoken") from None
    except OSError as error:
        raise DataError(f"found {type(error).__name__} on fetching GPT-2's ranks, expected network "
                        f"or a file; give --ranks=FILE") from None
    if len(ids) != GPT2_PIECES or make_encoder("gpt2", ids)(b"Hello world") != [15496, 995]:
        raise DataError(f"{ranks}: found {len(ids):,} other pieces, expected GPT-2's "
                        f"{GPT2_PIECES:,}; give another file")
    return ids


def chosen_pieces(args: argparse.Namespace, docs: Iterable[Document]) -> dict[bytes, int]:
    """The ids that the flags ask for; `docs` are read if a vocabulary is to be learned."""
    if args.tokenizer == "gpt2":
        return gpt2_pieces(args.ranks)
    if args.vocab:
        return read_pieces(args.vocab)
    if args.tokenizer == "bytes":
        return learned_pieces((), MIN_VOCAB)
    training_text = (doc.text for doc in docs if doc.split == TRAIN)
    return learned_pieces(training_text, args.vocab_size)


def make_encoder(kind: str, ids: dict[bytes, int]) -> Encoder:
    """The function that spells a text in ids. kind: "bytes", "gpt2" or "pocket"."""
    def spell_bytes(text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def spell_pieces(text: bytes) -> list[int]:
        tokens = []
        for piece in PIECE.findall(text):
            if piece in ids:
                tokens.append(ids[piece])
            else:
                tokens += [ids[bytes((byte,))] for byte in piece]
        return tokens

    if kind == "bytes":
        return spell_bytes
    if kind == "pocket":
        return spell_pieces

    import tiktoken
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ids,
                                 special_tokens={})

    def spell_gpt2(text: bytes) -> list[int]:
        return encoding.encode_ordinary(text.decode())
    return spell_gpt2


# Reading documents

def utf8(text: bytes, path: Path, at: int) -> bytes:
    """The text, if it is UTF-8. `at`: where it begins in the file."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{text[error.start]:02x} at byte {at + error.start:,}"
        raise DataError(f"{path}: found {found}, expected UTF-8; convert it "
                        f"(iconv -f LATIN1 -t UTF-8) or leave it out") from None
    return text


def field(record: Any, key: str, place: str) -> bytes:
    """The text of a record. null is blank; half a surrogate pair, which JSON can write, a "?"."""
    if isinstance(record, dict) and key in record:
        value = record[key]
        if value is None:
            return b""
        if isinstance(value, str):
            return value.encode(errors="replace")
    raise DataError(f"{place}: found {reprlib.repr(record)}, expected text under {key!r}; give "
                    f"another --text_key")


def border(text: mmap.mmap, at: int, separator: bytes) -> tuple[int, int]:
    """Where the document that begins at `at` ends, and where the next one begins.

    At the separator; after 16 KiB without one at the last line end, else between two characters.
    """
    limit = at + PLAIN_BYTES
    if separator:
        end = text.find(separator, at, limit + len(separator))
        if end >= 0:
            return end, end + len(separator)
    if len(text) <= limit:
        return len(text), len(text)

    end = text.rfind(b"\n", at, limit) + 1
    if end == 0:
        end = limit
    while limit - 3 < end and text[end] & 0xC0 == 0x80:       # not inside of a character
        end -= 1
    return end, end


def plain_documents(path: Path, separator: bytes) -> Iterator[tuple[bytes, float]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = 0
        while at < len(text):
            end, following = border(text, at, separator)
            yield utf8(text[at:end], path, at), following - at
            at = following


def json_documents(path: Path, key: str) -> Iterator[tuple[bytes, float]]:
    at = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}: line {number:,}"
            text = utf8(line, path, at).decode("utf-8-sig")
            if text.strip():
                yield field(parsed(text, place), key, place), len(line)
            at += len(line)


def parsed(line: str, place: str) -> Any:
    """A line of JSON. Raises DataError, whatever the line is."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        found = f"{error.msg!r} at column {error.colno}"
    except RecursionError:
        found = "brackets nested too deeply"
    except ValueError:
        found = "a number with more digits than can be read"
    raise DataError(f"{place}: found {found}, expected an object; mend the line, or leave it out")


def parquet_documents(path: Path, key: str) -> Iterator[tuple[bytes, float]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path}: found no pyarrow, expected it for Parquet; "
                        f"python -m pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if key not in columns:
                field(dict.fromkeys(columns), key, f"{path}: columns")         # raises, naming them
            step = path.stat().st_size / max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(256, columns=[key]):
                for row in batch.to_pylist():
                    number += 1
                    yield field(row, key, f"{path}: row {number:,}"), step
    except (ArrowException, OSError, ValueError) as error:    # a damaged column may be any of them
        raise DataError(f"{path}: found {error}, expected a Parquet file; write it again") from None


def documents_of(path: Path, args: argparse.Namespace) -> Iterator[tuple[bytes, float]]:
    """(text, bytes of the file it took) in the order of one file."""
    if path.stat().st_size == 0:             # cannot be mapped into memory
        return iter(())
    if path.suffix == ".parquet":
        return parquet_documents(path, args.text_key)
    if path.suffix in (".jsonl", ".ndjson"):
        return json_documents(path, args.text_key)
    separator = args.document_separator.replace("\\n", "\n").replace("\\t", "\t")
    return plain_documents(path, separator.encode())


def documents(files: dict[Path, str], args: argparse.Namespace) -> Iterator[Document]:
    """All that are not blank, in order. `files`: with their split where it is fixed."""
    for path, fixed in files.items():
        for text, step in documents_of(path, args):
            text = text.removeprefix(BYTE_ORDER_MARK)
            if text.strip():
                yield Document(fixed or drawn_split(text, args.val_share), text, step)


def drawn_split(text: bytes, val_share: float) -> str:
    """By a hash of the text alone, so that neither order nor other documents change it."""
    digest = hashlib.blake2b(text, digest_size=8).digest()
    draw = int.from_bytes(digest, "big") / 2**64
    return VAL if draw < val_share else TRAIN


def with_both_parts(docs: Iterable[Document], val_share: float) -> Iterator[Document]:
    """The documents; where the hash left a part empty, the last one is cut and serves both."""
    last = None
    splits = set()
    size = 0
    for doc in docs:
        if last:
            yield last
        last = doc
        splits.add(doc.split)
        size += len(doc.text)
    if last is None:
        return
    if len(splits) == 2:
        yield last
        return

    length = len(last.text.strip())
    wanted = max(size * val_share, SHORT_VAL_BYTES)
    for_validation = int(min(wanted, length / 2))
    at = cut_near(last.text, len(last.text.rstrip()) - for_validation)
    for split, text in ((TRAIN, last.text[:at]), (VAL, last.text[at:])):
        if text.strip():
            yield Document(split, text, last.step / 2)


def cut_near(text: bytes, at: int) -> int:
    """A place to cut at or before `at`: a line's end if one is near, a word's, a character's."""
    for sign in (b"\n", b" "):
        end = text.rfind(sign, at // 2, at)
        if end >= 0 and text[:end].strip():
            return end + 1
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


# Encoding, in several processes

@functools.cache
def encoder(kind: str, vocabulary: Path) -> tuple[Encoder, int]:
    """With the document start. Made once in every worker, being too large to be sent each time."""
    ids = read_pieces(vocabulary)
    return make_encoder(kind, ids), len(ids)


class Encoded(NamedTuple):
    split: str
    size: int                                # bytes of the text
    tokens: bytes                            # little-endian uint16, document starts included


def encode(kind: str, vocabulary: Path, longest: int, docs: list[Document]) -> list[Encoded]:
    """A worker's portion."""
    spell, start = encoder(kind, vocabulary)
    done = []
    for doc in docs:
        tokens = np.asarray(spell(doc.text), "<u2")
        room = longest - 1 if longest else len(tokens)
        starts = np.arange(0, len(tokens), room)
        done.append(Encoded(doc.split, len(doc.text), np.insert(tokens, starts, start).tobytes()))
    return done


def portions(docs: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents of about 1 MiB together."""
    portion = []
    size = 0
    for doc in docs:
        portion.append(doc)
        size += len(doc.text)
        if size >= PORTION:
            yield portion
            portion = []
            size = 0
    yield portion


def start_worker() -> None:
    """A terminal signals workers too, but only the parent ends them; they end if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def in_order(work: Callable, items: Iterable, jobs: int) -> Iterator[tuple[Any, Any]]:
    """(item, work(item)) in the order of the items; few are under way, so memory is bounded."""
    pool = ProcessPoolExecutor(jobs, initializer=start_worker)
    waiting: deque = deque()
    try:
        for item in items:
            with deferred_signals():         # the first one starts the workers
                job = pool.submit(work, item)
            waiting.append((item, job))
            if len(waiting) > 3 * jobs:
                first, job = waiting.popleft()
                yield first, job.result()
        for item, job in waiting:
            yield item, job.result()
    finally:
        pool.shutdown(cancel_futures=True)


# Writing shards

class Shards:
    """One split's shards; every one begins with a document. limit: tokens of a shard."""

    def __init__(self, output: Output, stem: str, vocab_size: int, limit: int) -> None:
        self.output = output
        self.stem = stem
        self.vocab_size = vocab_size
        self.limit = TOKEN_BYTES * limit     # bytes of a shard's tokens
        self.count = 0                       # shards written
        self.waiting = bytearray()           # tokens for the next shard
        self.totals = Counter()              # documents, tokens, bytes of text

    def add(self, doc: Encoded) -> None:
        if len(self.waiting) + len(doc.tokens) > self.limit:
            self.flush()
        self.waiting += doc.tokens
        tokens = len(doc.tokens) // TOKEN_BYTES
        self.totals.update(documents=1, tokens=tokens, bytes=doc.size)

    def flush(self) -> None:
        if self.waiting:
            name = f"{self.stem}_{self.count:06d}.bin"
            tokens = len(self.waiting) // TOKEN_BYTES
            document_start = self.vocab_size - 1
            header = shard_header(tokens, self.vocab_size, document_start)
            self.output.write(name, header, self.waiting)
            self.count += 1
            self.waiting.clear()

    def summary(self) -> str:
        tokens = self.totals["tokens"]
        size = self.totals["bytes"]
        return (f"{self.output.folder / self.stem}_*.bin: {self.count} shards, "
                f"{self.totals['documents']:,} documents, {tokens:,} tokens, {size:,} bytes, "
                f"{size / tokens:.3f} bytes per token")

    def pattern(self) -> str:
        """What the trainer's flag wants, as a shell reads it; brackets of a name are no pattern."""
        stem = (self.output.folder / self.stem).resolve()
        return shlex.quote(f"{glob.escape(str(stem))}_*.bin")


def input_files(args: argparse.Namespace) -> dict[Path, str]:
    """Every file once, with the split that --val_files fixes. Raises DataError."""
    fixed = TRAIN if args.val_files else ""
    files = dict.fromkeys(args.val_files, VAL)
    for path in args.inputs:
        files.setdefault(path, fixed)
    for path in files:
        expected = "text, .jsonl, .ndjson or .parquet"
        do = "unpack or convert it, or give another path"
        regular_file(path, expected, do)
        if path.suffix in PACKED:
            raise DataError(f"{path}: found a {path.suffix} file, expected {expected}; {do}")
    return files


def refuse_older_shards(output: Output, force: bool) -> None:
    """Without --force shards of this name stay as they are. Raises DataError."""
    for old in output.own_files():
        if old.name != VOCABULARY and not force:
            raise DataError(f"{output.folder}: found {old.name}, expected no shards of this name; "
                            f"give another --out or --name, or --force to replace them")


def all_documents(files: dict[Path, str], args: argparse.Namespace) -> Iterator[Document]:
    """Those of the data set; called again, it reads the files again."""
    docs = documents(files, args)
    if args.val_share and not args.val_files:
        return with_both_parts(docs, args.val_share)
    return docs


def fill(shards: dict[str, Shards], files: dict[Path, str], work: Callable,
         args: argparse.Namespace) -> None:
    """Encode all documents, each into the shards of its split."""
    size = sum(path.stat().st_size for path in files)
    docs = all_documents(files, args)
    with tqdm(total=size, unit="B", unit_scale=True, disable=None) as bar:
        for portion, done in in_order(work, portions(docs), args.jobs):
            for doc in done:
                shards[doc.split].add(doc)
            bar.update(sum(doc.step for doc in portion))


def write_shards(output: Output, stem: str, args: argparse.Namespace) -> list[str]:
    """Read, encode, write, give the names. Returns the lines to print. Raises DataError."""
    files = input_files(args)
    refuse_older_shards(output, args.force)
    ids = chosen_pieces(args, all_documents(files, args))
    vocab_size = len(ids) + 1
    if vocab_size > MAX_VOCAB:
        raise DataError(f"found a vocabulary of {vocab_size:,}, expected at most {MAX_VOCAB:,}; "
                        f"give a smaller one")
    vocabulary = vocabulary_lines(ids)
    output.check_vocabulary(vocabulary)

    part = output.write(VOCABULARY, vocabulary)
    shards = {split: Shards(output, f"{stem}_{split}", vocab_size, args.shard_tokens)
              for split in (TRAIN, VAL)}
    work = functools.partial(encode, args.tokenizer, part, args.max_doc_tokens)
    fill(shards, files, work, args)

    splits = [TRAIN]
    if args.val_files or args.val_share:
        splits.append(VAL)
    for split in splits:
        shards[split].flush()
        if not shards[split].count:
            raise DataError(f"found no {split} document, expected one; give more or smaller "
                            f"documents (--document_separator), --val_files, or --val_share=0")
    output.publish()

    lines = [shards[split].summary() for split in splits]
    lines.append(f"./run.sh --train_files={shards[TRAIN].pattern()} "
                 f"--val_files={shards[VAL].pattern()}")
    return lines


def run(args: argparse.Namespace) -> None:
    name = args.name or args.out.resolve().name
    own = re.compile(rf"{re.escape(name)}_(train|val)_\d{{6,}}\.bin|vocab\.txt")
    try:
        with output_folder(args.out, own, args.force) as output:
            lines = write_shards(output, name, args)
    except BrokenProcessPool:
        raise DataError("found a worker that died, expected enough memory for all; give fewer "
                        "--jobs") from None
    say(*lines)


LIMITS = (("vocab_size", MIN_VOCAB, MAX_VOCAB), ("val_share", 0, 0.99), ("jobs", 1, 1000),
          ("shard_tokens", 1, 10**9), ("max_doc_tokens", 0, 10**9))


def check_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program with status 2 if a flag is wrong."""
    for flag, low, high in LIMITS:
        value = getattr(args, flag)
        if not low <= value <= high:
            parser.error(f"found --{flag}={value}, expected {low} to {high:,}")
    if args.max_doc_tokens == 1:
        parser.error("found --max_doc_tokens=1, expected 0 or at least 2; one is the document start")
    if args.name is not None and (args.name in ("", "..") or Path(args.name).name != args.name):
        parser.error(f"found --name={args.name}, expected a name without a folder; "
                     f"give the folder as --out")
    if args.vocab and args.tokenizer != "pocket":
        parser.error(f"found --vocab with --tokenizer={args.tokenizer}, expected pocket")
    if args.ranks and args.tokenizer != "gpt2":
        parser.error(f"found --ranks with --tokenizer={args.tokenizer}, expected gpt2")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("inputs", type=Path, nargs="+", help="text, .jsonl, .ndjson, .parquet")
    add("--out", type=folder_name, required=True, help="folder of the data set")
    add("--name", help="first part of the shards' names; else that of the folder")
    add("--tokenizer", choices=("pocket", "gpt2", "bytes"), default="pocket", help="default pocket")
    add("--vocab", type=Path, help="pocket: an existing vocab.txt, else one is learned")
    add("--vocab_size", type=int, default=2048,
        help="pocket: largest learned vocabulary, document start included")
    add("--ranks", type=Path, help="gpt2: a local ranks file of tiktoken, plain or .gz")
    add("--text_key", default="text", help="field of .jsonl, column of .parquet")
    add("--document_separator", default="",
        help=r"of plain text, for instance '\n\n' or '<|endoftext|>'")
    add("--max_doc_tokens", type=int,
        help=f"document start included, 0: no limit; default {GPT2_MAX_DOC_LEN} with gpt2, else "
             f"{MAX_DOC_LEN}, as the trainer's --max_doc_len in its presets record and pocket")
    add("--val_share", type=float, default=0.05, help="of the documents; default 0.05")
    add("--val_files", type=Path, nargs="+", default=[],
        help="these for validation, all others for training")
    add("--shard_tokens", type=int, default=100_000_000, help="default 100 million")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default all cores")
    add("--force", action="store_true",
        help="replace shards of this name, or another vocab.txt, in --out")
    args = parser.parse_args(argv)
    if args.max_doc_tokens is None:
        args.max_doc_tokens = GPT2_MAX_DOC_LEN if args.tokenizer == "gpt2" else MAX_DOC_LEN
    check_flags(args, parser)
    with errors_in_words():
        run(args)


if __name__ == "__main__":
    sys.exit(as_program(main))
