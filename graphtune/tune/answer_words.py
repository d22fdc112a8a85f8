"""The sentences of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from graphtune.tune.candidates import Candidate, Choice, break_even_us, ratio
from graphtune.tune.measurements import Measurements
from graphtune.tune.objective import Judge, slowest_gaps
from graphtune.tune.recommendation import Limits
from graphtune.units import format_bytes, format_us


def sentence(choice: Choice, eager: Candidate | None, of: Measurements, *, pads: bool = True) -> str:
    chosen = choice.chosen
    if not chosen.sizes:
        assert choice.runner_up is not None
        return _no_list_pays(choice.runner_up, chosen, of)
    known = {"bound": "at most ", "predicted": "a predicted "}
    graph_bytes = known.get(chosen.cost.provenance if chosen.cost else "", "") + format_bytes(chosen.graph_bytes)
    off = "" if pads else " with padding off"
    text = f"capture {range_of(chosen.sizes)}{off}: {format_us(chosen.step_us)} a step for {graph_bytes}"
    if of.distinguishes_eager and eager is not None:
        text += f", {eager.step_us / chosen.step_us:.2f} times as fast as {_eager_words(eager, of)}"
    if choice.within_noise and eager is not None:
        noise = ratio(chosen, eager).tolerance
        text += f"; no list gains more than the noise, {noise:.1%}, but a server's eager step is longer than this"
    return text


def _no_list_pays(best: Candidate, eager: Candidate, of: Measurements) -> str:
    """Says by how little, and how slow eager has to be for graphs to pay: a server's eager step is slower than ours."""
    more = break_even_us(best, eager)
    pays = "" if more is None else f"; it pays once eager steps take {format_us(more)} longer"
    return (
        f"no list pays on this device: the nearest to it, {range_of(best.sizes)}, takes {format_us(best.step_us)} a "
        f"step against {_eager_words(eager, of)}{pays}"
    )


def gaps_too_long(limits: Limits, lists: Sequence[Candidate], judge: Judge) -> str:
    """Why no list meets the limit on gaps between tokens."""
    assert limits.slo_inter_token_us is not None
    asked = format_us(limits.slo_inter_token_us)
    nearest = slowest_gaps(limits, lists, judge)
    if nearest is None:
        return f"how long gaps between tokens are is not known, so no list can be said to keep them within {asked}"
    one, us = nearest
    return (
        f"no list keeps 99 % of the gaps between tokens within {asked}: {range_of(one.sizes)} comes to {format_us(us)}"
    )


def price_of_limits(choice: Choice, unlimited: Choice | None) -> str:
    """What the limits cost, where a list outside them is faster than what they leave."""
    if unlimited is None or not ratio(unlimited.chosen, choice.chosen).faster:
        return ""
    best = unlimited.chosen
    return f"; without the limits {range_of(best.sizes)} would take {format_us(best.step_us)}"


def _eager_words(eager: Candidate, of: Measurements) -> str:
    if overhead := of.model.eager_overhead_us:
        return f"eager ({format_us(eager.step_us)}, of it {format_us(overhead)} as you stated)"
    return f"graphtune's own eager path ({format_us(eager.step_us)}, a lower bound of a server's)"


def range_of(sizes: tuple[int, ...]) -> str:
    return f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"size {sizes[0]} alone"


def listed_of(requests: tuple[int, ...]) -> str:
    return f"{requests[0]} to {requests[-1]}" if len(requests) > 1 else str(requests[0])
