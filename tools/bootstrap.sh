#!/usr/bin/env bash
# Makes .venv from the lock, on a machine that has only git, Python, make and apt. Done already: it says nothing and takes 0.1 s.
#
# Reads: PROFSCHED_PYTHON (the interpreter to use), PROFSCHED_LOCK (another lock file than the newest Airflow's).
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv
readonly LOCK=${PROFSCHED_LOCK:-requirements/airflow-3.3.lock}
readonly RANGE="3.11 to 3.13"

say() { printf 'bootstrap: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

# The distribution's Python first: an interpreter under someone's home cannot be run by the ordinary user of the tests.
choose_python() {
    local candidate
    for candidate in ${PROFSCHED_PYTHON:-/usr/bin/python3 python3 python3.13 python3.12 python3.11}; do
        if supported "$candidate"; then command -v "$candidate"; return; fi
    done
    die "no Python $RANGE found (tried ${PROFSCHED_PYTHON:-/usr/bin/python3 and python3* of PATH}); install one or name it in PROFSCHED_PYTHON"
}

apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -q "$@" >/dev/null 2>&1 || { apt-get update -q >/dev/null && apt-get install -y -q "$@" >/dev/null; }
}

make_venv() { rm -rf "$VENV" && "$1" -m venv "$VENV" >/dev/null 2>&1 && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }

# Debian strips ensurepip from python3: the venv is made without pip, or not at all, until python3-venv is there.
make_venv_or_install() {
    make_venv "$1" && return
    apt_install python3-venv python3-pip && make_venv "$1" && return
    die "'$1 -m venv $VENV' made no environment with pip; as root run: apt-get install python3-venv python3-pip"
}

# HOME may be empty or missing (CI), and environments of several checkouts share one cache: then uv links instead of copying.
choose_cache() {
    if [ "$(id -u)" = 0 ]; then echo /var/cache/airflow-profsched/uv
    else echo "${XDG_CACHE_HOME:-${HOME:-/tmp/airflow-profsched-$(id -u)}/.cache}/uv"; fi
}

digest() { sha256sum | cut -d' ' -f1; }

# Where the checkout was moved the scripts' first lines are wrong, hence the path.
environment_stamp() { { cat "$LOCK"; "$1" --version; command -v "$1"; pwd; } | digest; }

stamped() { [ "$(cat "$VENV/.stamp-$1" 2>/dev/null)" = "$2" ]; }

install_lock() {
    local python=$1 uv
    uv=$(grep '^uv==' "$LOCK") || die "$LOCK pins no uv; make it anew with 'make lock'"
    say "making $VENV with $python ($("$python" --version)) from $LOCK"
    make_venv_or_install "$python"
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check "$uv" || die "pip could not install $uv: see its words above"
    say "installing $(wc -l <"$LOCK") packages"
    "$VENV/bin/uv" pip install -q --compile-bytecode -r "$LOCK" || die "uv could not install $LOCK: see its words above"
}

install_project() {
    say "installing this checkout (editable)"
    "$VENV/bin/uv" pip install -q --no-deps --no-build-isolation -e . || die "uv could not install this checkout: see its words above"
}

main() {
    local python environment project
    [ -r "$LOCK" ] || die "no lock file $LOCK in $PWD"
    python=$(choose_python)
    exec 9<"$LOCK" && flock 9 # two makes at once: the second waits and finds it done
    environment=$(environment_stamp "$python") project=$(digest <pyproject.toml)
    export UV_CACHE_DIR=${UV_CACHE_DIR:-$(choose_cache)} UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=$PWD/$VENV
    export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true} # a site's own certificate authority is known to the system, not to uv
    if ! stamped environment "$environment"; then
        install_lock "$python"
        echo "$environment" >"$VENV/.stamp-environment"
    fi
    if ! stamped project "$project"; then
        install_project
        echo "$project" >"$VENV/.stamp-project"
        say "$VENV is ready (${SECONDS} s)"
    fi
}

main
