#!/bin/sh
# One CUDA GPU in at most five minutes, with nothing to download: exactness, noise, conformance, and the table of models
# beside the plain step and Opacus. Run it in the environment that holds torch with CUDA. The package need not be
# installed there, but what it imports must be: wheels of what is missing may lie in the folder WHEELS, and are unpacked
# for this run alone. Results are printed, and kept as JSON in the folder given, or in results/.
#   [WHEELS=…] sh benchmarks/gpu.sh [--dry-run | --device cpu] [FOLDER]        both options need no card
set -eu
[ -z "${WHEELS:-}" ] || WHEELS=$(cd "$WHEELS" && pwd)
cd "$(dirname "$0")"
python=${PYTHON:-python3}
case "${1:-}" in
--dry-run) way=$1; shift ;;
--device) way="$1 $2"; shift 2 ;;
*) way=; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true ;;
esac
PYTHONPATH=$PWD/../src${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    PYTHONPATH=$PYTHONPATH:$site
fi
export PYTHONPATH
"$python" - <<'END'
from importlib.util import find_spec
from sys import exit

missing = [name for name in ("cryptography", "numpy", "safetensors", "scipy", "torch") if find_spec(name) is None]
if missing:
    exit(f"gpu.sh: {', '.join(missing)} must be installed, got no such package. Put wheels into a folder WHEELS.")
if find_spec("opacus") is None:
    print("gpu.sh: opacus is not installed: its rows are left out.")
END
# The options are words of their own.
# shellcheck disable=SC2086
timeout 300 "$python" gpu.py $way --seconds 250 --results "${1:-results}"
