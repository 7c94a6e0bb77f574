#!/usr/bin/env bash
# A node of Ray for as long as a command runs: a task of ray.sbatch.
#
#   ray-node.sh HOST PORT COMMAND...
#
# Task 0 runs on HOST: it starts Ray's head, waits for all nodes, runs the command, and has its exit code. The other
# tasks join, and end when the head is gone. Nothing of Ray is left, and no other Ray of the node is touched: no
# `ray stop`, which would end each one of the user.
set -euo pipefail

readonly host=$1 port=$2
shift 2
readonly num_nodes=${SLURM_JOB_NUM_NODES:?} number=${SLURM_PROCID:?} join_s=${JOIN_S:-300}
readonly head_s=300 # until the head answers
# Not /tmp/ray, which may be another user's.
readonly directory=/tmp/ray-$SLURM_JOB_ID
export RAY_USAGE_STATS_ENABLED=0
# A node that ends would wait for 30 s, with nothing to wait for: the command has ended.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

say() {
  printf 'node %s: %s\n' "${SLURMD_NODENAME:-$number}" "$*" >&2
}

has_head() {
  (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null
}

ray=''
finish() {
  if [[ -n $ray ]]; then
    kill -TERM "$ray" 2>/dev/null || true
    wait "$ray" || true
  fi
  # Workers of Ray may still write for a moment.
  for _ in {1..10}; do
    rm -rf "$directory" 2>/dev/null && break
    sleep 1
  done
}
trap finish EXIT
trap 'exit 143' TERM

# Another user may have made it before, even as a link. Two nodes of the job may be on one machine. Ray opens its own
# directory, r, for everybody; nobody else can enter the one above it.
if ! mkdir -m 0700 "$directory" 2>/dev/null && [[ -L $directory || ! -O $directory ]]; then
  say "'$directory' is another user's; remove it, or submit the job again"
  exit 1
fi

# Ports of workers are the system's choice: other jobs' Rays may be on the node. What tasks return is small.
options=(--block --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --min-worker-port=0 --max-worker-port=0)
options+=(--object-store-memory=268435456 --disable-usage-stats)
if ((number == 0)); then
  address=$(getent ahostsv4 "$host" | head -n 1 | cut -d ' ' -f 1)
  ray start --head --node-ip-address="$address" --port="$port" --temp-dir="$directory/r" --include-dashboard=false \
    "${options[@]}" >&2 &
else
  deadline=$((SECONDS + head_s))
  until has_head; do
    if ((SECONDS > deadline)); then
      say "Ray's head at $host:$port did not answer within $head_s s; what does task 0 say?"
      exit 1
    fi
    sleep 1
  done
  ray start --address="$host:$port" "${options[@]}" >&2 &
fi
ray=$!

if ((number == 0)); then
  export RAY_ADDRESS=$address:$port
  deadline=$((SECONDS + head_s))
  until has_head; do
    if ! kill -0 "$ray" 2>/dev/null || ((SECONDS > deadline)); then
      say "Ray's head did not start; is port $port free, and Ray installed?"
      exit 1
    fi
    sleep 1
  done
  python3 - "$num_nodes" "$join_s" <<'PYTHON'
import sys
import time

import ray

expected, seconds = map(int, sys.argv[1:])
deadline = time.monotonic() + seconds
ray.init(log_to_driver=False, logging_level="ERROR")
while (found := sum(node["Alive"] for node in ray.nodes())) < expected:
    if time.monotonic() > deadline:
        sys.exit(f"{found} of {expected} nodes joined Ray within {seconds} s; what do the other tasks say?")
    time.sleep(1)
PYTHON
  say "Ray has $num_nodes nodes"
  "$@"
else
  while has_head; do
    if ! kill -0 "$ray" 2>/dev/null; then
      # The command's exit code is what counts: the other nodes repeat what was done here.
      say "Ray ended on this node before the command; its tasks are repeated on the others"
      break
    fi
    sleep 2
  done
fi
