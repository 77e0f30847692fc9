#!/bin/sh
# Prints the Python interpreter for the set-up, or a message about a missing one and its remedy.
# It is the first step of `make`, before tools/setup_env.py. PYTHON=... chooses an interpreter by hand.
set -u

probe='
import platform, sys
print(platform.python_implementation(), platform.python_version())
good = platform.python_implementation() == "CPython" and (3, 10) <= sys.version_info[:2] <= (3, 11)
sys.exit(0 if good else 1)
'
if [ -n "${PYTHON:-}" ]; then
  set -- "$PYTHON"
else
  set -- python3.11 python3.10 python3
fi
seen=""
for candidate in "$@"; do
  if answer=$("$candidate" -c "$probe" 2>/dev/null); then
    echo "$candidate"
    exit 0
  elif [ -n "$answer" ]; then
    seen="$seen $candidate is $answer;"
  fi
done

{
  echo "missing: Python 3.10 or 3.11 (TensorFlow Recommenders Addons support these only)." \
    "Found:${seen:- none of $* runs;}"
  echo "  Remedy: install one (Debian 12: apt install python3 python3-venv)," \
    "or name its path: make PYTHON=path/to/python3.11"
} >&2
exit 1
