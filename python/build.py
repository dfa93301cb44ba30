"""Builds the wheel of this folder, which carries the library: `make wheel`. In a copy, so that nothing is left here.

Usage: build.py LIBRARY FOLDER [OPTION OF PIP WHEEL]...
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(library: str, folder: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(HERE, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(library, f"{copy}/railhead/librailhead.so")
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, *options, "--wheel-dir", folder, copy], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
