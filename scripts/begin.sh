# Sourced by each script first: an error ends it, and it works in the root of the repository, where .venv is made if there
# is none.
set -euo pipefail
CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || . scripts/environment.sh
