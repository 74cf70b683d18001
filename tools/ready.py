"""Makes .venv what pyproject.toml and requirements.lock say, for `make`.

`python tools/ready.py [--any-python]`: where .venv/ready records this place, this
Python (or any, with the option) and the contents of the two files, nothing is installed
and no network is needed. The settings of Python and pip that would install elsewhere
are left out; indexes and certificates stay the user's. The file is written once .venv's
own Python has found the command and the packages inside .venv.

Only the standard library is here; every Python 3 can read the file."""

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
FIRST, LAST = (3, 11), (3, 13)
ELSEWHERE = {"user", "prefix", "target", "root"}
# runs in .venv: names every package that is missing or lies outside
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
    venv = ROOT / ".venv"
    record_file = venv / "ready"
    wanted = describe()
    found = read_record(record_file)
    any_python = "--any-python" in sys.argv[1:]
    if found and any_python:
        wanted["python"] = found["python"]
    is_whole = (venv / "bin/workbench").exists() and (venv / "bin/python").exists()
    if found == wanted and is_whole:
        return
    version = sys.version_info[:2]
    if not FIRST <= version <= LAST:
        sys.exit(
            f"{sys.executable} is Python {version[0]}.{version[1]}, and the packages "
            "exist for 3.11 to 3.13; type: make PYTHON=python3.12"
        )
    if record_file.exists():
        record_file.unlink()
    for name in ("python", "place"):
        if found and found[name] != wanted[name]:
            print(f"Making .venv anew: its {name} was {found[name]}", flush=True)
            shutil.rmtree(str(venv), ignore_errors=True)
    install(venv)
    missing = ask(venv, "-c", CHECK)
    if missing or not (venv / "bin/workbench").exists():
        lacking = missing or "the command workbench"
        pip = venv / "bin/pip"
        sys.exit(
            f"pip ended well, and .venv lacks {lacking}; look at: {pip} config list"
        )
    wanted["python"] = ask(
        venv, "-c", "import sys; print(*sys.version_info[:2], sep='.')"
    )
    record_file.write_text(json.dumps(wanted, indent=1))


def describe():
    """What .venv/ready records: Python, place, contents of the files."""
    contents = {
        name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in FILES
    }
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return {"python": python, "place": str(ROOT), "contents": contents}


def read_record(path):
    try:
        record = json.loads(path.read_text())
        return record if set(record) == set(describe()) else None
    except (OSError, ValueError, TypeError):
        return None


def clean_environment():
    """The caller's environment without Python's settings and pip's other places."""
    dropped = {"PIP_" + name.upper() for name in ELSEWHERE}
    items = os.environ.items()
    return {k: v for k, v in items if not k.startswith("PYTHON") and k not in dropped}


def pip_settings(listed):
    """The variables that stand for the user's files of pip's settings (`pip config
    list`), without those that install elsewhere."""
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ("global", "install") and name not in ELSEWHERE:
            variable = "PIP_" + name.upper().replace("-", "_")
            settings[variable] = ast.literal_eval(value)
    return settings


def ask(venv, *arguments):
    command = [str(venv / "bin/python"), "-I"] + list(arguments)
    said = subprocess.check_output(command, env=clean_environment())
    return said.decode().strip()


def install(venv):
    text = "Installing the packages of requirements.lock into .venv"
    print(f"{text}: one to two minutes, once", flush=True)
    environment = clean_environment()
    subprocess.run(
        [sys.executable, "-m", "venv", str(venv)], env=environment, check=True
    )
    settings = pip_settings(ask(venv, "-m", "pip", "config", "list"))
    environment = {**settings, **environment, "PIP_CONFIG_FILE": os.devnull}
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--constraint", "requirements.lock", "--editable", ".[test]"]
    ended = subprocess.run(pip, cwd=str(ROOT), env=environment)
    if ended.returncode:
        sys.exit(f"pip ended with exit code {ended.returncode}: see above")


if __name__ == "__main__":
    main()
