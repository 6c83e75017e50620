#!/usr/bin/env bash
# Ends the Docker engine that start_engine.sh started, and waits until it is gone.
set -euo pipefail
pid_file=${1:-/tmp/areal-gym-docker.pid}
[ -e "$pid_file" ] || exit 0
pid=$(cat "$pid_file")
if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
  kill "$pid"
  for _ in $(seq 300); do
    [ -e "/proc/$pid" ] || break
    sleep 0.1
  done
fi
rm -f "$pid_file" "$pid_file.log"
