"""What `rl launch` writes files for: a run, its machines and how it is started again."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

from rl.errors import ConfigError
from rl.launch.machines import Machines

FAILING_CODES = (1, 2, 3, 4, 5, 6)
"""Exit codes of `rl-train` after which a new start would fail in the same way."""
RESTARTING_CODES = (75, 76)
"""Exit codes after which a new start continues the run: it was saved, or a process was lost."""
KILLED_CODES = (134, 135, 137, 139, 143)
"""128 and the signal that ended a process: SIGABRT, SIGBUS, SIGKILL, SIGSEGV, SIGTERM."""
PORT = 8476
"""Port of process 0, at which the others connect."""
RUN_FILE = "run.yml"
RUNS = "/runs"
"""Folder of runs in a container."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_VALUE = re.compile(
    r"(sk-|hf_|ghp_|github_pat_|xox[bap]-|AKIA)[\w-]{16,}|[0-9a-f]{32,}"
    r"|(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[\w-]{20,}"
)
"""Keys of well-known services, hashes, and long texts that mix letters of both cases and digits."""
LONGEST = 28
"""Longest job name: Kubernetes adds `-workers-0-0-...` and allows 63 characters."""


@dataclass(frozen=True)
class SecretNames:
    """The names that a store of secrets allows. characters: the same in words."""

    pattern: re.Pattern[str]
    characters: str


IN_KUBERNETES = SecretNames(
    re.compile(r"(?=.{1,63}$)[a-z0-9]([-.a-z0-9]*[a-z0-9])?"),
    "lower-case letters, digits, `-` and `.`",
)
IN_SECRET_MANAGER = SecretNames(re.compile(r"[-A-Za-z0-9_]{1,255}"), "letters, digits, `-` and `_`")
IN_ANY_STORE = SecretNames(
    re.compile(r"[-.A-Za-z0-9_]{1,255}"), "letters, digits, `-`, `_` and `.`"
)


@dataclass(frozen=True)
class Secret:
    """A variable of the process whose value is in a store of secrets. secret: its name there; None:
    that of the variable, or `duet-secrets` in Kubernetes. key: the entry in it, in Kubernetes."""

    variable: str
    secret: str | None
    key: str

    @classmethod
    def read(cls, text: str, names: SecretNames) -> Secret:
        """Parses VARIABLE, VARIABLE=SECRET or VARIABLE=SECRET:KEY. Raises ConfigError, which does
        not repeat the text after `=`: it may be a value."""
        variable, equals, rest = text.partition("=")
        secret, _, key = rest.partition(":")
        if not _VARIABLE.fullmatch(variable):
            raise ConfigError("--secret: give VARIABLE, VARIABLE=SECRET or VARIABLE=SECRET:KEY")
        is_name = names.pattern.fullmatch(secret) and not _VALUE.fullmatch(secret)
        if equals and not (is_name and (not key or _KEY.fullmatch(key))):
            raise ConfigError(
                f"--secret {variable}=...: this is no name of a secret ({names.characters}), or "
                "looks like a value. Give the name of the secret that holds the value, never the "
                "value; files would show it"
            )
        return cls(variable, secret or None, key or variable)

    @property
    def kubernetes(self) -> str:
        """Name of the Secret in Kubernetes."""
        return self.secret or "duet-secrets"


@dataclass(frozen=True)
class CloudNames:
    """Where the run goes: names of the cloud's own, None where the command asks for them.
    cpus_per_task, setup: cores of a host, and shell lines before the run, on SLURM."""

    project: str | None = None
    zone: str | None = None
    cluster: str | None = None
    namespace: str | None = None
    service_account: str | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    cpus_per_task: int | None = None
    setup: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capacity:
    """How the machines are paid for. spot: they may be taken away. reservation: its name."""

    spot: bool
    reservation: str | None


@dataclass(frozen=True)
class RestartLimits:
    """grace: seconds from the request to stop to the kill. max_restarts: starts after the first."""

    grace: int
    max_restarts: int


@dataclass(frozen=True)
class Packages:
    """What the image installs.

    wheel: what `pip wheel` takes to make the wheel. version: of the wheel. extras: of the wheel,
    besides those of the platform and the schemes. schemes: of the URLs that the run reads and
    writes, such as gs.
    """

    wheel: str
    version: str
    extras: tuple[str, ...] = ()
    schemes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Folders:
    """Absolute paths. working: where the command line was typed. output: of the files."""

    working: str
    output: str


@dataclass(frozen=True)
class ClusterJob:
    """A run to launch.

    name: of the job and of the folder of the run. bucket: remote folder of runs. image: of the
    container; None: none was named.
    """

    name: str
    machines: Machines
    bucket: str | None
    image: str | None
    secrets: tuple[Secret, ...]
    capacity: Capacity
    limits: RestartLimits
    packages: Packages
    folders: Folders
    places: CloudNames

    @property
    def tag(self) -> str:
        """The image, or a name that shows that none was given."""
        return self.image or f"duet-rl:{self.packages.version}-{self.machines.platform}"

    def train(self, runs: str = RUNS, file: str = RUN_FILE) -> list[str]:
        """Returns the command of a process, without the options that join processes.

        runs: folder of runs. file: the configuration.
        """
        command = ["rl-train", file, f"run.dir={runs}/{self.name}"]
        if self.bucket is not None:
            command.append(f"run.remote={self.remote}")
        return command

    def train_joined_by_jax(self) -> list[str]:
        """Returns the command of a process that finds the other hosts by itself, as on TPUs: a
        single host must not look for others."""
        return [*self.train(), *(["--processes", "1"] if self.machines.all_hosts == 1 else [])]

    @property
    def remote(self) -> str:
        return f"{self.bucket}/{self.name}"


@dataclass(frozen=True)
class Command:
    """A line of shell for the user to type, and what it is for."""

    purpose: str
    line: str


@dataclass(frozen=True)
class Launched:
    """What a kind makes of a job: files by their path in the folder, the commands to type in order,
    and remarks."""

    files: dict[str, str]
    commands: list[Command]
    remarks: list[str] = field(default_factory=list)


_PLAIN = re.compile(r"[\w./:@,+%-]+")


def plain_name(option: str, text: str | None) -> str | None:
    """Returns a name that files carry as it is. Raises ConfigError for one with blanks, quotes or
    other characters that no cloud has in names."""
    if text is not None and not _PLAIN.fullmatch(text):
        raise ConfigError(
            f"{option} {text!r}: use letters, digits and the characters - _ . / : @ , + %"
        )
    return text


def job_name(text: str | None, file: str) -> str:
    """Returns the name of a job: as asked for, or made of the name of the configuration file.
    Raises ConfigError for one that the clouds refuse."""
    if text is None:
        letters = unicodedata.normalize("NFKD", file).encode("ascii", "ignore").decode()
        slug = re.sub(r"[^a-z0-9]+", "-", letters.lower()).strip("-")
        slug = slug if slug[:1].isalpha() else f"run-{slug}"
        return slug[:LONGEST].rstrip("-")
    if not _NAME.fullmatch(text) or len(text) > LONGEST:
        raise ConfigError(
            f"--name {text}: use at most {LONGEST} lower-case letters, digits and `-`, the first a "
            "letter, the last no `-`"
        )
    return text


def bucket_name(text: str | None) -> str | None:
    """Returns the address of a remote folder without a last slash. Raises ConfigError."""
    if text is not None and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[\w./@-]+", text):
        raise ConfigError(f"--bucket {text}: give the address of a folder, as gs://BUCKET/FOLDER")
    return text and text.rstrip("/")
