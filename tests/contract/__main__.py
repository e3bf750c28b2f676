"""Run the cases on this machine's kernel: `python3 -I FOLDER PF`. Prints a line for each case; exit code 1 if one fails."""

import sys
import traceback

from agent.linux import machine
from tests.contract.cases import CASES


def main(pf: str) -> int:
    failures = 0
    for case in CASES:
        try:
            case(machine(), pf)
        except Exception:
            failures += 1
            print(f"FAILED {case.__name__}\n{traceback.format_exc()}")  # noqa: T201
        else:
            print(f"passed {case.__name__}")  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
