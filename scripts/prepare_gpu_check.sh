#!/usr/bin/env bash
# Compile what scripts/gpu_check.sh loads, on a machine without a GPU: every GEMM of an architecture, and a traced build of
# one GEMM for each recipe and schedule, whose launches print what CUTLASS does and why it fails.
#
#   scripts/prepare_gpu_check.sh [ARCH]    (sm_90a)
#
# The libraries go into the folder .gpu_check, which git ignores, at most 50 MB. They need a glibc that is no older than this
# machine's. Libraries that are there already are kept: run the script again after it was interrupted.
# $PYTHON (python3) needs torch-qtensor[cutlass-build]; $JOBS compilers run at once (as many as processors and memory allow).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arch=${1:-sm_90a}
folder=$PWD/.gpu_check
export PYTHONPATH="$PWD:${PYTHONPATH:-}"
umask 077
mkdir -p "$folder"
QTENSOR_CACHE_DIR=$folder/traced QTENSOR_CUTLASS_TRACE=1 \
    "${PYTHON:-python3}" scripts/gpu/prepare.py "$arch" --one-of-each ${JOBS:+--jobs "$JOBS"}
QTENSOR_CACHE_DIR=$folder/libraries \
    "${PYTHON:-python3}" scripts/gpu/prepare.py "$arch" ${JOBS:+--jobs "$JOBS"}

find "$folder" -mindepth 2 -maxdepth 2 ! -name libraries -exec rm -rf {} +
# What an interrupted build left.
find "$folder" -name '.making-*' -exec rm -rf {} +
find "$folder" -name '*.lock' -delete
bytes=$(du -sb "$folder" | cut -f1)
echo "$folder has $((bytes / 1000000)) MB"
if ((bytes > 50000000)); then
    echo "that is more than 50 MB" >&2
    exit 1
fi
