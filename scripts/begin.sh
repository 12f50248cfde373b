# Sourced by each script first, on a line of its own, since in a list with && no error would end it. It goes to the root
# of the repository, and makes .venv if that is absent or half made.
set -euo pipefail
CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.."
[ -e .venv/requirements.stamp ] || . scripts/environment.sh
