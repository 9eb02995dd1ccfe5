"""Turn your own text into token shards for train_gpt.py: text files, whole folders, JSON lines, Parquet.

    python data/tokenize_text.py ~/project 'papers/**/*.md' --out=data/mine   # learns a vocabulary from the text
    python data/tokenize_text.py web.jsonl.gz --out=data/web --tokenizer=gpt2

A document is a JSON line, a row of Parquet, or a text file or its parts between --document_separator; plain text is
split after 16 KiB. A hash of its text decides whether a document is for validation. Documents stay in order, so shuffle
sorted text first. The last line of the output is the command that trains on this text.
"""
import argparse
import hashlib
import itertools
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator

import numpy as np
from tqdm import tqdm

from encoders import MAX_VOCAB, Encoder, byte_encoder, gpt2_encoder, learn_bpe, read_tokenizer
from pocket import MAX_DOC_LEN
from shard_files import (TRAIN, VAL, ShardWriter, check, check_replaceable, new_data_set, parse_folder,
                         print_result, run_main, training_command)
from text_files import BadFile, TextReader, find_cut, named_files

BPE_VOCAB, MIN_VOCAB = 2048, 257             # default of --vocab_size, and the bytes with BOS
SAMPLE_BYTES = 1 << 10                       # of training text, for each token to learn
CHUNK_BYTES = 16 << 10                       # the sample consists of parts of this size, at most
SHORT_VAL_BYTES = 1 << 10                    # validation text of a short input, at most half of it
BATCH_DOCS = 128                             # documents in memory, for each of --workers
GPT2_MAX_DOC_LEN = 2048                      # --max_doc_len of preset record
Document = tuple[str, bytes]                 # TRAIN or VAL, and the text

def draw(text: bytes) -> float:
    """Return a hash of the text, from 0 to 1."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64

class Corpus:
    """The files of a call. Each is read to its end to check it, and again in every pass over the documents."""
    def __init__(self, args: argparse.Namespace) -> None:
        separator = args.document_separator.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")
        self.args = args
        self.reader = TextReader(args.text_key, separator.encode())
        self.skipped: Counter[str] = Counter()                # files, by reason
        self.counts: Counter[str] = Counter()                 # bytes in TRAIN and VAL, and blank documents
        self.files: dict[Path, str] = {}                      # {path: split, or "" if the hash decides}
        named: dict[Path, tuple[Path, str, bool]] = {}        # by real path, so that no text is in both splits
        for names, split in ((args.val_files, VAL), (args.inputs, TRAIN * bool(args.val_files))):
            for path, itself in named_files(names, args.out, self.skipped):
                named.setdefault(path.resolve(), (path, split, itself))
        with progress(sum(path.stat().st_size for path in named), "check") as bar:
            for path, split, itself in named.values():
                try:
                    self.counts += self.count(path, split)
                    self.files[path] = split
                except BadFile as error:
                    if itself:
                        raise
                    self.skipped[error.args[1]] += 1
                bar.update(path.stat().st_size)
        check(self.files, f"{' '.join(args.inputs)}: no text ({self.summary()}): give other files")

        self.size = self.counts[TRAIN] + self.counts[VAL]
        self.end_size = 0                    # bytes at the end that are for validation, if the hash does not select
        wanted = int(min(max(self.size * args.val_share, SHORT_VAL_BYTES), self.size / 2))
        drawn = min(self.counts[TRAIN], self.counts[VAL])
        if args.val_share and not args.val_files and drawn < min(SHORT_VAL_BYTES, wanted):
            self.end_size = wanted

    def count(self, path: Path, split: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for text in self.reader.read(path):
            size = len(text.strip())
            counts["blank"] += not size
            counts[split or self.draw_split(text)] += size
        return counts

    def draw_split(self, text: bytes) -> str:
        """Assign a document to TRAIN or VAL, independently of order and other documents."""
        return VAL if draw(text) < self.args.val_share else TRAIN

    def summary(self) -> str:
        skipped = "".join(f", {count:,} {why}" for why, count in sorted(self.skipped.items()))
        parts = [f"{self.skipped.total():,} files skipped{skipped.replace(',', ':', 1)}"]
        if self.counts["blank"]:
            parts.append(f"{self.counts['blank']:,} blank documents skipped")
        without = self.reader.without_separator & self.files.keys()
        if self.args.document_separator and without:
            parts.append(f"--document_separator not found in {len(without):,} of {len(self.files):,} files")
        return "; ".join(parts)

    def documents(self, task: str) -> Iterator[Document]:
        """Yield all documents that are not blank, in order. Shows the progress of the task."""
        done = 0
        with progress(self.size, task) as bar:
            for path, split in self.files.items():
                for text in self.reader.read(path):
                    size = len(text.strip())
                    done += size
                    bar.update(size)
                    val_size = done - self.size + self.end_size               # of this document
                    if not size:
                        continue
                    if not self.end_size:
                        yield split or self.draw_split(text), text
                    elif 0 < val_size < size:
                        at = find_cut(text, len(text.rstrip()) - val_size)
                        yield from [(part, x) for part, x in ((TRAIN, text[:at]), (VAL, text[at:])) if x.strip()]
                    else:
                        yield VAL if val_size > 0 else TRAIN, text

    def sample(self, size: int) -> Iterator[str]:
        """Yield parts of about `size` bytes of the training documents together; a hash of its text selects a part."""
        share = size / max(1, self.size)
        for split, text in self.documents("learn"):
            for start in range(0, len(text), CHUNK_BYTES):
                chunk = text[start:start + CHUNK_BYTES]
                if split == TRAIN and (share >= 1 or draw(chunk[::-1]) < share):
                    yield chunk.decode(errors="ignore")       # a character may be cut

def progress(total: int, task: str) -> tqdm:
    return tqdm(total=total, desc=task, unit="B", unit_scale=True, disable=None)

def encode_all(encoder: Encoder, docs: Iterator[Document], workers: int) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield (split, text, tokens) of all documents, in order."""
    with ThreadPoolExecutor(workers) as pool:                 # the packages leave the GIL to other threads
        while batch := list(itertools.islice(docs, BATCH_DOCS * workers)):
            splits, texts = zip(*batch)
            yield from zip(splits, texts, pool.map(encoder.encode, texts))

def write_shards(folder: Path, args: argparse.Namespace, corpus: Corpus, encoder: Encoder) -> list[str]:
    """Read, encode and write all documents. Returns the lines to print."""
    encoder.write_files(folder)
    spelled = np.array(list(map(len, encoder.token_bytes)))
    writers = {split: ShardWriter(folder, args.out / f"{args.out.name}_{split}", len(encoder.token_bytes),
                                  encoder.bos_id) for split in (TRAIN, VAL)}
    bos = encoder.bos_id.to_bytes(2, "little")
    totals: Counter[str] = Counter()         # documents, and bytes of text, of each split
    for split, text, tokens in encode_all(encoder, corpus.documents("encode"), args.workers):
        room = 2 * (args.max_doc_tokens - 1) if args.max_doc_tokens else max(2, len(tokens))
        writers[split].add(b"".join(bos + tokens[start:start + room] for start in range(0, len(tokens), room)))
        totals.update({split: 1, f"{split} bytes": len(text), "spelled": spelled[np.frombuffer(tokens, "<u2")].sum()})
    lines = []
    for split in [TRAIN, VAL] if args.val_files or args.val_share else [TRAIN]:
        check(totals[split], f"no {split} document in {corpus.size:,} bytes of text: give more or smaller documents "
              "(--document_separator), --val_files, or --val_share=0")
        size = totals[f"{split} bytes"]
        lines.append(f"{writers[split].close()}, {totals[split]:,} documents, {size:,} bytes, "
                     f"{size / sum(writers[split].sizes):.3f} bytes per token")
    size = totals[f"{TRAIN} bytes"] + totals[f"{VAL} bytes"]
    if totals["spelled"] != size:
        lines.append(f"the tokens spell {totals['spelled']:,} bytes, not {size:,}: the tokenizer drops or changes text")
    return [*lines, training_command(writers[TRAIN], writers[VAL])]

def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("inputs", nargs="+", help="files (text, .jsonl, .ndjson, .parquet; .gz or .zst), folders, or patterns "
        "('notes/**/*.md')")
    add("--out", type=parse_folder, required=True,
        help="folder to create; its name is also the prefix of the shard names")
    add("--tokenizer", default="bpe", help="bpe: learned from the text; gpt2; bytes; or the path of a tokenizer.json "
        "[bpe]")
    add("--vocab_size", type=int, help=f"bpe: maximum size of the vocabulary, with BOS [{BPE_VOCAB}]")
    add("--text_key", default="text", help="field of .jsonl or column of .parquet that has the text [text]")
    add("--document_separator", default="",
        help=r"between the documents of a text file, for example '\n\n', '\r\n\r\n' or '<|endoftext|>'")
    add("--max_doc_tokens", type=int, help=f"split longer documents, BOS included; 0: no limit "
        f"[{MAX_DOC_LEN}; with gpt2 {GPT2_MAX_DOC_LEN:,}: --max_doc_len of the presets pocket and record]")
    add("--val_share", type=float, default=0.05, help="fraction of the documents that are for validation [0.05]")
    add("--val_files", nargs="+", default=[], help="files for validation; all others are for training")
    add("--workers", type=int, default=1, help="threads that encode [1]")
    add("--force", action="store_true", help="replace an existing data set of this name")
    args = parser.parse_args(argv)
    if args.max_doc_tokens is None:
        args.max_doc_tokens = GPT2_MAX_DOC_LEN if args.tokenizer == "gpt2" else MAX_DOC_LEN
    if args.max_doc_tokens != 0 and args.max_doc_tokens < 2:
        parser.error(f"--max_doc_tokens={args.max_doc_tokens}: give 0 or at least 2")
    if args.vocab_size is not None and (args.tokenizer != "bpe" or not MIN_VOCAB <= args.vocab_size <= MAX_VOCAB):
        parser.error(f"--vocab_size={args.vocab_size}: give {MIN_VOCAB} to {MAX_VOCAB}, with --tokenizer=bpe")
    if not 0 <= args.val_share < 1:
        parser.error(f"--val_share={args.val_share}: give at least 0 and less than 1")
    if args.workers < 1:
        parser.error(f"--workers={args.workers}: give at least 1")
    check_replaceable(args.out, args.out.name, args.force)
    encoder = None                           # learned from the text
    if args.tokenizer in ("bytes", "gpt2"):
        encoder = byte_encoder() if args.tokenizer == "bytes" else gpt2_encoder()
    elif args.tokenizer != "bpe":
        encoder = read_tokenizer(Path(args.tokenizer))
    corpus = Corpus(args)
    vocab_size = args.vocab_size or BPE_VOCAB
    encoder = encoder or learn_bpe(corpus.sample(vocab_size * SAMPLE_BYTES), vocab_size)
    with new_data_set(args.out, args.out.name, args.force) as folder:
        lines = write_shards(folder, args, corpus, encoder)
    print_result(f"{len(corpus.files):,} files read, {corpus.summary()}", *lines)


if __name__ == "__main__":
    sys.exit(run_main(main))
