#!/usr/bin/env bash
# The first minutes on a bare machine with a GPU and without a network: install the wheels that were carried along
# (wheels.sh), then check.py, whose order is by what it teaches. The same command resumes, also with a copy of OUTPUT.
# Usage: benchmarks/gpu/first_minutes.sh WHEELS [MINUTES] [arguments of check.py]      OUTPUT=gpu-check  PYTHON=python3
set -uo pipefail
began=$(date +%s) wheels=${1:?usage: first_minutes.sh WHEELS [MINUTES] [arguments of check.py]} minutes=${2:-14}
shift "$(($# < 2 ? $# : 2))"
python=${PYTHON:-python3} output=${OUTPUT:-gpu-check}
mkdir -p "$output"
site=$(cd "$output" && pwd)/site
if [ ! -e "$site/installed" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl &&
    touch "$site/installed"
fi
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH} DS_BUILD_OPS=0 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTORCH_NVML_BASED_CUDA_CHECK=1
# DeepSpeed compiles its Adam for this GPU in a minute: meanwhile the first steps run, which need none.
if [[ " $* " != *" --tiny "* ]]; then
  "$python" -c 'from toolkit.cache import use_cached_extensions; use_cached_extensions()
from deepspeed.ops.op_builder import FusedAdamBuilder; FusedAdamBuilder().load(verbose=False)' >"$output/ops.log" 2>&1 &
fi
left=$("$python" -c "import time; print(round($minutes - (time.time() - $began) / 60, 2))")
"$python" benchmarks/gpu/check.py --output "$output" --minutes "$left" "$@"
code=$?
if [ -n "${OUT:-}" ]; then # where the caller fetches files from: not the models
  for file in "$output"/*.json* "$output"/*.log; do [ -e "$file" ] && cp "$file" "$OUT"; done
fi
exit "$code"
