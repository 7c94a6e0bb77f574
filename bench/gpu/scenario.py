"""Measure decoding on a GPU, one setting changed at a time: the scenarios of `bench gpu`, for the engine.

Each scenario starts from one setting. Its points take turns in one process, because opening a CUDA context for each
point would take longer than timing it. If a point fails, its error is recorded and the others go on: a GPU machine is
often available for half an hour only, and nobody watches. A scenario's record is written before and after every turn,
as a whole or not at all, and the next command goes on with it: no turn that has a result is taken again. If the
scenario's process dies in a turn, the point has failed, and another process takes the other turns.
"""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import click
import torch

from bench.engine.options import at_least, option
from bench.engine.scenario import Measured, Rounds, Scenario, run_scenario
from bench.engine.turn_process import call_apart
from bench.gpu.cases import CHECKS, PUBLISHED_NOTE, GpuPoint, points_of
from bench.gpu.devices import SETTLED_S, Nvml, describe_gpu, sampling
from bench.gpu.workload import Device, GpuSetting, Workload
from bench.reports.record import read_record, write_record
from bench.tools.environment import available_cores, describe_environment
from bench.tools.folders import RunFolder
from bench.tools.processes import ProcessTree
from dali_pipes.errors import DataError, PipesError
from dali_pipes.graph.dali_internals import pool_host_memory

NUM_WARM_UP = 5
"""Batches before the timed ones, at least: the first batches allocate memory, on a GPU for the largest photo so far."""
GRACE_S = 20.0
"""A turn that has begun before the deadline has this time to end; then its process is killed."""
_OPTIONS = ("num_threads", "batch_size", "hw_decoder_load", "device", "seconds", "warm_up_s", "repeats")
_SAME = ("commit", "versions", "gpus", "python")
"""What a record's environment must have in common with this machine's, so that its figures belong together."""


class Session(NamedTuple):
    nvml: Nvml | None
    gpu: dict[str, Any] | None
    """The description of the GPU for the record; ``None``: none is used."""
    tree: ProcessTree


@dataclass(frozen=True, kw_only=True)
class GpuScenario(Scenario[Session, GpuPoint, Measured]):
    """One scenario; its subjects are points."""

    kind = "gpu"
    title = "time points"
    runs_in: ClassVar[Literal["fork", "interpreter", "caller"]] = "caller"
    needs_one = False

    name: str
    workload: Workload
    device: Device
    batch_size: int
    num_threads: int = option(factory=available_cores, type=at_least(1), help="DALI's threads.  [default: cores]")
    hw_decoder_load: float = option(0.65, type=click.FloatRange(0, 1), help="Share of a batch for the JPEG engines.")
    sweeps: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seconds: float = option(
        2.0,
        type=click.FloatRange(min=0.001, max=20),
        help="Each point is timed for this long in each repeat. Records are written around it, at least every 30 s.",
    )
    # An idle GPU takes a while to raise its clocks.
    warm_up_s: float = option(
        1.0,
        name="--warm-up",
        type=click.FloatRange(min=0),
        help="Seconds that each point runs before it is timed, at least.",
    )
    repeats: int = option(2, help="Times that each point is opened; points take turns.")
    bystanders: Collection[int] = ()
    """Child processes whose CPU time is not counted."""
    earlier: Mapping[str, Any] | None = None
    """A record of the same scenario, whose turns are not taken again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name in CHECKS:
            object.__setattr__(self, "repeats", 1)

    def goes_on_without(self, subject: GpuPoint) -> bool:
        """Go on unless the error broke the CUDA context: all later points would fail, so another process goes on."""
        try:
            _synchronise(self.device)
        except RuntimeError:
            return False
        return True

    def prepare(self, folder: RunFolder, stack: ExitStack) -> Session:
        # Later it may be too late, so the figures of a point would depend on the points before it in its process.
        pool_host_memory()
        tree = ProcessTree(bystanders=self.bystanders)
        if self.device == "cpu":
            return Session(None, None, tree)
        nvml, nvml_error = None, None
        try:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            nvml = stack.enter_context(Nvml(str(uuid)))
        except (AttributeError, OSError) as exc:  # torch is too old, or NVML is missing
            nvml_error = str(exc)
        return Session(nvml, {**describe_gpu(nvml), "nvml": nvml_error or "read"}, tree)

    def subjects(self, made: Session) -> Sequence[GpuPoint]:
        names = ("device", "num_threads", "batch_size", "hw_decoder_load")
        base = GpuSetting(**{name: getattr(self, name) for name in names})
        return points_of(self.name, base, self.sweeps, has_masks=bool(self.workload.stored.masks))

    def order(self, subjects: Sequence[GpuPoint], number: int) -> Sequence[GpuPoint]:
        """Keep the order in every round, the most important first: the time may end before the last subject."""
        return subjects

    def name_of(self, subject: GpuPoint) -> str:
        return subject.name

    def take_over(self, rounds: Rounds[GpuPoint, Measured]) -> None:
        if self.earlier is None:
            return
        by_name = {point.name: point for point in rounds.subjects}
        for record in self.earlier["records"]:
            rounds.rows[by_name[f"{record['loader']}, {record['setting']['change']}"]] = list(record["repeats"])
        rounds.errors |= {by_name[name]: error for name, error in self.earlier["errors"].items()}

    def measure(self, made: Session, subject: GpuPoint, number: int) -> Measured:
        setting, case = subject.setting, subject.case
        if case.needs_masks and not self.workload.stored.masks:
            raise ValueError(f"not all samples have a mask '{self.workload.mask}'; name the component: --mask")
        if case.check is not None:
            return case.check(self.workload, setting)
        assert case.open is not None, "the case is no check"
        with case.open(self.workload, setting) as running:
            warm_up_start, num_warm_up = time.perf_counter(), 0
            while num_warm_up < NUM_WARM_UP or time.perf_counter() - warm_up_start < self.warm_up_s:
                running.step()
                num_warm_up += 1
            _synchronise(setting.device)
            num_samples = 0
            cpu_start, start = made.tree.cpu_s(), time.perf_counter()
            after_s = SETTLED_S if self.seconds > SETTLED_S else 0.0
            with sampling(None if made.nvml is None else made.nvml.sample, after_s=after_s) as used:
                while time.perf_counter() - start < self.seconds or not num_samples:
                    num_samples += running.step()
                _synchronise(setting.device)
                elapsed = time.perf_counter() - start
            cpu_s = made.tree.cpu_s() - cpu_start
        figures = {
            "samples_per_s": num_samples / elapsed,
            "cpu_ms_per_sample": 1000 * cpu_s / num_samples,
            "cpu_share": cpu_s / elapsed / available_cores(),
            **used,
            # As MLPerf Storage defines it: the time of the steps over all the time.
            "step_share": num_samples * running.step_s / elapsed if running.step_s else None,
        }
        photos = self.workload.photos(setting).facts
        return {"figures": figures, "num_samples": num_samples, "seconds": elapsed, "photos": photos}

    def record(self, made: Session, subject: GpuPoint, rows: Sequence[Measured]) -> dict[str, Any]:
        return {
            "loader": subject.case.variant,
            "decode": "none",
            "device": "cuda" if subject.setting.device == "gpu" else "cpu",
            "setting": {"change": subject.label, **({"scenario": self.name} if self.name in CHECKS else {})},
            "full_setting": asdict(subject.setting),
            "data": 0,
            "repeats": list(rows),
        }

    def options_json(self) -> dict[str, Any]:
        """Return what the figures depend on besides the machine and the versions."""
        return {
            **{name: getattr(self, name) for name in _OPTIONS},
            "sweeps": {name: list(values) for name, values in self.sweeps.items()},
            "photos": self.workload.stored.facts,
            "num_shards": len(self.workload.shards.names),
        }

    def report(self, made: Session, rounds: Rounds[GpuPoint, Measured]) -> dict[str, Any]:
        """Return all turns, also those of rounds that are not complete: the time often ends before."""
        turns = rounds.rows.items()
        is_short = {point: len(rows) < rounds.wanted and point not in rounds.errors for point, rows in turns}
        left_out = [point.name for point in rounds.rows if is_short[point]]
        notes = self._conditions(made)
        if self.name == "rn50":
            notes.append(PUBLISHED_NOTE)
        if left_out:
            notes.append(f"left out, the time was over: {'; '.join(left_out)}")
        return {
            "scenario": self.name,
            "options": self.options_json(),
            "baseline": None,
            "data": [{"num_samples": len(self.workload.stored.photos), "num_shards": len(self.workload.shards.names)}],
            "records": [self.record(made, point, rows) for point, rows in turns if rows],
            "failed": self.failed(made, rounds),
            "left_out": left_out,
            "errors": {point.name: error for point, error in rounds.errors.items()},
            "gpu": made.gpu,
            "notes": notes,
        }

    def _conditions(self, made: Session) -> list[str]:
        photos = self.workload.stored
        kind, facts = "drawn, not photographs" if photos.is_drawn else "as stored in the shards", photos.facts
        notes = [
            f"{facts['num_photos']} photos, {kind}: {facts['encoded_bytes_mean'] / 1024:.1f} KiB and "
            f"{facts['pixels_mean'] / 1e6:.2f} megapixels on average."
        ]
        if made.gpu is None:
            return [*notes, "Decoded on the CPU: nothing here says anything about a GPU."]
        notes.append(f"{made.gpu['name']}, driver {made.gpu.get('driver') or 'unknown'}.")
        if not made.gpu["video_library"]:
            notes.append("libnvcuvid is missing: the JPEG engines were not used (driver capability `video`).")
        return notes


def _synchronise(device: Device) -> None:
    if device == "gpu":
        torch.cuda.synchronize()


def take_scenario(scenario: GpuScenario, path: Path) -> dict[str, Any]:
    """Run a scenario in processes of its own, or go on with its record, which is the file ``path``; return the record.

    The scenario's deadline holds for checks, too. A record of other options or of another machine is refused: figures
    would not belong together.
    """
    if path.exists():
        earlier = read_record(path)
        options = json.loads(json.dumps(scenario.options_json()))
        here = describe_environment()
        changed = [name for name, value in options.items() if earlier["options"].get(name) != value]
        changed += [name for name in _SAME if here[name] != earlier["environment"][name]]
        if changed:
            raise DataError(
                f"the record of '{scenario.name}' that is there was made with other options or on another machine "
                f"(other {', '.join(changed)}); name another directory, or delete the record"
            )
        if earlier["at"] is not None:  # a killed command was taking this turn; it is taken again
            write_record({**earlier, "at": None}, path)
    while not _is_over(scenario) and not (path.exists() and is_done(read_record(path))):
        limit_s = None if scenario.deadline is None else max(0.0, scenario.deadline - time.monotonic()) + GRACE_S
        try:
            call_apart(run_kept, scenario, path, name=f"scenario '{scenario.name}'", timeout_s=limit_s)
        except PipesError as exc:
            report: dict[str, Any] = read_record(path) if path.exists() else {"at": None}
            if report["at"] is None:
                raise  # it ended before a turn, and would do so again
            if not _is_over(scenario):
                report["errors"][report["at"]] = f"the process ended in this turn: {exc}"
                write_record({**report, "at": None}, path)
            click.echo(f"{exc}; its record is kept, and goes on", err=True)
    if not path.exists():
        raise PipesError(f"scenario '{scenario.name}': the time was over before its first turn; pass more --minutes")
    return read_record(path)


def is_done(report: Mapping[str, Any]) -> bool:
    return not report["left_out"]


def _is_over(scenario: GpuScenario) -> bool:
    return scenario.deadline is not None and time.monotonic() > scenario.deadline


def run_kept(scenario: GpuScenario, path: Path) -> None:
    """Run a scenario in this process, or go on with its record, which is written before and after every turn."""
    going_on = replace(scenario, earlier=read_record(path) if path.exists() else None)
    report = run_scenario(going_on, keep_turns=lambda report: write_record(report, path))
    write_record({**report, "at": None}, path)
