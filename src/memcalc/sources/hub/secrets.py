"""The access token: what one looks like, and how it is kept out of messages, reports and the cache."""

import re
from collections.abc import Mapping

from memcalc.errors import HubError

# What an HTTP header can carry without being written otherwise; the Hub's tokens are letters and digits behind "hf_".
_TOKEN = re.compile(r"[!-~]{1,4096}")

SHORTEST_HIDDEN = 6
"""Shorter tokens are no secrets, and hiding them would damage words that happen to hold them."""


class Token:
    """A token that is sent, and hidden wherever a server sends it back, as it is or escaped as in JSON.

    Raises:
        HubError: `text` cannot be a token.
    """

    def __init__(self, text: str) -> None:
        if not _TOKEN.fullmatch(text):
            raise HubError(
                "the access token holds characters that no token has; copy it again (--token, HF_TOKEN or the login's)."
            )
        self._text, self._bytes = text, text.encode()
        each = (f"(?:\\\\?{re.escape(c)}|\\\\u00(?i:{ord(c):02x}))" for c in text)
        pattern = "".join(each) if len(text) >= SHORTEST_HIDDEN else r"(?!)"
        self._in_text, self._in_bytes = re.compile(pattern), re.compile(pattern.encode())

    @property
    def header(self) -> str:
        """The value of the Authorization header."""
        return f"Bearer {self._text}"

    def hidden(self, data: bytes) -> bytes:
        """`data` with asterisks in place of the token; its length stays."""
        if self._bytes not in data and b"\\" not in data:  # which is quick to see
            return data
        return self._in_bytes.sub(lambda found: b"*" * len(found[0]), data)

    def hidden_in(self, headers: Mapping[str, str]) -> dict[str, str]:
        """An answer's headers, names in small letters, with asterisks in place of the token."""
        return {key.lower(): self._in_text.sub("***", value) for key, value in headers.items()}
