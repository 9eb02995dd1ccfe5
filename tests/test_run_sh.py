"""run.sh: what it starts, and its errors, with an interpreter that only repeats its arguments; what follows a run."""
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from common import ROOT

import train_gpt as tg

# LACKS=packages: none are installed; LACKS=attention: no faster attention, and pip does as PIP says.
PARROT = """#!/usr/bin/env bash
here=$(dirname "$0")
if [[ $1 == - ]]; then [[ ${LACKS-} != packages ]]; exit; fi
if [[ $1 == -c ]]; then
    [[ $2 != *flash-attn-4* || ${LACKS-} != attention ]] || exec test -e "$here/flash-attn-4"
    exec echo 2                          # GPUs, as torch counts them
fi
echo "allocator: ${PYTORCH_ALLOC_CONF-}, compiled: ${TORCHINDUCTOR_CACHE_DIR-}, in $PWD" >&2
echo "$(basename "$(dirname "$here")") ${OMP_NUM_THREADS-}: $*"
if [[ $2 == venv ]]; then
    mkdir -p .venv/bin && cp "$0" .venv/bin/python
elif [[ $2 == pip && $* == *requirements-gpu.txt ]]; then
    [[ ${PIP-} == works ]] && touch "$here/flash-attn-4" || exit 1
fi
"""
PATIENCE = """#!/usr/bin/env bash
echo "at most $1 s"
[[ ${PIP-} != hangs ]] || exit 124       # as a program that was ended says
shift
exec "$@"
"""
GPUS = """#!/usr/bin/env bash
[[ -n ${GPUS-} ]] || exit 9
echo GPU 0: x; echo GPU 1: y
"""
LAUNCHER = "-m torch.distributed.run --standalone --nproc_per_node=2"
PYTEST = "-m pytest -q --durations=10"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

@pytest.fixture
def run_sh(tmp_path: Path):
    """Call run.sh in a copy of its own, in a folder with a blank, with flags and environment variables."""
    home, programs = tmp_path / "a clone", tmp_path / "programs"
    home.mkdir()
    for name in ("run.sh", "train_gpt.py"):
        shutil.copy(ROOT / name, home)
    programs.mkdir()
    for name, text in (("parrot", PARROT), ("nvidia-smi", GPUS), ("timeout", PATIENCE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def call(*flags: str, script: tuple = (home / "run.sh",), **variables: str) -> subprocess.CompletedProcess:
        environment = dict(PYTHON=str(programs / "parrot"), PATH=f"{programs}:{os.environ['PATH']}",
                           HOME=str(tmp_path / "user"))
        return subprocess.run([*script, *flags], env=environment | variables, cwd=tmp_path, capture_output=True,
                              text=True, timeout=60)

    return call

def started(done: subprocess.CompletedProcess) -> str:
    """Return the last command that the parrot was asked to run."""
    assert done.returncode == 0, done.stderr
    return re.findall(r"^\S* \d*: (.*)$", done.stdout, re.MULTILINE)[-1]

@pytest.mark.parametrize("flags, variables, parts", [
    *((["--preset=tiny"], dict(NPROC=n), (f"'{n}'", "1 or more")) for n in ("0", "", "1.5", "99999")),
    ([], dict(PYTHON="python-of-nowhere"), ("python-of-nowhere", "Python 3.11 or later", "PYTHON=")),
    (["--preset", "pocket"], {}, ("--preset", "--preset=VALUE")),
    (["--run_dir", "logs/x"], {}, ("--run_dir", "--run_dir=VALUE")),
    (["--savee=w"], {}, ("unknown flag", "--savee", "./run.sh --help")), (["-x"], {}, ("unknown flag", "-x")),
    (["--seed=1", "fox"], {}, ("fox", "--sample=DIR")), (["--seed=1", "--resume=logs/x", "fox"], {}, ("fox",))])
def test_die__found_expected_do(run_sh, flags, variables, parts):
    done = run_sh(*flags, **variables)
    title, *lines = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout, "before data are prepared"
    assert title.startswith("error: ")
    assert [line.split(":")[0].strip() for line in lines] == ["found", "expected", "do"]
    assert all(part in done.stderr for part in parts), done.stderr

@pytest.mark.parametrize("flags, command", [
    (["--seed=1"], "train_gpt.py --preset=pocket --seed=1"),
    (["--preset=pocket_tables"], "train_gpt.py --preset=pocket_tables"),
    (["--train_files=my folder/*.bin"], "train_gpt.py --preset=pocket --train_files=my folder/*.bin"),
    (["--seed", "1"], "train_gpt.py --preset=pocket --seed 1"),
    (["--sample=w", "def"], "train_gpt.py --sample=w def"), (["def", "--sample", "w"], "train_gpt.py def --sample w"),
    (["--resume=logs/x"], "train_gpt.py --resume=logs/x"),
    (["test", "--all"], f"{PYTEST} -n 2 --dist=loadfile --no-loadscope-reorder tests --all"),
    (["test", "-k", "x y"], f"{PYTEST} tests -k x y"), (["test", "run.sh"], f"{PYTEST} run.sh"),
    (["--help"], "train_gpt.py --preset=pocket --help")])
def test_what_is_started_on_a_machine_without_a_gpu(run_sh, flags, command):
    """A save or an earlier run knows its preset; tests that the user names are the only ones."""
    done = run_sh(*flags, LACKS="attention")
    assert started(done) == command
    assert ": data/" not in done.stdout, "the data of pocket are here: nothing makes or fetches any"
    assert "requirements-gpu.txt" not in done.stdout, "a CPU gets no faster attention"
    assert all(part in done.stdout for part in ("./run.sh test", "NPROC=")) == (flags == ["--help"])

@pytest.mark.parametrize("slots, processes", [("8", 2), ("7", 1), ("", 1), ("HOME[$(touch stranger)]", 1)])
def test_choose_processes__slots_that_are_no_number_are_left_to_the_trainer(run_sh, tmp_path, slots, processes):
    done = run_sh("--preset=tiny", f"--num_slots={slots}", GPUS="2")
    assert started(done) == f"{LAUNCHER} " * (processes == 2) + f"train_gpt.py --preset=tiny --num_slots={slots}"
    assert not list(tmp_path.rglob("stranger")), "a flag is no program"
    assert f" {max(1, len(os.sched_getaffinity(0)) // processes)}: " in done.stdout.splitlines()[-1], "cores are shared"

@pytest.mark.parametrize("variables, said", [
    ({}, "allocator: , compiled: {}/user/.cache/train_gpt/torchinductor,"),
    (dict(GPUS="2"), "allocator: expandable_segments:True,"),
    (dict(GPUS="2", PYTORCH_ALLOC_CONF="backend:native"), "allocator: backend:native,"),
    (dict(GPUS="2", PYTORCH_CUDA_ALLOC_CONF="backend:native"), "allocator: ,"),
    (dict(TORCHINDUCTOR_CACHE_DIR="{}/mine"), "compiled: {}/mine,"), (dict(HOME="/proc/nowhere"), "compiled: ,")])
def test_choose_processes__memory_and_caches_unless_the_user_says_how(run_sh, tmp_path, variables, said):
    done = run_sh("--preset=tiny", **{name: text.format(tmp_path) for name, text in variables.items()})
    assert said.format(tmp_path) in done.stderr

def test_a_link_to_the_script_in_another_shell(run_sh, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a clone/run.sh")
    done = run_sh("--seed=1", script=("sh", "./link"))
    assert started(done) == "train_gpt.py --preset=pocket --seed=1"
    assert f"in {tmp_path / 'a clone'}" in done.stderr

WITH_GPUS = [f"--num_slots={tg.Config().num_slots}", "--train_files=x"]
INSTALLS = "-m pip install --quiet --disable-pip-version-check --timeout 10 --retries 0 -r requirements-gpu.txt"

def test_add_fast_attention__on_top_of_the_users_interpreter(run_sh):
    on_gpus = dict(GPUS="2", LACKS="attention", PIP="works")
    lines = run_sh(*WITH_GPUS, **on_gpus).stdout.splitlines()
    assert any(line.startswith(".venv") and line.endswith(INSTALLS) for line in lines) and "at most 600 s" in lines
    assert any(line.endswith("-m venv --system-site-packages .venv") for line in lines)
    again = run_sh(*WITH_GPUS, **on_gpus)
    for last in (lines[-1], again.stdout.splitlines()[-1]):
        assert last.startswith(".venv") and LAUNCHER in last, "with the interpreter that has it now"
    assert again.returncode == 0 and "pip" not in again.stdout and "-m venv" not in again.stdout

@pytest.mark.parametrize("pip", ["fails", "hangs"])
def test_add_fast_attention__a_run_goes_on_aloud_without_it(run_sh, pip):
    done = run_sh(*WITH_GPUS, GPUS="2", LACKS="attention", PIP=pip)
    assert started(done).startswith(LAUNCHER) and "NO faster attention" in done.stdout
    assert not done.stdout.splitlines()[-1].startswith(".venv"), "with the interpreter of before"

@pytest.mark.parametrize("flags, lacks, packages", [
    (WITH_GPUS, "", []), (["--help"], "attention", []), (["test", "-k", "x"], "attention", []),
    (["--preset=tiny"], "packages", ["requirements.txt"]),
    (["test"], "packages", ["requirements.txt", "tests/requirements.txt"])])
def test_set_up__only_what_is_needed_and_not_there(run_sh, flags, lacks, packages):
    done = run_sh(*flags, GPUS="2" * (lacks != "packages"), LACKS=lacks, PIP="works")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"pip install --quiet .*-r (.*)", done.stdout) == packages
    assert ("-m venv" in done.stdout) == (packages != [])

# Writes the log of a run of record 10, and ends or waits; says of which signals it was told.
TRAINER = '''"""
    seed: 0
    runs: 1
    sleep: seconds before the end
    fail: the exit status
"""
import json, os, shutil, signal, sys, time
flags = dict(word[2:].partition("=")[::2] for word in sys.argv[1:])
told = []
def end(number, _):
    told.append(int(number))
    time.sleep(0.3)
    os.write(1, f"told {told}\\n".encode())                   # a print may be under way
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
MISSING = "raise ImportError('not installed')\n"
PLACE = "2.192 nats per token: a trigram model has 2.806, record 10 2.161 +- 0.028: inside its spread, 2.02 to 2.30"

@pytest.fixture
def follow(tmp_path: Path):
    """Start run.sh beside a trainer that does not train, with this interpreter, where scipy and `lacking` miss."""
    shutil.copy(ROOT / "run.sh", tmp_path)
    (tmp_path / "records").symlink_to(ROOT / "records")
    (tmp_path / "train_gpt.py").write_text(TRAINER)
    (tmp_path / "lacking").mkdir()

    def start(*flags: str, lacking=("scipy",), **given) -> subprocess.Popen:
        for name in lacking:
            (tmp_path / f"lacking/{name}.py").write_text(MISSING)
        environment = os.environ | dict(PYTHON=sys.executable, PYTHONPATH=str(tmp_path / "lacking"), NPROC="1")
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | given
        return subprocess.Popen(["./run.sh", "--preset=tiny", *flags], cwd=tmp_path,
                                env=environment | options.pop("env", {}), **options)

    return start

@pytest.mark.parametrize("flags, processes, words", [
    ([], 1, PLACE), (["--run_dir=my run"], 1, PLACE), (["--seed=0"], 2, PLACE),
    (["--runs=2"], 1, "2.164 nats per token, mean of 2 runs: a trigram model has 2.806, record 10 2.161")])
def test_print_follower__says_where_a_run_stands(follow, tmp_path, flags, processes, words):
    """On stderr, with the packages of the trainer, and only then is there a picture."""
    out, err = follow(*flags, env=dict(NPROC=str(processes))).communicate(timeout=60)
    assert words in err and json.loads(out.splitlines()[-1]) == dict(type="result"), err
    assert re.fullmatch(r"begun \d+", out.splitlines()[-2]), "nothing else on stdout"
    picture, = tmp_path.glob("*run/loss.png" if "my" in str(flags) else "logs/*-tiny-????????/loss.png")
    assert f"picture: {picture.relative_to(tmp_path)}" in err

def test_print_follower__a_terminal_without_matplotlib_gets_a_curve(follow, tmp_path):
    ours, theirs = pty.openpty()
    process = follow(lacking=("scipy", "matplotlib"), stderr=theirs)
    process.communicate(timeout=60)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    assert process.returncode == 0 and PLACE in shown and not list(tmp_path.glob("logs/*/loss.png"))
    assert len(re.findall(r"^ +\d\.\d{3} \|[ o]{60}\s*$", shown, re.M)) == 10, shown

@pytest.mark.parametrize("main, status", [
    ("", 3), ("raise SystemExit(5)", 0), ("import os; os.kill(os.getpid(), 9)", 0), ("(", 0)])
def test_print_follower__the_status_is_the_trainers(follow, tmp_path, main, status):
    """Whatever becomes of the record tools; and of a run that failed nothing is said."""
    if main:
        (tmp_path / "records").unlink()
        shutil.copytree(ROOT / "records/2026-11-23_10_Pocket", tmp_path / "records/2026-11-23_10_Pocket")
        (tmp_path / "records/__main__.py").write_text(main)
    process = follow(f"--fail={status}")
    out, err = process.communicate(timeout=60)
    assert process.returncode == status and out.endswith(json.dumps(dict(type="result")) + "\n")
    assert "nats per token" not in err and not list(tmp_path.glob("logs/*/loss.png"))

@pytest.mark.parametrize("number, to, status", [
    (signal.SIGTERM, "run.sh", 143), (signal.SIGHUP, "run.sh", 129), (signal.SIGINT, "run.sh", 130),
    (signal.SIGINT, "terminal", 130), (signal.SIGKILL, "trainer", 137), (signal.SIGKILL, "run.sh", -9)])
def test_print_follower__a_signal_reaches_the_trainer_once(follow, number, to, status):
    """A terminal tells both itself; a parent that is killed leaves no trainer."""
    ours, theirs = pty.openpty()
    given = dict(preexec_fn=lambda: os.login_tty(theirs), stdout=None, stderr=None) if to == "terminal" else {}
    process = follow("--sleep=50", **given)
    os.close(theirs)
    read = process.stdout.readline if process.stdout else lambda: os.read(ours, 1000).decode()
    said = ""
    while not re.search(r"begun \d+", said):
        said += read()
    if to == "terminal":
        os.write(ours, b"\x03")
    else:
        trainer = int(re.search(r"begun (\d+)", said)[1])
        os.kill(trainer if to == "trainer" else process.pid, number)
    assert process.wait(20) == status
    rest = process.stdout.read() if process.stdout else os.read(ours, 1000).decode()       # its end, too
    assert rest.count("told") == (number != signal.SIGKILL)
    assert "result" not in rest and "nats per token" not in rest
    assert number == signal.SIGKILL or f"told [{int(number)}]" in rest

def test_what_the_script_has_to_know_before_there_is_a_trainer():
    """Facts of other files that it repeats, since it cannot import anything yet."""
    script = (ROOT / "run.sh").read_text()
    assert re.search(r" slots=(\d+)$", script, re.M)[1] == str(tg.Config().num_slots)
    requirements = (ROOT / "requirements.txt").read_text()
    pinned = dict(line.split("==") for line in requirements.splitlines())
    needs = re.search(r"^needs = \[(.*)\]$", script, re.M)[1]
    assert set(re.findall(r"\w+", needs)) == pinned.keys()
    versions = re.search(r're\.match\(r"(.*?)"', script)[1]
    assert re.match(versions, pinned["torch"])
    lines = [line for line in (ROOT / "requirements-gpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert "flash-attn-4[cu13]" in dict(line.split("==") for line in lines)
    assert tg.ATTENTION_PACKAGES["FA4"] == "flash-attn-4" and '"flash-attn-4"' in script
