#!/usr/bin/env bash
# usage: ./run.sh [--field=value ...]     install what is missing, get the data, train, print the result and a sample
#        ./run.sh test [--all] [...]      install what is missing, run the tests; other arguments go to pytest
#        ./run.sh day [...]               install what is missing, check and measure the GPUs with tests/gpu/day.py
#
# environment variables
#   PYTHON=...   interpreter, 3.11 or later; missing packages are installed into .venv next to this file [python3]
#   NPROC=...    number of processes, a divisor of --seqs_per_step [as many as GPUs allow; 1 without a GPU]
#   CUDA_VISIBLE_DEVICES=...  the GPUs to use; empty: the CPU [all]
#   PYTORCH_ALLOC_CONF=...  torch's allocator on GPUs [expandable_segments:True]
#   TORCHINDUCTOR_CACHE_DIR=...  compiled graphs, for the next run [~/.cache/train_gpt/torchinductor]
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"              # sh run.sh
set -euo pipefail
trap 'exit 130' INT                                           # Python may answer a Ctrl-C with status 1
WHEELS=https://download.pytorch.org/whl

say() { printf '== %s\n' "$*" 2>/dev/null || true; }          # a console that is gone does not end a run
die() { printf 'error: %s\n' "$*" >&2; exit 2; }


# ---- Set-up
# $1 an interpreter. Prints the version of its torch, or fails if it lacks one of the packages. Imports none of them.
find_torch() {
    "$1" - "${requirements[@]}" 2>/dev/null <<'CHECK'
import importlib.metadata, platform, re, sys
for path in sys.argv[1:]:
    for line in open(path):
        if "==" in line and (";" not in line or platform.machine() == "x86_64"):
            importlib.metadata.version(line.split("==")[0])
version = importlib.metadata.version("torch")
print(version)
sys.exit(sys.version_info < (3, 11) or not re.match(r"2\.1[1-9]\.", version))
CHECK
}

install() { .venv/bin/python -m pip install --disable-pip-version-check "$@"; }

make_venv() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$python is not Python 3.11 or later: install one, or run PYTHON=/path/to/python ./run.sh"
    say "set-up: $python lacks packages; installing them into .venv, once: 2 to 3 GB for GPUs, 0.3 GB for a CPU"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
    if [[ $gpus == 0 ]]; then                                 # saves gigabytes of CUDA libraries
        install --timeout 10 --retries 0 --index-url "$WHEELS/cpu" "$(grep '^torch==' requirements.txt)" ||
            say "set-up: $WHEELS/cpu does not answer; downloading the CUDA build (2 to 3 GB) from the default index"
    fi
    install "${requirements[@]/#/-r}"
}

set_up() {
    requirements=(requirements.txt)
    [[ $task != test ]] || requirements+=(records/requirements.txt tests/requirements.txt)
    if ! torch=$(find_torch "$python"); then
        torch=$(find_torch .venv/bin/python) || make_venv
        python=.venv/bin/python
        torch=$(find_torch $python) || die "packages are still missing in .venv: rm -r .venv, and repeat the command"
    fi
}

# $1 a package, $2 its version (empty: any), then arguments of pip. A failure does not end the run.
add_package() {
    local name=$1 version=$2
    shift 2
    if "$python" -c 'import importlib.metadata, sys
sys.exit(sys.argv[2] not in ("", importlib.metadata.version(sys.argv[1])))' "$name" "$version" 2>/dev/null; then
        return
    elif [[ $python != .venv/bin/python ]]; then              # never change the interpreter of the user
        say "warning: $python lacks $name; to install it: $python -m pip install $*"
    else
        say "set-up: installing $name into .venv (at most 10 minutes)"
        timeout 600 $python -m pip install --timeout 10 --retries 0 "$@" "torch==$torch" ||
            say "warning: installing $name failed; continuing without it"
    fi
}

add_fast_attention() {  # requirements-gpu.txt says what fits which GPU and torch
    local packages
    mapfile -t packages < <(grep -v '^#' requirements-gpu.txt)
    if [[ $cuda == 13.* && $capability =~ ^(9|10)$ && $torch == 2.1[2-5].* ]]; then
        add_package flash-attn-4 "${packages[0]##*==}" "${packages[@]}"
    fi
    if [[ $cuda == 13.* && $capability == 9 ]]; then          # this index lacks its dependencies; it needs only torch
        add_package flash-attn-3 '' --no-deps --index-url $WHEELS/cu130 flash-attn-3
    fi
}

check_compiler() {  # before its first kernel, Triton compiles a C file that includes Python.h
    local folder
    folder=$("$python" -c 'import sysconfig; print(sysconfig.get_paths("posix_prefix")["include"])')
    "${CC:-gcc}" -E -x c -I "$folder" - <<<'#include <Python.h>' >/dev/null 2>&1 ||
        die "GPU kernels need ${CC:-gcc} and $folder/Python.h: apt install gcc ${folder##*/}-dev, or set CC=... to" \
            "another compiler, or PYTHON=... to an interpreter with headers"
}

# Checks flags, NPROC and GPUs before data are downloaded, and installs faster attention.
prepare() {
    local checked
    checked=$("$python" - "$gpus" "${NPROC-}" "$@" <<'CHECK'
import sys
import torch, train_gpt
gpus, wanted, *flags = sys.argv[1:]
try:
    cfg = train_gpt.load_config(flags)
except train_gpt.TrainerError as error:
    sys.exit(f"error: {error}")
count = capability = memory = 0
if gpus != "0":
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        first = torch.cuda.get_device_properties(0)
        capability, memory = first.major, first.total_memory >> 30
    except Exception as error:
        reason = " ".join(str(error).split())
        sys.exit(f"error: torch {torch.__version__} cannot use the GPUs of nvidia-smi ({reason}): install a build of "
                 "torch for this driver, or train on the CPU with CUDA_VISIBLE_DEVICES= ./run.sh")
if count and capability < 8 and cfg.dtype == "bfloat16":
    sys.exit(f"error: {first.name} is too old for bfloat16: train on the CPU with CUDA_VISIBLE_DEVICES= ./run.sh")
fitting = [number for number in range(1, cfg.seqs_per_step + 1) if cfg.seqs_per_step % number == 0]
processes = int(wanted or max(number for number in fitting if number <= max(count, 1)))
if processes not in fitting:
    sys.exit(f"error: NPROC={wanted} does not divide --seqs_per_step={cfg.seqs_per_step}: {str(fitting)[1:-1]} do")
print(count, torch.version.cuda, capability, memory, processes)
CHECK
    ) || exit 2
    read -r gpus cuda capability memory processes <<<"$checked"
    ((gpus <= processes)) || say "warning: $((gpus - processes)) of $gpus GPUs are idle"
    [[ $gpus == 0 ]] || add_fast_attention
}

set_environment() {
    local caches=${XDG_CACHE_HOME:-${HOME-}/.cache}/train_gpt/torchinductor   # torch's default is in /tmp
    [[ -n ${TORCHINDUCTOR_CACHE_DIR-} ]] || ! mkdir -p "$caches" 2>/dev/null || export TORCHINDUCTOR_CACHE_DIR=$caches
    if [[ $gpus != 0 && -z ${PYTORCH_CUDA_ALLOC_CONF-} ]]; then               # stages of different sizes share memory
        export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}
    fi
}


# ---- Tasks
run_tests() {
    local arg processes="-n 2 --dist=loadfile --no-loadscope-reorder" folder=tests
    for arg in "$@"; do
        case $arg in
            -k* | -n*) processes='' ;;                        # few tests, or the user chooses
            */* | *.py*) [[ ! -e ${arg%%::*} ]] || processes='' folder='' ;;  # only the files that the user names
        esac
    done
    [[ $gpus == 0 ]] || processes=''                          # tests need the memory of a GPU
    [[ -z $processes ]] || say "tests: about 4 minutes on 2 idle cores, 20 with --all; . = passed, s = skipped"
    exec "$python" -m pytest -q --durations=10 -rfE --tb=short $processes ${folder:+"$folder"} "$@"
}

get_data() {  # for preset record; the data of the other presets are in the repository
    say "data: downloading 900 million tokens of FineWeb (1.8 GB)"
    # Without a network, the existing shards may suffice.
    "$python" data/cached_fineweb10B.py 9 || [[ $? == 1 && -e data/fineweb10B/fineweb_train_000001.bin ]]
}

train() {  # the status is the trainer's, whatever the report says
    local program cores
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
    say "training: preset $preset, processes: $processes, GPUs: $gpus"
    if [[ -z $folder ]]; then                                 # the report needs its name
        folder=logs/$(date +%Y%m%d-%H%M%S)-$preset-$(printf '%04x%04x' $RANDOM $RANDOM)
        set -- "$@" --run_dir="$folder"
    fi
    program=$(cat <<'TRAIN'
import contextlib, os, subprocess, sys
folder, processes, *flags = sys.argv[1:]
status = 0
if processes == "1":
    with open("train_gpt.py", "rb") as file:                  # now, because the file may be edited during the imports
        source = file.read()
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")           # as train_gpt.py does, before torch is imported
    import train_gpt
    status = train_gpt.main(flags, source)
else:                                                         # torchrun, but with the status of the first failed rank
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException, errors
    try:
        run.run(run.parse_args(["--standalone", f"--nproc_per_node={processes}", "train_gpt.py", *flags]))
    except errors.ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        status = code if code > 0 else 128 - code
    except SignalException as error:
        status = 128 + error.sigval
if status == 0:
    report = [sys.executable, "records", "show", folder, "--baselines", f"--plot={folder}/loss.svg"]
    with contextlib.suppress(BaseException):
        subprocess.run(report, stdout=sys.stderr, stderr=subprocess.DEVNULL, timeout=60)
os._exit(status)                                              # a thread of the trainer may be stuck in a read
TRAIN
    )
    exec "$python" -c "$program" "$folder" "$processes" "$@"
}

python=$(command -v "${PYTHON:-python3}") ||
    die "${PYTHON:-python3}: command not found: install Python 3.11, or run PYTHON=/path/to/python ./run.sh"
[[ $python == /* ]] || python=$PWD/$python
[[ ${NPROC:-1} =~ ^[1-9][0-9]*$ ]] || die "NPROC=$NPROC is no number of processes: NPROC=1 is one"
script=$(readlink -f -- "${BASH_SOURCE[0]}")                  # resolves links
cd -- "$(dirname -- "$script")"

task=train preset='' data='' folder='' device='' micro_batch='' processes=${NPROC:-1} gpus=0
[[ ! ${1-} =~ ^(test|day)$ ]] || { task=$1 && shift; }
for arg in "$@"; do
    case $task:$arg in
        train:--preset | train:--resume | train:--train_files | train:--run_dir | train:--micro_batch_size | *:--device)
            die "$arg: write $arg=VALUE, with = instead of a space" ;;
        train:--help | train:-h) task=help ;;
        train:--preset=*) preset=${arg#*=} ;;
        train:--resume=*) preset=resumed ;;                   # the preset and the data of the earlier run
        train:--train_files=*) data=${arg#*=} ;;
        train:--run_dir=*) folder=${arg#*=} ;;
        train:--micro_batch_size=*) micro_batch=${arg#*=} ;;
        *:--device=*) device=${arg#*=} ;;
    esac
done
if [[ $device != cpu && ! ${CUDA_VISIBLE_DEVICES-all} =~ ^(-1)?$ ]] && command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi -L | grep -c '^GPU ') || gpus=0
fi
[[ $gpus == 0 || ! $task =~ ^(train|day)$ ]] || check_compiler                # before gigabytes are downloaded
set_up
if [[ -z $preset && ! $task =~ ^(test|day)$ ]]; then
    [[ $gpus == 0 ]] && preset=pocket || preset=record
    set -- --preset=$preset "$@"
fi
set_environment
case $task in
    test)
        run_tests "$@" ;;
    help)
        sed -n '2,/^\[/s/^# \{0,1\}//p' run.sh
        printf '\nThe preset on this machine is %s. Flags of train_gpt.py and their defaults:\n\n' "$preset"
        exec "$python" train_gpt.py "$@" ;;
    day)
        [[ $gpus == 0 ]] || prepare
        add_package pytest '' "$(grep '^pytest==' tests/requirements.txt)"
        exec "$python" tests/gpu/day.py "$@" ;;
    train)
        [[ $gpus == 0 && $processes == 1 ]] || prepare "$@"
        if [[ $gpus != 0 ]]; then                             # memory: in GiB; two sequences need 80 GB
            [[ $preset$processes != record1 || $memory -ge 29 ]] || die "one GPU needs 32 GB: give --preset=record_24gb"
            [[ $preset != record* || -n $data ]] || get_data
            [[ $preset != record || $memory -ge 60 || -n $micro_batch ]] || set -- "$@" --micro_batch_size=1
        fi
        train "$@" ;;
esac
