"""SHA-256 is the same whoever computes it: MACs and GUIDs of VFs derive from it."""

import subprocess
import sys

import pytest

CODE = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None
from agent.sha256 import digest
print(digest(b"abc").hex())
"""
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4's example


@pytest.mark.parametrize("absent", [[], ["_sha2", "_sha256"]], ids=["any Python", "RHEL's Python"])
def test_a_digest_is_the_same_with_pythons_own_code_and_with_openssls(absent: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *absent], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ABC
