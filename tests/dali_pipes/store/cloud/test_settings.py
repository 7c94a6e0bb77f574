"""A bucket's settings come from the cloud's own variables, travel with the store, and show no secret."""

import os
import pickle
import re
from collections.abc import Mapping

import pytest

from dali_pipes.errors import StoreError, printable
from dali_pipes.store.cloud.objects import Refusal, refused
from dali_pipes.store.cloud.settings import CloudSettings
from dali_pipes.store.urls import open_store

SECRET = "s3cret-of-this-test-of-settings"
SIGNATURE = "c2lnbmF0dXJlLW9mLXRoaXMtdGVzdA"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's own settings are."""
    ours = re.compile("(AWS|AZURE|GOOGLE|STORAGE)_|.*CA_BUNDLE$|SSL_CERT_")
    for name in filter(ours.match, list(os.environ)):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)


@pytest.mark.parametrize(
    ("scheme", "variables", "url"),
    [
        ("s3", {}, "https://s3.us-east-1.amazonaws.com/b/x"),
        ("s3", {"AWS_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/b/x"),
        ("s3", {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}, "https://b.s3.us-east-1.amazonaws.com/x"),
        ("s3", {"AWS_ENDPOINT_URL": "http://minio:9000/"}, "http://minio:9000/b/x"),
        ("s3", {"AWS_ENDPOINT_URL": "http://[::1]:9000"}, "http://[::1]:9000/b/x"),
        # The service's own variable comes before the general one, as in Amazon's programs.
        ("s3", {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://c"}, "http://c/b/x"),
        ("gs", {}, "https://storage.googleapis.com/b/x"),
        ("gs", {"STORAGE_EMULATOR_HOST": "127.0.0.1:4443"}, "http://127.0.0.1:4443/b/x"),
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": "me"}, "https://me.blob.core.windows.net/b/x"),
        ("az", {"AZURE_STORAGE_USE_EMULATOR": "true"}, "http://127.0.0.1:10000/devstoreaccount1/b/x"),
        ("az", {"AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint=http://a:1/me;AccountName=me"}, "http://a:1/me/b/x"),
        (
            "az",
            {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"},
            "http://127.0.0.1:10000/devstoreaccount1/b/x",
        ),
        ("https", {}, "https://b/x"),
    ],
)
def test_an_objects_url_follows_from_the_variables(
    scheme: str, variables: Mapping[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoints, regions and styles are those that the cloud's own variables name."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = CloudSettings.from_environment(scheme, "b")
    assert settings.plain_url("x") == url
    assert settings.plain_url("a b/ü#1.tar") == f"{url[:-1]}a%20b/%C3%BC%231.tar"


@pytest.mark.parametrize(
    ("scheme", "variable", "value", "found"),
    [
        ("s3", "AWS_ENDPOINT_URL", "127.0.0.1:9000", "127.0.0.1:9000"),
        ("s3", "AWS_ENDPOINT_URL_S3", "minio", "minio"),
        ("s3", "AWS_ENDPOINT", "http://", "http://"),
        ("gs", "GOOGLE_BASE_URL", "localhost:4443", "localhost:4443"),
        ("az", "AZURE_STORAGE_ENDPOINT", "me.blob.core.windows.net?sig=secret", "me.blob.core.windows.net"),
        ("s3", "AWS_ENDPOINT_URL", "user:secret@minio:9000", "minio:9000"),
    ],
)
def test_a_server_without_a_scheme_is_an_error_that_names_the_variable(
    scheme: str, variable: str, value: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any request: of such an address `obstore` panics."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=rf"{variable}.* must be an address .*, got '{re.escape(found)}'$") as failed:
        CloudSettings.from_environment(scheme, "b")
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [
        ("s3", "AWS_ENDPOINT_URL"),
        ("gs", "GOOGLE_BASE_URL"),
        ("gs", "STORAGE_EMULATOR_HOST"),
        ("az", "AZURE_STORAGE_ENDPOINT"),
    ],
)
def test_a_server_with_a_password_is_an_error_without_it(
    scheme: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://user:hunter2hunter2@127.0.0.1:9000")
    with pytest.raises(ValueError, match=r"must not hold a user name or a password") as failed:
        CloudSettings.from_environment(scheme, "pets")
    assert "hunter2" not in str(failed.value)


def test_a_text_that_may_be_a_secret_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A malformed connection string; the signature in a SAS token, which a server may repeat alone."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", SECRET)
    with pytest.raises(ValueError, match="AZURE_STORAGE_CONNECTION_STRING must be") as failed:
        CloudSettings.from_environment("az", "b")
    assert SECRET not in str(failed.value)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2024-11-04&sig={SIGNATURE}&se=2030")
    CloudSettings.from_environment("az", "b")
    assert SIGNATURE not in printable(f"signature {SIGNATURE} did not match")


def test_settings_travel_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that another process opens reaches the same server, whatever that process's variables are."""
    with monkeypatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        store, _ = open_store("s3://b/x-", endpoint=None)
        data = pickle.dumps((store, store.access()))
    other, access = pickle.loads(data)
    assert other.url == "s3://b"
    assert other.settings == store.settings  # type: ignore[attr-defined]
    assert access is other


def test_a_server_of_https_lists_and_writes_nothing() -> None:
    """The error says how shards are named instead."""
    store, name = open_store("https://example.org/data/x-", endpoint="direct")
    with pytest.raises(StoreError, match=r"lists nothing; name the shards \(NAME-\{000000..000009\}.tar\)"):
        store.list(name)
    for write in (lambda: store.write("x", b""), lambda: store.write_new("x", b"", by="me"), lambda: store.delete("x")):
        with pytest.raises(StoreError, match="writes nothing"):
            write()


def test_errors_of_settings_and_certificates_name_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "never-heard-of")
    with pytest.raises(StoreError, match=r"cannot open 's3://b': .*; check the variables that hold the settings of "):
        open_store("s3://b/x-", endpoint=None)[0].exists()
    monkeypatch.delenv("AWS_CONDITIONAL_PUT")
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/ca.pem")  # it comes before SSL_CERT_FILE
    with pytest.raises(
        StoreError, match=r"cannot read certificates from '/nowhere/ca.pem': No such file or directory; check AWS_CA"
    ):
        open_store("s3://b/x-", endpoint=None)[0].exists()


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (
            Refusal(301, "PermanentRedirect", "", "eu-west-1"),
            "the bucket is in another region: set AWS_REGION=eu-west-1",
        ),
        (Refusal(301, "PermanentRedirect", ""), "the bucket is in another region: set AWS_REGION to it"),
        (Refusal(400, "", ""), "400 ; credentials are looked for in this order: "),
        (Refusal(403, "AccessDenied", "no"), "403 AccessDenied: no; credentials are looked for in this order: "),
        (Refusal(400, "ExpiredToken", "old"), "400 ExpiredToken: old; credentials are looked for in this order: "),
        (Refusal(0, "", "Connection refused"), "is it the right address? set AWS_ENDPOINT_URL for a server"),
        (Refusal(404, "NoSuchKey", "gone"), "no object "),
    ],
)
def test_a_refusal_says_what_to_do(refusal: Refusal, text: str) -> None:
    settings = CloudSettings.from_environment("s3", "b")
    assert text in str(refused(settings, "s3://b/x", refusal))


def test_errors_of_tls_say_what_to_do() -> None:
    error = ValueError(
        "error sending request - connect\n\nDebug source:\n InvalidContentType\n InvalidCertificate(Expired)"
    )
    said = str(Refusal.of_error(error))
    assert "connect: the server does not speak TLS (its address begins with http://)" in said
    assert "its certificate cannot be trusted (Expired); set SSL_CERT_FILE to the file of the CA" in said
