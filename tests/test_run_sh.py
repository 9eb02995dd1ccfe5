"""run.sh: the commands it starts, with an interpreter that only prints its arguments; its errors; its exit status."""
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from common import ROOT

import train_gpt as tg

# A fake interpreter. LACKS=packages: none is installed. LACKS=extras: no faster attention and no pytest. PIP=works: pip
# succeeds, except for packages in BROKEN. CHECK: what the check of flags and GPUs prints; fails: its exit status is 1.
FAKE_PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
case "$1:$2" in
    -:requirements.txt)
        [[ ${LACKS-} != packages || -e $here/installed ]] && exec echo "${TORCH-2.13.0}"
        exit 1 ;;
    -:*)
        echo "checked: $*" >&2
        [[ ${CHECK-} != fails ]] && exec echo "${CHECK-2 13.0 9 80 2}"
        exit 1 ;;
    -c:*sysconfig*) exec echo /usr/include/python3.12 ;;
    -c:*importlib.metadata*)             # a package and its version
        [[ ${LACKS-} != extras || -e $here/$3${4:+==}$4 ]]
        exit ;;
    -c:*train_gpt.main*)
        shift 2
        set -- train "$@" ;;
    -c:*) exit ;;
esac
echo "allocator: ${PYTORCH_ALLOC_CONF-}, compiled: ${TORCHINDUCTOR_CACHE_DIR-}, in $PWD" >&2
echo "$(basename "$(dirname "$here")") ${OMP_NUM_THREADS-}: $*"
if [[ $2 == venv ]]; then
    mkdir -p .venv/bin && cp "$0" .venv/bin/python
elif [[ $2 == pip && $* == *"-rrequirements.txt"* ]]; then
    [[ -n ${BROKEN-} ]] || touch "$here/installed"
elif [[ $2 == pip ]]; then
    [[ ${PIP-} == works && $* != *${BROKEN-nothing}* ]] || exit 1
    for word in "$@"; do touch "$here/${word/\\[cu13\\]/}"; done 2>/dev/null
elif [[ $1 == data/* ]]; then
    exit ${FETCH-0}
fi
true
"""
FAKE_NVIDIA_SMI = """#!/usr/bin/env bash
[[ -n ${GPUS-} ]] || exit 9
echo GPU 0: x; echo GPU 1: y
"""
PYTEST = "-m pytest -q --durations=10 -rfE --tb=short"
IN_TWO = f"{PYTEST} -n 2 --dist=loadfile --no-loadscope-reorder tests"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

@pytest.fixture
def run_sh(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Call a copy of run.sh, in a folder with a space in its name, with flags and environment variables."""
    home, programs = tmp_path / "a clone", tmp_path / "programs"
    for name in ("run.sh", "train_gpt.py", "requirements.txt", "requirements-gpu.txt", "tests/requirements.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, home / name)
    programs.mkdir()
    for name, text in (("python-fake", FAKE_PYTHON), ("nvidia-smi", FAKE_NVIDIA_SMI)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def call(*flags: str, script: tuple[str | Path, ...] = (home / "run.sh",),
             **variables: str) -> subprocess.CompletedProcess:
        environment = dict(PYTHON=str(programs / "python-fake"), PATH=f"{programs}:{os.environ['PATH']}",
                           HOME=str(tmp_path / "user"), CC="true")
        return subprocess.run([*script, *flags], env=environment | variables, cwd=tmp_path, capture_output=True,
                              text=True, timeout=60)

    return call

def started(done: subprocess.CompletedProcess) -> str:
    """Return the arguments of the last command of the fake interpreter, without the name of a run directory."""
    assert done.returncode == 0, done.stderr
    last = re.findall(r"^\S* \d*: (.*)$", done.stdout, re.MULTILINE)[-1]
    return re.sub(r" --run_dir=logs/\d{8}-\d{6}-\w+-\w{8}$", "", re.sub(r"^train logs/\S*", "train", last))

@pytest.mark.parametrize("flags, variables, words", [
    ([], dict(NPROC="0"), "NPROC=0"), ([], dict(NPROC="1.5"), "NPROC=1.5"),
    ([], dict(PYTHON="python-of-nowhere"), "python-of-nowhere: command not found"),
    (["--preset", "pocket"], {}, "--preset=VALUE"), (["day", "--device", "cpu"], {}, "--device=VALUE"),
    ([], dict(GPUS="2", CC="/nowhere/cc", LACKS="packages"), "/nowhere/cc and /usr/include/python3.12/Python.h: apt "
     "install gcc python3.12-dev"), ([], dict(LACKS="packages", BROKEN="requirements.txt"), "rm -r .venv")])
def test_die__one_sentence_before_data_are_downloaded(run_sh, flags, variables, words) -> None:
    done = run_sh(*flags, **variables)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(said) == 1 and words in said[0], done.stderr
    assert "data:" not in done.stdout and "training:" not in done.stdout

@pytest.mark.parametrize("flags, command", [
    (["--seed=1"], "train 1 --preset=pocket --seed=1"), (["--seed", "1"], "train 1 --preset=pocket --seed 1"),
    (["--preset=pocket_tables"], "train 1 --preset=pocket_tables"),
    (["--train_files=my folder/*.bin"], "train 1 --preset=pocket --train_files=my folder/*.bin"),
    (["--run_dir=my run"], "train my run 1 --preset=pocket --run_dir=my run"),
    (["--resume=logs/x"], "train 1 --resume=logs/x"), (["--help"], "train_gpt.py --preset=pocket --help"),
    (["test", "--all"], f"{IN_TWO} --all"), (["test", "-rf", "--tb", "no"], f"{IN_TWO} -rf --tb no"),
    (["test", "-m", "not recipe and not style"], f"{IN_TWO} -m not recipe and not style"),
    (["test", "-k", "x y"], f"{PYTEST} tests -k x y"), (["test", "./run.sh"], f"{PYTEST} ./run.sh")])
def test_commands_on_a_machine_without_a_gpu(run_sh, flags, command) -> None:
    """--resume uses the preset of the earlier run. If the user names test files, only these files run."""
    done = run_sh(*flags, LACKS="extras")
    assert started(done) == command
    assert "data:" not in done.stdout and "pip" not in done.stdout and "checked" not in done.stderr
    assert all(part in done.stdout for part in ("./run.sh test", "./run.sh day", "NPROC=")) == (flags == ["--help"])
    assert ("about 4 minutes" in done.stdout) == (IN_TWO in command)

@pytest.mark.parametrize("variables, said", [
    ({}, "allocator: , compiled: {}/user/.cache/train_gpt/torchinductor,"),
    (dict(GPUS="2"), "allocator: expandable_segments:True,"),
    (dict(GPUS="2", PYTORCH_ALLOC_CONF="backend:native"), "allocator: backend:native,"),
    (dict(GPUS="2", PYTORCH_CUDA_ALLOC_CONF="backend:native"), "allocator: ,"),
    (dict(TORCHINDUCTOR_CACHE_DIR="{}/mine"), "compiled: {}/mine,"), (dict(HOME="/proc/nowhere"), "compiled: ,")])
def test_set_environment__unless_the_user_says_how(run_sh, tmp_path, variables, said) -> None:
    done = run_sh("--preset=tiny", **{name: text.format(tmp_path) for name, text in variables.items()})
    assert said.format(tmp_path) in done.stderr

def test_a_link_to_the_script_in_another_shell(run_sh, tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a clone/run.sh")
    done = run_sh("--seed=1", script=("sh", "./link"))
    assert started(done) == "train 1 --preset=pocket --seed=1" and f"in {tmp_path / 'a clone'}" in done.stderr


# ---- Packages and GPUs
PIP = "-m pip install --disable-pip-version-check"
PINNED = (ROOT / "requirements.txt").read_text().split()[0]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FA4 = [line for line in (ROOT / "requirements-gpu.txt").read_text().splitlines() if not line.startswith("#")]
FA3 = "--no-deps --index-url https://download.pytorch.org/whl/cu130 flash-attn-3"

@pytest.fixture
def in_venv(run_sh, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Like run_sh, after a first call has created .venv, because the interpreter of the user lacks packages."""
    user_python = tmp_path / "programs/python-fake"
    venv = tmp_path / "a clone/.venv/bin"
    venv.mkdir(parents=True)
    shutil.copy(user_python, venv / "python")
    user_python.write_text(user_python.read_text().replace("-:requirements.txt)", "-:requirements.txt) exit 1"))
    return run_sh

@pytest.mark.parametrize("pip", ["works", "fails"])
def test_make_venv__is_made_once_and_repaired(run_sh, tmp_path, pip) -> None:
    """On a CPU, torch comes from the small index, and from the default one if that does not answer."""
    def flags_of_pip(*flags: str) -> list[str]:
        done = run_sh(*flags, LACKS="packages", PIP=pip)
        assert started(done).split()[0] in ("train", "-m"), done.stdout
        return re.findall(rf"^\S+ \d*: {PIP} (.*)$", done.stdout, re.MULTILINE)

    assert flags_of_pip("--seed=1") == [
        f"--timeout 10 --retries 0 --index-url {CPU_INDEX} {PINNED}", "-rrequirements.txt"]
    assert flags_of_pip("--seed=1") == []
    (tmp_path / "a clone/.venv/bin/installed").unlink()       # as after a Ctrl-C
    assert flags_of_pip("test")[1] == "-rrequirements.txt -rrecords/requirements.txt -rtests/requirements.txt"
    (tmp_path / "a clone/.venv/bin/installed").unlink()
    assert run_sh("--preset=tiny", GPUS="2", LACKS="packages", PIP=pip).stdout.count(CPU_INDEX) == 0

@pytest.mark.parametrize("variables, packages", [
    ({}, [" ".join(FA4), FA3]), (dict(CHECK="2 13.2 10 180 2", TORCH="2.15.0"), [" ".join(FA4)]),
    (dict(TORCH="2.11.0"), [FA3]), (dict(TORCH="2.16.0"), [FA3]), (dict(CHECK="2 12.6 9 80 2"), []),
    (dict(CHECK="2 13.0 8 80 2"), []), (dict(CHECK="2 13.0 12 80 2"), [])])
def test_add_fast_attention__packages_that_the_gpu_and_torch_support(in_venv, variables, packages) -> None:
    """The packages are installed once, and never with another torch."""
    given = dict(GPUS="2", LACKS="extras", PIP="works") | variables
    done = in_venv("--train_files=x", **given)
    torch = given.get("TORCH", "2.13.0")
    assert re.findall(r"--retries 0 (.*)$", done.stdout, re.MULTILINE) == [f"{p} torch=={torch}" for p in packages]
    assert started(done) == "train 2 --preset=record --train_files=x"
    assert "pip" not in in_venv("--train_files=x", **given).stdout

@pytest.mark.parametrize("broken, warnings", [("flash-attn-3", 1), ("flash-attn", 2)])
def test_add_package__a_run_continues_without_it_with_a_warning(in_venv, broken, warnings) -> None:
    done = in_venv("--train_files=x", GPUS="2", LACKS="extras", PIP="works", BROKEN=broken)
    assert started(done) == "train 2 --preset=record --train_files=x"
    assert done.stdout.count("warning: installing flash-attn") == warnings

def test_add_package__never_changes_the_interpreter_of_the_user(run_sh) -> None:
    done = run_sh("--train_files=x", GPUS="2", LACKS="extras", PIP="works")
    assert started(done) == "train 2 --preset=record --train_files=x" and ": -m pip" not in done.stdout
    assert re.findall(r"warning: .* lacks (\S+); to install it:", done.stdout) == ["flash-attn-4", "flash-attn-3"]

@pytest.mark.parametrize("flags, gpus, packages", [
    (["--device=cpu", "--parts=steps"], "2", ["pytest"]),
    (["--limit=9"], "2", ["flash-attn-4", "flash-attn-3", "pytest"]),
    (["--limit=9"], "", ["pytest"])])
def test_run_day__what_it_needs_and_its_arguments(in_venv, flags, gpus, packages) -> None:
    done = in_venv("day", *flags, PIP="works", GPUS=gpus, LACKS="extras")
    assert started(done) == " ".join(["tests/gpu/day.py", *flags]), done.stdout
    assert re.findall(r"installing (\S+) into .venv", done.stdout) == packages

@pytest.mark.parametrize("flags, variables, command", [
    ([], {}, "train 2 --preset=record"), (["--preset=pocket"], {}, "train 2 --preset=pocket"),
    ([], dict(CHECK="2 13.0 9 40 2"), "train 2 --preset=record --micro_batch_size=1"),
    (["--micro_batch_size=2"], dict(CHECK="2 13.0 9 40 2"), "train 2 --preset=record --micro_batch_size=2"),
    (["--preset=pocket"], dict(CHECK="2 13.0 9 40 2"), "train 2 --preset=pocket"),
    (["--device=cpu"], {}, "train 1 --preset=pocket --device=cpu"),
    ([], dict(CUDA_VISIBLE_DEVICES=""), "train 1 --preset=pocket"), ([], dict(FETCH="1"), "")])
def test_commands_on_a_machine_with_gpus(run_sh, tmp_path, flags, variables, command) -> None:
    """FineWeb is downloaded for preset record. Without a network, the shards that are there suffice."""
    done = run_sh(*flags, GPUS="2", **variables)
    if not command:
        assert done.returncode == 1 and "training:" not in done.stdout
        (tmp_path / "a clone/data/fineweb10B").mkdir(parents=True)
        (tmp_path / "a clone/data/fineweb10B/fineweb_train_000001.bin").touch()
        done = run_sh(*flags, GPUS="2", **variables)
        command = "train 2 --preset=record"
    assert started(done) == command
    assert (": data/cached_fineweb10B.py 9" in done.stdout) == ("--preset=record" in command)
    processes = int(command.split()[1])
    assert f" {max(1, len(os.sched_getaffinity(0)) // processes)}: train" in done.stdout, "cores are shared"

def test_commands_on_a_machine_with_a_small_gpu(run_sh) -> None:
    """Preset record does not fit, which is said before the download."""
    small = dict(GPUS="1", CHECK="1 13.0 8 23 1")
    done = run_sh(**small)
    assert done.returncode == 2 and "--preset=record_24gb" in done.stderr and "cached_fineweb" not in done.stdout
    assert started(run_sh("--preset=record_24gb", **small)) == "train 1 --preset=record_24gb"


# ---- The real interpreter: checks, signals, and the report after a run
# A fake trainer: waits, and prints its arguments or the signal that it receives.
FAKE_TRAINER = '''
import os, signal, sys, time
class TrainerError(Exception):
    pass
class Config:
    seqs_per_step, dtype = 8, "bfloat16"
def load_config(flags):
    if "--sede=1" in flags:
        raise TrainerError("no --sede")
    return Config()
def main(flags, source=None):
    assert source is None or source == open("train_gpt.py", "rb").read()
    given = dict(flag[2:].split("=") for flag in flags)
    def end(number, _):
        os.write(1, b"received %d\\n" % number)
        os._exit(128 + number)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    print("begun", os.environ.get("RANK"), given["run_dir"], flush=True)
    time.sleep(float(given.get("sleep", 0)))
    return int(given.get("fail", 0))
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
'''
# A fake torch, whose GPUs fail in the given way.
FAKE_TORCH = """
import os
class properties:
    name, major, total_memory = "fake", 9, 80 << 30
__version__ = "2.13.0"
class version:
    cuda = "13.0"
class cuda:
    def init():
        {init}
    def device_count():
        return {count}
    def get_device_properties(index):
        return properties
"""

def read_until(console: int, pattern: str) -> None:
    """Read from a terminal until the pattern matches. Fails after 60 s, with the text so far."""
    said, deadline = "", time.monotonic() + 60
    while not re.search(pattern, said):
        ready, _, _ = select.select([console], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"not {pattern!r} within 60 s: {said!r}"
        said += os.read(console, 1000).decode()

@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start run.sh with a fake trainer, record tools that print their arguments, and this interpreter."""
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "train_gpt.py").write_text(FAKE_TRAINER)
    (tmp_path / "records").mkdir()
    (tmp_path / "records/__main__.py").write_text("import sys\nprint('report:', *sys.argv[1:])\n")
    processes = []

    def start(*flags: str, **given: Any) -> subprocess.Popen:
        environment = os.environ | dict(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="") | given.pop("env", {})
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | given
        command = ["./run.sh", "--preset=tiny", *flags]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **options))
        return processes[-1]

    yield start
    for process in processes:                                 # processes that a failed test left
        process.kill()
        process.wait(20)

@pytest.mark.parametrize("init, count, env, words", [
    ("pass", 2, {}, ""), ("pass", 3, {}, "1 of 3 GPUs are idle"),
    ("properties.major = 7", 1, {}, "fake is too old for bfloat16: train on the CPU"),
    ("raise RuntimeError('The driver is\\n too old')", 2, {}, "(The driver is too old)"),
    ("pass", 2, dict(NPROC="3"), "NPROC=3 does not divide --seqs_per_step=8: 1, 2, 4, 8 do"),
    ("pass", 2, dict(FLAG="--sede=1"), "error: no --sede")])
def test_prepare__checks_flags_and_gpus(follow, tmp_path, init, count, env, words) -> None:
    """The number of processes divides the number of sequences; torch's own error is shown."""
    (tmp_path / "nvidia-smi").write_text(FAKE_NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(init=init, count=count))
    (tmp_path / "requirements-gpu.txt").write_text("flash-attn-4==1\n")
    environment = dict(CUDA_VISIBLE_DEVICES="0,1", GPUS="2", PATH=f"{tmp_path}:{os.environ['PATH']}", NPROC="",
                       CC="true", PYTHONPATH=str(tmp_path)) | env
    process = follow(*filter(None, [environment.get("FLAG")]), env=environment)
    out, err = process.communicate(timeout=60)
    assert words in out + err, out + err
    if "idle" in words or not words:
        assert "processes: 2" in out, out + err
    else:
        assert process.returncode == 2 and "training:" not in out and err.count("\n") == 1

@pytest.mark.parametrize("flags, processes, status", [
    ([], 1, 0), (["--run_dir=my run"], 1, 0), (["--fail=2"], 1, 2), (["--fail=3"], 2, 3)])
def test_train__the_report_and_the_status_of_the_trainer(follow, flags, processes, status) -> None:
    """With several processes, too. A run that fails has no report, and no traceback of torchrun."""
    process = follow(*flags, env=dict(NPROC=str(processes)))
    out, err = process.communicate(timeout=60)
    assert process.returncode == status and "Traceback" not in err, err
    folder, = set(re.findall(r"begun \S+ (.*)$", out, re.MULTILINE))
    assert folder == "my run" if "my run" in str(flags) else re.fullmatch(r"logs/\d{8}-\d{6}-tiny-\w{8}", folder)
    assert (f"report: show {folder} --baselines --plot={folder}/loss.svg\n" in err) == (status == 0), err

@pytest.mark.parametrize("main", ["raise SystemExit('no scipy')", "import os; os.kill(os.getpid(), 9)", None])
def test_train__a_report_that_fails_changes_nothing(follow, tmp_path, main) -> None:
    (tmp_path / "records/__main__.py").unlink()
    if main:
        (tmp_path / "records/__main__.py").write_text(main)
    process = follow(env=dict(NPROC="1"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""

@pytest.mark.parametrize("number, to, processes, status", [
    (signal.SIGTERM, "run.sh", 1, 143), (signal.SIGHUP, "run.sh", 1, 129), (signal.SIGINT, "terminal", 1, 130),
    (signal.SIGINT, "terminal", 2, 130)])
def test_train__a_signal_reaches_the_trainer(follow, number, to, processes, status) -> None:
    ours, theirs = pty.openpty()
    process = follow("--sleep=50", env=dict(NPROC=str(processes)), preexec_fn=lambda: os.login_tty(theirs),
                     stdout=None, stderr=None)
    read_until(ours, r"(?s)(begun.*){%d}" % processes)
    if to == "terminal":
        os.write(ours, b"\x03")
    else:
        process.send_signal(number)
    read_until(ours, f"received {number:d}" if processes == 1 else "received")
    assert process.wait(30) == status
    os.close(theirs)

def test_run_sh__repeats_facts_of_other_files() -> None:
    """run.sh cannot read these facts from other files, because it runs before packages are installed."""
    script = (ROOT / "run.sh").read_text()
    pinned = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines())
    assert re.match(re.search(r're\.match\(r"(.*?)"', script)[1], pinned["torch"])
    assert FA4[0].split("==")[0] == "flash-attn-4[cu13]", "run.sh checks the version of the first package"
    for name in ("FA4", "FA3"):
        assert f"add_package {tg.ATTENTION_PACKAGES[name]} " in script

def test_metadata_of_the_trainer__names_what_it_imports() -> None:
    """uv installs packages that requirements.txt pins, in any version, and torch in the range of run.sh."""
    block, = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", (ROOT / "train_gpt.py").read_text(), re.M)
    metadata = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))
    pinned = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines())
    names = {re.match(r"\w+", line)[0]: line for line in metadata["dependencies"]}
    assert names.keys() == {"numpy", "safetensors", "torch"} <= pinned.keys()
    assert metadata["requires-python"] == ">=3.11" and names["torch"] == "torch>=2.11,<2.20"
