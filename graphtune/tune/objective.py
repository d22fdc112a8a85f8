"""What "best" means: the mean step, tokens per second, the tail of the gaps between tokens, or the start-up.

On a histogram of steps:

    gap between tokens    the step that gives a token; 99 % of tokens come from steps of at most the p99
    tokens per second     sum of p * requests / sum of p * step time, steps back to back; a step of more requests than
                          the list leaves KV for runs with as many as fit

On a request trace both come from playing it (``trace_traffic``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from graphtune.engines.base import Padding
from graphtune.stats import LEAST_TOLERANCE
from graphtune.tune.candidates import Candidate, Choice, Evaluator, cheapest, choose, covering_most, pareto, ratio
from graphtune.tune.recommendation import Limits

TAIL = 0.99


class Served(NamedTuple):
    """What a server gives its clients under a list; None where steps have no figure."""

    tokens_per_s: float | None
    inter_token_p99_us: float | None


@dataclass(frozen=True)
class Judge:
    """``serves`` says what a list gives with the KV tokens it leaves (None: not known). ``most`` is how many lists it
    may be asked about, where that takes long; None is any number."""

    serves: Callable[[Candidate, int | None], Served]
    most: int | None = None


def served(evaluator: Evaluator, sizes: tuple[int, ...], padding: Padding, kv_tokens: int | None) -> Served:
    """What a list gives on a histogram."""
    rows = []
    for step in evaluator.steps:
        fits = step.requests if kv_tokens is None else min(step.requests, int(kv_tokens // step.context_tokens))
        found = [
            evaluator.model.step(n, evaluator.bucket(n, sizes, padding), step.context_tokens)
            for n in (step.requests, max(1, fits))
        ]
        if found[0] is None or found[1] is None:
            return Served(None, None)
        rows.append((found[0].us, step.weight * step.requests, step.weight * max(1, fits), step.weight * found[1].us))
    rows.sort()
    reached = list(accumulate(tokens for _, tokens, *_ in rows))
    tail_us = rows[bisect_left(reached, TAIL * reached[-1] * (1 - 1e-12))][0]
    return Served(sum(row[2] for row in rows) / sum(row[3] for row in rows) * 1e6, tail_us)


def choose_for(
    limits: Limits,
    lists: Sequence[Candidate],
    eager: Candidate | None,
    judge: Judge,
    kv_tokens: Callable[[Candidate], int | None],
) -> Choice | None:
    """The list to capture for the objective of ``limits``, as ``choose`` does for the mean step.

    Of lists whose figures are within 1 % of the best, the highest coverage wins, then the cheapest near the best. For
    ``startup`` those lists count that are as fast as the fastest, or meet the limit on gaps if there is one, and the
    shortest capture wins. None where no list meets that limit.
    """
    if limits.objective == "step" and limits.slo_inter_token_us is None:
        return choose(lists, eager)
    asked = _shortlist(lists, eager, judge.most)
    given = {one.sizes: judge.serves(one, kv_tokens(one)) for one in asked}
    good = [one for one in asked if meets(limits, given[one.sizes])]
    if not good:
        return None
    if eager is not None and not meets(limits, judge.serves(eager, kv_tokens(eager))):
        eager = None
    by_step = choose(good, eager)
    if limits.objective == "step" or by_step is None or not by_step.chosen.sizes:
        return by_step
    if limits.objective == "startup":
        fast = [by_step.chosen, *by_step.ties] if limits.slo_inter_token_us is None else good
        return _choice(fast, [one.capture_s for one in fast], by_step.runner_up)
    figures = [_figure(limits, given[one.sizes]) for one in good]
    return _choice(good, figures, by_step.runner_up, by_step=True)


def meets(limits: Limits, of: Served) -> bool:
    """True when the gaps between tokens are within the limit, if there is one."""
    if limits.slo_inter_token_us is None:
        return True
    return of.inter_token_p99_us is not None and of.inter_token_p99_us <= limits.slo_inter_token_us


def _figure(limits: Limits, of: Served) -> float:
    """Smaller is better; infinite where it is not known."""
    if limits.objective == "throughput":
        return 1 / of.tokens_per_s if of.tokens_per_s else float("inf")
    return float("inf") if of.inter_token_p99_us is None else of.inter_token_p99_us


def _choice(
    lists: Sequence[Candidate], figures: Sequence[float], runner_up: Candidate | None, *, by_step: bool = False
) -> Choice:
    """The cheapest of the lists near the best figure; ``by_step`` of those of them that none is faster than."""
    least, of = min(figures), {one.sizes: figure for one, figure in zip(lists, figures, strict=True)}
    good = [one for one in lists if of[one.sizes] <= least * (1 + LEAST_TOLERANCE)]
    fastest = min(good, key=lambda one: one.step_us)
    fast = [one for one in good if not ratio(fastest, one).faster] if by_step else good
    chosen = cheapest(covering_most(fast), lambda one: of[one.sizes])
    ties = tuple(sorted((c for c in good if c is not chosen), key=lambda c: c.step_us))
    others = (one for one, _ in sorted(zip(lists, figures, strict=True), key=lambda pair: pair[1]))
    return Choice(chosen, ties, next((one for one in others if one is not chosen), runner_up))


def _shortlist(lists: Iterable[Candidate], eager: Candidate | None, most: int | None) -> list[Candidate]:
    """All lists, or ``most`` of those that none beats in bytes and step, the one for the mean step among them."""
    lists = list(lists)
    if most is None or len(lists) <= most:
        return lists
    best = choose(lists, eager)
    front = list(pareto(lists))
    thinned = [front[round(at * (len(front) - 1) / max(1, most - 2))] for at in range(most - 1)]
    chosen = [best.chosen] if best is not None and best.chosen.sizes else []
    return list({one.sizes: one for one in (*chosen, *thinned)}.values())


def slowest_gaps(limits: Limits, lists: Sequence[Candidate], judge: Judge) -> tuple[Candidate, float] | None:
    """The list that comes nearest to the limit on gaps, with its p99; None where none has a figure."""
    judged = [(one, judge.serves(one, None).inter_token_p99_us) for one in _shortlist(lists, None, judge.most)]
    known = [(one, us) for one, us in judged if us is not None]
    return min(known, key=lambda pair: pair[1], default=None)
