#!/usr/bin/env bash
# Builds, tests and measures zerokern on the GPU of this machine, and leaves JSON and logs in a folder.
#
#   bench/gpu.sh OUT [SECTION]             all sections in under ten minutes, or one of them
#   bench/gpu.sh --rehearse OUT [SECTION]  the same code on a CPU at toy sizes, on the package that is there; measures nothing
#
# Needs python3 (or $PYTHON) with torch, triton and cupy, cmake, ninja and nvcc; no network. What is missing is named in
# one line, and the rest runs. A result is never overwritten: OUT is a new folder, or one without files of such a run.
set -euo pipefail

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

rehearse=()
if [[ ${1-} == --rehearse ]]; then
    rehearse=(--rehearse)
    shift
fi
(($# == 1 || $# == 2)) && [[ $1 != -* ]] || usage
mkdir -p "$1"
out=$(cd "$1" && pwd)
section=${2-}
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
# where a toolkit lies that nobody has put on PATH
export PATH=$PATH:/usr/local/cuda/bin

build() { # installs the package of this tree into the environment of $python, and compiles cuda/ for its GPU
    local log=$out/build.log object arch
    object=$(mktemp)
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .) || true
    [[ ! -e $log ]] || log=$out/build-${section:-all}.log
    echo "=== build: make setup VENV=none PYTHON=$python"
    if ! timeout 240 make -C "$root" setup VENV=none PYTHON="$python" >"$log" 2>&1; then
        echo "could not run build: make setup failed, see $log; nothing else can run"
        tail -n 20 "$log"
        return 1
    fi
    if [[ ! -f $root/cuda/index.cu ]]; then
        echo "could not run build of cuda/: there is no cuda/index.cu"
    elif ! command -v nvcc >/dev/null; then
        echo "could not run build of cuda/: there is no nvcc on PATH"
    elif ! timeout 90 nvcc -arch="sm_${arch:-90}" -std=c++17 -Werror all-warnings -cubin -o "$object" "$root/cuda/index.cu" >>"$log" 2>&1; then
        echo "could not run build of cuda/: nvcc failed, see $log"
    fi
    rm -f "$object"
    echo "built in $SECONDS s"
}

if ((${#rehearse[@]})); then
    # the interpreter of Triton decides when it is imported, so for the whole process
    export TRITON_INTERPRET=1
    echo "could not run build: a rehearsal takes the package that is installed"
    [[ $section != build ]] || exit 0
else
    unset TRITON_INTERPRET
    build
    [[ $section != build ]] || exit 0
    module=zerokern.bench.gpu
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "could not run anything but build: torch finds no CUDA GPU here (bench/gpu.sh --rehearse needs none)"
        exit 1
    fi
fi

# Away from the sources, which `python -m` would put before what is installed.
cd "$out"
if ((${#rehearse[@]})); then
    module=$("$python" -c 'import importlib.util as i; print("zerokern.bench.gpu" if i.find_spec("zerokern.bench") else "bench.gpu")')
fi
exec "$python" -m "$module" "${rehearse[@]}" --tree "$root" --within $((555 - SECONDS)) "$out" ${section:+"$section"}
