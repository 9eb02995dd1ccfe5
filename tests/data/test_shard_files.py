"""What the data tools promise together: output whole or untouched, nothing opened blindly, results that are seen."""
import contextlib
import errno
import io
import os
import re
import resource
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
from data_common import TEXT, contents, failure, wrong_flag

import train_gpt as tg

import cached_fineweb10B                                      # noqa: E402
import ngram                                                  # noqa: E402
import pocket                                                 # noqa: E402
import shard_files                                            # noqa: E402
import tokenize_text                                          # noqa: E402


def tokenize(source: Path, out: Path, *flags: str) -> None:
    tokenize_text.main([str(source), f"--out={out}", "--jobs=1", *flags])


def ngram_failure(pattern: object) -> str:
    return failure(ngram, f"--train={pattern}", f"--val={pattern}")


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


# ---- nothing is opened blindly --------------------------------------------------------------------------------------

def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make, kind", [
    (Path.mkdir, "a directory"), (os.mkfifo, "a named pipe"), (link_to_nowhere, "a link that leads nowhere"),
    (device, "a device"), (loop, "'Too many levels of symbolic links'")])
def test_regular_file__odd_files_are_named_by_every_tool(tmp_path, source, make, kind):
    odd, out, found = tmp_path / "odd.bin", tmp_path / "out", f"odd.bin: found {kind}, expected"
    make(odd)
    if kind != "a directory":                                 # of which the tokenizer reads what is below
        assert found in failure(tokenize_text, odd, f"--out={out}")
        assert found in failure(tokenize_text, source, f"--out={out}", "--val_files", odd)
    assert found in failure(tokenize_text, source, f"--out={out}", f"--vocab={odd}")
    assert not out.exists()
    assert found in ngram_failure(odd)
    (tmp_path / "fetched").mkdir()
    odd.rename(tmp_path / "fetched/fineweb_val_000000.bin")
    message = failure(cached_fineweb10B, 0, f"--out={tmp_path}/fetched")
    assert "fineweb_val_000000.bin: found " in message and "expected a shard; remove it" in message


@pytest.mark.parametrize("name", ["vocab.txt", "manifest.json", "set_train_000000.bin", "pocket_val_000000.bin"])
def test_output__odd_files_are_not_written_over(tmp_path, source, library, name):
    out = tmp_path / "set"
    out.mkdir()
    os.mkfifo(out / name)
    for tool, arguments, others in ((tokenize_text, [source], "pocket"), (pocket, [], "set")):
        if not name.startswith(others):
            assert f"{name}: found a named pipe" in failure(tool, *arguments, f"--out={out}", "--force")
    assert [path.name for path in out.iterdir()] == [name]


def test_output__a_file_where_the_folder_should_be(tmp_path, source, monkeypatch, capsys):
    """Nor does an empty name, of --out=$UNSET, fill the current folder."""
    monkeypatch.chdir(tmp_path)
    for tool, arguments in ((pocket, []), (tokenize_text, [source]), (cached_fineweb10B, [0])):
        assert "source.txt: found 'File exists'" in failure(tool, *arguments, f"--out={source}")
        assert "found 'Not a directory'" in failure(tool, *arguments, f"--out={source}/below")
        assert "found an empty name, expected a folder" in wrong_flag(tool, capsys, *arguments, "--out=")
    assert contents(tmp_path) == {"source.txt": TEXT.encode()}


# ---- whole or untouched ---------------------------------------------------------------------------------------------

@contextlib.contextmanager
def no_large_files(limit: int):
    """Writing beyond `limit` bytes fails, as on a full disk; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("when", ["writing", "flushing"])
def test_output__a_full_disk_leaves_what_was_there(tmp_path, source, library, monkeypatch, when):
    """Old files stay byte for byte; a folder that was not there is not there afterwards."""
    old = tmp_path / "set"
    own = tmp_path / "own"
    tokenize(source, old)
    pocket.main([f"--out={own}"])
    before = contents(old) | contents(own)
    limit = partial(no_large_files, 3000)
    if when == "flushing":
        monkeypatch.setattr(os, "fsync", full_disk)
        limit = contextlib.nullcontext
    for tool, arguments, outs in ((tokenize_text, [source, "--tokenizer=bytes"], old), (pocket, [], own)):
        for out in (outs, tmp_path / "a/b"):
            with limit():
                message = failure(tool, *arguments, "--force", f"--out={out}")
            assert ".part: found " in message and "make room" in message
    assert contents(old) | contents(own) == before
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("names_given", [0, 1, 2, 3])
@pytest.mark.parametrize("old", [False, True])
def test_publish__a_call_that_ends_between_two_names_is_noticed(tmp_path, source, monkeypatch, names_given, old):
    out = tmp_path / "set"
    out.mkdir()
    if old:
        tokenize(source, out)
    before, moves, replace = contents(out), [], os.replace

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
    refused(tg.DataError, lambda: tg.read_manifest(out), "manifest.json.part", "run that tool again")
    message = ngram_failure(f"{out}/*.bin")
    assert "manifest.json.part: found it" in message or not list(out.glob("*.bin"))
    tokenize(source, out, "--tokenizer=bytes", "--force")
    assert not list(out.glob("*.part"))
    tg.scan_shards(tg.find_shards(f"{out}/*.bin"))


@pytest.mark.parametrize("at", range(4))
def test_publish__a_signal_behind_a_name_is_noticed(tmp_path, monkeypatch, at):
    replace, names = os.replace, []

    def interrupted(start: Path, end: Path) -> None:
        replace(start, end)
        names.append(end.name)
        if len(names) > at:
            raise KeyboardInterrupt(143)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), shard_files.Output(tmp_path, re.compile("[abc]"), False) as output:
        for name in "abc":
            output.write(name, b"x")
        output.publish()
    assert set(contents(tmp_path)) == {*names, "manifest.json.part"} - ({"manifest.json.part"} if at == 3 else set())


def test_publish__all_is_on_the_disk_before_it_has_its_name_and_the_names_before_the_manifest(tmp_path, monkeypatch):
    calls = recorded_writes(monkeypatch)
    names = ["vocab.txt", "set.bin"]
    with shard_files.Output(tmp_path, re.compile("set.bin|vocab.txt"), replace=False) as output:
        for name in names:
            output.write(name, b"x")
        output.publish()
    files = [(tmp_path / name).stat().st_ino for name in (*names, "manifest.json")]
    folder = tmp_path.stat().st_ino
    assert calls == [*files, *names, folder, "manifest.json", folder]


@pytest.mark.parametrize("name", ["x_train_000000.bin", "vocab.txt", "a flipped bit"])
def test_check_content__a_mixture_or_a_flipped_bit(tmp_path, source, name):
    for out, size in (("one", 300), ("two", 400)):
        tokenize(source, tmp_path / out, "--name=x", f"--vocab_size={size}")
    one = tmp_path / "one"
    if name == "a flipped bit":
        name = "x_train_000000.bin"
        content = bytearray((one / name).read_bytes())
        content[1027] ^= 1
    else:
        content = (tmp_path / "two" / name).read_bytes()
    (one / name).write_bytes(content)
    if name != "vocab.txt":                                   # ngram.py needs no vocabulary
        assert f"{name}: found other content than manifest.json names" in ngram_failure(f"{one}/x_train_*.bin")
    with pytest.raises(tg.DataError, match=name):
        header = tg.find_shards(f"{one}/x_val_*.bin")[0]
        tg.read_vocabulary(one, preset("tiny", header.vocab_size, header.document_start))
        tg.scan_shards(tg.find_shards(f"{one}/*.bin"))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"format": 2, "files": {}}', b'{"format": 1, "files": [1]}',
                                     b'{"format": 1, "files": {"a": 1}}', b"[" * 100_000, b"\xff"])
def test_read_manifest__one_that_is_none(tmp_path, source, content):
    out = tmp_path / "set"
    out.mkdir()
    (out / "manifest.json").write_bytes(content)
    write_shard(out / "x.bin", [0, 1, 2])
    assert "manifest.json: found nothing" in ngram_failure(out / "x.bin")
    (out / "x.bin").unlink()
    assert "manifest.json: found nothing" in failure(tokenize_text, source, f"--out={out}")
    assert contents(out) == {"manifest.json": content}
    tokenize(source, out, "--force")
    assert set(shard_files.read_manifest(out)) == {"set_train_000000.bin", "set_val_000000.bin", "vocab.txt"}


def test_output__what_a_killed_call_left_goes_with_the_next(tmp_path, source, library):
    theirs = {"else_train_000000.bin.part", "notes.part", "fineweb_train_000001.bin.part"}
    for tool, arguments, name in ((tokenize_text, [source], "set"), (pocket, [], "pocket"), (pocket, [], "pocket")):
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        left = {f"{name}_train_000000.bin.part", f"{name}_val_000007.bin.part", "vocab.txt.part", "manifest.json.part"}
        for part in left | theirs:
            (out / part).write_bytes(b"left")
        tool.main([*map(str, arguments), f"--out={out}"])
        assert {part for part in contents(out) if part.endswith(".part")} == theirs


# ---- nobody else's files --------------------------------------------------------------------------------------------

def test_write_vocabulary__somebody_elses_needs_force(tmp_path, source, library):
    out = tmp_path / "set"
    out.mkdir()
    (out / "vocab.txt").write_text("mine\n")
    for tool, arguments in ((tokenize_text, [source]), (pocket, [])):
        message = failure(tool, *arguments, f"--out={out}")
        assert "vocab.txt: found another vocabulary, expected none; give another --out, or --force" in message
    assert contents(out) == {"vocab.txt": b"mine\n"}
    tokenize(source, out, "--force")
    pieces = (out / "vocab.txt").read_bytes()
    assert pieces != b"mine\n"
    same = tmp_path / "same"
    same.mkdir()
    (same / "vocab.txt").write_bytes(pieces)
    tokenize(source, same, f"--vocab={same / 'vocab.txt'}")


def test_output__two_sets_of_one_vocabulary_share_a_folder(tmp_path, source, library):
    out = tmp_path / "set"
    for name in ("a", "a_train"):
        tokenize(source, out, f"--name={name}", "--tokenizer=bytes")
    assert len(shard_files.read_manifest(out)) == 5
    tokenize(source, out, "--name=a", "--tokenizer=bytes", "--force", "--val_share=0")
    assert set(contents(out)) == {"a_train_000000.bin", "a_train_train_000000.bin", "a_train_val_000000.bin",
                                  "vocab.txt", "manifest.json"}, "a_val_000000.bin was of an earlier call"
    tg.scan_shards(tg.find_shards(f"{out}/*.bin"))
    before = contents(out)
    for tool, arguments in ((tokenize_text, [source, "--name=b"]), (pocket, [])):
        message = failure(tool, *arguments, f"--out={out}", "--force")
        assert "found a_train_000000.bin, expected no data set that has another vocabulary" in message
    assert "found a_train_000000.bin, expected no shards of this name" in failure(
        tokenize_text, source, f"--out={out}", "--name=a", "--tokenizer=bytes")
    assert contents(out) == before
    write_shard(tmp_path / "pocket_train_000000.bin", [1, 2])
    assert "those without pocket.json are somebody else's" in failure(pocket, f"--out={tmp_path}")


# ---- results that are seen, ends in words ---------------------------------------------------------------------------

def test_say__a_console_that_cannot_encode(tmp_path, source, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", console)
    tokenize(source, tmp_path / "zażółć", "--tokenizer=bytes")
    assert b"za\\u017c\xf3\\u0142\\u0107_train_*.bin: 1 shards" in console.buffer.getvalue()


@pytest.mark.parametrize("stdout, found", [("/dev/full", "No space left on device"), (None, "it closed")])
def test_say__a_lost_result_is_an_error_after_the_data_are_whole(tmp_path, source, library, monkeypatch, stdout, found):
    for tool, arguments in ((tokenize_text, [source]), (pocket, []), (pocket, [])):
        out = tmp_path / tool.__name__
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout and open(stdout, "w"))
            message = failure(tool, *arguments, f"--out={out}")
        assert "stdout: found " in message and found in message and "print the result there" in message
        assert len(shard_files.read_manifest(out)) >= 3


def test_as_program__status_and_no_stack_trace(tmp_path):
    write_shard(tmp_path / "shard.bin", [0, 1, 2, 1, 2])
    program = f"{sys.executable} {ROOT}/data/ngram.py --train=shard.bin --val"
    script = f"{program}=shard.bin >/dev/full; echo $?; {program}=none; echo $?; {program}=shard.bin 2>&- | tail -n 1"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    one, two, result = done.stdout.splitlines()
    assert (one, two) == ("1", "1") and '"trigram_nats"' in result
    assert done.stderr.count("error: ") == 2 and "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_errors_in_words__too_little_memory(monkeypatch, tmp_path, source):
    monkeypatch.setattr(tokenize_text, "regular_file", mock.Mock(side_effect=MemoryError))
    assert "found too little memory" in failure(tokenize_text, source, f"--out={tmp_path / 'out'}")


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_as_program__a_signal_leaves_no_process_and_no_output(tmp_path, number, status):
    """Killed, its workers end with it, and what it left goes with the next call. The shell signals workers, too."""
    (tmp_path / "long.txt").write_text("some text, more text and so on\n" * 1_000_000)
    (tmp_path / "few.txt").write_text(TEXT)
    tokenize(tmp_path / "few.txt", tmp_path / "few")
    out, vocabulary = tmp_path / "out", tmp_path / "few/vocab.txt"
    command = [sys.executable, ROOT / "data/tokenize_text.py", tmp_path / "long.txt", f"--out={out}", "--jobs=2"]
    process = subprocess.Popen([*command, f"--vocab={vocabulary}"], stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    end = time.monotonic() + 20
    while not (out / "vocab.txt.part").exists() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)                                           # the workers are there
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    errors = process.communicate(timeout=20)[1]               # ends when no worker holds stderr any more
    assert process.returncode == status and "Traceback" not in errors, errors
    assert out.exists() == (number == signal.SIGKILL)
    assert ("nothing was written or replaced" in errors) == (number != signal.SIGKILL)
