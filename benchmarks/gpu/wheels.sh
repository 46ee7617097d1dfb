#!/usr/bin/env bash
# Collect the wheels that a GPU machine with torch, but without a network, still needs, or has too old (20 MB).
# Usage: benchmarks/gpu/wheels.sh FOLDER      run it where pip works and torch is installed; Python there: 3.12
set -euo pipefail
folder=${1:?usage: wheels.sh FOLDER}
mkdir -p "$folder"
platforms=()
for tag in manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
  platforms+=(--platform "$tag")
done
pinned() { grep -oE "^$1==[^ ;]+" "$(dirname "$0")/../../constraints.txt"; }
# DeepSpeed is a source archive; without prebuilt ops its wheel is pure Python, and its ops compile there, with nvcc.
DS_BUILD_OPS=0 python3 -m pip wheel -q --no-deps --no-build-isolation -w "$folder" "$(pinned deepspeed)"
names=(transformers accelerate peft datasets dill multiprocess pydantic pydantic_core annotated-types typing-inspection trl liger-kernel)
# shellcheck disable=SC2046  # names and versions have no spaces
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" --implementation cp \
  "${platforms[@]}" -d "$folder" $(for name in "${names[@]}"; do pinned "$name"; done)
python3 -m pip download -q --no-deps -d "$folder" "$(pinned hjson)"
du -sh "$folder"
