#!/usr/bin/env bash
# Starts a Docker engine for the tests, as root on Debian, where none runs; no registry is needed.
# Idempotent: about 20 s on a fresh machine, nothing when an engine answers already.
# Its pid is written to the file that the first argument names, so that stop_engine.sh ends this
# one and no other.
set -euo pipefail
pid_file=${1:-/tmp/areal-gym-docker.pid}

answers() {
  python3 -c '
import socket
engine = socket.socket(socket.AF_UNIX)
engine.connect("/var/run/docker.sock")
engine.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
raise SystemExit(b" 200 " not in engine.recv(100))
' 2>/dev/null
}

if answers; then
  exit 0
fi
if ! command -v dockerd >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io >/dev/null
fi
# A machine that was copied while an engine ran has its pid file still.
rm -f /var/run/docker.pid
# Containers of ours have no network, so the engine needs neither bridge nor firewall.
nohup dockerd --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
  --storage-driver=overlay2 --exec-opt native.cgroupdriver=cgroupfs >"$pid_file.log" 2>&1 &
echo $! >"$pid_file"
for _ in $(seq 300); do
  answers && exit 0
  sleep 0.1
done
tail -n 20 "$pid_file.log" >&2
echo "no Docker engine within 30 s" >&2
exit 1
