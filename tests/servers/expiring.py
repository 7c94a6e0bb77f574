"""An S3 bucket over a directory whose server refuses the keys that a test calls ended, as S3 refuses them."""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.servers.scripted import Visit
from tests.shards import files_of


class ExpiringBucket:
    """A script for `tests.servers.scripted`. ``is_good`` says of a key whether it is still taken."""

    def __init__(self, folder: Path, is_good: Callable[[str], bool]) -> None:
        self._folder, self._is_good = folder, is_good
        self.used: list[str] = []
        """The keys of all requests, in their order."""
        self.num_refused = 0

    def __call__(self, visit: Visit) -> None:
        sent = unquote(visit.path) + (visit.headers.get("Authorization") or "")
        key = re.search(r"Credential=([^/]*)/", sent)[1]  # type: ignore[index]
        self.used.append(key)
        if not self._is_good(key):
            self.num_refused += 1
            text = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
            visit.say(400, text.encode())
            return
        url = urlsplit(visit.path)
        name = unquote(url.path).removeprefix("/pets").strip("/")
        if not name:
            visit.say(200, self._listing(parse_qs(url.query)))
            return
        path = self._folder / name
        if not path.is_file():
            visit.say(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data, status, fields = path.read_bytes(), 200, {"ETag": f'"{path.stat().st_mtime_ns:x}"'}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", visit.headers.get("Range") or ""):
            start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
            fields["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        if visit.request.startswith(b"HEAD "):
            head = "".join(f"{field}: {value}\r\n" for field, value in fields.items())
            visit.send(
                f"HTTP/1.1 200 OK\r\n{head}Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
                f"Content-Length: {len(data)}\r\n\r\n".encode()
            )
            return
        visit.say(status, data, **fields)

    def _listing(self, asked: dict[str, list[str]]) -> bytes:
        prefix, after = (asked.get(field, [""])[0] for field in ("prefix", "start-after"))
        entries = "".join(
            f"<Contents><Key>{quote(name)}</Key><Size>{(self._folder / name).stat().st_size}</Size><ETag>1</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in files_of(self._folder)
            if name.startswith(prefix) and name > after
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
