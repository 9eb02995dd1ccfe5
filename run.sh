#!/usr/bin/env bash
# ./run.sh [flags of train_gpt.py]          install what is missing, get the data, train; --help lists the flags
# ./run.sh test [arguments of pytest]       install what is missing, run the tests; --all includes the slow ones
# ./run.sh day [arguments of day.py]        install what is missing, check and measure the GPUs of this machine
#
# PYTHON=...  interpreter [python3]. Missing packages are installed into .venv next to this file. With GPUs this
#             includes faster attention (requirements-gpu.txt); if it cannot be installed, a run continues without it.
# CUDA_VISIBLE_DEVICES=...  the GPUs to use [all]; empty: the CPU
# NPROC=...   number of processes [as many as GPUs and --seqs_per_step allow; 1 without a GPU]
# PYTORCH_ALLOC_CONF=...  torch's allocator on GPUs [expandable_segments:True]
# TORCHINDUCTOR_CACHE_DIR=...  compiled graphs, for the next run [~/.cache/train_gpt/torchinductor]
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"              # sh run.sh
set -euo pipefail

# Open a closed standard stream as /dev/null. Otherwise the next file that is opened gets its descriptor.
{ : <&0; } 2>/dev/null || exec </dev/null
{ : >&1; } 2>/dev/null || exec >/dev/null
{ : >&2; } || exec 2>/dev/null

# A closed or full console does not end a run.
print_status() { printf '== %s\n' "$*" 2>/dev/null || true; }
die() { printf 'error: %s\n  found:    %s\n  expected: %s\n  hint:     %s\n' "$@" >&2 || true; exit 2; }

help() {
    cat <<TEXT
usage: ./run.sh [--field=value ...]       install what is missing, get the data, train, print the result and a sample
       ./run.sh test [--all] [...]        install what is missing, run the tests; other arguments go to pytest
       ./run.sh day [--full] [...]        install what is missing, check and measure the GPUs; other arguments go to
                                          tests/gpu/day.py
The preset on this machine is $preset; --preset overrides it. Flags and their defaults:

TEXT
    "$python" train_gpt.py "$@"
    cat <<TEXT

environment variables of ./run.sh:
  PYTHON=...   interpreter, 3.11 or later; missing packages are installed into .venv [python3]
  NPROC=...    number of processes, a divisor of --seqs_per_step [all GPUs; 1 on a CPU]
  CUDA_VISIBLE_DEVICES=...  the GPUs to use; empty: the CPU [all]
  PYTORCH_ALLOC_CONF=...  torch's allocator on GPUs [expandable_segments:True]
  TORCHINDUCTOR_CACHE_DIR=...  compiled graphs, for the next run [~/.cache/train_gpt/torchinductor]
TEXT
}

check_files() {  # what this script needs: tools, the files next to it, and a .venv that can be used
    local name
    for name in cat date dirname grep head mkdir; do
        command -v "$name" >/dev/null || die "tools" "$name: command not found (PATH=$PATH)" "$name in PATH" \
            "install it (apt install coreutils grep), or repair PATH"
    done
    script=$(readlink -f -- "${BASH_SOURCE[0]}" 2>/dev/null || printf '%s' "${BASH_SOURCE[0]}")    # resolves links
    CDPATH='' cd -- "$(dirname -- "$script")"
    for name in train_gpt.py requirements.txt; do
        [[ -r $name ]] || die "$name" "no readable file of this name in $PWD" \
            "the files of the repository next to run.sh" \
            "clone the repository, and call run.sh in the clone, or a link to it"
    done
    [[ -d .venv || ! (-e .venv || -L .venv) ]] || die ".venv" "a file, or a link to a directory that does not exist" \
        "the directory of a virtual environment, or nothing" "mv $PWD/.venv $PWD/.venv.old, and repeat the command"
}

find_python() {
    local wanted=${PYTHON:-python3}
    python=$(command -v "$wanted") ||
        die "Python" "$wanted: command not found" "Python 3.11 or later" \
            "install it, or run PYTHON=/path/to/python ./run.sh"
    [[ $python == /* ]] || python=$PWD/$python
}

capture_output() {  # $1 time limit in s, then a command. Sets `output` to its stdout. Fails if it exceeds the limit
    # timeout(1) waits for the process, and no signal ends a process that is blocked in a driver.
    local limit_s=$1 status=0
    shift
    IFS= read -r -d '' -t "$limit_s" output < <(exec "$@" 2>/dev/null) || status=$?
    if ((status > 128)); then
        kill -9 "$!" 2>/dev/null || true
        return 1
    fi
}

count_gpus() {  # sets `gpus` to the number of GPUs that the driver lists
    local limit_s=20
    gpus=0
    if [[ $device == cpu || ${CUDA_VISIBLE_DEVICES-all} =~ ^(-1)?$ ]] || ! command -v nvidia-smi >/dev/null; then
        return
    elif capture_output $limit_s nvidia-smi -L; then
        gpus=$(grep -c '^GPU ' <<<"$output" || true)
    else
        print_status "warning: nvidia-smi did not return within $limit_s s, so the driver hangs;" \
            "continuing on the CPU; to use the GPUs, restart the machine"
        # If both variables are set, torch does not call the driver.
        export CUDA_VISIBLE_DEVICES='' PYTORCH_NVML_BASED_CUDA_CHECK=1
    fi
}

# $1 an interpreter. Sets `versions` to those of torch and Python. Does not import torch, which takes seconds.
has_packages() {
    local status=0 found
    trap 'exit 130' INT                                       # Python exits with 1 on a Ctrl-C during its start
    found=$("$1" - "$task" 2>/dev/null <<'CHECK'
import importlib.metadata, importlib.util, platform, re, sys
needs = ["torch", "numpy", "safetensors", "huggingface_hub", "tqdm"]
if sys.argv[1] == "test":
    needs += ["pytest", "xdist", "scipy"]
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

has_package() {  # $1 an interpreter, $2 a package, $3 its version; an empty string matches any version
    "$1" -c 'import importlib.metadata, sys
sys.exit(sys.argv[2] not in ("", importlib.metadata.version(sys.argv[1])))' "$2" "$3" 2>/dev/null
}

check_compiler() {  # $1 an interpreter. Before its first kernel, Triton compiles a C file that includes Python.h
    local folder compiler=${CC:-$(command -v gcc || command -v clang || true)}
    [[ -n $compiler ]] && command -v "$compiler" >/dev/null ||
        die "C compiler, which Triton needs for GPU kernels" "${CC:-neither gcc nor clang}: command not found" \
            "a C compiler" "apt install gcc, or run CC=/path/to/compiler ./run.sh"
    folder=$("$1" -c 'import sysconfig; print(sysconfig.get_paths("posix_prefix")["include"])')
    "$compiler" -E -x c -I "$folder" - <<<'#include <Python.h>' >/dev/null 2>&1 ||
        die "Python.h, which Triton needs for GPU kernels" "no Python.h in $folder" "the headers of $1" \
            "apt install ${folder##*/}-dev, or set PYTHON=/path/to/python to an interpreter with headers"
}

print_gpu_query() {
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

# Sets `gpus` to the number that torch can use, `cuda` to torch's CUDA version, `capability` to that of the first GPU.
check_gpus() {
    local listed=$gpus limit_s=120 problem torch reinstall="$python -m pip install --force-reinstall"
    local on_cpu="train on the CPU with CUDA_VISIBLE_DEVICES= ./run.sh"
    torch=$(grep '^torch==' requirements.txt)
    capture_output $limit_s "$python" -c "$(print_gpu_query)" ||
        die "torch cannot use the $listed GPU(s) of nvidia-smi" \
            "torch.cuda.init() did not return within $limit_s s, so the driver hangs" "a driver that responds" \
            "restart the machine, or $on_cpu"
    read -r cuda capability gpus problem <<<"$output" || true
    case ${cuda:-none}:$problem in
        none:*)
            die "torch cannot use the $listed GPU(s) of nvidia-smi" \
                "torch ${versions% *} of $python: ${problem:-importing it crashes without an error}" \
                "a CUDA build of torch" \
                "$reinstall $torch, or set PYTHON=/path/to/python to one with a CUDA build of torch, or $on_cpu" ;;
        *:*"too old"*)
            die "NVIDIA driver" "$problem" "$(oldest_driver "$cuda") or later, for CUDA $cuda of torch ${versions% *}" \
                "install a newer driver, or $reinstall $torch --index-url $WHEELS/cu126, or $on_cpu" ;;
        *:?*)
            die "torch cannot use the $listed GPU(s) of nvidia-smi" "$problem" "no error" \
                "reproduce it with $python -c 'import torch; torch.cuda.init()' and fix it, or $on_cpu" ;;
    esac
    [[ $gpus != 0 ]] || die "torch cannot use the $listed GPU(s) of nvidia-smi" \
        "0 GPUs with CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}" "1 or more" "unset CUDA_VISIBLE_DEVICES, or $on_cpu"
}

oldest_driver() {  # $1 a CUDA version. From NVIDIA's table of minimum driver versions
    case $1 in 13.*) printf 580 ;; 12.*) printf 525 ;; *) printf 'the driver of its release' ;; esac
}

install() { .venv/bin/python -m pip install --disable-pip-version-check "$@"; }   # shows the progress of downloads

make_venv() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "Python" "$("$python" -V 2>&1 | head -n 1) ($python)" "3.11 or later, as requirements.txt needs" \
            "install a newer one, or run PYTHON=/path/to/python ./run.sh"
    ! uses_gpus || check_compiler "$python"                   # before downloading gigabytes
    print_status "set-up: $python lacks packages; installing them into .venv, once"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
    local torch
    torch=$(grep '^torch==' requirements.txt)
    if [[ $gpus != 0 ]]; then
        print_status "set-up: downloading the CUDA build of $torch with its libraries (2 to 3 GB)," \
            "because this machine has GPUs"
    else                                                      # saves gigabytes of CUDA libraries
        print_status "set-up: downloading $torch for the CPU (about 190 MB), because no GPU is in use"
        install --timeout 10 --retries 0 --index-url "$WHEELS/cpu" "$torch" ||
            print_status "set-up: the CPU build of torch could not be installed from $WHEELS/cpu;" \
                "downloading $torch from the default index instead. On Linux this is the CUDA build with its" \
                "libraries (2 to 3 GB), which also runs without a GPU. For the small build: press Ctrl-C," \
                "download its wheel from $WHEELS/cpu on a machine that reaches this index, install it here with" \
                "$PWD/.venv/bin/python -m pip install FILE.whl, and repeat the command"
    fi
    print_status "set-up: installing the other packages of requirements.txt (about 30 MB)"
    install -r requirements.txt
    [[ $task != test ]] || install -r tests/requirements.txt
}

set_up() {
    if ! has_packages "$python"; then
        has_packages .venv/bin/python || make_venv
        python=.venv/bin/python
        has_packages $python || die "set-up" "packages are still missing in .venv" "those of requirements.txt" \
            "run rm -r .venv and repeat the command, or set PYTHON=/path/to/python to an interpreter that has them"
    fi
    local pinned
    pinned=$(grep '^torch==' requirements.txt)
    [[ ${versions%%[+ ]*} == "${pinned#torch==}" ]] ||
        print_status "set-up: torch ${versions% *} and Python ${versions#* } of $python;" \
            "requirements.txt has ${pinned/==/ }"
}

uses_gpus() { [[ $gpus != 0 && ($task == train || $task == resume || $task == day) ]]; }

prepare_gpus() {  # runs before data are downloaded, and exits if the GPUs cannot be used
    if uses_gpus; then
        check_compiler "$python"
        check_gpus
        add_fast_attention
    fi
}

# $1 a package, $2 its version, then arguments of pip. Installs into .venv and never changes the user's interpreter.
add_package() {
    local name=$1 version=$2 ours=.venv/bin/python before=$versions
    shift 2
    if has_package "$python" "$name" "$version"; then return; fi
    if ! { has_package $ours "$name" "$version" && has_packages $ours && [[ $versions == "$before" ]]; }; then
        print_status "set-up: installing $name into .venv (at most 10 minutes)"
        if [[ $python != "$ours" ]]; then
            "$python" -m venv --system-site-packages .venv || true
        fi
        # A .venv created from another virtual environment lacks its packages. An older .venv may have another torch.
        if ! { has_packages $ours && [[ $versions == "$before" ]] &&
            timeout 600 $ours -m pip install --disable-pip-version-check --timeout 10 --retries 0 "$@" &&
            has_packages $ours && [[ $versions == "$before" ]]; }
        then
            versions=$before
            return 1
        fi
    fi
    python=$ours
}

# Installs faster attention if it supports the GPUs. A failure does not end the run, which is only slower without it.
add_fast_attention() {
    local line wanted=() index=cu130
    while read -r line; do
        [[ -z $line || $line == '#'* ]] || wanted+=("$line")
    done <requirements-gpu.txt
    if [[ $cuda != 13.* ]]; then
        index=cu126 wanted=("${wanted[@]/\[cu13\]/}")
    fi
    if [[ $capability != 9 && $capability != 10 ]]; then
        return
    elif [[ $versions != 2.1[2-5].* ]]; then                  # tests/test_attention_wheel.py has the reasons
        print_status "warning: no FlashAttention 4 for torch ${versions% *}; it needs torch 2.12 to 2.15"
    elif ! add_package flash-attn-4 "${wanted[0]##*==}" "${wanted[@]}"; then
        print_status "warning: installing FlashAttention 4 failed; continuing without it;" \
            "to retry: $python -m pip install ${wanted[*]}"
    fi
    # It needs only torch. This index lacks its other dependencies, so pip must not look for them.
    wanted=(--no-deps --index-url "$WHEELS/$index" flash-attn-3)
    if [[ $capability == 9 ]] && ! add_package flash-attn-3 '' "${wanted[@]}"; then
        print_status "warning: installing FlashAttention 3 failed; continuing without it;" \
            "to retry: $python -m pip install ${wanted[*]}"
    fi
}

run_tests() {
    local folder=tests arg before='' duration="about 6 minutes on 2 idle cores"
    local processes="-n 2 --dist=loadfile --no-loadscope-reorder"             # one core each
    [[ $gpus == 0 ]] || processes=''                          # one process, because tests need the memory of a GPU
    for arg in "$@"; do
        case $arg in
            --all) duration="about 25 minutes on 2 idle cores, with the slow ones" ;;
            -r* | -v* | -q* | -x | --tb*) ;;                  # these affect only the report
            *)
                if [[ $before != -r && $before != --tb ]]; then
                    processes='' duration=''                  # too few tests to start two processes for
                fi ;;
        esac
        [[ ! -e ${arg%%::*} ]] || folder=''                   # run only the files that the user names
        before=$arg
    done
    [[ -z $duration ]] || print_status "tests: $duration; . = passed, s = skipped"
    exec "$python" -m pytest -q --durations=10 -rfE --tb=short $processes ${folder:+"$folder"} "$@"
}

run_day() {
    add_package pytest '' "$(grep '^pytest==' tests/requirements.txt)" ||
        print_status "warning: installing pytest failed; steps that need it are skipped"
    set_environment
    exec "$python" tests/gpu/day.py "$@"
}

# Reads the flags that this script needs, and finds unknown ones before data are downloaded.
read_flags() {
    local arg name before='' word=''
    for arg in "$@"; do
        case $arg in
            --help | -h)
                task=help
                return ;;
            --resume | --resume=*) task=resume ;;             # uses preset and data of the earlier run
            --preset | --train_files | --run_dir | --seqs_per_step)
                die "$arg" "no value" "$arg=VALUE" "use = instead of a space" ;;
            --preset=*) preset=${arg#*=} ;;
            --train_files=*) files=${arg#*=} ;;
            --run_dir=*) folder=${arg#*=} ;;
            --device=*) device=${arg#*=} ;;
            --seqs_per_step=*)
                seqs=${arg#*=}
                [[ $seqs =~ ^[1-9][0-9]{0,5}$ ]] || seqs=1 NPROC=1 ;;         # the trainer reports the error
            -*)
                name=${arg%%=*}
                if ! grep -qF "    ${name#--}: " train_gpt.py; then           # not a field of its Config
                    task=refuse refused=$arg
                    return
                fi ;;
            *)
                [[ $before == -* && $before != *=* ]] || word=$arg ;;         # else the previous flag's value
        esac
        before=$arg
    done
    [[ -z $word ]] || die "argument without a flag" "$word" "--field=value" "./run.sh --help lists all flags"
}

check_processes() {
    local n fits=''
    if [[ $task == train ]] && ((seqs % ${NPROC:-1})); then
        for ((n = 1; n <= seqs; n++)); do
            ((seqs % n)) || fits+=" $n"
        done
        die "NPROC" "$NPROC" "a divisor of --seqs_per_step=$seqs:$fits" "run NPROC=1 ./run.sh, or unset it"
    fi
}

get_data() {  # for preset record; the data of preset pocket are in the repository
    if [[ -n $files ]]; then
        return
    elif [[ $preset == record && $gpus != 0 ]]; then
        print_status "data: downloading 900 million tokens of FineWeb (1.8 GB)"
        local status=0
        "$python" data/cached_fineweb10B.py 9 || status=$?
        if [[ $status != 0 ]]; then                           # without a network, the existing shards may suffice
            [[ $status == 1 ]] && compgen -G 'data/fineweb10B/fineweb_train_*.bin' >/dev/null || exit $status
        fi
    fi
}

choose_processes() {
    local fits=1 n
    for ((n = 1; n <= gpus && n <= seqs; n++)); do
        ((seqs % n)) || fits=$n                               # a rank trains whole sequences
    done
    NPROC=${NPROC:-$fits}
    if [[ $gpus != 0 && $gpus -gt $NPROC ]]; then
        print_status "warning: $((gpus - NPROC)) of $gpus GPUs are idle:" \
            "the number of ranks must divide seqs_per_step=$seqs"
    fi
    local cores
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
}

set_environment() {  # sets torch's allocator on GPUs, and the folder of compiled graphs
    if [[ $gpus != 0 && -z ${PYTORCH_CUDA_ALLOC_CONF-} ]]; then               # stages of different sizes share memory
        export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}
    fi
    local caches=${XDG_CACHE_HOME:-${HOME-}/.cache}/train_gpt/torchinductor   # torch's default is in /tmp
    [[ -n ${TORCHINDUCTOR_CACHE_DIR-} ]] || ! mkdir -p "$caches" 2>/dev/null || export TORCHINDUCTOR_CACHE_DIR=$caches
}

# Prints a program that runs a command and then `records stand`. Its arguments: the run directory, then the command.
print_follower() {
    cat <<'FOLLOW'
import signal
handled = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
import ctypes, subprocess, sys

def follow(command: list[str], limit_s: int = 0, **options: object) -> int:
    def prepare_child() -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:     # it raises KeyboardInterrupt here
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.alarm(limit_s)                                 # time limit; 0: none
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)            # PR_SET_PDEATHSIG: end with the parent
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    child = subprocess.Popen(command, preexec_fn=prepare_child, **options)
    # A signal that arrived before the child existed ends this process, and the child with it.
    for signum in (signal.sigpending() & handled) - {signal.SIGCHLD}:
        return 128 + signum
    while child.poll() is None:
        caught = signal.sigwaitinfo(handled)
        if caught.si_signo != signal.SIGCHLD and caught.si_code <= 0:         # a terminal also signals the child itself
            child.send_signal(caught.si_signo)
    return child.returncode

folder, *command = sys.argv[1:]
status = follow(command)
if status == 0 and sys.stderr:                                # the status does not change any more
    sys.stderr.flush()
    follow([sys.executable, "records", "stand", folder], limit_s=60, stdout=sys.stderr)
sys.exit(status if status >= 0 else 128 - status)
FOLLOW
}

train() {  # $1 a description of the run, then flags
    choose_processes
    set_environment
    local what=$1 hardware="the CPU"
    shift
    [[ $gpus == 0 ]] || hardware="$NPROC GPU(s)"
    print_status "training: $what on $hardware"
    local command=("$python")
    [[ $NPROC == 1 ]] || command+=(-m torch.distributed.run --standalone --nproc_per_node="$NPROC")
    if [[ ! -e records/__main__.py || $OSTYPE != linux* ]]; then
        exec "${command[@]}" train_gpt.py "$@"
    elif [[ -z $folder ]]; then                               # choose the name of the run directory here
        [[ $task != resume ]] || preset=resumed
        folder=logs/$(date +%Y%m%d-%H%M%S)-$preset-$(printf '%04x%04x' $RANDOM $RANDOM)
        set -- "$@" --run_dir="$folder"
    fi
    # In a statement before exec, because a Ctrl-C during a substitution in the exec line is lost.
    local follower
    follower=$(print_follower)
    exec "$python" -S -c "$follower" "$folder" "${command[@]}" train_gpt.py "$@"
}

WHEELS=https://download.pytorch.org/whl
task=train refused='' preset='' files='' folder='' device='' seqs=8
gpus=0 versions='' output='' cuda='' capability=''
if [[ ${NPROC+set} && ! ${NPROC} =~ ^[1-9][0-9]{0,3}$ ]]; then
    die "NPROC" "'$NPROC'" "a number of processes, 1 or more" "run NPROC=1 ./run.sh, or unset it"
fi
find_python
check_files
case ${1-} in
    test | day)
        task=$1
        shift
        [[ $task != day || ! " $* " =~ \ --device[=\ ]cpu\  ]] || device=cpu ;;
    *)
        read_flags "$@"
        check_processes ;;
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
    refuse)                                                   # the trainer reports the error
        exec "$python" train_gpt.py "$refused" ;;
    train)
        get_data
        train "preset $preset" "$@" ;;
    resume)
        train "resumed run" "$@" ;;
esac
