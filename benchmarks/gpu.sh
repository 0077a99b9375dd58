#!/bin/sh
# One CUDA GPU in at most five minutes, with nothing to download: exactness, noise, conformance, and the table of models
# beside the plain step and Opacus. Run it in the environment that holds torch with CUDA and this package. Results are
# printed, and kept as JSON in the folder given, or in results/.
#   sh benchmarks/gpu.sh [--dry-run] [FOLDER]        --dry-run needs no card
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}
dry=
if [ "${1:-}" = --dry-run ]; then dry=--dry-run; shift; fi
[ -n "$dry" ] || nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
timeout 300 "$python" gpu.py $dry --seconds 250 --results "${1:-results}"
