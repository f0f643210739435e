#!/bin/sh
# cpu/fuzz/run.sh [executions per entry, 1000000] [seed, 1]: the C ABI under AddressSanitizer and UndefinedBehaviorSanitizer, then the
# thread pool and the disk engine under ThreadSanitizer. Prints the executions per entry; any finding ends it with a nonzero status.
# Needs g++ with its sanitizers, and cmake (of the PATH or of .venv). CMAKE and BUILD (a folder, default build/fuzz) may be set.
set -eu

executions=${1:-1000000}
seed=${2:-1}
here=$(cd "$(dirname "$0")" && pwd)
build=${BUILD:-$here/../../build/fuzz}
common="-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all"
memory="-fsanitize=address,undefined"
threads="-fsanitize=thread"
cmake=${CMAKE:-$(command -v cmake || echo "$here/../../.venv/bin/cmake")}

for tool in g++ "$cmake"; do
    command -v "$tool" >/dev/null || { echo "$tool is missing; install it (for example: apt-get install g++ cmake) or set CMAKE" >&2; exit 1; }
done

# library NAME FLAGS: the library with these sanitizers, in $build/NAME.
library() {
    "$cmake" -S "$here/.." -B "$build/$1" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=g++ "-DCMAKE_CXX_FLAGS=$common $2" >"$build/$1.log" 2>&1 &&
        "$cmake" --build "$build/$1" --target zerokern_cpu >>"$build/$1.log" 2>&1 || { cat "$build/$1.log" >&2; exit 1; }
}

# harness NAME PROGRAM FLAGS SOURCES...: a program that uses it, as $build/NAME/PROGRAM.
harness() {
    folder=$build/$1 program=$2 flags="$common $3"
    shift 3
    # shellcheck disable=SC2086
    (cd "$here" && g++ -std=c++17 -Wall -Wextra $flags -o "$folder/$program" "$@" -L"$folder" -lzerokern_cpu -Wl,-rpath,"$folder" -pthread)
}

mkdir -p "$build"
library fuzz "$memory"
library race "$threads"
harness fuzz fuzz "$memory" main.cpp update.cpp spans.cpp gradients.cpp copies.cpp control.cpp checksums.cpp changed.cpp io.cpp io_refusals.cpp
harness race race "$threads" race.cpp
harness race io_race "$threads" io_race.cpp

"$build/fuzz/fuzz" "$executions" "$seed"
"$build/race/race" "$((executions / 5000 + 5))" "$seed"
"$build/race/io_race" "$((executions / 50000 + 3))" "$seed"
