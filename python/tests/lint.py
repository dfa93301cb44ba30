"""Has ruff and mypy look at this package. They are fetched into this interpreter's environment, once. Exit status 3, with a reason, if they
cannot be had.
"""

import subprocess
import sys

TOOLS = ["ruff==0.17.*", "mypy==2.4.*"]


def run(*arguments):
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True)


fetched = run("pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS)
if fetched.returncode != 0:
    print("pip install ruff mypy: " + (fetched.stderr.strip().splitlines() or ["failed"])[-1])
    sys.exit(3)
for look in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy", "--cache-dir", "/dev/null", "railhead", "examples"]):
    done = run(*look)
    if done.returncode != 0:
        sys.exit(f"{' '.join(look)}:\n{done.stdout}{done.stderr}")
print("good")
