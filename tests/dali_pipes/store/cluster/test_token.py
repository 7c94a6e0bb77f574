import json
import pickle
from pathlib import Path

import pytest

from dali_pipes.errors import StoreError
from dali_pipes.store.cluster.access import ClusterAccess, Token
from dali_pipes.store.cluster.sessions import PatientSessions
from dali_pipes.store.patience import Patience
from tests.servers.scripted import Visit, scripted


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without a login, and an environment without tokens."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AIS_AUTHN_TOKEN", "AIS_AUTHN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_token_is_found_where_aistores_command_line_finds_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable with the token comes first, then the one with the file, then the file of the last login."""
    assert Token.from_environment() is None
    login = home / ".config/ais/cli/auth.token"
    login.parent.mkdir(parents=True)
    login.write_text(json.dumps({"token": "from-login"}))
    named = home / "named"
    named.write_text("from-file\n")
    steps = {"": "from-login", "AIS_AUTHN_TOKEN_FILE": "from-file", "AIS_AUTHN_TOKEN": "from-variable"}
    for name, expected in steps.items():
        if name:
            monkeypatch.setenv(name, str(named) if name.endswith("FILE") else "from-variable")
        token = Token.from_environment()
        assert token is not None
        assert token.current() == expected
    monkeypatch.setenv("AIS_AUTHN_TOKEN", "two words")
    with pytest.raises(StoreError, match="is AIS_AUTHN_TOKEN complete"):
        Token.from_environment()


def test_token_file_that_is_away_for_a_moment_keeps_its_token(tmp_path: Path) -> None:
    """A file may be absent or empty while it is being replaced. No repr shows the token."""
    file = tmp_path / "token"
    file.write_text("first")
    token = Token(file=file)
    token.current()
    file.unlink()
    assert token.current() == "first"
    file.write_text("")
    assert token.current() == "first"
    file.write_text('{"token": "second"}')
    assert token.current() == "second"
    assert pickle.loads(pickle.dumps(token)).current() == "second"
    shown = [token, Token("second"), ClusterAccess(endpoint="http://ais", token=token)]
    assert "second" not in "".join(map(repr, shown))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        ("", "holds no token"),
        ('{"tocken": "s3cret"}', 'JSON without a "token"'),
        ("s3cret\nInjected: header", "printable ASCII"),
        ("s3cr\u00e9t", "printable ASCII"),
        ('{"token":' + "[" * 100_000, 'JSON without a "token"'),
    ],
)
def test_token_file_that_cannot_be_used(tmp_path: Path, content: str | None, expected: str) -> None:
    """The error names the file and what is wrong with it, and does not repeat its content."""
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StoreError, match=expected) as raised:
        Token(file=file).current()
    assert str(file) in str(raised.value)
    assert "s3cr" not in str(raised.value)


def test_job_waits_for_the_next_token_in_its_file(tmp_path: Path) -> None:
    """The file is replaced a while after its token has expired; a token that never was accepted is refused at once."""
    file = tmp_path / "token"
    file.write_text("first")
    accepted = {"first"}
    refusals = []

    def answer(visit: Visit) -> None:
        token = visit.request.partition(b"Bearer ")[2].partition(b"\r\n")[0].decode()
        if token in accepted or b"/v1/health" in visit.request:
            visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            return
        refusals.append(token)
        if len(refusals) == 3:
            file.write_text("second!")
        text = f'{{"message": "invalid token [err: token expired]: {token}"}}'
        visit.send(f"HTTP/1.1 401 No\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    with scripted(answer) as server:
        token = Token(file=file)
        access = ClusterAccess(endpoint=server.endpoint, token=token)
        with PatientSessions(access, Patience(longest_pause_s=0.01)).session as session:
            accepted.clear()
            assert session.get(f"{server.endpoint}/v1/health").status_code == 200
            assert session.get(f"{server.endpoint}/v1/objects/b/o").status_code == 401
            assert refusals == ["first"]
            accepted.add("first")
            assert session.get(f"{server.endpoint}/v1/objects/b/o").status_code == 200
            accepted.clear()
            accepted.add("second!")
            assert session.get(f"{server.endpoint}/v1/objects/b/o").status_code == 200
    assert refusals == ["first"] * 3


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://ais:51080/v1/objects/b/o", "Bearer s3cret"),
        ("http://ais:51081/v1/objects/b/o", None),  # a target: the proxy's redirect is its warrant
        ("http://other:51080/", None),
        ("https://ais:51080/", None),
    ],
)
def test_token_goes_to_the_endpoint_only(url: str, expected: str | None) -> None:
    access = ClusterAccess(endpoint="http://ais:51080", token=Token("s3cret"))
    assert dict(access.headers_for(url)).get("Authorization") == expected
