"""Makes .venv as pyproject.toml and requirements.lock describe it, for `make`.

`python tools/ready.py [--any-python]` installs nothing and needs no network where .venv/ready
records this place, this Python (or any, with the option) and the contents of the two files. It
ignores settings of Python and pip that would install elsewhere, and keeps the user's indexes and
certificates. It writes .venv/ready once .venv's Python has found the command and the packages
inside .venv, and then prints what can be typed next.

It uses the standard library alone, and syntax that every Python 3 can read."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = "pyproject.toml", "requirements.lock"
# the first and the last version of Python for which the packages exist
FIRST_PYTHON, LAST_PYTHON = (3, 11), (3, 13)
ELSEWHERE = {"user", "prefix", "target", "root"}
"""Settings of pip that install outside of .venv."""
# runs in .venv, and prints every package that is missing or lies outside of it
CHECK = """
import re, sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

def is_inside(name):
    try:
        path = Path(distribution(name)._path).resolve()
    except PackageNotFoundError:
        return False
    return Path(sys.prefix).resolve() in path.parents

names = ["workbench"]
if is_inside("workbench"):
    for line in requires("workbench"):
        _, _, marker = line.partition(";")
        if marker.strip() in ("", 'extra == "test"'):
            names.append(re.match("[A-Za-z0-9._-]+", line)[0])
print(*[name for name in names if not is_inside(name)])
"""


def main():
    """Makes .venv unless its record says that it is ready.

    Raises:
        SystemExit: no packages exist for this Python, or the installation failed.
    """
    venv = ROOT / ".venv"
    record_file = venv / "ready"
    required = describe()
    recorded = read_record(record_file)
    any_python = "--any-python" in sys.argv[1:]
    if recorded and any_python:
        required["python"] = recorded["python"]
    is_whole = (venv / "bin/workbench").exists() and (venv / "bin/python").exists()
    if recorded == required and is_whole:
        return
    version = sys.version_info[:2]
    if not FIRST_PYTHON <= version <= LAST_PYTHON:
        sys.exit(
            f"{sys.executable} is Python {version[0]}.{version[1]}, and the packages "
            "exist for 3.11 to 3.13; type: make PYTHON=python3.12"
        )
    if record_file.exists():
        record_file.unlink()
    for name in ("python", "place"):
        if recorded and recorded[name] != required[name]:
            print(f"Making .venv anew: its {name} was {recorded[name]}", flush=True)
            shutil.rmtree(str(venv), ignore_errors=True)
    install(venv)
    missing = ask(venv, "-c", CHECK)
    if missing or not (venv / "bin/workbench").exists():
        lacking = missing or "the command workbench"
        pip = venv / "bin/pip"
        sys.exit(
            f"pip ended well, and .venv lacks {lacking}; look at: {pip} config list"
        )
    required["python"] = ask(
        venv, "-c", "import sys; print(*sys.version_info[:2], sep='.')"
    )
    record_file.write_text(json.dumps(required, indent=1))
    print("ready: make run, or .venv/bin/workbench --help", flush=True)


def describe():
    """The fields of .venv/ready: Python, place, contents of the files."""
    contents = {
        name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in FILES
    }
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return {"python": python, "place": str(ROOT), "contents": contents}


def read_record(path):
    """The fields of .venv/ready; None where it is missing or has other fields."""
    try:
        record = json.loads(path.read_text())
        return record if set(record) == set(describe()) else None
    except (OSError, ValueError, TypeError):
        return None


def clean_environment():
    """The caller's environment without settings of Python, and without settings of pip that name
    another place."""
    dropped = {"PIP_" + name.upper() for name in ELSEWHERE}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name not in dropped
    }


def pip_settings(listed):
    """The variables that replace the user's configuration files of pip (as `pip config list` prints
    them), without settings that install elsewhere."""
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ("global", "install") and name not in ELSEWHERE:
            variable = "PIP_" + name.upper().replace("-", "_")
            settings[variable] = ast.literal_eval(value)
    return settings


def ask(venv, *arguments):
    """What .venv's Python prints, called with these arguments.

    Raises:
        CalledProcessError: it fails.
    """
    command = [str(venv / "bin/python"), "-I"] + list(arguments)
    output = subprocess.check_output(command, env=clean_environment())
    return output.decode().strip()


def base_python():
    """The Python that makes virtual environments. Where .venv is active, this file runs in
    its own Python, which is gone when .venv is made anew."""
    return getattr(sys, "_base_executable", None) or sys.executable


def install(venv):
    """Makes .venv and installs the project with its packages into it.

    Raises:
        SystemExit: pip fails.
    """
    text = "Installing the packages of requirements.lock into .venv"
    print(f"{text}: one to two minutes, once", flush=True)
    environment = clean_environment()
    subprocess.run(
        [base_python(), "-m", "venv", str(venv)], env=environment, check=True
    )
    settings = pip_settings(ask(venv, "-m", "pip", "config", "list"))
    # the caller's variables before the settings of files, which are not read again
    environment = {**settings, **environment, "PIP_CONFIG_FILE": os.devnull}
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--constraint", "requirements.lock", "--editable", ".[test]"]
    result = subprocess.run(pip, cwd=str(ROOT), env=environment)
    if result.returncode:
        sys.exit(f"pip ended with exit code {result.returncode}: see above")


if __name__ == "__main__":
    main()
