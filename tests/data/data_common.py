"""Helpers for the tests of the data tools: import path, failed calls, and documents as the trainer reads them."""
import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from common import ROOT, preset

import train_gpt as tg

sys.path.insert(0, str(ROOT / "data"))                        # where the tools import shard_files.py from

TEXT = "".join(f"line {number} of a short text\n" for number in range(200))

def contents(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder: {name: content}."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}

def lock_folders(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make all folders of this name unreadable, also for root, who may read every folder."""
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(os.fsdecode(path)).name == name:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

def recorded_writes(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """Record in order what is flushed to disk (its inode) and what is created by renaming (its new name)."""
    calls: list[int | str] = []

    def recorded(function: Callable, name_of: Callable) -> Callable:
        def recording(*args: Any) -> None:
            calls.append(name_of(*args))
            function(*args)
        return recording

    def inode(fd: int) -> int:
        return os.fstat(fd).st_ino

    def new_name(_: Path, path: Path) -> str:
        return Path(path).name
    for name, name_of in (("fsync", inode), ("rename", new_name), ("replace", new_name)):
        monkeypatch.setattr(os, name, recorded(getattr(os, name), name_of))
    return calls

def failure(tool: ModuleType, *arguments: object) -> str:
    """Return the message of a call that fails, as `what / found / expected / hint`."""
    with pytest.raises(SystemExit) as caught:
        tool.main([str(argument) for argument in arguments])
    message = str(caught.value)
    match = re.fullmatch(r"error: (.+)\n  found:    (.+)\n  expected: (.+)\n  hint:     (.+)", message)
    assert match, message
    return " / ".join(match.groups())

def wrong_flag(tool: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the stderr of a call that argparse refuses."""
    with pytest.raises(SystemExit) as caught:
        tool.main([str(argument) for argument in arguments])
    assert caught.value.code == 2, arguments
    return capsys.readouterr().err

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
