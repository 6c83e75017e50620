#!/usr/bin/env bash
# The wheel as its users get it, in fresh virtual environments: first without torch, then with
# [train]. Needs the network, and a few minutes for torch. Prints how long each part took.
#   tests/install/try_wheel.sh [DIRECTORY]     what it makes stays in DIRECTORY, when one is named
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
home=${1:-$(mktemp -d)}
[ $# -gt 0 ] || trap 'rm -rf "$home"' EXIT
mkdir -p "$home/work"
python=${PYTHON:-python3}
unset PYTHONPATH

timed() {
  local start=$SECONDS
  "${@:2}"
  printf '%-44s %4d s\n' "$1" $((SECONDS - start)) >&2
}
install() { "$home/$1/bin/pip" install -qq --disable-pip-version-check -c "$root/constraints.txt" "$2"; }
wanted() { # EXIT_CODE COMMAND...: the command ends with that code
  local code=0
  "${@:2}" >out.txt 2>err.txt || code=$?
  [ "$code" = "$1" ] || { echo "exit code $code, not $1: ${*:2}"; cat out.txt err.txt; exit 1; } >&2
}

"$python" -m venv "$home/builder"
"$home/builder/bin/pip" install -qq --disable-pip-version-check build
timed "sdist and wheel" "$home/builder/bin/python" -m build --outdir "$home/dist" "$root" >/dev/null
wheel=$(echo "$home"/dist/*.whl)
cd "$home/work"

"$python" -m venv "$home/core"
timed "pip install areal-gym" install core "$wheel"
gym=$home/core/bin/areal-gym
echo "$(du -sm "$home/core" | cut -f1) MB" >&2
! "$home/core/bin/python" -c 'import torch' 2>/dev/null
look() {
  wanted 0 "$gym" list
  wanted 0 "$gym" show tir
  wanted 0 "$gym" check math
  wanted 0 "$gym" data show math -n 3
  wanted 0 "$gym" train --env math --dry-run
  echo 7 | wanted 0 "$gym" play math
  wanted 0 "$gym" doctor
  wanted 2 "$gym" train --env math
  grep -q "pip install 'areal-gym\[train\]'" err.txt
}
timed "list, show, check, data, play, doctor" look

"$python" -m venv "$home/train"
timed "pip install areal-gym[train]" install train "$wheel[train]"
echo "$(du -sm "$home/train" | cut -f1) MB" >&2
timed "areal-gym train --env math" wanted 0 \
  "$home/train/bin/areal-gym" train --env math --out runs/math --steps 30
"$home/train/bin/areal-gym" show runs/math
timed "areal-gym eval --run" wanted 0 "$home/train/bin/areal-gym" eval --env math --run runs/math -n 64

# The policy that was just learned, on a server; measured from where there is no torch.
policy=$(echo runs/math/checkpoints/step-*30)
"$home/train/bin/python" -m areal_gym.engines.sglang.fake --model-path "$policy" --port 0 >server.txt &
server=$!
trap 'kill $server; [ $# -gt 0 ] || rm -rf "$home"' EXIT
until url=$(grep -o 'http://.*' server.txt); do kill -0 $server; sleep 0.2; done
timed "areal-gym eval, the policy on a server" "$gym" eval --env math -n 64 \
  --engine sglang --engine.url "$url" "engine.model=$policy" engine.max_context=256
