"""Arranges the tests in rounds, so that no end is in two tests of a round.

Up to :data:`ALL_PAIRS` nodes each pair is tested. In a larger fleet each end is tested with a fixed number of random others, so
the number of rounds does not grow. The rounds depend only on the ends and the seed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from attrs import frozen

from fleet.fabric.ends import End, Ends

ALL_PAIRS = 32
"""Up to so many nodes, all pairs are tested."""

SAMPLED = 8
"""Partners of each end on its own rail in a larger fleet, and the rounds across rails."""

Pair = tuple[str, str]
"""The names of a test's server and its client."""


@frozen
class Round:
    """The pairs of one test program that run at the same time. ``number``: the place within the stage."""

    stage: str
    number: int
    test: str
    across: bool
    pairs: tuple[Pair, ...]


def survey(ends: Ends, tests: Sequence[tuple[str, bool]], across_rails: bool, seed: int) -> list[Round]:
    """The rounds that test every end: rail to rail, then across rails, each in both directions.

    :param tests: the names of the tests, and whether each is run across rails, too.
    """
    chosen = random.Random(seed)  # noqa: S311  no secret
    rails = [chosen.sample(members, len(members)) for members in _rails(ends)]
    nodes = len({end.node for end in ends.values()})
    same = _rail_to_rail(rails, nodes, chosen)
    other = _across(rails, nodes, chosen) if across_rails else []
    rounds = [(test, False, pairs) for test, _ in tests for pairs in _both_ways(same)]
    rounds += [(test, True, pairs) for test, across in tests if across for pairs in _both_ways(other)]
    return [Round("survey", number, *each) for number, each in enumerate(rounds)]


def packed(stage: str, wanted: Iterable[tuple[str, bool, Pair]]) -> list[Round]:
    """Wanted tests (program, across rails, pair) in few rounds: each in the first round in which both ends are free."""
    rounds: dict[tuple[str, bool], list[list[Pair]]] = defaultdict(list)
    busy: dict[tuple[str, bool, str], set[int]] = defaultdict(set)
    for test, across, (server, client) in wanted:
        taken = busy[test, across, server] | busy[test, across, client]
        place = next(number for number in range(len(taken) + 1) if number not in taken)
        made = rounds[test, across]
        while len(made) <= place:
            made.append([])
        made[place].append((server, client))
        busy[test, across, server].add(place)
        busy[test, across, client].add(place)
    flat = [(*key, tuple(pairs)) for key, made in rounds.items() for pairs in made]
    return [Round(stage, number, *each) for number, each in enumerate(flat)]


def _rails(ends: Ends) -> list[list[End]]:
    by_rail: dict[int, list[End]] = defaultdict(list)
    for end in ends.values():
        by_rail[end.rail].append(end)
    return [members for _, members in sorted(by_rail.items())]


def _both_ways(rounds: Iterable[Sequence[Pair]]) -> Iterator[tuple[Pair, ...]]:
    for pairs in rounds:
        yield tuple(pairs)
        yield tuple((client, server) for server, client in pairs)


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each of the players meets each other one once."""
    seats = players + players % 2
    # With an odd number the last seat is empty; the player who meets it rests.
    return [[pair for pair in _turn(seats, turn) if players not in pair] for turn in range(seats - 1)]


def _turn(seats: int, turn: int) -> list[tuple[int, int]]:
    """One round of a tournament of an even number of seats (the circle method)."""
    last = seats - 1
    met = [(turn, last)]
    met += [((turn + i) % last, (turn - i) % last) for i in range(1, seats // 2)]
    return met


def _rail_to_rail(rails: list[list[End]], nodes: int, chosen: random.Random) -> list[list[Pair]]:
    """Rounds of all rails at once. Those of a large fleet are some random ones of a tournament of all."""
    rounds: dict[int, list[Pair]] = defaultdict(list)
    for members in rails:
        seats = len(members) + len(members) % 2
        turns: Sequence[int] = range(seats - 1)
        if nodes > ALL_PAIRS:
            turns = chosen.sample(turns, min(SAMPLED, len(turns)))
        for place, turn in enumerate(turns):
            rounds[place] += _names(members, members, _turn(seats, turn))
    return [rounds[place] for place in sorted(rounds)]


def _across(rails: list[list[End]], nodes: int, chosen: random.Random) -> list[list[Pair]]:
    """Rounds in which the rails meet in pairs; end i of a rail meets end i + shift of the other."""
    longest = max(map(len, rails), default=0)
    meetings = [(turn, shift) for turn in tournament(len(rails)) for shift in range(longest)]
    if nodes > ALL_PAIRS:
        # Each rail meets each other one at least once, if there are not more of them than rounds.
        turns = tournament(len(rails))
        meetings = [(turns[i % len(turns)], chosen.randrange(longest)) for i in range(SAMPLED)] if turns else []
    rounds = []
    for turn, shift in meetings:
        pairs: list[Pair] = []
        for one, other in turn:
            length = max(len(rails[one]), len(rails[other]))
            pairs += _names(rails[one], rails[other], [(i, (i + shift) % length) for i in range(length)])
        if pairs:
            rounds.append(pairs)
    return rounds


def _names(one: Sequence[End], other: Sequence[End], met: Iterable[tuple[int, int]]) -> list[Pair]:
    """The pairs of two nodes; a NIC is not tested with another one of its own node."""
    return [
        (one[i].name, other[j].name) for i, j in met if i < len(one) and j < len(other) and one[i].node != other[j].node
    ]
