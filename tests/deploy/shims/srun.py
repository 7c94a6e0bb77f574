"""What srun does for the batch script, all on this machine: a task a node, signals passed on, the worst exit code.

A node is a directory, in which it has a disk of its own: CACHE_ROOT of its task. The tasks' pids and srun's arguments
are left in SHIM_DIR. Like srun it ends all tasks when one fails, except with --kill-on-bad-exit=0, and like Slurm's own
daemon it signals every process of a task.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    """Run the tasks."""
    shim_dir = Path(os.environ["SHIM_DIR"])
    words = sys.argv[1:]
    options = [words.pop(0) for _ in range(next(i for i, word in enumerate(words) if not word.startswith("--")))]
    with (shim_dir / "srun.log").open("a") as log:
        log.write("\t".join([*options, *words]) + "\n")
    named = dict(option.removeprefix("--").partition("=")[::2] for option in options)
    tasks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, number)

    # As slurm's src/srun/libsrun/srun_job.c, _srun_signal_mgr: TERM and HUP kill the tasks, USR1 goes to them.
    signal.signal(signal.SIGTERM, lambda number, frame: pass_on(signal.SIGKILL, frame))
    signal.signal(signal.SIGUSR1, pass_on)
    for node in range(int(named["nodes"])):
        disk = Path(os.environ["CACHE_ROOT"]) / f"node{node}"
        disk.mkdir(exist_ok=True)
        own = {"SLURM_PROCID": str(node), "SLURMD_NODENAME": f"node{node}", "CACHE_ROOT": str(disk)}
        tasks.append(subprocess.Popen(words, cwd=named.get("chdir"), env=os.environ | own, start_new_session=True))
        (shim_dir / f"task{node}.pid").write_text(str(tasks[-1].pid))
    is_ended = named.get("kill-on-bad-exit") == "0"
    while any(task.poll() is None for task in tasks):
        if not is_ended and any(task.poll() for task in tasks):
            is_ended = True
            pass_on(signal.SIGTERM, None)
        time.sleep(0.01)
    return max(code if (code := task.returncode) >= 0 else 128 - code for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
