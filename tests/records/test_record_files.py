"""records/tools/files.py and foreign files: both forms of a file, damaged ones, pipes, paths, terminal escapes."""
import gzip
import re
import zlib

import pytest

from record_common import call, events_of, make_run, make_sides, write_events

from tools import files                               # noqa: E402

TEXT = b"".join(b'{"type": "step", "step": %d}\n' % step for step in range(1000))
SPOOF = "\x1b[31mX\n\nverdict: faster: by 90 %\x07"

def test_write_bytes__is_a_gzip_file_that_depends_on_the_data_alone(tmp_path) -> None:
    """RFC 1952: magic, deflate, no flags (so no file name), no time, and extra flags 2 for the best compression."""
    for name in ("a.json.gz", "b.json.gz", "a.json"):
        files.write_bytes(tmp_path / name, TEXT)
    one, other = (tmp_path / "a.json.gz").read_bytes(), (tmp_path / "b.json.gz").read_bytes()
    assert one == other and one[:9] == b"\x1f\x8b\x08\0" + b"\0\0\0\0" + b"\x02"
    assert zlib.decompress(one, wbits=31) == TEXT == (tmp_path / "a.json").read_bytes()

def test_read_bytes__either_form_under_the_plain_name(tmp_path) -> None:
    (tmp_path / "plain").write_bytes(TEXT)
    (tmp_path / "two.gz").write_bytes(gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:]))
    for name in ("plain", "two", "two.gz"):
        assert files.read_bytes(tmp_path / name) == TEXT, name
    with pytest.raises(FileNotFoundError):
        files.read_bytes(tmp_path / "none")

WHOLE = gzip.compress(TEXT)

@pytest.mark.parametrize("damaged", [b"some text\n", WHOLE[:-20], WHOLE[:40] + bytes([WHOLE[40] ^ 255]) + WHOLE[41:]])
def test_read_bytes__damaged(tmp_path, damaged) -> None:
    (tmp_path / "log.jsonl.gz").write_bytes(damaged)
    status, out, error = call("show", tmp_path)
    assert (status, out) == (2, "") and re.search("gzip|ompress", error) and "Traceback" not in error

@pytest.mark.parametrize("name", ["../x", "runs/../../x", "", ".", "/tmp/x", "link/x"])
def test_inside__refuses_what_is_not_below(tmp_path, name) -> None:
    folder = tmp_path / "folder"
    (folder / "runs/001").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(files.ToolError, match="a path below this directory"):
        files.inside(folder, name)
    assert files.inside(folder, "runs/none/yet") == folder / "runs/none/yet"

def test_manifest_lines__a_file_of_another_tool_has_none(tmp_path) -> None:
    run = make_run(tmp_path / "runs/a", 0, 3.27, 80.0)
    (tmp_path / "manifest.jsonl").write_text('{"path": "a.bin"}\n')
    assert call("show", run)[0] == 0
    (tmp_path / "manifest.jsonl").write_text('["a", 1]\n')
    assert "damaged (AttributeError" in call("show", run)[2]

@pytest.mark.parametrize("where", ["hardware", "cause", "folder"])
def test_say__foreign_text_is_escaped(tmp_path, where) -> None:
    facts = dict(hardware=SPOOF) if where == "hardware" else {}
    a, b = make_sides(tmp_path / (SPOOF.replace("/", "") if where == "folder" else "x"), facts)
    if where == "cause":
        log = make_run(a / "more", 9, 3.2, 80.0) / "log.jsonl"
        write_events(log, [*events_of(log)[:5], dict(type="aborted", cause=SPOOF)])
    status, out, error = call("compare", a, b)
    assert status != 1 and (out + error).count("\nverdict: ") == 1, out + error
    assert (out + error).replace("\n", "").isprintable()
