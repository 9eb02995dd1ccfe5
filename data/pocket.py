"""Create a data set from the source of this Python's standard library, in the same way as the shipped data/pocket.

    python data/pocket.py [--out data/pocket_made] [--force]

Prints whether the result is identical to data/pocket, and never writes there. Needs no network and no packages. A
document is a top-level definition with the text up to the next one, or the text before the first definition. Documents
are split after 256 tokens. No source file is in both splits. The vocabulary has 2,048 tokens: 256 bytes, the 1,791 most
common pieces of the training files and, as the last id, BOS. The result depends only on the Python version.
"""
import argparse
import contextlib
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
from typing import Iterable

from shard_files import (ALL_BYTES, REPORT_FILE, TRAIN, VAL, VOCAB_FILE, check, new_data_set, parse_folder,
                         print_result, read_manifest, run_main, write_shard, write_vocabulary)

VOCAB_SIZE = 2048
BOS_ID = VOCAB_SIZE - 1
MAX_DOC_LEN = 256                            # tokens, BOS included
VAL_ONE_IN = 12                              # 1 file in 12 is for validation
MIN_VAL_TOKENS = 70_000                      # the final validation reads 65,536 + 1 tokens
SHIPPED_DIR = Path(__file__).resolve().with_suffix("")
SHARDS = {TRAIN: "pocket_train_000000.bin", VAL: "pocket_val_000000.bin"}
# Files that not every Python of one version has. The build writes the last two, and they contain its paths.
EXCLUDED_RE = re.compile(
    r"(test|tests|idlelib|lib2to3|site-packages|dist-packages|__pycache__)$|_sysconfigdata|config-")
# A line break with indentation, a word, a sign, or blanks. Together they match any text.
PIECE_RE = re.compile(rb"\n\s*| ?\w+| ?[^\s\w]|\s+")
TOP_LEVEL_RE = re.compile(rb"^(?:def |class |async def |@)", re.MULTILINE)

def read_sources(root: Path) -> dict[str, bytes]:
    """Read all UTF-8 modules of the library in `root`: {relative path: text}, sorted by path."""
    sources = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not EXCLUDED_RE.match(name)]
        for name in names:
            path = Path(folder, name)
            if EXCLUDED_RE.match(name) or not name.endswith(".py") or not path.is_file():     # for example a pipe
                continue
            with contextlib.suppress(UnicodeDecodeError):
                text = path.read_bytes()
                text.decode()
                sources[path.relative_to(root).as_posix()] = text
    return dict(sorted(sources.items()))

def choose_split(name: str) -> str:
    """Assign a file to TRAIN or VAL by a hash of its name, independently of all other files."""
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")
    return VAL if draw % VAL_ONE_IN == 0 else TRAIN

def split_definitions(text: bytes) -> list[bytes]:
    """Split before every top-level definition and its decorators. The pieces joined are `text`."""
    starts = [0]
    decorated = False
    for match in TOP_LEVEL_RE.finditer(text):
        if not decorated:
            starts.append(match.start())
        decorated = match[0] == b"@"
    starts.append(len(text))
    return [text[start:end] for start, end in zip(starts, starts[1:]) if start < end]

def learn_vocabulary(texts: Iterable[bytes], size: int) -> dict[bytes, int]:
    """Assign ids to the 256 bytes, then to the most common longer pieces of the texts, up to `size` ids.

    Pieces that are equally common are in byte order.
    """
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(piece for piece in PIECE_RE.findall(text) if len(piece) > 1)
    pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))
    chosen = ALL_BYTES + pieces[:size - len(ALL_BYTES)]
    return {piece: number for number, piece in enumerate(chosen)}

def encode_pieces(text: bytes, ids: dict[bytes, int]) -> list[int]:
    """Encode a text as the ids of its pieces. A piece without an id is encoded byte by byte."""
    tokens = []
    for piece in PIECE_RE.findall(text):
        if piece in ids:
            tokens.append(ids[piece])
        else:
            tokens += [ids[bytes((byte,))] for byte in piece]
    return tokens

def make_documents(text: bytes, ids: dict[bytes, int]) -> list[list[int]]:
    """Split and encode one file. Each document begins with BOS; together, in order, they encode the whole text."""
    docs = []
    max_tokens = MAX_DOC_LEN - 1
    for definition in split_definitions(text):
        tokens = encode_pieces(definition, ids)
        docs += [[BOS_ID] + tokens[i:i + max_tokens] for i in range(0, len(tokens), max_tokens)]
    return docs

def make_data_set(root: Path, folder: Path, made_by: dict[str, str]) -> list[str]:
    """Create the data set in `folder` from the library in `root`. Returns one line of counts per split, to print."""
    check((root / "os.py").is_file(), f"{root} has no os.py: run this with a Python that is neither zipped nor frozen")
    texts: dict[str, list[bytes]] = {TRAIN: [], VAL: []}
    for name, text in read_sources(root).items():
        texts[choose_split(name)].append(text)
    ids = learn_vocabulary((part for text in texts[TRAIN] for part in split_definitions(text)), BOS_ID)
    check(len(ids) == BOS_ID, f"{root} has {len(ids):,} of {BOS_ID:,} pieces: run this with a complete Python")
    report = dict(made_by)
    lines = []
    for split, shard in SHARDS.items():
        docs = []
        for text in texts[split]:
            docs += make_documents(text, ids)
        # Without shuffling, a run that does not read all data sees only the first files.
        random.Random(0).shuffle(docs)
        counts = {"files": len(texts[split]), "documents": len(docs), "tokens": sum(map(len, docs)),
                  "bytes": sum(map(len, texts[split]))}
        check(split == TRAIN or counts["tokens"] >= MIN_VAL_TOKENS, f"{root} has {counts['tokens']:,} of "
              f"{MIN_VAL_TOKENS:,} validation tokens: run this with a complete Python")
        write_shard(folder / shard, b"".join(struct.pack(f"<{len(doc)}H", *doc) for doc in docs), VOCAB_SIZE)
        report[split] = counts
        lines.append(f"{split}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    write_vocabulary(folder, ids)   # in the order of the ids
    (folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n")
    return lines

def compare_with_shipped(out: Path) -> str:
    """Return a line that compares tokens and vocabulary in `out` with the shipped ones."""
    made, shipped = read_manifest(out), read_manifest(SHIPPED_DIR)
    same = [made[name] == shipped.get(name) for name in (*SHARDS.values(), VOCAB_FILE)]
    if all(same):
        return f"identical to {SHIPPED_DIR}"
    return f"NOT identical to {SHIPPED_DIR}: the library of another Python; losses are not comparable with records"

def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=parse_folder, default=SHIPPED_DIR.with_name("pocket_made"),
                        help="folder to write to [data/pocket_made]")
    parser.add_argument("--force", action="store_true", help="replace a data set named pocket there")
    args = parser.parse_args(argv)
    check(not args.out.is_relative_to(SHIPPED_DIR), f"{args.out} is for the shipped data: give another --out")
    made_by = {"python": f"{sys.implementation.name} {sys.version.split()[0]}",
               "source_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    with new_data_set(args.out, "pocket", args.force) as folder:
        lines = make_data_set(Path(sysconfig.get_path("stdlib")), folder, made_by)
    print_result(*lines, compare_with_shipped(args.out))


if __name__ == "__main__":
    sys.exit(run_main(main))
