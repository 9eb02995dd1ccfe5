"""Turn your own text into token shards for train_gpt.py: text files, whole folders, JSON lines, Parquet.

    python data/tokenize_text.py ~/project 'papers/**/*.md' --out=data/mine   # learns a vocabulary from the text
    python data/tokenize_text.py web.jsonl --out=data/web --tokenizer=gpt2    # --vocab=FILE avoids a download

A document is a line of .jsonl or .ndjson, a row of .parquet, or a text file; --document_separator splits text files
further. A document of plain text is split after 16 KiB, and every document after --max_doc_tokens. A hash of its text
decides whether a document is for validation. If the hash selects none, the end of the last document is used. Documents
stay in order, so shuffle sorted text first. The last line of the output is the command that trains on this text.
data/README.md describes all options and formats.
"""
import argparse
import base64
import functools
import glob
import hashlib
import json
import os
import reprlib
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import numpy as np
from tqdm import tqdm

from pocket import MAX_DOC_LEN, encode_pieces, learn_vocabulary
from shard_files import (ALL_BYTES, TRAIN, VAL, DataError, check, escape_folder, file_problem, new_data_set,
                         parse_folder, print_result, run_main, write_shard, write_vocabulary)

MAX_VOCAB = 65_535
MIN_VOCAB = len(ALL_BYTES) + 1               # the bytes and BOS, which is the last id
VOCAB_TEXT_BYTES = 16 << 20                  # training text that a vocabulary is learned from
MAX_PLAIN_DOC_BYTES = 16 << 10               # maximum size of a document of plain text
SHORT_VAL_BYTES = 1 << 10                    # validation text of a short input, at most half of it
SHARD_TOKENS = 100_000_000
UNREADABLE_SUFFIXES = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".json", ".pdf"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"     # from openai/gpt-2
GPT2_NUM_PIECES = 50_256
GPT2_MAX_DOC_LEN = 2048                      # --max_doc_len of preset record
# Settings of the trainer's preset pocket. POCKET_TRAIN_TOKENS suffice for a run of one epoch, including all tokens that
# packing drops.
POCKET_TRAIN_TOKENS, POCKET_VAL_TOKENS = 2_000_000, 65_536
POCKET_VAL_BATCH, POCKET_SEQ_LEN, POCKET_SEQS = 8192, 192, 8
# Enough to fill the sequences of one step, if each sequence drops the rest of one document.
MIN_TOKENS = POCKET_SEQS * (POCKET_SEQ_LEN + MAX_DOC_LEN)
VAL_BATCH_MULTIPLE = 128                     # 8 sequences, each with a multiple of 16 tokens
Document = tuple[str, bytes]                 # TRAIN or VAL, and the text
Encoder = Callable[[bytes], Any]             # text -> token ids

class BadFile(DataError):
    """A file that cannot be read as text. Its second argument is the reason under which it is counted in a folder."""

    def __str__(self) -> str:
        return self.args[0]

def input_files(args: argparse.Namespace) -> tuple[dict[Path, str], str]:
    """List the input files, each once, and count them.

    Returns {path: split, or "" if the hash decides}, and a line of counts to print. --val_files, if given, decides the
    split of all files.
    """
    skipped: Counter[str] = Counter()
    files = dict.fromkeys(named_files(args.val_files, args, skipped), VAL)
    for path in named_files(args.inputs, args, skipped):
        files.setdefault(path, TRAIN if args.val_files else "")
    counts = f"{skipped.total():,} files skipped"
    if skipped:
        counts += ": " + ", ".join(f"{count:,} {why}" for why, count in sorted(skipped.items()))
    check(files, f"{' '.join(args.inputs)}: no text ({counts}): give other files")
    without = args.without_separator & files.keys()
    if args.document_separator and without:
        counts += f"; --document_separator not found in {len(without):,} of {len(files):,} files"
    return files, f"{len(files):,} files read, {counts}"

def named_files(names: list[str], args: argparse.Namespace, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the files of a list of files, folders (recursively) and patterns; count the skipped ones in `skipped`.

    Folders that cannot be read count as skipped. A file that the user names must be readable as text.
    """
    for name in names:
        path = Path(name)
        found = [path]
        if path.is_dir():
            found = walk(path, skipped)
        elif glob.has_magic(name) and not os.path.lexists(path):
            found = map(Path, glob.glob(escape_folder(name), recursive=True))
        # Links can form cycles, so take every real path once.
        once = {os.path.realpath(below): below for below in sorted(found, reverse=True) if not below.is_dir()}
        for below in sorted(once.values()):
            try:
                check_input(below, path, args)
                yield below
            except BadFile as error:
                if below == path:
                    raise
                skipped[error.args[1]] += 1

def walk(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield all files of a folder; count the subfolders that cannot be read."""
    unreadable: list[OSError] = []
    for below, _, names in os.walk(folder, onerror=unreadable.append):
        yield from (Path(below, name) for name in names)
    check(str(folder) not in [error.filename for error in unreadable], f"{folder} cannot be read: fix its permissions")
    if unreadable:
        skipped["unreadable folder"] += len(unreadable)

def check_input(path: Path, named: Path, args: argparse.Namespace) -> None:
    """Raise BadFile unless a file found through `named` (a file, folder or pattern) can be read, to its last byte."""
    problem = file_problem(path)
    if problem:
        raise BadFile(f"{path}: {problem}; write the text to a file first", problem)
    if any(part.startswith(".") and part != ".." and part not in named.parts for part in path.parts):
        raise BadFile(f"{path} is hidden", "hidden")
    if args.out.is_dir() and path.resolve().is_relative_to(args.out):
        raise BadFile(f"{path} is from an earlier call", "from an earlier call")
    if path.suffix in UNREADABLE_SUFFIXES:
        raise BadFile(f"{path}: give text, .parquet, or .jsonl with one JSON object per line", path.suffix)
    if path.stat().st_size == 0:
        raise BadFile(f"{path} is empty", "empty")
    for _ in read_file(path, args):
        pass

def read_pieces(path: Path) -> dict[bytes, int]:
    """Read the ids of pieces from a vocab.txt or a file of tiktoken's ranks."""
    ids: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            code, token_id = line.split()
            ids[base64.b64decode(code, validate=True)] = int(token_id)
    except ValueError as error:
        raise DataError(f"{path} has a line that is not base64, a space, and an id ({error}): give another --vocab"
                        ) from None
    check(sorted(ids.values()) == list(range(len(ids))) and ids.keys() >= set(ALL_BYTES), f"{path} has {len(ids):,} "
          "pieces, without all 256 bytes or with a gap in the ids: give another --vocab")
    return ids

def make_gpt2_tokenizer(ranks: Path | None) -> tuple[dict[bytes, int], Encoder]:
    """Return the ids of GPT-2's pieces, and its encoder.

    The pieces are read from the file `ranks`, or without one from tiktoken's cache or the network.
    """
    try:
        import tiktoken
        encoding = tiktoken.get_encoding("gpt2") if not ranks else None
    except (ImportError, OSError) as error:
        raise DataError(f"--tokenizer=gpt2 needs tiktoken and its ranks ({error}): pip install 'tiktoken>=0.14', or "
                        "give --vocab=FILE") from None
    if ranks:
        ids = read_pieces(ranks)
        encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ids, special_tokens={})
        check(len(ids) == GPT2_NUM_PIECES and encoding.encode_ordinary("Hello world") == [15496, 995],
              f"{ranks} has {len(ids):,} pieces, which are not GPT-2's {GPT2_NUM_PIECES:,}: give another --vocab")
    else:
        ids = {encoding.decode_single_token_bytes(n): n for n in range(GPT2_NUM_PIECES)}

    def encode(text: bytes) -> list[int]:
        return encoding.encode_ordinary(text.decode())
    return ids, encode

def first_texts(docs: Iterable[Document], size: int) -> Iterator[bytes]:
    """Yield the texts of the first training documents, until they have at least `size` bytes."""
    for split, text in docs:
        if split == TRAIN:
            yield text
            size -= len(text)
        if size <= 0:
            return

def make_tokenizer(args: argparse.Namespace, docs: Iterable[Document]) -> tuple[dict[bytes, int], Encoder]:
    """Build the tokenizer of the flags. Returns the ids of its pieces, and its encoder.

    A vocabulary is learned from the first 16 MiB of the training documents in `docs`.
    """
    if args.tokenizer == "gpt2":
        return make_gpt2_tokenizer(args.vocab)
    if args.tokenizer == "bytes":
        return learn_vocabulary((), len(ALL_BYTES)), functools.partial(np.frombuffer, dtype=np.uint8)
    if args.vocab:
        ids = read_pieces(args.vocab)
    else:
        ids = learn_vocabulary(first_texts(docs, VOCAB_TEXT_BYTES), args.vocab_size - 1)
    return ids, functools.partial(encode_pieces, ids=ids)

def read_plain(path: Path, args: argparse.Namespace) -> Iterator[bytes]:
    """Yield the text between separators, in documents of at most 16 KiB."""
    separator = args.document_separator.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t").encode()
    done = 0                                 # bytes of the documents so far
    args.without_separator.add(path)
    with path.open("rb") as file:
        ahead = file.read(MAX_PLAIN_DOC_BYTES + max(len(separator), 1))
        while ahead:
            text, found, _ = ahead.partition(separator) if separator else (ahead, b"", b"")
            if found:
                args.without_separator.discard(path)
            elif len(ahead) > MAX_PLAIN_DOC_BYTES:
                text = text[:find_cut(text, MAX_PLAIN_DOC_BYTES)]
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise BadFile(f"{path} has byte 0x{text[error.start]:02x} at byte {done + error.start:,}, which is not "
                              "UTF-8: convert it (iconv -f LATIN1 -t UTF-8)", "not in UTF-8") from None
            if b"\0" in text:
                raise BadFile(f"{path} is binary: convert it to text", "binary")
            yield text
            size = len(text) + len(found)
            done += size
            ahead = ahead[size:] + file.read(size)

def find_cut(text: bytes, at: int) -> int:
    """Return an index at or before `at` to cut at: after a line if one ends after at / 2, a word, or a character."""
    for sign in (b"\n", b" "):
        end = text.rfind(sign, at // 2, at)
        if end >= 0 and text[:end].strip():
            return end + 1
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return at

def record_text(record: Any, key: str, place: str) -> bytes:
    """Return the text of a JSON or Parquet record. null is an empty text; an unpaired surrogate becomes "?"."""
    if not isinstance(record, dict):
        raise BadFile(f"{place} is {reprlib.repr(record)}: give one JSON object per line", "without JSON objects")
    if not (key in record and isinstance(record[key], str | None)):
        raise BadFile(f"{place} has no text under {key!r}, but {reprlib.repr(record)}: give another --text_key",
                      f"without {key!r}")
    return (record[key] or "").encode(errors="replace")

def read_jsonl(path: Path, args: argparse.Namespace) -> Iterator[bytes]:
    """Yield the text of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number:,}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:     # not UTF-8, too deeply nested, or 5,000 digits
                raise BadFile(f"{place} is no JSON object ({error}): fix it, or remove it", "with a bad line") from None
            yield record_text(record, args.text_key, place)

def read_parquet(path: Path, args: argparse.Namespace) -> Iterator[bytes]:
    """Yield the text of every row."""
    try:
        from pyarrow import parquet
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if args.text_key not in names:
                raise BadFile(f"{path} has columns {names}: choose one with --text_key", f"without {args.text_key!r}")
            for batch in file.iter_batches(256, columns=[args.text_key]):
                for row in batch.to_pylist():
                    yield record_text(row, args.text_key, f"{path}, a row")
    except (ImportError, OSError, ValueError) as error:       # a damaged column raises OSError or ValueError
        raise BadFile(f"{path} cannot be read as Parquet ({error}): write it again, or run pip install pyarrow",
                      "unreadable .parquet") from None

def read_file(path: Path, args: argparse.Namespace) -> Iterator[bytes]:
    """Yield the texts of a file. Raises BadFile."""
    readers = {".jsonl": read_jsonl, ".ndjson": read_jsonl, ".parquet": read_parquet}
    return readers.get(path.suffix, read_plain)(path, args)

def draw_split(text: bytes, val_share: float) -> str:
    """Assign a document to TRAIN or VAL by a hash of its text, independently of order and other documents."""
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return VAL if int.from_bytes(digest, "big") < val_share * 2**64 else TRAIN

def read_documents(files: dict[Path, str], args: argparse.Namespace) -> Iterator[Document]:
    """Yield all documents that are not blank, in order. files: {path: split, or "" if the hash decides}.

    If the hash leaves a split empty, the last document is cut into one document for each split.
    """
    last: Document | None = None
    splits: set[str] = set()
    size = 0
    for path, fixed in files.items():
        for text in read_file(path, args):
            text = text.removeprefix(BYTE_ORDER_MARK)
            if text.strip():
                if last:
                    yield last
                last = fixed or draw_split(text, args.val_share), text
                splits.add(last[0])
                size += len(text)
    if last and (len(splits) == 2 or not args.val_share or args.val_files):
        yield last
    elif last:
        text = last[1]
        wanted = max(size * args.val_share, SHORT_VAL_BYTES)
        for_validation = int(min(wanted, len(text.strip()) / 2))
        at = find_cut(text, len(text.rstrip()) - for_validation)
        if text[:at].strip():
            yield TRAIN, text[:at]
        yield VAL, text[at:]

@dataclass
class Shards:
    """Writer of the shards of one split. Every shard begins with a document."""
    folder: Path                             # folder to write to
    stem: Path                               # final path of the shards, without number and suffix
    vocab_size: int
    sizes: list[int] = field(default_factory=list)            # tokens of each written shard
    usable: list[int] = field(default_factory=list)           # tokens that preset pocket uses of each shard
    pending: list[np.ndarray] = field(default_factory=list)   # documents of the next shard
    totals: Counter[str] = field(default_factory=Counter)     # documents, bytes of text, pending tokens

    def add(self, size: int, tokens: np.ndarray) -> None:
        """Add the tokens of one text, (n,) u16. Every document in it begins with BOS. size: bytes of the text."""
        if self.totals["pending"] + len(tokens) > SHARD_TOKENS:
            self.flush()
        self.pending.append(tokens)
        self.totals.update(documents=1, bytes=size, pending=len(tokens))

    def flush(self) -> None:
        """Write the pending documents as one shard."""
        if self.pending:
            tokens = np.concatenate(self.pending)
            starts = np.flatnonzero(tokens == self.vocab_size - 1)
            lengths = np.diff(starts, append=len(tokens))
            self.usable.append(int(lengths.clip(max=MAX_DOC_LEN).sum()))
            name = f"{self.stem.name}_{len(self.sizes):06d}.bin"
            write_shard(self.folder / name, tokens.tobytes(), self.vocab_size)
            self.sizes.append(len(tokens))
            self.pending.clear()
            self.totals["pending"] = 0

    def summary(self) -> str:
        """Return a line with the counts of the written shards."""
        tokens = sum(self.sizes)
        size = self.totals["bytes"]
        return (f"{self.stem}_*.bin: {len(self.sizes)} shards, {self.totals['documents']:,} documents, {tokens:,} "
                f"tokens, {size:,} bytes, {size / tokens:.3f} bytes per token")

    def pattern(self) -> str:
        """Return the glob pattern of the shards, quoted for the shell. Brackets in names are escaped."""
        return shlex.quote(f"{glob.escape(str(self.stem))}_*.bin")

def training_command(train: Shards, val: Shards) -> str:
    """Return the ./run.sh command that trains on this text. For a short text, return the necessary size instead."""
    tokens = sum(train.sizes)
    val_tokens = sum(val.sizes)
    if max(train.usable) < MIN_TOKENS or max(val.sizes, default=0) < VAL_BATCH_MULTIPLE + 2:
        return (f"too short for ./run.sh: {tokens:,} training and {val_tokens:,} validation tokens, at least "
                f"{MIN_TOKENS:,} and {VAL_BATCH_MULTIPLE + 2:,} are needed; add text, or use --tokenizer=bytes, which "
                "yields more tokens; --force replaces the data set in --out")
    flags = ["--preset=pocket", f"--train_files={train.pattern()}", f"--val_files={val.pattern()}"]
    if sum(train.usable) < POCKET_TRAIN_TOKENS:
        flags.append("--epochs=0")
    block = min(POCKET_VAL_BATCH, (max(val.sizes) - 2) // VAL_BATCH_MULTIPLE * VAL_BATCH_MULTIPLE)
    whole = sum((size - 2) // block * block for size in val.sizes)
    if whole < POCKET_VAL_TOKENS:
        flags += [f"--val_tokens={whole}", f"--val_batch_tokens={block}"]
    return " ".join(["./run.sh", *flags])

def write_shards(folder: Path, args: argparse.Namespace, files: dict[Path, str]) -> list[str]:
    """Read, encode and write all documents. files: the result of `input_files`. Returns the lines to print."""
    ids, encode = make_tokenizer(args, read_documents(files, args))
    bos_id = len(ids)
    check(bos_id < MAX_VOCAB, f"{args.vocab} has {bos_id:,} pieces: at most {MAX_VOCAB - 1:,} fit")
    write_vocabulary(folder, ids)
    shards = {split: Shards(folder, args.out / f"{args.out.name}_{split}", bos_id + 1) for split in (TRAIN, VAL)}
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for split, text in read_documents(files, args):
            tokens = np.asarray(encode(text), "<u2")
            room = args.max_doc_tokens - 1 if args.max_doc_tokens else len(tokens)
            starts = np.arange(0, len(tokens), room)
            shards[split].add(len(text), np.insert(tokens, starts, bos_id))
            bar.update(len(text))

    splits = [TRAIN, VAL] if args.val_files or args.val_share else [TRAIN]
    size = sum(shards[split].totals["bytes"] for split in shards)
    for split in splits:
        shards[split].flush()
        check(shards[split].sizes, f"no {split} document in {size:,} bytes of text: give more or smaller documents "
              "(--document_separator), --val_files, or --val_share=0")
    return [*(shards[split].summary() for split in splits), training_command(shards[TRAIN], shards[VAL])]

def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("inputs", nargs="+", help="files (text, .jsonl, .ndjson, .parquet), folders, or patterns ('notes/**/*.md')")
    add("--out", type=parse_folder, required=True,
        help="folder to create; its name is also the prefix of the shard names")
    add("--tokenizer", choices=("pocket", "gpt2", "bytes"), default="pocket",
        help="how to split text into tokens [pocket]")
    add("--vocab", type=Path,
        help="pocket: existing vocab.txt, instead of learning one; gpt2: file of tiktoken's ranks")
    add("--vocab_size", type=int, default=2048, help="pocket: maximum size of the learned vocabulary, with BOS [2048]")
    add("--text_key", default="text", help="field of .jsonl or column of .parquet that has the text [text]")
    add("--document_separator", default="",
        help=r"between the documents of a text file, for example '\n\n', '\r\n\r\n' or '<|endoftext|>'")
    add("--max_doc_tokens", type=int, help=f"split longer documents, BOS included; 0: no limit "
        f"[{MAX_DOC_LEN}; with gpt2 {GPT2_MAX_DOC_LEN:,}: --max_doc_len of the presets pocket and record]")
    add("--val_share", type=float, default=0.05, help="fraction of the documents that are for validation [0.05]")
    add("--val_files", nargs="+", default=[], help="files for validation; all others are for training")
    add("--force", action="store_true", help="replace an existing data set of this name")
    args = parser.parse_args(argv)
    if args.max_doc_tokens is None:
        args.max_doc_tokens = GPT2_MAX_DOC_LEN if args.tokenizer == "gpt2" else MAX_DOC_LEN
    if args.max_doc_tokens != 0 and args.max_doc_tokens < 2:
        parser.error(f"--max_doc_tokens={args.max_doc_tokens}: give 0 or at least 2")
    if not MIN_VOCAB <= args.vocab_size <= MAX_VOCAB:
        parser.error(f"--vocab_size={args.vocab_size}: give {MIN_VOCAB} to {MAX_VOCAB}")
    if not 0 <= args.val_share < 1:
        parser.error(f"--val_share={args.val_share}: give at least 0 and less than 1")
    if args.vocab and args.tokenizer == "bytes":
        parser.error("--vocab: --tokenizer=bytes has its own; give --tokenizer=pocket or gpt2")
    args.without_separator = set()
    # Check the inputs before anything is created or removed.
    files, counts = input_files(args)
    with new_data_set(args.out, args.out.name, args.force) as folder:
        lines = write_shards(folder, args, files)
    print_result(counts, *lines)


if __name__ == "__main__":
    sys.exit(run_main(main))
