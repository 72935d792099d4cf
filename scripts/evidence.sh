#!/usr/bin/env bash
# Measures what docs/evidence.md tells, and writes its tables: `scripts/evidence.sh [ROW...]` (`--help` says more). Rows are in
# docs/evidence/rows.toml, results beside it, one file per row and seed; what is there already is not run again. Hours in all.
# Needs Python 3.11 or newer, and for most rows the data sets, each a folder by its name in RESOLVENT_DATA (docs/data.md).
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "scripts/evidence.sh needs Python 3.11 or newer" >&2; exit 1; }
exec python3 scripts/evidence "$@"
