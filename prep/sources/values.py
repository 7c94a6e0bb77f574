"""Encode Python values as the bytes of a component, by its extension, as `webdataset.TarWriter` does."""

import io
import json
import pickle
from collections.abc import Callable

from dali_pipes.errors import DataError


def encode_value(value: object, *, component: str, where: str) -> bytes:
    """The bytes that ``TarWriter`` would write for a value, and that WebDataset's ``decode()`` reads back.

    Args:
        value: A string for any extension; an integer or similar for ``cls``; JSON values for ``json``; an array for
            ``npy``; anything for ``pyd`` and ``pickle``; for ``npz``, ``pth``, ``png`` and others, as in WebDataset.
        component: Its last part is the extension.
        where: The record, for errors.

    Raises:
        DataError: If there is no rule for the extension, or the value does not fit it.

    >>> encode_value([1, 2], component="boxes.json", where="record 'a'")
    b'[1, 2]'
    """
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    extension = component.rpartition(".")[2].lower()
    try:
        encode = _ENCODERS.get(extension)
        return encode(value) if encode else _encode_as_webdataset(value, component)
    except Exception as exc:
        raise DataError(
            f"{where}: cannot write a {type(value).__name__} as '{component}' ({type(exc).__name__}: {exc}); "
            "expected bytes, a path, or a value that webdataset.TarWriter takes for this extension"
        ) from exc


def _npy(value: object) -> bytes:
    import numpy as np

    if not isinstance(value, np.ndarray):
        raise TypeError("expected a numpy array")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, value)
    return stream.getvalue()


def _text(value: object) -> bytes:
    return str(value).encode("ascii")


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


# The common ones are here, because importing WebDataset takes seconds. A test compares them with it.
_ENCODERS: dict[str, Callable[[object], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _text),
    **dict.fromkeys(("json", "jsn"), _json),
    **dict.fromkeys(("pyd", "pickle"), pickle.dumps),
    "npy": _npy,
}


def _encode_as_webdataset(value: object, component: str) -> bytes:
    from webdataset.writer import default_handlers, encode_based_on_extension1

    encoded = encode_based_on_extension1(value, component, default_handlers)
    if not isinstance(encoded, bytes | bytearray | memoryview):
        raise TypeError("WebDataset does not encode it")
    return bytes(encoded)
