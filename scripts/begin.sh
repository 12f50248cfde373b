# Sourced by each script first: it says what it does and ends where --help is asked for; else the first error ends it, and
# it works in the root of the repository, where .venv is made if there is none.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || . scripts/environment.sh
