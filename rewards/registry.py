"""Finds reward functions by name, module, file or entry point, and checks them before a run starts.

Four forms of a specification (`spec`):

- `exact_answer`: a name registered with `@reward`, a built-in (a file of this folder), or an installed entry point of
  the group `duet.rewards`; looked up in this order;
- `package.module:function`: imported; the current folder is looked at after `sys.path`;
- `path/to/file.py:function`: loaded from that file, relative to the current folder; the file's own folder is looked at
  after `sys.path`, so that it can import its neighbours. `function` may also be a name that the file registers.

Imports the standard library only: worker processes import this file each time they start.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rewards.suggest import nearest

RewardFunction = Callable[..., "list[float | None]"]

ENTRY_POINTS = "duet.rewards"
TEXTS = ("prompts", "completions")
GIVEN = ("completion_lengths", "truncated", "max_new_tokens", "reward_model_scores")
JUDGED = "reward_model"  # the reward that is the score of a model
_FOLDER = Path(__file__).resolve().parent
_FILE_MODULES = "duet_reward_file_"
_loading = (
    threading.RLock()
)  # of files: who comes second waits until the first has run all of it; a file may load another


class RewardError(ValueError):
    """A reward that cannot be used: unknown, not importable, wrong options, or data that it cannot take."""


class RewardFailed(RewardError):
    """A reward that faulted on a sample while `on_error` is "stop"; the message holds the traceback."""


@dataclass(frozen=True)
class Hooks:
    """What a reward may bring along: `check(**options)` raises ValueError before the run, `prepare()` is called once in
    each worker process before the first call, outside the deadline of a call."""

    check: Callable[..., None] | None = None
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True)
class Located:
    """A reward that was found: the function, the spec under which any process finds it, a short name for metrics."""

    function: RewardFunction
    address: str
    name: str


@dataclass(frozen=True)
class Parameters:
    """Arguments of a reward: `names` all that it names, `required` those without a default other than prompts and
    completions, `open` if it takes any (**kwargs)."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool

    def takes(self, name: str) -> bool:
        return self.open or name in self.names


_registered: dict[str, RewardFunction] = {}


def reward(name: str | RewardFunction | None = None, *, check=None, prepare=None):
    """Registers a reward function under a name, by default its own: `@reward`, `@reward("name")`.

    `check(**options)` is called before a run with the options of the configuration and may raise ValueError;
    `prepare()` is called once in each worker, where slow imports and model loading belong.
    Raises RewardError if the name belongs to another function already.
    """
    if callable(name):
        return _register(name, name.__name__, Hooks())
    return lambda function: _register(function, name or function.__name__, Hooks(check, prepare))


def _register(function: RewardFunction, name: str, hooks: Hooks) -> RewardFunction:
    if not re.fullmatch(r"[\w.-]+", name):
        raise RewardError(f"reward name {name!r}: use letters, digits, `_`, `-` and `.` only")
    file = _source(function)
    other = _source(_registered[name]) if name in _registered else _builtins().get(name, file)
    again = name not in _registered or _registered[name].__qualname__ == function.__qualname__
    if other != file or not again:  # the same file may be loaded twice, as a module and by its path
        raise RewardError(f"reward name {name!r} of {file} is taken by {other}; give another one: @reward('name')")
    function.__duet_hooks__ = hooks
    _registered[name] = function
    return function


def known() -> list[str]:
    """Names that `load` accepts without a module or file, sorted: registered, built-in and installed ones."""
    return sorted({*_registered, *_builtins(), *_entry_points()})


def load(spec: str) -> RewardFunction:
    """The function that `spec` names (see the top of this file). Raises RewardError, which says what was looked for."""
    return locate(spec).function


def locate(spec: str) -> Located:
    """As `load`, with the address under which a worker process finds the same function."""
    if not isinstance(spec, str) or not spec.strip():
        raise RewardError(f"a reward is named by text such as 'exact_answer' or 'my_rewards.py:score', not {spec!r}")
    place, _, name = spec.rpartition(":")
    if not place:
        return _named(spec)
    if place.endswith(".py") or "/" in place or os.sep in place:
        path = Path(place).expanduser().resolve()
        return Located(_member(_from_file(path, spec), name, spec), f"{path}:{name}", name)
    return Located(_member(_from_module(place, spec), name, spec), spec, name)


def parameters(function: RewardFunction, spec: str) -> Parameters:
    """The arguments that `function` takes. Raises RewardError if it cannot be called with completions by keyword."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {spec}: its arguments cannot be read ({error}); wrap it in a def") from None
    keyword = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    found = Parameters(
        names=tuple(p.name for p in keyword),
        required=tuple(p.name for p in keyword if p.default is p.empty and p.name not in TEXTS),
        open=any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()),
    )
    hidden = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
    if hidden or not found.takes("completions"):
        raise RewardError(
            f"reward {spec}: its signature is {signature}; arguments are passed by name, so it must be "
            "`def f(prompts, completions, **columns)`, or name the columns that it uses"
        )
    return found


def check(spec: str, options: dict | None = None, columns: Iterable[str] | None = None) -> None:
    """Raises RewardError if `spec` is not found or not importable, does not take `options`, or needs a column that is
    not among `columns` (names of the data's columns; None: not checked). Imports the user's file; calls nothing in it
    but the check that it registered itself."""
    options = dict(options or {})
    function = locate(spec).function
    takes = parameters(function, spec)
    reserved = {*TEXTS, *GIVEN}
    hints = _hints(function)
    for key, value in options.items():
        if key in reserved:
            raise RewardError(f"reward {spec}: {key!r} is given by the run and cannot be an option")
        if not takes.takes(key):
            choices = [name for name in takes.names if name not in reserved]
            raise RewardError(f"reward {spec}: it has no option {key!r}{nearest(key, choices)}")
        if key in hints and not _fits(value, hints[key]):
            expected = getattr(hints[key], "__name__", hints[key])
            raise RewardError(f"reward {spec}: option {key!r} is {value!r}, expected {expected}")
    if columns is not None:
        require_columns(spec, takes, options, {*columns, *GIVEN})
    hook = getattr(function, "__duet_hooks__", Hooks()).check
    if hook is not None:
        try:
            hook(**options)
        except ValueError as error:
            raise RewardError(f"reward {spec}: {error}") from error


def require_columns(spec: str, takes: Parameters, options: Iterable[str], columns: Iterable[str]) -> None:
    """Raises RewardError if a required argument is neither an option nor among the columns."""
    columns = sorted(columns)
    missing = [name for name in takes.required if name not in {*options, *columns}]
    if missing:
        raise RewardError(
            f"reward {spec}: it needs {', '.join(map(repr, missing))}, which is neither a column of the data "
            f"(columns: {', '.join(columns) or 'none'}) nor set under `options`"
        )


def prepare(function: RewardFunction) -> None:
    """Runs what the reward registered with `@reward(prepare=...)`, in the worker."""
    hook = getattr(function, "__duet_hooks__", Hooks()).prepare
    if hook is not None:
        hook()


def _named(name: str) -> Located:
    if name in _registered:
        return Located(_registered[name], _address(_registered[name], name), name)
    if name in _builtins():
        importlib.import_module(f"rewards.{name}")
        return Located(_registered[name], name, name)
    entry_points = _entry_points()
    if name in entry_points:
        entry = entry_points[name]
        function = _guarded(entry.load, f"{name} (entry point {entry.value})", None)
        return Located(_callable(function, name), name, name)
    if name.endswith(".py") or "/" in name:
        raise RewardError(f"reward {name}: say which function of the file: {name}:function")
    raise RewardError(f"unknown reward {name!r}{nearest(name, known())}. A function of your own: file.py:function")


def _builtins() -> dict[str, str]:
    """Name -> file of the built-in rewards: files of this folder with a function of their own name under @reward."""
    found = {}
    for path in sorted(_FOLDER.glob("*.py")):
        pattern = rf"^@reward\b.*\n(?:async )?def {re.escape(path.stem)}\("
        if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE):
            found[path.stem] = str(path)
    return found


def _entry_points() -> dict:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _address(function: RewardFunction, name: str) -> str:
    """How another process finds a function that was registered here by the decorator."""
    module = function.__module__
    importable = module != "__main__" and not module.startswith(_FILE_MODULES)
    if importable and getattr(sys.modules.get(module), "__spec__", None) is not None:
        return f"{module}:{name}"
    file = _source(function)
    if not os.path.isfile(file):
        raise RewardError(
            f"reward {name!r} was defined in {file}, which is no file; put it in one, so that worker processes can import it"
        )
    return f"{file}:{name}"


def _source(function: RewardFunction) -> str:
    file = getattr(inspect.unwrap(function), "__code__", None)
    return os.path.realpath(file.co_filename) if file and os.path.exists(file.co_filename) else function.__module__


def _from_module(module: str, spec: str) -> types.ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return _guarded(lambda: importlib.import_module(module), spec, None)


def _from_file(path: Path, spec: str) -> types.ModuleType:
    """The module of a file, loaded once per process under a name of its own, so that it shadows no other module."""
    import hashlib

    if not path.is_file():
        raise RewardError(f"reward {spec}: there is no file {path}")
    name = f"{_FILE_MODULES}{hashlib.sha1(str(path).encode()).hexdigest()[:12]}"
    with _loading:
        if name in sys.modules:
            return sys.modules[name]
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        description = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(description)
        sys.modules[name] = module
        try:
            _guarded(lambda: description.loader.exec_module(module), spec, str(path))
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _guarded(importing: Callable, spec: str, file: str | None):
    """Runs an import of the user's code; whatever it raises, SystemExit included, becomes a RewardError."""
    try:
        return importing()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" (line {lines[-1]} of {file})" if lines else ""
        raise RewardError(f"reward {spec}: importing it failed: {last}{where}") from error


def _member(module: types.ModuleType, name: str, spec: str) -> RewardFunction:
    if hasattr(module, name):
        return _callable(getattr(module, name), spec)
    here = {key: f for key, f in _registered.items() if f.__module__ == module.__name__}
    if name in here:
        return here[name]
    own = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise RewardError(f"reward {spec}: no function {name!r} there{nearest(name, {*own, *here})}")


def _callable(value: object, spec: str) -> RewardFunction:
    if not callable(value) or inspect.isclass(value):
        raise RewardError(f"reward {spec}: is a {type(value).__name__}, not a function")
    return value


def _hints(function: RewardFunction) -> dict:
    try:
        return typing.get_type_hints(function)
    except Exception:  # annotations are the user's and may name what is not importable; they are a help, not a duty
        return {}


def _fits(value: object, hint: object) -> bool:
    """Whether a value from YAML has the annotated type; of annotations, plain types and unions of them are judged."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    arms = typing.get_args(hint) if union else (hint,)
    plain = (bool, int, float, str, type(None))
    if any(arm not in plain for arm in arms):
        return True
    if isinstance(value, bool):
        return bool in arms
    return isinstance(value, tuple(arms)) or (isinstance(value, int) and float in arms)
