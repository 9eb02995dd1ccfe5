#!/usr/bin/env bash
# ./run.sh [flags of train_gpt.py]          set up, get data, train; --help shows the flags
# ./run.sh test [arguments of pytest]       set up, run the tests; --all adds the long ones
# ./run.sh day [arguments of day.py]        set up, check and measure the GPUs of this machine
#
# PYTHON=...  the interpreter to use [python3]. What it lacks goes into .venv beside this file. Where GPUs are, that is
#             faster attention too (requirements-gpu.txt), which a run goes on without.
# CUDA_VISIBLE_DEVICES=...  the GPUs to use [all]; empty: the CPU
# NPROC=...   processes that train together [as many as GPUs and seqs_per_step allow; 1 without a GPU]
# PYTORCH_ALLOC_CONF=...  torch's allocator on GPUs [expandable_segments:True]
# TORCHINDUCTOR_CACHE_DIR=...  what torch has compiled, for the next run [~/.cache/train_gpt/torchinductor]
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"              # sh run.sh
set -euo pipefail

# A standard stream that the caller closed becomes /dev/null: otherwise the next opened file would take its number.
{ : <&0; } 2>/dev/null || exec </dev/null
{ : >&1; } 2>/dev/null || exec >/dev/null
{ : >&2; } || exec 2>/dev/null

# A console that takes no more does not end a run.
say() { printf '== %s\n' "$*" 2>/dev/null || true; }
die() { printf 'error: %s\n  found:    %s\n  expected: %s\n  hint:     %s\n' "$@" >&2 || true; exit 2; }

help() {
    cat <<TEXT
usage: ./run.sh [--field=value ...]       set up, get data, train, print the result and a sample
       ./run.sh test [--all] [...]        set up, run the tests; other arguments go to pytest
       ./run.sh day [--full] [...]        set up, check and measure the GPUs; other arguments go to tests/gpu/day.py
On this machine the preset is $preset unless --preset says otherwise. Its flags and their defaults:

TEXT
    "$python" train_gpt.py "$@"
    cat <<TEXT

environment of ./run.sh:
  PYTHON=...   interpreter, 3.11 or later; what it lacks goes into .venv [python3]
  NPROC=...    processes that train together; divides seqs_per_step [all GPUs; 1 on a CPU]
  CUDA_VISIBLE_DEVICES=...  the GPUs to use; empty: the CPU [all]
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

ask() {  # $1 seconds. Sets `answer` to what a command prints. Fails if the command does not end in time
    # timeout(1) would wait for a process that no signal can end, as one is that waits in a driver.
    local limit_s=$1 status=0
    shift
    IFS= read -r -d '' -t "$limit_s" answer < <(exec "$@" 2>/dev/null) || status=$?
    if ((status > 128)); then
        kill -9 "$!" 2>/dev/null || true
        return 1
    fi
}

count_gpus() {  # sets gpus to the number that the driver lists
    local limit_s=20
    gpus=0
    if [[ $device == cpu || ${CUDA_VISIBLE_DEVICES-all} =~ ^(-1)?$ ]] || ! command -v nvidia-smi >/dev/null; then
        return
    elif ask $limit_s nvidia-smi -L; then
        gpus=$(grep -c '^GPU ' <<<"$answer" || true)
    else
        say "GPUs: nvidia-smi does not answer within $limit_s s, so the driver hangs. Going on with the CPU;" \
            "to use the GPUs, restart the machine"
        # With both of these torch does not call the driver.
        export CUDA_VISIBLE_DEVICES='' PYTORCH_NVML_BASED_CUDA_CHECK=1
    fi
}

has_packages() {  # $1 an interpreter, whose torch and Python become `versions`. Does not import torch, to save seconds
    local status=0 found
    trap 'exit 130' INT                                       # a Ctrl-C as Python starts ends it with 1
    found=$("$1" - "$task" 2>/dev/null <<'CHECK'
import importlib.metadata, importlib.util, platform, re, sys
needs = ["torch", "numpy", "huggingface_hub", "tqdm"]
if sys.argv[1] == "test":
    needs += ["pytest", "xdist", "scipy", "matplotlib"]
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        needs += ["triton"]
complete = sys.version_info >= (3, 11) and all(importlib.util.find_spec(name) for name in needs)
version = importlib.metadata.version("torch") if complete else ""
print(version, platform.python_version())
sys.exit(not re.match(r"2\.1[1-9]\.", version))
CHECK
    ) || status=$?
    trap - INT
    [[ $status != 0 ]] || versions=$found
    return $status
}

has_package() {  # $1 an interpreter, $2 a package, $3 its version; empty: any
    "$1" -c 'import importlib.metadata, sys
sys.exit(sys.argv[2] not in ("", importlib.metadata.version(sys.argv[1])))' "$2" "$3" 2>/dev/null
}

check_headers() {  # $1 an interpreter. Triton compiles a file of C that includes Python.h before its first kernel
    local folder compiler=${CC:-$(command -v gcc || command -v clang || true)}
    [[ -n $compiler ]] && command -v "$compiler" >/dev/null ||
        die "C compiler, which Triton needs for kernels on GPUs" "${CC:-neither gcc nor clang}" "one that runs" \
            "apt install gcc, or CC=/path/to/compiler"
    folder=$("$1" -c 'import sysconfig; print(sysconfig.get_paths("posix_prefix")["include"])')
    "$compiler" -E -x c -I "$folder" - <<<'#include <Python.h>' >/dev/null 2>&1 ||
        die "Python.h, which Triton needs for kernels on GPUs" "none in $folder" "the headers of $1" \
            "apt install ${folder##*/}-dev, or PYTHON=... with an interpreter that has its headers"
}

print_gpu_check() {
    cat <<'CHECK'
cuda, capability, count, problem = "none", 0, 0, ""
try:
    import torch
    cuda = torch.version.cuda or cuda
    count = torch.cuda.device_count()
    torch.cuda.init()
    capability, _ = torch.cuda.get_device_capability(0)
except Exception as error:
    problem = " ".join(f"{type(error).__name__}: {error}".split())
print(cuda, capability, count, problem)
CHECK
}

check_gpus() {  # sets gpus to the number that torch can use, `cuda` to its CUDA, `capability` to that of the first GPU
    local listed=$gpus limit_s=120 problem torch reinstall="$python -m pip install --force-reinstall"
    local on_cpu="CUDA_VISIBLE_DEVICES= ./run.sh for the CPU"
    torch=$(grep '^torch==' requirements.txt)
    ask $limit_s "$python" -c "$(print_gpu_check)" ||
        die "torch cannot use the $listed GPU(s) of nvidia-smi" \
            "torch.cuda.init() did not return within $limit_s s, so the driver hangs" "a driver that answers" \
            "restart the machine, or $on_cpu"
    read -r cuda capability gpus problem <<<"$answer" || true
    case ${cuda:-none}:$problem in
        none:*)
            die "torch cannot use the $listed GPU(s) of nvidia-smi" \
                "torch ${versions% *} of $python: ${problem:-importing it fails without an error}" \
                "torch for CUDA" "$reinstall $torch, or PYTHON=... with torch for CUDA, or $on_cpu" ;;
        *:*"too old"*)
            die "NVIDIA driver" "$problem" "for CUDA $cuda of torch ${versions% *}: $(driver_for "$cuda") or later" \
                "a later driver, or $reinstall $torch --index-url $WHEELS/cu126, or $on_cpu" ;;
        *:?*)
            die "torch cannot use the $listed GPU(s) of nvidia-smi" "$problem" "no error" \
                "$python -c 'import torch; torch.cuda.init()' must work, or $on_cpu" ;;
    esac
    [[ $gpus != 0 ]] || die "torch cannot use the $listed GPU(s) of nvidia-smi" \
        "0 with CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}" "1 or more" "unset CUDA_VISIBLE_DEVICES, or $on_cpu"
}

driver_for() {  # $1 a version of CUDA. NVIDIA's table of the oldest drivers that start it
    case $1 in 13.*) printf 580 ;; 12.*) printf 525 ;; *) printf 'the driver of its release' ;; esac
}

install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

make_venv() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "Python" "$("$python" -V 2>&1 | head -n 1) ($python)" "3.11 or later, for the versions in requirements.txt" \
            "install a later one, or PYTHON=/path/to/python ./run.sh"
    ! trains_on_gpus || check_headers "$python"               # before gigabytes are fetched
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
    if ! has_packages "$python"; then
        has_packages .venv/bin/python || make_venv
        python=.venv/bin/python
        has_packages $python || die "set-up" "packages that .venv still lacks" "those of requirements.txt" \
            "rm -r .venv, then again; or PYTHON=... with an interpreter that has them"
    fi
    local pinned
    pinned=$(grep '^torch==' requirements.txt)
    [[ ${versions%%[+ ]*} == "${pinned#torch==}" ]] ||
        say "set-up: torch ${versions% *} and Python ${versions#* } of $python; requirements.txt has ${pinned/==/ }"
}

trains_on_gpus() { [[ $gpus != 0 && ($task == train || $task == resume || $task == day) ]]; }

prepare_gpus() {  # before data are fetched: what cannot train on them ends here
    if trains_on_gpus; then
        check_headers "$python"
        check_gpus
        add_fast_attention
    fi
}

add_package() {  # $1 a package, $2 its version; the rest is for pip. Into .venv; the user's interpreter stays as it is
    local name=$1 version=$2 ours=.venv/bin/python before=$versions
    shift 2
    if has_package "$python" "$name" "$version"; then return; fi
    if ! { has_package $ours "$name" "$version" && has_packages $ours && [[ $versions == "$before" ]]; }; then
        say "set-up: $name, into .venv (at most 10 minutes)"
        if [[ $python != "$ours" ]]; then
            "$python" -m venv --system-site-packages .venv || true
        fi
        # A .venv made from a virtual environment lacks the packages of that. An older .venv may have another torch.
        if ! { has_packages $ours && [[ $versions == "$before" ]] &&
            timeout 600 $ours -m pip install --quiet --disable-pip-version-check --timeout 10 --retries 0 "$@" &&
            has_packages $ours && [[ $versions == "$before" ]]; }
        then
            versions=$before
            return 1
        fi
    fi
    python=$ours
}

add_fast_attention() {  # where the GPUs have kernels for it. Nothing here ends a run, which is only slower without it
    local line wanted=() index=cu130
    while read -r line; do
        [[ -z $line || $line == '#'* ]] || wanted+=("$line")
    done <requirements-gpu.txt
    if [[ $cuda != 13.* ]]; then
        index=cu126 wanted=("${wanted[@]/\[cu13\]/}")
    fi
    if [[ $capability != 9 && $capability != 10 ]]; then
        return
    elif [[ $versions != 2.1[2-5].* ]]; then                  # tests/test_attention_wheel.py says what has to fit
        say "set-up: NO FlashAttention 4 for torch ${versions% *}: torch 2.12 to 2.15 call it as the trainer needs"
    elif ! add_package flash-attn-4 "${wanted[0]##*==}" "${wanted[@]}"; then
        say "set-up: NO FlashAttention 4: that failed, and the run goes on without it;" \
            "by hand: $python -m pip install ${wanted[*]}"
    fi
    # It needs torch alone. With its other dependencies pip would look for them in this index, which lacks them.
    wanted=(--no-deps --index-url "$WHEELS/$index" flash-attn-3)
    if [[ $capability == 9 ]] && ! add_package flash-attn-3 '' "${wanted[@]}"; then
        say "set-up: NO FlashAttention 3: that failed, and the run goes on without it;" \
            "by hand: $python -m pip install ${wanted[*]}"
    fi
}

run_tests() {
    local folder=tests arg before='' duration="about 4 minutes on 2 quiet cores"
    local processes="-n 2 --dist=loadfile --no-loadscope-reorder"             # a core each
    [[ $gpus == 0 ]] || processes=''                          # they would share a card's memory
    for arg in "$@"; do
        case $arg in
            --all) duration="with the long ones about 25 minutes on 2 quiet cores" ;;
            -r* | -v* | -q* | -x | --tb*) ;;                  # these choose the report, and not the tests
            *)
                if [[ $before != -r && $before != --tb ]]; then
                    processes='' duration=''                  # a few tests are not worth their start
                fi ;;
        esac
        [[ ! -e ${arg%%::*} ]] || folder=''                   # the user names files: only these
        before=$arg
    done
    [[ -z $duration ]] || say "tests: $duration; a dot is a test that passed, an s one that was skipped"
    exec "$python" -m pytest -q --durations=10 -rfE --tb=short $processes ${folder:+"$folder"} "$@"
}

run_day() {
    add_package pytest '' "$(grep '^pytest==' tests/requirements.txt)" ||
        say "set-up: NO pytest: that failed, and the day skips what needs it"
    set_environment
    exec "$python" tests/gpu/day.py "$@"
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
            --preset | --train_files | --run_dir | --seqs_per_step)
                die "$arg" "no value" "$arg=VALUE" "write the value after a =, without a blank" ;;
            --preset=*) preset=${arg#*=} ;;
            --train_files=*) files=${arg#*=} ;;
            --run_dir=*) folder=${arg#*=} ;;
            --device=*) device=${arg#*=} ;;
            --seqs_per_step=*)
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
        say "of $gpus GPUs $((gpus - NPROC)) stay idle: the number of ranks must divide seqs_per_step=$slots"
    fi
    local cores
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
}

set_environment() {  # torch's memory on GPUs, and the folder of what torch compiles
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
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:     # which would raise in here
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.alarm(limit_s)                                 # ends it; 0: never
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)            # PR_SET_PDEATHSIG: so does the end of this process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    child = subprocess.Popen(command, preexec_fn=as_if_alone, **options)
    for number in (signal.sigpending() & heard) - {signal.SIGCHLD}:           # came before there was a child to hear
        return 128 + number                                   # it, which ends with this process
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
    set_environment
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
    local follower                                            # before exec: with it a Ctrl-C meanwhile would be lost
    follower=$(print_follower)
    exec "$python" -S -c "$follower" "$folder" "${command[@]}" train_gpt.py "$@"
}

WHEELS=https://download.pytorch.org/whl
task=train preset='' files='' folder='' device='' slots=8
gpus=0 versions='' answer='' cuda='' capability=''
if [[ ${NPROC+set} && ! ${NPROC} =~ ^[1-9][0-9]{0,3}$ ]]; then
    die "NPROC" "'$NPROC'" "a number of processes, 1 or more" "NPROC=1 ./run.sh, or leave it unset"
fi
find_python
script=$(readlink -f -- "${BASH_SOURCE[0]}" 2>/dev/null || printf '%s' "${BASH_SOURCE[0]}")     # of a link, what it names
CDPATH='' cd -- "$(dirname -- "$script")"
case ${1-} in
    test | day)
        task=$1
        shift
        [[ $task != day || ! " $* " =~ \ --device[=\ ]cpu\  ]] || device=cpu ;;
    *)
        read_flags "$@" ;;
esac
count_gpus
set_up
prepare_gpus
if [[ -z $preset ]]; then
    [[ $gpus == 0 ]] && preset=pocket || preset=record
    [[ $task != train && $task != help ]] || set -- --preset=$preset "$@"
fi
case $task in
    test)
        run_tests "$@" ;;
    day)
        run_day "$@" ;;
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
