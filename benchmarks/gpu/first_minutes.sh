#!/usr/bin/env bash
# The first minutes on a bare machine with a GPU and without a network: install what is missing of the wheels that were
# carried along (wheels.sh), then check.py, whose order is by what it teaches. The same command resumes.
# Usage: benchmarks/gpu/first_minutes.sh WHEELS [MINUTES] [arguments of check.py]      OUTPUT=gpu-check  PYTHON=python3
set -uo pipefail
began=$(date +%s) wheels=${1:?usage: first_minutes.sh WHEELS [MINUTES] [arguments of check.py]} minutes=${2:-14}
shift "$(($# < 2 ? $# : 2))"
python=${PYTHON:-python3} output=${OUTPUT:-gpu-check}
mkdir -p "$output"
output=$(cd "$output" && pwd)
export PYTHONPATH=$PWD:$output/site${PYTHONPATH:+:$PYTHONPATH}
missing=$("$python" - "$wheels"/*.whl <<'P'
import importlib.metadata, os, sys
for path in sys.argv[1:]:
    name, wanted, *_ = os.path.basename(path).split("-")
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed != wanted and os.path.isfile(path):
        print(path)
P
)
if [ -n "$missing" ]; then
  # shellcheck disable=SC2086  # paths of wheels have no spaces
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$output/site" $missing
  "$python" -m compileall -q -j 0 "$output/site" toolkit >/dev/null # or each of the first processes would, by itself
fi
# Ops of this DeepSpeed, for this GPU: another environment's stay as they are.
[ -d "$output/site/deepspeed" ] && export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$output/extensions}
# DeepSpeed reads numbers alone, and some images say 9.0a.
export DS_BUILD_OPS=0 TORCH_CUDA_ARCH_LIST=9.0 PYTORCH_NVML_BASED_CUDA_CHECK=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
# DeepSpeed compiles the Adam of offloading presets in a minute: meanwhile the first steps run, which need none.
if [[ " $* " != *" --tiny "* ]]; then
  "$python" -c 'from toolkit.engines.compiled_ops import use_cached_extensions; use_cached_extensions()
from deepspeed.ops.op_builder import CPUAdamBuilder
CPUAdamBuilder().load(verbose=False)' >"$output/ops.log" 2>&1 &
fi
# What the caller fetches: one archive, without models and installed packages; also where the caller's time is over.
archive() {
  [ -n "${OUT:-}" ] || return 0
  cp "$output/gpu-check.json" "$OUT" 2>/dev/null
  (cd "$output" && find . -type f -size -9M ! -path './site/*' ! -path './extensions/*' ! -path './models/*' \
    ! -path './rows/*' ! -path '*/.saving*' ! -name '*.safetensors' ! -name '*.pt' ! -name '*.distcp' ! -name '*.bin' \
    -print0 | tar czf "$OUT/gpu-check.tgz" --null -T - 2>/dev/null)
}
trap 'kill "$check"; wait "$check"; archive; exit 143' TERM
# The last command has 40 s to end its ranks.
left=$("$python" -c "import time; print(round($minutes - 0.8 - (time.time() - $began) / 60, 2))")
"$python" benchmarks/gpu/check.py --output "$output" --minutes "$left" "$@" &
check=$!
wait "$check"
code=$?
archive
exit "$code"
