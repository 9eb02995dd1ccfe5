"""Tokenizers of the data tools: a learned byte-level BPE, any tokenizer.json, GPT-2's of tiktoken, and bytes."""
import functools
import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable

import tiktoken
import tokenizers
from tiktoken_ext.openai_public import r50k_pat_str           # GPT-2's pattern

from shard_files import ALL_BYTES, TOKENIZER_FILE, DataError, check, write_vocabulary

MAX_VOCAB = 65_536                           # ids are stored in 16 bits
GPT2_BOS_ID = 50_256                         # the last id
BOS_NAMES = "<|endoftext|>", "<|begin_of_text|>", "<s>", "<bos>", "[BOS]"     # the first one is added if none is there
GPT2_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
# Settings of a BPE model that change the ids, beyond its merges.
CHANGED_WORDS = "dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"
BEFORE_LAST_BLANK = re.compile(r"(?<=\s)(?=[ \t\n\r]\S)")   # where a word of GPT-2's pattern always ends

@dataclass
class Encoder:
    """A tokenizer."""
    encode_text: Callable[[str], list[int]]
    token_bytes: list[bytes]                 # of each id, b"" for BOS
    bos_id: int
    file: str = ""                           # content of its tokenizer.json, if it has one

    def __post_init__(self) -> None:
        check(len(self.token_bytes) <= MAX_VOCAB, f"a vocabulary of {len(self.token_bytes):,} does not fit 16 bits: "
              f"choose a tokenizer of at most {MAX_VOCAB:,} tokens, BOS included")

    def encode(self, text: bytes) -> bytes:
        """Return the tokens of a text, without BOS, as little-endian uint16."""
        ids = self.encode_text(text.decode())
        return struct.pack(f"<{len(ids)}H", *ids)

    def write_files(self, folder: Path) -> None:
        """Write vocab.txt and, if there is one, tokenizer.json."""
        write_vocabulary(folder, self.token_bytes)
        if self.file:
            (folder / TOKENIZER_FILE).write_text(self.file, "utf-8")

def byte_encoder() -> Encoder:
    return Encoder(lambda text: list(text.encode()), [*ALL_BYTES, b""], len(ALL_BYTES))

def learn_bpe(texts: Iterable[str], vocab_size: int) -> Encoder:
    """Learn a byte-level BPE of at most vocab_size tokens. BOS is the last one."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # cores are for --workers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    # Bytes that are not in the initial alphabet and not in the texts would have no token; later, they would be dropped.
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - 1, min_frequency=2, show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return wrap_tokenizer(tokenizer)

def read_tokenizer(path: Path) -> Encoder:
    """Read a tokenizer.json."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:               # the library raises nothing more specific
        raise DataError(f"{path} is no tokenizer.json ({error}): give one, or --tokenizer=bpe, gpt2 or bytes") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return wrap_tokenizer(tokenizer)

def wrap_tokenizer(tokenizer: tokenizers.Tokenizer) -> Encoder:
    """Build an encoder from a Tokenizer of the package. If it has no BOS, one is added as the last id."""
    tokenizer.encode_special_tokens = True                    # text that spells a special token is text
    names = [name for name in BOS_NAMES if tokenizer.token_to_id(name) is not None]
    if not names:
        names = list(BOS_NAMES[:1])
    tokenizer.add_special_tokens(names[:1])                   # also one that the file has as text
    bos_id = tokenizer.token_to_id(names[0])
    check(tokenizer.model.id_to_token(bos_id) in (None, names[0]), f"the vocabulary has a token with the id {bos_id:,} "
          f"that {names[0]} would get: choose a tokenizer.json without gaps between its ids, or with a BOS")
    file = tokenizer.to_str(pretty=True)
    parts = json.loads(file)
    added = tokenizer.get_added_tokens_decoder()

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_level = '"ByteLevel"' in json.dumps([parts["pre_tokenizer"], parts["decoder"]])
    token_bytes = [b"?"] * (1 + max(vocabulary.values()))     # b"?": of an id without a token
    for token, number in vocabulary.items():
        token_bytes[number] = spell(token, byte_level and number not in added) or b"?"
    token_bytes[bos_id] = b""

    def encode_text(text: str) -> list[int]:
        try:
            encoding, = tokenizer.encode_batch_fast([text], add_special_tokens=False)    # `encode` would hold the GIL
            return encoding.ids
        except Exception as error:           # the library raises nothing more specific
            raise DataError(f"the tokenizer cannot encode this text ({error}): use one with byte fallback") from None

    if is_like_gpt2(tokenizer, parts):
        ranks = {token_bytes[number]: number for number in vocabulary.values() if number not in added}
        encoding = tiktoken.Encoding("", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
        encode_text = functools.partial(encode_gpt2_like, encoding)
    return Encoder(encode_text, token_bytes, bos_id, file)

def encode_gpt2_like(encoding: tiktoken.Encoding, text: str) -> list[int]:
    # tiktoken panics at a million blanks before another character. Its `encode` gives <|endoftext|> the id of BOS.
    parts = BEFORE_LAST_BLANK.split(text) if len(text) > 900_000 else [text]
    return [token for part in parts for token in encoding.encode_ordinary(part)]

def is_like_gpt2(tokenizer: tokenizers.Tokenizer, parts: dict[str, Any]) -> bool:
    """Return whether tiktoken, which is six times faster, gives the same ids. parts: the content of tokenizer.json.

    tiktoken joins neighbors if their bytes together are a token, the one with the lowest id first. So every token
    beyond the bytes must have one merge, in the order of ids, and must be the encoding of its own text: by induction
    over the ids, any other two neighbors whose bytes together are a token then never occur.
    """
    added = tokenizer.get_added_tokens_decoder()
    if not (GPT2_WORDS.items() <= (parts["pre_tokenizer"] or {}).items() and parts["model"]["type"] == "BPE"
            and not parts["normalizer"] and all(token.special for token in added.values())
            and not any(parts["model"][key] for key in CHANGED_WORDS)):
        return False
    vocabulary = {token: number for token, number in parts["model"]["vocab"].items() if number not in added}
    merged = [vocabulary.get("".join(pair), -1) for pair in parts["model"]["merges"]]
    single = [vocabulary.get(char, -1) for char in BYTE_CHARS]
    return (sorted(single + merged) == sorted(vocabulary.values()) and merged == sorted(merged)
            and all([part.id for part in tokenizer.model.tokenize(token)] == [number]
                    for token, number in vocabulary.items()))

# The characters that stand for the 256 bytes in byte-level vocabularies.
SAME_CHARS = {*range(33, 127), *range(161, 173), *range(174, 256)}
OTHER_BYTES = [byte for byte in range(256) if byte not in SAME_CHARS]
BYTE_CHARS = [chr(byte if byte in SAME_CHARS else 256 + OTHER_BYTES.index(byte)) for byte in range(256)]

def spell(token: str, byte_level: bool) -> bytes:
    """Return the bytes of a token. Otherwise, <0x0A> is a byte and U+2581 a space, as in SentencePiece."""
    if byte_level and set(token) <= set(BYTE_CHARS):
        return bytes(map(BYTE_CHARS.index, token))
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    if byte:
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").encode()

def gpt2_encoder() -> Encoder:
    """Return GPT-2's tokenizer, with the ranks in tiktoken's cache or of the network."""
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:   # ValueError: other content than GPT-2's, such as a login page
        raise DataError(f"tiktoken cannot read GPT-2's ranks ({error}): connect to the network, or give the path of "
                        "GPT-2's tokenizer.json") from None
    token_bytes = [*map(encoding.decode_single_token_bytes, range(GPT2_BOS_ID)), b""]
    return Encoder(functools.partial(encode_gpt2_like, encoding), token_bytes, GPT2_BOS_ID)
