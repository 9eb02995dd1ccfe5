"""data/tokenize_text.py: text in, shards out, and the same text back."""
from __future__ import annotations

import base64
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from common import preset

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "data/tokenize_text.py"
sys.path.insert(0, str(ROOT / "data"))                        # the tool imports pocket.py beside it, workers the tool

import tokenize_text as tool                                  # noqa: E402
import train_gpt as tg                                        # noqa: E402

RANKS = Path(os.environ.get("GPT2_RANKS", ROOT / "../shared/data/gpt2.ranks.gz"))
TEXTS = ["Hello world", "  spaces\tand\n\n\nlines \n", "Żółć, naïve, Привет, שלום, 你好世界, 🙂", "e\u0301 \u00a0\u200b",
         "<|endoftext|> is text here", "I'll can't 1234 ... don't\r\n", "x" * 5000, "\x00\x7f\ufeff inside"]


def tokenizer_flags(kind: str) -> list[str]:
    """Flags for a tokenizer; gpt2 needs what is not among the project's packages."""
    if kind == "gpt2":
        pytest.importorskip("tiktoken", reason="no tiktoken: GPT-2 tokens are not tested")
        if not RANKS.exists():
            pytest.skip("no ranks file: GPT-2 tokens are not tested; set GPT2_RANKS to one of tiktoken's")
        return ["--tokenizer=gpt2", f"--ranks={RANKS}"]
    return [f"--tokenizer={kind}"]


def run(*arguments: object) -> None:
    tool.main([*map(str, arguments), "--jobs=1"])


def fails(*arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    message = str(caught.value)
    assert message.startswith("error: ") and -1 < message.find("found") < message.find("expected"), message
    assert ";" in message[message.find("expected"):], message              # and what to do
    return message


def write_jsonl(path: Path, texts: list, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)))
    return path


def decode(out: Path, split: str = "train") -> list[str]:
    """Documents of a data set as the trainer reads it: checked headers, tokens and vocabulary."""
    texts = []
    for header in tg.find_shards(str(out / f"*_{split}_*.bin")):
        shard = tg.load_shard(header)
        pieces = tg.read_vocabulary(out, preset("tiny", header.vocab_size, header.document_start))
        assert shard.doc_starts[0] == 0
        for start, length in zip(shard.doc_starts, shard.doc_lengths):
            texts.append(b"".join(pieces[token] for token in shard.tokens[start + 1:start + length]).decode())
    return texts


@pytest.mark.parametrize("kind, vocab_size", [("bytes", 257), ("pocket", None), ("gpt2", 50257)])
def test_round_trip(tmp_path, kind, vocab_size, capsys):
    out = tmp_path / "a new" / "set"
    run(write_jsonl(tmp_path / "in.jsonl", TEXTS), f"--out={out}", "--val_share=0", "--max_doc_tokens=0",
        *tokenizer_flags(kind))
    assert decode(out) == TEXTS
    assert {path.name for path in out.iterdir()} == {"set_train_000000.bin", "vocab.txt", "manifest.json"}
    words = np.fromfile(out / "set_train_000000.bin", "<i4", 256)
    lines = (out / "vocab.txt").read_bytes().splitlines()
    tokens = (out / "set_train_000000.bin").stat().st_size // 2 - 512
    assert words[:5].tolist() == [20240520, 1, tokens, len(lines) + 1, len(lines)] and not words[5:].any()
    assert vocab_size in (None, len(lines) + 1)
    assert [int(line.split(b" ")[1]) for line in lines] == list(range(len(lines)))
    assert len({base64.b64decode(line.split(b" ")[0], validate=True) for line in lines}) == len(lines)
    size = sum(len(text.encode()) for text in TEXTS)
    assert f"{len(TEXTS)} documents, {tokens:,} tokens, {size:,} bytes" in capsys.readouterr().out


def test_gpt2_ids(tmp_path):
    """Known ids, and a run of real tokens that must come back bit by bit where it is at hand."""
    flags, sample = tokenizer_flags("gpt2"), RANKS.parent / "measure_val_000000.bin"
    run(write_jsonl(tmp_path / "in.jsonl", ["Hello world", "<|endoftext|>"]), f"--out={tmp_path / 'a'}",
        "--val_share=0", *flags)
    tokens = np.fromfile(tmp_path / "a/a_train_000000.bin", "<u2", offset=1024)
    assert tokens[:4].tolist() == [50256, 15496, 995, 50256] and 50256 not in tokens[4:]
    unpacked = tmp_path / "ranks.txt"
    unpacked.write_bytes(gzip.decompress(RANKS.read_bytes()))
    assert unpacked.read_bytes() == (tmp_path / "a/vocab.txt").read_bytes()          # so one serves as the other
    run(tmp_path / "in.jsonl", f"--out={tmp_path / 'b'}", "--val_share=0", "--tokenizer=gpt2", f"--ranks={unpacked}")
    assert (tokens == np.fromfile(tmp_path / "b/b_train_000000.bin", "<u2", offset=1024)).all()
    if sample.exists():
        real = np.fromfile(sample, "<u2", offset=1024)[:100_000]
        real = real[:np.flatnonzero(real == 50256)[-1]]
        pieces = tg.read_vocabulary(tmp_path / "a", preset("tiny", 50_257, 50_256))
        docs = np.split(real, np.flatnonzero(real == 50256)[1:])
        texts = [b"".join(pieces[token] for token in doc).decode() for doc in docs]
        run(write_jsonl(tmp_path / "real.jsonl", texts), f"--out={tmp_path / 'c'}", "--val_share=0",
            "--max_doc_tokens=0", *flags)
        assert np.array_equal(np.fromfile(tmp_path / "c/c_train_000000.bin", "<u2", offset=1024), real)


def test_a_learned_vocabulary(tmp_path):
    text = write_jsonl(tmp_path / "in.jsonl", ["the cat the dog\n", " the end of the cat\n"])
    run(text, f"--out={tmp_path / 'a'}", "--val_share=0", "--vocab_size=260")
    lines = (tmp_path / "a/vocab.txt").read_bytes().splitlines()[256:]
    assert [base64.b64decode(line.split()[0]) for line in lines] == [b" the", b" cat", b" dog"]     # by count, by bytes
    run(text, f"--out={tmp_path / 'b'}", "--val_share=0", f"--vocab={tmp_path / 'a/vocab.txt'}")
    assert (tmp_path / "b/b_train_000000.bin").read_bytes() == (tmp_path / "a/a_train_000000.bin").read_bytes()


def test_a_given_vocabulary(tmp_path):
    pieces = [bytes([byte]) for byte in range(256)] + [b" def", b"\n    "]
    vocab = tmp_path / "vocab.txt"
    vocab.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(piece), n) for n, piece in enumerate(pieces)))
    (tmp_path / "in.py").write_text("if x:\n    def f(): ö\n")
    run(tmp_path / "in.py", f"--out={tmp_path / 'out'}", "--val_share=0", f"--vocab={vocab}")
    assert decode(tmp_path / "out") == ["if x:\n    def f(): ö\n"]
    tokens = np.fromfile(tmp_path / "out/out_train_000000.bin", "<u2", offset=1024).tolist()
    assert tokens[0] == 258 and 257 in tokens and tg.find_shards(str(tmp_path / "out/*.bin"))[0].vocab_size == 259


@pytest.mark.parametrize("flag", [r"\n\n", "<|endoftext|>", r"\n%%\n"])
def test_plain_text_with_separators(tmp_path, flag):
    """Short and long parts, blank ones, a separator at the end, and one across every place where a cut could fall."""
    separator = flag.replace(r"\n", "\n")
    parts = ["one\nline", " ", "ö" * 40_000, "", *("a\n" * n for n in range(8_150, 8_200, 7)), "last"]
    (tmp_path / "in.txt").write_text(separator.join(parts) + separator)
    run(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--max_doc_tokens=0",
        f"--document_separator={flag}")
    docs = decode(tmp_path / "out")
    assert max(len(doc.encode()) for doc in docs) <= tool.PLAIN_BYTES and all(doc.strip() for doc in docs)
    assert "".join(docs).replace("\n", "") == "".join(parts).replace("\n", "").replace(" ", "")
    if separator != "\n\n":
        assert "".join(docs) == "".join(part for part in parts if part.strip())
        assert {"one\nline", "last"} < set(docs)


def test_files_and_splits(tmp_path):
    """A file is a document, long ones are cut at line ends; --val_files decides alone, else the text's hash does."""
    lines = "".join(f"line {n} of many\n" for n in range(3000))
    files = {"a.txt": "first", "b.md": lines, "c": "\ufeffthird", "empty.txt": "", "blank.txt": " \n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = [tmp_path / name for name in files]
    flags = ["--tokenizer=bytes", "--max_doc_tokens=0"]
    run(*paths, f"--out={tmp_path / 'x'}", *flags, "--val_files", paths[2])
    docs = decode(tmp_path / "x")
    assert docs[0] == "first" and "".join(docs[1:]) == lines and len(docs) == 5
    assert all(doc.endswith("\n") for doc in docs[1:]) and decode(tmp_path / "x", "val") == ["third"]
    texts = [f"document {n}" for n in range(400)]
    run(write_jsonl(tmp_path / "d.jsonl", texts), f"--out={tmp_path / 'y'}", *flags, "--val_share=0.25")
    train, val = decode(tmp_path / "y"), decode(tmp_path / "y", "val")
    assert sorted(train + val) == sorted(texts) and 60 < len(val) < 140
    assert train == [text for text in texts if text in set(train)]                   # order is kept
    run(write_jsonl(tmp_path / "e.jsonl", texts[::-1]), f"--out={tmp_path / 'z'}", *flags, "--val_share=0.25")
    assert decode(tmp_path / "z", "val") == val[::-1]                                # and decides nothing


def test_long_documents_and_several_shards(tmp_path):
    text = "".join(f"{n} " for n in range(2000))
    run(write_jsonl(tmp_path / "in.jsonl", [text, "short"] * 3), f"--out={tmp_path / 'out'}", "--tokenizer=bytes",
        "--val_share=0", "--max_doc_tokens=100", "--shard_tokens=10_000", "--name=own")
    headers = tg.find_shards(str(tmp_path / "out/own_train_*.bin"))
    assert [Path(header.name).name for header in headers] == [f"own_train_{n:06d}.bin" for n in range(3)]
    assert all(header.tokens <= 10_000 for header in headers)
    assert max(tg.load_shard(header).doc_lengths.max() for header in headers) == 100
    assert "".join(decode(tmp_path / "out")) == (text + "short") * 3


def test_several_processes_give_the_same(tmp_path):
    """As a user calls it; portions of 1 MiB, so that several are under way."""
    rng, words = np.random.default_rng(0), np.array("the of cat 🙂 x1 run.\n and\tö".split(" "))
    texts = [" ".join(rng.choice(words, 50_000)) for _ in range(9)]
    source, outputs = write_jsonl(tmp_path / "in.jsonl", texts), []
    for jobs in (1, 3):
        out = tmp_path / f"by {jobs}"
        done = subprocess.run([sys.executable, str(TOOL), str(source), "--out", str(out), "--name=x", "--val_share=0.3",
                               f"--jobs={jobs}", "--shard_tokens=500000"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "\r" not in done.stderr, done.stderr          # no bar in a file
        outputs.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert outputs[0] == outputs[1] and len(outputs[0]) > 3
    assert "by 3/x_train_*.bin" in done.stdout.split("--train_files=")[1]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: Parquet is not tested")
    import pyarrow.parquet as parquet
    table = pyarrow.table({"content": TEXTS + [None, ""], "n": list(range(len(TEXTS) + 2))})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    flags = f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0", "--max_doc_tokens=0"
    run(tmp_path / "in.parquet", *flags, "--text_key=content")
    assert decode(tmp_path / "out") == TEXTS
    assert "in.parquet: columns: found {'content'" in fails(tmp_path / "in.parquet", *flags, "--force")
    assert "in.parquet: row 1: found {'n': 0}" in fails(tmp_path / "in.parquet", *flags, "--force", "--text_key=n")
    (tmp_path / "in.parquet").write_bytes(b"PAR1 no parquet")
    assert "expected a Parquet file" in fails(tmp_path / "in.parquet", *flags, "--force")
    assert decode(tmp_path / "out") == TEXTS                             # what failed replaced nothing


def test_no_package_is_explained(tmp_path, monkeypatch):
    for package in ("pyarrow", "tiktoken"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "in.parquet").write_text("x")
    (tmp_path / "in.txt").write_text("x")
    assert "pip install pyarrow" in fails(tmp_path / "in.parquet", f"--out={tmp_path / 'out'}")
    assert "pip install tiktoken" in fails(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=gpt2")


@pytest.mark.parametrize("name, content, parts", [
    ("no file.txt", None, ["no file.txt: found no file", "another path"]),
    ("a.txt.gz", b"x", ["a.txt.gz: found a .gz file", "unpack"]),
    ("a.json", b"[]", ["a.json: found a .json file", ".jsonl"]),
    ("a.txt", b"x" * 70_000 + b"\xe4\n", ["a.txt: found byte 0xe4 at byte 70,000, expected UTF-8", "iconv"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xe4"}\n', ["a.jsonl: found byte 0xe4 at byte 24, expected UTF-8"]),
    ("a.jsonl", b'{"text": "a"}\n\n{"title": "b"}\n', ["a.jsonl: line 3: found {'title': 'b'}", "--text_key"]),
    ("a.jsonl", b'{"text": ["a"]}\n', ["a.jsonl: line 1: found {'text': ['a']}", "--text_key"]),
    ("a.jsonl", b'"text"\n', ["a.jsonl: line 1: found 'text', expected text under 'text'"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', ["a.jsonl: line 2: found \"Expecting", "at column", "mend"]),
    ("a.txt", b" \n", ["found no train document"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 100_000 + b"\n",
     ["a.jsonl: line 2: found brackets nested", "mend"]),
    ("a.jsonl", b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}\n", ["a.jsonl: line 1: found ", "--text_key"]),
    ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}\n", ["a.jsonl: line 1: found a number with more digits", "mend"]),
    ("a.txt", "\U0001f642".encode(), ["found no train document", "--document_separator", "--val_share=0"]),
])
def test_bad_input(tmp_path, name, content, parts):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    message = fails(tmp_path / name, f"--out={tmp_path / 'out'}", "--tokenizer=bytes")
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()                               # no trace of it


@pytest.mark.parametrize("damage, found", [
    (lambda lines: lines[:-1] + [b"no base64! 300"], "found "), (lambda lines: [b"QQ=="] + lines, "found "),
    (lambda lines: lines[:5] + lines[6:], "pieces"), (lambda lines: lines[:-1] + [b"YWI= 999"], "pieces"),
    (lambda lines: [b"\x1f\x8b broken gzip"], "found "),
    (lambda lines: [gzip.compress(b"QQ== 0")[:12] + b"xxxx"], "found ")])
def test_a_bad_vocabulary(tmp_path, damage, found):
    lines = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)] + [b"YWI= 256"]
    (tmp_path / "vocab.txt").write_bytes(b"\n".join(damage(lines)))
    (tmp_path / "in.txt").write_text("x")
    message = fails(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", f"--vocab={tmp_path / 'vocab.txt'}")
    assert "vocab.txt: found" in message and found in message and "give another file" in message


def test_wrong_ranks(tmp_path):
    tokenizer_flags("gpt2")
    (tmp_path / "in.txt").write_text("x")
    ranks = tmp_path / "ranks"
    ranks.write_bytes(b"\n".join(b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)))
    message = fails(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=gpt2", f"--ranks={ranks}")
    assert "ranks: found 256 other pieces, expected GPT-2's 50,256" in message
    ranks.unlink()
    fails(tmp_path / "in.txt", f"--out={tmp_path / 'out'}", "--tokenizer=gpt2", f"--ranks={ranks}")


def test_bad_flags(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("x")
    for flag in ("--vocab_size=65536", "--vocab_size=256", "--val_share=1", "--jobs=0", "--shard_tokens=0",
                 "--max_doc_tokens=1", "--tokenizer=other"):
        with pytest.raises(SystemExit) as caught:
            tool.main([str(tmp_path / "in.txt"), f"--out={tmp_path / 'out'}", flag])
        assert caught.value.code == 2, flag
    assert "found --vocab_size=65536, expected 257 to 65,535" in capsys.readouterr().err


def test_half_a_surrogate_pair_in_json(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": null}\n')
    run(tmp_path / "in.jsonl", f"--out={tmp_path / 'out'}", "--tokenizer=bytes", "--val_share=0")
    assert decode(tmp_path / "out") == ["a?b"]


def test_what_is_there_is_not_lost(tmp_path):
    out, flags = tmp_path / "out", ("--tokenizer=bytes", "--val_share=0", "--shard_tokens=10")
    run(write_jsonl(tmp_path / "one.jsonl", ["one " * 5] * 4), f"--out={out}", *flags)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    two = write_jsonl(tmp_path / "two.jsonl", ["two"])
    assert "out_train_000000.bin" in (message := fails(two, f"--out={out}", *flags)) and "--force" in message
    pieces = ("--vocab_size=300", "--val_share=0", "--force", "--name=other")
    message = fails(two, f"--out={out}", *pieces)                      # would leave the others a wrong vocab.txt
    assert "another vocabulary" in message and "--force" not in message
    (tmp_path / "bad.jsonl").write_bytes(two.read_bytes() + b"{")
    fails(tmp_path / "bad.jsonl", f"--out={out}", *flags, "--force")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before and len(before) == 6
    run(two, f"--out={out}", *flags, "--force")
    assert decode(out) == ["two"] and {path.name for path in out.iterdir()} == {
        "out_train_000000.bin", "vocab.txt", "manifest.json"}


@pytest.mark.all                          # an interrupt can fall into an interpreter lock and be lost there
def test_ctrl_c_and_a_full_disk(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["some text with 🙂 in it " * 3000] * 300)
    run(write_jsonl(tmp_path / "few.jsonl", ["some text"]), f"--out={tmp_path / 'few'}", "--val_share=0")
    command = [sys.executable, str(TOOL), str(source), "--jobs=1", "--out"]
    process = subprocess.Popen([*command, str(tmp_path / "a"), f"--vocab={tmp_path / 'few/vocab.txt'}"],
                               stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    end = time.monotonic() + 20
    while not (tmp_path / "a/vocab.txt.part").exists() and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)                              # a terminal signals the workers too
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 130 and "nothing was written" in errors and "Traceback" not in errors, errors
    assert not (tmp_path / "a").exists()
    full = subprocess.run([*command[:-1], "--tokenizer=bytes", "--shard_tokens=100000", "--out", str(tmp_path / "b")],
                          capture_output=True, text=True, timeout=60, preexec_fn=lambda: resource.setrlimit(
                              resource.RLIMIT_FSIZE, (100_000, 100_000)))
    assert full.returncode == 1 and "found 'File too large', expected" in full.stderr, full.stderr
    assert "Traceback" not in full.stderr and not (tmp_path / "b").exists()
