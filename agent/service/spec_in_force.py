"""Decides which spec is in force: the file's or, if that is refused or has failed, the last verified one.

A spec of mode observe is never replaced: no other spec may make the agent write to a node that it should only look at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from attrs import define, evolve, field

from agent.documents import LARGEST_SPEC, load, read
from agent.engine.attempts import is_required
from agent.engine.converge import Pass
from agent.engine.dry_run import dry_run
from agent.machine import Machine
from agent.runtime import fault, journal, write_atomically
from agent.spec.node import NodeSpec, SpecError, parse, spec_hash, to_json
from agent.state.snapshot import Snapshot

TRIAL = 30.0
"""Seconds after which the last verified spec replaces a new one of which a write still fails."""

VERIFIED = "verified.json"
OBSERVED = "observed.json"
FAILED = "failed-spec.json"
IN_FORCE = "in-force.json"
ON_TRIAL = "trial.json"


@define
class SpecInForce:
    """The ``spec`` in force. ``refusal``: why the file's present content is not in force; empty if it is.

    ``verified``: the last spec that a pass verified completely. Ready refers to it while a newer spec waits.
    ``observed``: the last spec in force of mode observe, until a later one is verified. Until then the verified spec, which is
    from before the observing, replaces no other.
    ``state``: the folder for these two, which outlives a boot. ``run``: the folder for what ends with the boot: the spec in
    force and its trial, so that another worker changes neither, and the specs that have failed. The agent does not try these
    again by itself before the next boot: the node would go back and forth between two.
    ``crashed``: how the workers before this one crashed, if several did. Then the spec in force counts as failed, or the first
    spec that is read, unless it is the verified one.
    ``hung_writes``: the writes in which the workers before this one hung, by device; empty for no single device.

    docs/processes.md has a table of the states.
    """

    state: Path
    run: Path
    spec: NodeSpec | None = None
    refusal: str = ""
    verified: NodeSpec | None = None
    observed: NodeSpec | None = None
    crashed: str | None = None
    hung_writes: Mapping[str, str] = field(factory=dict)
    _failed: dict[str, str] = field(factory=dict)
    # The devices that already hung when the spec came, while it is on trial.
    _hung_before: frozenset[str] | None = None
    _trial_ends: float | None = None
    _observed_unusable: bool = False

    def __attrs_post_init__(self) -> None:
        self.observed, self._observed_unusable = _kept(self.state / OBSERVED)
        # If the observed spec cannot be used, the agent must not write by the verified one instead.
        if not self._observed_unusable:
            self.verified, _ = _kept(self.state / VERIFIED)
        try:
            self._failed = {
                str(key): str(value) for key, value in load(read(self.run / FAILED, LARGEST_SPEC), LARGEST_SPEC).items()
            }
        except (OSError, ValueError, AttributeError):
            self._failed = {}
        if self.spec is None:
            self.spec, _ = _kept(self.run / IN_FORCE)
            self._hung_before = _trial_of(self.spec, self.run / ON_TRIAL)

    def reload(self, machine: Machine, path: Path, now: float, asked: bool) -> Snapshot | None:
        """Put the file's spec in force, unless it is invalid, does not fit this node, or has failed before.

        If there is no other spec, a spec that does not fit is put in force all the same, and the node is not ready. One of mode
        observe need not fit: somebody may have chosen that mode because the node is broken.

        :param now: seconds of a monotonic clock.
        :param asked: an operator asked for this, so a spec that failed before is tried again.
        :returns: what was read to check whether a new spec, now in force, fits this node. Its first pass begins by it.
        """
        if self._hung_before is not None and self._trial_ends is None:
            self._trial_ends = now + TRIAL
        self._judge_workers_before()
        try:
            candidate = parse(read(path, LARGEST_SPEC), str(path))
            name = spec_hash(candidate)
        except FileNotFoundError:
            self._refuse(f"{path} does not exist; run the deploy, or write it")
            return None
        except UnicodeDecodeError as error:
            self._refuse(f"{path}: not UTF-8 text: {error}; run the deploy again")
            return None
        except (SpecError, OSError) as error:
            self._refuse(str(error))
            return None
        except Exception as error:  # no content of the file may end the worker
            self._refuse(f"{path}: {fault(error)}")
            return None
        crashed, self.crashed = self.crashed, None
        if crashed and not asked and self._replaceable(candidate):
            self._fall_back(candidate, _see_journal(crashed))
        # The list may be of another version of the agent, which gave up specs of mode observe, too.
        if not asked and candidate.mode == "enforce" and (reason := self._failed.get(name)):
            self._refuse(reason)
            return None
        self._remember_failed({})
        fallback = self._present() if candidate.mode == "enforce" else None
        just_read: Snapshot | None = None
        if fallback not in (None, candidate):
            impossible, just_read = _checked(machine, candidate, fallback)
            if impossible:
                self._refuse("\n".join(impossible))
                return None
        if candidate != self.spec:
            self._end_trial()
            if self._replaceable(candidate):
                self._begin_trial(name, machine.hung | self.hung_writes.keys(), now)
        self._put(candidate)
        self.refusal = ""
        self._note_observed(candidate)
        return just_read

    def ready(self, result: Pass) -> None:
        """Note that the node is ready after a pass. The spec is then verified, unless part of it still waits."""
        self._end_trial()
        if result.waiting:
            return
        if result.want.spec != self.verified:
            self.verified = result.want.spec
            _write(self.state / VERIFIED, to_json(self.verified))
        if self.observed:
            self.observed = None
            _remove(self.state / OBSERVED)

    def gives_up(self, result: Pass, now: float) -> bool:
        """After a pass: give up a new spec that still fails at the end of its trial. :returns: whether it was given up.

        :param now: seconds of a monotonic clock.
        """
        if self.spec is None or self._trial_ends is None or now < self._trial_ends:
            return False
        self._end_trial()
        # The failures of some devices do not count. If a change waits for users, the changes that need it fail. A device that
        # cannot be read fails under any spec.
        excused = {outcome.change.device for outcome in result.outcomes if outcome.result == "deferred"}
        excused |= result.want.unreadable.keys()
        failed = [
            outcome
            for outcome in result.outcomes
            if outcome.result == "failed"
            and outcome.change.device not in excused
            and is_required(result.want, outcome.change)
        ]
        if not failed:
            return False
        self._fall_back(self.spec, "; ".join(f"{outcome.change}: {outcome.error}" for outcome in failed[:3]))
        return True

    def gives_up_crashing(self, why: str) -> bool:
        """After several crashed passes: fall back to the verified spec. :returns: whether there is another one."""
        if self.spec is None or not self._replaceable(self.spec):
            return False
        self._fall_back(self.spec, why)
        return True

    def trial_left(self, now: float) -> float:
        """Seconds until the trial of a new spec ends; infinite if there is none."""
        return math.inf if self._trial_ends is None else max(0.0, self._trial_ends - now)

    def _fall_back(self, spec: NodeSpec, why: str) -> None:
        name = spec_hash(spec)
        reason = _given_up(name, why)
        self._remember_failed({name: reason})
        self._end_trial()
        self._put(self.verified)
        self.refusal = reason

    def _judge_workers_before(self) -> None:
        """Give the spec in force up if the workers before this one crashed, or hung in a write that it has brought."""
        if self.spec is None or not self._replaceable(self.spec):
            return
        excused = self.hung_writes.keys() if self._hung_before is None else self._hung_before
        brought = [why for device, why in sorted(self.hung_writes.items()) if device not in excused]
        if self.crashed:
            self._fall_back(self.spec, _see_journal(self.crashed))
            self.crashed = None
        elif brought:
            self._fall_back(self.spec, "; ".join(brought))

    def _begin_trial(self, name: str, hung: frozenset[str], now: float) -> None:
        self._hung_before, self._trial_ends = hung, now + TRIAL
        _write(self.run / ON_TRIAL, json.dumps({"spec": name, "hung": sorted(hung)}) + "\n")

    def _end_trial(self) -> None:
        if self._hung_before is not None:
            self._hung_before = self._trial_ends = None
            _remove(self.run / ON_TRIAL)

    def _put(self, spec: NodeSpec | None) -> None:
        """Put a spec in force."""
        if spec is not None and spec != self.spec:
            _write(self.run / IN_FORCE, to_json(spec))
        self.spec = spec

    def _refuse(self, reason: str) -> None:
        self._put(self._present())
        self.refusal = reason

    def _present(self) -> NodeSpec | None:
        """The spec in force, or after a boot the one that should be while the file is refused."""
        return self.spec or self.observed or self.verified

    def _replaceable(self, spec: NodeSpec) -> bool:
        """Whether the verified spec may replace a spec that fails."""
        return spec.mode == "enforce" and self.observed is None and self.verified not in (None, spec)

    def _note_observed(self, spec: NodeSpec) -> None:
        if spec.mode == "enforce":
            if self._observed_unusable:
                _remove(self.state / OBSERVED)
        elif spec != self.observed or self._observed_unusable:
            self.observed = spec
            _write(self.state / OBSERVED, to_json(spec))
        self._observed_unusable = False

    def _remember_failed(self, failed: dict[str, str]) -> None:
        if failed != self._failed:
            self._failed = failed
            _write(self.run / FAILED, json.dumps(failed) + "\n")


def _checked(machine: Machine, candidate: NodeSpec, present: NodeSpec) -> tuple[tuple[str, ...], Snapshot | None]:
    """Why a spec does not fit this node, or why that is unknown now (empty if it fits), and what was read for it.

    What the NICs lack that it leaves as they are is no reason: while a device hangs, the others can get their new settings.
    """
    try:
        planned = dry_run(machine, candidate)
        lacking = dry_run(machine, _unchanged(candidate, present)).errors if planned.errors else ()
        return tuple(error for error in planned.errors if error not in lacking), planned.have
    except OSError as error:
        return (f"while checking whether the new spec fits this node: {error}; it is checked again",), None
    except Exception as error:  # a spec that cannot be planned must not end the worker
        return (f"while checking whether the new spec fits this node: {fault(error)}",), None


def _unchanged(candidate: NodeSpec, present: NodeSpec) -> NodeSpec:
    """A spec with those NICs that are the same in both."""
    same = {nic.name for nic in candidate.nics if nic in present.nics}
    nics = (nic for nic in candidate.nics if nic.name in same and same.issuperset(nic.select.without))
    return evolve(candidate, nics=tuple(nics))


def _trial_of(spec: NodeSpec | None, path: Path) -> frozenset[str] | None:
    """The devices that hung when the spec in force came, if it is on trial."""
    try:
        noted = load(read(path, LARGEST_SPEC), LARGEST_SPEC)
        if spec is not None and noted["spec"] == spec_hash(spec):
            return frozenset(map(str, noted["hung"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the spec in force is not on trial, or the file is damaged
    return None


def _kept(path: Path) -> tuple[NodeSpec | None, bool]:
    """The spec that an agent has written, if there is one that can be used; and whether there is one that cannot."""
    try:
        return parse(read(path, LARGEST_SPEC), str(path)), False
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError) as error:
        # Another version of the agent may have written it, or the disk is damaged.
        journal(f"the spec that was kept cannot be used: {error}")
        return None, True


def _see_journal(crashed: str) -> str:
    return f"{crashed}; see: journalctl -u trackbed"


def _given_up(name: str, why: str) -> str:
    return f"spec {name} failed, and the last verified one is kept: {why}"


def _write(path: Path, text: str) -> None:
    """Write a file. A full or read-only disk must not stop the agent, so an error is only logged."""
    try:
        write_atomically(path, text)
    except OSError as error:
        journal(f"{path} cannot be written: {error.strerror}; the agent will not know its content after a restart")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        journal(f"{path} cannot be removed: {error.strerror}; remove it")
