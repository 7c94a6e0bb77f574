#!/usr/bin/env bash
# A node's share of a job to a cache on its own disk, the command, and the disk as it was before.
#
#   srun --ntasks-per-node=1 deploy/slurm/node.sh COMMAND...
#
# The command finds the cache's directory in DALI_PIPES_CACHE, and as any {cache} among its arguments. However the
# command ends, and when this is told to stop (SIGTERM: cancelled, preempted, or the time is up), the directory goes:
# a node's disk is not Slurm's to clean. What SIGKILL leaves is removed by this user's next job on the node.
#
#   CACHE_ROOT   a directory on a local disk; /raid, where a DGX has its data disks, is the default
#   KEEP_CACHE   1: the directory is CACHE_ROOT/dali-pipes-keep-UID and stays, for the next job on the same data
#   GRACE_S      seconds that the command has after SIGTERM; less than Slurm's KillWait, 30 unless it was changed
set -euo pipefail

readonly root=${CACHE_ROOT:-/raid}
readonly grace_s=${GRACE_S:-20}
readonly job=${SLURM_JOB_ID:?is set in a Slurm job; start this with srun}

say() {
  printf 'node %s: %s\n' "${SLURMD_NODENAME:-$(hostname)}" "$*" >&2
}

if (($# == 0)); then
  say "no command was given: node.sh COMMAND..."
  exit 2
fi
if [[ ! -d $root || ! -w $root ]]; then
  say "CACHE_ROOT='$root' is not a directory that $(id -un) can write; set it to one on a local disk"
  exit 1
fi

# Directories of this user's jobs that Slurm no longer knows. Where it cannot be asked, in a container say, none. Their
# name is of jobs alone: dali-pipes-UID is what loaders make in a directory that they are given.
sweep() {
  local known directory directories=("$root"/dali-pipes-job-*) # listed first: a job that starts now is not among them
  if ! known=$(squeue --me --noheader --format=%A 2>/dev/null); then
    return
  fi
  for directory in "${directories[@]}"; do
    if [[ -d $directory && ! -L $directory && -O $directory ]] && ! grep -qx "${directory##*-}" <<<"$known"; then
      say "removing $directory, whose job is gone"
      rm -rf -- "$directory"
    fi
  done
}

sweep
cache=$root/dali-pipes-job-$job
if [[ ${KEEP_CACHE:-0} == 1 ]]; then
  cache=$root/dali-pipes-keep-$(id -u)
fi

child=
is_told=0
stop() {
  is_told=1
  if [[ -n $child ]]; then
    kill -TERM "$child" 2>/dev/null || true
  fi
}
# shellcheck disable=SC2329 # called by the trap
clean() {
  # Slurm signals all of a task's processes, and more than once: when another node's task has ended, too. What is
  # ignored here is ignored by rm.
  trap '' TERM INT HUP USR1
  if [[ ${KEEP_CACHE:-0} != 1 ]]; then
    rm -rf -- "$cache"
  fi
}
trap clean EXIT
trap stop TERM INT HUP USR1

# The name can be guessed, and on many disks everybody can make it first: as a directory of theirs, or a link to one.
if ! mkdir -m 0700 "$cache" 2>/dev/null; then
  if [[ ! -d $cache || -L $cache || ! -O $cache ]]; then
    say "'$cache' is not a directory of $(id -un); have it removed, or set CACHE_ROOT to another one"
    trap - EXIT # it is not ours to remove
    exit 1
  fi
  chmod 0700 "$cache"
fi
export DALI_PIPES_CACHE=$cache
"${@//\{cache\}/$cache}" &
child=$!
if ((is_told)); then # before there was a child to tell
  stop
fi
status=0
# Returns when a signal came, too: the command is told by then, and may still be at work.
wait "$child" || status=$?
if ((is_told)); then
  deadline=$((SECONDS + grace_s))
  while kill -0 "$child" 2>/dev/null; do
    if ((SECONDS >= deadline)); then
      say "the command did not end within $grace_s s of SIGTERM: killed"
      kill -KILL "$child" 2>/dev/null || true
      break
    fi
    sleep 0.1 || true # it is signalled, too
  done
  status=143 # 128 + SIGTERM
fi
exit "$status"
