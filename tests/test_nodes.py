"""Two nodes of two ranks each, started by `torchrun --nnodes=2`, in network namespaces that a link connects.

Only root can create namespaces, and only on Linux. Otherwise the tests are skipped.
"""
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import PROCESS_TIMEOUT_S, ROOT, Run, launch, losses
from fault_injection import HANG_S

pytestmark = pytest.mark.slow
LINK = "link0"                           # name of both ends of the link
SHORT_RUN = ("--max_steps=4", "--sample_tokens=0")

def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=60).stdout

@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Create two network namespaces with the addresses 10.9.8.1 and 10.9.8.2; yield their names."""
    def remove(name: str) -> None:
        for pid in ip("netns", "pids", name).split():
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "delete", name)

    names = f"nodeA{os.getpid()}", f"nodeB{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(remove, name)
            ip("link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
            for number, name in enumerate(names, 1):
                ip("-n", name, "address", "add", f"10.9.8.{number}/24", "dev", LINK)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", LINK, "up")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"two nodes: {error} {getattr(error, 'stderr', '')}")
        yield names

def start(folder: Path, nodes: tuple[str, str], *flags: str) -> list[subprocess.Popen]:
    launchers = []
    for node, name in enumerate(nodes):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                   "--nproc_per_node=2", f"--node_rank={node}", "--master_addr=10.9.8.1", "--master_port=29500",
                   ROOT / "train_gpt.py", "--preset=tiny", "--device=cpu", f"--run_dir={folder / 'run'}", *flags]
        environment = os.environ | dict(GLOO_SOCKET_IFNAME=LINK, OMP_NUM_THREADS="1")
        with open(folder / f"{name}.txt", "w") as output:
            launchers.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    return launchers

def test_two_nodes__same_losses_as_one_node_with_as_many_ranks(nodes, tmp_path) -> None:
    status = [launcher.wait(PROCESS_TIMEOUT_S) for launcher in start(tmp_path, nodes, *SHORT_RUN)]
    assert status == [0, 0], [(tmp_path / f"{name}.txt").read_text() for name in nodes]
    single_node = launch(tmp_path / "one", 4, *SHORT_RUN)
    assert single_node[0].status == 0 and losses(tmp_path / "run") == losses(tmp_path / "one")

def test_two_nodes__a_cut_link_ends_both(nodes, tmp_path) -> None:
    launchers = start(tmp_path, nodes, "--num_scheduled_steps=20000", "--epochs=0", "--comm_timeout=30")
    deadline = time.monotonic() + PROCESS_TIMEOUT_S
    log = tmp_path / "run/log.jsonl"
    while not (log.exists() and '"type": "step"' in log.read_text()):
        ended = [launcher.poll() for launcher in launchers]
        assert ended == [None, None] and time.monotonic() < deadline, (tmp_path / f"{nodes[0]}.txt").read_text()
        time.sleep(0.2)
    ip("-n", nodes[0], "link", "set", LINK, "down")
    assert all(launcher.wait(HANG_S) for launcher in launchers), "both must end with an error"
    aborted, = Run(tmp_path / "run", 1, "", "").of("aborted")
    assert re.match("lost another rank|TrainerError: loader thread: no result", aborted["cause"]), aborted
