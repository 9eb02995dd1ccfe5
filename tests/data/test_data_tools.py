"""data/pocket.py on the standard library of the Python that runs the tests."""
import base64
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {"pocket_train_000000.bin", "pocket_val_000000.bin", "pocket.json", "vocab.txt", "manifest.json"}
sys.path.insert(0, str(ROOT / "data"))                        # the tools import shard_files.py beside them

import pocket                                                 # noqa: E402
import shard_files                                            # noqa: E402


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pocket") / "a new folder"
    pocket.main(["--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def sources() -> dict[str, bytes]:
    return pocket.read_sources(Path(sysconfig.get_path("stdlib")))


@pytest.fixture(scope="module")
def vocabulary(out) -> list[bytes]:
    pairs = [line.split(" ") for line in (out / "vocab.txt").read_text().splitlines()]
    assert [int(number) for _, number in pairs] == list(range(2047))
    return [base64.b64decode(code, validate=True) for code, _ in pairs]


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    return np.fromfile(path, "<i4", 256), np.fromfile(path, "<u2", offset=1024)


def split_documents(tokens: np.ndarray) -> list[np.ndarray]:
    return np.split(tokens, np.flatnonzero(tokens == 2047)[1:])


def test_vocabulary(vocabulary):
    assert vocabulary[:256] == [bytes([byte]) for byte in range(256)]
    assert len(set(vocabulary)) == 2047 and all(len(piece) > 1 for piece in vocabulary[256:])
    assert {b" the", b"\n    ", b"self"} <= set(vocabulary)


@pytest.mark.parametrize("split", ["train", "val"])
def test_shard_header_and_documents(out, split):
    header, tokens = read(out / f"pocket_{split}_000000.bin")
    assert header[:5].tolist() == [20240520, 1, len(tokens), 2048, 2047] and not header[5:].any()
    assert tokens[0] == 2047 and tokens.max() == 2047
    lengths = [len(doc) for doc in split_documents(tokens)]
    assert 2 <= min(lengths) and max(lengths) <= 256
    assert len(tokens) >= (70_000 if split == "val" else 1_000_000)


@pytest.mark.parametrize("split", ["train", "val"])
def test_documents_spell_the_source_files(out, sources, vocabulary, split):
    """Put the shuffled documents back in order, decode them, and compare with the files one after another."""
    shuffled = split_documents(read(out / f"pocket_{split}_000000.bin")[1])
    order = list(range(len(shuffled)))
    random.Random(0).shuffle(order)
    docs = [None] * len(order)
    for doc, place in zip(shuffled, order):
        docs[place] = b"".join(vocabulary[token] for token in doc[1:])
    at = 0
    for name, text in sources.items():
        if pocket.split_of(name) == split:
            spelled = b""
            while len(spelled) < len(text):
                spelled, at = spelled + docs[at], at + 1
            assert spelled == text, name
    assert at == len(docs)


def test_sources_and_split(sources):
    names = set(sources)
    assert {"os.py", "json/decoder.py"} <= names and list(sources) == sorted(names)
    assert not {part for name in names for part in name.split("/")[:-1]} & pocket.SKIP_DIRS
    val = {name for name in names if pocket.split_of(name) == "val"}
    assert len(names) / 20 < len(val) < len(names) / 6                    # one in twelve, by chance of the hash
    assert val == {name for name in reversed(sorted(names)) if pocket.split_of(name) == "val"}


def test_cut_keeps_decorators_with_their_definition():
    parts = [b"import os\n\n", b"@a\n@b(\n)\n# why\nclass C:\n    def f(self): pass\n\n", b"async def g(): pass\n",
             b"@c\ndef h(): pass\nx = 1\n", b"def i(): pass"]
    assert pocket.cut(b"".join(parts)) == parts
    assert pocket.cut(b"def f(): pass\n") == [b"def f(): pass\n"] and pocket.cut(b"") == []


def test_unknown_pieces_are_spelled_in_bytes_and_long_definitions_go_on():
    ids = {bytes([byte]): byte for byte in range(256)} | {b" the": 256}
    assert pocket.documents("a the ö".encode(), ids) == [[2047, 97, 256, 32, 0xC3, 0xB6]]
    docs = pocket.documents(b"x" * 300, ids)
    assert [len(doc) for doc in docs] == [256, 46] and all(doc[0] == 2047 for doc in docs)


def test_not_utf8_is_left_out(tmp_path):
    (tmp_path / "good.py").write_text("a = 'ö'", encoding="utf-8")
    (tmp_path / "latin.py").write_text("a = 'ö'", encoding="latin-1")
    assert list(pocket.read_sources(tmp_path)) == ["good.py"]


def test_second_run_does_nothing_and_force_gives_the_same_bytes(out, capsys):
    assert {path.name for path in out.iterdir()} == FILES                 # no temporary file is left
    before = {name: ((out / name).read_bytes(), (out / name).stat().st_mtime_ns) for name in FILES}
    command = [sys.executable, str(ROOT / "data/pocket.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "nothing to do" in done.stdout
    assert {name: (out / name).stat().st_mtime_ns for name in FILES} == {name: at for name, (_, at) in before.items()}
    subprocess.run([*command, "--force"], check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "1"})
    assert {name: (out / name).read_bytes() for name in FILES} == {name: data for name, (data, _) in before.items()}


@pytest.mark.parametrize("damage", ["no vocabulary", "cut shard", "flipped bit", "other python", "broken report",
                                    "no manifest"])
def test_incomplete_output_is_noticed(tmp_path, damage):
    report = '{"python": "p 1", "train": {"tokens": 5}, "val": {"tokens": 3}}'
    content = {f"pocket_{split}_000000.bin": bytes(1024 + 2 * count) for split, count in (("train", 5), ("val", 3))}
    content |= {"vocab.txt": b"", "pocket.json": report.encode()}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    assert not pocket.made_before(tmp_path, {"python": "p 1"})            # as an older version left it
    shard_files.write_manifest(tmp_path, {name: shard_files.describe(tmp_path / name) for name in content})
    assert pocket.made_before(tmp_path, {"python": "p 1"})
    if damage == "no vocabulary":
        (tmp_path / "vocab.txt").unlink()
    if damage == "cut shard":
        (tmp_path / "pocket_val_000000.bin").write_bytes(bytes(1024 + 2 * 2))
    if damage == "flipped bit":
        (tmp_path / "pocket_train_000000.bin").write_bytes(bytes(1033) + b"\1")
    if damage == "broken report":
        (tmp_path / "pocket.json").write_text(report[:20])
    if damage == "no manifest":
        (tmp_path / "manifest.json").unlink()
    assert not pocket.made_before(tmp_path, {"python": "p 2" if damage == "other python" else "p 1"})


def test_missing_library_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(pocket.sysconfig, "get_path", lambda name: str(tmp_path / "python.zip"))
    with pytest.raises(SystemExit, match="found no os.py in .*python.zip, expected .*; run this with a Python"):
        pocket.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_small_library_is_explained(tmp_path, monkeypatch):
    (tmp_path / "os.py").write_text("import sys\n")
    monkeypatch.setattr(pocket.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="expected 1,791"):
        pocket.main(["--out", str(tmp_path / "out")])
