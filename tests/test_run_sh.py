"""run.sh: the commands it starts, with an interpreter that only prints its arguments; its errors; its signals."""
import contextlib
import json
import os
import platform
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from common import ROOT

import train_gpt as tg

# A fake interpreter. LACKS=packages: no packages are installed. LACKS=extras: no faster attention and no pytest.
# PIP=works: pip succeeds, except for packages in BROKEN.
FAKE_PYTHON = """#!/usr/bin/env bash
here=$(dirname "$0")
case $1:$2 in
    -:*)                                 # has_packages
        [[ ${LACKS-} != packages || -e $here/installed ]] && exec echo "${TORCH-2.13.0} 3.12.0"
        exit 1 ;;
    -c:*torch.cuda.init*) exec echo "${CUDA-13.0 9} 2" ;;
    -c:*sysconfig*) exec echo "$HEADERS" ;;
    -c:*importlib.metadata*)             # has_package: a package and its version
        [[ ${LACKS-} != extras || -e $here/$3${4:+==}$4 ]]
        exit ;;
    -c:*) exit ;;
esac
echo "allocator: ${PYTORCH_ALLOC_CONF-}, compiled: ${TORCHINDUCTOR_CACHE_DIR-}, in $PWD" >&2
echo "$(basename "$(dirname "$here")") ${OMP_NUM_THREADS-}: $*"
echo "GPUs ${CUDA_VISIBLE_DEVICES-all} by NVML ${PYTORCH_NVML_BASED_CUDA_CHECK-0}: $*" >>"$here/commands"
if [[ $2 == venv ]]; then
    mkdir -p .venv/bin && cp "$0" .venv/bin/python
elif [[ $2 == pip && $* == *" -r requirements.txt" ]]; then
    touch "$here/installed"
elif [[ $2 == pip && $* != *" -r "* ]]; then
    [[ ${PIP-} == *works* && $* != *${BROKEN-nothing}* ]] || exit 1
    for word in "$@"; do touch "$here/${word/\\[cu13\\]/}"; done 2>/dev/null
fi
true
"""
FAKE_TIMEOUT = """#!/usr/bin/env bash
echo "at most $1 s"
[[ ${PIP-} != hangs ]] || exit 124       # exit status of timeout(1)
shift
exec "$@"
"""
FAKE_NVIDIA_SMI = """#!/usr/bin/env bash
[[ ${GPUS-} != hang ]] || exec sleep 55
[[ -n ${GPUS-} ]] || exit 9
echo GPU 0: x; echo GPU 1: y
"""
FAKE_COMPILER = """#!/usr/bin/env bash
[[ $1 != -E ]] || exec test -e "$5/Python.h"                  # -E -x c -I FOLDER -
"""
LAUNCHER = "-m torch.distributed.run --standalone --nproc_per_node=2"
PYTEST = "-m pytest -q --durations=10 -rfE --tb=short"
IN_TWO = f"{PYTEST} -n 2 --dist=loadfile --no-loadscope-reorder tests"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

@pytest.fixture
def run_sh(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Call a copy of run.sh, in a folder with a space in its name, with flags and environment variables."""
    home, programs, headers = tmp_path / "a clone", tmp_path / "programs", tmp_path / "include/python3.12"
    for name in ("run.sh", "train_gpt.py", "requirements.txt", "requirements-gpu.txt", "tests/requirements.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, home / name)
    for folder in (programs, headers):
        folder.mkdir(parents=True)
    (headers / "Python.h").touch()
    for name, text in (("python-fake", FAKE_PYTHON), ("nvidia-smi", FAKE_NVIDIA_SMI), ("timeout", FAKE_TIMEOUT),
                       ("gcc", FAKE_COMPILER)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def call(*flags: str, script: tuple[str | Path, ...] = (home / "run.sh",),
             **variables: str) -> subprocess.CompletedProcess:
        environment = dict(PYTHON=str(programs / "python-fake"), PATH=f"{programs}:{os.environ['PATH']}",
                           HOME=str(tmp_path / "user"), HEADERS=str(headers))
        return subprocess.run([*script, *flags], env=environment | variables, cwd=tmp_path, capture_output=True,
                              text=True, timeout=60)

    return call

def started(done: subprocess.CompletedProcess) -> str:
    """Return the arguments of the last command of the fake interpreter."""
    assert done.returncode == 0, done.stderr
    return re.findall(r"^\S* \d*: (.*)$", done.stdout, re.MULTILINE)[-1]

@pytest.mark.parametrize("flags, variables, parts", [
    *((["--preset=tiny"], dict(NPROC=n), (f"'{n}'", "1 or more")) for n in ("0", "", "1.5", "99999")),
    ([], dict(PYTHON="python-of-nowhere"), ("python-of-nowhere", "Python 3.11 or later", "PYTHON=")),
    (["--preset", "pocket"], {}, ("--preset", "--preset=VALUE")),
    (["--run_dir", "logs/x"], {}, ("--run_dir", "--run_dir=VALUE")),
    (["--seed=1", "fox"], {}, ("fox", "--help")), (["--seed=1", "--resume=logs/x", "fox"], {}, ("fox",)),
    ([], dict(NPROC="3"), ("3", "a divisor of --seqs_per_step=8: 1 2 4 8")),
    (["--seqs_per_step=12"], dict(NPROC="8", GPUS="2"), ("8", "a divisor of --seqs_per_step=12: 1 2 3 4 6 12"))])
def test_die__four_lines(run_sh, flags, variables, parts) -> None:
    done = run_sh(*flags, **variables)
    title, *lines = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout, "before data are prepared"
    assert title.startswith("error: ")
    assert [line.split(":")[0].strip() for line in lines] == ["found", "expected", "hint"]
    assert all(part in done.stderr for part in parts), done.stderr

@pytest.mark.parametrize("flags", [["--seed=1"], ["test"], ["--help"]])
@pytest.mark.parametrize("state", ["a file", "a dead link"])
def test_check_files__a_venv_that_is_no_directory(run_sh, tmp_path, state, flags) -> None:
    """Earlier, this was reported as a failure of the package index."""
    venv = tmp_path / "a clone/.venv"
    if state == "a file":
        venv.touch()
    else:
        venv.symlink_to("/nowhere")
    done = run_sh(*flags, LACKS="packages")
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert done.stderr.startswith("error: .venv\n") and f"mv {venv} {venv}.old" in done.stderr
    assert done.stderr.count("\n") == 4

def test_check_files__a_venv_may_be_a_link_to_a_directory(run_sh, tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a clone/.venv").symlink_to(tmp_path / "elsewhere")
    assert started(run_sh("--seed=1")) == "train_gpt.py --preset=pocket --seed=1"

@pytest.mark.parametrize("name", ["train_gpt.py", "requirements.txt"])
def test_check_files__a_missing_file(run_sh, tmp_path, name) -> None:
    """Without train_gpt.py, every flag was unknown."""
    (tmp_path / f"a clone/{name}").unlink()
    done = run_sh("--seed=1")
    assert done.returncode == 2 and done.stdout == "" and "unrecognized" not in done.stderr
    assert done.stderr.startswith(f"error: {name}\n") and "clone the repository" in done.stderr

@pytest.mark.parametrize("missing", ["grep", "dirname", "head", "mkdir", "cat"])
def test_check_files__a_missing_tool(run_sh, tmp_path, missing) -> None:
    """Without grep, the number of GPUs was empty instead of 0, and the data of a GPU were downloaded."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in {"bash", "cat", "date", "dirname", "grep", "head", "mkdir", "readlink"} - {missing}:
        (tools / name).symlink_to(shutil.which(name))
    done = run_sh("--preset=record", PATH=str(tools))
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert done.stderr.startswith("error: tools\n") and f"{missing}: command not found" in done.stderr

@pytest.mark.parametrize("flags, refused", [
    (["--sede=1"], "--sede=1"), (["--seed=1", "--num_slots=8", "--x"], "--num_slots=8"), (["-x"], "-x"),
    (["--seed=1", "--savee=w", "--help"], "--savee=w"), (["--sample=w"], "--sample=w")])
def test_read_flags__the_trainer_gets_an_unknown_flag(run_sh, flags, refused) -> None:
    """It gets nothing else, before data are downloaded and GPUs are prepared, but after packages are installed."""
    done = run_sh(*flags, GPUS="2", LACKS="extras")
    assert started(done) == f"train_gpt.py {refused}" and len(done.stdout.splitlines()) == 1, done.stdout
    done = run_sh(*flags, LACKS="packages")
    assert started(done) == f"train_gpt.py {refused}" and "-r requirements.txt" in done.stdout
    assert "data:" not in done.stdout and "training:" not in done.stdout

def test_read_flags__an_unknown_flag_is_refused(run_sh, tmp_path) -> None:
    """With the trainer itself; nothing is downloaded, trained or written."""
    home = tmp_path / "a clone"
    before = sorted(home.rglob("*"))
    done = run_sh("--sede=1", GPUS="2", PYTHON=sys.executable)
    assert done.returncode == 2 and "--sede=1; --help lists all flags" in done.stderr, done.stderr
    assert "data:" not in done.stdout and "training:" not in done.stdout
    assert [path for path in sorted(home.rglob("*")) if "__pycache__" not in path.parts] == before

@pytest.mark.parametrize("flags, command", [
    (["--seed=1"], "train_gpt.py --preset=pocket --seed=1"),
    (["--preset=pocket_tables"], "train_gpt.py --preset=pocket_tables"),
    (["--train_files=my folder/*.bin"], "train_gpt.py --preset=pocket --train_files=my folder/*.bin"),
    (["--seed", "1"], "train_gpt.py --preset=pocket --seed 1"),
    (["--resume=logs/x"], "train_gpt.py --resume=logs/x"),
    (["test", "--all"], f"{IN_TWO} --all"), (["test", "-rf", "-vv", "--tb=long"], f"{IN_TWO} -rf -vv --tb=long"),
    (["test", "-q", "-x", "--tb", "no", "-r", "a"], f"{IN_TWO} -q -x --tb no -r a"),
    (["test", "-v", "-k", "x"], f"{PYTEST} tests -v -k x"),
    (["test", "-k", "x y"], f"{PYTEST} tests -k x y"), (["test", "run.sh"], f"{PYTEST} run.sh"),
    (["--help"], "train_gpt.py --preset=pocket --help")])
def test_commands_on_a_machine_without_a_gpu(run_sh, flags, command) -> None:
    """--resume uses the preset of the earlier run. If the user names test files, only these files run."""
    done = run_sh(*flags, LACKS="extras")
    assert started(done) == command
    assert ": data/" not in done.stdout, "the data of pocket are in the repository"
    assert "flash-attn" not in done.stdout, "no faster attention is installed for a CPU"
    assert all(part in done.stdout for part in ("./run.sh test", "./run.sh day", "NPROC=")) == (flags == ["--help"])

@pytest.mark.parametrize("seqs, processes", [("8", 2), ("7", 1), ("", 1), ("HOME[$(touch stranger)]", 1)])
def test_choose_processes__does_not_read_an_invalid_seqs_per_step(run_sh, tmp_path, seqs, processes) -> None:
    done = run_sh("--preset=tiny", f"--seqs_per_step={seqs}", GPUS="2")
    assert started(done) == f"{LAUNCHER} " * (processes == 2) + f"train_gpt.py --preset=tiny --seqs_per_step={seqs}"
    assert not list(tmp_path.rglob("stranger")), "a flag is not executed"
    assert f" {max(1, len(os.sched_getaffinity(0)) // processes)}: " in done.stdout.splitlines()[-1], "cores are shared"

@pytest.mark.parametrize("variables, said", [
    ({}, "allocator: , compiled: {}/user/.cache/train_gpt/torchinductor,"),
    (dict(GPUS="2"), "allocator: expandable_segments:True,"),
    (dict(GPUS="2", PYTORCH_ALLOC_CONF="backend:native"), "allocator: backend:native,"),
    (dict(GPUS="2", PYTORCH_CUDA_ALLOC_CONF="backend:native"), "allocator: ,"),
    (dict(TORCHINDUCTOR_CACHE_DIR="{}/mine"), "compiled: {}/mine,"), (dict(HOME="/proc/nowhere"), "compiled: ,")])
def test_choose_processes__memory_and_caches_unless_the_user_says_how(run_sh, tmp_path, variables, said) -> None:
    done = run_sh("--preset=tiny", **{name: text.format(tmp_path) for name, text in variables.items()})
    assert said.format(tmp_path) in done.stderr

def test_a_link_to_the_script_in_another_shell(run_sh, tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a clone/run.sh")
    done = run_sh("--seed=1", script=("sh", "./link"))
    assert started(done) == "train_gpt.py --preset=pocket --seed=1"
    assert f"in {tmp_path / 'a clone'}" in done.stderr

WITH_GPUS = [f"--seqs_per_step={tg.Config().seqs_per_step}", "--train_files=x"]
PIP = "-m pip install --disable-pip-version-check --timeout 10 --retries 0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FA4 = [line for line in (ROOT / "requirements-gpu.txt").read_text().splitlines() if not line.startswith("#")]
FA4_OF_CUDA_12 = [line.replace("[cu13]", "") for line in FA4]
FA3 = "--no-deps --index-url https://download.pytorch.org/whl/{} flash-attn-3"

def installed(done: subprocess.CompletedProcess) -> list[str]:
    """Return the arguments of every pip call that installs into .venv with the time limit."""
    return re.findall(rf"^at most 600 s\n\.venv \d*: {PIP} (.*)$", done.stdout, re.MULTILINE)

@pytest.mark.parametrize("variables, packages", [
    ({}, [" ".join(FA4), FA3.format("cu130")]), (dict(TORCH="2.12.1"), [" ".join(FA4), FA3.format("cu130")]),
    (dict(TORCH="2.15.0+cu132", CUDA="13.2 10"), [" ".join(FA4)]),
    (dict(CUDA="12.6 9"), [" ".join(FA4_OF_CUDA_12), FA3.format("cu126")]),
    (dict(TORCH="2.11.0"), [FA3.format("cu130")]), (dict(TORCH="2.16.0"), [FA3.format("cu130")]),
    (dict(TORCH="2.11.0", CUDA="13.0 10"), []), (dict(CUDA="13.0 8"), []), (dict(CUDA="13.0 12"), [])])
def test_add_fast_attention__packages_that_the_gpu_and_torch_support(run_sh, variables, packages) -> None:
    """The packages are installed once, into a .venv that also has the packages of the user's interpreter."""
    given = dict(GPUS="2", LACKS="extras", PIP="works") | variables
    done = run_sh(*WITH_GPUS, **given)
    assert installed(done) == packages, done.stdout
    assert started(done).startswith(LAUNCHER)
    assert done.stdout.splitlines()[-1].startswith(".venv") == (packages != []), "uses the .venv"
    assert ("no FlashAttention 4" in done.stdout) == (given.get("TORCH") in ("2.11.0", "2.16.0"))
    assert ("-m venv --system-site-packages .venv" in done.stdout) == (packages != [])
    again = run_sh(*WITH_GPUS, **given)
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert "pip" not in again.stdout and "-m venv" not in again.stdout

@pytest.mark.parametrize("variables, missing", [
    (dict(PIP="fails"), "43"), (dict(PIP="hangs"), "43"), (dict(PIP="works", BROKEN="flash-attn-3"), "3"),
    (dict(PIP="works", BROKEN="flash-attn-4"), "4")])
def test_add_fast_attention__a_run_continues_without_it_with_a_warning(run_sh, variables, missing) -> None:
    done = run_sh(*WITH_GPUS, GPUS="2", LACKS="extras", **variables)
    assert started(done).startswith(LAUNCHER)
    failed = re.findall(r"warning: installing FlashAttention (\d) failed;.*; to retry: \S+ -m pip install", done.stdout)
    assert failed == [*missing], done.stdout
    assert done.stdout.splitlines()[-1].startswith(".venv") == (missing != "43"), "else the old interpreter"

def test_add_package__a_venv_with_another_torch_is_left_alone(run_sh, tmp_path) -> None:
    """Its packages do not matter: attention that was built for another torch does not work with this one."""
    other = tmp_path / "a clone/.venv/bin/python"
    other.parent.mkdir(parents=True)
    other.write_text(FAKE_PYTHON.replace("${TORCH-2.13.0}", "2.13.0+cpu"))
    other.chmod(0o755)
    done = run_sh(*WITH_GPUS, GPUS="2", LACKS="extras", PIP="works")
    assert installed(done) == [" ".join(FA4), FA3.format("cu130")], "a new .venv is created"

@pytest.mark.parametrize("flags, lacks, packages", [
    (WITH_GPUS, "", []), (["--help"], "extras", []), (["test", "-k", "x"], "extras", []),
    (["--preset=tiny"], "packages", ["requirements.txt"]),
    (["test"], "packages", ["requirements.txt", "tests/requirements.txt"])])
def test_set_up__installs_only_missing_packages(run_sh, flags, lacks, packages) -> None:
    done = run_sh(*flags, GPUS="2" * (lacks != "packages"), LACKS=lacks, PIP="works")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"pip install .*-r (.*)", done.stdout) == packages
    assert ("-m venv" in done.stdout) == (packages != [])

@pytest.mark.parametrize("gpus, pip, said", [
    ("", "works", ["for the CPU (about 190 MB), because no GPU is in use", f"{PIP} --index-url {CPU_INDEX} torch==",
                   "-r requirements.txt"]),
    ("", "fails", ["for the CPU (about 190 MB)", f"--index-url {CPU_INDEX}",
                   f"could not be installed from {CPU_INDEX};", "CUDA build with its libraries (2 to 3 GB)",
                   "press Ctrl-C", "-m pip install FILE.whl", "-r requirements.txt"]),
    ("2", "works", ["the CUDA build of torch==", "(2 to 3 GB), because this machine has GPUs", "-r requirements.txt"])])
def test_make_venv__says_what_it_downloads_and_how_large_it_is(run_sh, gpus, pip, said) -> None:
    """In this order, and pip is not quiet, so that it shows its progress."""
    done = run_sh("--preset=tiny", GPUS=gpus, LACKS="packages", PIP=pip)
    assert done.returncode == 0, done.stderr
    places = [done.stdout.find(text) for text in said]
    assert -1 not in places and places == sorted(places), done.stdout
    assert "--quiet" not in done.stdout and (CPU_INDEX in done.stdout) == (gpus == "")

@pytest.mark.parametrize("flags, variables, packages", [
    (["--device=cpu"], dict(GPUS="2"), []), (["--device=cpu", "--parts=steps"], dict(LACKS="extras"), ["pytest"]),
    (["--device", "cpu"], dict(GPUS="2", LACKS="extras"), ["pytest"]), (["--full"], dict(GPUS="2"), []),
    (["--full"], dict(GPUS="2", LACKS="extras"), ["flash-attn-4", "flash-attn-3", "pytest"])])
def test_run_day__what_it_needs_and_its_arguments(run_sh, flags, variables, packages) -> None:
    done = run_sh("day", *flags, PIP="works", **variables)
    assert started(done) == " ".join(["tests/gpu/day.py", *flags]), done.stdout
    found = installed(done)
    assert len(found) == len(packages) and all(map(str.__contains__, found, packages))
    assert ("allocator: expandable_segments:True" in done.stderr) == ("--full" in flags)

def test_run_day__goes_on_without_pytest(run_sh) -> None:
    done = run_sh("day", "--device=cpu", LACKS="extras", PIP="fails")
    assert started(done) == "tests/gpu/day.py --device=cpu" and "installing pytest failed" in done.stdout


# ---- GPUs that cannot train, and suitable interpreters
def shorten(script: Path, limit: str) -> None:
    """Replace a time limit in the script by 1 s."""
    text, count = re.subn(rf"\b{limit}\b", "limit_s=1", script.read_text())
    assert count == 1
    script.write_text(text)

def test_count_gpus__uses_the_cpu_with_a_warning_if_the_driver_hangs(run_sh, tmp_path) -> None:
    """The environment also prevents torch from calling the driver."""
    script = tmp_path / "a clone/run.sh"
    shorten(script, "limit_s=20")
    done = run_sh("--seed=1", GPUS="hang")
    assert started(done) == "train_gpt.py --preset=pocket --seed=1"
    assert "nvidia-smi did not return within 1 s" in done.stdout and "on the CPU" in done.stdout
    assert "GPUs  by NVML 1: train_gpt.py" in (tmp_path / "programs/commands").read_text()

@pytest.mark.parametrize("flags, variables", [
    (["--preset=pocket"], dict(CUDA_VISIBLE_DEVICES="")), (["--preset=pocket"], dict(CUDA_VISIBLE_DEVICES="-1")),
    (["--preset=pocket", "--device=cpu"], {})])
def test_count_gpus__the_user_may_want_the_cpu(run_sh, flags, variables) -> None:
    done = run_sh(*flags, GPUS="2", LACKS="extras", CUDA="none 0", **variables)
    assert started(done) == " ".join(["train_gpt.py", *flags]) and "on the CPU" in done.stdout

# A fake torch, whose GPUs fail in the given way.
FAKE_TORCH = """
import os, time
class version:
    cuda = {cuda!r}
class cuda:
    def device_count():
        return {count}
    def init():
        {init}
    def get_device_capability(index):
        return 9, 0
"""
OLD_DRIVER = ("The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver\\n"
              "by downloading and installing a new version")
HAS_HEADERS = "import sysconfig\nsysconfig.get_paths = lambda scheme: dict(include={!r})\n"
# Runs the checks of run.sh in a real interpreter, and only prints all other commands.
CHECKING_PYTHON = """#!/usr/bin/env bash
case "$*" in
    *train_gpt.py* | *fineweb* | "-m "*) echo "started: $*" ;;
    *) exec {} "$@" ;;
esac
"""

@pytest.fixture
def run_with_torch(run_sh, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Call run.sh with this interpreter, two GPUs, and a fake torch of a given version, whose GPUs behave as given."""
    def call(version: str, *flags: str, cuda: str | None = "13.0", count: int = 2, init: str = "pass",
             headers: Path = tmp_path / "include/python3.12", attention: str = FA4[0].split("==")[1],
             **variables: str) -> subprocess.CompletedProcess:
        packages, python = tmp_path / "packages", tmp_path / "programs/python"
        (packages / "torch").mkdir(parents=True)
        (packages / "torch/__init__.py").write_text(FAKE_TORCH.format(cuda=cuda, count=count, init=init))
        for name in ("numpy", "safetensors", "huggingface_hub", "tqdm"):
            (packages / f"{name}.py").touch()
        for name, release in (("torch", version), ("flash_attn_4", attention), ("flash_attn_3", "3.0.0")):
            folder = packages / f"{name}-{release}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
        (packages / "sitecustomize.py").write_text(HAS_HEADERS.format(str(headers)))
        python.write_text(CHECKING_PYTHON.format(sys.executable))
        python.chmod(0o755)
        variables = dict(PYTHONPATH=str(packages), PYTHON=str(python), GPUS="2") | variables
        return run_sh(*flags, **variables)

    return call

@pytest.mark.parametrize("gpus, variables, parts", [
    (dict(cuda=None, init="raise AssertionError('Torch not compiled with CUDA enabled')"), {},
     ("Torch not compiled with CUDA", "install --force-reinstall torch==2.13.0,", "CUDA_VISIBLE_DEVICES= ./run.sh")),
    (dict(init=f"raise RuntimeError('{OLD_DRIVER}')"), {},
     ("found version 12040", "580 or later", "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126")),
    (dict(init="raise RuntimeError('CUDA unknown error')"), {}, ("CUDA unknown error", "torch.cuda.init()")),
    (dict(count=0), dict(CUDA_VISIBLE_DEVICES="7"), ("2 GPU(s)", "CUDA_VISIBLE_DEVICES=7", "unset")),
    (dict(init="os._exit(3)"), {}, ("without an error", "PYTHON=")),
    (dict(init="time.sleep(50)"), {}, ("within 1 s", "restart the machine")),
    (dict(headers=Path("/nowhere/python3.12")), {}, ("/nowhere/python3.12", "apt install python3.12-dev")),
    ({}, dict(CC="/nowhere/cc"), ("C compiler", "/nowhere/cc", "apt install gcc"))],
    ids=["CPU build", "old driver", "unknown", "none visible", "crash", "hang", "no headers", "no compiler"])
def test_check_gpus__exits_with_a_hint_before_fetching(run_with_torch, tmp_path, gpus, variables, parts) -> None:
    script = tmp_path / "a clone/run.sh"
    if "sleep" in gpus.get("init", ""):
        shorten(script, "limit_s=120")
    done = run_with_torch("2.13.0", "--preset=record", **gpus, **variables)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()[1:]] == ["found", "expected", "hint"]
    assert all(part in done.stderr for part in parts), done.stderr

def test_check_headers__before_torch_is_fetched(run_sh) -> None:
    done = run_sh("--preset=record", GPUS="2", LACKS="packages", HEADERS="/nowhere/python3.12")
    assert done.returncode == 2 and done.stdout == "" and "apt install python3.12-dev" in done.stderr

@pytest.mark.parametrize("attention, fits", [("4.0.0b18", True), ("4.0.0b19", False)])
def test_check_gpus__usable_ones_train(run_with_torch, attention, fits) -> None:
    """The installed release of FlashAttention 4 is used if it is the required one, and else replaced in .venv."""
    done = run_with_torch("2.13.0", "--preset=record", "--train_files=x", attention=attention)
    assert done.returncode == 0, done.stderr
    assert f"started: {LAUNCHER} train_gpt.py --preset=record" in done.stdout
    assert ("installing flash-attn-4 into .venv" in done.stdout) != fits and "flash-attn-3" not in done.stdout

@pytest.mark.parametrize("version, taken, line", [
    ("2.11.0+cu130", True, True), ("2.12.1", True, True), ("2.13.0+cpu", True, False), ("2.13.0", True, False),
    ("2.13.1", True, True), ("2.14.1", True, True), ("2.15.0", True, True), ("2.10.0", False, False),
    ("2.1.0", False, False), ("3.0.0", False, False), ("3.11.0", False, False)])
def test_has_packages__torch_of_the_user(run_with_torch, version, taken, line) -> None:
    done = run_with_torch(version, "--preset=tiny", GPUS="")
    assert ("started: train_gpt.py --preset=tiny" in done.stdout) == taken, done.stdout
    assert ("started: -m venv" in done.stdout) != taken
    said = re.findall(r"set-up: torch (\S+) and Python (\S+) of .*; requirements.txt has torch 2.13.0", done.stdout)
    assert said == [(version, platform.python_version())] * line

@pytest.mark.parametrize("streams", [">&-", ">/dev/full", "<&- >&- 2>&-"])
def test_print_status__a_closed_or_full_console_does_not_end_a_run(run_sh, tmp_path, streams) -> None:
    """The messages of run.sh are lost then, and not written to another file."""
    script = ("bash", "-c", f'"{tmp_path}/a clone/run.sh" "$@" {streams}', "bash")
    done = run_sh("--seed=1", script=script, LACKS="packages")
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert "write error" not in done.stderr.split("allocator")[0]
    commands = (tmp_path / "a clone/.venv/bin/commands").read_text().splitlines()
    assert commands[-1].endswith(": train_gpt.py --preset=pocket --seed=1")


# ---- Signals, and the report after a run
# A fake trainer: copies the log of a run of record 10, then exits or waits. Prints the signals that it receives.
FAKE_TRAINER = '''"""
    seed: 0
    runs: 1
    sleep: seconds before the end
    fail: the exit status
"""
import json, os, shutil, signal, sys, time
flags = dict(word[2:].partition("=")[::2] for word in sys.argv[1:])
received = []
def end(number: int, _: object) -> None:
    received.append(int(number))
    time.sleep(0.3)
    os.write(1, f"received {received}\\n".encode())           # not print, which a signal may interrupt
    os._exit(128 + number)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
if os.environ.get("RANK", "0") == "0":
    for seed in range(int(flags.get("runs", 1))):
        folder = flags["run_dir"] + f"/seed_{seed}" * ("runs" in flags)
        shutil.copytree(f"records/2026-11-23_10_Pocket/logs/pocket_s{seed}", folder)
    print("begun", os.getpid(), flush=True)
    time.sleep(float(flags.get("sleep", 0)))
    print(json.dumps(dict(type="result")), flush=True)
sys.exit(int(flags.get("fail", 0)))
'''

def read_until(descriptor: int, pattern: str = "") -> str:
    """Read until the pattern matches, or without a pattern to the end. Fails after 60 s, with the text so far."""
    said, deadline = "", time.monotonic() + 60
    while not (pattern and re.search(pattern, said)):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"neither the end nor {pattern!r} within 60 s: {said!r}"
        piece = b""
        with contextlib.suppress(OSError):                    # a terminal without writers
            piece = os.read(descriptor, 1000)
        if not piece:
            assert not pattern, f"it ended before {pattern!r}: {said!r}"
            return said
        said += piece.decode()
    return said

MISSING = "raise ImportError('not installed')\n"
COUNTED = "for comparison: unigram entropy 4.792, trigram model of 563,200 training tokens 2.898, record 10 2.161"
REPORT = f"2.192 nats per token; {COUNTED}, inside its 99 % band 1.84 to 2.48"

@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start run.sh with a fake trainer and this interpreter, in which the packages `lacking` cannot be imported."""
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "records").symlink_to(ROOT / "records")
    (tmp_path / "train_gpt.py").write_text(FAKE_TRAINER)
    (tmp_path / "lacking").mkdir()

    processes = []

    def start(*flags: str, lacking: tuple[str, ...] = ("scipy",), **given: Any) -> subprocess.Popen:
        for name in lacking:
            (tmp_path / f"lacking/{name}.py").write_text(MISSING)
        environment = os.environ | dict(PYTHON=sys.executable, PYTHONPATH=str(tmp_path / "lacking"), NPROC="1")
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | given
        processes.append(subprocess.Popen(["./run.sh", "--preset=tiny", *flags], cwd=tmp_path,
                                          env=environment | options.pop("env", {}), **options))
        return processes[-1]

    yield start
    for process in processes:                                 # processes that a failed test left
        process.kill()
        process.wait(20)

@pytest.mark.parametrize("flags, processes, words", [
    ([], 1, REPORT), (["--run_dir=my run"], 1, REPORT), (["--seed=0"], 2, REPORT),
    (["--runs=2"], 1, f"2.164 nats per token, mean of 2 runs; {COUNTED}")])
def test_print_follower__reports_a_finished_run(follow, tmp_path, flags, processes, words) -> None:
    """The report on stderr, and the picture, need only the packages of the trainer."""
    out, err = follow(*flags, env=dict(NPROC=str(processes))).communicate(timeout=60)
    assert words in err and json.loads(out.splitlines()[-1]) == dict(type="result"), err
    assert re.fullmatch(r"begun \d+", out.splitlines()[-2]), "nothing else on stdout"
    picture, = tmp_path.glob("*run/loss.svg" if "my" in str(flags) else "logs/*-tiny-????????/loss.svg")
    assert f"picture: {picture.relative_to(tmp_path)}" in err

def test_print_follower__a_terminal_without_matplotlib_gets_a_picture_too(follow, tmp_path) -> None:
    """Earlier, the picture needed a package that `./run.sh` does not install."""
    ours, theirs = pty.openpty()
    process = follow(lacking=("scipy", "matplotlib"), stderr=theirs)
    process.communicate(timeout=60)
    os.close(theirs)
    shown = read_until(ours)
    assert process.returncode == 0 and REPORT in shown, shown
    picture, = tmp_path.glob("logs/*/loss.svg")
    assert f"picture: {picture.relative_to(tmp_path)}" in shown

@pytest.mark.parametrize("main, status", [
    ("", 3), ("raise SystemExit(5)", 0), ("import os; os.kill(os.getpid(), 9)", 0), ("(", 0)])
def test_print_follower__the_status_is_the_trainers(follow, tmp_path, main, status) -> None:
    """A failure of the record tools does not change it. A failed run gets no report."""
    if main:
        (tmp_path / "records").unlink()
        shutil.copytree(ROOT / "records/2026-11-23_10_Pocket", tmp_path / "records/2026-11-23_10_Pocket")
        (tmp_path / "records/__main__.py").write_text(main)
    process = follow(f"--fail={status}")
    out, err = process.communicate(timeout=60)
    assert process.returncode == status and out.endswith(json.dumps(dict(type="result")) + "\n")
    assert "nats per token" not in err and not list(tmp_path.glob("logs/*/loss.svg"))

@pytest.mark.parametrize("number, to, status", [
    (signal.SIGTERM, "run.sh", 143), (signal.SIGHUP, "run.sh", 129), (signal.SIGINT, "run.sh", 130),
    (signal.SIGINT, "terminal", 130), (signal.SIGKILL, "trainer", 137), (signal.SIGKILL, "run.sh", -9)])
def test_print_follower__a_signal_reaches_the_trainer_once(follow, number, to, status) -> None:
    """A terminal signals both processes itself. If the parent is killed, the trainer ends too."""
    ours, theirs = pty.openpty()
    given = dict(preexec_fn=lambda: os.login_tty(theirs), stdout=None, stderr=None) if to == "terminal" else {}
    process = follow("--sleep=50", **given)
    os.close(theirs)
    console = process.stdout.fileno() if process.stdout else ours
    said = read_until(console, r"begun \d+\s")
    if to == "terminal":
        os.write(ours, b"\x03")
    else:
        trainer = int(re.search(r"begun (\d+)", said)[1])
        os.kill(trainer if to == "trainer" else process.pid, number)
    assert process.wait(20) == status
    rest = read_until(console)
    assert rest.count("received") == (number != signal.SIGKILL)
    assert "result" not in rest and "nats per token" not in rest
    assert number == signal.SIGKILL or f"received [{int(number)}]" in rest

def test_run_sh__repeats_facts_of_other_files() -> None:
    """run.sh cannot read these facts from other files, because it runs before packages are installed."""
    script = (ROOT / "run.sh").read_text()
    assert re.search(r" seqs=(\d+)$", script, re.M)[1] == str(tg.Config().seqs_per_step)
    trainer = (ROOT / "train_gpt.py").read_text()
    assert all(f"    {name}: " in trainer for name in tg.Config.__dataclass_fields__), "how run.sh finds flags"
    requirements = (ROOT / "requirements.txt").read_text()
    pinned = dict(line.split("==") for line in requirements.splitlines())
    needs = re.search(r"^needs = \[(.*)\]$", script, re.M)[1]
    assert set(re.findall(r"\w+", needs)) == pinned.keys()
    versions = re.search(r're\.match\(r"(.*?)"', script)[1]
    assert re.match(versions, pinned["torch"])
    assert FA4[0].split("==")[0] == "flash-attn-4[cu13]", "run.sh checks the version of the first package"
    for name in ("FA4", "FA3"):
        assert f"add_package {tg.ATTENTION_PACKAGES[name]} " in script
