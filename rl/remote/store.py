"""The objects below a URL: written completely, checked, and tried again after faults that pass."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.errors import ResourceError, disk_room
from rl.remote.faults import DamagedCopy, Retries
from rl.remote.urls import joined, place_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_RENAMING = {"file", "local", "sftp", "ssh", "smb", "hdfs", "arrow_hdfs", "webhdfs", "ftp"}
"""Schemes of file systems that have folders, and show a file while it is being written. Elsewhere
an object appears when it is complete."""
_FLAT = {"gs", "gcs", "s3", "s3a", "abfs", "abfss", "az", "oci", "oss", "memory"}
"""Schemes of services that list all objects below a name at once."""
_GENERATIONS = {"gs", "gcs"}
_PART = ".duet-part-"
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_THREADS = 8
_TAGS = ("etag", "ETag", "generation", "md5Hash", "content_md5", "checksum", "LastModified")
_TIMES = ("mtime", "updated", "last_modified", "modified", "created")


@dataclass(frozen=True)
class ObjectFacts:
    """Size of an object, and what changes when it is written again; "" where the file system says
    nothing."""

    size: int
    tag: str


@dataclass(frozen=True)
class Versioned:
    """The content of an object, and the version that a conditional write compares: its generation,
    or a hash of its content."""

    data: bytes
    version: str


class Store:
    """The objects below a URL, by their names relative to it. May be used by several threads.

    Every method raises RemoteError, with the name of the object, after the last try.
    """

    def __init__(
        self, url: str, retries: Retries = Retries(), made: AbstractFileSystem | None = None
    ):
        """made: the file system; None: that of the URL. Raises ConfigError for a URL that cannot be
        used."""
        self.url = url.rstrip("/")
        place = place_of(url)
        self._root = place.path
        self._files: Any = place.files if made is None else made
        self._retries = retries
        protocol = self._files.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_local = "file" in names
        self._renames = bool(names & _RENAMING)
        self._lists_flat = bool(names & _FLAT)
        self.has_generations = bool(names & _GENERATIONS)

    def put(self, file: Path, name: str) -> None:
        """Writes a local file to an object, and compares the size that arrived. The object is the
        old or the new one at any time."""

        def act() -> None:
            size = file.stat().st_size
            self._write(name, lambda path: self._files.put_file(str(file), path), size)

        self._call("writing", name, act)

    def write(self, name: str, data: bytes) -> None:
        """Writes an object, as `put`."""

        def act() -> None:
            self._write(name, lambda path: self._files.pipe_file(path, data), len(data))

        self._call("writing", name, act)

    def read(self, name: str) -> bytes:
        """Returns the content of an object. Raises FileNotFoundError."""
        return self._call("reading", name, lambda: self._files.cat_file(self._path(name)))

    def get(self, name: str, file: Path, progress: Callable[[int], object] | None = None) -> None:
        """Writes an object to a local file. progress: gets the bytes that have arrived so far.
        Raises FileNotFoundError, and ResourceError if the local disk is full."""

        def act() -> None:
            callback = {} if progress is None else {"callback": _callback(progress)}
            size = _facts(self._info(self._path(name))).size
            try:
                self._files.get_file(self._path(name), str(file), **callback)
            except OSError as error:
                if error.errno not in _OF_DISK:
                    raise
                room = disk_room(file.parent, size)
                raise ResourceError(
                    f"{file} cannot be written: {error.strerror} ({room})"
                ) from None
            if (arrived := file.stat().st_size) != size:
                raise DamagedCopy(f"{arrived} of {size} bytes arrived")

        file.parent.mkdir(parents=True, exist_ok=True)
        self._call("reading", name, act)

    def facts(self, name: str) -> ObjectFacts | None:
        """Returns what is known of an object; None if there is none."""

        def act() -> ObjectFacts:
            return _facts(self._info(self._path(name)))

        try:
            return self._call("looking at", name, act)
        except FileNotFoundError:
            return None

    def is_file(self, name: str = "") -> bool:
        """Tells whether there is an object of this name, or at the URL itself."""
        try:
            info = self._call("looking at", name, lambda: self._info(self._path(name)))
        except FileNotFoundError:
            return False
        return info["type"] == "file"

    def list(self, folder: str = "") -> dict[str, ObjectFacts]:
        """Returns all objects below a folder, by name; none if the folder does not exist. Parts of
        writes that were cut off are left out."""

        try:
            listed = self._call("listing", folder, lambda: self._listed(self._path(folder)))
        except FileNotFoundError:
            return {}
        prefix = f"{self._root}/".lstrip("/")
        return {
            name.lstrip("/").removeprefix(prefix): _facts(info)
            for name, info in listed.items()
            if info["type"] == "file" and _PART not in name and not name.endswith("/")
        }

    def remove_parts(self) -> None:
        """Removes what writes that were cut off have left. Nobody else may be writing."""
        if not self._renames:
            return
        try:
            listed = self._call("listing", "", lambda: self._listed(self._root))
        except FileNotFoundError:
            return
        prefix = f"{self._root}/"
        self.delete_all(name.removeprefix(prefix) for name in listed if _PART in name)

    def delete(self, name: str) -> None:
        """Removes an object, if there is one."""
        try:
            self._call("removing", name, lambda: self._files.rm_file(self._path(name)))
        except FileNotFoundError:
            return

    def delete_all(self, names: Iterable[str]) -> None:
        """Removes objects, several at a time."""
        self.for_each(self.delete, names)

    def copy(self, source: str, target: str) -> None:
        """Copies an object to another name, within the service where it can do so."""

        def act() -> None:
            self._make_parent(target)
            self._files.cp_file(self._path(source), self._path(target))

        self._call("copying", source, act)

    def for_each(self, act: Callable[[Any], None], values: Iterable[Any]) -> None:
        """Calls `act` with each value in a few threads. Raises the first error, once the calls that
        have begun have ended; the others are left out. Ctrl-C does not wait for them, and neither
        does the end of the process."""
        left = list(reversed(list(values)))
        errors: list[BaseException] = []

        def work() -> None:
            while not errors:
                try:
                    value = left.pop()
                except IndexError:
                    return
                try:
                    act(value)
                except BaseException as error:
                    errors.append(error)

        threads = [
            threading.Thread(target=work, name="remote", daemon=True)
            for _ in range(min(_THREADS, len(left)))
        ]
        try:
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        except BaseException as error:
            errors.append(error)
            raise
        if errors:
            raise errors[0]

    def read_versioned(self, name: str) -> Versioned | None:
        """Returns an object with its version; None if there is none."""

        def act() -> Versioned:
            path = self._path(name)
            if not self.has_generations:
                data = self._files.cat_file(path)
                return Versioned(data, hashlib.sha256(data).hexdigest())
            generation = str(self._info(path)["generation"])
            data = self._files.cat_file(path)
            if str(self._info(path)["generation"]) != generation:
                raise DamagedCopy("it was written while it was read")
            return Versioned(data, generation)

        try:
            return self._call("reading", name, act)
        except FileNotFoundError:
            return None

    def replace(self, name: str, data: bytes, version: str | None) -> bool:
        """Writes an object if it still has this version; None: if there is none. Returns whether it
        was written.

        Google Cloud Storage compares and writes at once. Elsewhere creating is exclusive where the
        file system can do that, and a version is compared before the write.
        """
        try:
            return self._call("writing", name, lambda: self._replace(name, data, version))
        except FileExistsError:
            return False

    def _replace(self, name: str, data: bytes, version: str | None) -> bool:
        path = self._path(name)
        if self.has_generations:
            return self._replace_generation(path, data, version or "0")
        if version is None:
            self._make_parent(name)
            if self._renames:
                with self._files.open(path, "xb") as file:
                    file.write(data)
            else:
                self._files.pipe_file(path, data, mode="create")
            return True
        try:
            present = self._files.cat_file(path)
        except FileNotFoundError:
            return False
        if hashlib.sha256(present).hexdigest() != version:
            return False
        self._write(name, lambda path: self._files.pipe_file(path, data), len(data))
        return True

    def _replace_generation(self, path: str, data: bytes, generation: str) -> bool:
        bucket, _, key = path.partition("/")
        location = f"{self._files._location}/upload/storage/v1/b/{{}}/o"
        try:
            self._files.call(
                "POST",
                location,
                bucket,
                uploadType="media",
                name=key,
                ifGenerationMatch=generation,
                data=data,
                headers={"Content-Type": "application/octet-stream"},
            )
        except Exception as error:
            if str(getattr(error, "code", "")) == "412":
                return False
            raise
        return True

    def _write(self, name: str, write: Callable[[str], object], size: int) -> None:
        path = self._path(name)
        target = f"{path}{_PART}{uuid.uuid4().hex[:8]}" if self._renames else path
        self._make_parent(name)
        try:
            write(target)
            arrived = _facts(self._info(target)).size
            if arrived != size:
                raise DamagedCopy(f"{arrived} of {size} bytes arrived")
            if target != path:
                self._rename(target, path)
        except Exception:
            if target != path:
                with contextlib.suppress(Exception):  # the first error tells more
                    self._files.rm_file(target)
            raise

    def _rename(self, source: str, target: str) -> None:
        if self._is_local:
            os.replace(source, target)
        else:
            self._files.mv(source, target)

    def _make_parent(self, name: str) -> None:
        if self._renames:
            parent = self._path(name).rpartition("/")[0]
            self._files.makedirs(parent, exist_ok=True)

    def _listed(self, path: str) -> dict[str, Any]:
        """Returns all files below a path. `find` and `walk` of file systems with folders leave out
        folders that they cannot read."""
        self._files.invalidate_cache()
        if self._lists_flat:
            return self._files.find(path, detail=True)
        result = {}
        folders = [path]
        try:
            while folders:
                folder = folders.pop()
                for info in self._files.ls(folder, detail=True):
                    name = info["name"].rstrip("/")
                    if info["type"] != "directory":
                        result[name] = info
                    elif name.strip("/") != folder.strip("/"):
                        folders.append(name)
        except FileNotFoundError:
            self._info(path)  # raises it again, if the folder itself is absent
            raise DamagedCopy("it changed while it was listed") from None
        return result

    def _info(self, path: str) -> Mapping[str, Any]:
        self._files.invalidate_cache()
        return self._files.info(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _call(self, verb: str, name: str, act: Callable[[], Any]) -> Any:
        return self._retries.call(f"{verb} {joined(self.url, name)}", act)


def _callback(tell: Callable[[int], object]) -> Any:
    """Returns what fsspec calls while it copies a file. tell: gets the bytes so far."""
    from fsspec.callbacks import Callback

    class Told(Callback):
        def call(self, hook_name: str | None = None, **kwargs: object) -> None:
            tell(int(self.value))

    return Told()


def _facts(info: Mapping[str, Any]) -> ObjectFacts:
    tag = next((str(info[key]) for key in (*_TAGS, *_TIMES) if info.get(key)), "")
    return ObjectFacts(int(info["size"] or 0), tag)
