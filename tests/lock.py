"""Writes requirements.lock: what a fresh virtual environment gets from pyproject.toml today, pinned.

Versions are written without a local suffix ("2.13.0", not "2.13.0+cpu"), so that any build of the same version will do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^+;\s]+)(\+\S+)?")


def wanted(project_file: Path) -> list[str]:
    """Everything that running, building and testing ask for."""
    project = tomllib.loads(project_file.read_text("utf-8"))
    return [
        *project["project"]["dependencies"],
        *(wish for extra in project["project"]["optional-dependencies"].values() for wish in extra),
        *project["build-system"]["requires"],
    ]


def pins(freeze: str) -> list[str]:
    """`name==version` for each line of `pip freeze`, sorted. Raises ValueError for a line that pins nothing."""
    found = []
    for line in freeze.splitlines():
        match = PIN.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"not a released version: {line}")
        found.append(f"{match['name']}=={match['version']}")
    return sorted(found, key=str.lower)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", *wanted(ROOT / "pyproject.toml")], check=True)
        freeze = [*pip, "freeze", "--all", "--exclude", "pip"]
        text = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    LOCK.write_text("\n".join(pins(text)) + "\n")
    sys.stdout.write(f"{LOCK.name}: {len(LOCK.read_text().splitlines())} packages\n")


if __name__ == "__main__":
    main()
