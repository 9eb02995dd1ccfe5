"""records/tools/files.py: both forms of a file read the same; damaged and oversized files are refused."""
import gzip
import json
import subprocess
import zlib
from pathlib import Path

import pytest

from record_common import A_LOSSES, call, make_peer, make_run, make_side, sha256

from tools import files, read, record                         # noqa: E402

TEXT = b"".join(b'{"type": "step", "step": %d}\n' % step for step in range(1000))

def compress_below(folder: Path, *names: str) -> int:
    """Compress files with the command `gzip`, which stores time and file name; return how many."""
    paths = [path for name in names for path in folder.rglob(name)]
    for path in paths:
        subprocess.run(["gzip", "-6", str(path)], check=True, timeout=60)
    return len(paths)

def test_write_bytes__is_a_gzip_file_that_depends_on_the_data_alone(tmp_path) -> None:
    """RFC 1952: magic, deflate, no flags (so no file name), no time, and extra flags 2 for the best compression."""
    for name in ("a.json.gz", "b.json.gz", "a.json"):
        files.write_bytes(tmp_path / name, TEXT)
    one, other = (tmp_path / "a.json.gz").read_bytes(), (tmp_path / "b.json.gz").read_bytes()
    assert one == other and one[:9] == b"\x1f\x8b\x08\0" + b"\0\0\0\0" + b"\x02"
    assert zlib.decompress(one, wbits=31) == TEXT == (tmp_path / "a.json").read_bytes()

def test_read_bytes__either_form_under_the_plain_name(tmp_path) -> None:
    (tmp_path / "plain").write_bytes(TEXT)
    (tmp_path / "one.gz").write_bytes(gzip.compress(TEXT, 1))
    (tmp_path / "two.gz").write_bytes(gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:]))
    for name in ("plain", "one", "one.gz", "two"):
        assert files.read_bytes(tmp_path / name) == TEXT, name
    (tmp_path / "one").write_bytes(b"the plain file counts where both exist")
    assert files.read_bytes(tmp_path / "one") != TEXT == files.read_bytes(tmp_path / "one.gz")
    with pytest.raises(FileNotFoundError):
        files.read_bytes(tmp_path / "none")

WHOLE = gzip.compress(TEXT)
DAMAGED = {"not gzip": b"some text\n", "cut": WHOLE[:-20], "cut in the header": WHOLE[:5], "empty": b"\x1f",
           "another checksum": WHOLE[:-8] + b"\0\0\0\0" + WHOLE[-4:], "text after it": WHOLE + b"more",
           "a changed byte": WHOLE[:40] + bytes([WHOLE[40] ^ 255]) + WHOLE[41:]}

@pytest.mark.parametrize("name", DAMAGED)
def test_read_bytes__damaged(tmp_path, name) -> None:
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(OSError, match="not a whole gzip file"):
        files.read_bytes(path)
    (_, reason), = read.read_runs([tmp_path]).unread
    assert "not a whole gzip file" in reason
    status, out, error = call("show", tmp_path)
    assert (status, out) == (2, "") and "not a whole gzip file" in error and "Traceback" not in error

def test_read_bytes__what_decompresses_to_more_than_the_limit(tmp_path) -> None:
    """This file of less than 1 MiB expands to 512 MiB. It is read up to the limit, and refused with a message."""
    bomb = tmp_path / "log.jsonl.gz"
    with gzip.open(bomb, "wb", 9) as file:
        for _ in range(512):
            file.write(bytes(2**20))
    assert bomb.stat().st_size < 2**20
    status, out, error = call("show", tmp_path)
    assert (status, out) == (2, "") and "more than 256 MiB when decompressed" in error

def test_limit__to_the_byte(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "LIMIT_MIB", 1)
    full = bytes(2**20)
    files.write_bytes(tmp_path / "full.gz", full)
    assert files.read_bytes(tmp_path / "full") == full
    (tmp_path / "more.gz").write_bytes(gzip.compress(full + b"x"))
    with pytest.raises(OSError, match="more than 1 MiB"):
        files.read_bytes(tmp_path / "more")
    with pytest.raises(OSError, match="more than 1 MiB"):
        files.write_bytes(tmp_path / "written.gz", full + b"x")
    assert not (tmp_path / "written.gz").exists(), "nothing is written that cannot be read"

def said(*argv: object) -> tuple[int, str, str]:
    """Call a verb; return its status and output without the suffix .gz."""
    status, out, error = call(*argv)
    return status, out.replace(".gz", ""), error.replace(".gz", "")

def test_verbs__same_output_for_both_forms(tmp_path, monkeypatch) -> None:
    """A pool of this trainer, one of the public records, and one run, each given as a directory and as a file."""
    monkeypatch.chdir(tmp_path)
    make_side(Path("pool"))
    make_run(Path("one"), 9, A_LOSSES[0], 80.0)
    for number, seconds in enumerate((79.0, 80.0, 81.0)):
        make_peer(Path(f"peers/{number}.txt"), 3.2785 + number / 1000, seconds, started=1_780_000_000 + 600 * number)
    verbs = [("show", "pool"), ("show", "pool/seed1/log.jsonl"), ("show", "pool/seed1/log.txt"), ("show", "peers"),
             ("compare", "pool", "peers"), ("place", "one", "pool"), ("place", "one/log.jsonl", "peers"),
             ("show", "pool", "peers", "one", "--json")]
    before = [said(*argv) for argv in verbs]
    assert [status for status, _, _ in before[:4]] == [0, 0, 0, 0], before
    assert compress_below(Path(), "log.jsonl", "log.txt", "?.txt") == 15
    assert [said(*argv) for argv in verbs] == before

@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A record whose logs `new` has compressed."""
    root = tmp_path / "records"
    root.mkdir()
    for seed, loss in enumerate((2.171, 2.144, 2.162)):
        make_run(tmp_path / f"runs/seed{seed}", seed, loss, 90.0 + seed, hardware="a CPU", world_size=1,
                 all_phases=True)
    status, _, error = call("new", "--records", root, "First", tmp_path / "runs", "--track=pocket")
    assert status == 0, error
    return root

def test_new__stores_logs_compressed_and_hashes_their_contents(root, tmp_path) -> None:
    folder, = record.folders(root)
    names = sorted(path.name for path in (folder / "logs").rglob("*") if path.is_file())
    assert names == ["log.jsonl.gz"] * 3 + ["log.txt.gz"] * 3
    hashes = json.loads((folder / "result.json").read_text())["files"]
    for name in ("seed1/log.jsonl", "seed1/log.txt"):
        assert hashes[f"logs/{name}"] == sha256((tmp_path / "runs" / name).read_text())
    assert call("check", "--records", root)[0] == 0
    others = tmp_path / "others"
    others.mkdir()
    status, _, error = call("new", "--records", others, "Again", folder / "logs", "--track=pocket")
    assert status == 0, error
    again, = record.folders(others)
    for log in (folder / "logs").rglob("*.gz"):
        assert (again / log.relative_to(folder)).read_bytes() == log.read_bytes(), "`new` accepts compressed logs"

def test_check__of_a_record_in_either_form(root) -> None:
    """Results, hashes and the page do not depend on how the logs are stored."""
    folder, = record.folders(root)
    before = [(folder / name).read_bytes() for name in ("result.json", "README.md")]
    logs = sorted((folder / "logs").rglob("*.gz"))
    subprocess.run(["gunzip", *map(str, logs)], check=True, timeout=60)
    assert call("check", "--records", root)[0] == 0
    assert call("new", "--records", root, "--update=01")[0] == 0 and call("check", "--records", root)[0] == 0
    assert [(folder / name).read_bytes() for name in ("result.json", "README.md")] == before

@pytest.mark.parametrize("name", ["logs/seed1/log.jsonl", "logs/seed1/log.txt", "README.md", "result.json"])
def test_check__a_file_in_both_forms(root, name) -> None:
    """It would be ambiguous which of the two files is used, and the second page is not hashed."""
    folder, = record.folders(root)
    path = folder / name
    data = files.read_bytes(path)
    path.write_bytes(data)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
    status, out, _ = call("check", "--records", root)
    assert status == 1 and f"{name} in {folder.name}" in out and "remove one of them" in out

def test_check__a_log_that_is_no_gzip_file(root) -> None:
    folder, = record.folders(root)
    (folder / "logs/seed1/log.txt.gz").write_bytes(b"a page\n")
    status, out, _ = call("check", "--records", root)
    assert status == 1 and "not a whole gzip file" in out and "log.txt.gz" in out
