#!/bin/sh
# Names everything that is missing in one go, with the package that brings it. Usage: prerequisites.sh PYTHON
python=$1
missing=

lacks() { # what, Debian's package, macOS's (Homebrew)
    missing="$missing
  $1
      Debian, Ubuntu:  apt-get install $2
      macOS:           brew install $3"
}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
    lacks "Python 3.11, 3.12 or 3.13 (looked for: $python; another one: make PYTHON=python3.12 setup)" python3 python@3.12
# Debian splits venv's second half into a package of its own.
if "$python" -c '' 2>/dev/null; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null || lacks "Python's venv module" python3-venv python@3.12
fi

# macOS has a /usr/bin/java that only says there is none: what counts is the version it prints.
java=${JAVA_HOME:+$JAVA_HOME/bin/}java
major=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1)
[ "${major:-0}" -ge 17 ] || lacks "Java 17 or newer (found: ${major:-none})" openjdk-17-jre-headless openjdk@17

command -v git >/dev/null 2>&1 || lacks git git git

[ -z "$missing" ] || { echo "Samefold needs, and does not find:$missing" >&2; exit 1; }
