"""Make the embedded data set: the source of Python's own standard library as token shards. No download, no packages.

    python data/pocket.py [--out data/pocket] [--force]

A document is a top-level definition with what follows it, or the text before the first; one longer than 256 tokens goes
on in further documents. Validation files share no source file with training files. The vocabulary has 2,048 tokens:
256 bytes, the 1,791 most common pieces of the training files, and last the document start. Output, for one Python
version always the same bytes:

    pocket_train_000000.bin, pocket_val_000000.bin    256 little-endian int32: 20240520, 1, number of tokens, vocabulary
                                                      size, document-start id, zeros; then the tokens as uint16
    vocab.txt    base64 of a token's bytes, a space, its id; one token per line; document start not listed
    pocket.json  Python version and counts; tells a later call that there is nothing to do
"""
from __future__ import annotations

import argparse
import base64
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

VOCAB_SIZE = 2048
DOC_START = VOCAB_SIZE - 1
MAX_DOC_LEN = 256                            # tokens, document start included
VAL_SHARE = 12                               # one file in twelve is for validation
MIN_VAL_TOKENS = 70_000                      # a final validation reads 65,536 and one more
SPLITS, SHARD = ("train", "val"), "pocket_{}_000000.bin"
SKIP_DIRS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
BUILD_FILES = ("_sysconfigdata", "config-")  # written when this Python was built: hold its paths, differ everywhere
PIECE = re.compile(rb"\n\s*| ?\w+| ?[^\s\w]|\s+")    # line break with indentation, word, sign, spaces: covers any text
TOP_LEVEL = re.compile(rb"^(?:def |class |async def |@)", re.MULTILINE)


class DataError(Exception):
    """No data set can be made; the message says what was found, what was expected, and what to do."""


def read_sources(root: Path) -> dict[str, bytes]:
    """Text of every library module below `root`, by relative name, in name order; files not in UTF-8 are left out."""
    sources = {}
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIP_DIRS and not name.startswith(BUILD_FILES)]
        for path in (Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(BUILD_FILES)):
            text = path.read_bytes() if path.is_file() else b""         # a link may lead nowhere
            try:
                text.decode()
            except UnicodeDecodeError:
                continue
            sources[path.relative_to(root).as_posix()] = text
    return dict(sorted(sources.items()))


def split_of(name: str) -> str:
    """"train" or "val" for one file: by a hash of its name, so that no other file can change the answer."""
    return "val" if int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % VAL_SHARE == 0 else "train"


def cut(text: bytes) -> list[bytes]:
    """Cut before each top-level definition; decorators stay with the definition after them. Joined again: `text`."""
    starts, decorated = [0], False
    for match in TOP_LEVEL.finditer(text):
        if not decorated:
            starts.append(match.start())
        decorated = match[0] == b"@"
    return [text[a:b] for a, b in zip(starts, starts[1:] + [len(text)]) if a < b]


def make_vocabulary(texts: list[bytes]) -> list[bytes]:
    """The bytes of ids 0 .. 2046: single bytes, then the most common pieces, equally common ones in byte order."""
    counts = Counter(piece for text in texts for part in cut(text) for piece in PIECE.findall(part) if len(piece) > 1)
    common = sorted(counts, key=lambda piece: (-counts[piece], piece))[:DOC_START - 256]
    if len(common) < DOC_START - 256:
        raise DataError(f"found {len(common):,} different pieces, expected {DOC_START - 256:,}; use a complete Python")
    return [bytes([byte]) for byte in range(256)] + common


def documents(text: bytes, ids: dict[bytes, int]) -> list[list[int]]:
    """The documents of one file, at most 256 tokens each, document start first; in order they spell the whole text."""
    docs = []
    for part in cut(text):
        tokens = []
        for piece in PIECE.findall(part):
            tokens.extend((ids[piece],) if piece in ids else piece)     # a piece outside the vocabulary: its bytes
        docs += [[DOC_START] + tokens[at:at + MAX_DOC_LEN - 1] for at in range(0, len(tokens), MAX_DOC_LEN - 1)]
    return docs


def write(path: Path, content: bytes) -> None:
    """All or nothing: nobody ever reads half a file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    os.replace(part, path)


def shard(docs: list[list[int]]) -> bytes:
    """Header and tokens of one shard; a library of about 5 million tokens needs no second one."""
    count = sum(map(len, docs))
    header = struct.pack("<256i", 20240520, 1, count, VOCAB_SIZE, DOC_START, *[0] * 251)
    return header + b"".join(struct.pack(f"<{len(doc)}H", *doc) for doc in docs)


def made_before(out: Path, made_by: dict) -> bool:
    """Whether `out` holds a whole data set from the same Python and the same version of this file."""
    try:
        report = json.loads((out / "pocket.json").read_bytes())
        sizes = {split: (out / SHARD.format(split)).stat().st_size for split in SPLITS}
        whole = all(sizes[split] == 1024 + 2 * report[split]["tokens"] for split in SPLITS)
        return whole and (out / "vocab.txt").is_file() and made_by.items() <= report.items()
    except (OSError, ValueError, KeyError):
        return False


def make(root: Path, out: Path, made_by: dict) -> None:
    """Read the library below `root`, write the data set into `out`, print a line for each split."""
    if not (root / "os.py").is_file():
        raise DataError(f"found no os.py in {root}, expected the library's source there; "
                        f"run this with a Python that is neither zipped nor frozen")
    sources = read_sources(root)
    texts = {split: [text for name, text in sources.items() if split_of(name) == split] for split in SPLITS}
    vocabulary = make_vocabulary(texts["train"])
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    docs = {split: [doc for text in texts[split] for doc in documents(text, ids)] for split in SPLITS}
    tokens = {split: sum(map(len, docs[split])) for split in SPLITS}
    if tokens["val"] < MIN_VAL_TOKENS:
        raise DataError(f"found {tokens['val']:,} validation tokens in {root}, expected at least {MIN_VAL_TOKENS:,}; "
                        f"run this with a Python whose library is complete")
    out.mkdir(parents=True, exist_ok=True)
    (out / "vocab.txt").unlink(missing_ok=True)      # written last: where it is, everything is
    report = dict(made_by)
    for split in SPLITS:
        random.Random(0).shuffle(docs[split])        # else a run shorter than the data would know only the first files
        write(out / SHARD.format(split), shard(docs[split]))
        size = sum(map(len, texts[split]))
        report[split] = {"files": len(texts[split]), "documents": len(docs[split]), "tokens": tokens[split],
                         "bytes": size}
        print(f"{split}: {len(texts[split])} files, {len(docs[split]):,} documents, {tokens[split]:,} tokens, "
              f"{size:,} bytes, {size / tokens[split]:.3f} bytes per token")
    write(out / "pocket.json", (json.dumps(report, indent=1) + "\n").encode())
    lines = [b"%s %d\n" % (base64.b64encode(piece), number) for number, piece in enumerate(vocabulary)]
    write(out / "vocab.txt", b"".join(lines))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""), help="default: data/pocket")
    parser.add_argument("--force", action="store_true", help="write again what is there already")
    args = parser.parse_args(argv)
    made_by = {"python": f"{sys.implementation.name} {sys.version.split()[0]}",
               "source_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    if not args.force and made_before(args.out, made_by):
        print(f"{os.path.relpath(args.out)}: complete, nothing to do (--force makes it again)")
        return
    try:
        make(Path(sysconfig.get_path("stdlib")), args.out, made_by)
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
