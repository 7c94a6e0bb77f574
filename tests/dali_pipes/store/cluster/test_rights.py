from pathlib import Path

import pytest

from dali_pipes.store.cluster.token import Token, refusal_advice, right_for


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "objects/pets/a/b.tar?provider=ais", "GET"),
        ("HEAD", "objects/pets/x.tar", "HEAD-OBJECT"),
        ("PUT", "objects/pets/v1/x.tar", "PUT"),  # a name may look like the path's head
        ("DELETE", "objects/pets/x.tar", "DELETE-OBJECT"),
        ("GET", "buckets/pets?provider=ais", "LIST-OBJECTS"),
        ("GET", "buckets", "LIST-BUCKETS"),
        ("HEAD", "buckets/pets", "HEAD-BUCKET"),
        ("POST", "buckets/pets", "CREATE-BUCKET"),
        ("POST", "sort", "ADMIN"),
        ("GET", "daemon?what=smap", "SHOW-CLUSTER"),
        ("PATCH", "objects/pets/x.tar", None),
    ],
)
def test_right_for_request(method: str, path: str, expected: str | None) -> None:
    """AIStore's names, as its 4.9 with AuthN asked for them."""
    assert right_for(method, f"http://ais:51080/v1/{path}") == expected


OBJECT = "http://ais:51080/v1/objects/pets/x.tar"


@pytest.mark.parametrize(
    ("status", "text", "token", "method", "url", "expected"),
    [
        (404, "no such object", None, "GET", OBJECT, ""),
        (401, "401 token required", None, "GET", OBJECT, "; log in (ais auth login), or set AIS_AUTHN_TOKEN_FILE"),
        (401, "401 token expired", Token("t"), "GET", OBJECT, "; the token in AIS_AUTHN_TOKEN has expired: get a new"),
        (401, "401 token expired", Token(file=Path("/t")), "GET", OBJECT, "in the file '/t' has expired"),
        (401, "401 invalid token", Token("t"), "GET", OBJECT, "is not valid for this cluster"),
        (403, "403 denied", Token("t"), "GET", OBJECT, "lacks the right GET; ask the cluster's administrator"),
        (403, "403 denied", None, "PUT", OBJECT, "the request has no token: it needs PUT"),
        (403, "403 denied", Token("t"), "POST", "http://ais:51080/v1/sort", "lacks the right ADMIN"),
        (403, "403 denied", Token("t"), "POST", "http://ais:51080/v1/sort", "--engine exchange"),
        (403, "403 this embedded node answers only processes of its own user", None, "GET", OBJECT, ""),
        (403, "403 denied", Token("t"), "PATCH", OBJECT, "the token in AIS_AUTHN_TOKEN lacks a right"),
    ],
)
def test_refusal_advice(status: int, text: str, token: Token | None, method: str, url: str, expected: str) -> None:
    advice = refusal_advice(status, text, method=method, url=url, token=token)
    assert expected in advice
    assert bool(advice) is bool(expected)
    assert bool(advice) == bool(expected)
