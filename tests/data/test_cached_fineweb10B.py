"""data/cached_fineweb10B.py with a local server that responds like the hub, and fails in the ways networks fail."""
import hashlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict, namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
from common import ROOT, full_disk
from data_common import failure

import cached_fineweb10B as tool                            # noqa: E402
import shard_files                                          # noqa: E402

ISOLATED = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
ISOLATED |= {"HF_TOKEN_PATH": os.devnull, "NO_PROXY": "*", "no_proxy": "*"}
VAL, ONE, TWO = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"

def make_shard(seed: int, tokens: int = 4000) -> bytes:
    """Build a shard of random GPT-2 tokens."""
    body = np.random.default_rng(seed).integers(0, 50257, tokens).astype("<u2")
    return struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + body.tobytes()

# host: "hub", or "cdn", the target of the hub's redirects, which serves the content
Request = namedtuple("Request", "method host name range authorization")

class Hub(ThreadingHTTPServer):
    """A server with metadata and redirects at the hub's URLs, and the content at another host name.

    `plans` lists the failures of both.
    """
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {VAL: make_shard(0), ONE: make_shard(1), TWO: make_shard(2)}
        # (method and host, file name) -> failures, in order
        self.plans: dict[tuple[str, str], list[tuple]] = defaultdict(list)
        self.requests: list[Request] = []
        self.with_hash = self.with_range = True
        self.resume = threading.Event()

    def select(self, method: str, host: str, name: str = "") -> list[Request]:
        return [r for r in self.requests if (r.method, r.host) == (method, host) and name in r.name]

    def handle_error(self, *args: object) -> None:
        """Ignore clients that disconnect early, because the tests do that."""

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def send_headers(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": "0"} | headers).items():
            self.send_header(key, value)
        self.end_headers()

    def do_GET(self) -> None:
        hub = self.server
        folder, name = self.path.rsplit("/", 1)
        host = {"/datasets/kjj0/fineweb10B-gpt2/resolve/main": "hub", "/cdn": "cdn"}.get(folder)
        hub.requests.append(Request(self.command, host, name, self.headers.get("Range", "").removeprefix("bytes="),
                                    self.headers.get("Authorization", "")))
        plan = hub.plans[f"{self.command} {host}", name]
        kind, *values = plan.pop(0) if plan else ("serve",)
        if kind == "status":
            self.send_headers(*values)
        elif host is None or name not in hub.files:
            self.send_headers(404, {})
        elif host == "hub":
            digest = hashlib.sha256(hub.files[name]).hexdigest() if hub.with_hash else "no-hash"
            self.send_headers(302, {"Location": f"http://localhost:{hub.server_port}/cdn/{name}", "ETag": '"other"',
                            "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(hub.files[name]))})
        else:
            self.send_content(kind, values, hub.files[name])

    do_HEAD = do_GET

    def send_content(self, kind: str, values: list[Any], content: bytes) -> None:
        if kind == "instead":
            content = values[0]
        status, headers = 200, {}
        if self.server.with_range:
            first, last = map(int, self.server.requests[-1].range.split("-"))
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(content)}"
            content = content[first:last + 1]
        self.send_headers(status, headers | {"Content-Length": str(len(content))})
        ends = kind in ("cut", "reset", "stall")
        self.wfile.write(content[:values[0]] if ends else content)
        self.close_connection |= ends
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if kind == "stall":
            self.server.resume.wait(60)

@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.resume.set()
        server.shutdown()
        thread.join()

@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Use no proxy, small requests and no sleep; collect the seconds of every sleep."""
    monkeypatch.setenv("NO_PROXY", "*")
    seconds = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr(tool, "REQUEST_BYTES", 4000)
    return seconds

def fetch(hub: Hub, out: Path, shards: int = 1) -> None:
    tool.main([str(shards), "--out", str(out), "--endpoint", hub.url])

def check_failure(hub: Hub, out: Path, *parts: str) -> None:
    message = failure(tool, "1", "--out", out, "--endpoint", hub.url)
    positions = [message.find(part) for part in parts]
    assert -1 not in positions and positions == sorted(positions), message
    assert not any(tool.find_problem(path) for path in out.glob("*.bin"))

def assert_whole(hub: Hub, out: Path, *names: str) -> None:
    assert {path.name for path in out.iterdir()} == {*names, "manifest.json"}
    assert all((out / name).read_bytes() == hub.files[name] and not (out / name).is_symlink() for name in names)

def test_get_shards__fetches_then_keeps_without_network(hub, sleeps, tmp_path, capsys) -> None:
    out = tmp_path / "a new/folder"
    fetch(hub, out, 2)
    assert_whole(hub, out, VAL, ONE, TWO)
    before = len(hub.requests)
    fetch(hub, out, 2)
    assert len(hub.requests) == before and not sleeps
    assert capsys.readouterr().out.endswith("2 training shards and the validation shard, complete\n")

def flip_bit(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1:]

SHARD = make_shard(1)
REST = ["4000-7999", "8000-9023"]
ALL = ["0-3999", *REST]
# case: attributes of the hub, files by suffix, failures -> requested ranges, text on stderr
REPAIRS = {
    "a part": ({}, {".part": SHARD[:4000]}, [], REST, ""),
    "a whole part": ({}, {".part": SHARD}, [], [], ""),
    "a part too long": ({}, {".part": SHARD + b"x"}, [], ALL, "9,025 bytes"),
    "a part of another shard": ({}, {".part": make_shard(2)[:4000]}, [], REST + ALL, "found SHA-256"),
    "an empty part": ({}, {".part": b""}, [], ALL, ""),
    "the first bytes": ({}, {".part": SHARD[:3]}, [], ["3-4002", "4003-8002", "8003-9023"], ""),
    "no ranges": (dict(with_range=False), {}, [], ["0-3999"], ""),
    "a part, no ranges": (dict(with_range=False), {".part": SHARD[:4000]}, [], ["4000-7999", "0-3999"], "13,024 bytes"),
    "wrong content": ({}, {}, [("instead", flip_bit(SHARD, 3000))], ALL + ALL, "found SHA-256"),
    "no hash": (dict(with_hash=False), {}, [("instead", flip_bit(SHARD, 0))], ALL + ALL, "found magic number"),
    "cut on the disk": ({}, {"": SHARD[:3000]}, [], ALL, "3,000 bytes"),
}

@pytest.mark.parametrize("name", REPAIRS)
def test_fetch__in_the_end_all_is_whole(hub, sleeps, tmp_path, capsys, name) -> None:
    attributes, files, failures, ranges, said = REPAIRS[name]
    vars(hub).update(attributes)
    for ending, content in files.items():
        (tmp_path / f"{ONE}{ending}").write_bytes(content)
    hub.plans["GET cdn", ONE] = list(failures)
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)
    assert [request.range for request in hub.select("GET", "cdn", ONE)] == ranges and not sleeps
    assert said in capsys.readouterr().err

def create_foreign(kind: str, path: Path, mine: Path) -> None:
    """Create a foreign file at `path`. `mine` is a file of the user with the beginning of a shard."""
    mine.write_bytes(SHARD[:4000])
    if kind == "a link":
        path.symlink_to(mine)
    elif kind == "a dead link":
        path.symlink_to(mine.with_name("nowhere"))
    elif kind == "hard links":
        os.link(mine, path)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.write_bytes(b"notes\n" * 1000)

@pytest.mark.parametrize("kind, ending, found", [
    ("a link", ".part", "a symbolic link"), ("a dead link", ".part", "a symbolic link"),
    ("hard links", ".part", "a file with 2 hard links"),
    ("a pipe", ".part", "a pipe"), ("a directory", ".part", "a directory"),
    ("notes", ".part", "a file that begins with b'notes"),
    ("notes", "", "a file that is not a token shard")])
def test_fetch__never_writes_to_a_foreign_file(hub, sleeps, tmp_path, kind, ending, found) -> None:
    out = tmp_path / "out"
    out.mkdir()
    path = out / f"{ONE}{ending}"
    create_foreign(kind, path, tmp_path / "mine")
    before = path.lstat()
    message = failure(tool, 1, "--out", out, "--endpoint", hub.url)
    assert f"{path} / {found}" in message
    assert "move it away" in message and path.lstat()[:7] == before[:7], "the same file, links and size"
    assert (tmp_path / "mine").read_bytes() == SHARD[:4000] and not (tmp_path / "nowhere").exists()
    assert not hub.select("GET", "cdn", ONE)
    path.rename(tmp_path / "moved away")
    fetch(hub, out)
    assert_whole(hub, out, VAL, ONE)

def test_find_problem__a_shard_of_the_manifest_is_replaced_with_any_content(hub, sleeps, tmp_path) -> None:
    fetch(hub, tmp_path)
    (tmp_path / ONE).write_bytes(b"\0" * 9024)
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)

def test_download_rest__a_bad_network_or_a_busy_server(hub, sleeps, tmp_path) -> None:
    """The library repeats a request after a cut, a reset or a refusal, and waits as long as the server requires."""
    hub.plans["HEAD hub", ONE] = [("status", 503, {}), ("status", 429, {"Retry-After": "7"})]
    hub.plans["GET hub", ONE] = [("status", 429, {"Retry-After": "9"})]
    hub.plans["GET cdn", ONE] = [("cut", 3000), ("serve",), ("reset", 2000), ("status", 502, {})]
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)
    first, second, third = ALL
    assert [request.range for request in hub.select("GET", "cdn", ONE)] == [first, first, second, second, second, third]
    assert sleeps == [1, 8, 10, 2, 1, 2]  # the library adds 1 s to Retry-After

def test_fetch__a_truncated_shard(hub, sleeps, tmp_path) -> None:
    hub.files[ONE] = hub.files[ONE][:5000]
    check_failure(hub, tmp_path, ONE, "5,000 bytes", "expected 9,024", "try again later")
    assert len(hub.select("HEAD", "hub", ONE)) == 2 and not list(tmp_path.glob("*.part"))

def test_find_problem__hashes_are_stored_and_damage_is_repaired(hub, sleeps, tmp_path, capsys) -> None:
    (tmp_path / VAL).write_bytes(hub.files[VAL])                      # from an older version: no hash
    fetch(hub, tmp_path)
    digests = {name: hashlib.sha256(hub.files[name]).hexdigest() for name in (VAL, ONE)}
    entries = shard_files.read_manifest(tmp_path)
    assert entries == {name: {"bytes": 9024, "sha256": digest} for name, digest in digests.items()}
    assert not hub.select("GET", "cdn", VAL)
    (tmp_path / ONE).write_bytes(flip_bit(hub.files[ONE], 5000))
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)
    assert shard_files.read_manifest(tmp_path) == entries
    assert f"{ONE}: found content that differs from manifest.json" in capsys.readouterr().err

def test_fetch__a_missing_shard_or_no_server(hub, sleeps, tmp_path) -> None:
    content = hub.files.pop(ONE)
    check_failure(hub, tmp_path, ONE, "404 ", " / the shard / ", "HF_ENDPOINT")
    assert len(hub.select("HEAD", "hub", ONE)) == 1 and not sleeps
    hub.files[ONE] = content
    hub.plans["GET cdn", ONE] = [("serve",)] + [("status", 502, {})] * 6
    check_failure(hub, tmp_path, ONE, "502 ", " / the shard / ", "repeat the command to resume")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        message = failure(tool, "1", "--out", tmp_path, "--endpoint", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert "Connection refused" in message and "check the network" in message
    assert (tmp_path / f"{ONE}.part").stat().st_size == 4000          # stays for the next call
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)

def start(out: Path, *flags: str, environment: dict[str, str] = {}, **options: Any) -> subprocess.Popen:
    command = [sys.executable, ROOT / "data/cached_fineweb10B.py", "1", f"--out={out}", *flags]
    return subprocess.Popen(command, env=ISOLATED | environment, text=True, stderr=subprocess.PIPE, **options)

def test_main__environment(hub, tmp_path) -> None:
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret"}
    offline = start(tmp_path, environment=environment | {"HF_HUB_OFFLINE": "1"})
    errors = offline.communicate(timeout=20)[1]
    assert offline.returncode == 1 and "offline mode is enabled" in errors and not hub.requests, errors
    assert start(tmp_path, environment=environment).wait(20) == 0
    assert_whole(hub, tmp_path, VAL, ONE)
    assert {r.authorization for r in hub.requests if r.host == "hub"} == {"Bearer hf_secret"}
    assert {r.authorization for r in hub.requests if r.host == "cdn"} == {""}
    assert start(tmp_path, environment=environment | {"HF_HUB_OFFLINE": "1"}).wait(20) == 0

def test_main__ctrl_c_then_again(hub, tmp_path) -> None:
    hub.files[ONE] = make_shard(1, 35_000_000)
    hub.plans["GET cdn", ONE] = [("serve",), ("stall", 5000)]
    process = start(tmp_path, f"--endpoint={hub.url}")
    part, deadline = tmp_path / f"{ONE}.part", time.monotonic() + 60
    while len(hub.select("GET", "cdn", ONE)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in errors and "repeat the command" in errors, errors
    assert not (tmp_path / ONE).exists() and part.stat().st_size == tool.REQUEST_BYTES
    hub.requests.clear()
    both = [start(tmp_path, f"--endpoint={hub.url}") for _ in range(2)]       # the second sleeps, and finds all
    for process in both:
        process.communicate(timeout=20)
        assert process.returncode == 0
    assert_whole(hub, tmp_path, VAL, ONE)
    assert [request.range for request in hub.select("GET", "cdn", ONE)] == [f"{tool.REQUEST_BYTES}-{70_001_023}"]

def test_write_manifest__removes_no_foreign_file(hub, sleeps, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.json.part").write_bytes(b"mine")
    fetch(hub, out)
    assert (out / "manifest.json.part").read_bytes() == b"mine"
    (out / "manifest.json.part").unlink()
    (out / "manifest.json").rename(tmp_path / "elsewhere.json")
    (out / "manifest.json").symlink_to("../elsewhere.json")
    before = (tmp_path / "elsewhere.json").read_bytes()
    fetch(hub, out, 2)
    assert_whole(hub, out, VAL, ONE, TWO)
    assert (tmp_path / "elsewhere.json").read_bytes() == before and not (out / "manifest.json").is_symlink()

def test_download_rest__a_full_disk(hub, tmp_path) -> None:
    hub.files[ONE] = make_shard(1, 2_000_000)
    process = start(tmp_path, f"--endpoint={hub.url}",
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 1 and "Traceback" not in errors
    assert "File too large" in errors and "free disk space" in errors, errors
    assert {path.name for path in tmp_path.iterdir()} == {VAL, f"{ONE}.part", "manifest.json"}
    assert (tmp_path / f"{ONE}.part").stat().st_size == 1 << 20

def test_download_rest__a_network_drive_that_is_full(hub, sleeps, tmp_path, monkeypatch) -> None:
    """A network drive may report a full disk when the file is flushed."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        check_failure(hub, tmp_path, f"{VAL}.part / 'No space left on device' / enough disk space /", "; repeat the")
    fetch(hub, tmp_path)
    assert_whole(hub, tmp_path, VAL, ONE)
