"""Decides which spec is in force: the file's or, if that is refused or has failed, the last verified one.

A spec of mode observe is never replaced: no other spec may make the agent write to a node that it should only look at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attrs import define, evolve, field, frozen

from agent.documents import LARGEST_SPEC, load, read
from agent.engine.attempts import is_required
from agent.engine.converge import Pass
from agent.engine.dry_run import dry_run
from agent.machine import Machine
from agent.report.records import Outcome, from_plain, to_plain
from agent.runtime import fault, journal, write_atomically
from agent.spec.node import NodeSpec, SpecError, parse, spec_hash, to_json
from agent.state.snapshot import Snapshot

TRIAL = 30.0
"""Seconds after which the last verified spec replaces a new one of which a write still fails."""

VERIFIED = "verified.json"
OBSERVED = "observed.json"
IN_FORCE = "in-force.json"
STATE = "spec-state.json"

State = Literal["on trial", "kept", "verified", "refused", "given up"]
"""What became of the newest spec. While it is on trial, kept or verified, it is in force."""

Event = Literal["ready", "trial over", "trial failed", "write hung", "crashed", "asked"]
"""``trial over``: the trial ends, and no required change fails that could be made. ``asked``: an operator reloads the unit."""

AFTER: Mapping[tuple[Event, State], State] = {
    ("ready", "on trial"): "verified",
    ("ready", "kept"): "verified",
    ("trial over", "on trial"): "kept",
    ("trial failed", "on trial"): "given up",
    ("write hung", "on trial"): "given up",
    ("crashed", "on trial"): "given up",
    ("crashed", "kept"): "given up",
    ("crashed", "refused"): "given up",
    ("asked", "given up"): "on trial",
}
"""The state after an event; all other events leave a state as it is. docs/spec-in-force.md has the whole table.

After a boot only a verified spec is known: each other one is new. A spec is only given up, or on trial, if there is a verified
one to return to."""


@frozen
class _Known:
    """What the agent knows of one spec. It is forgotten at the next boot. ``spec``: the spec's hash.

    ``hung``: the devices that hung when it came. ``failing``: what the required changes set that failed then.
    ``why``: why it was given up. The agent does not try it again by itself: the node would go back and forth between two.
    """

    spec: str
    state: State
    hung: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    why: str = ""


@define
class SpecInForce:
    """The ``spec`` in force. ``refusal``: why the file's present content is not in force; empty if it is.

    ``verified``: the last spec that a pass verified completely. Ready refers to it while a newer spec waits.
    ``observed``: the last spec in force of mode observe, until a later one is verified. Until then the verified spec, which is
    from before the observing, replaces no other.
    ``folder``: the folder for these two, which outlives a boot. ``run``: the folder for what ends with the boot: the spec in
    force, and the one on trial or given up, so that another worker changes neither.
    ``crashed``: how the workers before this one crashed, if several did. Then the spec in force counts as failed, or the first
    spec that is read, unless it is the verified one.
    ``hung_writes``: the writes in which the workers before this one hung, by device; empty for no single device.
    ``_known``: the spec that is on trial or given up. ``_trial_ends``: by a monotonic clock; None: no reading has begun yet.
    ``_unwritten``: the content of each file that could not be written.
    """

    folder: Path
    run: Path
    spec: NodeSpec | None = None
    refusal: str = ""
    verified: NodeSpec | None = None
    observed: NodeSpec | None = None
    crashed: str | None = None
    hung_writes: Mapping[str, str] = field(factory=dict)
    _known: _Known | None = None
    _trial_ends: float | None = None
    _unwritten: dict[Path, str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.observed = _kept(self.folder / OBSERVED)
        # If the observed spec cannot be used, the agent must not write by the verified one instead.
        if self.observed is not None or not _may_exist(self.folder / OBSERVED):
            self.verified = _kept(self.folder / VERIFIED)
        try:
            self._known = from_plain(load(read(self.run / STATE, LARGEST_SPEC), LARGEST_SPEC), _Known)
        except (OSError, ValueError):
            self._known = None
        self.spec = self.spec or _kept(self.run / IN_FORCE)

    def state(self) -> State:
        """The state of the spec in force."""
        if self._is("on trial", self.spec):
            return "on trial"
        return "verified" if self.spec == self.verified else "kept"

    def reload(self, machine: Machine, path: Path, now: float, asked: bool, last: Pass | None) -> Snapshot | None:
        """Put the file's spec in force, unless it is invalid, does not fit this node, or has failed before.

        If there is no other spec, a spec that does not fit is put in force all the same, and the node is not ready. One of mode
        observe need not fit: somebody may have chosen that mode because the node is broken.

        :param now: seconds of a monotonic clock.
        :param asked: an operator asked for this, so a spec that failed before is tried again.
        :param last: the last pass by the spec before.
        :returns: what was read to check whether a new spec, now in force, fits this node. Its first pass begins by it.
        """
        self._trial_ends = now + TRIAL if self._trial_ends is None else self._trial_ends
        self._judge_workers_before()
        candidate = _parsed(path)
        if isinstance(candidate, str):
            self._refuse(candidate)
            return None
        crashed, self.crashed = self.crashed, None
        if crashed and not asked:
            self._happens("crashed", candidate, "refused", _see_journal(crashed))
        if self._known and self._is("given up", candidate) and not asked:
            self._refuse(self._known.why)
            return None
        if not self._is("on trial", self.spec):
            self._learn(None)
        just_read: Snapshot | None = None
        if candidate.mode == "enforce" and (present := self._present()) not in (None, candidate):
            impossible, just_read = _checked(machine, candidate, present)
            if impossible:
                self._refuse("\n".join(impossible))
                return None
        if candidate != self.spec:
            hung = machine.hung | self.hung_writes.keys()
            # While another new spec is on trial, that one may have brought what fails now.
            failing = self._known.failing if self._known else tuple(_failing(last)) if last else ()
            on_trial = _Known(spec_hash(candidate), "on trial", tuple(sorted(hung)), failing)
            self._learn(on_trial if self._replaceable(candidate) else None)
            self._trial_ends = now + TRIAL
        self._put(candidate)
        self.refusal = ""
        self._note_observed(candidate)
        return just_read

    def ready(self, result: Pass) -> None:
        """Note that the node is ready after a pass. The spec is then verified, unless part of it still waits."""
        for path, text in list(self._unwritten.items()):
            self._write(path, text)
        self._happens("trial over" if result.waiting else "ready", self.spec, self.state())
        if self.observed and not result.waiting:
            self.observed = None
            self._remove(self.folder / OBSERVED)

    def gives_up(self, result: Pass, now: float) -> bool:
        """After a pass: give up a new spec that still fails at the end of its trial. :returns: whether it was given up.

        :param now: seconds of a monotonic clock.
        """
        if self.trial_left(now) > 0.0:
            return False
        # The failures of some devices do not count. If a change waits for users, the changes that need it fail. A device that
        # cannot be read fails under any spec, and what failed before would fail under the verified one, too.
        before = self._known.failing if self._known else ()
        excused = {outcome.change.device for outcome in result.outcomes if outcome.result == "deferred"}
        excused |= result.want.unreadable.keys()
        failed = [
            outcome
            for place, outcome in _failing(result).items()
            if outcome.change.device not in excused and place not in before
        ]
        why = "; ".join(f"{outcome.change}: {outcome.error}" for outcome in failed[:3])
        return self._happens("trial failed" if failed else "trial over", self.spec, self.state(), why)

    def gives_up_crashing(self, why: str) -> bool:
        """After several crashed passes: fall back to the verified spec. :returns: whether there is another one."""
        return self._happens("crashed", self.spec, self.state(), why)

    def trial_left(self, now: float) -> float:
        """Seconds until the trial of a new spec ends; infinite if there is none."""
        if self._trial_ends is None or not self._is("on trial", self.spec):
            return math.inf
        return max(0.0, self._trial_ends - now)

    def _judge_workers_before(self) -> None:
        """Give the spec in force up if the workers before this one crashed, or hung in a write that it has brought."""
        excused = self._known.hung if self._known else ()
        brought = [why for device, why in sorted(self.hung_writes.items()) if device not in excused]
        if self.crashed and self.gives_up_crashing(_see_journal(self.crashed)):
            self.crashed = None
        elif brought:
            self._happens("write hung", self.spec, self.state(), "; ".join(brought))

    def _happens(self, event: Event, spec: NodeSpec | None, state: State, why: str = "") -> bool:
        """Bring a spec into the state that follows. :returns: whether it was given up.

        :param spec: the spec in force, or the file's.
        :param why: why it is given up, if it is.
        """
        after = AFTER.get((event, state), state)
        if spec is None or after == state or (after == "given up" and not self._replaceable(spec)):
            return False
        if after == "given up":
            self.refusal = f"spec {spec_hash(spec)} failed, and the last verified one is kept: {why}"
            self._learn(_Known(spec_hash(spec), after, why=self.refusal))
            self._put(self.verified)
            return True
        self._learn(None)
        if after == "verified":
            self.verified = spec
            self._write(self.folder / VERIFIED, to_json(spec))
        return False

    def _is(self, state: State, spec: NodeSpec | None) -> bool:
        known = self._known
        return known is not None and known.state == state and spec is not None and known.spec == spec_hash(spec)

    def _learn(self, known: _Known | None) -> None:
        if known == self._known:
            return
        self._known = known
        if known is None:
            self._remove(self.run / STATE)
        else:
            self._write(self.run / STATE, json.dumps(to_plain(known)) + "\n")

    def _put(self, spec: NodeSpec | None) -> None:
        if spec is not None and spec != self.spec:
            self._write(self.run / IN_FORCE, to_json(spec))
        self.spec = spec

    def _refuse(self, reason: str) -> None:
        self._put(self._present())
        self.refusal = reason

    def _present(self) -> NodeSpec | None:
        """The spec in force, or after a boot the one that should be while the file is refused."""
        return self.spec or self.observed or self.verified

    def _replaceable(self, spec: NodeSpec) -> bool:
        return spec.mode == "enforce" and self.observed is None and self.verified not in (None, spec)

    def _note_observed(self, spec: NodeSpec) -> None:
        if spec.mode == "enforce":
            if self.observed is None:
                self._remove(self.folder / OBSERVED)  # one that cannot be used
        elif spec != self.observed:
            self.observed = spec
            self._write(self.folder / OBSERVED, to_json(spec))

    def _write(self, path: Path, text: str) -> None:
        """Write a file. A full or read-only disk must not stop the agent: it tries again after the next pass that is ready."""
        failed_before = self._unwritten.pop(path, None) is not None
        try:
            write_atomically(path, text)
        except OSError as error:
            self._unwritten[path] = text
            if not failed_before:
                journal(f"{path} cannot be written: {error.strerror}; until it can, a restart forgets its content")

    def _remove(self, path: Path) -> None:
        self._unwritten.pop(path, None)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            journal(f"{path} cannot be removed: {error.strerror}; remove it")


def _failing(result: Pass) -> dict[str, Outcome]:
    """The required changes that have failed, by what they set."""
    failed = (outcome for outcome in result.outcomes if outcome.result == "failed")
    return {" ".join(each.change.place): each for each in failed if is_required(result.want, each.change)}


def _parsed(path: Path) -> NodeSpec | str:
    """The file's spec, or why it has none."""
    try:
        candidate = parse(read(path, LARGEST_SPEC), str(path))
        spec_hash(candidate)
    except FileNotFoundError:
        return f"{path} does not exist; run the deploy, or write it"
    except UnicodeDecodeError as error:
        return f"{path}: not UTF-8 text: {error}; run the deploy again"
    except (SpecError, OSError) as error:
        return str(error)
    except Exception as error:  # no content of the file may end the worker
        return f"{path}: {fault(error)}"
    return candidate


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
    same = {nic.name for nic in candidate.nics if nic in present.nics}
    nics = (nic for nic in candidate.nics if nic.name in same and same.issuperset(nic.select.without))
    return evolve(present, nics=tuple(nics))


def _kept(path: Path) -> NodeSpec | None:
    """The spec that an agent has written, if there is one that can be used."""
    try:
        return parse(read(path, LARGEST_SPEC), str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        # Another version of the agent may have written it, or the disk is damaged.
        # The parser's errors begin with the path, those of the file's content do not.
        where = "" if str(path) in str(error) else f"{path}: "
        journal(f"the spec that was kept cannot be used: {where}{error}")
        return None


def _may_exist(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _see_journal(crashed: str) -> str:
    return f"{crashed}; see: journalctl -u trackbed"
