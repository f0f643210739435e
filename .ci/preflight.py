#!/usr/bin/env python3
"""Says what this machine lacks for building zerokern, with the line that installs it, and exits 1.

Standard library only, in the syntax of any Python 3: it must run on the Python that it refuses.
"""

import argparse
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys

OLDEST_PYTHON = (3, 10)
OLDEST_COMPILER = 10
OLDEST_TORCH = (2, 10)  # as in zerokern/__init__.py
PROBE = b"#include <atomic>\n#include <thread>\nint main() { return std::thread::hardware_concurrency() == 0; }\n"


class Missing:
    def __init__(self, what, found, *do):
        self.what, self.found, self.do = what, found, do

    def __str__(self):
        return "\n".join(["missing: " + self.what, "  found: " + self.found] + ["  do:    " + line for line in self.do])


def dotted(version):
    return ".".join(str(part) for part in version)


def numbers(text):
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def packages(apt, dnf):
    return "apt-get install -y " + apt, "dnf install -y " + dnf


def check_platform():
    machine = platform.machine().lower()
    allowed = machine in ("x86_64", "amd64", "aarch64", "arm64")
    if platform.system() != "Linux" or not allowed or sys.maxsize <= 2**32:
        bits = "64" if sys.maxsize > 2**32 else "32"
        yield Missing(
            "64-bit Linux on x86-64 or aarch64",
            "%s, %s, %s-bit Python" % (platform.system(), machine, bits),
            "use such a machine, or a container or virtual machine of it (WSL 2 on Windows)",
        )


def runs(name):
    """A name on PATH may be a version manager's stub that refuses to start."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return shutil.which(name) is not None and subprocess.call([name, "-c", ""], **quiet) == 0


def check_python():
    if sys.version_info < OLDEST_PYTHON:
        newer = ["python3.%d" % minor for minor in range(16, OLDEST_PYTHON[1] - 1, -1)]
        there = next((name for name in newer if runs(name)), None)
        do = ["make PYTHON=%s ..." % there] if there else packages("python3.11 python3.11-venv", "python3.11")
        yield Missing(
            "Python %s or newer" % dotted(OLDEST_PYTHON), "%s at %s" % (platform.python_version(), sys.executable), *do
        )


def check_make():
    if not shutil.which("make"):
        yield Missing("make", "none on PATH", *packages("make", "make"))


def check_venv():
    for module in ("venv", "ensurepip"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            name = "python%d.%d" % sys.version_info[:2]
            yield Missing(
                "Python's module " + module,
                "%s at %s" % (error, sys.executable),
                *packages("%s-venv" % name, "python3-pip python3-libs"),
            )
            return


def compiler_version(compiler):
    """(kind, major) from the preprocessor, because --version texts differ between distributions."""
    source = b"__clang__ __clang_major__ __GNUC__\n"
    out = subprocess.run([compiler, "-E", "-P", "-x", "c++", "-"], input=source, stdout=subprocess.PIPE, check=True)
    clang, clang_major, gnu_major = out.stdout.decode().split()[-3:]
    return ("clang", int(clang_major)) if clang == "1" else ("gcc", int(gnu_major))


def check_compiler():
    install = packages("g++", "gcc-c++")
    asked = os.environ.get("CXX", "").split()
    names = asked[:1] or ["c++", "g++", "clang++"]
    compiler = next((name for name in names if shutil.which(name)), None)
    what = "a C++17 compiler (GCC or Clang, %d or newer)" % OLDEST_COMPILER
    if compiler is None:
        yield Missing(what, "none of %s on PATH" % ", ".join(names), *install)
        return
    try:
        kind, major = compiler_version(compiler)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        yield Missing(what, "%s, which does not answer: %s" % (compiler, error), *install)
        return
    if major < OLDEST_COMPILER:
        newer = "then: make CXX=g++-12 ..., with the name that was installed"
        yield Missing(what, "%s, %s %d" % (compiler, kind, major), *install, newer)
        return
    flags = ["-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    probe = subprocess.run([compiler, *flags], input=PROBE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if probe.returncode:
        first = (probe.stdout.decode(errors="replace").splitlines() or ["no message"])[0]
        yield Missing("the C++ standard library's headers", "%s says: %s" % (compiler, first), *install)


def check_present_environment():
    """VENV=none: everything must be here already, since nothing is fetched."""
    import importlib.metadata  # only Python 3.8 and later have it
    import importlib.util

    names = ["torch", "scikit-build-core", "rich", "matplotlib", "pytest"]
    for name in names:
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            yield Missing(
                name + " in the present environment",
                "no such module at " + sys.executable,
                "%s -m pip install %s" % (sys.executable, name),
                "or leave VENV=none away: make setup",
            )
        elif name == "torch" and numbers(importlib.metadata.version("torch"))[:2] < OLDEST_TORCH:
            found = importlib.metadata.version("torch")
            yield Missing("torch %s or newer" % dotted(OLDEST_TORCH), found, "leave VENV=none away: make setup")
    for tool, apt, dnf in (("cmake", "cmake", "cmake"), ("ninja", "ninja-build", "ninja-build")):
        if shutil.which(tool) is None and importlib.util.find_spec(tool) is None:
            yield Missing(tool, "none on PATH, no Python module", *packages(apt, dnf))


def find_missing(venv):
    checks = [check_platform, check_python, check_make, check_compiler]
    if sys.version_info >= OLDEST_PYTHON:
        checks.append(check_present_environment if venv == "none" else check_venv)
    return [missing for check in checks for missing in check()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=".venv", help="'none' checks the present environment (default: .venv)")
    missing = find_missing(parser.parse_args().venv)
    for one in missing:
        print(one, file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
