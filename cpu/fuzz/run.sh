#!/bin/sh
# cpu/fuzz/run.sh [executions per entry, 1000000] [seed, 1]: the C ABI under AddressSanitizer and UndefinedBehaviorSanitizer, then the
# thread pool under ThreadSanitizer. Prints the executions per entry; any finding ends it with a nonzero status.
# Needs g++ with its sanitizers, and cmake (of the PATH or of .venv). CMAKE and BUILD (a folder, default build/fuzz) may be set.
set -eu

executions=${1:-1000000}
seed=${2:-1}
here=$(cd "$(dirname "$0")" && pwd)
build=${BUILD:-$here/../../build/fuzz}
cmake=${CMAKE:-$(command -v cmake || echo "$here/../../.venv/bin/cmake")}

for tool in g++ "$cmake"; do
    command -v "$tool" >/dev/null || { echo "$tool is missing; install it (for example: apt-get install g++ cmake) or set CMAKE" >&2; exit 1; }
done

# make_with NAME FLAGS SOURCES...: the library and a harness with the same sanitizers, as $build/NAME/NAME.
make_with() {
    name=$1
    flags="-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all $2"
    shift 2
    "$cmake" -S "$here/.." -B "$build/$name" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=g++ "-DCMAKE_CXX_FLAGS=$flags" >"$build/$name.log" 2>&1 &&
        "$cmake" --build "$build/$name" --target zerokern_cpu >>"$build/$name.log" 2>&1 || { cat "$build/$name.log" >&2; exit 1; }
    # shellcheck disable=SC2086
    (cd "$here" && g++ -std=c++17 -Wall -Wextra $flags -o "$build/$name/$name" "$@" -L"$build/$name" -lzerokern_cpu -Wl,-rpath,"$build/$name" -pthread)
}

mkdir -p "$build"
make_with fuzz "-fsanitize=address,undefined" main.cpp update.cpp spans.cpp gradients.cpp control.cpp
make_with race "-fsanitize=thread" race.cpp

"$build/fuzz/fuzz" "$executions" "$seed"
"$build/race/race" "$((executions / 5000 + 5))" "$seed"
