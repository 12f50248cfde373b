# Sourced: --help prints the comment that the script begins with, then, where rows go through the launcher and it is
# installed, the launcher's flags.
case " $* " in
  *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    python=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
    if grep -q launch.py "$0" && [ -x "$python" ]; then
      echo && "$python" "$(dirname "${BASH_SOURCE[0]}")/launch.py" --help
    fi
    exit 0
    ;;
esac
