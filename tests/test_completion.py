"""Shell completion: made from the parser, and tried in real shells where there are any."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gradplan import cli
from gradplan.cli import completion
from gradplan.registry import KINDS

KIND_NAMES = {spec.kind.value for spec in KINDS.values()}


def script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def run(shell, *words):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([path, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_names_every_command_and_option(capsys, shell):
    text = script(shell, capsys)
    for name, _, options in completion._commands(cli.parser()):
        assert name in text
        for option in options:
            for flag in option.flags:
                assert (flag.lstrip("-") if shell == "fish" else flag) in text


@pytest.mark.parametrize(
    ("words", "due"),
    [
        (["gradplan", "exp"], {"explain"}),
        (["gradplan", "explain", "log_s"], {"log_softmax", "log_sum_exp"}),
        (["gradplan", "explain", "--dt"], {"--dtype"}),
        (["gradplan", "explain", "softmax", "--dtype", "b"], {"bf16"}),
        (["gradplan", "bench", "--kind", "softmax", ""], KIND_NAMES),
        (["gradplan", "completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(capsys, tmp_path, words, due):
    path = tmp_path / "gradplan.bash"
    path.write_text(script("bash", capsys))
    call = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _gradplan; echo "${COMPREPLY[@]}"'
    )
    found = run("bash", "-c", call, str(path), *words)
    assert set(found) == due


def test_bash_completes_files_and_knows_when_an_option_has_its_value(capsys, tmp_path):
    path = tmp_path / "a script.bash"
    path.write_text(script("bash", capsys))
    call = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _gradplan;'
        ' printf "%s\\n" "${#COMPREPLY[@]}" "${COMPREPLY[0]}"'
    )
    found = run("bash", "-c", call, str(path), "gradplan", "bench", "--json", str(tmp_path) + "/a")
    assert found[0] == "1"
    assert " ".join(found[1:]) == str(path)
    found = run("bash", "-c", call, str(path), "gradplan", "explain", "max", "--dtype", "f32", "")
    assert found[1].startswith("-")


def test_fish_completes(capsys, tmp_path):
    path = tmp_path / "gradplan.fish"
    path.write_text(script("fish", capsys))
    found = run("fish", "-c", f"source {path}; complete -C 'gradplan explain softmax --dtype b'")
    assert found == ["bf16"]


def test_zsh_takes_the_script(capsys, tmp_path):
    path = tmp_path / "gradplan.zsh"
    path.write_text(script("zsh", capsys))
    call = f"autoload -U compinit; compinit -D; source {path}; print $_comps[gradplan]"
    assert run("zsh", "-fc", call) == ["_gradplan"]
