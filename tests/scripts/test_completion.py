"""`mafrt completion`: the shells themselves read the scripts, as far as they are installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from mafrt.scripts import completion, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    shtab = pytest.importorskip("shtab")
    for shell in completion.SHELLS:
        (folder / shell).write_text(shtab.complete(completion.parser(), shell))
    return folder


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_reads_its_script(scripts, shell):
    text = (scripts / shell).read_text()
    assert all(name in text for name in main.COMMANDS) and "lora_rank" in text
    if shutil.which(shell):
        done = subprocess.run([shell, "-n", str(scripts / shell)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mafrt serve_te", "serve_team"),
        ("mafrt train_math --lora_a", "--lora_alpha"),
        ("mafrt show --min", "--min_score"),
        ("mafrt completion z", "zsh"),
    ],
)
def test_bash_completes_commands_and_flags(scripts, words, expected):
    code = (
        f"source {scripts / 'bash'}; COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; "
        '_shtab_mafrt; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]


def test_an_unknown_shell_gets_a_sentence(capsys):
    assert completion.main(["tcl"]) == 2
    assert "expected one shell: bash, zsh, fish" in capsys.readouterr().err
    assert completion.main([]) == 2 and completion.main(["--help"]) == 0
