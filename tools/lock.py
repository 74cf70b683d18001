"""Writes `requirements.lock`: the exact version of every package that this environment
has of the project and its extras, as constraints of pip. Run it in an environment into
which the project was installed with all of its extras:

    pip install -e '.[test,cluster,harness]' && python tools/lock.py

A line of a package that only another system needs stays as it is."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[1] / "requirements.lock"
HEADER = "# Exact versions for `make`; python tools/lock.py writes them.\n"
EXTRAS = ("test", "cluster", "harness")


def closure(name: str, extras: tuple[str, ...]) -> set[str]:
    """The packages that `name` with its extras requires on any system, by their
    canonical names."""
    found, waiting = set(), [(canonicalize_name(name), frozenset(extras))]
    seen = set()
    while waiting:
        package, wanted = waiting.pop()
        if (package, wanted) in seen:
            continue
        seen.add((package, wanted))
        found.add(package)
        try:
            requirements = distribution(package).requires or []
        except PackageNotFoundError:  # of another system
            continue
        for requirement in map(Requirement, requirements):
            marker = requirement.marker
            here = not marker or any(
                marker.evaluate({"extra": extra}) for extra in {"", *wanted}
            )
            if here or package == "workbench" and "extra" not in str(marker):
                of = frozenset(requirement.extras)
                waiting.append((canonicalize_name(requirement.name), of))
    return found - {canonicalize_name(name)}


def locked() -> dict[str, str]:
    """Package → version in the lock file."""
    if not LOCK.is_file():
        return {}
    lines = (line for line in LOCK.read_text().splitlines() if "==" in line)
    return dict(line.split("==") for line in lines)


def main() -> None:
    versions, before = {}, locked()
    for package in sorted(closure("workbench", EXTRAS)):
        try:  # a local version such as 2.13.0+cpu is another build of 2.13.0
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
