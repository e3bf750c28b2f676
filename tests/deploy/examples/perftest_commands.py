"""The commands of perftest between two pods, as the pages that explain the pods give them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = {"rdma-test": ROOT / "docs" / "rdma-in-pods.md", "perftest": ROOT / "examples" / "README.md"}
"""The page by the name of its pods."""


def commands(pods: str) -> list[tuple[str, str]]:
    """Each server's command with that of its client; DEVICE, and ADDRESS or RAIL, stand for what differs."""
    called = re.findall(r"^\$ kubectl exec (\S+) -- (.*)$", PAGES[pods].read_text(), re.MULTILINE)
    assert [pod for pod, _ in called] == [f"{pods}-server", f"{pods}-client"] * (len(called) // 2)
    return [(server, client) for (_, server), (_, client) in zip(called[::2], called[1::2], strict=True)]
