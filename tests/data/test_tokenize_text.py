"""data/tokenize_text.py: the shards decode to the same text, and the printed command trains on them."""
import base64
import itertools
import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from common import random_stream, run as train
from data_common import TEXT, contents, decode, failure, lock_folders

import train_gpt as tg

import tokenize_text as tool                                  # noqa: E402

TEXTS = ["Hello world", "  spaces\tand\n\n\nlines \n", "Żółć, naïve, Привет, שלום, 你好世界, 🙂",
         "e\u0301 \u00a0\u200b",
         "<|endoftext|> is text here", "I'll can't 1234 ... don't\r\n", "x" * 5000, "\x00\x7f\ufeff inside"]
ALL_IDS = range(256)
ALL_BYTES = [bytes([byte]) for byte in ALL_IDS]
BYTES = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]

def run(*arguments: object) -> None:
    tool.main(list(map(str, arguments)))

def write_jsonl(path: Path, texts: list, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)))
    return path

def tokens_of(shard: Path) -> np.ndarray:
    return np.fromfile(shard, "<u2", offset=1024)

@pytest.mark.parametrize("kind, vocab_size", [("bytes", 257), ("pocket", None)])
def test_make_tokenizer__round_trip(tmp_path, kind, vocab_size, capsys) -> None:
    out = tmp_path / "a new" / "set"
    run(write_jsonl(tmp_path / "in.jsonl", TEXTS), f"--out={out}", "--val_share=0", "--max_doc_tokens=0",
        f"--tokenizer={kind}")
    assert decode(out) == TEXTS
    assert set(contents(out)) == {"set_train_000000.bin", "vocab.txt", "manifest.json"}
    lines = (out / "vocab.txt").read_bytes().splitlines()
    tokens = len(tokens_of(out / "set_train_000000.bin"))
    assert vocab_size in (None, len(lines) + 1)
    assert [int(line.split(b" ")[1]) for line in lines] == list(range(len(lines)))
    assert f"{len(TEXTS)} documents, {tokens:,} tokens, " in capsys.readouterr().out

def test_make_gpt2_tokenizer__the_text_of_a_special_token_is_text(tmp_path, monkeypatch) -> None:
    """tiktoken's `encode` gives <|endoftext|> the id of BOS, which would split the document."""
    text = "before <|endoftext|> after"
    pieces = [*ALL_BYTES, *itertools.islice(map(bytes, itertools.product(ALL_IDS, repeat=2)), 50_256 - 256)]

    class Encoding:
        decode_single_token_bytes = pieces.__getitem__

        def encode(self, text: str) -> list[int]:
            return [50_256] if "<|endoftext|>" in text else self.encode_ordinary(text)

        def encode_ordinary(self, text: str) -> list[int]:
            return [*text.encode()]

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding={"gpt2": Encoding()}.get))
    run(write_jsonl(tmp_path / "in.jsonl", [text]), f"--out={tmp_path / 'a'}", "--val_share=0", "--tokenizer=gpt2")
    assert decode(tmp_path / "a") == [text]

def test_make_tokenizer__learned_pieces_by_count_then_by_bytes(tmp_path) -> None:
    """The most frequent pieces are learned. Of pieces with equal counts, those whose bytes sort first are learned."""
    text = write_jsonl(tmp_path / "in.jsonl", ["the cat the dog\n", " the end of the cat\n"])
    run(text, f"--out={tmp_path / 'a'}", "--val_share=0", "--vocab_size=260")
    lines = (tmp_path / "a/vocab.txt").read_bytes().splitlines()[256:]
    assert [base64.b64decode(line.split()[0]) for line in lines] == [b" the", b" cat", b" dog"]

@pytest.mark.parametrize("lines", [
    [*BYTES, b"no base64! 256"], [b"QQ==", *BYTES], BYTES[1:], [*BYTES, b"YWI= 999"], [b"\x1f\x8b packed"]])
def test_read_pieces__a_bad_vocabulary(tmp_path, lines) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"\n".join(lines))
    (tmp_path / "in.txt").write_text("x")
    message = failure(tool, tmp_path / "in.txt", f"--out={tmp_path / 'out'}", f"--vocab={tmp_path / 'vocab.txt'}")
    assert "vocab.txt has " in message and message.endswith("give another --vocab"), message

def test_write_shards__a_vocabulary_beyond_16_bits_is_refused(tmp_path) -> None:
    """BOS has the id after all pieces. An id that needs more than 16 bits would be stored modulo 65,536."""
    pieces = [*ALL_BYTES, *itertools.islice(map(bytes, itertools.product(ALL_IDS, repeat=2)), 65_535 - 256)]
    lines = [b"%s %d" % (base64.b64encode(piece), token) for token, piece in enumerate(pieces)]
    (tmp_path / "in.txt").write_text("a short text")
    flags = tmp_path / "in.txt", f"--vocab={tmp_path / 'vocab.txt'}", "--val_share=0"
    (tmp_path / "vocab.txt").write_bytes(b"\n".join(lines[:-1]))
    run(*flags, f"--out={tmp_path / 'a'}")
    assert decode(tmp_path / "a") == ["a short text"]
    (tmp_path / "vocab.txt").write_bytes(b"\n".join(lines))
    assert "has 65,535 pieces: at most 65,534 fit" in failure(tool, *flags, f"--out={tmp_path / 'b'}")

FOUND = {"a.txt": b"first", "b/c.py": "zweite ö".encode(), "b/d.jsonl": b'{"text": "third"}\n', "e": b"fourth"}
PASSED_OVER = {"f.bin": b"\x00\x01", "latin.txt": b"\xe4\n", "b/g.gz": b"x", "h.json": b"{}", "empty": b"",
               ".git/config": b"x", "b/.hidden": b"x", "log.jsonl": b'{"step": 1}\n'}
REASONS = "8 files skipped: 1 .gz, 1 .json, 1 binary, 1 empty, 2 hidden, 1 not in UTF-8, 1 without 'text'"

def write_tree(folder: Path) -> None:
    for name, content in (FOUND | PASSED_OVER).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "loop").symlink_to(".")

@pytest.mark.parametrize("pattern", [".", "text", "../inner/text", "text/**", "text/*|text/b/*"])
def test_named_files__of_folders_and_patterns(tmp_path, monkeypatch, capsys, pattern) -> None:
    """Folders and patterns give the same files. The output folder inside them is not read when the tool runs again."""
    monkeypatch.chdir(tmp_path)
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    write_tree(Path("text"))
    for force in ([], ["--force"]):
        run(*pattern.split("|"), "--out=text/out", "--tokenizer=bytes", "--val_share=0", *force)
        assert sorted(decode(Path("text/out"))) == ["first", "fourth", "third", "zweite ö"]
        said = capsys.readouterr().out.splitlines()[0]
        assert said.startswith("4 files read")
        if pattern in (".", "text", "../inner/text") and not force:
            assert said == f"4 files read, {REASONS}"
    run("text/b", "--out=b", "--val_files", "text/[ae]*", "--tokenizer=bytes")
    assert (decode(Path("b")), decode(Path("b"), "val")) == (["zweite ö", "third"], ["first", "fourth"])

def test_walk__counts_unreadable_folders(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, text in ((".", "first"), ("locked", "second"), ("open", "third")):
        Path("text", folder).mkdir(parents=True, exist_ok=True)
        Path("text", folder, "a.txt").write_text(text)
    lock_folders(monkeypatch, "locked")
    run("text", "--out=out", "--tokenizer=bytes", "--val_share=0")
    assert capsys.readouterr().out.startswith("2 files read, 1 files skipped: 1 unreadable folder\n")
    assert sorted(decode(Path("out"))) == ["first", "third"]
    assert "text/locked cannot be read" in failure(tool, "text/open", "text/locked", "--out=other")

@pytest.mark.parametrize("name, bad, reason", [
    ("a.txt", b"hello world. " * 2000 + b"caf\xe9\n", "not in UTF-8"), ("a.txt", b"x" * 70_000 + b"\0", "binary"),
    ("a.jsonl", b'{"text": "a"}\n' * 9999 + b"{\n", "with a bad line"),
    ("a.jsonl", b'{"text": "a"}\n' * 9999 + b'{"title": "a"}\n', "without 'text'"),
    ("a.parquet", b"PAR1 no parquet", "unreadable .parquet")])
def test_check_input__a_bad_file_of_a_folder_is_skipped_whole(tmp_path, capsys, name, bad, reason) -> None:
    """Earlier, a bad byte after the first 16 KiB ended the call for a whole folder, or was trained on."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(bad)
    (tmp_path / "in/good.txt").write_text("good")
    run(tmp_path / "in", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0")
    assert capsys.readouterr().out.startswith(f"1 files read, 1 files skipped: 1 {reason}\n")
    assert decode(tmp_path / "out") == ["good"]

def test_named_files__brackets_in_the_name_of_a_file_or_folder_are_literal(tmp_path) -> None:
    """A name is a pattern only if no file or folder has this name."""
    folder = tmp_path / "notes [old]"
    folder.mkdir()
    (folder / "a [1].txt").write_text("first")
    (folder / "b.txt").write_text("second")
    for name, documents in ((folder / "a [1].txt", ["first"]), (folder, ["first", "second"]),
                            (f"{tool.glob.escape(str(folder))}/[b].txt", ["second"])):
        run(name, f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--force")
        assert decode(tmp_path / "out") == documents

def test_input_files__nothing_there(tmp_path) -> None:
    """If no text is found, the message counts the skipped files by reason, and no output folder is created."""
    write_tree(tmp_path / "tree")
    flags = [f"--out={tmp_path / 'out'}"]
    assert "no text (1 files skipped: 1 not in UTF-8)" in failure(tool, f"{tmp_path}/tree/l*.txt", *flags)
    assert "no text (0 files skipped)" in failure(tool, f"{tmp_path}/**/*.md", *flags)
    assert "-: no file; write the text to a file first" in failure(tool, "-", *flags)
    os.mkfifo(tmp_path / "pipe")
    assert "pipe: not a regular file; write the text" in failure(tool, tmp_path / "pipe", *flags)
    assert not (tmp_path / "out").exists()

@pytest.mark.parametrize("name, content, words", [
    ("a.txt.gz", b"x", "give text"), ("a.json", b"[]", ".jsonl with one JSON object per line"),
    ("a.txt", b"", "is empty"), ("a.txt", b"x" * 70_000 + b"\xe4\n", "0xe4 at byte 70,000, which is not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n' * 9999 + b'{"text": "\xe4"}\n', "a.jsonl, line 10,000 is no JSON object"),
    ("a.jsonl", b'{"text": "a"}\n\n{"title": "b"}\n', "line 3 has no text under 'text', but {'title': 'b'}"),
    ("a.jsonl", b'["a"]\n', "line 1 is ['a']: give one JSON object"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", "line 1 is no JSON object"),
    ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}\n", "line 1 is no JSON object"),
    ("a.txt", b" \n", "no train document in 0 bytes"),
    ("a.txt", "\U0001f642".encode(), "no train document in 4 bytes")])
def test_read_documents__bad_input(tmp_path, name, content, words) -> None:
    (tmp_path / name).write_bytes(content)
    message = failure(tool, tmp_path / name, f"--out={tmp_path / 'out'}", "--tokenizer=bytes")
    assert words in message and not (tmp_path / "out").exists(), message

def test_read_parquet(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: Parquet is not tested")
    import pyarrow.parquet as parquet
    table = pyarrow.table({"content": TEXTS + [None, ""], "n": list(range(len(TEXTS) + 2))})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    flags = tmp_path / "in.parquet", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--force"
    run(*flags, "--text_key=content", "--max_doc_tokens=0")
    assert decode(tmp_path / "out") == TEXTS
    assert "has columns ['content', 'n']: choose one" in failure(tool, *flags)
    assert "has no text under 'n', but {'n': 0}" in failure(tool, *flags, "--text_key=n")

@pytest.mark.parametrize("flag", [r"\n\n", r"\r\n\r\n", "<|endoftext|>"])
def test_read_plain__with_separators(tmp_path, capsys, flag) -> None:
    """Empty documents are dropped, and long ones are cut. No other text is lost, whatever the separator."""
    separator = flag.replace(r"\n", "\n").replace(r"\r", "\r")
    parts = ["one\nline", " ", "ö" * 40_000, "", *("a\n" * n for n in range(8_150, 8_200, 7)), "last"]
    (tmp_path / "in.txt").write_text(separator.join(parts) + separator, newline="")
    run(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--max_doc_tokens=0",
        f"--document_separator={flag}")
    docs = decode(tmp_path / "out")
    assert max(len(doc.encode()) for doc in docs) <= tool.MAX_PLAIN_DOC_BYTES and all(doc.strip() for doc in docs)
    assert "".join(docs).replace("\n", "") == "".join(parts).replace("\n", "").replace(" ", "")
    if separator != "\n\n":
        assert "".join(docs) == "".join(part for part in parts if part.strip())
        assert {"one\nline", "last"} < set(docs)
    assert "not found" not in capsys.readouterr().out
    run(tmp_path / "in.txt", f"--out={tmp_path / 'other'}", "--document_separator=##")
    assert "--document_separator not found in 1 of 1 files" in capsys.readouterr().out

@pytest.mark.parametrize("size", range(-2, 3))
def test_read_plain__a_separator_near_the_maximum_size(tmp_path, size) -> None:
    text = "x" * (tool.MAX_PLAIN_DOC_BYTES + size)
    (tmp_path / "in.txt").write_text(f"{text}||second")
    run(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--max_doc_tokens=0",
        "--document_separator=||")
    docs = decode(tmp_path / "out")
    assert "".join(docs) == text + "second" and docs[-1] == "second"
    assert max(map(len, docs)) <= tool.MAX_PLAIN_DOC_BYTES

def test_draw_split__by_the_text_alone(tmp_path) -> None:
    """The split of a document depends on its text, and not on its position or its neighbors."""
    texts = [f"document {n}" for n in range(400)]
    for name, lines in (("y", texts), ("z", texts[::-1])):
        source = write_jsonl(tmp_path / f"{name}.jsonl", lines)
        run(source, f"--out={tmp_path / name}", "--tokenizer=bytes", "--val_share=0.25")
    train_texts, val = decode(tmp_path / "y"), decode(tmp_path / "y", "val")
    assert sorted(train_texts + val) == sorted(texts) and 60 < len(val) < 140
    assert train_texts == [text for text in texts if text in set(train_texts)], "documents keep their order"
    assert decode(tmp_path / "z", "val") == val[::-1], "the order of the documents does not change the split"

@pytest.mark.parametrize("text, val", [
    ("one document", "document"), ("naïve ö", "e ö"), ("a\n\nb\n", "\nb\n"), ("\n\nab", "b"),
    ("ö" * 999, "ö" * 500),
    (TEXT, None), (3 * TEXT, None), ("x" * 9999, "x" * 1024)])
@pytest.mark.parametrize("drawn", ["train", "val"])
def test_read_documents__the_end_of_the_only_one_is_for_validation(tmp_path, monkeypatch, text, val, drawn) -> None:
    """The last 5 % of a single document are validation data, but at least 1,024 bytes and at most half of it."""
    monkeypatch.setattr(tool, "draw_split", lambda text, share: drawn)
    (tmp_path / "in.txt").write_text("\ufeff" + text)         # byte order mark
    run(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--max_doc_tokens=0")
    end, = decode(tmp_path / "out", "val")
    assert decode(tmp_path / "out") == [text.removesuffix(end)]
    assert end == val or val is None
    size = len(text.encode())
    wanted = min(size / 2, max(1024, 0.05 * size))
    assert wanted - 2 <= len(end.encode()) <= wanted + 30, "cut at the end of a line or character"

def test_read_documents__of_several_the_last_is_cut(tmp_path, monkeypatch) -> None:
    """If no document is drawn for validation, the end of the last document is used for it."""
    monkeypatch.setattr(tool, "draw_split", lambda text, share: "train")
    (tmp_path / "in.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": null}\n{"text": "five six seven "}\n')
    run(tmp_path / "in.jsonl", f"--out={tmp_path / 'out'}", "--tokenizer=bytes")
    assert (decode(tmp_path / "out"), decode(tmp_path / "out", "val")) == (["a?b", "five "], ["six seven "])

def test_shards__long_documents_and_several_shards(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tool, "SHARD_TOKENS", 10_000)
    text = "".join(f"{n} " for n in range(2000))
    run(write_jsonl(tmp_path / "in.jsonl", [text, "short"] * 3), f"--out={tmp_path / 'out'}", "--tokenizer=bytes",
        "--val_share=0", "--max_doc_tokens=100")
    headers = tg.read_shard_headers(str(tmp_path / "out/out_train_*.bin"))
    assert [Path(header.name).name for header in headers] == [f"out_train_{n:06d}.bin" for n in range(3)]
    assert all(header.num_tokens <= 10_000 for header in headers)
    assert max(tg.load_shard(header).doc_lengths.max() for header in headers) == 100
    assert "".join(decode(tmp_path / "out")) == (text + "short") * 3

@pytest.mark.parametrize("size, kind, more", [
    (16_000, "bytes", ["--epochs=0", "--val_tokens", "--val_batch_tokens"]),
    (200_000, "pocket", ["--epochs=0", "--val_tokens", "--val_batch_tokens"]),
    pytest.param(1_500_000, "bytes", ["--epochs=0"], marks=pytest.mark.slow),
    pytest.param(3_000_000, "bytes", [], marks=pytest.mark.slow),
    (2_200_000, "bytes --max_doc_tokens=2048", ["--epochs=0"])])
def test_training_command__trains_on_just_this_text(tmp_path, capsys, size, kind, more) -> None:
    """The trainer runs with the printed command. For a short text it repeats the data and shortens the validation.

    Of a document, it uses 256 tokens in each pass.
    """
    words = np.random.default_rng(0).integers(0, 5000, size // 4)
    (tmp_path / "in.txt").write_text(" ".join(f"{word:03x}" for word in words)[:size])
    run(tmp_path / "in.txt", "--out", tmp_path / "my [data] isn't", *f"--tokenizer={kind}".split())
    program, *flags = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert program == "./run.sh" and flags[0] == "--preset=pocket"
    assert [re.sub(r"=\d\d+", "", flag) for flag in flags[3:]] == more
    done = train(tmp_path / "run", *flags, "--max_steps=2", "--num_scheduled_steps=3", "--model_dim=48",
                 "--head_dim=8", "--val_every=0", "--sample_tokens=0")
    assert done.status == 0, done.err
    config = tg.load_config(flags)
    assert config.seqs_per_step == tool.POCKET_SEQS
    assert max(stage.batch_tokens for stage in config.stages) == tool.POCKET_SEQS * tool.POCKET_SEQ_LEN

@pytest.mark.parametrize("mean", [30, 150, 220, 400])
def test_training_command__the_trainer_can_pack_a_step_of_the_shortest_text(mean) -> None:
    """MIN_TOKENS tokens suffice for the first step, for many random document lengths."""
    for seed in range(60):
        tokens = random_stream(seed, 12_000, 50, 49, mean).astype(np.uint16)
        lengths = tg.TokenShard(tokens, 49).doc_lengths
        docs = np.searchsorted(lengths.clip(max=tool.MAX_DOC_LEN).cumsum(), tool.MIN_TOKENS) + 1
        shortest = tg.TokenShard(tokens[:lengths[:docs].sum()], 49)
        assert tg.pack_batch(shortest, 0, tool.POCKET_SEQS, tool.POCKET_SEQ_LEN, tool.MAX_DOC_LEN) is not None, seed

def test_training_command__too_short_a_text_names_sizes(tmp_path, capsys) -> None:
    """Instead of a command, the last line says how many tokens the text has, and how many a run needs."""
    (tmp_path / "in.txt").write_text(TEXT[:2000])
    run(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=bytes")
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("too short for ./run.sh: 1,0") and "at least 3,584 and 130 are needed" in line, line
