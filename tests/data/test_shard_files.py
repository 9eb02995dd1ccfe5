"""What the data tools promise together: output whole or untouched, nothing opened blindly, results that are seen."""
from __future__ import annotations

import base64
import contextlib
import errno
import io
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from common import ROOT, preset, recorded_writes, refused, write_shard

import train_gpt as tg

sys.path.insert(0, str(ROOT / "data"))                        # the tools import shard_files.py beside them

import cached_fineweb10B                                      # noqa: E402
import ngram                                                  # noqa: E402
import pocket                                                 # noqa: E402
import shard_files                                            # noqa: E402
import tokenize_text                                          # noqa: E402

TEXT = "".join(f"line {number} of a short text\n" for number in range(200))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def failure(tool, *arguments: object) -> str:
    """The message of a call that ends with one: found, expected, what to do."""
    with pytest.raises(SystemExit) as caught:
        tool.main([str(argument) for argument in arguments])
    message = str(caught.value)
    assert message.startswith("error: ")
    places = [message.find(word) for word in ("found", "expected", ";")]
    assert -1 not in places and places == sorted(places), message
    return message


def tokenize(source: Path, out: Path, *flags: str) -> None:
    tokenize_text.main([str(source), f"--out={out}", "--jobs=1", *flags])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def library(monkeypatch) -> None:
    """A standard library that pocket.py reads in a moment."""
    sources = {}
    for number in range(60):
        words = [f"word{number}of{count}" for count in range(40)]
        sources[f"file{number}.py"] = " ".join(words).encode()
    monkeypatch.setattr(pocket, "read_sources", {Path(sysconfig.get_path("stdlib")): sources}.get)
    monkeypatch.setattr(pocket, "MIN_VAL_TOKENS", 1)


# Nothing is opened blindly

def make_odd_file(kind: str, path: Path) -> None:
    if kind == "a directory":
        path.mkdir()
    elif kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a link that leads nowhere":
        path.symlink_to("nowhere")
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "'Too many levels of symbolic links'":
        path.symlink_to(path.name)


KINDS = ["a directory", "a named pipe", "a link that leads nowhere", "a device", "'Too many levels of symbolic links'"]


@pytest.mark.parametrize("kind", KINDS)
def test_odd_files_are_named_by_every_tool(tmp_path, source, kind):
    odd = tmp_path / "odd.bin"
    make_odd_file(kind, odd)
    good = write_shard(tmp_path / "good.bin", [0, 1, 2, 3])
    out = tmp_path / "out"
    found = f"odd.bin: found {kind}, expected"
    assert found in failure(tokenize_text, odd, f"--out={out}")
    assert found in failure(tokenize_text, source, f"--out={out}", "--val_files", odd)
    assert found in failure(tokenize_text, source, f"--out={out}", f"--vocab={odd}")
    assert not out.exists()
    assert found in failure(ngram, f"--train={odd}", f"--val={good}")

    fetched = tmp_path / "fetched"
    fetched.mkdir()
    make_odd_file(kind, fetched / "fineweb_val_000000.bin")
    message = failure(cached_fineweb10B, 0, f"--out={fetched}")
    assert f"fineweb_val_000000.bin: found {kind}, expected a shard; remove it" in message


@pytest.mark.parametrize("name", ["vocab.txt", "manifest.json", "set_train_000000.bin", "pocket_val_000000.bin"])
def test_odd_files_are_not_written_over(tmp_path, source, library, name):
    out = tmp_path / "set"
    out.mkdir()
    os.mkfifo(out / name)
    if not name.startswith("pocket"):
        assert f"{name}: found a named pipe" in failure(tokenize_text, source, f"--out={out}", "--force")
    if not name.startswith("set"):
        assert f"{name}: found a named pipe" in failure(pocket, "--force", f"--out={out}")
    assert [path.name for path in out.iterdir()] == [name]


def test_a_file_where_the_folder_should_be(tmp_path, source):
    for tool, arguments in ((pocket, []), (tokenize_text, [source]), (cached_fineweb10B, [0])):
        assert "source.txt: found 'File exists'" in failure(tool, *arguments, f"--out={source}")
        assert "found 'Not a directory'" in failure(tool, *arguments, f"--out={source}/below")
    assert source.read_text() == TEXT


# Whole or untouched

@contextlib.contextmanager
def no_large_files(limit: int):
    """Writing beyond `limit` bytes fails, as on a full disk; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(*arguments) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("when", ["writing", "flushing"])
def test_a_full_disk_leaves_what_was_there(tmp_path, source, library, monkeypatch, when):
    """Old files stay byte for byte; a folder that was not there is not there afterwards."""
    old = tmp_path / "set"
    tokenize(source, old)
    own = tmp_path / "own"
    pocket.main([f"--out={own}"])
    before = contents(old) | contents(own)

    calls = [(tokenize_text, [source, f"--out={old}", "--force", "--tokenizer=bytes"]),
             (tokenize_text, [source, f"--out={tmp_path / 'a/b'}"]),
             (pocket, [f"--out={own}", "--force"]), (pocket, [f"--out={tmp_path / 'a/b'}"])]
    if when == "flushing":
        monkeypatch.setattr(os, "fsync", full_disk)
    for tool, arguments in calls:
        limit = no_large_files(3000) if when == "writing" else contextlib.nullcontext()
        with limit:
            message = failure(tool, *arguments)
        assert ".part: found " in message and "make room" in message
    assert contents(old) | contents(own) == before
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("names_given", [0, 1, 2, 3])
@pytest.mark.parametrize("old", [False, True])
def test_a_call_that_ends_between_two_names_is_noticed(tmp_path, source, monkeypatch, capsys, names_given, old):
    out = tmp_path / "set"
    if old:
        tokenize(source, out)
    else:
        out.mkdir()
    before = contents(out)
    moves = []
    replace = os.replace

    def fail_later(start: Path, end: Path) -> None:
        if len(moves) == names_given:
            full_disk()
        moves.append(end)
        replace(start, end)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_later)
        failure(tokenize_text, source, f"--out={out}", "--tokenizer=bytes", "--force")
    if names_given == 0:
        assert contents(out) == before
        return
    assert "manifest.json.part" in contents(out)
    pattern = f"{out}/*.bin"
    message = failure(ngram, f"--train={pattern}", f"--val={pattern}")
    if not list(out.glob("*.bin")):                           # vocab.txt came first
        assert "found no file for" in message
        return
    assert "manifest.json.part: found it" in message
    with pytest.raises(tg.DataError):                         # the vocabulary of the shards may differ as well
        tg.scan_shards(tg.find_shards(pattern))
    refused(tg.DataError, partial(tg.read_manifest, out), "manifest.json.part", "run that tool again")

    tokenize(source, out, "--tokenizer=bytes", "--force")
    assert not [name for name in contents(out) if name.endswith(".part")]
    tg.scan_shards(tg.find_shards(pattern))


def test_a_mixture_is_refused(tmp_path, source):
    one, two = tmp_path / "one", tmp_path / "two"
    for out in (one, two):
        tokenize(source, out, "--name=x", f"--vocab_size={300 if out == one else 400}")
    for name in ("x_train_000000.bin", "vocab.txt"):
        tg.scan_shards(tg.find_shards(f"{one}/*.bin"))
        content = (one / name).read_bytes()
        (one / name).write_bytes((two / name).read_bytes())
        if name != "vocab.txt":                               # ngram.py needs no vocabulary
            message = failure(ngram, f"--train={one}/x_train_*.bin", f"--val={one}/x_val_*.bin")
            assert f"{name}: found other content than manifest.json names" in message
        with pytest.raises(tg.DataError, match=name):
            header = tg.find_shards(f"{one}/x_val_*.bin")[0]
            tg.read_vocabulary(one, preset("tiny", header.vocab_size, header.document_start))
            tg.scan_shards(tg.find_shards(f"{one}/*.bin"))
        (one / name).write_bytes(content)


def test_a_flipped_bit_is_refused(tmp_path, source):
    tokenize(source, tmp_path / "set")
    shard = tmp_path / "set/set_val_000000.bin"
    content = bytearray(shard.read_bytes())
    content[1027] ^= 1
    shard.write_bytes(content)
    message = failure(ngram, f"--train={tmp_path}/set/set_train_*.bin", f"--val={shard}")
    assert "set_val_000000.bin: found other content than manifest.json names" in message


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"format": 2, "files": {}}', b'{"format": 1, "files": [1]}',
                                     b'{"format": 1, "files": {"a": 1}}', b"[" * 100_000, b"\xff"])
def test_a_manifest_that_is_none(tmp_path, source, content):
    out = tmp_path / "set"
    out.mkdir()
    (out / "manifest.json").write_bytes(content)
    write_shard(out / "x.bin", [0, 1, 2])
    assert "manifest.json: found nothing" in failure(ngram, f"--train={out}/x.bin", f"--val={out}/x.bin")
    (out / "x.bin").unlink()
    assert "manifest.json: found nothing" in failure(tokenize_text, source, f"--out={out}")
    assert contents(out) == {"manifest.json": content}
    tokenize(source, out, "--force")
    assert set(shard_files.read_manifest(out)) == {"set_train_000000.bin", "set_val_000000.bin", "vocab.txt"}


def test_what_a_killed_call_left_goes_with_the_next(tmp_path, source, library):
    left = ["set_train_000000.bin.part", "set_val_000007.bin.part", "vocab.txt.part", "manifest.json.part"]
    theirs = ["else_train_000000.bin.part", "notes.part", "fineweb_train_000001.bin.part"]
    out = tmp_path / "set"
    out.mkdir()
    for name in left + theirs:
        (out / name).write_bytes(b"left")
    tokenize(source, out)
    assert {name for name in contents(out) if name.endswith(".part")} == set(theirs)

    own = tmp_path / "own"
    pocket.main([f"--out={own}"])
    for name in ("pocket_train_000000.bin.part", "pocket_val_000000.bin.4711.part", "pocket.json.part"):
        (own / name).write_bytes(b"left")
    pocket.main([f"--out={own}"])                             # nothing to do but that
    assert set(contents(own)) == {"pocket_train_000000.bin", "pocket_val_000000.bin", "pocket.json", "vocab.txt",
                                  "manifest.json"}


# Nobody else's files

def test_somebody_elses_vocabulary_needs_force(tmp_path, source, library):
    out = tmp_path / "set"
    out.mkdir()
    (out / "vocab.txt").write_text("mine\n")
    message = failure(tokenize_text, source, f"--out={out}")
    assert "vocab.txt: found another vocabulary, expected none; give another --out, or --force" in message
    assert "vocab.txt: found another vocabulary" in failure(pocket, f"--out={out}")
    assert contents(out) == {"vocab.txt": b"mine\n"}
    tokenize(source, out, "--force")
    assert (out / "vocab.txt").read_bytes() != b"mine\n"

    pieces = (out / "vocab.txt").read_bytes()
    same = tmp_path / "same"
    same.mkdir()
    (same / "vocab.txt").write_bytes(pieces)
    tokenize(source, same, f"--vocab={same / 'vocab.txt'}")
    assert (same / "vocab.txt").read_bytes() == pieces


def test_two_sets_of_one_vocabulary_share_a_folder(tmp_path, source):
    out = tmp_path / "set"
    tokenize(source, out, "--name=a", "--tokenizer=bytes")
    first = contents(out)
    tokenize(source, out, "--name=a_train", "--tokenizer=bytes")
    assert len(shard_files.read_manifest(out)) == 5
    tokenize(source, out, "--name=a", "--tokenizer=bytes", "--force", "--val_share=0")
    assert set(contents(out)) == {"a_train_000000.bin", "a_train_train_000000.bin", "a_train_val_000000.bin",
                                  "vocab.txt", "manifest.json"}
    assert set(first) - set(contents(out)) == {"a_val_000000.bin"}          # of an earlier call with this name
    tg.scan_shards(tg.find_shards(f"{out}/*.bin"))
    before = contents(out)
    message = failure(tokenize_text, source, f"--out={out}", "--name=b", "--force")
    assert "found a_train_000000.bin, expected no data set that has another vocabulary" in message
    assert contents(out) == before


def test_pocket_keeps_strangers_shards(tmp_path, library):
    write_shard(tmp_path / "pocket_train_000000.bin", [1, 2])
    before = contents(tmp_path)
    assert "found it without pocket.json" in failure(pocket, f"--out={tmp_path}")
    assert contents(tmp_path) == before
    pocket.main([f"--out={tmp_path}", "--force"])
    write_shard(tmp_path / "other.bin", [1, 2])
    (tmp_path / "vocab.txt").write_text("of the other\n")
    assert "found other.bin, expected no data set that has another" in failure(pocket, f"--out={tmp_path}", "--force")


@pytest.mark.parametrize("name", ["../../x", "a/b", "/x", "..", ".", "a/", ""])
def test_a_name_is_not_a_path(tmp_path, source, capsys, name):
    with pytest.raises(SystemExit) as caught:
        tokenize(source, tmp_path / "a/b/c", f"--name={name}")
    assert caught.value.code == 2
    assert f"found --name={name}, expected a name without a folder; give the folder as --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source.txt"]


def test_all_is_flushed_before_the_first_name_and_the_names_before_the_manifest(tmp_path, monkeypatch):
    calls = recorded_writes(monkeypatch)
    names = ["vocab.txt", "set.bin"]
    with shard_files.output_folder(tmp_path, re.compile("set.bin|vocab.txt"), replace=False) as output:
        for name in names:
            output.write(name, b"x")
        output.publish()
    files = [(tmp_path / name).stat().st_ino for name in (*names, "manifest.json")]
    folder = tmp_path.stat().st_ino
    assert calls == [*files, *names, folder, "manifest.json", folder]


@pytest.mark.parametrize("tool", [pocket, tokenize_text, cached_fineweb10B], ids=lambda tool: tool.__name__)
def test_an_empty_name_is_no_folder(tool, tmp_path, monkeypatch, capsys):
    """What a shell makes of --out=$UNSET must not fill the current folder."""
    monkeypatch.chdir(tmp_path)
    inputs = [__file__] if tool is tokenize_text else []
    with pytest.raises(SystemExit) as caught:
        tool.main([*inputs, "--out="])
    assert caught.value.code == 2 and "found an empty name, expected a folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_said_in_words(monkeypatch, tmp_path, source):
    monkeypatch.setattr(tokenize_text, "regular_file", mock.Mock(side_effect=MemoryError))
    assert "found too little memory" in failure(tokenize_text, source, f"--out={tmp_path / 'out'}")


def test_a_folder_with_brackets_and_quotes(tmp_path, source, capsys):
    """The printed line is what a shell and the trainer need."""
    out = tmp_path / "my [data] isn't"
    tokenize(source, out)
    line = capsys.readouterr().out.splitlines()[-1]
    program, train, val = shlex.split(line)
    patterns = [flag.split("=", 1)[1] for flag in (train, val)]
    assert [len(tg.find_shards(pattern)) for pattern in patterns] == [1, 1]
    tokenize(source, out, "--force")
    ngram.main([f"--train={out}/*_train_*.bin", f"--val={patterns[1]}"])


# A validation part for short texts

def texts(out: Path, split: str) -> list[str]:
    found = []
    for header in tg.find_shards(f"{out}/*_{split}_*.bin"):
        shard = tg.load_shard(header)
        pieces = tg.read_vocabulary(out, preset("tiny", header.vocab_size, header.document_start))
        for start, length in zip(shard.doc_starts, shard.doc_lengths):
            tokens = shard.tokens[start + 1:start + length]
            found.append(b"".join(pieces[token] for token in tokens).decode())
    return found


def draw_all(monkeypatch, split: str) -> None:
    """The hash puts every document into this part."""
    def drawn_split(text: bytes, share: float) -> str:
        return split
    monkeypatch.setattr(tokenize_text, "drawn_split", drawn_split)


@pytest.mark.parametrize("text, val", [
    ("one document", "document"), ("naïve ö", "e ö"), ("a\n\nb\n", "\nb\n"), ("\n\nab", "b"), ("ö" * 999, "ö" * 500),
    (TEXT, None), (3 * TEXT, None), ("x" * 9999, "x" * 1024),
])
@pytest.mark.parametrize("drawn", ["train", "val"])
def test_the_end_of_the_only_document_is_for_validation(tmp_path, monkeypatch, text, val, drawn):
    draw_all(monkeypatch, drawn)
    (tmp_path / "in.txt").write_text(text)
    tokenize(tmp_path / "in.txt", tmp_path / "out", "--tokenizer=bytes", "--max_doc_tokens=0")
    end, = texts(tmp_path / "out", "val")
    assert texts(tmp_path / "out", "train") == [text.removesuffix(end)]
    assert end == val or val is None
    size = len(text.encode())
    wanted = min(size / 2, max(1024, 0.05 * size))
    assert wanted - 2 <= len(end.encode()) <= wanted + 30     # to the end of a line or character


def test_of_several_documents_the_last_is_cut(tmp_path, monkeypatch):
    draw_all(monkeypatch, "train")
    (tmp_path / "in.txt").write_text("one two|three four|five six seven| \n")
    tokenize(tmp_path / "in.txt", tmp_path / "out", "--tokenizer=bytes", "--document_separator=|")
    assert texts(tmp_path / "out", "train") == ["one two", "three four", "five "]
    assert texts(tmp_path / "out", "val") == ["six seven"]


# Results that are seen

class Stream(io.TextIOWrapper):
    """A console of an encoding that keeps what it was given."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding)


def test_a_console_that_cannot_encode(tmp_path, source, monkeypatch):
    console = Stream("latin-1")
    monkeypatch.setattr(sys, "stdout", console)
    tokenize(source, tmp_path / "zażółć", "--tokenizer=bytes")
    assert b"za\\u017c\xf3\\u0142\\u0107_train_*.bin: 1 shards" in console.buffer.getvalue()


@pytest.mark.parametrize("stdout, found", [("/dev/full", "'No space left on device'"), (None, "it closed")])
def test_a_lost_result_is_an_error_after_the_data_are_whole(tmp_path, source, library, monkeypatch, stdout, found):
    for tool, arguments in ((tokenize_text, [source]), (pocket, []), (pocket, [])):
        out = tmp_path / tool.__name__
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout and open(stdout, "w"))
            message = failure(tool, *arguments, f"--out={out}")
        assert f"stdout: found {found}, expected to print the result there" in message
        assert len(shard_files.read_manifest(out)) >= 3


PROGRAMS = """
cd {folder}; ngram="{python} {data}/ngram.py --train=shard.bin --val=shard.bin"
$ngram > /dev/full; echo "full $?"; $ngram >&-; echo "closed $?"; $ngram --help > /dev/full; echo "help $?"
$ngram > /dev/full 2> /dev/full; echo "both $?"; $ngram 2>&- | tail -n 1
$ngram --val=none 2> /dev/full; echo "error $?"
{python} {data}/pocket.py --out=/dev/null 2>&-; echo "pocket $?"
"""


def test_programs_whose_output_is_lost(tmp_path):
    write_shard(tmp_path / "shard.bin", [0, 1, 2, 1, 2])
    script = PROGRAMS.format(folder=shlex.quote(str(tmp_path)), python=sys.executable, data=ROOT / "data")
    done = subprocess.run(["bash", "-c", f"exec 3>&1; ({script}) 3>&1"], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    result = lines.pop(4)
    assert lines == ["full 1", "closed 1", "help 1", "both 1", "error 1", "pocket 1"]
    assert '"trigram_nats"' in result
    assert done.stderr.count("error: stdout: found ") == 2
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr


def start_long_call(tmp_path: Path, out: Path) -> subprocess.Popen:
    """A tokenizer that has work for a while; returns once it writes."""
    long = tmp_path / "long.txt"
    long.write_text("some text, more text and so on\n" * 1_000_000)
    vocabulary = tmp_path / "bytes.txt"
    lines = [b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    vocabulary.write_bytes(b"".join(lines))
    command = [sys.executable, ROOT / "data/tokenize_text.py", long, f"--out={out}", f"--vocab={vocabulary}"]
    command += ["--jobs=2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 20
    while not (out / "vocab.txt.part").exists() and time.monotonic() < end:
        time.sleep(0.02)
    return process


def test_a_signal_ends_it_without_a_trace(tmp_path):
    process = start_long_call(tmp_path, tmp_path / "out")
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 143, errors
    assert "nothing was written or replaced" in errors and "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_a_killed_call_leaves_no_process(tmp_path):
    process = start_long_call(tmp_path, tmp_path / "out")
    process.kill()
    process.communicate(timeout=20)                           # ends when no worker holds stderr any more
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "out/vocab.txt.part").exists()
