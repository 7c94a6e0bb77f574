"""Find the stage that a training step waits for most, and what to change."""

from dataclasses import dataclass, replace

from dali_pipes.commands.epoch_profile import EpochProfile

# A loader keeps up if the step waits for less than this share of the time.
KEEPS_UP = 0.05
# Threads that are busy for this share of the time count as all busy: the rest is a batch's last samples.
ALL_BUSY = 0.75
# Threads that are ready, with no core free, for this share of the time compete with others for the cores.
CROWDED = 0.2


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The stage that the others wait for, why, and what to turn."""

    bottleneck: str
    why: str
    turn: tuple[str, ...]


_IN_THIS_THREAD = "work in the thread that iterates"
_INPUTS = Diagnosis(
    bottleneck="inputs",
    why=_IN_THIS_THREAD,
    turn=(
        "the graph's arrays and parsers (components.array, .json, .parsed, .npy): they run in Python, in the thread "
        "that iterates; do less there, or once in advance: dali-pipes prep transform",
    ),
)
_HAND_OVER = Diagnosis(
    bottleneck="hand-over",
    why=_IN_THIS_THREAD,
    turn=("a larger batch_size", "Outputs(keys=False), where keys are not used"),
)


def find_bottleneck(
    epoch: EpochProfile, *, cores: int, batch_size: int, on_gpu: bool, is_in_memory: bool = True
) -> Diagnosis:
    """The stage for which the step waits most.

    The step waits for one of five things: shards (``read`` waits), decoded batches (``hand-over`` waits), or one of the
    three stages that work in the thread that iterates.

    Args:
        epoch: The times.
        cores: Cores that the process may use.
        batch_size: Samples a batch.
        on_gpu: Whether a GPU decoded.
        is_in_memory: Whether the cache file lies in memory, not on a disk.
    """
    waited_s = epoch.of("step").waiting_s
    share = waited_s / epoch.wall_s if epoch.wall_s else 0.0
    if share < KEEPS_UP:
        return Diagnosis(
            bottleneck="step",
            why=f"the step waits for {share:.1%} of the time: the loader keeps up",
            turn=("nothing in the loader; fewer threads, Decode(threads=), leave cores to the training",),
        )
    read, inputs, hand_over = epoch.of("read"), epoch.of("inputs"), epoch.of("hand-over")
    causes = [
        (read.waiting_s, _shards(epoch, is_in_memory=is_in_memory)),
        (hand_over.waiting_s, _decoding(epoch, cores=cores, batch_size=batch_size, on_gpu=on_gpu)),
        (read.busy_s, _reading(is_in_memory=is_in_memory)),
        (inputs.busy_s, _INPUTS),
        (hand_over.busy_s, _HAND_OVER),
    ]
    longest_s, found = max(causes, key=lambda cause: cause[0])
    why = f"of the {waited_s:.2f} s that the step waits, {longest_s:.2f} s are for {found.why}"
    return replace(found, why=why)


def _shards(epoch: EpochProfile, *, is_in_memory: bool) -> Diagnosis:
    fetch, stage = epoch.of("fetch"), epoch.of("stage")
    name = "stage" if stage.busy_s > fetch.busy_s else "fetch"
    turn = []
    if name == "fetch":
        if fetch.busy_s > ALL_BUSY * fetch.threads * epoch.wall_s:
            turn.append(
                "more fetchers, Cache(fetchers=): all were busy; if that changes nothing, the network or the store is "
                "at its limit"
            )
        else:
            turn.append(
                "the fetchers were not all busy: Cache(max_bytes=) for larger windows ahead, or more, smaller shards"
            )
        turn.append("Cache(directory=, max_bytes=): a local disk for all shards; later epochs and jobs fetch nothing")
    elif not is_in_memory:
        turn.append("Cache(directory=) in memory (/dev/shm) or on a faster disk: shards are written and synced there")
    if epoch.first_batch_s > 0.5 * epoch.wall_s:
        turn.append("Shuffle(ramp_up=True): the first batch then waits for one shard only")
    rate = epoch.fetched_bytes / 2**20 / epoch.wall_s
    return Diagnosis(bottleneck=name, why=f"shards ({rate:.0f} MiB/s came)", turn=tuple(turn))


def _decoding(epoch: EpochProfile, *, cores: int, batch_size: int, on_gpu: bool) -> Diagnosis:
    decode, transform = epoch.of("decode"), epoch.of("transform")
    name = "decode" if decode.busy_s >= transform.busy_s else "transform"
    threads = decode.threads
    capacity = threads * epoch.wall_s
    busy = (decode.busy_s + transform.busy_s) / capacity if capacity else 0.0
    queued = decode.queued_s / capacity if capacity else 0.0
    why = f"batches being decoded; DALI's {threads} threads are busy for {busy:.0%} of the time"
    turn = []
    if queued > CROWDED:
        why += f", and for {queued:.0%} ready with no core free"
        turn.append("fewer threads, Decode(threads=), or fewer other processes: they compete for the cores")
    elif busy >= ALL_BUSY and threads < cores:
        turn.append(f"more threads, Decode(threads=): {threads} of {cores} cores decode")
    elif busy >= ALL_BUSY:
        turn.append("more cores" if on_gpu else "more cores, or device='gpu': all cores decode")
    else:
        turn.append("Decode(queue_depth=3) or more: threads are idle between batches")
        if batch_size < 8 * threads:
            turn.append(f"a larger batch_size: {batch_size} samples are few for {threads} threads")
    if on_gpu:
        turn.append("Decode(engine_share=): dali-pipes tune URL")
    if name == "decode":
        turn.append("smaller photos, once in advance: dali-pipes prep transform; or a graph that decodes a window only")
    else:
        turn.append("the graph: fused operators (crop_mirror_normalize), dtype='uint8' or 'float16', a smaller crop")
    return Diagnosis(bottleneck=name, why=why, turn=tuple(turn))


def _reading(*, is_in_memory: bool) -> Diagnosis:
    turn = ["a larger batch_size: reading costs one call a batch"]
    if not is_in_memory:
        turn.append("Cache(directory=) in memory (/dev/shm) or on a faster disk: the cache file is on a disk")
    return Diagnosis(bottleneck="read", why=_IN_THIS_THREAD, turn=tuple(turn))
