#!/usr/bin/env bash
# Packs what a GPU run would spend its first minute on, into build/gpu-pack, which bench/gpu.sh finds there.
#
#   bench/gpu_pack.sh [TRITON_CACHE] [RESULT ...] [WHEEL ...]
#
# A wheel of zerokern, for any Python 3; COMMIT, as a copy of this tree has no .git; TRITON_CACHE, the triton-cache.tgz
# of an earlier run on the same image (bench/gpu/triton_cache.py says why no other one can be of use, and none is made
# here); RESULTs, the gpu.json of earlier runs, whose whole sections are left out; WHEELs of other libraries to compare
# with. PYTHON=python3 needs scikit-build-core, cmake and ninja; no network.
set -euo pipefail
case ${1-} in -*)
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
pack=$root/build/gpu-pack
results=0
rm -rf "$pack"
mkdir -p "$pack/wheels"
for file in "$@"; do
    case $file in
    *.whl) cp "$file" "$pack/wheels/" ;;
    *.tgz) cp "$file" "$pack/triton-cache.tgz" ;;
    *.json) cp "$file" "$pack/gpu-$((results += 1)).json" ;;
    *) echo "$file is no wheel, no .tgz and no .json" >&2 && exit 2 ;;
    esac
done
if [[ -z ${NO_WHEEL-} ]]; then
    "$python" -m pip wheel -q --no-build-isolation --no-deps --no-index --wheel-dir "$pack/wheels" \
        --config-settings=build-dir="$root/build/gpu-wheel" --config-settings=cmake.define.ZEROKERN_PORTABLE=ON \
        --config-settings=cmake.build-type="${BUILD_TYPE:-Release}" "$root"
fi
(cd "$root" && "$python" -m zerokern.bench.machine >"$pack/COMMIT")
[[ -e $pack/triton-cache.tgz ]] || echo "without a Triton cache: kernels are compiled on the GPU's machine"
du -sh "$pack"
find "$pack" -type f -printf '%P %s\n' | sort
cat "$pack/COMMIT"
