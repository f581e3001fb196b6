# To be sourced, from any directory: create .venv in the repository's root if needed, activate it.
#   source scripts/environment.sh        what training and its pictures need
#   source scripts/environment.sh dev    also what the tests, ruff and mypy need
#
# .venv/stamp identifies what is installed and is written last. If it is missing, an installation
# was interrupted and starts from scratch; if it differs, pyproject.toml, constraints.txt or the
# path of the repository has changed, or dev is wanted, and pip updates the installation.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

stamp="$(cat "$venv/stamp" 2>/dev/null)" || true
wanted="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
extras=lab
case "${1:-} $stamp" in dev\ * | *\ +dev) extras=dev wanted="$wanted +dev" ;; esac
if [ "$stamp" != "$wanted" ]; then
    python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "titanlite: $python is missing or older than Python 3.10." \
            "Install a newer one, or select one: PYTHON=python3.12." >&2
        exit 2
    fi
    echo "titanlite: installing into $venv (minutes the first time, seconds later)" >&2
    clear=""; [ -e "$venv/stamp" ] || clear="--clear"
    if ! "$python" -m venv $clear "$venv"; then
        echo "titanlite: $python cannot create $venv. On Debian: apt install python3-venv." >&2
        exit 2
    fi
    # -qq: errors only; without the constraints pip would install the newest torch
    if ! "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        -c "$root/constraints.txt" -e "${root}[$extras]"; then
        echo "titanlite: pip could not install the packages; its messages are above." >&2
        exit 2
    fi
    echo "$wanted" > "$venv/stamp"
fi
. "$venv/bin/activate"
