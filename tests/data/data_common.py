"""Helpers for the tests of the data tools: import path, failed calls, and documents as the trainer reads them."""
import errno
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from common import ROOT, preset

import train_gpt as tg

sys.path.insert(0, str(ROOT / "data"))                        # where the tools import shard_files.py from

from shard_files import DataError                             # noqa: E402

TEXT = "".join(f"line {number} of a short text\n" for number in range(200))

def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the package {package} is not installed")

def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}

def lock_folders(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make all folders of this name unreadable, also for root, who may read every folder."""
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(os.fsdecode(path)).name == name:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

def failure(tool: ModuleType, *arguments: object) -> str:
    with pytest.raises((DataError, OSError)) as caught:
        tool.main([str(argument) for argument in arguments])
    return str(caught.value)

def decode(out: Path, split: str = "train") -> list[str]:
    """Decode the documents of a data set with the trainer, which checks headers and vocabulary; check the manifest."""
    texts = []
    for name, entry in json.loads((out / "manifest.json").read_text())["files"].items():
        content = (out / name).read_bytes()
        assert entry == dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    headers = tg.read_shard_headers(tg.glob.escape(str(out)) + f"/*_{split}_*.bin")
    for header in headers:
        shard = tg.load_shard(header)
        pieces = tg.read_token_bytes(out, preset("tiny", header.vocab_size, header.bos_id))
        assert shard.doc_starts[0] == 0
        for start, length in zip(shard.doc_starts, shard.doc_lengths):
            tokens = shard.tokens[start + 1:start + length]
            texts.append(b"".join(pieces[token] for token in tokens).decode())
    return texts
