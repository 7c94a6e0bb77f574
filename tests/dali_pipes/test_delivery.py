"""What counts as delivered: exactly the batches that the loop has, wherever an exception interrupts it."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dali_pipes as dp
from tests import loaders
from tests.dali_pipes.bad_samples.test_bad_samples import garbage, spoilt
from tests.hostile_photos import undecodable
from tests.loaders import keys_of
from tests.shards import Sample, samples_and_shards, write_shards

NUM_SAMPLES = 20
KEYS = [f"s{number:05d}" for number in range(NUM_SAMPLES)]
# The modules through which a batch is handed over.
HAND_OVER = ("dali_pipes/iterator.py", "dali_pipes/delivery.py", "dali_pipes/epoch.py", "dali_pipes/integrations/")
# Python looks for Ctrl-C when a function is entered, after a call, and when a loop goes round.
INTERRUPTIBLE = ("RESUME", "CALL", "JUMP_BACKWARD")


samples, shards = samples_and_shards([(20, 24)] * NUM_SAMPLES, per_shard=5)


open_loader = partial(loaders.open_loader, batch_size=5, shuffle=False)


FACES: dict[str, Callable[[dp.Loader], Callable[[], dict[str, Any]]]] = {
    "loader": lambda loader: lambda: next(loader).pop(),
    "dali": lambda loader: lambda: next(loader.as_dali(output_map=["a", "b", "c"]))[0],
    # With another `each_iter` a new iteration would be the next epoch; this one goes on.
    "dataloader": lambda loader: iter(loader.as_dataloader(each_iter="rest")).__next__,
}


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("face", FACES)
def test_exception_at_each_line_of_the_hand_over_loses_no_batch(shards: Path, face: str) -> None:
    """If any line before the count of a batch raises, the state counts the loop's batches, and the rest come once.

    For a face, only its own lines raise; the lines below it are the loader's.
    """
    modules = HAND_OVER if face == "loader" else HAND_OVER[-1:]
    with open_loader(shards) as loader, open_loader(shards) as other:
        num_interrupted = 0
        while True:
            loader.set_epoch(num_interrupted + 1)
            seen = list(FACES[face](loader)()["key"])
            take, counted = FACES[face](loader), loader.state_dict()["delivered"]
            lines = 0

            def interrupt(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal lines
                # The decorator `alone` ends a use where Python does not look for signals: see test_threads.
                if not any(part in frame.f_code.co_filename for part in modules) or frame.f_code.co_name == "used":
                    return None
                if event == "line" and loader.delivery.current.position == counted:  # noqa: B023
                    lines += 1
                    if lines > num_interrupted:  # noqa: B023
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return interrupt

            before = sys.gettrace()  # that of a coverage run
            sys.settrace(interrupt)
            try:
                seen += take()["key"]
            except KeyboardInterrupt:
                num_interrupted += 1
            else:
                break
            finally:
                sys.settrace(before)
            state = loader.state_dict()
            assert state["delivered"] == len(seen)
            if num_interrupted % 8 == 1:  # another job resumes
                other.load_state_dict(state)
                assert seen + keys_of(other) == KEYS
            assert seen + keys_of(loader) == KEYS
        assert num_interrupted > (30 if face == "loader" else 2)


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("face", FACES)
def test_nothing_interrupts_between_counting_and_hand_over(shards: Path, face: str) -> None:
    """After a batch is counted, no instruction runs at which Python would raise the exception of a signal."""
    with open_loader(shards) as loader:
        take = FACES[face](loader)
        take()
        counted, ran = loader.state_dict()["delivered"], []

        def watch(frame: FrameType, event: str, _: Any) -> Any:
            frame.f_trace_opcodes = True
            if (
                loader.delivery.current.position > counted
                and "dali_pipes/" in frame.f_code.co_filename
                and event == "opcode"
            ):
                names = {one.offset: one.opname for one in dis.get_instructions(frame.f_code)}
                ran.append((frame.f_code.co_name, names[frame.f_lasti]))
            return watch

        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one such frame when tracing starts
        before = sys.gettrace()
        sys.settrace(watch)
        try:
            take()
        finally:
            sys.settrace(before)
        ran = [(where, name) for where, name in ran if where not in ("position", "_position", "current", "<lambda>")]
        assert ran  # the counting itself was seen
        assert not [(where, name) for where, name in ran if name.startswith(INTERRUPTIBLE)]


@pytest.mark.parametrize(("how", "bad"), [(undecodable, 2), (garbage, 12), (undecodable, 19)])  # by DALI, by the index
def test_state_after_an_error_has_the_lost_batch_to_come(
    tmp_path: Path, samples: list[Sample], how: Callable[[bytes], bytes], bad: int
) -> None:
    """Saved on the exception: a job that resumes and substitutes has all samples but the bad one."""
    shards = write_shards(tmp_path, spoilt(samples, [bad], how=how), per_shard=5)
    seen: list[str] = []
    # on_error="raise" would refuse the data set that the index shows to be bad; this raises at the sample.
    strict = dp.BadSamples(on_error="substitute", max_bad=0, quarantine=tmp_path / "strict")
    with open_loader(shards, bad_samples=strict) as loader:
        with pytest.raises(dp.DecodeError, match=KEYS[bad]):  # noqa: PT012 (raised in the batch of the bad sample)
            for (batch,) in loader:
                seen += batch["key"]
        state = loader.state_dict()
        assert state["delivered"] == len(seen) == bad // 5 * 5
        # The loop may go on: the state then has the batches that it takes.
        rest = keys_of(loader)
        assert rest == KEYS[bad // 5 * 5 + 5 :]
        assert (loader.state_dict()["epoch"], loader.state_dict()["delivered"]) == (1, 0)
        # The next epoch loses the batch again, and then stands where it did.
        loader.set_epoch(0)
        assert loader.state_dict()["delivered"] == 0
    policy = dp.BadSamples(on_error="substitute", quarantine=tmp_path / "again")
    with open_loader(shards, bad_samples=policy, state=state) as loader:
        for (batch,) in loader:
            seen += [key for key, at in zip(batch["key"], range(5), strict=True) if at not in loader.substituted]
    assert seen == [key for key in KEYS if key != KEYS[bad]]


def test_a_loader_whose_close_was_interrupted_is_closed_again(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_loader(shards) as loader:
        monkeypatch.setattr(loader.delivery, "_end_uses", lambda: pytest.exit("Ctrl-C"))
        with pytest.raises(pytest.exit.Exception, match="Ctrl-C"):
            loader.close()
        monkeypatch.setattr(loader.delivery, "_end_uses", lambda: None)
        assert len(loader) == len(list(loader)), "nothing was freed"
