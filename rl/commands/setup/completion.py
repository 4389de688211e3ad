"""`rl completion`: prints the script by which a shell completes the commands `rl` and `rl-train`.

shtab writes the completion of verbs and options. For files and `key=value`, the scripts call `rl
_complete`.
"""

from __future__ import annotations

import argparse
import re
from types import ModuleType

SUMMARY = "script by which a shell completes rl and rl-train"
DESCRIPTION = """\
Prints a script that completes verbs, options, files, keys of a configuration and their values. Load
it when the shell starts (docs/editors.md):

  bash   eval "$(rl completion bash)"                              in ~/.bashrc
  zsh    eval "$(rl completion zsh)"                               in ~/.zshrc, after compinit
  fish   rl completion fish > ~/.config/fish/completions/rl.fish   and the same in rl-train.fish
"""
SHELLS = ("bash", "zsh", "fish")

_CALL = {"bash": "_duet_config", "zsh": "_duet_config", "fish": "(_duet_config)"}
# What an argument is, by the name that the help gives it.
_KINDS = {
    "FILE": "file",
    "MODEL": "directory",
    "RUN": "directory",
    "DIR": "directory",
    "REWARD": "file",
}

_BASH = r"""
# Completes files, keys and values of a configuration. Bash cuts words at `=`, so a value goes
# without its key.
_duet_config() {
  local line="${COMP_LINE:0:COMP_POINT}" cut="" word candidate
  local -a words
  read -ra words <<< "$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  word="${words[${#words[@]}-1]}"
  [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && cut="${word%%=*}="
  rl _complete bash "${words[@]}" 2>/dev/null | while IFS=$'\t' read -r candidate _; do
    printf '%s\n' "${candidate#"$cut"}"
  done
}

# Adds no space after a candidate that goes on.
_duet_unfinished() {
  local candidate
  for candidate in "${COMPREPLY[@]}"; do
    case $candidate in
      *[./=]) compopt -o nospace +o filenames 2>/dev/null; return ;;
    esac
  done
}
_duet_rl() { _shtab_rl "$@"; _duet_unfinished; }
_duet_rl_train() { _shtab_duet_train "$@"; _duet_unfinished; }
complete -F _duet_rl rl
complete -F _duet_rl_train rl-train
"""

_ZSH = r"""
# Completes files, keys and values of a configuration.
_duet_config() {
  local line word
  local -a finished unfinished finished_texts unfinished_texts
  for line in "${(@f)$(rl _complete zsh "${(@)words[1,CURRENT-1]}" "$PREFIX" 2>/dev/null)}"; do
    word="${line%%$'\t'*}"
    [[ -n $word ]] || continue
    [[ $line == *$'\t'?* ]] && line="$word  -- ${line#*$'\t'}" || line="$word"
    if [[ $word == *[./=] ]]; then
      unfinished+=("$word"); unfinished_texts+=("$line")
    else
      finished+=("$word"); finished_texts+=("$line")
    fi
  done
  (( $#unfinished )) && compadd -S '' -l -d unfinished_texts -a unfinished
  (( $#finished )) && compadd -l -d finished_texts -a finished
  (( $#unfinished + $#finished ))
}

typeset -A opt_args

if [[ ${zsh_eval_context[-1]} == (eval|file) ]]; then
  compdef _shtab_rl rl
  compdef _shtab_duet_train rl-train
elif [[ $service == rl-train ]]; then  # a file of $fpath: the call is a completion
  _shtab_duet_train "$@"
else
  _shtab_rl "$@"
fi
"""

_FISH = r"""
# Completes files, keys and values of a configuration.
function _duet_config
  rl _complete fish (commandline -opc) (commandline -ct) 2>/dev/null
end
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the name of the shell."""
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    """Prints the script and returns the exit code."""
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    """Returns the script for a shell of SHELLS."""
    import shtab

    from rl.commands import cli

    parts = []
    # The prefix of functions: the default one of rl-train is also the one of the verb `train` of
    # rl.
    for parser, prefix in ((cli.parser(), "rl"), (cli.train_parser(), "duet_train")):
        _mark(parser, shtab)
        parts.append(shtab.complete(parser, shell, root_prefix=prefix))
    if shell == "bash":
        return "\n".join([*parts, _BASH])
    if shell == "fish":
        return "\n".join([_FISH, *parts])
    return "\n".join(
        [
            "#compdef rl rl-train",
            _without_start(parts[0], True),
            _without_start(parts[1], False),
            _ZSH,
        ]
    )


def _without_start(part: str, has_verbs: bool) -> str:
    """Returns the functions of a script for zsh, without the lines that register or call them.

    shtab completes only the first of several arguments (`(*)` excludes the others); `*` completes
    each of them.
    """
    functions = part.partition("\ntypeset -A opt_args\n")[0].replace(
        f"{part.splitlines()[0]}\n", "", 1
    )
    if not has_verbs:  # the default arguments are for verbs
        functions = functions.replace("_defaults_added=0", "_defaults_added=1")
    return re.sub(r'^( *)"\(\*\):', r'\1"*:', functions, flags=re.MULTILINE)


def _mark(parser: argparse.ArgumentParser, shtab: ModuleType) -> None:
    """Says what each argument of a parser is, and of its verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _mark(verb, shtab)
        elif action.choices is None and action.nargs != 0:
            name = str(action.metavar or action.dest).upper()
            if action.dest == "config" and "KEY=VALUE" in name:
                action.complete = _CALL  # pyright: ignore[reportAttributeAccessIssue]
            elif kind := _KINDS.get(name):
                call = {"file": shtab.FILE, "directory": shtab.DIRECTORY}[kind]
                action.complete = call  # pyright: ignore[reportAttributeAccessIssue]
