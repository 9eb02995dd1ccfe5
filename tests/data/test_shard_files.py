"""All data tools: they replace output completely or not at all, refuse damaged files, and end with a status."""
import contextlib
import errno
import io
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from common import ROOT, no_large_files, write_shard
from data_common import TEXT, contents, failure

import cached_fineweb10B                                      # noqa: E402
import pocket                                                 # noqa: E402
import tokenize_text                                          # noqa: E402

def tokenize(source: Path, out: Path, *flags: str) -> None:
    tokenize_text.main([str(source), f"--out={out}", "--tokenizer=bytes", *flags])

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

@pytest.mark.parametrize("tool", [tokenize_text, pocket, cached_fineweb10B])
def test_parse_folder__a_name_that_is_no_folder(tmp_path, source, capsys, tool) -> None:
    arguments = [str(source)] * (tool is tokenize_text)
    assert "source.txt" in failure(tool, *arguments, f"--out={source}")
    with pytest.raises(SystemExit, match="2"):
        tool.main([*arguments, "--out="])
    assert "is not the name of a folder" in capsys.readouterr().err and source.read_text() == TEXT

@pytest.mark.parametrize("when", ["writing", "naming", "a signal"])
@pytest.mark.parametrize("old", [False, True])
def test_new_data_set__a_failed_call_changes_nothing(tmp_path, source, library, monkeypatch, when, old) -> None:
    for tool, arguments in ((tokenize_text, [source, "--tokenizer=bytes"]), (pocket, [])):
        out = tmp_path / tool.__name__
        if old:
            tool.main([*map(str, arguments), f"--out={out}"])
        before = old and contents(out)
        replace = os.replace

        def fail(start: Path, end: Path) -> None:
            if end == out and "failed" not in vars(fail):     # else the old folder gets its name back
                fail.failed = True
                raise KeyboardInterrupt(143) if when == "a signal" else OSError(errno.EBUSY, "Device or resource busy")
            replace(start, end)

        limit = no_large_files(300) if when == "writing" else contextlib.nullcontext()
        with monkeypatch.context() as patch, limit, pytest.raises((OSError, KeyboardInterrupt)):
            if when != "writing":
                patch.setattr(os, "replace", fail)
            tool.main([*map(str, arguments), f"--out={out}", "--force"])
        assert out.exists() == old and (not old or contents(out) == before)
        assert not list(tmp_path.glob("*.part*"))

def test_make_data_set__again_gives_the_same_bytes(tmp_path, library) -> None:
    for name in "ab":
        pocket.main([f"--out={tmp_path / name}"])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")

def test_check_replaceable__foreign_files_are_not_replaced(tmp_path, source, library) -> None:
    out = tmp_path / "set"
    tokenize(source, out)
    before = contents(out)
    assert "or replace it with --force" in failure(tokenize_text, source, f"--out={out}")
    assert "['set_train_000000.bin']" in failure(pocket, f"--out={out}", "--force")
    (out / "notes.txt").write_text("mine\n")
    assert "['notes.txt']" in failure(tokenize_text, source, f"--out={out}", "--force")
    assert contents(out) == before | {"notes.txt": b"mine\n"}
    (out / "notes.txt").unlink()
    (out / "tokenizer.json").write_text("of an earlier call")
    tokenize(source, out, "--force", "--max_doc_tokens=99")
    assert contents(out).keys() == before.keys() and contents(out) != before

@pytest.mark.parametrize("flipped", [0, 1])
def test_check_content__a_mixture_or_a_flipped_bit(tmp_path, source, flipped) -> None:
    one, two, name = tmp_path / "one/x", tmp_path / "two/x", "x_train_000000.bin"
    tokenize(source, one)
    tokenize(source, two, "--max_doc_tokens=99")
    content = bytearray((two / name).read_bytes())
    if flipped:
        content = bytearray((one / name).read_bytes())
        content[1027] ^= 1
    (one / name).write_bytes(content)
    assert f"{name} is not the file that manifest.json describes" in cached_fineweb10B.find_problem(one / name)

@pytest.mark.parametrize("content", [b"[]", b"{", b'{"format": 2, "files": {}}', b'{"format": 1, "files": [1]}',
                                     b'{"format": 1, "files": {"a": 1}}', b"\xff"])
def test_read_manifest__the_hint_for_an_invalid_one_works(tmp_path, content) -> None:
    write_shard(tmp_path / "fineweb_val_000000.bin", [50256, *range(99)])
    (tmp_path / "manifest.json").write_bytes(content)
    message = failure(cached_fineweb10B, 0, f"--out={tmp_path}")
    assert message.endswith("manifest.json is not a manifest of format 1: move it away")
    (tmp_path / "manifest.json").rename(tmp_path / "moved.json")
    cached_fineweb10B.main(["0", f"--out={tmp_path}"])

def test_print_result__what_a_console_cannot_encode_and_what_it_would_execute(tmp_path, source, monkeypatch) -> None:
    console = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", console)
    tokenize(source, tmp_path / "zażółć\x1b[2J")
    assert b"za\\u017c\xf3\\u0142\\u0107\\x1b[2J_train_*.bin: 1 shards" in console.buffer.getvalue()

def test_run_main__status_and_no_stack_trace(tmp_path, source) -> None:
    program = f"{sys.executable} {ROOT}/data/tokenize_text.py {source} --tokenizer=bytes --force --out=a"
    script = f"{program} >/dev/full; echo $?; {program} --val_files none; echo $?; {program} | tail -n 1"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    one, two, result = done.stdout.splitlines()
    assert one != "0" and two == "1" and result.startswith("./run.sh ")
    assert done.stderr.count("error: ") == 2 and "Traceback" not in done.stderr
