#!/usr/bin/env bash
# ./run.sh [flags of train_gpt.py]          set up, get data, train; --help shows the flags
# ./run.sh test [arguments of pytest]       set up, run the tests; --all adds the long ones
#
# PYTHON=...  the interpreter to use [python3]. What it lacks goes into .venv beside this file. Where GPUs are, that is
#             faster attention too (requirements-gpu.txt), which a run goes on without.
# NPROC=...   processes that train together [as many as GPUs and num_slots allow; 1 without a GPU]
# PYTORCH_ALLOC_CONF=...  torch's allocator on GPUs [expandable_segments:True]
# TORCHINDUCTOR_CACHE_DIR=...  what torch has compiled, for the next run [~/.cache/train_gpt/torchinductor]
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"              # sh run.sh
set -euo pipefail

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n  found:    %s\n  expected: %s\n  do:       %s\n' "$@" >&2; exit 2; }

help() {
    cat <<TEXT
usage: ./run.sh [--field=value ...]       set up, get data, train, print the result and a sample
       ./run.sh test [--all] [...]        set up, run the tests; other arguments go to pytest
On this machine the preset is $preset unless --preset says otherwise. Its flags and their defaults:

TEXT
    "$python" train_gpt.py "$@"
    cat <<TEXT

environment of ./run.sh:
  PYTHON=...   interpreter, 3.11 or later; what it lacks goes into .venv [python3]
  NPROC=...    processes that train together; divides num_slots [all GPUs; 1 on a CPU]
  PYTORCH_ALLOC_CONF=...  torch's allocator on GPUs [expandable_segments:True]
  TORCHINDUCTOR_CACHE_DIR=...  what torch has compiled, for the next run [~/.cache/train_gpt/torchinductor]
TEXT
}

find_python() {
    local wanted=${PYTHON:-python3}
    python=$(command -v "$wanted") ||
        die "Python" "no program $wanted" "Python 3.11 or later" "install it, or PYTHON=/path/to/python ./run.sh"
    [[ $python == /* ]] || python=$PWD/$python
}

has_packages() {  # $1 an interpreter. Looks at the installed files: importing torch would take seconds
    "$1" - "$task" 2>/dev/null <<'CHECK'
import importlib.metadata, importlib.util, platform, re, sys
needs = ["torch", "numpy", "huggingface_hub", "tqdm"]
if sys.argv[1] == "test":
    needs += ["pytest", "xdist", "scipy", "matplotlib"]
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        needs += ["triton"]
complete = all(importlib.util.find_spec(name) for name in needs)
sys.exit(not (complete and re.match(r"2\.13\.", importlib.metadata.version("torch"))))
CHECK
}

install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

make_venv() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "Python" "$("$python" -V 2>&1 | head -n 1) ($python)" "3.11 or later, for the versions in requirements.txt" \
            "install a later one, or PYTHON=/path/to/python ./run.sh"
    say "set-up: $python lacks packages; installing them into .venv (the first time: some minutes)"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
    if [[ $gpus == 0 ]]; then                                 # spares gigabytes of CUDA
        install --timeout 10 --retries 0 --index-url https://download.pytorch.org/whl/cpu \
            "$(grep '^torch==' requirements.txt)" 2>/dev/null ||
            say "set-up: no torch from PyTorch's index of CPU wheels, falling back to the default index"
    fi
    install -r requirements.txt
    [[ $task != test ]] || install -r tests/requirements.txt
}

set_up() {
    if has_packages "$python"; then return; fi
    has_packages .venv/bin/python || make_venv
    python=.venv/bin/python
}

has_fast_attention() {  # $1 an interpreter; any version that the user has will do
    "$1" -c 'import importlib.metadata; importlib.metadata.version("flash-attn-4")' 2>/dev/null
}

add_fast_attention() {  # for GPUs. Nothing here ends a run: with another attention it is slower, and no worse
    local ours=.venv/bin/python
    if has_fast_attention "$python"; then return; fi
    if has_fast_attention $ours && has_packages $ours; then
        python=$ours
        return
    fi
    say "set-up: faster attention for GPUs, requirements-gpu.txt, into .venv (at most 10 minutes)"
    if [[ $python != "$ours" ]]; then                         # on top of the user's own, which stays as it is
        "$python" -m venv --system-site-packages .venv || true
    fi
    if has_packages $ours &&                                  # not on top of a virtual environment, which stays unseen
        timeout 600 $ours -m pip install --quiet --disable-pip-version-check --timeout 10 --retries 0 \
            -r requirements-gpu.txt && has_packages $ours
    then
        python=$ours
    else
        say "set-up: NO faster attention: that failed, and the run goes on with the attention that is here;" \
            "by hand: $python -m pip install -r requirements-gpu.txt"
    fi
}

run_tests() {
    local folder=tests arg duration="about 4 minutes on 2 quiet cores"
    local processes="-n 2 --dist=loadfile --no-loadscope-reorder"             # a core each
    [[ $gpus == 0 ]] || processes=''                          # they would share a card's memory
    for arg in "$@"; do
        [[ $arg == --all ]] || processes='' duration=''       # a few tests are not worth their start
        [[ $arg != --all ]] || duration="with the long ones about 25 minutes on 2 quiet cores"
        [[ ! -e ${arg%%::*} ]] || folder=''                   # the user names files: only these
    done
    [[ -z $duration ]] || say "tests: $duration; a dot is a test that passed, an s one that was skipped"
    exec "$python" -m pytest -q --durations=10 $processes ${folder:+"$folder"} "$@"
}

read_flags() {  # what this script must know of the trainer's flags; and slips, before data are prepared for them
    local arg name before='' word=''
    for arg in "$@"; do
        case $arg in
            --help | -h)
                task=help
                return ;;
            --sample | --sample=*) task=sample ;;
            --resume | --resume=*) task=resume ;;             # with the preset and data of the earlier run
            --preset | --train_files | --run_dir | --num_slots)
                die "$arg" "no value" "$arg=VALUE" "write the value after a =, without a blank" ;;
            --preset=*) preset=${arg#*=} ;;
            --train_files=*) files=${arg#*=} ;;
            --run_dir=*) folder=${arg#*=} ;;
            --num_slots=*)
                slots=${arg#*=}
                [[ $slots =~ ^[1-9][0-9]{0,5}$ ]] || slots=1 ;;   # one process will say what is wrong
            -*)
                name=${arg%%=*}
                grep -qF "    ${name#--}: " train_gpt.py ||   # a field of its Config
                    die "unknown flag" "$name" "--field=value with a field that exists" "./run.sh --help lists them" ;;
            *)
                [[ $before == -* && $before != *=* ]] || word=$arg ;;         # not the value of the flag before it
        esac
        before=$arg
    done
    [[ -z $word || $task == sample ]] ||
        die "a word without a flag" "$word" "--field=value" "./run.sh --help lists them; a prompt needs --sample=DIR"
}

get_data() {  # of preset record; those of pocket are here
    if [[ -n $files ]]; then
        return
    elif [[ ($preset == record || $preset == record_*) && $gpus != 0 ]]; then
        say "data: 900 million tokens of FineWeb"
        local status=0
        "$python" data/cached_fineweb10B.py 9 || status=$?
        if [[ $status != 0 ]]; then                           # without network, shards at hand may be enough
            [[ $status == 1 ]] && compgen -G 'data/fineweb10B/fineweb_train_*.bin' >/dev/null || exit $status
        fi
    fi
}

choose_processes() {
    local fits=1 n
    for ((n = 1; n <= gpus && n <= slots; n++)); do
        ((slots % n)) || fits=$n                              # a rank has whole slots
    done
    NPROC=${NPROC:-$fits}
    if [[ $gpus != 0 && $gpus -gt $NPROC ]]; then
        say "of $gpus GPUs $((gpus - NPROC)) stay idle: the number of ranks must divide num_slots=$slots"
    fi
    local cores
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
    if [[ $gpus != 0 && -z ${PYTORCH_CUDA_ALLOC_CONF-} ]]; then               # stages of other sizes share memory
        export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}
    fi
    local caches=${XDG_CACHE_HOME:-${HOME-}/.cache}/train_gpt/torchinductor   # torch's own would go with /tmp
    [[ -n ${TORCHINDUCTOR_CACHE_DIR-} ]] || ! mkdir -p "$caches" 2>/dev/null || export TORCHINDUCTOR_CACHE_DIR=$caches
}

print_follower() {  # a program. Its arguments: a run directory, and the command that leaves it
    cat <<'FOLLOW'
import signal
heard = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
import ctypes, subprocess, sys

def follow(command, limit_s=0, **options):
    def as_if_alone():
        signal.alarm(limit_s)                                 # ends it; 0: never
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)            # PR_SET_PDEATHSIG: so does the end of this process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    child = subprocess.Popen(command, preexec_fn=as_if_alone, **options)
    while child.poll() is None:
        caught = signal.sigwaitinfo(heard)
        if caught.si_signo != signal.SIGCHLD and caught.si_code <= 0:         # else the terminal has told it, too
            child.send_signal(caught.si_signo)
    return child.returncode

folder, *command = sys.argv[1:]
status = follow(command)
if status == 0 and sys.stderr:                                # nothing from here on changes the status
    sys.stderr.flush()
    follow([sys.executable, "records", "stand", folder], limit_s=60, stdout=sys.stderr)
sys.exit(status if status >= 0 else 128 - status)
FOLLOW
}

train() {  # $1 says what
    choose_processes
    local what=$1 place="the CPU"
    shift
    [[ $gpus == 0 ]] || place="$NPROC GPU(s)"
    say "training: $what on $place"
    local command=("$python")
    [[ $NPROC == 1 ]] || command+=(-m torch.distributed.run --standalone --nproc_per_node="$NPROC")
    if [[ ! -e records/__main__.py || $OSTYPE != linux* ]]; then
        exec "${command[@]}" train_gpt.py "$@"
    elif [[ -z $folder ]]; then                               # the run gets a name that is known here
        [[ $task != resume ]] || preset=resumed
        folder=logs/$(date +%Y%m%d-%H%M%S)-$preset-$(printf '%04x%04x' $RANDOM $RANDOM)
        set -- "$@" --run_dir="$folder"
    fi
    exec "$python" -c "$(print_follower)" "$folder" "${command[@]}" train_gpt.py "$@"
}

task=train preset='' files='' folder='' slots=8
if [[ ${NPROC+set} && ! ${NPROC} =~ ^[1-9][0-9]{0,3}$ ]]; then
    die "NPROC" "'$NPROC'" "a number of processes, 1 or more" "NPROC=1 ./run.sh, or leave it unset"
fi
find_python
script=$(readlink -f -- "${BASH_SOURCE[0]}" 2>/dev/null || printf '%s' "${BASH_SOURCE[0]}")     # of a link, what it names
CDPATH='' cd -- "$(dirname -- "$script")"
gpus=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true)
if [[ ${1-} == test ]]; then
    task=test
    shift
    set_up
    run_tests "$@"
fi

read_flags "$@"
set_up
[[ $gpus == 0 || $task == help || $task == sample ]] || add_fast_attention
if [[ $gpus != 0 ]]; then
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')         # those that torch can use
fi
if [[ -z $preset ]]; then
    [[ $gpus == 0 ]] && preset=pocket || preset=record
    [[ $task == sample || $task == resume ]] || set -- --preset=$preset "$@"
fi
case $task in
    help)
        help "$@" ;;
    sample)
        exec "$python" train_gpt.py "$@" ;;
    train)
        get_data
        train "preset $preset" "$@" ;;
    resume)
        train "as the earlier run" "$@" ;;
esac
