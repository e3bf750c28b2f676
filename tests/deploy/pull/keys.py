"""Key pairs of GnuPG, for archives of pull mode."""

import subprocess
from pathlib import Path


def gpg(home: Path, *words: str) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(
        ["gpg", "--homedir", home, "--batch", "--quiet", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def make_key(home: Path, keyring: Path) -> None:
    gpg(home, "--passphrase", "", "--quick-gen-key", "fleet@example.net", "ed25519", "sign")
    gpg(home, "--output", str(keyring), "--export")
