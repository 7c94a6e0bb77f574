"""Check an AIStore cluster, and the HTTP proxies on the way to it.

The checks change nothing on the cluster. They ask for its health, its description, a dSort job that does not exist, and
a list of ETLs. (A build without dSort answers any question about jobs with an empty list; a build with dSort answers
that it does not know the job.)
"""

import email.utils
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dali_pipes.commands.checks.findings import Finding, Findings, counted, fail, ok, warn
from dali_pipes.errors import StoreError, printable
from dali_pipes.store.cluster.rights import refusal_advice
from dali_pipes.store.cluster.token import Token

# With a larger difference between the clocks, tokens and certificates are refused.
MAX_SKEW_S = 60.0
ANSWER_TIMEOUT_S = 5.0
# Not in the form of AIStore's own job ids, which are "srt-" and nine letters.
_NO_JOB = "srt-of-nobody"


def check_cluster(endpoint: str | None) -> Findings:
    """Check the cluster at ``endpoint``: its version, nodes, clock, dSort and ETL."""
    if endpoint is None:
        yield ok("endpoint", "none given: commands on buckets start an embedded node on this machine")
        return
    from dali_pipes.store.cluster.health import check_endpoint

    try:
        check_endpoint(endpoint)
    except (StoreError, ValueError) as exc:
        found, _, advice = str(exc).rpartition("; ")
        yield fail("endpoint", found or str(exc), advice if found else "")
        return
    status, described, date = _ask(endpoint, "daemon", {"what": "node_status"})
    version = str(described.get("ais_version", "")).rstrip(".") if isinstance(described, dict) else ""
    if status == 401:
        refusal = f"{endpoint} answers, but refuses the request: {_said(described)}"
        yield fail("endpoint", refusal, _token_advice(described))
        return
    if status == 403:
        what = "AIStore; the token is accepted, but lacks the right SHOW-CLUSTER, so version and nodes are not known"
    elif status == 200:
        what = f"AIStore {version or 'of unknown version'}"
    elif status in (400, 404, 501):
        what = "the embedded node, or a similar server"
    else:
        what = f"is healthy, but does not describe itself ({status or 'no answer'})"
    yield ok("endpoint", f"{endpoint}: {what}{_nodes(endpoint)}")
    yield from _check_skew(date)
    yield _check_dsort(endpoint, version)
    yield _check_etl(endpoint)


def check_proxies(endpoint: str | None, environment: Mapping[str, str]) -> Findings:
    """Check the proxies that the environment names, and whether requests to the cluster go through one."""
    from requests.utils import should_bypass_proxies

    from dali_pipes.store.messages import is_loopback

    variables = ("http_proxy", "https_proxy", "all_proxy")
    named = {name: value for name, value in environment.items() if name.lower() in variables and value}
    if not named:
        return
    shown = ", ".join(f"{name}={_without_password(value)}" for name, value in sorted(named.items()))
    local = [name for name, value in named.items() if is_loopback(value if "://" in value else f"http://{value}")]
    if endpoint is None:
        if local:
            advice = "requests to other machines go through it; to reach their hosts directly, name them in NO_PROXY"
            yield warn("proxy", f"{shown}: on this machine's loopback", advice)
        else:
            yield ok("proxy", shown)
        return
    scheme, host = urlsplit(endpoint).scheme, urlsplit(endpoint).hostname or ""
    excepted = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    applies = any(name.lower() in (f"{scheme}_proxy", "all_proxy") for name in named)
    if not applies or is_loopback(endpoint) or should_bypass_proxies(endpoint, excepted):
        yield ok("proxy", f"{shown}: not used for {host}")
        return
    where = "a proxy on this machine's own loopback, which other machines and containers lack" if local else "a proxy"
    yield warn("proxy", f"{shown}: requests to {host} go through {where}", f"reach it directly: NO_PROXY={host}")


def _token_advice(answer: object) -> str:
    token = Token.from_environment()
    return refusal_advice(401, _said(answer), method="GET", url="", token=token).removeprefix("; ")


def _said(answer: object) -> str:
    return printable(str(answer.get("message", "") if isinstance(answer, dict) else answer), max_chars=80)


def _nodes(endpoint: str) -> str:
    status, answer, _ = _ask(endpoint, "daemon", {"what": "smap"})
    if status != 200 or not isinstance(answer, dict):
        return ""
    proxies, targets = (len(answer.get(which) or {}) for which in ("pmap", "tmap"))
    return f", {proxies} {'proxy' if proxies == 1 else 'proxies'}, {counted(targets, 'target')}"


def _check_skew(date: str) -> Findings:
    try:
        skew = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return
    if abs(skew) > MAX_SKEW_S:
        found = f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the cluster's"
        yield warn("clock", found, "set both by NTP: tokens and certificates expire")


def _check_dsort(endpoint: str, version: str) -> Finding:
    status, answer, _ = _ask(endpoint, "sort", {"uuid": _NO_JOB})
    advice = "dali-pipes prep shuffle can shuffle without it (--engine exchange)"
    if status == 404 and "does not exist" in str(answer):
        if version.startswith("5.0"):
            found = "available, but cannot start a job in AIStore 5.0 (400, 'stats.NodeStatus.Status')"
            return warn("dSort", found, f"{advice}; or use AIStore 4.9")
        return ok("dSort", "available")
    if status == 403:
        return warn("dSort", "the token lacks the right ADMIN, which dSort takes", advice)
    is_stub = status == 200 and answer == []
    is_missing = is_stub or status in (404, 501)
    return warn("dSort", "not built in (the tag 'dsort')" if is_missing else f"{status}: {_said(answer)}", advice)


def _check_etl(endpoint: str) -> Finding:
    status, answer, _ = _ask(endpoint, "etl", {})
    if status == 200:
        return ok("ETL", "available")
    text = _said(answer)
    reason = "it needs Kubernetes" if "ubernetes" in text else text or str(status)
    if status == 403:
        reason = "the token lacks the right ADMIN"
    # Not a warning: only one command needs ETLs.
    return ok("ETL", f"not available ({reason}); only prep etl needs it; prep transform does the same from here")


def _ask(endpoint: str, path: str, params: Mapping[str, str]) -> tuple[int, Any, str]:
    """Ask for status, answer (parsed JSON, or the start of its text) and the server's time; status 0: no answer."""
    import requests

    from dali_pipes.store.cluster.client import ais_client

    client = ais_client(endpoint).cluster().client
    url = f"{endpoint.rstrip('/')}/v1/{path}"
    try:
        session = client.session_manager.session
        answer = session.get(url, params=dict(params), timeout=ANSWER_TIMEOUT_S)
    except requests.RequestException as exc:
        return 0, " ".join(str(exc).split()), ""
    try:
        content = answer.json()
    except ValueError:
        content = answer.text[:200]
    return answer.status_code, content, answer.headers.get("Date", "")


def _without_password(proxy: str) -> str:
    head, mark, rest = proxy.rpartition("://")
    return f"{head}{mark}{rest.rpartition('@')[2]}"
