#!/usr/bin/env bash
# Check and measure all that needs a GPU, within 10 minutes on 16 cores: what matters most comes first, and every result is
# written as it comes.
#
#   scripts/gpu_check.sh [OUTPUT_FOLDER]    (gpu_check)
#   scripts/gpu_check.sh --plan             print the stages, their limits in seconds, and the sum
#
# scripts/prepare_gpu_check.sh compiles the GEMMs before, on a machine that need not have a GPU; they are read from
# .gpu_check. $PYTHON (python3) needs a torch for CUDA, einops, pytest, pytest-timeout and pytest-xdist. Missing packages
# come from the wheels in $QTENSOR_WHEELS (.wheels), which are unpacked into a temporary folder.
#
# The output folder gets summary.txt (a line a stage), log.txt (what all stages printed), table.md and table.json. Each
# stage has a limit and runs even if earlier ones failed. A stage that is too slow is interrupted as by Ctrl-C, so that
# tests report, and killed $GRACE s later. The exit status is the number of stages that failed or were not run.
#
# QTENSOR_GPU_CHECK=rehearsal runs every stage without a GPU: stand-ins for the GEMMs compute on the CPU, and Triton
# interprets its kernels.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

GRACE=5
total=${QTENSOR_GPU_CHECK_SECONDS:-575}
export QTENSOR_GPU_CHECK=${QTENSOR_GPU_CHECK:-1}
if [[ $QTENSOR_GPU_CHECK == rehearsal ]]; then rehearsal=1; else rehearsal=; fi

# The order of worth: name and limit of each stage.
STAGES=(machine:15 traced:25 launches:40 triton_bytes:140 table:140 memcheck:70 gpu_tests:105)

sum=0
for stage in "${STAGES[@]}"; do
    sum=$((sum + ${stage#*:} + GRACE))
done
if [[ ${1:-} == --plan ]]; then
    printf '%s\n' "${STAGES[@]}" "sum:$sum"
    exit 0
fi

output=${1:-gpu_check}
mkdir -p "$output"
output=$(cd "$output" && pwd)
summary=$output/summary.txt log=$output/log.txt
: >"$summary"
: >"$log"
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 077

if compgen -G "${QTENSOR_WHEELS:-.wheels}/*.whl" >/dev/null; then
    for wheel in "${QTENSOR_WHEELS:-.wheels}"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$work/packages"
    done
fi
# The machine's own packages come first: a wheel only supplies a missing package.
export PYTHONPATH="$PWD:${PYTHONPATH:-}"
if [[ -d $work/packages ]]; then
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    export PYTHONPATH="$PYTHONPATH:$site:$work/packages"
fi
# A copy belongs to this user, as the cache of libraries demands.
mkdir -p "$work/libraries" "$work/traced"
if [[ -d .gpu_check && ! $rehearsal ]]; then
    cp -r --no-preserve=all .gpu_check/. "$work/"
    chmod -R go-rwx "$work"
elif [[ ! $rehearsal ]]; then
    echo "no .gpu_check: run scripts/prepare_gpu_check.sh first, or no GEMM can be launched" | tee -a "$summary"
fi
export QTENSOR_CACHE_DIR=$work/libraries TRITON_CACHE_DIR=$work/triton
# The reference is the oracle; no stage waits until the kernels of the CPU are compiled.
export QTENSOR_NATIVE=0
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
workers=${QTENSOR_GPU_CHECK_WORKERS:-$(($(nproc) < 12 ? $(nproc) : 12))}
parallel=()
if "$python" -c 'import xdist' 2>/dev/null && ((workers > 1)); then
    parallel=(-n "$workers" --dist worksteal)
fi
# Another version of torch may warn; these warnings must not fail the tests.
pytest=("$python" -m pytest -v --tb=short -p no:cacheprovider -o filterwarnings=default "${parallel[@]}")
failed=0

# stage NAME COMMAND...
stage() {
    local name=$1 limit=0 began=$SECONDS status=0 entry
    shift
    for entry in "${STAGES[@]}"; do
        [[ ${entry%:*} == "$name" ]] && limit=${entry#*:}
    done
    # An interpreter is slower, and a rehearsal may share its machine.
    [[ ${rehearsal:-} ]] && limit=$((limit * 4))
    local left=$((total - SECONDS - GRACE))
    limit=$((left < limit ? left : limit))
    printf '\n== %s, at most %d s\n' "$name" "$limit" | tee -a "$log"
    if ((limit < 5)); then
        echo "$name: not run, the $total s are over" | tee -a "$summary"
        failed=$((failed + 1))
        return
    fi
    timeout --signal=INT --kill-after="$GRACE" "$limit" "$@" >>"$log" 2>&1 || status=$?
    tail -n 12 "$log"
    local said="status $status"
    ((status == 0)) && said=ok
    ((status == 124 || status == 137)) && said="stopped after its limit"
    echo "$name: $said, $((SECONDS - began)) s" | tee -a "$summary"
    ((status == 0)) || failed=$((failed + 1))
}

machine() {
    if [[ $rehearsal ]]; then
        "$python" -c 'import torch; print("a rehearsal without a GPU, torch", torch.__version__)'
        return
    fi
    nvidia-smi
    nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.limit,temperature.gpu --format=csv
    nproc
    free -g
    "$python" -c '
import torch, triton
print(torch.__version__, triton.__version__, torch.cuda.get_device_name(), torch.cuda.get_device_capability())'
}

memcheck() {
    # Under the caching allocator an access past a tensor lies in the same block, and nothing is seen.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    local sanitizer=()
    if [[ ! $rehearsal ]]; then
        sanitizer=(compute-sanitizer --error-exitcode 1)
        if ! timeout 30 "${sanitizer[@]}" "$python" -c 'import torch; torch.zeros(1, device="cuda")'; then
            echo "compute-sanitizer does not run on this machine"
            return 3
        fi
    fi
    "${sanitizer[@]}" "$python" scripts/gpu/launch_each.py --few
}

export -f machine memcheck
export python rehearsal
stage machine bash -c machine
stage traced env QTENSOR_CACHE_DIR="$work/traced" "$python" scripts/gpu/launch_each.py --one-of-each
stage launches "$python" scripts/gpu/launch_each.py
# On a GPU these tests run there, otherwise in the interpreter.
triton_tests=(tests/kernels/test_triton_kernels.py tests/kernels/test_triton_floats.py tests/kernels/test_triton_attention.py)
selected="not compile"
[[ $rehearsal ]] && selected="test_table and not compile"
stage triton_bytes "${pytest[@]}" -m "not nightly" -k "$selected" "${triton_tests[@]}"
stage table "$python" scripts/gpu/table.py "$output" --seconds "${QTENSOR_GPU_CHECK_TABLE_SECONDS:-130}"
stage memcheck bash -c memcheck
mapfile -t others < <(grep -rl 'pytest.mark.gpu' --include='test_*.py' tests)
stage gpu_tests "${pytest[@]}" -m gpu "${others[@]}"
echo "== $failed stages failed, $SECONDS s, results in $output"
exit "$failed"
