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
    """Build a shard of random GPT-2 tokens."""
    body = np.random.default_rng(seed).integers(0, 50257, tokens).astype("<u2")
    return struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + body.tobytes()

class Hub(ThreadingHTTPServer):
    """A server with metadata and redirects at the hub's URLs, and the content at another host name."""
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {VAL: make_shard(0), ONE: make_shard(1), TWO: make_shard(2)}
        # File name -> what happens to its next requests: a status, other content, or "stall".
        self.faults: dict[str, list] = {}
        self.ranges: list[tuple[str, str]] = []               # of each request for content: file name and range
        self.num_requests = 0
        self.with_hash = self.with_range = True
        self.resume = threading.Event()

    def handle_error(self, *args: object) -> None:
        """Ignore clients that disconnect early, because the tests do that."""

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for key, value in (dict(Content_Length=len(body)) | headers).items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        hub, name = self.server, Path(self.path).name
        hub.num_requests += 1
        if self.path != f"/datasets/kjj0/fineweb10B-gpt2/resolve/main/{name}" or name not in hub.files:
            self.reply(404)
            return
        digest = hashlib.sha256(hub.files[name]).hexdigest() if hub.with_hash else "no-hash"
        self.reply(302, Location=f"http://localhost:{hub.server_port}/cdn/{name}", ETag='"other"',
                   X_Linked_Etag=f'"{digest}"', X_Linked_Size=len(hub.files[name]))

    def do_GET(self) -> None:
        hub, name = self.server, Path(self.path).name
        if self.path != f"/cdn/{name}":
            self.do_HEAD()
            return
        wanted = self.headers["Range"].removeprefix("bytes=")
        hub.ranges.append((name, wanted))
        faults = hub.faults.get(name)
        fault = faults.pop(0) if faults else None
        if fault == "stall":
            hub.resume.wait(60)
        if isinstance(fault, int):
            self.reply(fault)
            return
        content = fault if isinstance(fault, bytes) else hub.files[name]
        if hub.with_range:
            first, last = map(int, wanted.split("-"))
            self.reply(206, content[first:last + 1], Content_Range=f"bytes {first}-{last}/{len(content)}")
        else:
            self.reply(200, content)

@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running server. The tool makes small requests, and does not wait before it repeats them."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(tool, "REQUEST_BYTES", 4000)
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
    before = hub.num_requests
    fetch(hub, out, 2)
    assert hub.num_requests == before
    assert capsys.readouterr().out.endswith("2 training shards and the validation shard, complete\n")

SHARD = make_shard(1)
REST = ["4000-7999", "8000-9023"]
ALL = ["0-3999", *REST]
# case: attributes of the hub, files by suffix, faults -> requested ranges, text on stderr
REPAIRS = {
    "a part": ({}, {".part": SHARD[:4000]}, [], REST, ""),
    "a whole part": ({}, {".part": SHARD}, [], [], ""),
    "a part too long": ({}, {".part": SHARD + b"x"}, [], ALL, "9,025 bytes"),
    "a part of another shard": ({}, {".part": make_shard(2)[:4000]}, [], REST + ALL, "another SHA-256"),
    "no ranges": (dict(with_range=False), {}, [], ["0-3999"], ""),
    "a part, no ranges": (dict(with_range=False), {".part": SHARD[:4000]}, [], ["4000-7999", "0-3999"], "13,024 bytes"),
    "wrong content": ({}, {}, [flip_bit(SHARD, 3000)], ALL + ALL, "another SHA-256"),
    "no hash": (dict(with_hash=False), {}, [flip_bit(SHARD, 0)], ALL + ALL, "it has magic number"),
    "a busy server": ({}, {}, [503, 502], ["0-3999", "0-3999", *ALL], ""),
    "cut on the disk": ({}, {"": SHARD[:3000]}, [], ALL, "3,000 bytes"),
}

@pytest.mark.parametrize("name", REPAIRS)
def test_fetch__in_the_end_all_is_whole(hub, tmp_path, capsys, name) -> None:
    attributes, files, faults, ranges, said = REPAIRS[name]
    vars(hub).update(attributes)
    for ending, content in files.items():
        (tmp_path / f"{ONE}{ending}").write_bytes(content)
    hub.faults[ONE] = list(faults)
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)
    assert [wanted for shard, wanted in hub.ranges if shard == ONE] == ranges
    assert said in capsys.readouterr().err

def test_find_problem__hashes_are_stored_and_damage_is_repaired(hub, tmp_path, capsys) -> None:
    (tmp_path / VAL).write_bytes(hub.files[VAL])                      # from an older version: no hash
    fetch(hub, tmp_path)
    entries = shard_files.read_manifest(tmp_path)
    assert entries == {name: {"bytes": 9024, "sha256": hashlib.sha256(hub.files[name]).hexdigest()}
                       for name in (VAL, ONE)}
    assert VAL not in dict(hub.ranges)
    (tmp_path / ONE).write_bytes(flip_bit(hub.files[ONE], 5000))
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)
    assert shard_files.read_manifest(tmp_path) == entries
    assert f"{ONE} is not the file that manifest.json describes" in capsys.readouterr().err

@pytest.mark.parametrize("fault, words, left", [
    ("missing", "404 ", 0), ("cut", "damaged on the server", 0), ("busy", "502 ", 4000),
    ("gone", "Connection refused", 0)])
def test_fetch__a_failed_call_keeps_what_it_has(hub, tmp_path, fault, words, left) -> None:
    """The next call goes on from there."""
    content = hub.files[ONE]
    hub.faults[ONE] = [None, *[502] * 6] * (fault == "busy")
    if fault == "missing":
        del hub.files[ONE]
    if fault == "cut":
        hub.files[ONE] = content[:5000]
    url = "http://127.0.0.1:1" if fault == "gone" else hub.url
    message = failure(tool, "1", f"--out={tmp_path}", f"--endpoint={url}")
    assert words in message and not (tmp_path / ONE).exists(), message
    assert sum(path.stat().st_size for path in tmp_path.glob("*.part")) == left
    hub.files[ONE] = content
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)

def test_main__ctrl_c_then_two_calls_at_once(hub, tmp_path, monkeypatch) -> None:
    def start() -> subprocess.Popen:
        command = [sys.executable, ROOT / "data/cached_fineweb10B.py", "1", f"--out={tmp_path}"]
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": os.devnull, "NO_PROXY": "*"}
        return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)

    monkeypatch.undo()                                        # the tool in other processes makes large requests
    hub.files[ONE] = make_shard(1, 35_000_000)
    hub.faults[ONE] = [None, "stall"]
    process = start()
    deadline = time.monotonic() + 60
    while [name for name, _ in hub.ranges].count(ONE) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in errors and "repeat the command" in errors, errors
    assert not (tmp_path / ONE).exists() and (tmp_path / f"{ONE}.part").stat().st_size == tool.REQUEST_BYTES
    hub.ranges.clear()
    both = [start() for _ in range(2)]                        # the second waits, and finds all
    for process in both:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert_whole(hub, tmp_path, VAL, ONE)
    assert hub.ranges == [(ONE, f"{tool.REQUEST_BYTES}-70001023")]
