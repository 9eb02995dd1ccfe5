"""The console: what it cannot show is escaped, what it does not take is missed, and training goes on."""
from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import ROOT, Run, main_here, random_stream, write_shard

import train_gpt as tg

VOCAB = 21                                                           # the last is the document start
PIECES = ["é", "ﬁ", "🙂", "x"]                                        # latin-1 has the first and the last, ASCII "x"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Shards whose text is full of letters that few consoles know."""
    folder = tmp_path_factory.mktemp("data")
    stream = random_stream(0, 9000, VOCAB, VOCAB - 1)
    write_shard(folder / "train_0.bin", stream[:7000], VOCAB, VOCAB - 1)
    write_shard(folder / "val_0.bin", stream[7000:], VOCAB, VOCAB - 1)
    lines = []
    for token in range(VOCAB - 1):
        piece = PIECES[token % len(PIECES)] * (1 + token // len(PIECES))
        lines.append(f"{base64.b64encode(piece.encode()).decode()} {token}\n")
    (folder / "vocab.txt").write_text("".join(lines))
    return folder


def train_flags(data: Path, folder: Path, *more: str) -> list[str]:
    files = [f"--train_files={data}/train_*.bin", f"--val_files={data}/val_*.bin"]
    return ["--preset=tiny", "--device=cpu", "--max_steps=1", "--val_every=0", f"--run_dir={folder}", *files, *more]


def process(*flags: str, encoding: str = "utf-8", stdout=subprocess.PIPE) -> subprocess.CompletedProcess:
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONIOENCODING=encoding)
    command = [sys.executable, str(ROOT / "train_gpt.py"), *flags]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=120, env=environment)


def check_whole_log(folder: Path) -> None:
    """The log ends with the result, and holds nothing that is not a line of it."""
    kinds = [event["type"] for event in Run(folder, 0, "", "").events]
    assert kinds[0] == "header" and kinds[-1] == "result" and "aborted" not in kinds
    assert not [path.name for path in folder.iterdir() if path.name.startswith((".", "tmp"))]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_a_run_shows_its_sample_on_any_console(data, tmp_path, encoding):
    """Letters that the console does not know are escaped; the last line is the result, whose folder reads as it is."""
    folder = tmp_path / "läuft ﬁ"
    done = process(*train_flags(data, folder, "--sample_tokens=40"), encoding=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode(encoding).splitlines()
    assert any(" sample " in line for line in lines)
    named, = [line for line in lines if "; logs in " in line]
    assert named.endswith(str(folder).encode(encoding, "backslashreplace").decode(encoding))
    assert json.loads(lines[-1])["run_dir"] == str(folder)
    check_whole_log(folder)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_console_ends_with_1_and_a_whole_log(data, tmp_path):
    with open("/dev/full", "w") as full:
        done = process(*train_flags(data, tmp_path / "run", "--sample_tokens=0"), stdout=full)
        asked = process("--help", stdout=full)
    for ended in (done, asked):
        message = ended.stderr.decode()
        assert ended.returncode == 1 and message.startswith("RunError: standard output"), message
        assert "No space left on device" in message and "redirect it" in message and "Traceback" not in message
    check_whole_log(tmp_path / "run")
    assert len(Run(tmp_path / "run", 0, "", "").lines) > 10


class Pipe(io.StringIO):
    """Takes so many lines; then its reader is gone."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines = lines

    def write(self, text: str) -> int:
        if self.lines <= 0:
            raise BrokenPipeError(32, "Broken pipe")
        self.lines -= text.count("\n")
        return super().write(text)


@pytest.mark.parametrize("comes_back", [False, True])
def test_lines_that_are_lost_on_the_way_do_not_end_a_run(data, tmp_path, monkeypatch, comes_back):
    """A disk that was full for a while: the log has those lines, the console the result; without it the status is 1."""
    console, errors, report = Pipe(3), io.StringIO(), tg.report

    def room_again(*args):
        console.lines = 1000 * comes_back
        report(*args)

    monkeypatch.setattr(tg, "report", room_again)
    monkeypatch.setattr(tg, "warm_up", lambda *_: None)                       # no matter to a console
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(errors):
        status = main_here(train_flags(data, tmp_path / "run", "--sample_tokens=0"))
    check_whole_log(tmp_path / "run")
    if comes_back:
        assert (status, errors.getvalue()) == (0, "")
        assert json.loads(console.getvalue().splitlines()[-1])["type"] == "result"
    else:
        assert status == 1 and "Broken pipe" in errors.getvalue()


def test_training_does_without_stderr(data, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with contextlib.redirect_stdout(io.StringIO()) as console:
        status = main_here(train_flags(data, tmp_path / "run"))
    assert status == 0 and json.loads(console.getvalue().splitlines()[-1])["type"] == "result"
    check_whole_log(tmp_path / "run")


def test_a_terminal_gets_a_line_of_progress(data, tmp_path):
    command = [sys.executable, str(ROOT / "train_gpt.py"), *train_flags(data, tmp_path / "run", "--sample_tokens=0")]
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    done = subprocess.run([sys.executable, "-c", spawn, *command], capture_output=True, text=True, timeout=120,
                          env=os.environ | dict(OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step:1/12 train_time:" in done.stdout, done.stdout
    check_whole_log(tmp_path / "run")
