"""The decode cells of a recipe: lists times settings, what is timed on the first of them, and controls.

The first list of the first cell is the one that latency is timed on: all sizes of all lists, large to small, everything
shared. A cell holds the settings of one set of sizes: only the first list of a process shows the bytes of its
executables, and these depend on the sizes. A tenth of the lists that come later in a process, drawn by a hash of the
content, is planned again alone as a control.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from itertools import product

from graphtune.errors import InputError
from graphtune.kv_pool import KvPool, Need
from graphtune.named_lists import NamedList, at_most, listed, union_of
from graphtune.plan import STEP_TOKENS, UNION, Cell, LatencyAt, PaddedTo, Repeats, Skip
from graphtune.recipe import LoadedRecipe
from graphtune.results import CaptureList, Execution, Order, Sharing

GATE_PAGES = 3
"""Pages per request that the correctness gate uses where the pool has them, for one request more than the bucket."""

EVERY_RAW_UP_TO = 32
"""Padded steps are timed at raw sizes next to powers of two, in buckets up to this at all of them."""

EMPTIEST = 8
"""In larger buckets they are timed where the bucket is at most so many times the batch, or else at the largest raw size
below it: few batches meet an emptier one."""

EVERY_BUCKET_UP_TO = 128
"""Above, every second bucket is enough: kernels change less from one to the next than what they take."""


@dataclass(frozen=True)
class DecodePlan:
    """The named lists of a recipe, and context tokens to the sizes timed there."""

    loaded: LoadedRecipe
    named: tuple[NamedList, ...]
    contexts: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, loaded: LoadedRecipe, named: tuple[NamedList, ...]) -> DecodePlan:
        """Raises InputError for a context beyond the model's positions and a size above the largest bucket."""
        return cls(loaded, named, _contexts(loaded, union_of(named)))

    def needs(self) -> list[Need]:
        """What the KV pool should hold: every bucket with requests that cross a page, and the timed steps."""
        page, union = self.loaded.recipe.page_size, union_of(self.named)
        least = max(2 * page, 16)
        return [
            *(Need(size, least, bucket=size, least=least, where=_where_size(self.loaded, size)) for size in union),
            Need(union[-1] + 1, GATE_PAGES * page),
            *(Need(sizes[-1], tokens + STEP_TOKENS) for tokens, sizes in self.contexts.items() if sizes),
        ]

    def first_list(self) -> CaptureList:
        """The recipe's first list, large to small, everything shared."""
        backend = next(one for one in self.loaded.recipe.decode.backends if one != "eager")
        return CaptureList(self.named[0].name, "decode", backend, self.named[0].sizes)

    def cells(self, template: Cell, pool: KvPool, repeats: Repeats) -> tuple[list[Cell], tuple[Skip, ...]]:
        """The cells, and the steps that the pool cannot hold.

        What tells the noise is what is timed and the captures of the recipe's first list: bytes do not differ between
        processes.
        """
        loaded = self.loaded
        axes = loaded.recipe.decode
        union = union_of(self.named)
        latency, skips = _latency(loaded, self.contexts, pool, union)
        profile = at_most(axes.profile_sizes, union, loaded, ("decode", "profile_sizes"))
        groups = [
            group
            for backend in axes.backends
            if backend != "eager"
            for group in _by_sizes(_capture_lists(loaded, backend, self.named, timed=bool(latency)))
        ]
        first = {group[0].backend: group for group in reversed(groups)}
        cells = []
        for process in range(1, repeats.processes + 1):
            for group in groups:
                timed = latency if group is first[group[0].backend] else ()
                if process == 1 or repeats.whole:  # what padding takes differs little between processes
                    timed = _with_padded(timed)
                tells_noise = timed or group[0].name == self.named[0].name
                if process > 1 and not (repeats.whole or tells_noise):
                    continue
                cells.append(
                    replace(
                        template,
                        lists=group,
                        latency=timed,
                        # Outputs and launches are the same in every process; the first one checks and counts them.
                        profile_sizes=profile if timed and process == 1 else (),
                        gate=process == 1,
                        process=process,
                    )
                )
        cells += [replace(template, lists=(chosen,), purpose="control") for chosen in _controls(loaded, groups)]
        return cells, skips


def _where_size(loaded: LoadedRecipe, size: int) -> str:
    lists = loaded.recipe.decode.lists
    for index, choice in enumerate(lists):
        if choice.sizes and size in choice.sizes:
            return loaded.source.where(("decode", "lists", index, "sizes", choice.sizes.index(size)))
    return loaded.source.where(("decode", "lists"))


def _contexts(loaded: LoadedRecipe, union: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Context tokens to the sizes timed there. InputError beyond the model's positions or above the largest bucket."""
    contexts: dict[int, set[int]] = {}
    limit = loaded.model.max_position_embeddings
    for index, choice in enumerate(loaded.recipe.decode.contexts):
        path = ("decode", "contexts", index)
        if choice.tokens + STEP_TOKENS > limit:
            raise InputError(
                f"{choice.tokens} tokens, and {STEP_TOKENS} more while steps are timed, is beyond the model's "
                f"{limit} positions",
                where=loaded.source.where((*path, "tokens")),
                action=f"Use at most {max(limit - STEP_TOKENS, 0)} tokens.",
            )
        sizes = union if choice.sizes is None else at_most(choice.sizes, union, loaded, (*path, "sizes"))
        contexts.setdefault(choice.tokens, set()).update(sizes)
    return {tokens: tuple(sorted(sizes)) for tokens, sizes in contexts.items()}


def _latency(
    loaded: LoadedRecipe, contexts: dict[int, tuple[int, ...]], pool: KvPool, captured: tuple[int, ...]
) -> tuple[tuple[LatencyAt, ...], tuple[Skip, ...]]:
    executions: tuple[Execution, ...] = ("graph", "eager") if "eager" in loaded.recipe.decode.backends else ("graph",)
    latency, skips = [], []
    for tokens, sizes in contexts.items():
        if uncaptured := [size for size in sizes if size not in captured]:
            what = f"replays of {listed(uncaptured)} requests at context {tokens}"
            skips.append(Skip(what, "no list captures them; add the sizes to one"))
        held = tuple(size for size in sizes if pool.holds(size, tokens + STEP_TOKENS))
        left = [size for size in sizes if size not in held]
        if held:
            latency.append(LatencyAt(held, tokens, executions))
        if left:
            need = pool.tokens_for(left[0], tokens + STEP_TOKENS)
            reason = f"{left[0]} requests take {need} KV tokens; {pool.limit} leaves {pool.tokens}"
            skips.append(Skip(f"step times of {listed(left)} requests at context {tokens}", reason))
    return tuple(latency), tuple(skips)


def _with_padded(latency: tuple[LatencyAt, ...]) -> tuple[LatencyAt, ...]:
    """The same with padded steps at the context with the most sizes, the smaller of two equals."""
    if not any("graph" in at.executions for at in latency):
        return latency
    main = max(latency, key=lambda at: (len(at.sizes), -at.context_tokens))
    return tuple(replace(at, padded=padded_steps(at.sizes)) if at is main else at for at in latency)


def padded_steps(sizes: tuple[int, ...]) -> tuple[PaddedTo, ...]:
    """The padded steps to time where all of ``sizes`` (ascending) are captured and timed full."""
    above = [size for size in sizes if size > EVERY_BUCKET_UP_TO]
    buckets = [size for size in sizes if size <= EVERY_BUCKET_UP_TO] + above[::-2][::-1]
    powers = [1 << exponent for exponent in range(sizes[-1].bit_length())]
    near = {max(size for size in sizes if size <= power) for power in powers if power >= sizes[0]}
    raw_sizes = sorted({sizes[0], *near})
    padded: dict[int, list[int]] = {raw: [] for raw in raw_sizes}
    for bucket in buckets:
        below = [raw for raw in raw_sizes if raw < bucket]
        for raw in below:
            if bucket <= EVERY_RAW_UP_TO or bucket <= EMPTIEST * raw or raw == below[-1]:
                padded[raw].append(bucket)
    return tuple(PaddedTo(raw, tuple(larger)) for raw, larger in padded.items() if larger)


def _capture_lists(
    loaded: LoadedRecipe, backend: str, named: tuple[NamedList, ...], *, timed: bool
) -> tuple[CaptureList, ...]:
    """Every list under every setting; first the one that latency is timed on, when anything is timed."""
    settings = _settings(loaded)
    if backend == "breakable":
        # Attention runs between the segments: there is no workspace that a size could have for itself.
        settings = list(dict.fromkeys((order, output, "shared") for order, output, _ in settings))
    lists = [
        CaptureList(one.name, "decode", backend, one.sizes, order, output, workspace)
        for order, output, workspace in settings
        for one in named
    ]
    if not timed:
        return tuple(lists)
    timed_on = CaptureList(UNION, "decode", backend, union_of(named))
    same = [one for one in lists if replace(one, name=UNION) == timed_on]
    first = same[0] if same else timed_on
    return (first, *(one for one in lists if one != first))


def _settings(loaded: LoadedRecipe) -> list[tuple[Order, Sharing, Sharing]]:
    axes = loaded.recipe.decode
    together = axes.sharing == "together"
    pairs = zip(axes.output, axes.workspace, strict=True) if together else product(axes.output, axes.workspace)
    both = product(dict.fromkeys(pairs), dict.fromkeys(axes.order))
    return [(order, output, workspace) for (output, workspace), order in both]


def _by_sizes(lists: tuple[CaptureList, ...]) -> list[tuple[CaptureList, ...]]:
    """Lists of the same sizes together, in the order in which the sizes first appear."""
    groups: dict[tuple[int, ...], list[CaptureList]] = {}
    for one in lists:
        groups.setdefault(one.sizes, []).append(one)
    return [tuple(group) for group in groups.values()]


def _controls(loaded: LoadedRecipe, groups: list[tuple[CaptureList, ...]]) -> list[CaptureList]:
    """A tenth, at least one, of the lists that are captured after another one in their process."""
    later = [one for group in groups for one in group[1:]]
    if not later:
        return []

    def draw(one: CaptureList) -> str:
        return hashlib.sha256(f"{loaded.sha} {json.dumps(asdict(one), sort_keys=True)}".encode()).hexdigest()

    return sorted(later, key=draw)[: max(1, round(len(later) / 10))]
