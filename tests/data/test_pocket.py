"""data/pocket.py, with the standard library of the Python that runs the tests as the source text."""
import base64
import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from common import ROOT, preset
from data_common import contents, failure, lock_folders

import train_gpt as tg

import pocket                                                 # noqa: E402
import shard_files                                            # noqa: E402

sys.path.insert(0, str(ROOT / "records"))
from tools import files                                       # noqa: E402

def test_shipped_data__is_the_data_of_the_records() -> None:
    """The trainer's hash of all bytes that preset pocket reads equals the hash in the logs of the records."""
    headers = []
    for field in ("train_files", "val_files"):
        headers += tg.read_shard_headers(str(ROOT / tg.PRESETS["pocket"][field]))
    shipped = tg.hash_shards(headers)
    assert shipped == "b191a7b958c80cc767267d8093a36c2507dddc185294a0b021fd3c56ab71e207"
    runs = sorted(ROOT.glob("records/*_1[01]_Pocket*/logs/*/"))
    headers = [json.loads(files.read_bytes(folder / "log.jsonl").splitlines()[0]) for folder in runs]
    stated = {header["data_sha256"] for header in headers}
    assert len(runs) == 6 and stated == {shipped}
    assert len(tg.read_token_bytes(ROOT / "data/pocket", preset("pocket", 2048, 2047))) == 2048

def test_shipped_data__has_its_license() -> None:
    """The license is complete, as its second clause requires. The page lists the changes, as its third requires."""
    licence = (ROOT / "data/pocket/LICENSE").read_text()
    for part in ("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2", "2022, 2023 Python Software Foundation",
                 "BEOPEN.COM LICENSE AGREEMENT FOR PYTHON 2.0", "CNRI LICENSE AGREEMENT FOR PYTHON 1.6.1",
                 "CWI LICENSE AGREEMENT FOR PYTHON 0.9.0 THROUGH 1.2"):
        assert part in licence
    report = json.loads((ROOT / "data/pocket/pocket.json").read_text())
    page = (ROOT / "data/pocket/README.md").read_text()
    assert report["python"] == "cpython 3.11.7" and "CPython 3.11.7" in page and "**Changed:**" in page

@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Make the data set in a new folder, which all tests share."""
    folder = tmp_path_factory.mktemp("pocket") / "a new folder"
    pocket.main(["--out", str(folder)])
    return folder

@pytest.mark.parametrize("split", ["train", "val"])
def test_make_documents__spell_the_source_files(out, split) -> None:
    """If the documents are decoded and put into their original order, they equal the source files."""
    pairs = [line.split(" ") for line in (out / "vocab.txt").read_text().splitlines()]
    vocabulary = [base64.b64decode(code, validate=True) for code, _ in pairs]
    assert [int(number) for _, number in pairs] == list(range(2047))
    assert len(set(vocabulary)) == 2047
    assert vocabulary[:256] == [bytes([byte]) for byte in range(256)]
    path = out / f"pocket_{split}_000000.bin"
    header = np.fromfile(path, "<i4", 256)
    tokens = np.fromfile(path, "<u2", offset=1024)
    assert header.tolist() == [20240520, 1, len(tokens), 2048, 2047] + [0] * 251
    shuffled = np.split(tokens, np.flatnonzero(tokens == 2047)[1:])
    lengths = list(map(len, shuffled))
    assert 2 <= min(lengths) and max(lengths) <= 256
    order = list(range(len(shuffled)))
    random.Random(0).shuffle(order)
    docs = dict(zip(order, shuffled))
    spelled = b"".join(vocabulary[token] for k in range(len(docs)) for token in docs[k][1:].tolist())
    sources = pocket.read_sources(Path(sysconfig.get_path("stdlib")))
    texts = {name: text for name, text in sources.items() if pocket.choose_split(name) == split}
    assert spelled == b"".join(texts.values())
    assert list(sources) == sorted(sources) and {"os.py", "json/decoder.py"} <= set(sources)
    share = len(texts) / len(sources)
    assert 1 / 20 < min(share, 1 - share) < 1 / 6, "about one file in twelve is for validation, or for training"

def test_split_definitions__keeps_decorators_with_their_definition() -> None:
    parts = [b"import os\n\n", b"@a\n@b(\n)\n# why\nclass C:\n    def f(self): pass\n\n", b"async def g(): pass\n",
             b"@c\ndef h(): pass\nx = 1\n", b"def i(): pass"]
    assert pocket.split_definitions(b"".join(parts)) == parts
    assert pocket.split_definitions(b"def f(): pass\n") == [b"def f(): pass\n"] and pocket.split_definitions(b"") == []

def test_made_before__a_second_run_does_nothing_and_force_gives_the_same_bytes(out) -> None:
    before, times = contents(out), {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    command = [sys.executable, str(ROOT / "data/pocket.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made, shipped = (contents(folder) for folder in (out, ROOT / "data/pocket"))
    same = all(made[name] == shipped[name] for name in made if name.endswith((".bin", ".txt")))
    assert "nothing to do" in done.stdout
    assert ("\nidentical to" in done.stdout, "\nNOT identical" in done.stdout) == (same, not same)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == times
    subprocess.run([*command, "--force"], check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "1"})
    assert contents(out) == before

DAMAGES = {                                  # case: file name and its new content; None: the file is deleted
    "no vocabulary": ("vocab.txt", None), "cut shard": ("pocket_val_000000.bin", bytes(1024 + 2 * 2)),
    "flipped bit": ("pocket_train_000000.bin", bytes(1033) + b"\1"), "broken report": ("pocket.json", b'{"python": "'),
    "another python": ("pocket.json", b'{"python": "p 2"}'), "no manifest": ("manifest.json", None)}

@pytest.mark.parametrize("damage", DAMAGES)
def test_made_before__incomplete_output(tmp_path, damage) -> None:
    shards = {f"pocket_{split}_000000.bin": bytes(1024 + 2 * count) for split, count in (("train", 5), ("val", 3))}
    files = shards | {"vocab.txt": b"", "pocket.json": b'{"python": "p 1", "train": {"tokens": 5}}'}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert not pocket.made_before(tmp_path, {"python": "p 1"}), "without a manifest, as older versions left it"
    shard_files.write_manifest(tmp_path, {name: shard_files.manifest_entry(tmp_path / name) for name in files})
    assert pocket.made_before(tmp_path, {"python": "p 1"})
    name, content = DAMAGES[damage]
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert not pocket.made_before(tmp_path, {"python": "p 1"})

def test_read_sources__an_unreadable_folder_is_an_error(tmp_path, monkeypatch) -> None:
    """Otherwise the data set would silently lack modules. Folders that are excluded anyway may be unreadable."""
    for name in ("os.py", "json/decoder.py", "__pycache__/os.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import sys\n")
    monkeypatch.setattr(pocket.sysconfig, "get_path", lambda name: str(tmp_path))
    with monkeypatch.context() as patch:
        lock_folders(patch, "__pycache__")
        assert list(pocket.read_sources(tmp_path)) == ["json/decoder.py", "os.py"]
    lock_folders(monkeypatch, "json")
    assert "json / 'Permission denied' /" in failure(pocket, "--out", tmp_path / "out")

def test_make_data_set__a_missing_or_small_library(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pocket.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "/ no os.py /" in failure(pocket, "--out", tmp_path / "out")
    (tmp_path / "os.py").write_text("import sys\n")
    too_small = failure(pocket, "--out", tmp_path / "out")
    assert "different pieces / 2,047 pieces / run this with a complete Python" in too_small
    assert not (tmp_path / "out").exists()

@pytest.mark.parametrize("name", ["vocab.txt", "pocket.json", "manifest.json"])
def test_made_before__a_named_pipe_is_not_opened(tmp_path, name) -> None:
    """Opening a named pipe would block."""
    for other in ("pocket_train_000000.bin", "pocket_val_000000.bin", "vocab.txt", "pocket.json"):
        (tmp_path / other).write_bytes(b"{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert not pocket.made_before(tmp_path, {})
    assert "a pipe or a device / a manifest" in failure(pocket, f"--out={tmp_path}") if name == "manifest.json" else (
        f"/ {name} / a new folder" in failure(pocket, f"--out={tmp_path}", "--force"))

def test_made_before__a_report_that_is_too_large(tmp_path, monkeypatch) -> None:
    """A file that another tool wrote may have any size."""
    for name in ("pocket_train_000000.bin", "pocket_val_000000.bin", "vocab.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "pocket.json").write_text('{"python": "p 1"}' + " " * 5000)
    entries = {path.name: shard_files.manifest_entry(path) for path in tmp_path.iterdir()}
    shard_files.write_manifest(tmp_path, entries)
    assert pocket.made_before(tmp_path, {"python": "p 1"})
    monkeypatch.setattr(shard_files, "MAX_SMALL_FILE_BYTES", 4000)
    assert not pocket.made_before(tmp_path, {"python": "p 1"})

@pytest.mark.parametrize("below", ["", "deeper"])
def test_main__never_writes_into_the_shipped_folder(tmp_path, below) -> None:
    """An --out in the folder is refused also with --force, and if its path contains a link to the folder."""
    (tmp_path / "link").symlink_to(ROOT / "data/pocket")
    before = contents(ROOT / "data/pocket")
    assert "/ the shipped data / another folder /" in failure(
        pocket, f"--out={tmp_path}/link/{below}", "--force")
    assert contents(ROOT / "data/pocket") == before
