#!/usr/bin/env bash
# Run everything that needs a GPU: build the GEMMs of the device's architecture, run the GPU tests, the
# GEMM benchmark and compute-sanitizer. It takes at most 9 minutes on 16 cores and 128 GB.
#
#   scripts/gpu_check.sh [OUTPUT_FOLDER]
#
# $PYTHON (python3) needs a torch for CUDA. Missing packages come from the wheels in $QTENSOR_WHEELS
# (.wheels), which are unpacked into a temporary folder. To fill that folder on a machine with a network:
#   pip download --no-deps -d .wheels -c constraints.txt nvidia-cutlass einops pytest pytest-timeout pluggy iniconfig
# The library finds nvcc itself.
# Each stage has a time limit, and all stages together have $QTENSOR_GPU_CHECK_SECONDS (520). A stage
# runs even if earlier ones failed. The exit status is the number of stages that failed or were not run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

output=${1:-gpu_check}
mkdir -p "$output"
output=$(cd "$output" && pwd)
python=${PYTHON:-python3}
wheels=${QTENSOR_WHEELS:-.wheels}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if compgen -G "$wheels/*.whl" >/dev/null; then
    for wheel in "$wheels"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$work/packages"
    done
fi
# The machine's own packages come first: a wheel only supplies a missing package.
export PYTHONPATH="$PWD:${PYTHONPATH:-}"
if [[ -d $work/packages ]]; then
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    export PYTHONPATH="$PYTHONPATH:$site:$work/packages"
fi
export QTENSOR_CACHE_DIR=${QTENSOR_CACHE_DIR:-$work/cache}
export QTENSOR_GPU_CHECK=1 OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1

total=${QTENSOR_GPU_CHECK_SECONDS:-520}
failed=0
summary=$output/summary.txt
: >"$summary"

# stage NAME SECONDS COMMAND...
stage() {
    local name=$1 limit=$2 began=$SECONDS status=0
    shift 2
    printf '== %s\n' "$name"
    local left=$((total - SECONDS))
    if ((left < 10)); then
        echo "$name: not run, the $total s are over" | tee -a "$summary"
        failed=$((failed + 1))
        return
    fi
    limit=$((left < limit ? left : limit))
    timeout --kill-after=10 "$limit" "$@" >"$output/$name.log" 2>&1 || status=$?
    tail -n 15 "$output/$name.log"
    printf '%s: %s, %d s\n' "$name" "$([[ $status -eq 0 ]] && echo ok || echo "status $status")" \
        "$((SECONDS - began))" | tee -a "$summary"
    [[ $status -eq 0 ]] || failed=$((failed + 1))
}

stage machine 60 bash -c "nvidia-smi; nproc; free -g; '$python' -c '
import torch
print(torch.__version__, torch.cuda.get_device_name(), torch.cuda.get_device_capability())'"
stage build 280 "$python" -c '
import time, qtensor.kernels
began = time.monotonic()
def tell(spec, result):
    print(f"{time.monotonic() - began:6.1f} s  {spec.name}: {result}", flush=True)
qtensor.kernels.build_gemms(progress=tell)'
stage launch 60 "$python" scripts/launch_each.py
# Another version of torch may warn; these warnings must not fail the tests.
pytest=("$python" -m pytest -q -p no:cacheprovider -o filterwarnings=default)
stage gemm_tests 150 "${pytest[@]}" tests/kernels/test_gemm_gpu.py
stage gemm_benchmark 110 "$python" -m benchmarks.gemm --output "$output" --seconds 90
# The byte tests of the Triton kernels use the GPU if there is one, otherwise the interpreter.
stage triton_bytes 120 "${pytest[@]}" tests/kernels/test_triton_kernels.py
stage triton_attention 60 "${pytest[@]}" -m "not nightly" -k "not compile" tests/kernels/test_triton_attention.py
mapfile -t others < <(grep -rl 'pytest.mark.gpu' --include='test_*.py' tests | grep -v test_gemm_gpu)
stage other_gpu_tests 60 "${pytest[@]}" -m gpu "${others[@]}"
if command -v compute-sanitizer >/dev/null; then
    stage sanitizer 90 compute-sanitizer --error-exitcode 1 "$python" scripts/launch_each.py
else
    echo "sanitizer: not run, compute-sanitizer is not on PATH" | tee -a "$summary"
fi
echo "== $failed stages failed, $SECONDS s, results in $output"
exit "$failed"
