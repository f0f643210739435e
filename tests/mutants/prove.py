"""Run as a program, with this folder and that of the ranks: who imports which package, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> None:
    sys.path = [path for path in sys.path if path]
    sys.path += sys.argv[1:]
    import proof_cases
    from forked import run_forked
    from ranks import run_ranks

    program = "import zerokern; print(zerokern.__file__)"
    fresh = subprocess.check_output([sys.executable, "-c", program], cwd="/", text=True)
    said = {f"rank {rank}": path for rank, path in enumerate(run_ranks(2, proof_cases.where))}
    said["a forked program"] = run_forked(program).stdout.strip()
    said["a fresh interpreter"] = fresh.strip()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
