"""Valid text files: those that are stored beside shards, and those that users write (lists, tables, settings)."""

import json
import tempfile
from pathlib import Path

from dali_pipes.formats.quarantine import Quarantine
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.order.state import LoaderState
from dali_pipes.tuning import Machine, Settings, Tuning

SHARD = "s-000000.tar"


def texts() -> list[bytes]:
    """One of each kind."""
    return [class_table(), quarantine(), tuning(), state(), *tables(), *key_maps(), *dsort_specs(), b" 7\n"]


def class_table() -> bytes:
    """A class table as `pack` writes it."""
    return json.dumps({str(label): f"class {label}" for label in range(1, 6)}).encode()


def quarantine() -> bytes:
    """A quarantine of two bad samples."""
    with tempfile.TemporaryDirectory(prefix="dali-pipes-seeds-") as folder:
        path = Path(folder) / "bad.tsv"
        listed = Quarantine(path, manifest="0" * 64)
        listed.add(SHARD, "s00000", "image.jpg", "cannot be decoded")
        listed.add(SHARD, "s00001", "", "gone")
        return path.read_bytes()


def tuning() -> bytes:
    """A tuning file of some machine."""
    with tempfile.TemporaryDirectory(prefix="dali-pipes-seeds-") as folder:
        path = Path(folder) / "tuning.json"
        settings = Settings(num_threads=2, prefetch_queue_depth=2, hw_decoder_load=0.5)
        Tuning(machine=Machine(cpu="some", cores=2, gpu=None), settings=settings).write(path)
        return path.read_bytes()


def state() -> bytes:
    """A loader's state, in JSON."""
    order = OrderInputs(seed=7, epoch=2, weights=(0.5, 0.5), epoch_samples=100)
    return json.dumps(LoaderState(manifest="ab", selection="cd", order=order, delivered=64).to_dict()).encode()


def tables() -> list[bytes]:
    """Tables of photos: CSV, TSV, JSON and JSON lines."""
    rows = [{"path": f"{number}.jpg", "label": number, "boxes": [1, 2]} for number in range(3)]
    return [
        b"path,label\n0.jpg,0\n1.jpg,1\n",
        b"path\tlabel\n0.jpg\t0\n",
        json.dumps(rows).encode(),
        "\n".join(map(json.dumps, rows)).encode(),
    ]


def key_maps() -> list[bytes]:
    """External key maps: JSON, and lines."""
    return [
        json.dumps({"cats-{00..01}.tar": ["s00000", "^s0000[1-9]"]}).encode(),
        b"s00000\tcats-{00..01}.tar\ns00001\tdogs-{00..01}.tar\n",
    ]


def dsort_specs() -> list[bytes]:
    """A dSort spec in JSON and in YAML."""
    spec = {
        "input_bck": {"name": "b"},
        "input_format": {"template": "s-{0..1}"},
        "output_format": "o-{0..9}",
        "input_extension": ".tar",
        "output_shard_size": "1MB",
        "algorithm": {"kind": "shuffle", "seed": "7"},
    }
    yaml = b"input_bck: {name: b}\ninput_format: {template: 's-{0..1}'}\noutput_format: 'o-{0..9}'\n"
    return [json.dumps(spec).encode(), yaml + b"input_extension: .tar\noutput_shard_size: 1MB\n"]
