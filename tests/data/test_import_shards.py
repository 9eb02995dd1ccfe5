"""data/import_shards.py: token files of other trainers keep their documents, wherever these end.

nanoGPT and llm.c write their files with numpy, as these tests do, from the description of the format. Megatron's are
written by its package, and without it from the description.
"""
import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from common import random_stream
from data_common import failure

import train_gpt as tg

import encoders                                               # noqa: E402
import import_shards as tool                                  # noqa: E402

EOT = 50_256
DOCS = [stream.tolist() for stream in np.split(random_stream(0, 5000, EOT, 0), range(40, 5000, 40))]

def imported(out: Path, split: str = "train") -> list[list[int]]:
    """Return the documents of the shards as the trainer reads them, without BOS."""
    docs = []
    for header in tg.read_shard_headers(f"{out}/{out.name}_{split}_*.bin"):
        shard = tg.load_shard(header)
        assert shard.doc_starts[0] == 0
        docs += [shard.tokens[start + 1:start + length].tolist()
                 for start, length in zip(shard.doc_starts, shard.doc_lengths)]
    return docs

def write_llm_c(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, kind: str = "<u2") -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, kind).tobytes())
    return path

def write_megatron(path: Path, docs: list[list[list[int]]], kind: type) -> Path:
    """docs: each a list of sequences. Returns the path of the index."""
    path = path.with_suffix(".idx")
    if importlib.util.find_spec("megatron"):
        package = pytest.importorskip("megatron.core.datasets.indexed_dataset")
        builder = package.IndexedDatasetBuilder(str(path.with_suffix(".bin")), kind)
        for doc in docs:
            builder.add_document(sum(doc, []), list(map(len, doc)))
        builder.finalize(str(path))
        return path
    sequences = sum(docs, [])
    lengths = np.array(list(map(len, sequences)), "<i4")
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(kind).itemsize
    index = np.cumsum([0, *map(len, docs)])
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, {np.uint16: 8, np.int32: 4}[kind], len(lengths), len(index))
    path.write_bytes(header + lengths.tobytes() + pointers.astype("<i8").tobytes() + index.astype("<i8").tobytes())
    path.with_suffix(".bin").write_bytes(np.array(sum(sequences, []), kind).tobytes())
    return path

def raw(path: Path, tokens: list[int]) -> Path:
    path.write_bytes(np.array(tokens, "<u2").tobytes())
    return path

def before(docs: list[list[int]]) -> list[int]:
    return sum(([EOT, *doc] for doc in docs), [])

def after(docs: list[list[int]]) -> list[int]:
    return sum(([*doc, EOT] for doc in docs), [])

WRITERS = {
    "nanoGPT": lambda path, docs: raw(path, after(docs)),
    "headerless, before": lambda path, docs: raw(path, before(docs)),
    "llm.c": lambda path, docs: write_llm_c(path, before(docs)),
    "llm.c, Llama 3": lambda path, docs: write_llm_c(path, before(docs), 20240801, 7, "<u4"),
    "Megatron": lambda path, docs: write_megatron(path, [[doc[:9], doc[9:]] for doc in docs], np.uint16),
    "Megatron, int32": lambda path, docs: write_megatron(path, [[doc] for doc in docs], np.int32),
    "Megatron, EOD": lambda path, docs: write_megatron(path, [[doc + [EOT]] for doc in docs], np.uint16)}

@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_read_tokens__round_trip(tmp_path, monkeypatch, capsys, write) -> None:
    """Files are read in parts, and a shard begins with a document."""
    monkeypatch.setattr(tool, "PART_TOKENS", 700)
    monkeypatch.setattr("shard_files.SHARD_TOKENS", 2000)
    files = [write(tmp_path / f"{n}.bin", DOCS[n:n + 50]) for n in (0, 50, 100)]
    tool.main([*map(str, files[:2]), "--val_files", str(files[2]), f"--out={tmp_path / 'out'}"])
    assert imported(tmp_path / "out") == DOCS[:100] and imported(tmp_path / "out", "val") == DOCS[100:]
    headers = tg.read_shard_headers(f"{tmp_path}/out/out_train_*.bin")
    assert len(headers) == 3 and headers[0][2:] == (50_257, EOT)
    first, _, last = capsys.readouterr().out.splitlines()
    assert "3 shards, 4,100 tokens, 100 documents" in first and last.startswith("./run.sh --preset=pocket --train_files=")

def test_main__no_end_of_text(tmp_path) -> None:
    """For example characters: BOS is added as a new id, and the stream is one document."""
    raw(tmp_path / "train.bin", DOCS[0] + DOCS[1])
    tool.main([f"{tmp_path}/train.bin", f"--out={tmp_path / 'out'}", f"--vocab_size={EOT + 9}"])
    assert imported(tmp_path / "out") == [DOCS[0] + DOCS[1]]
    header, = tg.read_shard_headers(f"{tmp_path}/out/out_train_*.bin")
    assert (header.vocab_size, header.bos_id) == (EOT + 10, EOT + 9)

def test_read_tokens__a_file_that_begins_inside_a_document(tmp_path) -> None:
    """llm.c cuts its shards anywhere."""
    stream = before(DOCS)
    files = [write_llm_c(tmp_path / f"{n}.bin", part) for n, part in enumerate((stream[:1000], stream[1000:]))]
    tool.main([*map(str, files), f"--out={tmp_path / 'out'}"])
    assert imported(tmp_path / "out") == DOCS

def test_main__keeps_the_vocabulary(tmp_path) -> None:
    encoder = encoders.learn_bpe(["some text " * 9], 300)
    encoder.write_files(tmp_path)
    ids = encoder.encode_text("some text")
    raw(tmp_path / "train.bin", [*ids, encoder.bos_id] * 3)
    tool.main([f"{tmp_path}/train.bin", f"--out={tmp_path / 'out'}", f"--tokenizer={tmp_path}/tokenizer.json"])
    assert imported(tmp_path / "out") == [ids] * 3
    for name in ("tokenizer.json", "vocab.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()

def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-2])
    return path

@pytest.mark.parametrize("write, words", [
    (lambda path: path, "no file; give a .bin or .idx"), (lambda path: raw(path, []), "no whole tokens"),
    (lambda path: cut(write_llm_c(path, before(DOCS))), "by its header): copy it again"),
    (lambda path: write_llm_c(path, before(DOCS), version=2), "llm.c or Megatron (version 2, "),
    (lambda path: write_llm_c(path, [128_000, 1], 20240801, 7, "<u4"), "the token 128,000, beyond --vocab_size=50257"),
    (lambda path: cut(write_megatron(path, [DOCS[:2]], np.uint16).with_suffix(".bin")), "no whole tokens"),
    (lambda path: cut(write_megatron(path, [], np.uint16)), "no whole tokens")])
def test_open_tokens__a_bad_file(tmp_path, write: Callable[[Path], Path], words) -> None:
    message = failure(tool, write(tmp_path / "a.bin"), f"--out={tmp_path / 'out'}")
    assert words in message and not (tmp_path / "out").exists(), message

def test_main__nothing_to_train_on_or_a_wrong_size(tmp_path, capsys) -> None:
    np.array([EOT], "<u2").tofile(tmp_path / "a.bin")
    flags = [f"{tmp_path}/a.bin", f"--out={tmp_path / 'out'}"]
    assert "no tokens except BOS" in failure(tool, *flags)
    with pytest.raises(SystemExit, match="2"):
        tool.main([*flags, "--vocab_size=0"])
    assert "give at least 1" in capsys.readouterr().err and not (tmp_path / "out").exists()
