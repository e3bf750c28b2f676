"""Which spec is kept true: the file's, or the last verified one while the file's is refused or has failed."""

from __future__ import annotations

import json
import math
from pathlib import Path

from attrs import define, field

from agent.documents import LARGEST_SPEC, load, read
from agent.engine.attempts import is_required
from agent.engine.converge import Pass
from agent.engine.dry_run import preview
from agent.machine import Machine
from agent.runtime import fault, journal, write_atomically
from agent.spec.node import NodeSpec, SpecError, parse, spec_hash, to_json

TRIAL = 30.0
"""Seconds after which a new spec with a write that still fails is given up for the last verified one."""

VERIFIED = "verified.json"
FAILED = "failed-spec.json"


@define
class Adopted:
    """The spec that is kept true, and why the file's present content is not it (empty if it is).

    ``verified``: the spec that was last seen to be true in full; Ready means that one as long as a newer one waits.
    ``state`` is the folder in which the last verified spec outlives a boot, ``run`` the one in which it is remembered
    until the next boot that a spec has failed: it is not tried again by itself, and so nothing goes back and forth.
    ``crashed``: what became of the workers before this one, if they ended by themselves again and again; the first spec that is
    read gets the blame, unless it is the verified one.
    """

    state: Path
    run: Path
    spec: NodeSpec | None = None
    refusal: str = ""
    verified: NodeSpec | None = None
    crashed: str = ""
    _failed: dict[str, str] = field(factory=dict)
    _trial_ends: float | None = None

    def __attrs_post_init__(self) -> None:
        try:
            self.verified = parse(read(self.state / VERIFIED, LARGEST_SPEC), str(self.state / VERIFIED))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            # An agent of another version has written it, or a disk has lost it.
            journal(f"the last verified spec cannot be used: {error}")
        try:
            self._failed = {
                str(key): str(value) for key, value in load(read(self.run / FAILED, LARGEST_SPEC), LARGEST_SPEC).items()
            }
        except (OSError, ValueError, AttributeError):
            self._failed = {}

    def reload(self, machine: Machine, path: Path, now: float, asked: bool) -> None:
        """Take the file's spec, unless it is wrong, or asks for what the node does not have, or has failed before.

        Without an old one it is taken even if the node cannot have it, and the node is not ready by it.

        :param now: seconds of a monotonic clock.
        :param asked: somebody wants it taken, also if it has failed before.
        """
        try:
            candidate = parse(read(path, LARGEST_SPEC), str(path))
            name = spec_hash(candidate)
        except FileNotFoundError:
            self._refuse(f"{path} does not exist; run the deploy, or write it")
            return
        except UnicodeDecodeError as error:
            self._refuse(f"{path}: not UTF-8 text: {error}; run the deploy again")
            return
        except (SpecError, OSError) as error:
            self._refuse(str(error))
            return
        except Exception as error:  # whatever the text is, it must not end the worker
            self._refuse(f"{path}: {fault(error)}")
            return
        crashed, self.crashed = self.crashed, ""
        if crashed and not asked and self.verified not in (None, candidate):
            self._remember_failed({name: _given_up(name, f"{crashed}; see: journalctl -u trackbed")})
        if not asked and (reason := self._failed.get(name)):
            self._refuse(reason)
            return
        self._remember_failed({})
        fallback = self.spec or self.verified
        if fallback not in (None, candidate) and (impossible := _impossible(machine, candidate)):
            self._refuse("\n".join(impossible))
            return
        if candidate != self.spec:
            self._trial_ends = None if self.verified in (None, candidate) else now + TRIAL
        self.spec, self.refusal = candidate, ""

    def ready(self, found: Pass) -> None:
        """The node is ready by what a pass found: unless a part of the spec still waits, that is verified."""
        self._trial_ends = None
        if not found.waiting and found.want.spec != self.verified:
            self.verified = found.want.spec
            _write(self.state / VERIFIED, to_json(self.verified))

    def gives_up(self, found: Pass, now: float) -> bool:
        """After a pass: whether a new spec had its time, still fails, and was given up.

        :param now: seconds of a monotonic clock.
        """
        if self.spec is None or self._trial_ends is None or now < self._trial_ends:
            return False
        self._trial_ends = None
        # No fault of the spec's: a device that waits until its users are gone fails at what comes after that, and one that
        # cannot be read fails under any spec.
        waiting = {outcome.change.device for outcome in found.outcomes if outcome.result == "deferred"}
        waiting |= found.want.unreadable.keys()
        failed = [
            outcome
            for outcome in found.outcomes
            if outcome.result == "failed"
            and outcome.change.device not in waiting
            and is_required(found.want, outcome.change)
        ]
        if not failed:
            return False
        self._fall_back(self.spec, "; ".join(f"{outcome.change}: {outcome.error}" for outcome in failed[:3]))
        return True

    def gives_up_crashing(self, why: str) -> bool:
        """After passes that ended with an exception: whether there is a verified spec to fall back to, and that was done."""
        if self.spec is None or self.verified in (None, self.spec):
            return False
        self._fall_back(self.spec, why)
        return True

    def trial_left(self, now: float) -> float:
        """Seconds until the spec on trial is judged; infinite if none is."""
        return math.inf if self._trial_ends is None else max(0.0, self._trial_ends - now)

    def _fall_back(self, spec: NodeSpec, why: str) -> None:
        name = spec_hash(spec)
        reason = _given_up(name, why)
        self._remember_failed({name: reason})
        self.spec, self.refusal, self._trial_ends = self.verified, reason, None

    def _refuse(self, reason: str) -> None:
        self.spec = self.spec or self.verified
        self.refusal = reason

    def _remember_failed(self, failed: dict[str, str]) -> None:
        if failed != self._failed:
            self._failed = failed
            _write(self.run / FAILED, json.dumps(failed) + "\n")


def _impossible(machine: Machine, candidate: NodeSpec) -> tuple[str, ...]:
    """Why the node cannot have a spec; also if that cannot be told for the moment."""
    try:
        return preview(machine, candidate).errors
    except OSError as error:
        return (f"while looking whether the node can have the new spec: {error}; it is looked at again",)
    except Exception as error:  # a spec that cannot even be planned must not end the worker
        return (f"while looking whether the node can have the new spec: {fault(error)}",)


def _given_up(name: str, why: str) -> str:
    return f"spec {name} failed, and the last verified one is kept: {why}"


def _write(path: Path, text: str) -> None:
    """A disk that is full, or read-only, is no reason to leave the devices alone."""
    try:
        write_atomically(path, text)
    except OSError as error:
        journal(f"{path} cannot be written: {error.strerror}; it is forgotten at the next start")
