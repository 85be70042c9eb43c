"""What the Hub's refusals mean to the person who asked, and what to do next.

Source: the Hub's `X-Error-Code` headers, as huggingface_hub reads them (utils/_http.py, hf_raise_for_status).
"""

from collections.abc import Mapping

from memcalc.errors import HubError
from memcalc.sources.display_names import shown


class Missing(HubError):
    """The repository is not there, or not for this account: worth looking whether it is something else."""


class NoRevision(HubError):
    """The repository is there, the revision is not."""


class NoEntry(HubError):
    """The revision is there, the file is not."""


class NoAccess(HubError):
    """The repository is there, and closed to this account."""


class Busy(HubError):
    """The Hub asks to come back later: 429 or 5xx. `wait` is in seconds, None when it does not say."""

    def __init__(self, message: str, wait: float | None) -> None:
        super().__init__(message)
        self.wait = wait


def refusal(
    status: int, headers: Mapping[str, str], repo_id: str, page: str, *, token: bool, file: bool = False
) -> HubError:
    """The error for an HTTP status of 400 or more.

    Args:
        status, headers: the answer's.
        repo_id, page: the repository, and the address of its page for people.
        token: whether a token was sent.
        file: whether a file was asked for, of a repository that is known to be there.
    """
    code, message = headers.get("x-error-code", ""), shown(headers.get("x-error-message", ""))
    name = shown(repo_id)
    if code == "GatedRepo":
        return NoAccess(_gated(name, page, token))
    if code == "RevisionNotFound":
        return NoRevision(f"{name} has no such revision")
    if code == "EntryNotFound" or (file and status == 404):
        return NoEntry(f"{name} lists a file that the Hub does not have; try again later.")
    if "invalid credentials" in message.lower():
        return NoAccess(
            "the Hub refuses the token; log in again with `huggingface-cli login`, or give a valid --token."
        )
    if "disabled" in message.lower():
        return NoAccess(f"access to {name} is disabled on the Hub ({message}).")
    if status in (401, 404) and not file:
        return Missing(f"the Hub has no model {name} that this account may see")
    if status in (401, 403):
        reason = f" ({message})" if message else ""
        return NoAccess(f"the Hub forbids access to {name}{reason}; check the rights of the token.")
    if status == 429 or status >= 500:
        return _busy(status, headers)
    return HubError(
        f"the Hub answered {status} for {name}{': ' + message if message else ''}; check the name and HF_ENDPOINT."
    )


def _gated(name: str, page: str, token: bool) -> str:
    if token:
        return f"{name} is gated and this account has no access yet; accept its terms at {page}, then run this again."
    return f"{name} is gated; accept its terms at {page}, then log in with `huggingface-cli login` or give --token."


def _busy(status: int, headers: Mapping[str, str]) -> Busy:
    text = headers.get("retry-after", "").strip()
    wait = float(text) if text.isascii() and text.isdecimal() and len(text) < 9 else None
    if status == 429:
        when = f"in {wait:,.0f} seconds" if wait is not None else "in a few minutes"
        return Busy(f"the Hub limits requests (429); try again {when}, or log in for a higher limit.", wait)
    return Busy(f"the Hub is out of order ({status}); try again in a few minutes.", wait)
