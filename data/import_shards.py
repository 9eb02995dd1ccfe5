"""Turn token files of other trainers into shards for train_gpt.py. Every document then begins with BOS.

    python data/import_shards.py train.bin --val_files val.bin --out=data/owt                         # nanoGPT
    python data/import_shards.py edu_train_*.bin --val_files edu_val_*.bin --out=data/edu             # llm.c
    python data/import_shards.py a_text_document.idx --out=data/mine --tokenizer=tokenizer.json       # Megatron

The files of a split are one stream. BOS is the token that they have between documents (EOT); data/README.md says where.
The formats are those of nanoGPT and llm.c (Andrej Karpathy) and Megatron-LM (NVIDIA).
"""
import argparse
import struct
import sys
from pathlib import Path
from typing import Iterator

import numpy as np

from encoders import GPT2_BOS_ID, MAX_VOCAB, read_tokenizer
from shard_files import (HEADER_BYTES, TRAIN, VAL, DataError, ShardWriter, check, file_problem,
                         new_data_set, parse_folder, print_result, run_main, training_command)

LLM_C_TYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}    # {(magic number, version): type of a token}
MEGATRON_HEADER = struct.Struct("<9sQBQQ")   # magic, version, type of a token, number of sequences and of index entries
MEGATRON_TYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
PART_TOKENS = 1 << 24                        # tokens in memory

def open_tokens(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a file, and where its documents begin according to its index; without an index, nowhere."""
    check(not file_problem(path), f"{path}: {file_problem(path)}; give a .bin or .idx file")
    try:
        if path.with_suffix(".idx").exists():
            return open_megatron(path.with_suffix(".idx"))
        words = np.fromfile(path, "<i4", 3).tolist()
        kind = LLM_C_TYPES.get(tuple(words[:2]))
        if words[:1] not in [[magic] for magic, _ in LLM_C_TYPES]:            # nanoGPT
            return np.memmap(path, "<u2", "r"), np.empty(0, int)
        tokens = np.memmap(path, kind or "<u2", "r", HEADER_BYTES)
        if not kind or len(tokens) != words[2]:
            raise ValueError(f"version {words[1]}, {len(tokens):,} tokens, {words[2]:,} by its header")
        return tokens, np.empty(0, int)
    except (ValueError, LookupError, OverflowError, struct.error) as error:
        raise DataError(f"{path} has no whole tokens of nanoGPT, llm.c or Megatron ({error}): copy it again") from None

def open_megatron(path: Path) -> tuple[np.ndarray, np.ndarray]:
    content = path.read_bytes()
    start = MEGATRON_HEADER.size
    magic, version, code, sequences, documents = MEGATRON_HEADER.unpack(content[:start])
    lengths = np.frombuffer(content, "<i4", sequences, start)
    pointers = np.frombuffer(content, "<i8", sequences, start + lengths.nbytes)
    index = np.frombuffer(content, "<i8", documents, start + lengths.nbytes + pointers.nbytes)
    tokens = np.memmap(path.with_suffix(".bin"), MEGATRON_TYPES[code], "r")
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (magic, version, offsets[-1]) != (b"MMIDIDX\0\0", 1, len(tokens)) or (
            pointers != offsets[:-1] * tokens.itemsize).any():
        raise ValueError(f"magic number {magic}, version {version}, {offsets[-1]:,} of {len(tokens):,} tokens")
    return tokens, np.unique(offsets[index[:-1]])             # the last entry of the index is the end

def read_tokens(paths: list[Path], vocab_size: int, bos_id: int) -> Iterator[np.ndarray]:
    """Yield the tokens of all files in parts, (n,) u16, with BOS between documents."""
    for path in paths:
        tokens, starts = open_tokens(path)
        if len(starts) and bos_id in (tokens[0], tokens[[*starts, len(tokens)][1] - 1]):
            starts = starts[:0]              # the first document has EOT, so all have it
        for begin in range(0, len(tokens), PART_TOKENS):
            part = tokens[begin:begin + PART_TOKENS]
            check(0 <= part.min() and part.max() < vocab_size, f"{path} has the token {part.max():,}, beyond "
                  f"--vocab_size={vocab_size}: give the size of its vocabulary, at most {MAX_VOCAB:,}, because a shard "
                  "has 16 bits for a token")
            inside = starts[(begin <= starts) & (starts < begin + len(part))]
            yield np.insert(part.astype("<u2"), inside - begin, bos_id)

def write_split(writer: ShardWriter, parts: Iterator[np.ndarray], bos_id: int) -> str:
    """Write the shards of one split, each from the beginning of a document on. Returns the counts to print."""
    documents = 0
    rest = np.array([bos_id], "<u2")         # a stream that has EOT behind documents lacks it before the first one
    for part in parts:
        if len(rest) > 1 or part[0] != bos_id:
            part = np.concatenate([rest, part])
        *before, cut = np.flatnonzero(part == bos_id)
        documents += len(before)
        if cut:
            writer.add(part[:cut].tobytes())
        rest = part[cut:]
    if len(rest) > 1:                        # else EOT behind the last document
        documents += 1
        writer.add(rest.tobytes())
    check(writer.sizes, f"{writer.stem.name}: no tokens except BOS: give other files")
    return f"{writer.close()}, {documents:,} documents"

def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("inputs", nargs="+", type=Path, help="token files for training, in order")
    add("--val_files", nargs="+", type=Path, default=[], help="token files for validation")
    add("--out", type=parse_folder, required=True, help="folder to create")
    add("--tokenizer", type=Path, help="its tokenizer.json, which gives size and EOT, and bits per byte [GPT-2's ids]")
    add("--vocab_size", type=int, help="without --tokenizer: ids in the files; EOT is a new one [50257, EOT 50256]")
    add("--force", action="store_true", help="replace an existing data set of this name")
    args = parser.parse_args(argv)
    if args.vocab_size is not None and args.vocab_size < 1:
        parser.error(f"--vocab_size={args.vocab_size}: give at least 1")
    bos_id = GPT2_BOS_ID
    if args.tokenizer:
        encoder = read_tokenizer(args.tokenizer)
        bos_id = encoder.bos_id
    elif args.vocab_size:
        bos_id = args.vocab_size
    size = len(encoder.token_bytes) if args.tokenizer else bos_id + 1
    check(size <= MAX_VOCAB, f"a vocabulary of {size:,} does not fit 16 bits: at most {MAX_VOCAB:,} are possible")
    with new_data_set(args.out, args.out.name, args.force) as folder:
        if args.tokenizer:
            encoder.write_files(folder)
        train, val = (ShardWriter(folder, args.out / f"{args.out.name}_{split}", size, bos_id)
                      for split in (TRAIN, VAL))
        lines = [write_split(train, read_tokens(args.inputs, size, bos_id), bos_id)]
        if args.val_files:
            lines.append(write_split(val, read_tokens(args.val_files, size, bos_id), bos_id))
    print_result(*lines, training_command(train, val))


if __name__ == "__main__":
    sys.exit(run_main(main))
