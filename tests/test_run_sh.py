"""run.sh: what it starts, and its errors, with an interpreter that only repeats its arguments."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from common import ROOT

import train_gpt as tg

PARROT = """#!/usr/bin/env bash
[[ $1 != - ]] || exit 0                  # has all packages
[[ $1 != -c ]] || exec echo 2             # GPUs, as torch counts them
echo "allocator: ${PYTORCH_ALLOC_CONF-}" >&2
echo "compiled: ${TORCHINDUCTOR_CACHE_DIR-}" >&2
echo "in $PWD" >&2
echo "$OMP_NUM_THREADS: $*"
"""
BARE = """#!/usr/bin/env bash
[[ $1 != - ]] || exit 1                  # lacks packages
[[ $1 != -c ]] || exit 0                  # is late enough
[[ $2 != venv ]] || { mkdir -p .venv/bin && cp "$0" .venv/bin/python; exit; }
echo "$*"
"""
PLAIN = """#!/usr/bin/env bash
here=$(dirname "$0")
[[ $1 != - ]] || exit 0                  # has all packages
if [[ $1 == -c ]]; then
    [[ $2 != *flash-attn-4* ]] || exec test -e "$here/flash-attn-4"
    exec echo 2                          # GPUs, as torch counts them
fi
echo "$(basename "$(dirname "$here")"): $*"
if [[ $2 == venv ]]; then
    mkdir -p .venv/bin && cp "$0" .venv/bin/python
elif [[ $2 == pip ]]; then
    [[ ${PIP-} == works ]] && touch "$here/flash-attn-4" || exit 1
fi
"""                                      # lacks faster attention
PATIENCE = """#!/usr/bin/env bash
echo "at most $1 s"
[[ ${PIP-} != hangs ]] || exit 124       # as a program that was ended says
shift
exec "$@"
"""
TWO_GPUS = "#!/usr/bin/env bash\necho GPU 0: x\necho GPU 1: y\n"
NO_GPU = "#!/usr/bin/env bash\nexit 9\n"
ERROR_LINES = ["found", "expected", "do"]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def run_sh(tmp_path: Path):
    """Call run.sh in a copy of its own, in a folder with a blank, with flags and environment variables."""
    home = tmp_path / "a clone"
    home.mkdir()
    shutil.copy(ROOT / "run.sh", home)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("parrot", PARROT), ("nvidia-smi", NO_GPU)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def call(*flags: str, script: tuple = (home / "run.sh",), **variables: str) -> subprocess.CompletedProcess:
        environment = dict(os.environ, PYTHON=str(programs / "parrot"))
        environment["PATH"] = f"{programs}:{environment['PATH']}"
        for name in ("NPROC", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
                     "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
            environment.pop(name, None)
        environment |= dict(HOME=str(tmp_path / "user")) | variables
        return subprocess.run([*script, *flags], env=environment, cwd=tmp_path, capture_output=True, text=True,
                              timeout=60)

    return call


def started(done: subprocess.CompletedProcess) -> str:
    """The last command that the parrot was asked to run."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].partition(": ")[2]


def check_error(done: subprocess.CompletedProcess, *parts: str) -> None:
    assert done.returncode == 1
    title, *lines = done.stderr.splitlines()
    assert title.startswith("error: ")
    assert [line.split(":")[0].strip() for line in lines] == ERROR_LINES
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize("processes", ["0", "abc", "-1", "", "1.5", "99999"])
def test_a_number_of_processes_that_is_none(run_sh, processes):
    check_error(run_sh("--preset=tiny", NPROC=processes), f"'{processes}'", "1 or more")


def test_an_interpreter_that_is_not_there(run_sh):
    check_error(run_sh(PYTHON="python-of-nowhere"), "python-of-nowhere", "Python 3.11 or later", "PYTHON=")


@pytest.mark.parametrize("flag", ["--preset", "--train_files", "--num_slots"])
def test_a_flag_without_its_value(run_sh, flag):
    check_error(run_sh(flag, "pocket"), flag, f"{flag}=VALUE")


def test_training_on_a_machine_without_a_gpu(run_sh):
    done = run_sh("--seed=1")
    assert "data/pocket.py" in done.stdout
    assert started(done) == "train_gpt.py --preset=pocket --seed=1"


def test_a_preset_with_tables_has_the_data_of_its_plain_one(run_sh):
    """Each of the trainer's presets whose name goes on behind that of another trains on the same shards."""
    done = run_sh("--preset=pocket_tables")
    assert "data/pocket.py" in done.stdout
    assert started(done) == "train_gpt.py --preset=pocket_tables"


def test_own_data_are_not_fetched(run_sh):
    done = run_sh("--preset=pocket", "--train_files=my folder/*.bin")
    assert "data/pocket.py" not in done.stdout
    assert started(done) == "train_gpt.py --preset=pocket --train_files=my folder/*.bin"


def test_several_processes_share_the_cores(run_sh):
    done = run_sh("--preset=tiny", NPROC="2")
    launcher = "-m torch.distributed.run --standalone --nproc_per_node=2"
    assert started(done) == f"{launcher} train_gpt.py --preset=tiny"
    threads = int(done.stdout.splitlines()[-1].partition(":")[0])
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.parametrize("slots, processes", [
    ("8", 2), ("7", 1), ("abc", 1), ("", 1), ("1" * 30, 1), ("HOME[$(touch stranger)]", 1)])
def test_slots_that_are_no_number_are_left_to_the_trainer_to_name(run_sh, tmp_path, slots, processes):
    (tmp_path / "programs/nvidia-smi").write_text(TWO_GPUS)
    flags = ["--preset=tiny", f"--num_slots={slots}"]
    command = started(run_sh(*flags))
    assert command.endswith(f"train_gpt.py {flags[0]} {flags[1]}")
    assert ("--nproc_per_node=2" in command) == (processes == 2)
    assert not list(tmp_path.rglob("stranger")), "a flag is no program"


@pytest.mark.parametrize("gpus, variables, allocator", [
    (NO_GPU, {}, ""),
    (TWO_GPUS, {}, "expandable_segments:True"),
    (TWO_GPUS, dict(PYTORCH_ALLOC_CONF="backend:native"), "backend:native"),
    (TWO_GPUS, dict(PYTORCH_CUDA_ALLOC_CONF="backend:native"), "")])
def test_on_gpus_memory_grows_unless_the_user_says_how(run_sh, tmp_path, gpus, variables, allocator):
    (tmp_path / "programs/nvidia-smi").write_text(gpus)
    done = run_sh("--preset=tiny", **variables)
    assert f"allocator: {allocator}" in done.stderr.splitlines()


@pytest.mark.parametrize("variables, folder", [
    ({}, "user/.cache/train_gpt/torchinductor"),
    (dict(XDG_CACHE_HOME="{}/caches"), "caches/train_gpt/torchinductor"),
    (dict(TORCHINDUCTOR_CACHE_DIR="{}/mine"), "mine"),
    (dict(HOME="/proc/nowhere"), None)])
def test_what_is_compiled_is_kept_unless_the_user_says_where(run_sh, tmp_path, variables, folder):
    done = run_sh("--preset=tiny", **{name: text.format(tmp_path) for name, text in variables.items()})
    assert f"compiled: {tmp_path / folder if folder else ''}" in done.stderr.splitlines()


@pytest.mark.parametrize("script", [("./link",), ("sh", "./link"), ("bash", "--posix", "./link")])
def test_a_link_to_the_script_and_other_shells(run_sh, tmp_path, script):
    """All run in the script's own folder, in bash."""
    (tmp_path / "link").symlink_to(tmp_path / "a clone/run.sh")
    done = run_sh("--seed=1", script=script)
    assert started(done) == "train_gpt.py --preset=pocket --seed=1"
    assert f"in {tmp_path / 'a clone'}" in done.stderr.splitlines()


WITH_GPUS = [f"--num_slots={tg.Config().num_slots}", "--train_files=x"]
INSTALLS = "-m pip install --quiet --disable-pip-version-check --timeout 10 --retries 0 -r requirements-gpu.txt"


@pytest.fixture
def on_gpus(run_sh, tmp_path):
    """run.sh where two GPUs are, and an interpreter without faster attention; pip does as the variable PIP says."""
    programs = tmp_path / "programs"
    (programs / "nvidia-smi").write_text(TWO_GPUS)
    for name, text in (("parrot", PLAIN), ("timeout", PATIENCE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return run_sh


def test_faster_attention_goes_on_top_of_the_users_interpreter(on_gpus):
    done = on_gpus(*WITH_GPUS, PIP="works")
    lines = done.stdout.splitlines()
    assert f".venv: {INSTALLS}" in lines and "at most 600 s" in lines
    assert "-m venv --system-site-packages .venv" in done.stdout
    assert lines[-1].startswith(".venv: -m torch.distributed.run"), "with the interpreter that has it now"
    again = on_gpus(*WITH_GPUS, PIP="works")
    assert again.returncode == 0 and "pip" not in again.stdout and "-m venv" not in again.stdout
    assert again.stdout.splitlines()[-1].startswith(".venv: -m torch.distributed.run")


@pytest.mark.parametrize("pip", ["fails", "hangs"])
def test_a_run_goes_on_aloud_without_faster_attention(on_gpus, pip):
    done = on_gpus(*WITH_GPUS, PIP=pip)
    assert done.returncode == 0, done.stderr
    assert "NO faster attention" in done.stdout
    assert "-m torch.distributed.run" in done.stdout.splitlines()[-1]
    assert not done.stdout.splitlines()[-1].startswith(".venv"), "with the interpreter of before"


def test_faster_attention_that_is_there_is_left_alone(on_gpus, tmp_path):
    (tmp_path / "programs/flash-attn-4").write_text("")
    done = on_gpus(*WITH_GPUS, PIP="works")
    assert done.returncode == 0 and "pip" not in done.stdout and "venv" not in done.stdout


@pytest.mark.parametrize("flags", [["--help"], ["--sample=w", "x"], ["test", "-k", "x"]])
def test_faster_attention_is_for_training(on_gpus, flags):
    assert "requirements-gpu.txt" not in on_gpus(*flags, PIP="works").stdout


def test_a_cpu_gets_no_faster_attention(on_gpus, tmp_path):
    (tmp_path / "programs/nvidia-smi").write_text(NO_GPU)
    assert "requirements-gpu.txt" not in on_gpus("--preset=tiny", PIP="works").stdout


def test_the_packages_for_gpus_are_those_that_the_trainer_knows():
    lines = [line for line in (ROOT / "requirements-gpu.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert "flash-attn-4[cu13]" in pinned and tg.ATTENTION_PACKAGES["FA4"] == "flash-attn-4"
    assert f'"{tg.ATTENTION_PACKAGES["FA4"]}"' in (ROOT / "run.sh").read_text()


@pytest.mark.parametrize("flags, command", [
    (["--sample=w", "def"], "train_gpt.py --sample=w def"),
    (["--resume=logs/x"], "train_gpt.py --resume=logs/x"),
    (["test"], "-m pytest -q --durations=10 -n 2 --dist=loadfile --no-loadscope-reorder tests"),
    (["test", "--all"], "-m pytest -q --durations=10 -n 2 --dist=loadfile --no-loadscope-reorder tests --all"),
    (["test", "-k", "x y"], "-m pytest -q --durations=10 tests -k x y"),
    (["test", "run.sh"], "-m pytest -q --durations=10 run.sh"),
])
def test_what_takes_its_settings_from_elsewhere(run_sh, flags, command):
    """A save or an earlier run knows its preset; tests that the user names are the only ones."""
    assert started(run_sh(*flags)) == command


def test_help_has_all_of_run_sh_and_the_preset_of_this_machine(run_sh):
    done = run_sh("--help")
    assert started(done) == "train_gpt.py --preset=pocket --help"
    for part in ("./run.sh test", "--all", "PYTHON=", "NPROC=", "the preset is pocket"):
        assert part in done.stdout


@pytest.mark.parametrize("flags", [["--preset=tiny"], ["--sample=w"], ["--resume=logs/x"], ["--help"], ["test"]])
def test_packages_of_the_tests_are_installed_for_tests_alone(run_sh, tmp_path, flags):
    (tmp_path / "programs/parrot").write_text(BARE)
    done = run_sh(*flags)
    assert done.returncode == 0, done.stderr
    assert "pip install --quiet --disable-pip-version-check -r requirements.txt" in done.stdout
    assert ("-r tests/requirements.txt" in done.stdout) == (flags == ["test"])


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
