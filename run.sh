#!/usr/bin/env bash
# ./run.sh [flags of train_gpt.py]: set up, get data, train.    ./run.sh test [pytest arguments]: set up, run the tests.
# PYTHON=... chooses the interpreter, NPROC=... the number of processes. What Python lacks goes into .venv beside this.
set -euo pipefail
say() { printf '== %s\n' "$*"; }; die() { printf 'error: %s\n' "$*" >&2; exit 1; }
python=$(command -v "${PYTHON:-python3}") || die "found no ${PYTHON:-python3}, expected Python 3.11; set PYTHON="
[[ $python == /* ]] || python=$PWD/$python
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
task=train preset='' files='' tests=tests slots=8
if [[ ${1-} == test ]]; then task=test; shift; fi
gpus=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true)

ready() {  # has interpreter $1 all that the task needs? By the installed files: importing torch would take seconds
    "$1" -c 'import importlib.metadata, importlib.util, platform, re, sys
needs = ["torch", "numpy", "huggingface_hub", "tqdm"] + ["pytest", "scipy", "matplotlib"] * (sys.argv[1] == "test")
needs += ["triton"] * (sys.argv[1] == "test" and (sys.platform, platform.machine()) == ("linux", "x86_64"))
complete = all(map(importlib.util.find_spec, needs)) and re.match(r"2\.1[123]\.", importlib.metadata.version("torch"))
sys.exit(not complete)' "$task" 2>/dev/null
}
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
if ready "$python"; then :
elif ready .venv/bin/python; then python=.venv/bin/python
else
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "found $("$python" -V 2>&1), expected 3.11 or later for the versions in requirements.txt; set PYTHON"
    say "set-up: $python lacks packages; installing them into .venv (the first time: some minutes)"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
    [[ $gpus != 0 ]] || install --timeout 10 --retries 0 --index-url https://download.pytorch.org/whl/cpu \
        "$(grep '^torch==' requirements.txt)" 2>/dev/null ||      # without a GPU: spares gigabytes of CUDA
        say "set-up: no torch from PyTorch's index of CPU wheels, falling back to the default index"
    install -r requirements.txt
    [[ $task == train ]] || install -r tests/requirements.txt
    python=.venv/bin/python
fi
if [[ $task == test ]]; then
    for arg in "$@"; do [[ ! -e ${arg%%::*} ]] || tests=''; done     # the user names files: only these
    exec "$python" -m pytest -q ${tests:+tests} "$@"
fi
for arg in "$@"; do case $arg in
    --help | -h | --sample | --sample=*) exec "$python" train_gpt.py "$@" ;;
    --preset | --train_files | --num_slots) die "found $arg without a value, expected $arg=VALUE" ;;
    --preset=*) preset=${arg#*=} ;;
    --train_files=*) files=${arg#*=} ;;     --num_slots=*) slots=${arg#*=} ;;
esac; done
[[ $gpus == 0 ]] || gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')     # those torch can use
[[ -n $preset ]] || { [[ $gpus != 0 ]] && preset=record || preset=pocket; set -- --preset=$preset "$@"; }
if [[ -z $files && $preset == pocket ]]; then
    say "data: the source text of Python's standard library"; "$python" data/pocket.py
elif [[ -z $files && $preset == record && $gpus != 0 ]]; then
    say "data: 900 million tokens of FineWeb"            # without network, shards at hand may be enough
    "$python" data/cached_fineweb10B.py 9 || { [[ $? == 1 ]] && compgen -G 'data/fineweb10B/fineweb_train_*.bin' >/dev/null; }
fi
fits=1; for ((n = 1; n <= gpus && n <= slots; n++)); do ((slots % n)) || fits=$n; done    # a rank has whole slots
((gpus <= ${NPROC:=$fits})) || say "of $gpus GPUs $((gpus - NPROC)) stay idle: the number of ranks must divide num_slots=$slots"
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-5000}"
say "training: preset $preset on $([[ $gpus == 0 ]] && echo "the CPU" || echo "$NPROC GPU(s)")"
[[ $NPROC != 1 ]] || exec "$python" train_gpt.py "$@"     # one process needs no launcher, and ends with its own status
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$NPROC" train_gpt.py "$@"
