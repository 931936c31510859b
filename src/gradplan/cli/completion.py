"""`gradplan completion`: a script for the shell, made from the parser itself.

What the parser knows (commands, options, their choices, which of them take files) is written down
once for each shell; the script starts no Python when a key is pressed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from ..terminal import add_command, file_of, print_whole

__all__ = ["SHELLS", "add_parser", "script"]

Make = Callable[[], argparse.ArgumentParser]


def add_parser(commands: Any, make: Make) -> None:
    """Add `completion` to the commands; `make` gives the whole parser."""
    parser = add_command(
        commands,
        "completion",
        lambda options: _print(options, make),
        help="print a script that completes options in a shell",
        description="Print a script that completes commands, options and their values.",
        examples=[
            "source <(gradplan completion bash)        # in ~/.bashrc",
            "source <(gradplan completion zsh)         # in ~/.zshrc, behind compinit",
            "gradplan completion fish | source         # in ~/.config/fish/config.fish",
        ],
    )
    parser.add_argument("shell", choices=list(SHELLS), help="which shell")


def _print(options: argparse.Namespace, make: Make) -> int:
    print_whole(script(options.shell, make()).rstrip("\n"))
    return 0


@dataclass(frozen=True)
class _Option:
    """An option, or an argument without dashes, as a shell sees it."""

    flags: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    file: bool
    takes: bool
    several: bool


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, list[_Option]]]:
    """Each command with its help and options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            for name, command in action.choices.items():
                options = [_option(one) for one in command._actions]
                yield name, helps.get(name, ""), options


def _option(action: argparse.Action) -> _Option:
    return _Option(
        flags=tuple(action.option_strings),
        help=re.sub(r"\s+", " ", (action.help or "").replace("%%", "%")),
        choices=tuple(map(str, action.choices or ())),
        file=action.type in (Path, file_of),
        takes=action.nargs != 0,
        several=action.nargs in ("+", "*"),
    )


def _bash(parser: argparse.ArgumentParser) -> str:
    commands = list(_commands(parser))
    several = " ".join(
        f"{name},{flag}"
        for name, _, options in commands
        for option in options
        for flag in option.flags
        if option.several
    )
    files = 'mapfile -t COMPREPLY < <(compgen -f -- "$current"); return'
    lines = [
        "# bash completion for gradplan; made by `gradplan completion bash`",
        "_gradplan() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} command= option= words= k",
        "  COMPREPLY=()",
        "  for ((k = 1; k < COMP_CWORD; k++)); do",
        "    case ${COMP_WORDS[k]} in",
        "      -*) option=${COMP_WORDS[k]} ;;",
        "      *)",
        "        if [[ -z $command ]]; then",
        "          command=${COMP_WORDS[k]} option=",
        f'        elif [[ " {several} " != *" $command,$option "* ]]; then',
        "          option=-  # it has its value",
        "        fi",
        "        ;;",
        "    esac",
        "  done",
        "  if [[ -z $command ]]; then",
        f'    words="{" ".join(name for name, _, _ in commands)} --help --version"',
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "    return",
        "  fi",
        "  if [[ $current != -* ]]; then",
        "    case $command,$option in",
    ]
    for name, _, options in commands:
        for option in options:
            if not option.takes or not (option.choices or option.file):
                continue
            # Without dashes before it, the value belongs to an argument of the command.
            pattern = "|".join(f"{name},{flag}" for flag in option.flags or ("",))
            if option.file:
                lines.append(f"      {pattern}) {files} ;;")
            else:
                lines.append(f'      {pattern}) words="{" ".join(option.choices)}" ;;')
    lines += ["    esac", "  fi", "  if [[ -z $words ]]; then", "    case $command in"]
    for name, _, options in commands:
        flags = " ".join(flag for option in options for flag in option.flags)
        lines.append(f'      {name}) words="{flags}" ;;')
    lines += [
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o filenames -F _gradplan gradplan",
    ]
    return "\n".join(lines) + "\n"


def _zsh(parser: argparse.ArgumentParser) -> str:
    def safe(text: str) -> str:
        return re.sub(r"([\[\]:])", r"\\\1", text)

    lines = [
        "#compdef gradplan",
        "# zsh completion for gradplan; made by `gradplan completion zsh`",
        "_gradplan() {",
        "  local -a commands=(",
    ]
    commands = list(_commands(parser))
    lines += [f"    {quote(f'{name}:{safe(told)}')}" for name, told, _ in commands]
    lines += [
        "  )",
        "  if ((CURRENT == 2)); then",
        "    _describe command commands",
        "    return",
        "  fi",
        "  local command=${words[2]}",
        "  shift words",
        "  ((CURRENT--))",
        "  case $command in",
    ]
    for name, _, options in commands:
        lines += [f"    {name})", "      _arguments -S \\"]
        for option in options:
            values = "_files" if option.file else f"({' '.join(option.choices)})"
            # Several words are its own until the next option.
            value = ":*-*:value" if option.several else ":value"
            value += f":{values if option.file or option.choices else ' '}"
            if not option.flags:
                lines.append(f"        {quote(f'1{value}')} \\")
            for flag in option.flags:
                several = "*" if option.several else ""
                spec = f"{several}{flag}[{safe(option.help)}]{value if option.takes else ''}"
                lines.append(f"        {quote(spec)} \\")
        lines[-1] = lines[-1].removesuffix(" \\")
        lines.append("      ;;")
    lines += ["  esac", "}", "compdef _gradplan gradplan"]
    return "\n".join(lines) + "\n"


def _fish(parser: argparse.ArgumentParser) -> str:
    lines = [
        "# fish completion for gradplan; made by `gradplan completion fish`",
        "complete -c gradplan -f",
    ]
    for name, told, options in _commands(parser):
        top = "complete -c gradplan -n __fish_use_subcommand"
        lines.append(f"{top} -a {name} -d {quote(told)}")
        here = f"complete -c gradplan -n '__fish_seen_subcommand_from {name}'"
        for option in options:
            values = f" -a {quote(' '.join(option.choices))}" if option.choices else ""
            if not option.flags:
                if values:
                    lines.append(f"{here}{values}")
                continue
            flags = "".join(
                f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
                for flag in option.flags
            )
            takes = (" -r -F" if option.file else f" -x{values}") if option.takes else ""
            lines.append(f"{here}{flags}{takes} -d {quote(option.help)}")
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[argparse.ArgumentParser], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for a shell."""
    return SHELLS[shell](parser)
