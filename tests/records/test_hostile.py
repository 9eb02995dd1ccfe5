"""Foreign files of the record tools: pipes, wrong types, deep JSON, huge files, terminal escapes; words of errors."""
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from record_common import (OTHER_SOURCE, ROOT, call, compare, events_of, make_run, make_side,
                           make_sides, write_events)

from tools import files, read, report         # noqa: E402

CPU = dict(hardware="a CPU", world_size=1, all_phases=True)
DEEP = "[" * 200_000
SPOOF = "\x1b[31mX\n\nverdict: faster: by 90 %\x07"

@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with one record, 01 First."""
    place = tmp_path / "records"
    place.mkdir()
    runs = [make_run(tmp_path / f"runs/seed{seed}", seed, 2.1 + seed / 100, 90.0, **CPU) for seed in range(3)]
    status, _, error = call("new", "--records", place, "First", *runs, "--track=pocket", "--date=2026-01-01")
    assert status == 0, error
    return place

def command(*argv: object) -> subprocess.CompletedProcess:
    """Call a verb in a process that may hang, for at most 60 s."""
    return subprocess.run([sys.executable, ROOT / "records", *map(str, argv)], capture_output=True, text=True,
                          timeout=60)

def make_pipe(path: Path) -> None:
    """Replace a file by a named pipe that nobody writes to."""
    path.unlink()
    os.mkfifo(path)

@pytest.mark.parametrize("name", ["train_gpt.py", "logs/seed1/log.jsonl.gz", "logs/seed1/log.txt.gz", "result.json",
                                  "README.md"])
def test_check__a_pipe_in_a_record_is_an_error(root, name) -> None:
    """Earlier, `check` waited without end for a writer."""
    make_pipe(root / "2026-01-01_01_First" / name)
    done = command("check", "--records", root)
    assert done.returncode == 1 and "Traceback" not in done.stderr and done.stdout, done.stderr

@pytest.mark.parametrize("name", ["log.jsonl", "log.txt", "train_gpt.py"])
def test_new__a_pipe_in_a_run_is_an_error(root, tmp_path, name) -> None:
    run = make_run(tmp_path / "run", 7, 2.2, 90.0, **CPU)
    make_pipe(run / name)
    done = command("new", "--records", root, "X", run, "--kind=comparison")
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr

@pytest.mark.parametrize("name", ["idea.patch", "idea.py"])
def test_try__a_pipe_as_the_patch_is_an_error(tmp_path, name) -> None:
    os.mkfifo(tmp_path / name)
    done = command("try", tmp_path / name, f"--out={tmp_path}/out")
    assert done.returncode == 2 and "error: " in done.stderr and name in done.stderr, done.stderr

WRONG_TYPES = {
    "seed": dict(seed=[1]), "world_size": dict(world_size=None), "tables": dict(config=dict(tables="x")),
    "stages": dict(config=dict(stages=7)), "peak_memory_mib": dict(peak_memory_mib="x"),
    "memory of a kind": dict(peak_memory_mib={"consumption": "x"}), "started": dict(started=5),
    "source": dict(source_sha256={}), "time of a phase": dict(ms=None),
}

@pytest.mark.parametrize("name", WRONG_TYPES)
@pytest.mark.parametrize("verb", ["show", "new"])
def test_verbs__a_log_with_wrong_types_is_named(root, tmp_path, verb, name) -> None:
    """Earlier, TypeError and AttributeError ended in a traceback."""
    log = make_run(tmp_path / "run", 7, 2.2, 90.0, **CPU) / "log.jsonl"
    events = events_of(log)
    for event in events:
        for key, value in WRONG_TYPES[name].items():
            if key in event:
                event[key] = event[key] | value if key == "config" else value
    if name == "started":
        events[0]["started"] = 5
    write_events(log, events)
    argv = {"show": ["show", log.parent], "new": ["new", "--records", root, "X", log.parent, "--kind=comparison"]}
    status, _, error = call(*argv[verb])
    assert status == 2 and error.startswith("error: ") and "log.jsonl" in error, error

@pytest.mark.parametrize("text", [DEEP, '{"stated": 5}', "[]", "7", '{"stated": {"kind": "entry"}}', "\xff"])
def test_verbs__a_result_of_another_shape(root, text) -> None:
    """Earlier, RecursionError, TypeError and AttributeError ended in a traceback, depending on the verb.

    `table` leaves the record out, so that one damaged record does not hide the others.
    """
    (root / "2026-01-01_01_First/result.json").write_bytes(text.encode("latin-1"))
    assert call("check", "--records", root)[0] == 1
    for argv, expected in ((["table"], (0, "note: a record is left out: ")), (["new", "--update=01"], (2, "error: "))):
        status, _, error = call(argv[0], "--records", root, *argv[1:])
        assert status == expected[0] and error.startswith(f"{expected[1]}2026-01-01_01_First/result.json"), error

@pytest.mark.parametrize("line", [DEEP, "[]", "7", "null", '{"type": "end", "folder": "runs/a", "side": []',
                                  '{"type": "end", "folder": "runs/a", "pair": "1"'])
def test_manifest_lines__another_shape(tmp_path, line) -> None:
    run = make_run(tmp_path / "runs/a", 0, 3.27, 80.0)
    (tmp_path / "manifest.jsonl").write_text(line + "}\n")
    status, _, error = call("show", run)
    assert status == 2 and "a line that is not an event" in error, error

def test_consistency__a_result_without_a_key_is_a_finding(root, tmp_path) -> None:
    """Earlier, the error was `KeyError: 'train_time_ms'`, without the name of the run."""
    run = make_run(tmp_path / "seed7", 7, 2.2, 90.0, **CPU)
    *events, result = events_of(run / "log.jsonl")
    del result["train_time_ms"]
    write_events(run / "log.jsonl", [*events, result])
    status, _, error = call("new", "--records", root, "X", run, "--kind=comparison")
    assert status == 2 and "seed7, log: found KeyError: 'train_time_ms'" in error, error

def hostile_hardware(folder: Path) -> list[object]:
    make_sides(folder, dict(hardware=SPOOF), dict(hardware=SPOOF + "2"))
    return ["compare", folder / "a", folder / "b"]

def hostile_cause(folder: Path) -> list[object]:
    pool = make_side(folder / "a")
    log = make_run(pool / "more", 9, 3.2, 80.0) / "log.jsonl"
    write_events(log, [*events_of(log)[:5], dict(type="aborted", cause=SPOOF)])
    return ["show", pool]

def hostile_setting(folder: Path) -> list[object]:
    make_sides(folder, dict(config={SPOOF: 1}), dict(config={SPOOF: 2}))
    return ["compare", folder / "a", folder / "b"]

def hostile_folder(folder: Path) -> list[object]:
    return ["show", make_run(folder / SPOOF.replace("/", ""), 0, 3.27, 80.0)]

def hostile_bytes(folder: Path) -> list[object]:
    return ["show", make_run(Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")), 0, 3.27, 80.0)]

@pytest.mark.parametrize("make", [hostile_hardware, hostile_cause, hostile_setting, hostile_folder, hostile_bytes])
def test_say__foreign_text_is_escaped(tmp_path, make: Callable[[Path], list[object]]) -> None:
    """Earlier, a log could print its own verdict line and color the terminal."""
    status, out, error = call(*make(tmp_path))
    printed = out + error
    assert status != 1 and printed.count("\nverdict: ") == 1, printed
    assert printed.replace("\n", "").isprintable() and printed.encode("utf-8")

def test_markdown__a_bar_in_foreign_text_adds_no_column() -> None:
    assert report.markdown("a | b", [["x | y", 0.123456789]]).splitlines()[-1] == "| x \\| y | 0.12346 |"

def test_check__the_name_of_a_directory_is_escaped(root) -> None:
    (root / "2026-01-01_01_First").rename(root / "2026-01-01_01_\x1b[31m\nX")
    status, out, _ = call("check", "--records", root)
    assert status == 1 and "\x1b" not in out and "2026-01-01_01_\\x1b[31m\\nX: directory name" in out

def test_say__escapes_each_line(capsys) -> None:
    files.say("found: \x1b[31m\nexpected: \x07", sys.stderr)
    assert capsys.readouterr().err == "found: \\x1b[31m\nexpected: \\x07\n"

def test_one_line__escapes_what_is_not_printable() -> None:
    assert files.one_line("a\n\x1b\u202eb\udcff é") == "a\\n\\x1b\\u202eb\\udcff é"

def test_read_bytes__refuses_by_size_before_it_reads(tmp_path) -> None:
    """Earlier, a result.json or a log of any size was read into memory."""
    for name in ("result.json", "log.jsonl"):
        with open(tmp_path / name, "wb") as file:
            file.truncate((files.LIMIT_MIB << 20) + 1)        # a sparse file
        with pytest.raises(OSError, match=f"more than 256 MiB: .*{name}"):
            files.read_bytes(tmp_path / name)
    assert "more than 256 MiB" in read.read_runs([tmp_path / "log.jsonl"]).unread[0][1]

def test_hashes__a_large_file_takes_little_memory(root) -> None:
    """Earlier, `check` read each file of a record whole."""
    with open(root / "2026-01-01_01_First/large.bin", "wb") as file:
        file.truncate(1 << 30)
    limited = (f"import resource, sys\nsys.path.insert(0, {str(ROOT / 'records')!r})\nfrom pathlib import Path\n"
               "from tools import record\nresource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
               f"print(record.hashes(Path({str(root / '2026-01-01_01_First')!r}))['large.bin'])")
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout.strip()) == 64, done.stderr

def test_opened__every_error_names_the_file(tmp_path) -> None:
    with pytest.raises(OSError) as caught:
        with files.opened(Path("/proc/self/mem")) as file:
            file.read(1)                                      # EIO, without a name
    assert caught.value.filename == "/proc/self/mem"
    with pytest.raises(OSError, match="not a regular file"):
        files.read_bytes(Path("/dev/zero"))

def test_main__output_that_cannot_be_written(root) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, ROOT / "records", "table", f"--records={root}"], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: standard output\n"), done.stderr

def test_main__a_name_that_is_too_long_leaves_nothing(root, tmp_path) -> None:
    run = make_run(tmp_path / "run", 7, 2.2, 90.0, **CPU)
    before = sorted(root.rglob("*"))
    status, _, error = call("new", "--records", root, "X" * 300, run, "--kind=comparison")
    assert status == 2 and error.startswith("error: ") and "a NAME of at most 60" in error, error
    assert sorted(root.rglob("*")) == before

def test_stand__a_loss_of_nan_is_an_error(root, tmp_path) -> None:
    """Earlier, `stand` said "nan nats per token" and exited with status 0."""
    run = make_run(tmp_path / "run", 7, float("nan"), 90.0, **CPU)
    status, out, error = call("stand", "--records", root, run)
    assert (status, out) == (2, "") and "no finite loss" in error, out + error

def test_words__singular_and_plural(root, tmp_path) -> None:
    a, b = make_side(tmp_path / "a", [3.278], [80.0]), make_side(tmp_path / "b", [3.27], [79.0], source=OTHER_SOURCE)
    (a / "notes.txt").write_text("no log\n")
    _, out, _ = call("compare", a, b)
    assert "1 file not read" in out
    assert compare(a, a)["reason"] == "both sides have 1 run in common"
    assert "1 record: all" in call("check", "--records", root)[1]
    assert files.counted(1, "pair") == "1 pair" and files.counted(0, "pair") == "0 pairs"
