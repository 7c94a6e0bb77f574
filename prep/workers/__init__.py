"""Run tasks in worker processes of this machine, or on the nodes of a Ray cluster.

Both kinds run the same task functions: functions of a module, whose tasks and results pickle. `open_workers` chooses.
"""

from prep.workers.kinds import WORKERS_KINDS, WorkersKind, open_workers
from prep.workers.processes import MAX_JOBS, Report, Workers, default_jobs

__all__ = ["MAX_JOBS", "WORKERS_KINDS", "Report", "Workers", "WorkersKind", "default_jobs", "open_workers"]
