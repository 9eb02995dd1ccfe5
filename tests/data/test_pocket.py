"""data/pocket.py, with the standard library of the Python that runs the tests as the source text."""
import base64
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from common import ROOT, preset
from data_common import contents, failure

import train_gpt as tg

import pocket                                                 # noqa: E402

def test_shipped_data__is_the_data_of_the_records() -> None:
    headers = []
    for field in ("train_files", "val_files"):
        headers += tg.read_shard_headers(str(ROOT / tg.PRESETS["pocket"][field]))
    assert tg.hash_shards(headers) == "b191a7b958c80cc767267d8093a36c2507dddc185294a0b021fd3c56ab71e207"
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
    folder = tmp_path_factory.mktemp("pocket") / "a new folder"
    pocket.main(["--out", str(folder)])
    return folder

@pytest.mark.parametrize("split", ["train", "val"])
def test_make_documents__spell_the_source_files(out, split) -> None:
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

def test_compare_with_shipped__says_whether_the_bytes_are_equal(out) -> None:
    made, shipped = contents(out), contents(ROOT / "data/pocket")
    same = all(made[name] == shipped[name] for name in made if name.endswith((".bin", ".txt")))
    assert pocket.compare_with_shipped(out).startswith("identical to" if same else "NOT identical")

def test_make_data_set__a_missing_or_small_library(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pocket.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "has no os.py" in failure(pocket, "--out", tmp_path / "out")
    (tmp_path / "os.py").write_text("import sys\n")
    too_small = failure(pocket, "--out", tmp_path / "out")
    assert "of 2,047 pieces: run this with a complete Python" in too_small
    assert not (tmp_path / "out").exists()

@pytest.mark.parametrize("below", ["", "deeper"])
def test_main__never_writes_into_the_shipped_folder(tmp_path, below) -> None:
    """An --out in the folder is refused also with --force, and if its path contains a link to the folder."""
    (tmp_path / "link").symlink_to(ROOT / "data/pocket")
    before = contents(ROOT / "data/pocket")
    assert "is for the shipped data" in failure(pocket, f"--out={tmp_path}/link/{below}", "--force")
    assert contents(ROOT / "data/pocket") == before
