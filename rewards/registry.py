"""Looks up reward functions by name, module, file or entry point, and checks them before a run
starts.

Forms of a specification (`spec`):

- `exact_answer`: a name registered with `@reward`, a built-in (a file of this folder or of benchmarks/), or an
  installed entry point of the group `duet.rewards`, looked up in this order;
- `package.module:function`: imported, with the current folder appended to `sys.path`;
- `path/to/file.py:function`: loaded from that file, relative to the current folder. It can import
  its neighbours, also if another file has neighbours of the same names
  (`rewards/files/neighbours.py`). `function` may also be a name that the file registers.

Imports the standard library only, because every worker process imports this file when it starts.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from rewards.files import neighbours
from rewards.suggest import nearest, nearest_path

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

RewardFunction = Callable[..., "Sequence[float | None]"]
T = TypeVar("T")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
AnswerOf = Callable[[str], "str | None"]
"""(text of a completion) -> what it answers, equal for equal answers; None: nothing."""

ENTRY_POINTS = "duet.rewards"
TEXTS = ("prompts", "completions")
GIVEN = ("completion_lengths", "truncated", "raw", "max_new_tokens", "reward_model_scores")
REWARD_MODEL = "reward_model"  # name of the reward that returns the score of a reward model
_FOLDER = Path(__file__).resolve().parent
_FILE_MODULES = "duet_reward_file_"
# Held while a file is loaded: other threads wait for the complete module. Reentrant, because a file
# may load another.
_loading = threading.RLock()


class RewardError(ValueError):
    """A reward cannot be used: unknown, not importable, wrong options, or data that it does not
    accept."""


class RewardFailed(RewardError):
    """A reward failed on a sample while `on_error` is "stop". The message holds the traceback."""


@dataclass(frozen=True)
class Hooks:
    """Optional functions of a reward.

    check: called with the options before the run; raises ValueError.
    prepare: called once in each worker process before the first call, outside the deadline of a
    call. answer: called with the text of a completion and the options; returns what it answers, for
    maj@k.
    """

    check: Callable[..., None] | None = None
    prepare: Callable[[], None] | None = None
    answer: Callable[..., str | None] | None = None


@dataclass(frozen=True)
class Located:
    """A reward function, the spec (`address`) by which any process loads it, and a short name for
    metrics."""

    function: RewardFunction
    address: str
    name: str


@dataclass(frozen=True)
class Parameters:
    """Arguments of a reward.

    names: all named arguments.
    required: the arguments without a default, except prompts and completions.
    open: whether it takes any further argument (**kwargs).
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool

    def accepts(self, name: str) -> bool:
        """Tells whether the reward accepts an argument of this name."""
        return self.open or name in self.names


_registered: dict[str, RewardFunction] = {}


@overload
def reward(name: AnyFunction) -> AnyFunction: ...


@overload
def reward(
    name: str | None = None,
    *,
    check: Callable[..., None] | None = None,
    prepare: Callable[[], None] | None = None,
    answer: Callable[..., str | None] | None = None,
) -> Callable[[AnyFunction], AnyFunction]: ...


def reward(
    name: str | Callable[..., Any] | None = None,
    *,
    check: Callable[..., None] | None = None,
    prepare: Callable[[], None] | None = None,
    answer: Callable[..., str | None] | None = None,
) -> Callable[..., Any]:
    """Registers a reward function under a name, by default its own: `@reward`, `@reward("name")`.

    `check(**options)` is called before a run with the options of the configuration and may raise
    ValueError. `prepare()` is called once in each worker; put slow imports and model loading there.
    `answer(completion, **options)` returns what a text answers, equal for equal answers, or None:
    maj@k counts these votes. Raises RewardError if the name belongs to another function.
    """
    if callable(name):
        return _register(name, name.__name__, Hooks())
    return lambda function: _register(
        function, name or function.__name__, Hooks(check, prepare, answer)
    )


def _register(function: AnyFunction, name: str, hooks: Hooks) -> AnyFunction:
    if not re.fullmatch(r"[\w.-]+", name):
        raise RewardError(f"reward name {name!r}: use letters, digits, `_`, `-` and `.` only")
    file = _source(function)
    other = _source(_registered[name]) if name in _registered else _builtins().get(name, file)
    again = name not in _registered or _registered[name].__qualname__ == function.__qualname__
    if other != file or not again:  # the same file may be loaded twice, as a module and by its path
        raise RewardError(
            f"reward name {name!r} of {file} is taken by {other}; give another one: @reward('name')"
        )
    function.__duet_hooks__ = hooks
    _registered[name] = function
    return function


def known() -> list[str]:
    """Returns the names that `load` accepts without a module or file, sorted: registered, built-in
    and installed."""
    return sorted({*_registered, *_builtins(), *_entry_points()})


def builtin_names() -> list[str]:
    """Returns the names of the rewards that this package has, sorted."""
    return sorted(_builtins())


def load(spec: str) -> RewardFunction:
    """Returns the function that `spec` names (forms: top of this file). Raises RewardError."""
    return locate(spec).function


def locate(spec: str) -> Located:
    """Returns the function that `spec` names, and the address by which a worker loads it. Raises
    RewardError."""
    if not isinstance(spec, str) or not spec.strip():
        raise RewardError(
            "a reward is named by text such as 'exact_answer' or 'my_rewards.py:score', not "
            f"{spec!r}"
        )
    place, _, name = spec.rpartition(":")
    if not place:
        return _named(spec)
    if place.endswith(".py") or "/" in place or os.sep in place:
        path = Path(place).expanduser().resolve()
        return Located(_member(_from_file(path, spec), name, spec), f"{path}:{name}", name)
    return Located(_member(_from_module(place, spec), name, spec), spec, name)


def parameters(function: RewardFunction, spec: str) -> Parameters:
    """Returns the arguments of `function`. Raises RewardError if it cannot be called with
    completions by keyword."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward {spec}: its arguments cannot be read ({error}); wrap it in a def"
        ) from None
    keyword = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    parameters = Parameters(
        names=tuple(p.name for p in keyword),
        required=tuple(p.name for p in keyword if p.default is p.empty and p.name not in TEXTS),
        open=any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()),
    )
    hidden = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
    if hidden or not parameters.accepts("completions"):
        raise RewardError(
            f"reward {spec}: its signature is {signature}; arguments are passed by name, so it "
            "must be `def f(prompts, completions, **columns)`, or name the columns that it uses"
        )
    return parameters


def check(spec: str, options: dict | None = None, columns: Iterable[str] | None = None) -> None:
    """Checks a reward before a run. Imports the user's file and calls nothing in it but its
    registered check.

    columns: names of the columns of the data; None: not checked.
    Raises RewardError if `spec` is unknown or cannot be imported, does not accept `options`, needs
    another column, or would receive a column with the name of a value that the run gives it
    (GIVEN).
    """
    options = dict(options or {})
    function = locate(spec).function
    accepted = parameters(function, spec)
    reserved = {*TEXTS, *GIVEN}
    hints = _hints(function)
    for key, value in options.items():
        if key in reserved:
            raise RewardError(f"reward {spec}: {key!r} is given by the run and cannot be an option")
        if not accepted.accepts(key):
            choices = [name for name in accepted.names if name not in reserved]
            raise RewardError(f"reward {spec}: it has no option {key!r}{nearest(key, choices)}")
        if key in hints and not _fits(value, hints[key]):
            expected = getattr(hints[key], "__name__", hints[key])
            raise RewardError(f"reward {spec}: option {key!r} is {value!r}, expected {expected}")
    if columns is not None:
        columns = set(columns)
        if taken := [name for name in GIVEN if name in columns and accepted.accepts(name)]:
            raise RewardError(
                f"reward {spec}: the data has a column {taken[0]!r}, but this argument is given "
                "by the run; rename the column in the data"
            )
        require_columns(spec, accepted, options, {*columns, *GIVEN})
    hook = getattr(function, "__duet_hooks__", Hooks()).check
    if hook is not None:
        activate(function)
        try:
            hook(**options)
        except ValueError as error:
            raise RewardError(f"reward {spec}: {error}") from error


def require_columns(
    spec: str, parameters: Parameters, options: Iterable[str], columns: Iterable[str]
) -> None:
    """Raises RewardError if a required argument is neither an option nor among the columns."""
    columns = {*columns}
    missing = [name for name in parameters.required if name not in {*options, *columns}]
    if missing:
        raise RewardError(
            f"reward {spec}: it needs {', '.join(map(repr, missing))}, which is neither a column "
            "of the data "
            f"(columns: {', '.join(sorted(columns - {*GIVEN})) or 'none'}) nor set under `options`"
        )


def prepare(function: RewardFunction) -> None:
    """Calls the function that the reward registered with `@reward(prepare=...)`, in the worker."""
    hook = getattr(function, "__duet_hooks__", Hooks()).prepare
    if hook is not None:
        activate(function)
        hook()


def answer_of(spec: str, options: dict[str, Any]) -> AnswerOf | None:
    """Returns what tells the answers of completions, as the reward with these options registered it
    with `@reward(answer=...)`; None: the reward tells none. Raises RewardError for an unknown
    reward. The result raises RewardError where the reward's function fails."""
    function = locate(spec).function
    hook = getattr(function, "__duet_hooks__", Hooks()).answer
    if hook is None:
        return None

    def answer(completion: str) -> str | None:
        activate(function)
        try:
            return hook(completion, **options)
        except Exception as error:  # anyone's code
            raise RewardError(
                f"reward {spec}: its `answer` failed: {type(error).__name__}: {error}"
            ) from error

    return answer


def activate(function: RewardFunction) -> None:
    """Lets a function of a file import its neighbours. Call it before the function."""
    if (file := loaded_files().get(getattr(function, "__module__", ""))) is not None:
        with _loading:
            neighbours.activate(str(Path(file).parent))


def loaded_files() -> dict[str, str]:
    """Returns the files that were loaded by their path, by the name of their module."""
    return {
        name: str(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(_FILE_MODULES)
    }


def _named(name: str) -> Located:
    if name in _registered:
        return Located(_registered[name], _address(_registered[name], name), name)
    if name in _builtins():
        parts = Path(_builtins()[name]).relative_to(_FOLDER).with_suffix("").parts
        importlib.import_module(".".join(("rewards", *parts)))
        return Located(_registered[name], name, name)
    entry_points = _entry_points()
    if name in entry_points:
        entry = entry_points[name]
        function = _guarded(entry.load, f"{name} (entry point {entry.value})", None)
        return Located(_callable(function, name), name, name)
    if name.endswith(".py") or "/" in name:
        raise RewardError(f"reward {name}: say which function of the file: {name}:function")
    raise RewardError(
        f"unknown reward {name!r}{nearest(name, known())}. A function of your own: file.py:function"
    )


def _builtins() -> dict[str, str]:
    """Returns name -> file of the built-in rewards: files of this folder, and of `benchmarks` in
    it, with a @reward function of their name."""
    files = {}
    for path in sorted([*_FOLDER.glob("*.py"), *(_FOLDER / "benchmarks").glob("*.py")]):
        pattern = rf"^@reward\b.*\n(?:async )?def {re.escape(path.stem)}\("
        if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE):
            files[path.stem] = str(path)
    return files


def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _address(function: RewardFunction, name: str) -> str:
    """Returns the spec by which another process loads a function that was registered in this
    one."""
    module = function.__module__
    importable = module != "__main__" and not module.startswith(_FILE_MODULES)
    if importable and getattr(sys.modules.get(module), "__spec__", None) is not None:
        return f"{module}:{name}"
    file = _source(function)
    if not os.path.isfile(file):
        raise RewardError(
            f"reward {name!r} was defined in {file}, which is not a file; "
            "put it in one, so that worker processes can import it"
        )
    return f"{file}:{name}"


def _source(function: RewardFunction) -> str:
    file = getattr(inspect.unwrap(function), "__code__", None)
    return (
        os.path.realpath(file.co_filename)
        if file and os.path.exists(file.co_filename)
        else function.__module__
    )


def _from_module(module: str, spec: str) -> types.ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return _guarded(lambda: importlib.import_module(module), spec, None)


def _from_file(path: Path, spec: str) -> types.ModuleType:
    """Loads the module of a file once per process, under a name of its own, so that it shadows no
    other module."""
    import hashlib

    if not path.is_file():
        raise RewardError(f"reward {spec}: there is no file {path}{nearest_path(path)}")
    name = f"{_FILE_MODULES}{hashlib.sha1(str(path).encode()).hexdigest()[:12]}"
    with _loading:
        neighbours.activate(str(path.parent))
        if name in sys.modules:
            return sys.modules[name]
        description = importlib.util.spec_from_file_location(name, path)
        assert (
            description is not None and description.loader is not None
        )  # it exists for every file that ends in .py
        run_module = description.loader.exec_module
        module = importlib.util.module_from_spec(description)
        sys.modules[name] = module
        try:
            _guarded(lambda: run_module(module), spec, str(path))
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _guarded(importing: Callable[[], T], spec: str, file: str | None) -> T:
    """Runs an import of the user's code. Turns any exception, also SystemExit, into a
    RewardError."""
    try:
        return importing()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == file
        ]
        where = f" (line {lines[-1]} of {file})" if lines else ""
        if isinstance(error, SyntaxError) and error.lineno:
            where = f" (line {error.lineno} of {error.filename})"
        raise RewardError(f"reward {spec}: importing it failed: {last}{where}") from error


def _member(module: types.ModuleType, name: str, spec: str) -> RewardFunction:
    if hasattr(module, name):
        return _callable(getattr(module, name), spec)
    here = {key: f for key, f in _registered.items() if f.__module__ == module.__name__}
    if name in here:
        return here[name]
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise RewardError(f"reward {spec}: no function {name!r} there{nearest(name, {*own, *here})}")


def _callable(value: object, spec: str) -> RewardFunction:
    if not callable(value) or inspect.isclass(value):
        raise RewardError(f"reward {spec}: is a {type(value).__name__}, not a function")
    return cast(RewardFunction, value)


def _hints(function: RewardFunction) -> dict:
    try:
        return typing.get_type_hints(function)
    except Exception:  # annotations are optional, and the user's may name what cannot be imported
        return {}


def _fits(value: object, hint: object) -> bool:
    """Tells whether a value from YAML has the annotated type. Checks plain types and unions of them
    only."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    arms: tuple[Any, ...] = typing.get_args(hint) if union else (hint,)
    plain = (bool, int, float, str, type(None))
    if any(arm not in plain for arm in arms):
        return True
    if isinstance(value, bool):
        return bool in arms
    return isinstance(value, tuple(arms)) or (isinstance(value, int) and float in arms)
