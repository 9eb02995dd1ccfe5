"""Print a prompt, and the text with which the saved weights of a run continue it.

    ./run.sh --save=logs/mine
    python data/sample.py logs/mine 'def main(' --temperature=0

DIR is a directory that the trainer's --save has written; the train_gpt.py of this repository must have its model.
"""
import argparse
import functools
import glob
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Callable, Iterable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
import train_gpt as tg                                        # noqa: E402

from encoders import gpt2_encoder, read_tokenizer             # noqa: E402
from pocket import encode_pieces                              # noqa: E402
from shard_files import (ALL_BYTES, TOKENIZER_FILE, DataError, escape_folder, print_result,       # noqa: E402
                         print_status, run_main)

WEIGHTS_FILE = "weights.safetensors"

def make_tokenizer(folder: Path, cfg: tg.Config) -> tuple[list[bytes] | None, Callable[[bytes], Iterable[int]]]:
    """Return the bytes of each token, None if they are unknown, and the encoder of prompts.

    A tokenizer.json beside the weights or the training data is used if it has the vocabulary of the weights.
    """
    token_bytes = tg.read_token_bytes(folder, cfg)
    shards = glob.glob(escape_folder(str(ROOT / cfg.train_files)))[:1]
    files = [path / TOKENIZER_FILE for path in (folder, *(Path(shard).parent for shard in shards))]
    encoders = [read_tokenizer(file) for file in files if token_bytes and file.is_file()]
    encoders = [encoder for encoder in encoders if encoder.token_bytes == token_bytes]
    # Token 0 is "!" in GPT-2's vocabulary, and byte 0 in that of data/pocket.
    if not encoders and cfg.vocab_size == tg.GPT2_VOCAB and (not token_bytes or token_bytes[0] == b"!"):
        encoders = [gpt2_encoder()]
    if encoders:
        return encoders[0].token_bytes, lambda prompt: encoders[0].encode_text(prompt.decode())
    if token_bytes and token_bytes[:256] != ALL_BYTES:
        print_status(f"no {TOKENIZER_FILE} of these weights in {folder} or beside {cfg.train_files}: the prompt is "
                     "encoded by whole words and bytes, unlike the training text")
    ids = {piece: token for token, piece in enumerate(token_bytes or ()) if piece}
    return token_bytes, functools.partial(encode_pieces, ids=ids)

@torch.no_grad()
def load_weights(path: Path, engine: tg.Engine) -> None:
    """Load a weights.safetensors. Rows of n-gram tables that it does not have stay 0. Raises ConfigError."""
    dense = engine.model.state_dict()
    tables = {label: table for label, table in engine.tables.items() if isinstance(table, tg.RowwiseTable)}
    try:
        weights = load_file(path)
        shapes = {label: tuple(x.shape) for label, x in dense.items()}
        for label, table in tables.items():
            ids = weights[f"{label}.ids"]
            shapes |= {f"{label}.ids": (len(ids),), f"{label}.rows": (len(ids), engine.cfg.model_dim)}
            if not ((0 <= ids) & (ids < table.specs[0].table.num_rows)).all():
                raise ValueError(f"{label} has more rows")
        found = {label: tuple(x.shape) for label, x in weights.items()}
        for label in found.keys() | shapes.keys():
            if found.get(label) != shapes.get(label):
                raise ValueError(f"{label} is {found.get(label)}, not {shapes.get(label)}")
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise tg.ConfigError(f"{path} is damaged or of another model ({error}): use its own repository") from None
    for label, x in dense.items():
        x.copy_(weights[label])
    for label, table in tables.items():
        ids, rows = weights[f"{label}.ids"], weights[f"{label}.rows"]
        for x, y in zip(table.state, (rows, torch.zeros(len(ids)), torch.ones(len(ids)))):
            x.index_copy_(0, ids.long().to(x.device), y.to(x))

def continue_prompt(args: argparse.Namespace) -> str:
    """Return the prompt and its continuation. Raises TrainerError."""
    path = args.folder / WEIGHTS_FILE
    tg.check(path.is_file(), f"no weights {path}: give a directory that --save wrote")
    changes = dict(device=args.device, compile=0, seed=args.seed, row_comms="sparse")
    cfg = tg.make_config(tg.load_settings(args.folder) | changes)
    comm = tg.init_distributed(replace(cfg, seqs_per_step=1))                 # refuses several ranks
    if cfg.dtype == "bfloat16" and not comm.on_cuda:
        cfg = replace(cfg, dtype="float32")
    token_bytes, encode = make_tokenizer(args.folder, cfg)
    prompt = os.fsencode(args.prompt)
    try:
        tokens = list(encode(prompt))
    except (KeyError, ValueError) as error:                   # a byte without a token; not UTF-8
        raise tg.ConfigError(f"the prompt cannot be encoded ({type(error).__name__}: {error}): use other words, or put "
                             f"the {tg.VOCAB_FILE} of the data into {args.folder}") from None
    engine = tg.Engine(cfg, comm, tg.attention_reference, head_precision=None)
    load_weights(path, engine)
    schedule = tg.Schedule(cfg)
    text = tg.generate(engine, schedule.at(schedule.end_step), token_bytes, args.tokens, args.temperature, tokens,
                       args.top_k)
    return prompt.decode(errors="replace") + text

def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="directory that --save wrote")
    add("prompt", metavar="PROMPT", help="text to continue; '': a new document")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token [0.8]")
    add("--top_k", type=int, default=0, help="sample from this number of likeliest tokens; 0: from all [0]")
    add("--tokens", type=int, default=96, help="tokens to generate, at most [96]")
    add("--seed", type=int, default=0, help="of the sampling [0]")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA if available [auto]")
    args = parser.parse_args(argv)
    if min(args.temperature, args.top_k, args.tokens, args.seed) < 0:
        parser.error("--temperature, --top_k, --tokens, --seed: 0 or more")
    try:
        text = continue_prompt(args)
    except (tg.TrainerError, DataError) as error:
        print_status(" ".join(f"error: {error}".split()))
        sys.exit(getattr(error, "exit_status", 2))
    print_result(text)


if __name__ == "__main__":
    sys.exit(run_main(main))
