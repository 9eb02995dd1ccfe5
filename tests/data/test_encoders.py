"""data/encoders.py: the ids are those of the packages, whatever the characters, and every token has its bytes."""
import itertools
import json
import random

import numpy as np
import pytest
import tiktoken
import tokenizers
from data_common import TEXT, decode

import encoders                                               # noqa: E402
import tokenize_text                                          # noqa: E402
from encoders import Encoder                                  # noqa: E402
from shard_files import ALL_BYTES, DataError                  # noqa: E402

# Blanks of Unicode and others, letters, numbers of all kinds, marks, an emoji, and what is newer than Unicode 3.2.
CHARACTERS = (" \t\n\r\x0b\x1c\x85\xa0\u3000\u200b\u180e  'sstrevemlldD_1\u0663\xb2\u2168\xe9\u4e2d\u0301-.\u0241\u0560"
              "\U0001f642\U00020000")
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"          # from openai/gpt-2
OTHER_SCRIPTS = ["Русский язык, ещё раз. ", "日本語の文章です。", "中文文本，没有空格。", "שלום עולם ", "Straße für Äpfel "]

def soup(count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(CHARACTERS, k=rng.randint(1, 15))) for _ in range(count)]

def ids_of(encoder: Encoder, text: str) -> list[int]:
    return np.frombuffer(encoder.encode(text.encode()), "<u2").tolist()

def text_of(encoder: Encoder, text: str) -> str:
    return b"".join(encoder.token_bytes[token] for token in ids_of(encoder, text)).decode()

def test_learn_bpe__the_ids_are_those_of_the_package(tmp_path) -> None:
    """The file gives the package the same ids; text of a script that the sample lacks, or of BOS, is kept."""
    texts = [*soup(3000), TEXT, "<|endoftext|> is text", *OTHER_SCRIPTS, "x" * 5000, " " * 999, "x" + " " * 10**6 + "x",
             "".join(map(chr, range(0x3000)))]
    encoder = encoders.learn_bpe([TEXT, *OTHER_SCRIPTS[:2] * 9], 600)
    assert len(encoder.token_bytes) == encoder.bos_id + 1 <= 600 and len(set(encoder.token_bytes)) > 300
    encoder.write_files(tmp_path)
    package = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    package.encode_special_tokens = True
    again = encoders.read_tokenizer(tmp_path / "tokenizer.json")
    assert again.token_bytes == encoder.token_bytes and encoders.is_like_gpt2(package, json.loads(encoder.file))
    for text in texts:
        assert ids_of(encoder, text) == again.encode_text(text) == package.encode(text).ids, ascii(text)
        assert text_of(encoder, text) == text

@pytest.mark.parametrize("text, most", [*zip(OTHER_SCRIPTS, (0.45, 0.4, 0.45, 0.6, 0.5))])
def test_learn_bpe__learns_every_script(text, most) -> None:
    """most: tokens per byte of repeated text."""
    encoder = encoders.learn_bpe([text * 20], 2048)
    assert len(ids_of(encoder, text)) < most * len(text.encode())

@pytest.mark.parametrize("change", ["truncation", "padding", "metaspace", "lower case", "another BOS"])
def test_read_tokenizer__of_other_programs(tmp_path, change) -> None:
    models, normalizers = tokenizers.models, tokenizers.normalizers
    encoder = encoders.learn_bpe([TEXT], 400)
    package = tokenizers.Tokenizer.from_str(encoder.file)
    text, kept, bos = TEXT, TEXT, "<|endoftext|>"
    if change in ("truncation", "padding"):
        package.normalizer = normalizers.NFC()                # so that the package encodes, and not tiktoken
        package.enable_truncation(5)
        package.enable_padding(length=9)
        text = kept = TEXT if change == "truncation" else "ab"
    elif change == "metaspace":
        text = kept = " a\xe4 a"
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "a": 257, "\u2581a": 258}
        package = tokenizers.Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True))
        package.normalizer = normalizers.Replace(" ", "\u2581")
    elif change == "lower case":
        package.normalizer = normalizers.Lowercase()
        text = TEXT.upper()
    else:
        bos = "<s>"
        package = tokenizers.Tokenizer.from_str(encoder.file.replace("<|endoftext|>", bos))
    package.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.txt").write_text(text)
    tokenize_text.main([f"{tmp_path}/in.txt", f"--out={tmp_path}/out", "--val_share=0", "--max_doc_tokens=0",
                        f"--tokenizer={tmp_path}/tokenizer.json"])
    assert decode(tmp_path / "out") == [kept]
    again = encoders.read_tokenizer(tmp_path / "tokenizer.json")
    assert b"".join(again.token_bytes[token] for token in again.encode_text(text)).decode() == kept
    file = json.loads((tmp_path / "out/tokenizer.json").read_text())
    assert [token["content"] for token in file["added_tokens"]] == [bos]

def test_wrap_tokenizer__text_has_no_bos(tmp_path) -> None:
    """Neither by its name in a file where it is no special token, nor because a new BOS gets the id of a token."""
    encoder = encoders.learn_bpe([TEXT], 400)
    (tmp_path / "t.json").write_text(encoder.file.replace('"special": true', '"special": false'))
    again = encoders.read_tokenizer(tmp_path / "t.json")
    assert again.bos_id not in ids_of(again, "a<|endoftext|>b")
    vocabulary = {sign: number for number, sign in enumerate(encoders.BYTE_CHARS)} | {"ab": 258, "cd": 257 + 2}
    package = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b"), ("c", "d")]))
    with pytest.raises(DataError, match="a token with the id 258"):
        encoders.wrap_tokenizer(package)

@pytest.mark.parametrize("content", ["", "{}", "no JSON"])
def test_read_tokenizer__a_bad_file(tmp_path, content) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match="t.json is no tokenizer.json .*: give one, or"):
        encoders.read_tokenizer(tmp_path / "t.json")

def test_encoder__a_vocabulary_beyond_16_bits_is_refused() -> None:
    """An id that needs more than 16 bits would be stored modulo 65,536."""
    Encoder(list, [b"x"] * 65_536, 0)
    with pytest.raises(DataError, match="65,537 does not fit 16 bits"):
        Encoder(list, [b"x"] * 65_537, 0)

def test_gpt2_encoder__the_ids_are_those_of_the_package(monkeypatch) -> None:
    """GPT-2's ranks need the network; these ranks are its bytes and pairs of bytes. `encode` would find BOS in text."""
    pairs = map(bytes, itertools.product(range(256), repeat=2))
    ranks = {piece: n for n, piece in enumerate([*ALL_BYTES, *itertools.islice(pairs, 50_000)])}
    special = {"<|endoftext|>": 50_256}
    package = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": package}.get)
    encoder = encoders.gpt2_encoder()
    for text in [*soup(3000), TEXT, "<|endoftext|> is text", *OTHER_SCRIPTS, "x" * 10**6]:
        assert ids_of(encoder, text) == package.encode_ordinary(text), ascii(text)
    assert text_of(encoder, TEXT) == TEXT and encoder.bos_id == 50_256 == len(encoder.token_bytes) - 1

def gpt2_like(merges: list[str], alphabet: list[str] = encoders.BYTE_CHARS, **others: object) -> tokenizers.Tokenizer:
    """Build a byte-level BPE with these merges, "a b" for two tokens. Ids are in alphabetical order."""
    pairs = [tuple(pair.split()) for pair in merges]
    tokens = [*alphabet, *sorted(set(map("".join, pairs)))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs, **others))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer

# case: merges, the text, whether tiktoken encodes it
MERGES = {
    "one merge a token": (["a b", "ab c", "c d"], "abcd bcd", True),
    "a token that its merges do not reach": (["a b", "ab cd", "c d", "d e"], "abcd cde", True),
    "a token that is stuck": (["b c", "z b", "zb c"], "zbc bc", False),
    "two merges of a token": (["b c", "z b", "zb c", "z bc"], "zbc bc", False),
    "tokens in another order": (["b c", "a b"], "abc", False)}

@pytest.mark.parametrize("case", MERGES)
def test_is_like_gpt2__only_if_tiktoken_gives_the_ids(tmp_path, case) -> None:
    """tiktoken joins two tokens whenever the result is a token, whatever the merges of the file."""
    merges, text, expected = MERGES[case]
    package = gpt2_like(merges)
    package.save(str(tmp_path / "tokenizer.json"))
    encoder = encoders.read_tokenizer(tmp_path / "tokenizer.json")
    assert encoders.is_like_gpt2(package, json.loads(package.to_str())) == expected
    assert ids_of(encoder, text) == package.encode(text).ids

def test_is_like_gpt2__other_words() -> None:
    for package in (gpt2_like(["a b"], dropout=0.5), gpt2_like(["a b"], end_of_word_suffix="b"),
                    gpt2_like(["a b"], encoders.BYTE_CHARS[:-1]), gpt2_like(["a b"], ignore_merges=True)):
        assert not encoders.is_like_gpt2(package, json.loads(package.to_str()))
    for part, value in (("normalizer", tokenizers.normalizers.Lowercase()), ("pre_tokenizer", None)):
        package = gpt2_like(["a b"])
        setattr(package, part, value or tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True))
        assert not encoders.is_like_gpt2(package, json.loads(package.to_str()))
    package = gpt2_like(["a b"])
    package.add_tokens(["word"])
    assert not encoders.is_like_gpt2(package, json.loads(package.to_str()))

def test_encode_text__that_the_tokenizer_cannot_encode(tmp_path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="cannot encode this text"):
        ids_of(encoders.read_tokenizer(tmp_path / "tokenizer.json"), "b")
