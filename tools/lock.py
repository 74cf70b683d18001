"""Writes `requirements.lock`: the exact versions, in this environment, of the packages that the
project and its extras need. pip reads them as constraints. Run it in an environment into which
the project was installed with all of its extras:

    pip install -e '.[test,cluster,harness]' && python tools/lock.py

The line of a package that only another system needs stays as it is."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[1] / "requirements.lock"
HEADER = "# Exact versions for `make`; python tools/lock.py writes them.\n"
EXTRAS = ("test", "cluster", "harness")


def closure(name: str, extras: tuple[str, ...]) -> set[str]:
    """The canonical names of all packages that `name` with its extras requires, directly or not,
    on this system. A requirement of the project itself that is not one of an extra counts even
    where its marker names another system."""
    project = canonicalize_name(name)
    # packages with the extras that are required of them
    waiting = [(project, frozenset(extras))]
    visited = set()
    while waiting:
        package, package_extras = waiting.pop()
        if (package, package_extras) in visited:
            continue
        visited.add((package, package_extras))
        try:
            requirements = distribution(package).requires or []
        except PackageNotFoundError:  # only another system needs it
            continue
        for requirement in map(Requirement, requirements):
            marker = requirement.marker
            applies_here = not marker or any(
                marker.evaluate({"extra": extra}) for extra in {"", *package_extras}
            )
            # an extra is in a marker as the variable `extra`
            is_of_extra = "extra" in str(marker)
            is_of_project = package == project and not is_of_extra
            if applies_here or is_of_project:
                required = canonicalize_name(requirement.name)
                waiting.append((required, frozenset(requirement.extras)))
    return {package for package, _ in visited} - {project}


def read_lock() -> dict[str, str]:
    """Package → its version in the lock file."""
    if not LOCK.is_file():
        return {}
    lines = (line for line in LOCK.read_text().splitlines() if "==" in line)
    return dict(line.split("==") for line in lines)


def main() -> None:
    versions, before = {}, read_lock()
    for package in sorted(closure("workbench", EXTRAS)):
        try:
            # a local version such as 2.13.0+cpu is another build of 2.13.0
            version = distribution(package).version.partition("+")[0]
        except PackageNotFoundError:
            version = before.get(package)
        if version:
            versions[package] = version
    text = "".join(f"{name}=={version}\n" for name, version in versions.items())
    LOCK.write_text(HEADER + text)
    print(f"{LOCK.name}: {len(versions)} packages")


if __name__ == "__main__":
    main()
