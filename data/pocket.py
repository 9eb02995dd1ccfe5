"""Make the embedded data set: the source of Python's own standard library as token shards.

    python data/pocket.py [--out data/pocket] [--force]

No download, no packages. A document is a top-level definition with what follows it, or the text before the first; one
longer than 256 tokens goes on in further documents. Validation files share no source file with training files. The
vocabulary has 2,048 tokens: 256 bytes, the 1,791 most common pieces of the training files, and last the document start.
Output, for one Python version always the same bytes, in the formats of data/README.md: `pocket_train_000000.bin`,
`pocket_val_000000.bin`, `vocab.txt`, `pocket.json` (Python version and counts) and `manifest.json`. A later call that
finds all of them whole does nothing.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import struct
import sys
import sysconfig
from collections import Counter
from pathlib import Path

from shard_files import (ALL_BYTES, TRAIN, VAL, VOCABULARY, DataError, Output, as_program, check_content,
                         errors_in_words, folder_name, kind_of, read_manifest, say)

VOCAB_SIZE = 2048
DOC_START = VOCAB_SIZE - 1
MAX_DOC_LEN = 256                            # tokens, document start included
VAL_SHARE = 12                               # one file in twelve is for validation
MIN_VAL_TOKENS = 70_000                      # a final validation reads 65,536 and one more
SPLITS = (TRAIN, VAL)
SHARD = "pocket_{}_000000.bin"
REPORT = "pocket.json"
OWN_FILES = re.compile(r"pocket_(train|val)_\d{6}\.bin|vocab\.txt|pocket\.json")
SKIP_DIRS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
BUILD_FILES = ("_sysconfigdata", "config-")  # written when this Python was built: hold its paths, differ everywhere
PIECE = re.compile(rb"\n\s*| ?\w+| ?[^\s\w]|\s+")    # line break with indentation, word, sign, spaces: covers any text
TOP_LEVEL = re.compile(rb"^(?:def |class |async def |@)", re.MULTILINE)


def read_sources(root: Path) -> dict[str, bytes]:
    """Text of every library module below `root`, by relative name, in name order, if in UTF-8."""
    sources = {}
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if is_of_the_library(name)]
        for name in names:
            path = Path(folder, name)
            if path.suffix != ".py" or not is_of_the_library(name) or not path.is_file():         # a link may be broken
                continue
            text = path.read_bytes()
            try:
                text.decode()
            except UnicodeDecodeError:
                continue
            sources[path.relative_to(root).as_posix()] = text
    return dict(sorted(sources.items()))


def is_of_the_library(name: str) -> bool:
    """Whether a folder or file of this name is what every Python of this version has."""
    return name not in SKIP_DIRS and not name.startswith(BUILD_FILES)


def split_of(name: str) -> str:
    """TRAIN or VAL for one file: by a hash of its name, so that no other file changes it."""
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
    return VAL if draw % VAL_SHARE == 0 else TRAIN


def cut(text: bytes) -> list[bytes]:
    """Cut before each top-level definition, decorators with it. Joined again they are `text`."""
    borders = [0]
    decorated = False
    for match in TOP_LEVEL.finditer(text):
        if not decorated:
            borders.append(match.start())
        decorated = match[0] == b"@"
    borders.append(len(text))
    return [text[start:end] for start, end in zip(borders, borders[1:]) if start < end]


def make_vocabulary(counts: Counter, size: int) -> dict[bytes, int]:
    """Ids of the 256 bytes, then of the most common pieces, equally common ones in byte order."""
    pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))
    chosen = ALL_BYTES + pieces[:size - len(ALL_BYTES)]
    return {piece: number for number, piece in enumerate(chosen)}


def spell(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """The ids of a text's pieces; a piece without an id in single bytes, whose ids are `ids` of them."""
    tokens = []
    for piece in PIECE.findall(text):
        if piece in ids:
            tokens.append(ids[piece])
        else:
            tokens += [ids[bytes((byte,))] for byte in piece]
    return tokens


def documents(text: bytes, ids: dict[bytes, int]) -> list[list[int]]:
    """The documents of one file, document start first; in order they spell the whole text."""
    docs = []
    room = MAX_DOC_LEN - 1
    for part in cut(text):
        tokens = spell(part, ids)
        docs += [[DOC_START] + tokens[at:at + room] for at in range(0, len(tokens), room)]
    return docs


def made_before(out: Path, made_by: dict) -> bool:
    """Whether `out` holds all files, whole, from the same Python and version of this file."""
    try:
        entries = read_manifest(out)
        for name in (*map(SHARD.format, SPLITS), VOCABULARY, REPORT):
            if name not in entries:
                return False
            check_content(out / name, entries)
        report = json.loads((out / REPORT).read_bytes())
        return made_by.items() <= report.items()
    except (DataError, OSError, ValueError, AttributeError):
        return False


def make(root: Path, output: Output, made_by: dict) -> list[str]:
    """Read the library below `root`, write the data set. Returns a line to print for each split. Raises DataError."""
    if not (root / "os.py").is_file():
        raise DataError(f"found no os.py in {root}, expected the library's source there; run this with a Python that "
                        f"is neither zipped nor frozen")
    texts = {TRAIN: [], VAL: []}
    for name, text in read_sources(root).items():
        texts[split_of(name)].append(text)
    counts = Counter()
    for text in texts[TRAIN]:
        for part in cut(text):
            counts.update(piece for piece in PIECE.findall(part) if len(piece) > 1)
    ids = make_vocabulary(counts, DOC_START)
    if len(ids) < DOC_START:
        raise DataError(f"found {len(ids):,} different pieces, expected {DOC_START:,}; use a complete Python")

    report = dict(made_by)
    bodies = {}
    lines = []
    for split in SPLITS:
        docs = []
        for text in texts[split]:
            docs += documents(text, ids)
        random.Random(0).shuffle(docs)       # else a run shorter than the data would know only the first files
        files = len(texts[split])
        tokens = sum(map(len, docs))
        size = sum(map(len, texts[split]))
        if split == VAL and tokens < MIN_VAL_TOKENS:
            raise DataError(f"found {tokens:,} validation tokens in {root}, expected at least {MIN_VAL_TOKENS:,}; run "
                            f"this with a Python whose library is complete")
        bodies[split] = b"".join(struct.pack(f"<{len(doc)}H", *doc) for doc in docs)
        report[split] = {"files": files, "documents": len(docs), "tokens": tokens, "bytes": size}
        lines.append(f"{split}: {files} files, {len(docs):,} documents, {tokens:,} tokens, {size:,} bytes, "
                     f"{size / tokens:.3f} bytes per token")

    # The report gets its name first: it says whose the others are, should a call end between two names.
    output.write(REPORT, json.dumps(report, indent=1).encode() + b"\n")
    output.write_vocabulary(ids)
    for split, body in bodies.items():
        output.write_shard(SHARD.format(split), body, VOCAB_SIZE)
    output.publish()
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=folder_name, default=Path(__file__).with_suffix(""), help="default: data/pocket")
    parser.add_argument("--force", action="store_true", help="write again, and replace what others left there")
    args = parser.parse_args(argv)
    made_by = {"python": f"{sys.implementation.name} {sys.version.split()[0]}",
               "source_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    with errors_in_words():
        ours = not kind_of(args.out / REPORT)
        with Output(args.out, OWN_FILES, replace=args.force or ours) as output:
            if not args.force and made_before(args.out, made_by):
                lines = [f"{os.path.relpath(args.out)}: complete, nothing to do (--force makes it again)"]
            else:
                output.check_free(f"those without {REPORT} are somebody else's: give another --out")
                lines = make(Path(sysconfig.get_path("stdlib")), output, made_by)
        say(*lines)


if __name__ == "__main__":
    sys.exit(as_program(main))
