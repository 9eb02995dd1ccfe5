"""The console: what it cannot show is escaped, what it does not take is missed aloud, and training goes on."""
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
from common import ROOT, Run, random_stream, write_shard

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


def text_console(encoding: str) -> io.TextIOWrapper:
    """A console as Python opens it: strict about what it can encode."""
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def shown(console: io.TextIOWrapper) -> str:
    return console.buffer.getvalue().decode(console.encoding)


def main_on(console, argv: list[str], errors=None) -> tuple[int, str]:
    """(status, what stands on stderr) of main() with this standard output."""
    errors = io.StringIO() if errors is None else errors
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(errors):
        status = tg.main(argv)
    return status, errors.getvalue()


def train_flags(data: Path, folder: Path, *more: str) -> list[str]:
    files = [f"--train_files={data}/train_*.bin", f"--val_files={data}/val_*.bin"]
    return ["--preset=tiny", "--device=cpu", "--max_steps=1", "--val_every=0", f"--run_dir={folder}", *files, *more]


def check_whole_log(folder: Path) -> None:
    """The log ends with the result, and holds nothing that is not a line of it."""
    kinds = [event["type"] for event in Run(folder, 0, "", "").events]
    assert kinds[0] == "header" and kinds[-1] == "result" and "aborted" not in kinds
    assert not [path.name for path in folder.iterdir() if path.name.startswith((".", "tmp"))]


def nothing(*_) -> None:
    pass


@pytest.fixture
def no_warm_up(monkeypatch) -> None:
    monkeypatch.setattr(tg, "warm_up", nothing)                      # no matter to a console


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    status, errors = main_on(text_console("utf-8"), train_flags(data, folder / "run", f"--save={folder / 'w'}"))
    assert status == 0, errors
    return folder / "w"


def one_of_each(*_) -> list[int]:
    return [0, 1, 2, 3]


# ---- encodings ------------------------------------------------------------------------------------------------------

ESCAPES = {
    "utf-8": PIECES[:3],
    "latin-1": ["é", "\\ufb01", "\\U0001f642"],
    "ascii": ["\\xe9", "\\ufb01", "\\U0001f642"],
}


@pytest.mark.parametrize("encoding", ESCAPES)
def test_letters_that_a_console_does_not_know_are_escaped(saved, monkeypatch, encoding):
    monkeypatch.setattr(tg, "generate", one_of_each)
    console = text_console(encoding)
    status, errors = main_on(console, [f"--sample={saved}", "x"])
    assert (status, errors) == (0, "")
    assert shown(console) == "x" + "".join(ESCAPES[encoding]) + "x\n"


def test_a_run_shows_its_sample_on_any_console(data, tmp_path, no_warm_up, monkeypatch):
    """Its last line is the result, whose folder's name has to be read as it is."""
    monkeypatch.setattr(tg, "generate", one_of_each)
    console = text_console("latin-1")
    status, errors = main_on(console, train_flags(data, tmp_path / "läuft ﬁ"))
    assert (status, errors) == (0, "")
    lines = shown(console).splitlines()
    assert any(" sample " in line for line in lines) and "\\ufb01" in "".join(lines)
    assert json.loads(lines[-1])["run_dir"] == str(tmp_path / "läuft ﬁ")
    check_whole_log(tmp_path / "läuft ﬁ")


def test_a_prompt_that_is_no_text_is_shown_escaped(capsys):
    tg.Console().say("caf\udce9")                                    # a byte of argv that is no UTF-8
    assert capsys.readouterr().out == "caf\\udce9\n"


# ---- consoles that take nothing -------------------------------------------------------------------------------------

class Pipe(io.StringIO):
    """Takes so many lines; then its reader is gone."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines = lines

    def write(self, text: str) -> int:
        self.lines -= text.count("\n")
        if self.lines < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def full() -> io.TextIOWrapper:
    return open("/dev/full", "w")


def never_opened() -> None:
    return None


def cut() -> Pipe:
    return Pipe(3)


def closed() -> io.StringIO:
    console = io.StringIO()
    console.close()
    return console


DEAF = {"full": (full, "No space left on device"), "never opened": (never_opened, "it is closed"),
        "closed": (closed, "closed file"), "cut": (cut, "Broken pipe")}


@pytest.mark.parametrize("kind", DEAF)
def test_a_run_whose_result_cannot_be_printed_ends_with_1_and_a_whole_log(data, tmp_path, no_warm_up, kind):
    make, reason = DEAF[kind]
    status, errors = main_on(make(), train_flags(data, tmp_path / "run", "--sample_tokens=0"))
    assert status == 1
    first, *message = errors.splitlines()
    assert first == f"standard output takes no lines: {reason}" or reason in first
    assert message[0] == "RunError: printing the result" and reason in message[1]
    assert str(tmp_path / "run") in message[3] and len(message) == 4, "said once, however many lines were lost"
    check_whole_log(tmp_path / "run")
    assert len(Run(tmp_path / "run", 0, "", "").lines) > 10


@pytest.mark.parametrize("flags", [["--help"], ["--preset=tiny", "-h"]])
def test_help_that_nobody_sees_ends_with_1(flags):
    status, errors = main_on(full(), flags)
    assert status == 1 and "takes no lines: No space left on device" in errors


@pytest.mark.parametrize("kind", ["full", "never opened"])
def test_a_sample_that_cannot_be_printed_ends_with_1(saved, kind):
    make, reason = DEAF[kind]
    status, errors = main_on(make(), [f"--sample={saved}", "x", "--sample_tokens=2"])
    assert status == 1 and "RunError: printing the result" in errors and reason in errors


def test_lines_lost_on_the_way_are_spoken_of_and_the_result_counts(data, tmp_path, no_warm_up, monkeypatch):
    """A disk that was full for a while: the log has those lines, the console the result."""
    console = Pipe(3)
    report = tg.report

    def room_again(*args):
        console.lines = 1000
        return report(*args)

    monkeypatch.setattr(tg, "report", room_again)
    status, errors = main_on(console, train_flags(data, tmp_path / "run", "--sample_tokens=0"))
    assert (status, errors) == (0, "standard output takes no lines: Broken pipe\n")
    assert json.loads(console.getvalue().splitlines()[-1])["type"] == "result"


def test_training_does_without_stderr(data, tmp_path, no_warm_up, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    console = text_console("utf-8")
    with contextlib.redirect_stdout(console):
        status = tg.main(train_flags(data, tmp_path / "run"))
    assert status == 0 and json.loads(shown(console).splitlines()[-1])["type"] == "result"
    check_whole_log(tmp_path / "run")


NUMBERS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import train_gpt as tg
status = tg.main(sys.argv[3:])
with open(sys.argv[2], "w") as file:
    print(*(os.readlink(f"/proc/self/fd/{number}") for number in range(3)), file=file)
os._exit(status)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks the kernel which file has which number")
def test_files_do_not_get_the_numbers_of_closed_streams(data, tmp_path):
    """All three closed: what a library writes to number 2 must not land in a log."""
    flags = train_flags(data, tmp_path / "run", "--sample_tokens=0")
    command = [sys.executable, "-c", NUMBERS, str(ROOT), str(tmp_path / "numbers"), *flags]
    shell = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh"]
    done = subprocess.run(shell + command, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, "the result was not printed"
    assert (tmp_path / "numbers").read_text().split() == [os.devnull] * 3
    check_whole_log(tmp_path / "run")
