"""Tokenizers of the data tools: a learned byte-level BPE, any tokenizer.json, GPT-2's of tiktoken, and bytes."""
import functools
import importlib
import json
import os
import re
import struct
import unicodedata
from pathlib import Path
from typing import Any, Callable, Iterable

from shard_files import ALL_BYTES, TOKENIZER_FILE, DataError, check, write_vocabulary

MAX_VOCAB = 65_536                           # ids are stored in 16 bits
GPT2_BOS_ID = 50_256                         # the last id
BOS_NAMES = "<|endoftext|>", "<|begin_of_text|>", "<s>", "<bos>", "[BOS]"     # the first one is added if none is there
# GPT-2's pattern (openai/gpt-2) for Python's `re`, which lacks \p{L} and \p{N}. Not for `unsure_characters`.
WORD_RE = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]+|_+)+|\s+(?!\S)|\s+")
# Unicode's whitespace. Where it begins, a word always ends.
BLANK = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
SEGMENT_RE = re.compile(f"[{BLANK}]*[^{BLANK}]+|[{BLANK}]+")
MAX_CACHED = 150_000                         # words, and segments; about 30 MB, and as much for the older ones
MAX_CACHED_LENGTH = 50                       # characters; a segment of Chinese is a paragraph, and rarely comes again

class Cache(dict):
    """{text: tokens}. A text that is not there is encoded. When it is full, what is not used again goes."""
    def __init__(self, encode: Callable[[str], bytes]) -> None:
        super().__init__()
        self.encode = encode
        self.older: dict[str, bytes] = {}

    def __missing__(self, text: str) -> bytes:
        if len(self) >= MAX_CACHED:
            self.older = dict(self)
            self.clear()
        tokens = self.older.get(text)
        if tokens is None:
            tokens = self.encode(text)
        if len(text) <= MAX_CACHED_LENGTH:
            self[text] = tokens
        return tokens

class Encoder:
    """A tokenizer. token_bytes: the bytes of each id, b"" for BOS. file: the content of its tokenizer.json, or "".

    encode_text: ids of any text. encode_word: ids of a word of GPT-2's pattern, if the tokenizer has this pattern. Each
    word is then encoded once, which is several times faster than the packages.
    """
    def __init__(self, encode_text: Callable[[str], list[int]], token_bytes: list[bytes], bos_id: int, file: str = "",
                 encode_word: Callable[[str], list[int]] | None = None) -> None:
        check(len(token_bytes) <= MAX_VOCAB, f"a vocabulary of {len(token_bytes):,} does not fit 16 bits: choose a "
              f"tokenizer of at most {MAX_VOCAB:,} tokens, BOS included")
        self.encode_text, self.encode_word = encode_text, encode_word
        self.token_bytes, self.bos_id, self.file = token_bytes, bos_id, file
        self.words = Cache(lambda word: pack(encode_word(word)))
        self.segments = Cache(self.encode_segment)

    def encode(self, text: bytes) -> bytes:
        """Return the tokens of a text, without BOS, as little-endian uint16."""
        if self.encode_word:
            return b"".join(map(self.segments.__getitem__, SEGMENT_RE.findall(text.decode())))
        return pack(self.encode_text(text.decode()))

    def encode_segment(self, segment: str) -> bytes:
        if unsure_characters().search(segment):
            return pack(self.encode_text(segment))
        return b"".join(map(self.words.__getitem__, WORD_RE.findall(segment)))

    def write_files(self, folder: Path) -> None:
        """Write vocab.txt and, if there is one, tokenizer.json."""
        write_vocabulary(folder, self.token_bytes)
        if self.file:
            (folder / TOKENIZER_FILE).write_text(self.file, "utf-8")

def pack(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}H", *ids)

@functools.cache
def unsure_characters() -> re.Pattern[str]:
    """Compile a pattern of the characters that `re` and the packages put, or may put, into different classes.

    These are numbers that are not decimal, four separators, and whatever is newer than Unicode 3.2.
    """
    unsure = [char for char in map(chr, range(0x80, 0x10000)) if unicodedata.category(char) in ("Nl", "No")
              or unicodedata.ucd_3_2_0.category(char) == "Cn"]
    return re.compile(f"[\x1c-\x1f{''.join(unsure)}\U00010000-\U0010ffff]")

def import_package(name: str, wanted: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # cores are for --workers
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{error}: pip install '{wanted}'") from None

def byte_encoder() -> Encoder:
    return Encoder(lambda text: list(text.encode()), [*ALL_BYTES, b""], len(ALL_BYTES))

def learn_bpe(texts: Iterable[str], vocab_size: int) -> Encoder:
    """Learn a byte-level BPE of at most vocab_size tokens. BOS is the last one."""
    lib = import_package("tokenizers", "tokenizers==0.23.3")
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = lib.decoders.ByteLevel()
    # Bytes that are not in the initial alphabet and not in the texts would have no token; later, they would be dropped.
    trainer = lib.trainers.BpeTrainer(vocab_size=vocab_size - 1, min_frequency=2, show_progress=False,
                                      initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return wrap_tokenizer(tokenizer)

def read_tokenizer(path: Path) -> Encoder:
    """Read a tokenizer.json."""
    lib = import_package("tokenizers", "tokenizers==0.23.3")
    try:
        tokenizer = lib.Tokenizer.from_file(str(path))
    except Exception as error:               # the library raises nothing more specific
        raise DataError(f"{path} is no tokenizer.json ({error}): give one, or --tokenizer=bpe, gpt2 or bytes") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return wrap_tokenizer(tokenizer)

def wrap_tokenizer(tokenizer: Any) -> Encoder:
    """Build an encoder from a Tokenizer of the package. If it has no BOS, one is added as the last id."""
    tokenizer.encode_special_tokens = True                    # text that spells a special token is text
    names = [name for name in BOS_NAMES if tokenizer.token_to_id(name) is not None]
    if not names:
        names = list(BOS_NAMES[:1])
        tokenizer.add_special_tokens(names)
    bos_id = tokenizer.token_to_id(names[0])
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
            return tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:           # the library raises nothing more specific
            raise DataError(f"the tokenizer cannot encode this text ({error}): use one with byte fallback") from None

    def encode_word(word: str) -> list[int]:
        chars = "".join(map(BYTE_CHARS.__getitem__, word.encode()))
        return [token.id for token in model.tokenize(chars)]

    model = tokenizer.model
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    words_only = not parts["normalizer"] and all(token.special for token in added.values())
    if words_only and gpt2.items() <= (parts["pre_tokenizer"] or {}).items():
        return Encoder(encode_text, token_bytes, bos_id, file, encode_word)
    return Encoder(encode_text, token_bytes, bos_id, file)

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
    tiktoken = import_package("tiktoken", "tiktoken>=0.14")
    version = tiktoken.__version__
    check([int(part) for part in version.split(".")[:2]] >= [0, 14], f"tiktoken {version} fails on long runs of one "
          "character: pip install 'tiktoken>=0.14'")
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError as error:
        raise DataError(f"tiktoken cannot read GPT-2's ranks ({error}): connect to the network, or give the path of "
                        "GPT-2's tokenizer.json") from None
    encode = encoding.encode_ordinary        # `encode` gives the text <|endoftext|> the id of BOS
    token_bytes = [*map(encoding.decode_single_token_bytes, range(GPT2_BOS_ID)), b""]
    return Encoder(encode, token_bytes, GPT2_BOS_ID, encode_word=encode)
