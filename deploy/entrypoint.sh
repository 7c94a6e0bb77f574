#!/usr/bin/env bash
# A container's environment to the command it was started for: what would stop the command, or slow it down without a
# word, is said before it starts. Then the command takes this process's place, and with it signals and exit code.
#
#   DALI_PIPES_CHECK    fail (default): a finding of `dali-pipes doctor` that is "fail" ends the start with exit code 1:
#                       who started the container may try again; warn: it is said, and the command starts; off: nothing
#                       is looked at
#   DALI_PIPES_CACHE    directory where the command's cache is to lie; it must be there and writeable
#   MIN_SHM_BYTES       what /dev/shm must have in all, else a warning; 1 GiB, what NCCL's guide starts containers with
#   REQUIRE_GPU         1: a container that sees no GPU does not start
#
# A first word that is no program but, say, `doctor` or an option is given to dali-pipes.
set -euo pipefail

readonly check=${DALI_PIPES_CHECK:-fail}
readonly min_shm_bytes=${MIN_SHM_BYTES:-1073741824}

say() {
  printf 'entrypoint: %s\n' "$*" >&2
}

# Ends the start, or only says so under DALI_PIPES_CHECK=warn.
refuse() {
  say "$*"
  if [[ $check == fail ]]; then
    say "the command was not started; DALI_PIPES_CHECK=warn starts it all the same"
    exit 1
  fi
}

# A user that the image does not know (`--user 4711`, OpenShift) has "/" as its home and no name: caches of torch and
# others are written below the one, and getpass wants the other.
settle_user() {
  if [[ ! -d ${HOME:-} || ! -w ${HOME:-} ]]; then
    HOME=$(mktemp -d)
    export HOME
  fi
  if [[ -z ${USER:-} ]]; then
    USER=$(id -un 2>/dev/null) || USER=uid-$(id -u)
    export USER
  fi
}

check_gpu() {
  if [[ ${REQUIRE_GPU:-0} != 1 ]]; then
    return
  fi
  if ! nvidia-smi -L >/dev/null 2>&1; then
    refuse "REQUIRE_GPU=1, and this container sees no GPU: nvidia-smi -L fails; start it with --gpus all, or in" \
      "Kubernetes with a limit on nvidia.com/gpu"
  fi
}

check_shared_memory() {
  local bytes
  bytes=$(df --output=size --block-size=1 /dev/shm 2>/dev/null | tail -n 1) || bytes=0
  if ((bytes < min_shm_bytes)); then
    say "/dev/shm has $((bytes)) bytes, expected at least $min_shm_bytes: NCCL, and caches that are given no directory," \
      "lie there; start the container with --shm-size=8g, or in Kubernetes with an emptyDir of medium Memory"
  fi
}

check_cache() {
  local directory=${DALI_PIPES_CACHE:-}
  if [[ -z $directory ]]; then
    return
  fi
  if [[ ! -d $directory ]]; then
    refuse "DALI_PIPES_CACHE names '$directory', which is not there; mount a local disk at that path"
  elif [[ ! -w $directory ]]; then
    refuse "DALI_PIPES_CACHE names '$directory', which user $(id -u) cannot write; it belongs to" \
      "$(stat -c '%u:%g, mode %a' "$directory"): change that, or start the container with --user"
  fi
}

check_environment() {
  case $check in
    off) return ;;
    warn | fail) ;;
    *)
      say "DALI_PIPES_CHECK must be one of fail, warn, off, got '$check'"
      exit 2
      ;;
  esac
  check_gpu
  check_shared_memory
  check_cache
  local -a where=()
  # Where the directory was found wanting, doctor would only say it again.
  if [[ -n ${DALI_PIPES_CACHE:-} && -w ${DALI_PIPES_CACHE} ]]; then
    where=(--cache "$DALI_PIPES_CACHE")
  fi
  if ! dali-pipes doctor "${where[@]}" >&2; then
    refuse "dali-pipes doctor found what the command would fail on: see the lines with 'fail' above"
  fi
}

if (($# == 0)); then
  set -- dali-pipes --help
fi
if [[ $1 == -* ]] || ! command -v -- "$1" >/dev/null; then
  set -- dali-pipes "$@"
fi

settle_user
# These two are for looking at a container that does not fit.
if [[ $1 != dali-pipes || ! ${2:-} =~ ^(doctor|completion|-h|--help|--version)$ ]]; then
  check_environment
fi
exec "$@"
