"""Turn your own text into token shards for train_gpt.py: text files, whole folders, JSON lines, Parquet.

    python data/tokenize_text.py notes/*.txt --out=data/mine                  # vocabulary learned from the text
    python data/tokenize_text.py ~/project 'papers/**/*.md' --out=data/mine
    python data/tokenize_text.py web.jsonl --out=data/web --tokenizer=gpt2    # --ranks=FILE spares a download

A document is a line of .jsonl or .ndjson, a row of .parquet, or a text file, with --document_separator what stands
between two of them; plain text goes on in a further document after 16 KiB. After --max_doc_tokens any document goes on
in a further one, for the trainer reads no more of one. What a folder or a pattern finds beside text is passed over; a
file that is named has to be text. A hash of its text decides whether a document is for validation; if it chose none,
the end of the last document is. Order is kept, so shuffle sorted text before; blank documents are left out.
NAME_train_000000.bin and so on, NAME_val_000000.bin, vocab.txt and manifest.json get their names when all is whole: a
call that fails leaves and replaces nothing. The last line printed trains on just this text.
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

from pocket import MAX_DOC_LEN, PIECE, make_vocabulary, spell
from shard_files import (ALL_BYTES, MANIFEST, TOKEN_BYTES, TRAIN, VAL, VOCABULARY, DataError, Output, as_program,
                         errors_in_words, folder_name, kind_of, regular_file, say)

MAX_VOCAB = 65_535
MIN_VOCAB = len(ALL_BYTES) + 1               # and the document start, which is the last id
LEARN_BYTES = 16 << 20                       # of training text, to learn a vocabulary from
PLAIN_BYTES = 16 << 10                       # of plain text in a document
SHORT_VAL_BYTES = 1 << 10                    # for validation from a short text, if it has twice that
PORTION = 1 << 20                            # bytes of text for a worker at a time
PACKED = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".json", ".pdf"}
RECORDS = (".jsonl", ".ndjson", ".parquet")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"     # of openai/gpt-2
GPT2_PIECES = 50_256
GPT2_MAX_DOC_LEN = 2048                      # --max_doc_len of the preset record
# Of the trainer: a preset that has enough data is asked for without further flags.
RECORD_TOKENS, RECORD_VAL_TOKENS = 1_000_000_000, 10_485_760
POCKET_TOKENS, POCKET_VAL_TOKENS = 2_000_000, 65_536          # with which a pass lasts, whatever packing loses
POCKET_VAL_BATCH, POCKET_SLOT, SLOTS = 8192, 192, 8
VAL_UNIT = 128                               # a validation block is a multiple of it: 16 tokens in each of 8 slots
Encoder = Callable[[bytes], Any]             # UTF-8 text -> token ids, document start not among them


class Document(NamedTuple):
    split: str                               # TRAIN or VAL
    text: bytes


# Which files

def input_files(args: argparse.Namespace) -> tuple[dict[Path, str], Counter]:
    """Every file once, with the split that --val_files fixes, and why others are passed over. Raises DataError."""
    passed_over = Counter()
    files = dict.fromkeys(named_files(args.val_files, args, passed_over), VAL)
    for path in named_files(args.inputs, args, passed_over):
        files.setdefault(path, TRAIN if args.val_files else "")
    if not files:
        raise DataError(f"found no text ({told(passed_over)}), expected some in {' '.join(args.inputs)}; name other "
                        f"files")
    return files, passed_over


def named_files(names: list[str], args: argparse.Namespace, passed_over: Counter) -> Iterator[Path]:
    """The files that names mean: files, folders with all below, and patterns. Raises DataError."""
    expected = "text, .jsonl, .ndjson, .parquet, a folder or a pattern"
    do = "unpack or convert it, or give another path"
    for name in names:
        path = Path(name)
        pattern = not os.path.lexists(path) and glob.has_magic(name)
        if not path.is_dir() and not pattern:
            regular_file(path, expected, do)
            if path.suffix in PACKED:
                raise DataError(f"{path}: found a {path.suffix} file, expected {expected}; {do}")
            yield path
            continue
        found = map(Path, glob.glob(name, recursive=True)) if pattern else path.rglob("*")
        once = {below.resolve(): below for below in sorted(found, reverse=True)}              # ** follows links round
        for below in sorted(once.values()):
            why = reason_to_pass(below, path, args)
            if not why:
                yield below
            elif not below.is_dir():
                passed_over[why] += 1


def reason_to_pass(path: Path, named: Path, args: argparse.Namespace) -> str:
    """Why a file that a folder or a pattern found is not taken, "" if it is."""
    if kind_of(path):
        return kind_of(path)
    if any(part.startswith(".") and part != ".." and part not in named.parts for part in path.parts):
        return "hidden"
    if path.resolve().parent == args.out.resolve() and (path.suffix == ".bin" or path.name in (VOCABULARY, MANIFEST)):
        return "of an earlier call"
    if path.suffix in PACKED:
        return path.suffix
    if path.stat().st_size == 0:
        return "empty"
    if path.suffix == ".parquet":
        return ""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.readline() if path.suffix in RECORDS else file.read(PLAIN_BYTES)
    except ValueError:
        return "not in UTF-8"
    if path.suffix in RECORDS and f'"{args.text_key}"' not in text:
        return f"without {args.text_key!r}"
    return "binary" if "\0" in text else ""


def told(passed_over: Counter) -> str:
    """How many files were passed over, and why."""
    reasons = ", ".join(f"{count:,} {why}" for why, count in sorted(passed_over.items()))
    return f"{passed_over.total():,} files passed over" + f": {reasons}" * bool(reasons)


# Vocabularies

def read_pieces(path: Path) -> dict[bytes, int]:
    """Ids of pieces from lines of base64 and id, maybe packed: a vocab.txt, or tiktoken's ranks. Raises DataError."""
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
        raise DataError(f"{path}: found {error}, expected lines of base64, a space, an id; give another "
                        f"file") from None
    if sorted(ids.values()) != list(range(len(ids))) or not ids.keys() >= set(ALL_BYTES):
        raise DataError(f"{path}: found {len(ids):,} pieces, expected all 256 bytes among them and ids from 0 without "
                        f"a gap; give another file")
    return ids


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
        raise DataError("found no tiktoken, expected it for --tokenizer=gpt2; python -m pip install tiktoken") from None
    except OSError as error:
        raise DataError(f"found {type(error).__name__} on fetching GPT-2's ranks, expected network or a file; give "
                        f"--ranks=FILE") from None
    if len(ids) != GPT2_PIECES or make_encoder("gpt2", ids)(b"Hello world") != [15496, 995]:
        raise DataError(f"{ranks}: found {len(ids):,} other pieces, expected GPT-2's {GPT2_PIECES:,}; give "
                        f"another file")
    return ids


def chosen_pieces(args: argparse.Namespace, docs: Iterable[Document]) -> dict[bytes, int]:
    """The ids that the flags ask for; else the 256 bytes, and the most common pieces of the first 16 MB of `docs`."""
    if args.tokenizer == "gpt2":
        return gpt2_pieces(args.ranks)
    if args.vocab:
        return read_pieces(args.vocab)
    counts = Counter()
    seen = 0
    for doc in docs if args.tokenizer == "pocket" else ():
        if doc.split == TRAIN:
            counts.update(piece for piece in PIECE.findall(doc.text) if len(piece) > 1)
            seen += len(doc.text)
        if seen >= LEARN_BYTES:
            break
    return make_vocabulary(counts, args.vocab_size - 1)


def make_encoder(kind: str, ids: dict[bytes, int]) -> Encoder:
    """The function that spells a text in ids. kind: "bytes", "gpt2" or "pocket"."""
    if kind == "bytes":
        return functools.partial(np.frombuffer, dtype=np.uint8)
    if kind == "pocket":
        return functools.partial(spell, ids=ids)
    import tiktoken
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ids, special_tokens={})

    def spell_gpt2(text: bytes) -> list[int]:
        return encoding.encode_ordinary(text.decode())
    return spell_gpt2


# Reading documents

def utf8(text: bytes, path: Path, at: int) -> bytes:
    """The text, if it is UTF-8. at: where it begins in the file. Raises DataError."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: found byte 0x{text[error.start]:02x} at byte {at + error.start:,}, expected UTF-8; "
                        f"convert it (iconv -f LATIN1 -t UTF-8) or leave it out") from None
    return text


def field(record: Any, key: str, place: str) -> bytes:
    """The text of a record. null is blank; half a surrogate pair, which JSON can write, a "?". Raises DataError."""
    if isinstance(record, dict) and key in record:
        value = record[key]
        if value is None:
            return b""
        if isinstance(value, str):
            return value.encode(errors="replace")
    raise DataError(f"{place}: found {reprlib.repr(record)}, expected text under {key!r}; give another --text_key")


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


def plain_documents(path: Path, separator: bytes) -> Iterator[bytes]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = 0
        while at < len(text):
            end, following = border(text, at, separator)
            yield utf8(text[at:end], path, at)
            at = following


def json_documents(path: Path, key: str) -> Iterator[bytes]:
    at = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}: line {number:,}"
            text = utf8(line, path, at).decode("utf-8-sig")
            try:
                record = json.loads(text) if text.strip() else {key: None}
            except (ValueError, RecursionError) as error:     # brackets nested too deeply, a number of 5,000 digits
                raise DataError(f"{place}: found {str(error).split(';')[0]!r}, expected an object; mend the line, or "
                                f"leave it out") from None
            yield field(record, key, place)
            at += len(line)


def parquet_documents(path: Path, key: str) -> Iterator[bytes]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path}: found no pyarrow, expected it for Parquet; python -m pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if key not in columns:
                field(dict.fromkeys(columns), key, f"{path}: columns")         # raises, naming them
            batches = file.iter_batches(256, columns=[key])
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield field(row, key, f"{path}: row {number:,}")
    except (ArrowException, OSError, ValueError) as error:    # a damaged column may be any of them
        raise DataError(f"{path}: found {error}, expected a Parquet file; write it again") from None


def documents_of(path: Path, args: argparse.Namespace) -> Iterator[bytes]:
    if path.stat().st_size == 0:             # cannot be mapped into memory
        return iter(())
    if path.suffix == ".parquet":
        return parquet_documents(path, args.text_key)
    if path.suffix in RECORDS:
        return json_documents(path, args.text_key)
    separator = args.document_separator.replace("\\n", "\n").replace("\\t", "\t")
    return plain_documents(path, separator.encode())


def drawn_split(text: bytes, val_share: float) -> str:
    """By a hash of the text alone, so that neither order nor other documents change it."""
    digest = hashlib.blake2b(text, digest_size=8).digest()
    draw = int.from_bytes(digest, "big") / 2**64
    return VAL if draw < val_share else TRAIN


def documents(files: dict[Path, str], args: argparse.Namespace) -> Iterator[Document]:
    """All that are not blank, in order; called again, it reads the files again. files: with their split if fixed.

    Where the hash leaves a part empty, the last document is cut and serves both.
    """
    last = None
    splits = set()
    size = 0
    for path, fixed in files.items():
        for text in documents_of(path, args):
            text = text.removeprefix(BYTE_ORDER_MARK)
            if text.strip():
                if last:
                    yield last
                last = Document(fixed or drawn_split(text, args.val_share), text)
                splits.add(last.split)
                size += len(text)
    if last is None:
        return
    if len(splits) == 2 or not args.val_share or args.val_files:
        yield last
        return

    wanted = max(size * args.val_share, SHORT_VAL_BYTES)
    for_validation = int(min(wanted, len(last.text.strip()) / 2))
    at = cut_near(last.text, len(last.text.rstrip()) - for_validation)
    for split, text in ((TRAIN, last.text[:at]), (VAL, last.text[at:])):
        if text.strip():
            yield Document(split, text)


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


def encode(kind: str, vocabulary: Path, longest: int, docs: list[Document]) -> list[tuple[str, int, bytes]]:
    """A worker's portion: split, bytes of the text, and its tokens (u16) with the document starts."""
    spelled, start = encoder(kind, vocabulary)
    done = []
    for doc in docs:
        tokens = np.asarray(spelled(doc.text), "<u2")
        room = longest - 1 if longest else len(tokens)
        starts = np.arange(0, len(tokens), room)
        done.append((doc.split, len(doc.text), np.insert(tokens, starts, start).tobytes()))
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
    for name, what in (("SIGINT", signal.SIG_IGN), ("SIGHUP", signal.SIG_IGN), ("SIGTERM", signal.SIG_DFL)):
        if hasattr(signal, name):            # Windows has no SIGHUP
            signal.signal(getattr(signal, name), what)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def in_order(work: Callable, items: Iterable, jobs: int) -> Iterator:
    """work(item) in the order of the items; few are under way, so memory is bounded."""
    pool = ProcessPoolExecutor(jobs, initializer=start_worker)
    waiting: deque = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 3 * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
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
        self.sizes: list[int] = []           # tokens of the shards written
        self.slots = 0                       # that documents of one shard fill, where the most do
        self.waiting = bytearray()           # tokens for the next shard
        self.totals = Counter()              # documents, bytes of text

    def add(self, size: int, tokens: bytes) -> None:
        if len(self.waiting) + len(tokens) > self.limit:
            self.flush()
        self.waiting += tokens
        self.totals.update(documents=1, bytes=size)

    def flush(self) -> None:
        if self.waiting:
            tokens = np.frombuffer(bytes(self.waiting), "<u2")
            self.slots = max(self.slots, slots_of(tokens, self.vocab_size - 1))
            name = f"{self.stem}_{len(self.sizes):06d}.bin"
            self.output.write_shard(name, self.waiting, self.vocab_size)
            self.sizes.append(len(tokens))
            self.waiting.clear()

    def summary(self) -> str:
        tokens = sum(self.sizes)
        size = self.totals["bytes"]
        return (f"{self.output.folder / self.stem}_*.bin: {len(self.sizes)} shards, {self.totals['documents']:,} "
                f"documents, {tokens:,} tokens, {size:,} bytes, {size / tokens:.3f} bytes per token")

    def pattern(self) -> str:
        """What the trainer's flag wants, as a shell reads it; brackets of a name are no pattern."""
        stem = (self.output.folder / self.stem).resolve()
        return shlex.quote(f"{glob.escape(str(stem))}_*.bin")


def slots_of(tokens: np.ndarray, start: int) -> int:
    """How many of a step's slots, at most all, the documents fill as the trainer packs them in the preset pocket."""
    lengths = np.diff(np.flatnonzero(tokens == start), append=len(tokens))
    slots = 0
    have = 0
    for length in lengths.tolist():
        have += min(length, MAX_DOC_LEN)
        if have > POCKET_SLOT:               # the rest of that document is lost
            slots += 1
            have = 0
        if slots == SLOTS:
            break
    return slots


def training_line(train: Shards, val: Shards) -> str:
    """The ./run.sh line that trains on just this text, or words if it is too short."""
    tokens = sum(train.sizes)
    val_tokens = sum(val.sizes)
    if train.slots < SLOTS or val_tokens < VAL_UNIT + 2:
        return (f"too short for ./run.sh: found {tokens:,} training and {val_tokens:,} validation tokens, expected "
                f"{SLOTS * (POCKET_SLOT + MAX_DOC_LEN):,} in one shard and {VAL_UNIT + 2:,}; add text, or give a "
                f"larger --shard_tokens or --val_share")
    flags = [f"--train_files={train.pattern()}", f"--val_files={val.pattern()}"]
    if tokens < RECORD_TOKENS or val_tokens <= RECORD_VAL_TOKENS:
        flags.insert(0, "--preset=pocket")
        if tokens < POCKET_TOKENS:
            flags.append("--epochs=0")
        block = min(POCKET_VAL_BATCH, (max(val.sizes) - 2) // VAL_UNIT * VAL_UNIT)
        whole = sum((size - 2) // block * block for size in val.sizes)
        if whole < POCKET_VAL_TOKENS:
            flags += [f"--val_tokens={whole}", f"--val_batch_tokens={block}"]
    return " ".join(["./run.sh", *flags])


def write_shards(output: Output, stem: str, args: argparse.Namespace) -> list[str]:
    """Read, encode, write, give the names. Returns the lines to print. Raises DataError."""
    files, passed_over = input_files(args)
    output.check_free("give another --out or --name")
    ids = chosen_pieces(args, documents(files, args))
    vocab_size = len(ids) + 1
    if vocab_size > MAX_VOCAB:
        raise DataError(f"found a vocabulary of {vocab_size:,}, expected at most {MAX_VOCAB:,}; give a smaller one")

    vocabulary = output.write_vocabulary(ids)
    shards = {split: Shards(output, f"{stem}_{split}", vocab_size, args.shard_tokens) for split in (TRAIN, VAL)}
    work = functools.partial(encode, args.tokenizer, vocabulary, args.max_doc_tokens)
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:
        for done in in_order(work, portions(documents(files, args)), args.jobs):
            for split, size, tokens in done:
                shards[split].add(size, tokens)
                bar.update(size)

    splits = [TRAIN]
    if args.val_files or args.val_share:
        splits.append(VAL)
    for split in splits:
        shards[split].flush()
        if not shards[split].sizes:
            found = sum(shard.totals["bytes"] for shard in shards.values())
            raise DataError(f"found no {split} document in {found:,} bytes of text, expected one; give more or smaller "
                            f"documents (--document_separator), --val_files, or --val_share=0")
    output.publish()
    return [f"{len(files):,} files read, {told(passed_over)}", *(shards[split].summary() for split in splits),
            training_line(shards[TRAIN], shards[VAL])]


def number(low: float, high: float) -> Callable[[str], float]:
    """A flag's type: a number in these bounds."""
    def bounded(text: str) -> float:
        value = type(high)(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"found {text}, expected {low} to {high:,}")
        return value
    return bounded


def check_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program with status 2 if flags do not fit together."""
    if args.max_doc_tokens == 1:
        parser.error("found --max_doc_tokens=1, expected 0 or at least 2; one is the document start")
    if args.name is not None and (args.name in ("", "..") or Path(args.name).name != args.name):
        parser.error(f"found --name={args.name}, expected a name without a folder; give the folder as --out")
    for flag, tokenizer in (("vocab", "pocket"), ("ranks", "gpt2")):
        if getattr(args, flag) and args.tokenizer != tokenizer:
            parser.error(f"found --{flag} with --tokenizer={args.tokenizer}, expected {tokenizer}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("inputs", nargs="+", help="files (text, .jsonl, .ndjson, .parquet), folders, patterns ('notes/**/*.md')")
    add("--out", type=folder_name, required=True, help="folder of the data set")
    add("--name", help="first part of the shards' names; else that of the folder")
    add("--tokenizer", choices=("pocket", "gpt2", "bytes"), default="pocket", help="default pocket")
    add("--vocab", type=Path, help="pocket: an existing vocab.txt, else one is learned")
    add("--vocab_size", type=number(MIN_VOCAB, MAX_VOCAB), default=2048,
        help="pocket: largest learned vocabulary, document start included")
    add("--ranks", type=Path, help="gpt2: a local ranks file of tiktoken, plain or .gz")
    add("--text_key", default="text", help="field of .jsonl, column of .parquet")
    add("--document_separator", default="", help=r"of plain text, for instance '\n\n' or '<|endoftext|>'")
    add("--max_doc_tokens", type=number(0, 10**9),
        help=f"document start included, 0: no limit; default {MAX_DOC_LEN}, as the trainer's --max_doc_len in its "
             f"preset pocket; with gpt2 {GPT2_MAX_DOC_LEN}, as in record")
    add("--val_share", type=number(0, 0.99), default=0.05, help="of the documents; default 0.05")
    add("--val_files", nargs="+", default=[], help="these for validation, all others for training")
    add("--shard_tokens", type=number(1, 10**9), default=100_000_000, help="default 100 million")
    add("--jobs", type=number(1, 1000), default=os.cpu_count() or 1, help="processes; default all cores")
    add("--force", action="store_true", help="replace shards of this name, or another vocab.txt, in --out")
    args = parser.parse_args(argv)
    if args.max_doc_tokens is None:
        args.max_doc_tokens = GPT2_MAX_DOC_LEN if args.tokenizer == "gpt2" else MAX_DOC_LEN
    check_flags(args, parser)
    name = args.name or args.out.resolve().name
    own = re.compile(rf"{re.escape(name)}_(train|val)_\d{{6,}}\.bin|vocab\.txt")
    with errors_in_words():
        try:
            with Output(args.out, own, args.force) as output:
                lines = write_shards(output, name, args)
        except BrokenProcessPool:
            raise DataError("found a worker that died, expected enough memory for all; give fewer --jobs") from None
        say(*lines)


if __name__ == "__main__":
    sys.exit(as_program(main))
