#!/usr/bin/env bash
# Builds, tests and measures zerokern on the GPU of this machine, and leaves JSON and logs in a folder.
#
#   bench/gpu.sh OUT [SECTION]             all sections, in order of value, or one of them
#   bench/gpu.sh --rehearse OUT [SECTION]  the same code on a CPU at toy sizes, on the package that is there; measures nothing
#   bench/gpu.sh --check FILE...           is each of these files a result that can be kept?
#
# WITHIN=540 seconds for all of it, build included: each section gets what it wants or what is left, so that a short run
# keeps the first ones; all of them want 2,700. What bench/gpu_pack.sh made is found in build/gpu-pack. WHEELS=FOLDER:
# other libraries to compare with, as *.whl files, which are unpacked beside the environment and not into it; zerokern's
# own, if it is of these sources, saves the build. Needs python3 (or $PYTHON) with torch and triton, cmake and a C++
# compiler; no network. Where pip cannot install (no scikit-build-core, say), the library is built by cmake alone and
# used from a folder. What else is missing is named in one line, and the rest runs. Whatever stops it, OUT/gpu.json holds
# what was known a second before. A result is never overwritten: OUT is a new folder, or one without such a file.
set -euo pipefail

usage() {
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

rehearse=() check=
if [[ ${1-} == --rehearse ]]; then
    rehearse=(--rehearse)
    shift
elif [[ ${1-} == --check ]]; then
    check=1
    shift
fi
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ $check ]]; then
    (($#)) || usage
    exec "$python" -m zerokern.bench.gpu --check "$@"
fi
(($# == 1 || $# == 2)) && [[ $1 != -* ]] || usage
mkdir -p "$1"
out=$(cd "$1" && pwd)
section=${2-}
within=${WITHIN:-540}
export PYTHONUNBUFFERED=1
# "is there a GPU" must not start CUDA in the process that sections are forked from
export PYTORCH_NVML_BASED_CUDA_CHECK=1
# where a toolkit lies that nobody has put on PATH
export PATH=$PATH:/usr/local/cuda/bin
# as whoever trains with NCCL is told: with eight queues two streams may share one
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
# all ranks are on this machine, which may have no name that resolves
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
# a cache of Triton serves only in the folder where it was made, so that is the same one on all machines
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/var/tmp/zerokern-triton}

installed() { # the package of this tree, into the environment of $python
    timeout 240 "$python" -m pip install --no-build-isolation --no-deps --no-index --force-reinstall "$root"
}

laid_out() { # the same package in a folder, where pip cannot install
    local made
    made=$(mktemp -d)
    cmake -S "$root/cpu" -B "$made/build" -DCMAKE_BUILD_TYPE="${BUILD_TYPE:-Release}" &&
        cmake --build "$made/build" --parallel || return 1
    cp -r "$root/zerokern" "$made/zerokern"
    cp -r "$root/bench" "$root/examples" "$made/zerokern/"
    mkdir -p "$made/zerokern/lib" "$made/zerokern/include"
    cp -r "$root/cuda" "$made/zerokern/include/"
    find "$made/build" -name 'libzerokern_cpu.so' -exec cp {} "$made/zerokern/lib/" \;
    export PYTHONPATH=$made${PYTHONPATH:+:$PYTHONPATH}
    "$python" -c 'import sys; sys.path = [p for p in sys.path if p]; from zerokern.core import native; native.library()'
}

unpack() { # the wheels of a folder, each by itself: one that does not fit this python costs only its own peer
    local wheel
    site=$(mktemp -d)
    for wheel in "$1"/*.whl; do
        [[ -e $wheel ]] || { echo "could not unpack wheels: there is none in $1" && return; }
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheel" \
            >>"$log" 2>&1 || echo "could not unpack $(basename "$wheel"): $(tail -n 1 "$log")"
    done
    if [[ -d $site/zerokern ]] && ! same "$root/zerokern" "$site/zerokern"; then
        echo "could not use the wheel of zerokern: it is of other sources than $root"
        rm -rf "$site"/zerokern "$site"/zerokern-*
    fi
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$site
}

same() { # whether an installed package is that of the tree
    diff -rq -x __pycache__ -x lib -x include -x bench -x examples "$1" "$2" >/dev/null &&
        diff -rq -x __pycache__ -x results "$root/bench" "$2/bench" >/dev/null &&
        diff -rq -x README.md "$root/cuda" "$2/include/cuda" >/dev/null
}

build() { # zerokern for $python
    local compiler
    if [[ -n $site && -d $site/zerokern ]]; then
        echo "=== build: none, the wheel of zerokern is of these sources"
        return
    fi
    compiler=$(command -v "${CXX:-c++}" g++ clang++ | head -n 1) || true
    if [[ -z $compiler ]]; then
        echo "could not run build: there is no C++ compiler (c++, g++ or clang++) on PATH; nothing else can run"
        return 1
    fi
    echo "=== build: pip install, with $compiler"
    if installed >>"$log" 2>&1; then
        :
    elif echo "could not run pip install, see $log: building by cmake instead" && laid_out >>"$log" 2>&1; then
        :
    else
        echo "could not run build: see $log; nothing else can run"
        tail -n 20 "$log"
        return 1
    fi
    echo "built in $SECONDS s"
}

site='' log=$out/build.log
[[ ! -e $log ]] || log=$out/build-${section:-all}.log
pack=$root/build/gpu-pack
[[ ! -d $pack/wheels || -n ${WHEELS-} || ${#rehearse[@]} -gt 0 ]] || WHEELS=$pack/wheels
[[ -z ${WHEELS-} ]] || unpack "$(cd "$WHEELS" && pwd)"
if ((${#rehearse[@]})); then
    # the interpreter of Triton decides when it is imported, so for the whole process; toy sizes need one thread, and
    # threads of OpenMP that wait for each other on busy cores take minutes
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 ZEROKERN_THREADS=1
    echo "could not run build: a rehearsal takes the package that is installed"
    [[ $section != build ]] || exit 0
else
    unset TRITON_INTERPRET
    build
    [[ $section != build ]] || exit 0
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "could not run anything but build: torch finds no CUDA GPU here (bench/gpu.sh --rehearse needs none)"
        exit 1
    fi
fi

# Away from the sources, which `python -m` would put before what is installed.
cd "$out"
exec "$python" -m zerokern.bench.gpu "${rehearse[@]}" --tree "$root" --pack "$pack" --within $((within - SECONDS)) "$out" ${section:+"$section"}
