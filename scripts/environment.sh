#!/usr/bin/env bash
# Makes .venv if it is absent and installs requirements.txt into it: scripts/environment.sh, from any directory. Other
# scripts source it from the repository root. Where lowest is set, it makes .venv-lowest, which has of each package that
# requirements.txt names the lowest version that it allows. A stamp of requirements.txt, pyproject.toml and this folder,
# to which the installed package points, makes the second call a matter of milliseconds.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  CDPATH= cd -- "$(dirname "$(readlink -f "$0")")/.."
fi
python=${PYTHON:-python3}
lowest=${lowest:-}
venv=.venv${lowest:+-lowest}
stamp=$venv/requirements.stamp
here=$(pwd -P)
wanted="$(cat requirements.txt pyproject.toml | cksum) $here"
if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -c "" 2>/dev/null; then
  echo "making $venv with $("$python" --version)" >&2
  "$python" -m venv --clear "$venv" || { echo "could not make $venv: install Python 3.10 or newer with its venv module, or set PYTHON" >&2; exit 1; }
fi
owner=$(cut -d" " -f3- "$stamp" 2>/dev/null || true)
if [ -L "$venv" ] && [ "$owner" != "$here" ] && [ -d "$owner" ]; then
  echo "$venv is a link to the environment of $owner, which an installation from here would take away: remove the link, and run this again" >&2
  exit 1
fi
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "installing requirements.txt into $venv (PyTorch is large: a few minutes the first time)" >&2
  # A constraint for each line: name[extra]>=1.2 becomes name==1.2.
  sed -nE 's/^([^>[]+)(\[.*\])?>=/\1==/p' requirements.txt > "$venv/lowest.txt"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt ${lowest:+-c "$venv/lowest.txt"}
  # pip would compile in one process, and packages' tests, too; a file for another version of Python fails
  "$venv/bin/python" -m compileall -qq -j 0 -x "/tests/" "$venv" || true
  echo "$wanted" > "$stamp"
fi
