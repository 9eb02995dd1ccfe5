"""data/cached_fineweb10B.py with a local server that responds like the hub, and fails in the ways networks fail."""
import hashlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Iterator

import numpy as np
import pytest
from common import ROOT
from data_common import failure

import cached_fineweb10B as tool                            # noqa: E402
import shard_files                                          # noqa: E402

VAL, ONE, TWO = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"

def make_shard(seed: int, tokens: int = 4000) -> bytes:
    body = np.random.default_rng(seed).integers(0, 50257, tokens).astype("<u2")
    return struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + body.tobytes()

class Hub(ThreadingHTTPServer):
    """A server with metadata and redirects at the hub's URLs, and the content at another host name."""
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {VAL: make_shard(0), ONE: make_shard(1), TWO: make_shard(2)}
        self.faults: dict[str, object] = {}                   # file name: a status, other content, or "stall"
        self.requested: list[str] = []
        self.with_hash = True
        self.stalled, self.resume = threading.Event(), threading.Event()

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for key, value in (dict(Content_Length=len(body)) | headers).items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        hub, name = self.server, Path(self.path).name
        hub.requested.append(name)
        if self.path != f"/datasets/kjj0/fineweb10B-gpt2/resolve/main/{name}" or name not in hub.files:
            self.reply(404)
            return
        content = hub.files[name]
        digest = hashlib.sha256(content).hexdigest() if hub.with_hash else "no-hash"
        if hub.faults.get(name) == content[:5000]:
            content = content[:5000]         # cut off before it came to the server
        self.reply(302, Location=f"http://localhost:{hub.server_port}/cdn/{name}", ETag='"other"',
                   X_Repo_Commit="0" * 40, X_Linked_Etag=f'"{digest}"', X_Linked_Size=len(content))

    def do_GET(self) -> None:
        hub, name = self.server, Path(self.path).name
        if self.path != f"/cdn/{name}":
            self.do_HEAD()
            return
        fault = hub.faults.get(name)
        if fault == "stall":
            hub.stalled.set()
            hub.resume.wait(60)
        if isinstance(fault, int):
            self.reply(fault)
            return
        self.reply(200, fault if isinstance(fault, bytes) else hub.files[name])

@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running server. The library does not wait before it repeats a request."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(time, "sleep", float)
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.resume.set()
        server.shutdown()
        thread.join()

def fetch(hub: Hub, out: Path, shards: int = 1) -> None:
    tool.main([str(shards), f"--out={out}", f"--endpoint={hub.url}"])

def assert_whole(hub: Hub, out: Path, *names: str) -> None:
    assert {path.name for path in out.iterdir()} == {*names, "manifest.json"}
    assert all((out / name).read_bytes() == hub.files[name] for name in names)

def flip_bit(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1:]

def test_get_shards__fetches_then_keeps_without_network(hub, tmp_path, capsys) -> None:
    out = tmp_path / "a new/folder"
    fetch(hub, out, 2)
    assert_whole(hub, out, VAL, ONE, TWO)
    hub.requested.clear()
    fetch(hub, out, 2)
    assert not hub.requested
    assert capsys.readouterr().out.endswith("2 training shards and the validation shard, complete\n")

def test_find_problem__hashes_are_stored_and_damage_is_repaired(hub, tmp_path, capsys) -> None:
    (tmp_path / VAL).write_bytes(hub.files[VAL])                      # without a manifest, its header is checked
    fetch(hub, tmp_path)
    entries = shard_files.read_manifest(tmp_path)
    assert entries == {ONE: {"bytes": 9024, "sha256": hashlib.sha256(hub.files[ONE]).hexdigest()}}
    assert VAL not in hub.requested
    (tmp_path / ONE).write_bytes(flip_bit(hub.files[ONE], 5000))
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)
    assert shard_files.read_manifest(tmp_path) == entries
    assert f"{ONE} is not the file that manifest.json describes" in capsys.readouterr().err

@pytest.mark.parametrize("fault, words", [
    ("missing", "404 "), ("cut", "it has 5,000 bytes"), ("a flipped bit", "another SHA-256"), ("busy", "503 "),
    ("gone", "Connection refused")])
def test_fetch__a_failed_call_keeps_what_is_whole(hub, tmp_path, fault, words) -> None:
    content = hub.files[ONE]
    hub.with_hash = fault != "cut"
    if fault == "missing":
        del hub.files[ONE]
    elif fault != "gone":
        hub.faults[ONE] = {"cut": content[:5000], "busy": 503}.get(fault, flip_bit(content, 3000))
    url = "http://127.0.0.1:1" if fault == "gone" else hub.url
    message = failure(tool, "1", f"--out={tmp_path}", f"--endpoint={url}")
    assert words in message and "repeat the command" in message, message
    assert {path.name for path in tmp_path.iterdir()} <= {VAL, "manifest.json"}
    hub.faults.clear()
    hub.files[ONE] = content
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)

def test_main__ctrl_c_in_the_middle(hub, tmp_path) -> None:
    hub.faults[ONE] = "stall"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": os.devnull, "NO_PROXY": "*"}
    command = [sys.executable, ROOT / "data/cached_fineweb10B.py", "1", f"--out={tmp_path}"]
    process = subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in errors and "repeat the command" in errors, errors
    assert_whole(hub, tmp_path, VAL)
