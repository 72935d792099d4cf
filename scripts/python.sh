#!/usr/bin/env bash
# Builds the Python wheel in a fresh environment, checks types and runs its tests: `scripts/python.sh [PYTEST ARGUMENTS]`; with arguments
# for pytest types are not checked.
#
# PyTorch and transformers come from the package index that pip is configured for. The tests that need them are left out, and this
# script says so, where they cannot be installed. PYTHON names the interpreter; ENVIRONMENT a virtual environment to use, and to keep.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "SKIPPED: the Python wheel is not tested: $python is not Python 3.10 or newer with venv"
    exit 0
fi
environment="${ENVIRONMENT:-}"
if [ -z "$environment" ]; then
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
fi
[ -x "$environment/bin/pip" ] || "$python" -m venv "$environment"
pip() { "$environment/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }
# PyTorch for Linux comes with libraries for GPUs: gigabytes, that a nearly full disk has no place for.
has_torch() { "$environment/bin/python" -c 'import torch' 2>/dev/null; }
free_gigabytes() { df -Pk "$environment" | awk 'END { print int($4 / 1048576) }'; }

if ! pip install 'maturin>=1.9.4,<2' 'numpy>=2.1' 'pytest>=8' 'ml_dtypes>=0.5'; then
    echo "SKIPPED: the Python wheel is not tested: maturin, NumPy and pytest cannot be installed"
    exit 0
fi
# A wheel, not an editable installation: what users install is what is tested.
wheels=$(mktemp -d -p "$environment")
"$environment/bin/maturin" build --release --locked --quiet --manifest-path crates/python/Cargo.toml --out "$wheels" \
    --interpreter "$environment/bin/python"
pip install --force-reinstall --no-deps "$wheels"/*.whl

if ! has_torch && [ "$(free_gigabytes)" -lt 12 ]; then
    echo "SKIPPED: PyTorch takes up to 10 GB, and less than 12 are free: of the Python wheel only arrays are tested"
elif ! pip install 'torch>=2.9' 'safetensors>=0.5'; then
    echo "SKIPPED: PyTorch cannot be installed: of the Python wheel only arrays are tested"
elif ! pip install 'transformers>=5'; then
    echo "SKIPPED: transformers cannot be installed: the Python wheel is tested without it"
elif ! pip install 'timm>=1' 'diffusers>=0.35'; then
    echo "SKIPPED: timm and diffusers cannot be installed: the Python wheel is tested without them"
fi

# The package, its examples and benches, by the types of the libraries that it stands on.
if [ "$#" = 0 ]; then
    if ! "$environment/bin/python" -c 'import torch, transformers' 2>/dev/null; then
        echo "SKIPPED: types are not checked without PyTorch and transformers"
    elif ! pip install 'mypy==1.20.2'; then
        echo "SKIPPED: types are not checked: mypy cannot be installed"
    else
        (cd crates/python && "$environment/bin/python" -m mypy --cache-dir "$environment/mypy")
    fi
fi
"$environment/bin/python" -m pytest -q -p no:cacheprovider -rs crates/python/tests "$@"
