#!/usr/bin/env bash
# Builds the documentation into site/ (open site/index.html), strictly: a broken link, image, formula or results file
# fails. Then runs the tests that need a package of docs/requirements.txt, among them the Python of the pages on
# integrations, which scripts/test.sh skips. Works from any directory; the packages go into .venv-docs.
#   scripts/docs.sh
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/begin.sh"
. scripts/environment.sh

stamp=.venv-docs/requirements.stamp
wanted=$(cat docs/requirements.txt .venv/requirements.stamp | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "installing docs/requirements.txt into .venv-docs" >&2
  .venv/bin/python -m venv --clear .venv-docs
  # PyTorch and the rest are taken from .venv: Python reads a .pth file of site-packages as a path to look in.
  main=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  docs=$(.venv-docs/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  echo "import site; site.addsitedir('$main')" > "$docs/main.pth"
  .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
  echo "$wanted" > "$stamp"
fi
NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build
OMP_NUM_THREADS=1 .venv-docs/bin/python -m pytest -m docs tests/test_readme.py tests/scripts/test_site.py
