"""Measure decoding on a GPU, one setting changed at a time: the scenarios of `bench gpu`, for the engine.

Each timed scenario starts from one setting. Its points take turns in one process, because opening a CUDA context for
each point would take longer than timing it. If a point fails, its error is recorded and the others go on: a GPU machine
is often available for half an hour only, and nobody watches. A scenario goes on with an earlier record of its own
(`bench.gpu.session`).
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from bench.engine.scenario import Rounds, Scenario
from bench.gpu.decoders import logged, who_decoded
from bench.gpu.devices import SETTLED_S, Nvml, describe_gpu, sampling, utilisation
from bench.gpu.points import PUBLISHED_FIGURES, Point, points_of
from bench.gpu.tables import FIGURES, format_scenario
from bench.gpu.workload import Device, GpuSetting, Workload
from bench.reports.figures import Figure
from bench.reports.tables import summarised
from bench.tools.environment import available_cores
from bench.tools.folders import RunFolder
from bench.tools.processes import ProcessTree
from dali_pipes.errors import DataError
from dali_pipes.graph.dali_internals import pool_host_memory

NUM_WARM_UP = 5
"""Batches before the timed ones, at least: the first batches allocate memory, on a GPU for the largest photo so far."""
NUM_LOGGED = 2
"""Batches drawn while the decoders are logged; those that are prefetched are logged, too."""
MAX_TRIES = 2
"""A turn in which the process ended this often is recorded as failed, and not taken again."""


class Session(NamedTuple):
    """The sources from which turns measure."""

    nvml: Nvml | None
    gpu: dict[str, Any] | None
    """The description of the GPU for the record; ``None``: none is used."""
    tree: ProcessTree


@dataclass(frozen=True, kw_only=True)
class GpuScenario(Scenario[Session, Any, dict[str, Any]]):
    """A scenario whose subjects are timed points; `GpuCheck` is the other kind."""

    kind = "gpu"
    title = "time points"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"
    figures: ClassVar[Mapping[str, Figure]] = FIGURES

    name: str
    """One of `SCENARIOS`."""
    workload: Workload
    """Photos and shards; several scenarios share one."""
    device: Device
    num_threads: int
    batch_size: int
    hw_decoder_load: float = 0.65
    sweeps: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field of `GpuSetting` -> values; see `default_sweeps`."""
    seconds: float = 2.0
    """The time of each point in each round."""
    warm_up_s: float = 1.0
    """Each point runs for so long before it is timed, at least: an idle GPU takes a while to raise its clocks."""
    repeats: int = 2
    bystanders: Collection[int] = ()
    """Child processes whose CPU time is not counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds <= 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if self.warm_up_s < 0:
            raise ValueError(f"warm_up_s must be 0 or more, got {self.warm_up_s}")
        if unknown := set(self.sweeps) - set(asdict(self.base_setting)):
            raise ValueError(f"sweeps must name fields of GpuSetting, got {', '.join(sorted(unknown))}")

    @property
    def base_setting(self) -> GpuSetting:
        """The setting from which each sweep departs."""
        return GpuSetting(
            device=self.device,
            num_threads=self.num_threads,
            batch_size=self.batch_size,
            hw_decoder_load=self.hw_decoder_load,
        )

    def goes_on_without(self, subject: Any) -> bool:
        """Go on unless the error broke the CUDA context: all later points would fail, so another process goes on."""
        if self.device == "gpu":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return False
        return True

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Session:
        """Open NVML, if there is a GPU."""
        # Later it may be too late, so the figures of a point would depend on the points before it in its process.
        pool_host_memory()
        tree = ProcessTree(bystanders=self.bystanders)
        if self.device == "cpu":
            return Session(None, None, tree)
        nvml, why_not = None, None
        try:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            nvml = stack.enter_context(Nvml(str(uuid)))
        except (AttributeError, OSError) as exc:  # torch is too old, or NVML is missing
            why_not = str(exc)
        return Session(nvml, {**describe_gpu(nvml), "nvml": why_not or "read"}, tree)

    def subjects(self, made: Session) -> Sequence[Any]:
        """Return the points."""
        return points_of(self.name, self.base_setting, self.sweeps)

    def order(self, subjects: Sequence[Any], number: int) -> Sequence[Any]:
        """Keep the order in every round, the most important first: the time may end before the last subject."""
        return subjects

    def name_of(self, subject: Any) -> str:
        """``decode, batch_size=64``, or the step of a check."""
        return subject.name if isinstance(subject, Point) else str(subject)

    def check_options(self, earlier: Mapping[str, Any]) -> None:
        """Refuse to go on with a record that was made with other options.

        Raises:
            DataError: Names the options.
        """
        options = json.loads(json.dumps(self.options()))
        if changed := [name for name, value in options.items() if earlier["options"].get(name) != value]:
            raise DataError(
                f"the record of '{self.name}' that is there was made with other options ({', '.join(changed)}); name "
                "another directory, or delete the record"
            )

    def go_on(self, rounds: Rounds[Any, dict[str, Any]], earlier: Mapping[str, Any]) -> None:
        """Take over the turns and errors of an earlier record; a turn that ended its process twice has failed."""
        by_name = {self.name_of(subject): subject for subject in rounds.subjects}
        for name, turns in self.turns_of(earlier).items():
            rounds.rows[by_name[name]] = turns
        rounds.errors |= {by_name[name]: error for name, error in earlier["errors"].items()}
        rounds.tries |= {by_name[name]: number for name, number in earlier["tries"].items()}
        if (at := earlier["at"]) is not None:
            tries = rounds.tries[by_name[at]] = rounds.tries.get(by_name[at], 0) + 1
            if tries >= MAX_TRIES:
                rounds.errors[by_name[at]] = f"the process ended {tries} times in this turn"

    def measure(self, made: Session, subject: Any, number: int) -> dict[str, Any]:
        """Time one point; in the first round, see before that who decodes."""
        setting = subject.setting
        if subject.case.needs_masks and not self.workload.stored.masks:
            mask = self.workload.mask
            found = f"not all samples have a mask '{mask}'" if mask else "no component is a mask by its name"
            raise ValueError(f"{found}; name the component: --mask")
        decoded = self._who_decodes(subject) if number == 0 else None
        with subject.case.open(self.workload, setting) as running:
            warm_up_start, num_warm_up = time.perf_counter(), 0
            while num_warm_up < NUM_WARM_UP or time.perf_counter() - warm_up_start < self.warm_up_s:
                running.step()
                num_warm_up += 1
            _synchronise(setting)
            batch_s: list[float] = []
            num_samples = 0
            cpu_start, start = made.tree.cpu_s(), time.perf_counter()
            after_s = SETTLED_S if self.seconds > SETTLED_S else 0.0
            with sampling(None if made.nvml is None else made.nvml.sample, after_s=after_s) as samples:
                before = start
                while before - start < self.seconds or not batch_s:
                    num_samples += running.step()
                    now = time.perf_counter()
                    batch_s.append(now - before)
                    before = now
                _synchronise(setting)
                elapsed = time.perf_counter() - start
            cpu_s = made.tree.cpu_s() - cpu_start
        return {
            "samples_per_s": num_samples / elapsed,
            "cpu_ms_per_sample": 1000 * cpu_s / num_samples,
            "cpu_share": cpu_s / elapsed / available_cores(),
            # As MLPerf Storage defines it: the time of the steps over all the time.
            "step_share": num_samples * running.step_s / elapsed if running.step_s else None,
            "num_samples": num_samples,
            "seconds": elapsed,
            "batch_ms": {
                "p50": 1000 * float(np.percentile(batch_s, 50)),
                "p99": 1000 * float(np.percentile(batch_s, 99)),
                "max": 1000 * max(batch_s),
            },
            "utilisation": utilisation(samples),
            "photos": self.workload.photos(setting).to_json(),
            "host_bytes_per_sample": running.host_bytes,
            "decoded_by": decoded,
        }

    def _who_decodes(self, point: Point) -> dict[str, Any]:
        """Draw some batches with the decoders' log on; nothing is timed."""

        def draw() -> None:
            with point.case.open(self.workload, point.setting) as running:
                for _ in range(NUM_LOGGED):
                    running.step()

        with logged() as log:
            draw()  # its pipeline is gone when it returns
        return who_decoded(log[0])

    def options(self) -> dict[str, Any]:
        """Return what the figures depend on besides the machine and the versions."""
        return {
            **{name: getattr(self, name) for name in _OPTIONS},
            "sweeps": {name: list(values) for name, values in self.sweeps.items()},
            "photos": self.workload.stored.to_json(),
            "num_shards": len(self.workload.shards.names),
        }

    def report(self, made: Session, rounds: Rounds[Any, dict[str, Any]]) -> dict[str, Any]:
        """``{"scenario", "records" or "check", "left_out", "errors", "tries", "gpu", "options"}``."""
        names = {subject: self.name_of(subject) for subject in rounds.subjects}
        return {
            "scenario": self.name,
            **self.found(rounds),
            "left_out": [
                names[subject]
                for subject, turns in rounds.rows.items()
                if len(turns) < rounds.wanted and subject not in rounds.errors
            ],
            "errors": {names[subject]: error for subject, error in rounds.errors.items()},
            "tries": {names[subject]: number for subject, number in rounds.tries.items()},
            **({"published": PUBLISHED_FIGURES} if self.name == "rn50" else {}),
            "gpu": made.gpu,
            "options": self.options(),
        }

    def found(self, rounds: Rounds[Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the records of the points that had a turn, or failed."""
        records: list[dict[str, Any]] = []
        for point in rounds.subjects:
            turns, error = rounds.rows[point], rounds.errors.get(point)
            if not turns and error is None:
                continue
            record = {
                "scenario": point.case.scenario,
                "variant": point.case.variant,
                "label": point.label,
                "setting": asdict(point.setting),
            }
            if error is not None:
                record["error"] = error
            if turns:
                record |= summarised({name: [turn[name] for turn in turns] for name in FIGURES}) | {
                    "photos": turns[0]["photos"],
                    "host_bytes_per_sample": turns[0]["host_bytes_per_sample"],
                    "decoded_by": turns[0]["decoded_by"],
                    "step_share": turns[-1]["step_share"],
                    "utilisation": turns[-1]["utilisation"],
                    "repeats": list(turns),
                }
            records.append(record)
        return {"records": records}

    @staticmethod
    def turns_of(report: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """Return the turns in a record, by the name of their subject."""
        return {f"{one['variant']}, {one['label']}": list(one.get("repeats", ())) for one in report["records"]}

    @staticmethod
    def table(report: Any) -> str:
        """Return the scenario's name, and its table or its check's result."""
        return f"{report['scenario']}\n{format_scenario(report)}\n"


_OPTIONS = ("num_threads", "batch_size", "hw_decoder_load", "device", "seconds", "warm_up_s", "repeats")


def _synchronise(setting: GpuSetting) -> None:
    if setting.device == "gpu":
        torch.cuda.synchronize()
