"""Addresses of the web: what one must be before it is asked, who it belongs to, and how it may be shown."""

import re
from urllib.parse import urljoin, urlsplit

from memcalc.errors import HubError
from memcalc.sources.display_names import shown

Origin = tuple[str, str, int]

_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> Origin | None:
    """Scheme, host and port of an address of the web; None for what is none, or cannot be asked."""
    try:
        parts = urlsplit(url)
        port = parts.port
        url.encode()
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not parts.hostname or re.search(r"[\x00-\x20\x7f]", url):
        return None
    return parts.scheme, parts.hostname, _PORTS[parts.scheme] if port is None else port


def host_of(url: str) -> str:
    """Host and port for messages: never the login that an address may carry."""
    try:
        return shown(urlsplit(url).netloc.rpartition("@")[2]) or "the Hub"
    except ValueError:
        return "the Hub"


def without_login(address: str) -> str:
    """An address for messages: without the name and password in front of its host."""
    return re.sub(r"(?<=//)[^/?#]*@", "", address)


def checked_endpoint(address: str) -> str:
    """The Hub's address without a slash at the end.

    Raises:
        HubError: it is no address of the web.
    """
    plain = address.rstrip("/")
    if origin_of(plain) is None or "?" in plain or "#" in plain:
        raise HubError(
            f"{shown(without_login(address))} is no address of a Hub; set HF_ENDPOINT to one such as "
            "https://huggingface.co, or unset it."
        )
    return plain


def joined(url: str, location: str, what: str) -> str:
    """Where `location`, whole or relative, leads from `url`; `what` sent it.

    Raises:
        HubError: to nothing that can be asked.
    """
    try:
        target = urljoin(url, location)
    except ValueError:
        target = ""
    if origin_of(target) is None:
        raise HubError(f"{host_of(url)} sends {what} to {shown(without_login(location))}, which is no address.")
    return target
