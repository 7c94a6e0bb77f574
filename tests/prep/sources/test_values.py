"""Values to bytes, held against WebDataset itself."""

from typing import Any

import numpy as np
import pytest
import webdataset
from webdataset.writer import default_handlers, encode_based_on_extension1

from dali_pipes.errors import DataError
from dali_pipes.store.local import LocalStore
from prep.sources.record import Record, Source, encode_value
from tests.builders import pack

VALUES = [
    ("txt", "grüße"),
    ("json", {"boxes": [[1, 2.5, 3, 4]], "name": "ü"}),
    ("meta.json", None),
    ("cls", 7),
    ("count", 3),
    ("npy", np.arange(6, dtype=np.float32).reshape(2, 3)),
    ("box.npy", np.array([], np.int64)),
]


@pytest.mark.parametrize(("component", "value"), VALUES)
def test_encode_value_gives_the_bytes_of_tarwriter(component: str, value: Any) -> None:
    expected = encode_based_on_extension1(value, component, default_handlers)
    assert encode_value(value, component=component, where="record 'a'") == expected


def test_packed_values_are_decoded_by_webdataset(tmp_path: Any) -> None:
    components = {name: value for name, value in VALUES if name not in ("cls", "meta.json")}
    source = Source(name="made", records=[Record(key="a", components=components, label=7)], classes={7: "seven"})
    pack(source, store=LocalStore(tmp_path))
    [sample] = webdataset.WebDataset(str(tmp_path / "samples-000000.tar"), shardshuffle=False).decode("rgb8")
    assert (sample["txt"], sample["cls"], sample["count"]) == ("grüße", 7, b"3")
    assert sample["json"] == components["json"]
    assert sample["npy"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("component", "value", "message"),
    [
        ("json", {1, 2}, r"record 'a': cannot write a set as 'json' \(TypeError: .*not JSON serializable"),
        ("npy", [1, 2], r"cannot write a list as 'npy' \(TypeError: expected a numpy array\)"),
        ("txt", 3, "cannot write a int as 'txt'"),
        ("xyz", 3, "cannot write a int as 'xyz'"),
        ("cls", "é", None),
        ("npy", np.array([None]), "cannot write a ndarray as 'npy'"),
        ("_meta", 3, "cannot write a int as '_meta'"),
    ],
)
def test_encode_value_that_does_not_fit_says_which(component: str, value: Any, message: str | None) -> None:
    if message is None:  # text is text, whatever the extension
        assert encode_value(value, component=component, where="record 'a'") == value.encode()
        return
    with pytest.raises(DataError, match=message):
        encode_value(value, component=component, where="record 'a'")
