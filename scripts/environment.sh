# Source this file from any directory: creates .venv in the repository's root if needed, activates it.
#
# A stamp file, written last, records what is installed. If it is missing, the install was
# interrupted and starts from scratch. If it differs, pyproject.toml or constraints.txt changed, and
# pip updates the environment.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

wanted="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ]; then
    python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "titanlite: $python is missing or older than Python 3.10." \
            "Install a newer one, or set PYTHON=python3.12." >&2
        exit 2
    fi
    echo "titanlite: installing into $venv (minutes the first time, seconds later)" >&2
    clear=""; [ -e "$venv/stamp" ] || clear="--clear"
    if ! "$python" -m venv $clear "$venv"; then
        echo "titanlite: $python cannot create $venv. On Debian: apt install python3-venv." >&2
        exit 2
    fi
    # -qq: errors only; without the constraints, pip would install the newest torch
    if ! "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        -c "$root/constraints.txt" -e "$root[dev]"; then
        echo "titanlite: pip failed; see its errors above." >&2
        exit 2
    fi
    echo "$wanted" > "$venv/stamp"
fi
. "$venv/bin/activate"
