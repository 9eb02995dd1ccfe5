"""data/tokenize_text.py: the shards decode to the same text, and the printed command trains on them."""
import contextlib
import functools
import glob
import gzip
import itertools
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from common import run as train
from data_common import TEXT, contents, decode, failure, lock_folders, needs

import train_gpt as tg

import shard_files                                            # noqa: E402
import text_files                                             # noqa: E402
import tokenize_text as tool                                  # noqa: E402

TEXTS = ["Hello world", "  spaces\tand\n\n\nlines \n", "Żółć, naïve, Привет, שלום, 你好世界, 🙂",
         "e\u0301 \u00a0\u200b",
         "<|endoftext|> is text here", "I'll can't 1234 ... don't\r\n", "x" * 5000, "\x00\x7f\ufeff inside"]

def run(*arguments: object) -> None:
    tool.main(list(map(str, arguments)))

def write_jsonl(path: Path, texts: list, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)))
    return path

@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_write_shards__round_trip(tmp_path, kind, capsys) -> None:
    out = tmp_path / "a new" / "set"
    run(write_jsonl(tmp_path / "in.jsonl", TEXTS), f"--out={out}", "--val_share=0", "--max_doc_tokens=0",
        f"--tokenizer={kind}")
    assert decode(out) == TEXTS
    files = {"set_train_000000.bin", "vocab.txt", "manifest.json"}
    assert set(contents(out)) == files | ({"tokenizer.json"} if kind == "bpe" else set())
    header = np.fromfile(out / "set_train_000000.bin", "<i4", 5)
    assert header[4] == header[3] - 1 == len((out / "vocab.txt").read_bytes().splitlines())
    assert f"{header[2]:,} tokens, {len(TEXTS)} documents, " in capsys.readouterr().out

@pytest.mark.parametrize("workers", [1, 2])
def test_encode_all__an_existing_vocabulary(tmp_path, workers) -> None:
    """Another call encodes with the tokenizer.json of the first one, in several threads if asked, and keeps it."""
    source = write_jsonl(tmp_path / "in.jsonl", [f"{text} {n}" for n in range(200) for text in TEXTS])
    run(source, f"--out={tmp_path / 'a'}", "--vocab_size=400")
    run(source, f"--out={tmp_path / 'b'}", f"--tokenizer={tmp_path}/a/tokenizer.json", f"--workers={workers}")
    one, two = ({name[1:]: content for name, content in contents(tmp_path / folder).items()} for folder in "ab")
    assert one.pop("anifest.json") != two.pop("anifest.json") and one == two and len(one) == 4

FOUND = {"a.txt": b"first", "b/c.py": "zweite ö".encode(), "b/d.JSONL.gz": gzip.compress(b'{"text": "third"}\n'),
         "e": b"fourth"}
PASSED_OVER = {"f.bin": b"\x00\x01", "latin.txt": b"\xe4\n", "b/g.XZ": b"x", "h.json": b"{}", "empty": b"",
               ".git/config": b"x", "b/.hidden": b"x", "log.jsonl": b'{"step": 1}\n', "i.gz": gzip.compress(b"x")[:20]}
REASONS = ("10 files skipped: 1 .json, 1 .xz, 1 binary, 1 empty, 2 hidden, 1 link to a folder, 1 not in UTF-8, "
           "1 unreadable, 1 without 'text'")

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
    run("text/b", "text/[ae]*", "--out=b", "--val_files", f"{tmp_path}/inner/text/[ae]*", "--tokenizer=bytes")
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
    pytest.param("a.parquet", b"PAR1 no parquet", "unreadable", marks=needs("pyarrow")),
    pytest.param("a.jsonl.zst", b"no zstd", "unreadable", marks=needs("pyarrow"))])
def test_corpus__a_bad_file_of_a_folder_is_skipped_whole(tmp_path, capsys, name, bad, reason) -> None:
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
                            (f"{glob.escape(str(folder))}/[b].txt", ["second"])):
        run(name, f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--force")
        assert decode(tmp_path / "out") == documents

def test_corpus__nothing_there(tmp_path) -> None:
    write_tree(tmp_path / "tree")
    flags = [f"--out={tmp_path / 'out'}"]
    assert "no text (1 files skipped: 1 not in UTF-8)" in failure(tool, f"{tmp_path}/tree/l*.txt", *flags)
    assert "**/*.md: no file matches this pattern" in failure(tool, __file__, f"{tmp_path}/**/*.md", *flags)
    assert "-: no file; write the text to a file first" in failure(tool, "-", *flags)
    assert "download it first (curl -LO URL)" in failure(tool, "https://example.org/a.txt", *flags)
    os.mkfifo(tmp_path / "pipe")
    assert "pipe: not a regular file; write the text" in failure(tool, tmp_path / "pipe", *flags)
    assert not (tmp_path / "out").exists()

@pytest.mark.parametrize("name, content, words", [
    ("a.txt.gz", b"x", "cannot be read"), ("a.TAR.gz", b"x", "unpack it"),
    ("a.json", b"[]", ".jsonl with one JSON object per line (jq -c '.[]'"),
    ("a.txt", b"", "is empty"), ("a.txt", b"x" * 70_000 + b"\xe4\n", "0xe4 at byte 70,000, which is not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n' * 9999 + b'{"text": "\xe4"}\n', "a.jsonl, line 10,000 is no JSON object"),
    ("a.jsonl", b'{"text": "a"}\n\n{"title": "b"}\n', "line 3 has no text under 'text', but under ['title']"),
    ("a.jsonl", b'["a"]\n', "line 1 is ['a']: give one JSON object"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", "line 1 is no JSON object"),
    ("a.jsonl", b'[\n{"text": "a"}\n]\n', "jq -c '.[]' turns an array into lines"),
    ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}\n", "line 1 is no JSON object"),
    ("a.txt", b" \n", "no train document in 0 bytes"),
    ("a.txt", "\U0001f642".encode(), "no train document in 4 bytes")])
def test_corpus__bad_input(tmp_path, name, content, words) -> None:
    (tmp_path / name).write_bytes(content)
    message = failure(tool, tmp_path / name, f"--out={tmp_path / 'out'}", "--tokenizer=bytes")
    assert words in message and not (tmp_path / "out").exists(), message

@needs("pyarrow")
def test_read_parquet(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"content": TEXTS + [None, ""], "n": list(range(len(TEXTS) + 2))})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    flags = tmp_path / "in.parquet", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--force"
    run(*flags, "--text_key=content", "--max_doc_tokens=0")
    assert decode(tmp_path / "out") == TEXTS
    assert "has columns ['content', 'n']: choose one" in failure(tool, *flags)
    assert "has no text under 'n', but under []" in failure(tool, *flags, "--text_key=n")

@needs("pyarrow")
def test_open_file__all_frames_whole(tmp_path) -> None:
    """Tools that compress in parts write several frames. A reader that stops after the first one, or at the end of a
    file that was cut off, loses text."""
    compress = functools.partial(pytest.importorskip("pyarrow").compress, codec="zstd", asbytes=True)
    (tmp_path / "in.ndjson.ZST").write_bytes(compress(b'{"text": "one"}\n{"te') + compress(b'xt": "two"}\n'))
    run(tmp_path / "in.ndjson.ZST", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0")
    assert decode(tmp_path / "out") == ["one", "two"]
    (tmp_path / "half.txt.zst").write_bytes(compress(b"a line\n" * 50_000)[:-3])
    error = failure(tool, tmp_path / "half.txt.zst", f"--out={tmp_path / 'b'}")
    assert "half.txt.zst cannot be read (Truncated compressed stream)" in error

def test_optional_package__missing(tmp_path, monkeypatch, capsys) -> None:
    """A file of a folder that needs a package is counted; a named one names the command."""
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("in/a.parquet", "in/b.txt.zst", "in/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    run(tmp_path / "in", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0")
    assert "2 files skipped: 2 that need pyarrow" in capsys.readouterr().out
    assert "pip install pyarrow" in failure(tool, tmp_path / "in/b.txt.zst", f"--out={tmp_path / 'b'}")

@pytest.mark.parametrize("flag", [r"\n\n", r"\r\n\r\n", "<|endoftext|>"])
def test_read_plain__with_separators(tmp_path, capsys, flag) -> None:
    """Empty documents are dropped, and long ones are cut. No other text is lost, whatever the separator."""
    separator = flag.replace(r"\n", "\n").replace(r"\r", "\r")
    parts = ["one\nline", " ", "ö" * 40_000, "", *("a\n" * n for n in range(8_150, 8_200, 7)), "last"]
    (tmp_path / "in.txt").write_text(separator.join(parts) + separator, newline="")
    run(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--max_doc_tokens=0",
        f"--document_separator={flag}")
    docs = decode(tmp_path / "out")
    assert max(len(doc.encode()) for doc in docs) <= text_files.MAX_PLAIN_DOC_BYTES and all(doc.strip() for doc in docs)
    assert "".join(docs).replace("\n", "") == "".join(parts).replace("\n", "").replace(" ", "")
    if separator != "\n\n":
        assert "".join(docs) == "".join(part for part in parts if part.strip())
        assert {"one\nline", "last"} < set(docs)
    assert "not found" not in capsys.readouterr().out
    run(tmp_path / "in.txt", f"--out={tmp_path / 'other'}", "--document_separator=##", "--tokenizer=bytes")
    assert "--document_separator not found in 1 of 1 files" in capsys.readouterr().out

@pytest.mark.parametrize("size", range(-2, 3))
def test_read_plain__a_separator_near_the_maximum_size(tmp_path, size) -> None:
    text = "x" * (text_files.MAX_PLAIN_DOC_BYTES + size)
    (tmp_path / "in.txt").write_text(f"{text}||second")
    run(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--max_doc_tokens=0",
        "--document_separator=||")
    docs = decode(tmp_path / "out")
    assert "".join(docs) == text + "second" and docs[-1] == "second"
    assert max(map(len, docs)) <= text_files.MAX_PLAIN_DOC_BYTES

def test_draw_split__by_the_text_alone(tmp_path) -> None:
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
    ("ö" * 999, "ö" * 500), ("x" * 9999 + "\n" * 5000, "x" * 1024 + "\n" * 5000),
    (TEXT, None), (3 * TEXT, None), ("x" * 9999, "x" * 1024)])
@pytest.mark.parametrize("drawn", [0, 1])
def test_documents__the_end_of_the_only_one_is_for_validation(tmp_path, monkeypatch, text, val, drawn) -> None:
    """The last 5 % of a single document are validation data, but at least 1,024 bytes and at most half of it."""
    monkeypatch.setattr(tool, "draw", lambda text: drawn)
    (tmp_path / "in.txt").write_text("\ufeff" + text)         # byte order mark
    run(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--max_doc_tokens=0")
    end, = decode(tmp_path / "out", "val")
    assert decode(tmp_path / "out") == [text.removesuffix(end)]
    assert end == val or val is None
    size = len(text.encode().strip())
    wanted = min(size / 2, max(1024, 0.05 * size))
    assert wanted - 2 <= len(end.encode().strip()) <= wanted + 30, "cut at the end of a line or character"

def test_documents__the_end_of_several(tmp_path, monkeypatch) -> None:
    """If less than 1 KiB is drawn for validation, the end of the text is used, from the middle of a document on."""
    monkeypatch.setattr(tool, "draw", lambda text: float(text != b"one two"))
    texts = ["a\ud800b", None, "one two", *(f"five six {n} " for n in range(400))]
    write_jsonl(tmp_path / "in.jsonl", texts)
    run(tmp_path / "in.jsonl", f"--out={tmp_path / 'out'}", "--tokenizer=bytes")
    texts[:2] = ["a?b"]
    train_texts, val = decode(tmp_path / "out"), decode(tmp_path / "out", "val")
    assert train_texts[:-1] == texts[:len(train_texts) - 1] and val[1:] == texts[1 - len(val):]
    assert train_texts[-1] + val[0] == texts[len(train_texts) - 1] and 1000 < sum(map(len, val)) < 1200

def test_shard_writer__long_documents_and_several_shards(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shard_files, "SHARD_TOKENS", 10_000)
    text = "".join(f"{n} " for n in range(2000))
    run(write_jsonl(tmp_path / "in.jsonl", [text, "short"] * 3), f"--out={tmp_path / 'out'}", "--tokenizer=bytes",
        "--val_share=0", "--max_doc_tokens=100")
    headers = tg.read_shard_headers(str(tmp_path / "out/out_train_*.bin"))
    assert [Path(header.name).name for header in headers] == [f"out_train_{n:06d}.bin" for n in range(3)]
    assert all(header.num_tokens <= 10_000 for header in headers)
    assert max(tg.load_shard(header).doc_lengths.max() for header in headers) == 100
    assert "".join(decode(tmp_path / "out")) == (text + "short") * 3

def all_pairs(shards: list[tg.TokenShard]) -> set[tuple[int, int]]:
    return {pair for shard in shards for pair in itertools.pairwise(shard.tokens.tolist())}

@pytest.mark.parametrize("size, kind, lines", [
    (4_000, "bytes --max_doc_tokens=2048", False), (4_000, "bytes", True),
    (4_000, "bpe", True), pytest.param(300_000, "bpe", False, marks=pytest.mark.slow),
    *(pytest.param(size, "bytes", False, marks=pytest.mark.slow) for size in (300_000, 3_000_000, 30_000_000))])
def test_training_command__trains_on_just_this_text(tmp_path, capsys, size, kind, lines) -> None:
    """The trainer runs with the printed command, and three passes read every token, however short the text is."""
    words = np.random.default_rng(0).integers(0, 5000, size // 4)
    text = " ".join(f"{word:03x}" for word in words)[:size]
    name = f"in.{'jsonl' if lines else 'txt'}"
    (tmp_path / name).write_text(text)
    if lines:
        write_jsonl(tmp_path / name, [text[start:start + 100] for start in range(0, size, 100)])
    run(tmp_path / name, "--out", tmp_path / "my [data] isn't", *f"--tokenizer={kind}".split())
    program, *flags = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert program == "./run.sh" and flags[0] == "--preset=pocket"
    done = train(tmp_path / "run", *flags, "--max_steps=2", "--num_scheduled_steps=3", "--model_dim=48",
                 "--head_dim=8", "--val_every=0", "--sample_tokens=0")
    assert done.status == 0, done.err

    cfg = tg.load_config(flags)
    headers = tg.read_shard_headers(cfg.train_files)
    cfg = replace(tg.resolve_sizes(cfg, headers, headers), epochs=3)
    packer = tg.Packer(cfg, headers, functools.partial(map, tg.load_shard))
    missing = all_pairs(map(tg.load_shard, headers))
    with contextlib.suppress(tg.OutOfData):
        while True:
            missing -= all_pairs(packer.next(SimpleNamespace(seq_len=192, step=1)))
    assert not missing
