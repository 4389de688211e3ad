"""Names of remote files: `gs://bucket/folder`, and any other URL of fsspec. Imports no client of a
service."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewards.suggest import nearest
from rl.errors import ConfigError
from rl.remote.faults import shown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOGIN = re.compile(r"^\w[\w+.-]*://[^/\s@]*:(?!\d+/)[^\s@]*@")
_SIGNED = re.compile(r"\?.*(signature|sig|token|key|credential|password)=", re.IGNORECASE)
_EXTRAS = {"gcsfs": "duet-rl[gcs]"}
CREDENTIALS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "abfs": "AZURE_STORAGE_CONNECTION_STRING",
    "az": "AZURE_STORAGE_CONNECTION_STRING",
}
"""Where the client of a scheme finds its credentials."""


def scheme_of(text: str) -> str | None:
    """Returns `gs` of `gs://bucket/folder`; None for text that is no URL."""
    match = _URL.match(text)
    return None if match is None else match[1].lower()


def is_remote(text: str) -> bool:
    """Tells whether a text is a URL that fsspec reads. Names on the Hugging Face hub, `hf://`, are
    not among them: huggingface_hub reads those."""
    return scheme_of(text) not in (None, "hf")


def problem_of(url: str) -> str | None:
    """Returns what is wrong with a URL, with what to type, as far as it is known without a
    connection; None: nothing."""
    from fsspec.registry import known_implementations, registry

    scheme = scheme_of(url)
    if scheme is None:
        return f"{url} is no URL; write scheme://folder, such as gs://bucket/run"
    if _LOGIN.match(url):
        where = CREDENTIALS.get(scheme, "the environment, or a file of fsspec's configuration")
        return f"a URL with a password is refused, since it is printed and saved. Set {where}"
    if _SIGNED.search(url):
        return (
            "a URL with a signature or a token is refused, since it is printed and saved. Set "
            f"{CREDENTIALS.get(scheme, 'the credentials in the environment')}"
        )
    if not _URL.match(url)[2].strip("/"):  # pyright: ignore[reportOptionalSubscript]
        return f"{url} names no folder; write {scheme}://bucket/folder"
    if scheme in registry:
        return None
    known = known_implementations.get(scheme)
    if known is None:
        return f"{scheme}:// is no scheme that fsspec knows{nearest(scheme, list(known_implementations))}"
    module = known["class"].partition(".")[0]
    if module == "fsspec":
        return None
    if importlib.util.find_spec(module) is None:
        return f"{scheme}:// needs a package that is not installed: `{_install(module)}`"
    return None


@dataclass(frozen=True)
class RemotePath:
    """What a URL names: a path in a file system, which keeps no cache of listings."""

    files: AbstractFileSystem
    path: str


def place_of(url: str) -> RemotePath:
    """Returns the file system of a URL and the path in it.

    Raises ConfigError if the URL is wrong or its client is not installed or has no credentials.
    """
    import fsspec

    if (problem := problem_of(url)) is not None:
        raise ConfigError(problem)
    scheme = scheme_of(url)
    try:
        made = _made(fsspec.get_filesystem_class(scheme), url)
        path = made._strip_protocol(url)
    except ImportError as error:
        raise ConfigError(f"{url}: its client cannot be imported: {error}") from None
    except Exception as error:  # clients raise errors of their own, for missing credentials too
        hint = f" (credentials: {CREDENTIALS[scheme]})" if scheme in CREDENTIALS else ""
        raise ConfigError(f"{url}: {shown(error)}{hint}") from None
    return RemotePath(made, str(path).rstrip("/"))


def _made(kind: type[AbstractFileSystem], url: str) -> AbstractFileSystem:
    """Returns the client of a URL, which may name its host."""
    options = kind._get_kwargs_from_urls(url)
    try:
        return kind(**options, use_listings_cache=False)
    except TypeError:  # of a package that takes no further options
        return kind(**options)


def joined(url: str, name: str) -> str:
    """Returns the URL of a name below a URL."""
    return f"{url.rstrip('/')}/{name}" if name else url.rstrip("/")


def _install(module: str) -> str:
    package = _EXTRAS.get(module, module)
    return f"pip install '{package}'" if "[" in package else f"pip install {package}"
