"""Say what a failed TLS connection means, and which setting mends it."""

import ssl

_WANTS_CERTIFICATE = "if it wants a client's certificate, set AIS_CRT and AIS_CRT_KEY"


def tls_text(exc: BaseException, *, ca_variable: str = "AIS_CLIENT_CA") -> str | None:
    """The end of an error's text, after the server's name; ``None`` if the exception is not about certificates or TLS.

    ``ca_variable`` is the environment variable that names the certificates to trust.

    >>> exc = ssl.SSLCertVerificationError(1, "")
    >>> exc.verify_message = "self-signed certificate"
    >>> tls_text(exc).partition(";")[0]
    'shows a certificate that cannot be trusted (self-signed certificate)'
    """
    if isinstance(exc, ssl.SSLCertVerificationError):
        return (
            f"shows a certificate that cannot be trusted ({exc.verify_message}); "
            f"set {ca_variable} to the file of the CA that signed it"
        )
    if not isinstance(exc, ssl.SSLError) or isinstance(exc, ssl.SSLEOFError):
        return None
    reason = exc.reason or ""
    words = reason.replace("_", " ").lower()
    if reason == "NO_CERTIFICATE_OR_CRL_FOUND" or "PEM" in reason or "KEY_VALUES" in reason:  # a file on this side
        return (
            f"was not asked: a certificate or key cannot be read ({words}); check {ca_variable}, AIS_CRT, AIS_CRT_KEY"
        )
    if "ALERT" in reason or "CERTIFICATE" in reason:
        return f"refuses the TLS connection ({words}); {_WANTS_CERTIFICATE}"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return f"does not speak TLS ({words}); should the endpoint begin with http://?"
    return None


def cut_hint(exc: BaseException, url: str, *, has_certificate: bool) -> str:
    """The hint for a connection that a server cut, in brackets; empty if TLS cannot be the reason.

    A server that wants a client's certificate sends an alert, which may be lost with the connection.
    """
    is_cut = isinstance(exc, (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError)) and url.startswith("https:")
    return f" ({_WANTS_CERTIFICATE})" if is_cut and not has_certificate else ""
