"""Options of a loader: types and values are checked when an option class is made; old arguments name their new form."""

import inspect
from typing import Any

import pytest

import dali_pipes as dp
from dali_pipes import options
from dali_pipes.integrations.dali_iterator import DaliIterator

GROUPS = ("Select", "Shuffle", "BadSamples", "Cache", "Decode", "Outputs")


@pytest.mark.parametrize(
    ("group", "values", "error", "text"),
    [
        ("Select", {"missing": "drop"}, ValueError, "missing must be one of error, skip, empty, got 'drop'"),
        ("Select", {"where": 3}, TypeError, "where must be a function of the columns, or None, got 3"),
        ("Select", {"oversample": [2]}, TypeError, "oversample must be a mapping of class ids to factors, got list"),
        ("Select", {"epoch_samples": 0}, ValueError, "epoch_samples must be positive, got 0"),
        ("Select", {"epoch_samples": 1.5}, TypeError, "epoch_samples must be an integer, got 1.5"),
        ("Shuffle", {"window_bytes": 0}, ValueError, "window_bytes must be 'all' or a positive number of bytes, got 0"),
        ("Shuffle", {"window_bytes": "1GiB"}, ValueError, "window_bytes must be 'all' or a positive .*, got '1GiB'"),
        ("Shuffle", {"window_bytes": True}, ValueError, "window_bytes must be 'all' or a positive number .*, got True"),
        ("Shuffle", {"ramp_up": "False"}, TypeError, "ramp_up must be a bool, got 'False'"),
        ("Shuffle", {"slices": 0}, ValueError, "slices must be positive, got 0"),
        ("Shuffle", {"slices": True}, TypeError, "slices must be an integer, got True"),
        ("Shuffle", {"enabled": 1}, TypeError, "enabled must be a bool, got 1"),
        ("BadSamples", {"on_error": "skip"}, ValueError, "on_error must be one of raise, substitute, got 'skip'"),
        ("BadSamples", {"max_bad": -1}, ValueError, "max_bad must not be negative, got -1"),
        ("BadSamples", {"max_pixels": 0}, ValueError, "max_pixels must be positive, got 0"),
        ("BadSamples", {"max_pixels": 1e6}, TypeError, "max_pixels must be an integer, got 1000000.0"),
        ("BadSamples", {"quarantine": 3}, TypeError, "quarantine must be a path or None, got 3"),
        ("Cache", {"directory": 3}, TypeError, "directory must be a path or None, got 3"),
        ("Cache", {"max_bytes": 0}, ValueError, "max_bytes must be positive, got 0"),
        ("Cache", {"fetchers": 0}, ValueError, "fetchers must be positive, got 0"),
        ("Cache", {"show_progress": "no"}, TypeError, "show_progress must be a bool, got 'no'"),
        ("Decode", {"threads": 0}, ValueError, "threads must be positive, got 0"),
        ("Decode", {"queue_depth": 0}, ValueError, "queue_depth must be positive, got 0"),
        ("Decode", {"engine_share": 1.5}, ValueError, r"engine_share must be in \[0, 1\], got 1.5"),
        ("Decode", {"engine_share": "0.5"}, TypeError, "engine_share must be a number, got '0.5'"),
        ("Decode", {"tuning": 3}, TypeError, "tuning must be a path or None, got 3"),
        ("Outputs", {"keys": 1}, TypeError, "keys must be a bool, got 1"),
        ("Outputs", {"valid": None}, TypeError, "valid must be a bool, got None"),
        ("Outputs", {"labels": "one-hot"}, ValueError, "labels must be one of raw, contiguous, got 'one-hot'"),
    ],
)
def test_values_are_checked_when_the_group_is_made(
    group: str, values: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        getattr(dp, group)(**values)


@pytest.mark.parametrize("group", GROUPS)
def test_groups_hold_plain_values_and_cannot_be_changed(group: str) -> None:
    """Keyword-only, frozen, equal by value; every attribute is documented."""
    made = getattr(dp, group)()
    assert made == getattr(dp, group)(**vars(made))
    name = next(iter(vars(made)))
    with pytest.raises(AttributeError):
        setattr(made, name, None)
    with pytest.raises(TypeError):
        getattr(dp, group)(getattr(made, name))


def test_loader_has_sixteen_parameters() -> None:
    assert len(inspect.signature(dp.loader).parameters) == 16


OLD = {
    "exclude": "pass select=dali_pipes.Select(exclude=...)",
    "where": "pass select=dali_pipes.Select(where=...)",
    "oversample": "pass select=dali_pipes.Select(oversample=...)",
    "missing": "pass select=dali_pipes.Select(missing=...)",
    "epoch_samples": "pass select=dali_pipes.Select(epoch_samples=...)",
    "shuffle_window": "pass shuffle=dali_pipes.Shuffle(window_bytes=...)",
    "ramp_up": "pass shuffle=dali_pipes.Shuffle(ramp_up=...)",
    "num_slices": "pass shuffle=dali_pipes.Shuffle(slices=...)",
    "on_error": "pass bad_samples=dali_pipes.BadSamples(on_error=...)",
    "max_bad": "pass bad_samples=dali_pipes.BadSamples(max_bad=...)",
    "max_pixels": "pass bad_samples=dali_pipes.BadSamples(max_pixels=...)",
    "quarantine": "pass bad_samples=dali_pipes.BadSamples(quarantine=...)",
    "cache_dir": "pass cache=dali_pipes.Cache(directory=...)",
    "cache_bytes": "pass cache=dali_pipes.Cache(max_bytes=...)",
    "num_fetchers": "pass cache=dali_pipes.Cache(fetchers=...)",
    "show_progress": "pass cache=dali_pipes.Cache(show_progress=...)",
    "num_threads": "pass decode=dali_pipes.Decode(threads=...)",
    "prefetch_queue_depth": "pass decode=dali_pipes.Decode(queue_depth=...)",
    "hw_decoder_load": "pass decode=dali_pipes.Decode(engine_share=...)",
    "tuning": "pass decode=dali_pipes.Decode(tuning=...)",
    "with_keys": "pass outputs=dali_pipes.Outputs(keys=...)",
    "with_valid": "pass outputs=dali_pipes.Outputs(valid=...)",
    "labels": "pass outputs=dali_pipes.Outputs(labels=...)",
    "enabled": "pass shuffle=dali_pipes.Shuffle(enabled=...)",
    "window_bytes": "pass shuffle=dali_pipes.Shuffle(window_bytes=...)",
    "slices": "pass shuffle=dali_pipes.Shuffle(slices=...)",
    "directory": "pass cache=dali_pipes.Cache(directory=...)",
    "max_bytes": "pass cache=dali_pipes.Cache(max_bytes=...)",
    "fetchers": "pass cache=dali_pipes.Cache(fetchers=...)",
    "threads": "pass decode=dali_pipes.Decode(threads=...)",
    "queue_depth": "pass decode=dali_pipes.Decode(queue_depth=...)",
    "engine_share": "pass decode=dali_pipes.Decode(engine_share=...)",
    "keys": "pass outputs=dali_pipes.Outputs(keys=...)",
    "valid": "pass outputs=dali_pipes.Outputs(valid=...)",
    "local_rank": 'pass device="cuda:N"',
    "etl": "pass dali_pipes.Shards(urls, etl=...) as the shards",
    "output_map": "use loader.as_dali(output_map=...)",
    "column_labels": "use loader.as_dali(column_labels=...)",
    "auto_reset": "use loader.as_dali(auto_reset=...)",
}


@pytest.mark.parametrize("name", OLD)
def test_old_argument_names_its_new_form(name: str) -> None:
    """Refused before any work starts."""
    graph: Any = None
    arguments: dict[str, Any] = {"batch_size": 2, name: None}
    with pytest.raises(TypeError) as refused:
        dp.loader("/nowhere", graph, **arguments)
    assert str(refused.value) == f"loader() has no argument '{name}'; {OLD[name]}"


def test_table_of_old_arguments_is_complete_and_names_what_there_is() -> None:
    assert options.NEW_FORMS.keys() == OLD.keys()
    for form in OLD.values():
        group, _, rest = form.rpartition("dali_pipes.")[2].partition("(")
        if group in GROUPS:
            assert rest.partition("=")[0] in vars(getattr(dp, group)())
    for name in ("output_map", "column_labels", "auto_reset"):
        assert name in inspect.signature(DaliIterator).parameters
        assert name in inspect.signature(dp.Loader.as_dali).parameters


def test_shards_keep_a_list_that_can_be_read_once() -> None:
    assert dp.Shards(iter(["a", "b"]), etl="small").urls == ("a", "b")
    assert dp.Shards("a").etl is None
