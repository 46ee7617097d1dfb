#!/usr/bin/env bash
# Collect the wheels that a GPU machine with torch and transformers, but without a network, still needs (6 MB).
# Usage: benchmarks/gpu/wheels.sh FOLDER      run it where pip works and torch is installed; Python there: 3.12
set -euo pipefail
folder=${1:?usage: wheels.sh FOLDER}
mkdir -p "$folder"
platforms=()
for tag in manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
  platforms+=(--platform "$tag")
done
# DeepSpeed is a source archive; without prebuilt ops its wheel is pure Python, and its ops compile there, with nvcc.
DS_BUILD_OPS=0 python3 -m pip wheel -q --no-deps --no-build-isolation -w "$folder" "deepspeed==${DEEPSPEED:-0.19.8}"
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" --implementation cp \
  "${platforms[@]}" -d "$folder" datasets==5.2.0 dill multiprocess pydantic==2.14.3 pydantic_core==2.50.4 \
  annotated-types typing-inspection liger-kernel==0.8.5 trl==1.16.0
python3 -m pip download -q --no-deps -d "$folder" hjson
du -sh "$folder"
