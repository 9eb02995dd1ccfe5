"""All data tools: they replace output completely or not at all, open only regular files, and report lost results."""
import contextlib
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Callable
from unittest.mock import Mock

import pytest
from common import ROOT, full_disk, no_large_files, write_shard
from data_common import TEXT, contents, failure, lock_folders, recorded_writes, wrong_flag

import cached_fineweb10B                                      # noqa: E402
import ngram                                                  # noqa: E402
import pocket                                                 # noqa: E402
import shard_files                                            # noqa: E402
import tokenize_text                                          # noqa: E402

def tokenize(source: Path, out: Path, *flags: str) -> None:
    tokenize_text.main([str(source), f"--out={out}", *flags])

def ngram_failure(pattern: object) -> str:
    return failure(ngram, f"--train={pattern}", f"--val={pattern}")

@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text(TEXT)
    return path

@pytest.fixture
def library(monkeypatch) -> None:
    """Replace the standard library with a small one, which pocket.py reads faster."""
    sources = {}
    for number in range(60):
        words = [f"word{number}of{count}" for count in range(40)]
        sources[f"file{number}.py"] = " ".join(words).encode()
    monkeypatch.setattr(pocket, "read_sources", {Path(sysconfig.get_path("stdlib")): sources}.get)
    monkeypatch.setattr(pocket, "MIN_VAL_TOKENS", 1)

def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)

@pytest.mark.parametrize("make, kind", [
    (Path.mkdir, "a directory"), (os.mkfifo, "a pipe or a device"), (link_to("/dev/zero"), "a pipe or a device"),
    (link_to("nowhere"), "a link that leads nowhere"), (link_to("odd.bin"), "a link that leads nowhere")])
def test_check_regular_file__every_tool_names_the_irregular_file(tmp_path, source, make, kind) -> None:
    odd, out, found = tmp_path / "odd.bin", tmp_path / "out", f"odd.bin / {kind} /"
    make(odd)
    if kind != "a directory":                                 # the tokenizer accepts a directory
        assert found in failure(tokenize_text, odd, f"--out={out}")
        assert found in failure(tokenize_text, source, f"--out={out}", "--val_files", odd)
    assert found in failure(tokenize_text, source, f"--out={out}", f"--vocab={odd}")
    assert not out.exists()
    assert found in ngram_failure(odd)
    (tmp_path / "fetched").mkdir()
    odd.rename(tmp_path / "fetched/fineweb_val_000000.bin")
    message = failure(cached_fineweb10B, 0, f"--out={tmp_path}/fetched")
    assert "fineweb_val_000000.bin / " in message and " / a shard / remove it" in message

def test_parse_folder__a_file_where_the_folder_should_be(tmp_path, source, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for tool, arguments in ((pocket, []), (tokenize_text, [source]), (cached_fineweb10B, [0])):
        assert "source.txt / " in failure(tool, *arguments, f"--out={source}")
        assert "/ 'Not a directory' /" in failure(tool, *arguments, f"--out={source}/below/it")
        for empty in ("", "/"):
            assert "expected the name of a folder" in wrong_flag(tool, capsys, *arguments, f"--out={empty}")
    assert contents(tmp_path) == {"source.txt": TEXT.encode()}

@pytest.mark.parametrize("when", ["writing", "flushing", "naming", "a signal"])
@pytest.mark.parametrize("old", [False, True])
def test_new_data_set__a_failed_call_changes_nothing(tmp_path, source, library, monkeypatch, when, old) -> None:
    for tool, arguments in ((tokenize_text, [source, "--tokenizer=bytes"]), (pocket, [])):
        out = tmp_path / tool.__name__
        if old:
            tool.main([*map(str, arguments), f"--out={out}"])
        before = old and contents(out)
        replace = os.replace

        def fail(start: Path, end: Path) -> None:
            if end == out and start.name == "new":
                raise KeyboardInterrupt(143) if when == "a signal" else OSError(errno.EBUSY, "Device or resource busy")
            replace(start, end)

        limit = no_large_files(300) if when == "writing" else contextlib.nullcontext()
        with monkeypatch.context() as patch, limit, pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            if when == "flushing":
                patch.setattr(os, "fsync", full_disk)
            if when in ("naming", "a signal"):
                patch.setattr(os, "replace", fail)
            tool.main([*map(str, arguments), f"--out={out}", "--force"])
        assert when in ("naming", "a signal") or "free disk space" in str(ended.value)
        assert out.exists() == old and (not old or contents(out) == before)
        assert not list(tmp_path.glob("*.part*"))

@pytest.mark.parametrize("name", ["set", "my [set]"])
def test_new_data_set__the_next_call_cleans_up_after_a_killed_one(tmp_path, source, name) -> None:
    out = tmp_path / name
    tokenize(source, out)
    before = contents(out)
    left = tmp_path / f"{name}.part-01234567"
    (left / "new").mkdir(parents=True)
    (left / "new/vocab.txt").write_text("half")
    (left / shard_files.MARKER_FILE).write_bytes(shard_files.marker_text(left))
    out.rename(left / "old")
    assert f"{name} / ['manifest.json', '{name}_train_000000.bin'" in failure(tokenize_text, source, f"--out={out}")
    assert contents(out) == before and not left.exists()
    tokenize(source, out, "--tokenizer=bytes", "--force")
    assert set(contents(out)) == set(before) and contents(out) != before

def test_find_unfinished__only_folders_of_killed_calls(tmp_path, source) -> None:
    """Other folders stay: similar names, a copied marker, a renamed folder, and a link to a folder with a marker."""
    marked = tmp_path / "elsewhere/set.part-00000000"
    marked.mkdir(parents=True)
    (marked / shard_files.MARKER_FILE).write_bytes(shard_files.marker_text(marked))
    for name in ("set.part", "set.part-11111111", "set.part-22222222", ".unfinished"):
        (tmp_path / name / "new").mkdir(parents=True)
        (tmp_path / name / "new/notes.txt").write_text("mine\n")
    (tmp_path / "set.part-11111111" / shard_files.MARKER_FILE).write_bytes(shard_files.marker_text(marked))
    (tmp_path / "set.part-00000000").symlink_to(marked)
    before = sorted(tmp_path.rglob("*"))
    assert shard_files.find_unfinished(tmp_path / "set") == []
    assert "nope.txt / no file /" in failure(tokenize_text, tmp_path / "nope.txt", f"--out={tmp_path}/set")
    assert "/ no file /" in failure(tokenize_text, tmp_path / "nope.txt", f"--out={tmp_path}/new/set", "--force")
    assert sorted(tmp_path.rglob("*")) == before, "a misspelt input creates and removes nothing"
    tokenize(source, tmp_path / "set")
    shutil.rmtree(tmp_path / "set")
    assert sorted(tmp_path.rglob("*")) == before

def test_named_files__skips_the_output_of_a_killed_call(tmp_path, source, capsys) -> None:
    left = tmp_path / "set.part-01234567"
    (left / "new").mkdir(parents=True)
    (left / "new/vocab.txt").write_text("half")
    (left / shard_files.MARKER_FILE).write_bytes(shard_files.marker_text(left))
    tokenize(tmp_path, tmp_path / "set")
    assert "1 files read, 2 files skipped: 2 from a killed call" in capsys.readouterr().out and not left.exists()

def test_write_file__an_existing_name(tmp_path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    for name in ("mine", "link"):
        with pytest.raises(SystemExit, match=f"(?s)/{name}\n.*File exists.*a writable folder.*another path"):
            with shard_files.exit_on_error():
                shard_files.write_file(tmp_path / name, b"x")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "link").is_symlink()

def test_write_file__a_file_system_without_room_for_names(tmp_path, monkeypatch) -> None:
    """Earlier, the hint was to move an existing file away. No file existed."""
    monkeypatch.setattr(Path, "open", full_disk)
    with pytest.raises(SystemExit, match="No space left on device") as caught, shard_files.exit_on_error():
        shard_files.write_file(tmp_path / "new", b"x")
    assert "existing" not in str(caught.value)

@pytest.mark.parametrize("error", [KeyboardInterrupt(130), OSError(errno.EBUSY, "Device or resource busy")])
def test_write_manifest__a_failed_call_leaves_the_old_one_and_no_part(tmp_path, monkeypatch, error) -> None:
    shard_files.write_manifest(tmp_path, {})
    before = contents(tmp_path)
    monkeypatch.setattr(os, "replace", Mock(side_effect=error))
    with pytest.raises(type(error)):
        shard_files.write_manifest(tmp_path, {"x.bin": {"bytes": 1, "sha256": "0"}})
    assert contents(tmp_path) == before

def test_pocket__foreign_files_are_not_taken_for_an_earlier_version(tmp_path, library) -> None:
    out = tmp_path / "pocket_made"
    out.mkdir()
    for name in ("pocket.json", "vocab.txt"):
        (out / name).write_text("mine\n")
    assert "/ a new or empty folder /" in failure(pocket, f"--out={out}")
    assert contents(out) == {"pocket.json": b"mine\n", "vocab.txt": b"mine\n"}

def test_new_data_set__is_flushed_before_it_gets_its_name(tmp_path, monkeypatch) -> None:
    calls = recorded_writes(monkeypatch)
    out = tmp_path / "set"
    with shard_files.new_data_set(out, "set", replace=False) as new:
        mark = (new.parent / shard_files.MARKER_FILE).stat().st_ino
        for name in ("vocab.txt", "set.bin"):
            shard_files.write_file(new / name, b"x")
    vocabulary, shard, manifest = [(out / name).stat().st_ino for name in ("vocab.txt", "set.bin", "manifest.json")]
    assert calls == [mark, vocabulary, shard, manifest, "manifest.json", out.stat().st_ino, "set",
                     tmp_path.stat().st_ino]

@pytest.mark.parametrize("flipped", [0, 1])
def test_check_content__a_mixture_or_a_flipped_bit(tmp_path, source, flipped) -> None:
    one, two, name = tmp_path / "one/x", tmp_path / "two/x", "x_train_000000.bin"
    tokenize(source, one, "--vocab_size=300")
    tokenize(source, two, "--vocab_size=400")
    content = bytearray((two / name).read_bytes())
    if flipped:
        content = bytearray((one / name).read_bytes())
        content[1027] ^= 1
    (one / name).write_bytes(content)
    assert f"{name} / content that differs from manifest.json /" in ngram_failure(f"{one}/x_train_*.bin")

def test_check_content__a_file_without_a_manifest_entry_is_not_hashed(tmp_path, monkeypatch) -> None:
    """A shard of FineWeb has 200 MB. Earlier, the downloader hashed each one twice."""
    path = write_shard(tmp_path / "x.bin", [0, 1, 2])
    shard_files.write_manifest(tmp_path, {"other.bin": shard_files.manifest_entry(path)})
    monkeypatch.setattr(shard_files, "manifest_entry", Mock(side_effect=AssertionError))
    shard_files.check_content(path)

def test_manifest_entry__an_error_while_reading_names_the_file(tmp_path, monkeypatch) -> None:
    path = write_shard(tmp_path / "x.bin", [0, 1, 2])
    shard_files.write_manifest(tmp_path, {"x.bin": shard_files.manifest_entry(path)})
    monkeypatch.setattr(shard_files.hashlib, "file_digest", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert f"{path} / 'Input/output error' /" in ngram_failure(path)

@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"format": 2, "files": {}}', b'{"format": 1, "files": [1]}',
                                     b'{"format": 1, "files": {"a": 1}}', b"[" * 100_000, b"\xff"])
def test_read_manifest__invalid_manifests(tmp_path, source, content) -> None:
    out = tmp_path / "set"
    out.mkdir()
    (out / "manifest.json").write_bytes(content)
    write_shard(out / "x.bin", [0, 1, 2])
    assert "manifest.json / not a manifest of a data tool /" in ngram_failure(out / "x.bin")
    (out / "x.bin").unlink()
    tokenize(source, out, "--force")
    assert set(shard_files.read_manifest(out)) == {"set_train_000000.bin", "set_val_000000.bin", "vocab.txt"}

def test_read_header__a_shard_of_0_tokens(tmp_path) -> None:
    """Earlier, what was found equaled what was expected."""
    path = write_shard(tmp_path / "x.bin", [])
    with pytest.raises(shard_files.DataError) as caught:
        shard_files.read_header(path)
    _, found, expected, _ = caught.value.args
    assert not expected.startswith(found), (found, expected)

def test_read_small_file__the_size_is_checked_before_reading(tmp_path, source) -> None:
    """The files are sparse and take no disk space."""
    write_shard(tmp_path / "x.bin", [0, 1, 2])
    for name in ("manifest.json", "vocab.txt"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, (64 << 20) + 1)
    assert "manifest.json / 67,108,865 bytes / a manifest" in ngram_failure(tmp_path / "x.bin")
    said = failure(tokenize_text, source, f"--out={tmp_path}/out", f"--vocab={tmp_path}/vocab.txt")
    assert "vocab.txt / 67,108,865 bytes / lines of base64, a space, and an id; at most 67,108,864 bytes /" in said

def test_read_manifest__the_hint_for_an_invalid_manifest_works(tmp_path, capsys) -> None:
    shard = write_shard(tmp_path / "fineweb_val_000000.bin", [50256, *range(99)])
    (tmp_path / "manifest.json").write_text("[]")
    for message in (failure(cached_fineweb10B, 0, f"--out={tmp_path}"), ngram_failure(shard)):
        assert message.endswith(" / move it away"), "cached_fineweb10B.py has no --force"
    (tmp_path / "manifest.json").rename(tmp_path / "moved.json")
    cached_fineweb10B.main(["0", f"--out={tmp_path}"])
    ngram.main([f"--train={shard}", f"--val={shard}"])
    assert "validation shard, complete" in capsys.readouterr().out

def test_unreadable_folders__ngram_refuses_them(tmp_path, monkeypatch) -> None:
    for name in ("locked", "open"):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "a.bin", [0, 1, 2])
    lock_folders(monkeypatch, "locked")
    assert f"unreadable folders: ['{tmp_path}/locked'] /" in ngram_failure(tmp_path / "*/a.bin")
    assert shard_files.unreadable_folders(str(tmp_path / "open/*.bin")) == []

def test_check_replaceable__foreign_files_are_not_replaced(tmp_path, source, library) -> None:
    out = tmp_path / "set"
    tokenize(source, out)
    before = contents(out)
    assert "or replace the data set with --force" in failure(tokenize_text, source, f"--out={out}")
    assert "/ set_train_000000.bin /" in failure(pocket, f"--out={out}", "--force")
    os.mkfifo(out / "set_train_000001.bin")
    assert "/ set_train_000001.bin / a new folder" in failure(tokenize_text, source, f"--out={out}", "--force")
    (out / "set_train_000001.bin").unlink()
    (out / "notes.txt").write_text("mine\n")
    assert "/ notes.txt / a new folder, or one that contains only a data set named set /" in failure(
        tokenize_text, source, f"--out={out}", "--force")
    assert contents(out) == before | {"notes.txt": b"mine\n"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "vocab.txt").write_text("mine\n")
    for tool, arguments in ((tokenize_text, [source]), (pocket, [])):
        assert "/ ['vocab.txt'] / a new or empty folder" in failure(tool, *arguments, f"--out={other}")
    assert contents(other) == {"vocab.txt": b"mine\n"}

def test_print_result__a_console_that_cannot_encode(tmp_path, source, monkeypatch) -> None:
    console = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", console)
    tokenize(source, tmp_path / "zażółć", "--tokenizer=bytes")
    assert b"za\\u017c\xf3\\u0142\\u0107_train_*.bin: 1 shards" in console.buffer.getvalue()

def test_print__escapes_control_characters(tmp_path, monkeypatch, capsys) -> None:
    """A file name and a message may come from somebody else. A terminal executes control characters."""
    name = "a\x1b[31m\r\x9b.txt"
    assert "a\\x1b[31m\\x0d\\x9b.txt / no text (" in failure(tokenize_text, tmp_path / name, f"--out={tmp_path}/out")
    (tmp_path / name).write_text(TEXT)
    tokenize(tmp_path / name, tmp_path / "out\x1b[2J", "--tokenizer=bytes")
    shard_files.print_status(name)
    printed = capsys.readouterr()
    assert "out\\x1b[2J_train_*.bin: 1 shards" in printed.out and "a\\x1b[31m\\x0d\\x9b.txt\n" in printed.err
    assert not {"\x1b", "\r", "\x9b"} & {*printed.out, *printed.err}

def test_print_result__the_hint_works(tmp_path, source, monkeypatch, capsys) -> None:
    """A repeated command needs --force if it creates a data set."""
    out = f"--out={tmp_path}/out"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open("/dev/full", "w"))
        message = failure(tokenize_text, source, out)
    assert message.endswith("repeat the command with --force, which creates the same data set again")
    before = contents(tmp_path / "out")
    tokenize(source, tmp_path / "out", "--force")
    assert contents(tmp_path / "out") == before and "out_train_*.bin: 1 shards" in capsys.readouterr().out

@pytest.mark.parametrize("stdout, found", [("/dev/full", "No space left on device"), (None, "'NoneType' object")])
def test_print_result__a_lost_result_is_an_error(tmp_path, source, library, monkeypatch, stdout, found) -> None:
    for tool, arguments in ((tokenize_text, [source]), (pocket, []), (pocket, [])):
        out = tmp_path / tool.__name__
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout and open(stdout, "w"))
            message = failure(tool, *arguments, f"--out={out}")
        assert message.startswith("stdout / ") and found in message and "accepts the result" in message
        assert len(shard_files.read_manifest(out)) >= 3

def test_run_main__status_and_no_stack_trace(tmp_path) -> None:
    write_shard(tmp_path / "shard.bin", [0, 1, 2, 1, 2])
    program = f"{sys.executable} {ROOT}/data/ngram.py --train=shard.bin --val"
    script = f"{program}=shard.bin >/dev/full; echo $?; {program}=none; echo $?; {program}=shard.bin 2>&- | tail -n 1"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    one, two, result = done.stdout.splitlines()
    assert (one, two) == ("1", "1") and '"trigram_nats"' in result
    assert done.stderr.count("error: ") == 2 and "Traceback" not in done.stderr and "ignored" not in done.stderr

@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_run_main__a_signal_leaves_no_output(tmp_path, number, status) -> None:
    (tmp_path / "long.txt").write_text("some text, more text and so on\n" * 1_000_000)
    out = tmp_path / "out"
    command = [sys.executable, ROOT / "data/tokenize_text.py", tmp_path / "long.txt", f"--out={out}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("out.part-*/new")) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == status and "Traceback" not in errors, errors
    left = shard_files.find_unfinished(out)
    assert not out.exists() and left == list(tmp_path.glob("out.part*")) and len(left) == (number == signal.SIGKILL)
    assert ("interrupted" in errors) == (number != signal.SIGKILL)
