#!/bin/sh
# Speed of a private step on one CUDA GPU, in a few minutes and with nothing to download: run it in the environment that
# holds torch with CUDA and this package. The table is printed, and kept as JSON in the folder given, or in results/.
#   sh benchmarks/gpu.sh [FOLDER]
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}
"$python" -c 'import torch; assert torch.cuda.is_available(), "a CUDA device is needed"'
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
timeout 330 "$python" speed.py --quick --alone --device cuda --results "${1:-results}"
