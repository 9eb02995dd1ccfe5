"""Helpers for the tests of the data tools: import path, failed calls, and documents as the trainer reads them."""
import errno
import os
import re
import sys
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
    """Decode the documents of a data set with the trainer, which checks headers, hashes and vocabulary."""
    texts = []
    headers = tg.read_shard_headers(tg.glob.escape(str(out)) + f"/*_{split}_*.bin")
    tg.verify_shards(headers)
    for header in headers:
        shard = tg.load_shard(header)
        pieces = tg.read_token_bytes(out, preset("tiny", header.vocab_size, header.bos_id))
        assert shard.doc_starts[0] == 0
        for start, length in zip(shard.doc_starts, shard.doc_lengths):
            tokens = shard.tokens[start + 1:start + length]
            texts.append(b"".join(pieces[token] for token in tokens).decode())
    return texts
