"""Errors of remote file systems: which of them pass, and how often a call is tried again."""

from __future__ import annotations

import errno
import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rl.errors import ResourceError

_LOG = logging.getLogger("duet.remote")
_PERMANENT_TYPES = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
)
_PERMANENT_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_TRANSIENT_STATUS = (408, 425, 429)
_NAMES = r"\w*(?:key|secret|token|password|signature)\w*"
_SECRET = (
    (re.compile(r"(\w://)[^/\s@:'\"]*:[^\s@'\"]*@"), r"\1...@"),
    (re.compile(r"(\w://[^\s?'\"]*\?)[^\s'\"<>]+"), r"\1..."),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), r"\1 ..."),
    (re.compile(rf"(?i)\b({_NAMES}\s*=\s*)[^\s\"',;&)]+"), r"\1..."),
    (re.compile(rf"(?i)([\"']{_NAMES}[\"']\s*:\s*)[\"'][^\"']*[\"']"), r"\1..."),
)
"""What may be a credential in a message, and what is shown in its place."""
_QUIET_TRIES = 2
"""Tries after which a retry is shown: one that succeeds at once is nothing to look at."""

Result = TypeVar("Result")


class RemoteError(ResourceError):
    """A remote folder cannot be read or written. What is on the local disk is safe."""


class DamagedCopy(OSError):
    """What arrived has another size than what was sent."""


def is_transient(error: BaseException) -> bool:
    """Tells whether the same call may succeed later: faults of the network and of a busy service.

    Clients raise errors of their own, whose HTTP status is `code` or `status`. An unknown error
    counts as one that passes: it is tried a few times and then shown.
    """
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if str(status).isdecimal() and 400 <= (number := int(str(status))) < 600:
        return number >= 500 or number in _TRANSIENT_STATUS
    if getattr(error, "retryable", None) is False:  # errors of google.auth
        return False
    if isinstance(error, _PERMANENT_TYPES):
        return False
    return not (isinstance(error, OSError) and error.errno in _PERMANENT_NUMBERS)


@dataclass(frozen=True)
class Retries:
    """How often a call is tried, with waits of `first_s`, twice that, and so on up to `longest_s`
    seconds, each shortened at random by up to a half."""

    tries: int = 8
    first_s: float = 1.0
    longest_s: float = 30.0
    sleep: Callable[[float], object] = time.sleep

    def call(self, what: str, act: Callable[[], Result]) -> Result:
        """Returns the result of `act()`. what: names the call in messages, as "writing gs://b/x".

        Raises FileNotFoundError, FileExistsError and ResourceError as they are, RemoteError for any
        other error that does not pass, and for one that did not pass in all tries.
        """
        for number in range(1, self.tries + 1):
            try:
                return act()
            except (FileNotFoundError, FileExistsError, ResourceError):
                raise
            except Exception as error:
                if not is_transient(error):
                    raise RemoteError(f"{what}: {shown(error)}") from error
                if number == self.tries:
                    raise RemoteError(f"{what}: {shown(error)} (tried {number} times)") from error
                wait = min(self.first_s * 2 ** (number - 1), self.longest_s)
                wait *= random.uniform(0.5, 1.0)
                level = logging.WARNING if number > _QUIET_TRIES else logging.INFO
                _LOG.log(level, "%s: %s. Tried again in %.1f s", what, shown(error), wait)
                self.sleep(wait)
        raise AssertionError("unreachable")


def shown(error: BaseException) -> str:
    """Returns an error in one line, without what may be a credential: a login or the query of a
    URL, which clients put into their messages."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    text = without_credentials(text)
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def without_credentials(text: str) -> str:
    """Returns a text without the logins, queries and authorization headers in it."""
    for pattern, replacement in _SECRET:
        text = pattern.sub(replacement, text)
    return text
