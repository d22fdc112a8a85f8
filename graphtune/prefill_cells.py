"""The prefill cells of a recipe: one per list and backend, because only a process's first list shows all its bytes.

Every bucket is timed at its size and just over the bucket below, where padding is worst, beside eager runs of exactly
those tokens. Nothing is left out by the waste cap there: the times show what a cap is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphtune.errors import InputError
from graphtune.kv_pool import Need
from graphtune.named_lists import NamedList, at_most, union_of
from graphtune.plan import Cell, PrefillAt, Repeats
from graphtune.recipe import LoadedRecipe
from graphtune.results import CaptureList, Execution

TOKENS_PER_SLOT = 512
"""A full recording has one request slot per this many tokens of its largest size, as SGLang's has."""

PREFIX_PAGES = 16
"""Pages beside the tokens themselves that the correctness gate may take for prefixes and another live request."""

REPEATED_UP_TO = 2048
"""Largest bucket that further processes time: above, no host has a part in the time, and each takes long."""

EAGER_WITH_FULL_UP_TO = 128
"""Tokens up to which eager is timed again beside full recordings; above, that of the breakable process will do."""


@dataclass(frozen=True)
class PrefillPlan:
    """The named prefill lists of a recipe, in tokens."""

    loaded: LoadedRecipe
    named: tuple[NamedList, ...]

    def needs(self) -> list[Need]:
        """What the KV pool should hold: the largest bucket's tokens and the batches of several requests."""
        loaded = self.loaded
        page = loaded.recipe.page_size
        top = max(self.named, key=lambda one: one.sizes[-1])
        tokens = top.sizes[-1] + PREFIX_PAGES * page
        where = loaded.source.where(("prefill", "lists"))
        batches = [
            Need(batch.requests, -(-max(batch.sizes) // batch.requests) + batch.prefix)
            for batch in loaded.recipe.prefill.batches
        ]
        return [Need(1, tokens, bucket=top.sizes[-1], least=tokens, where=where), *batches]

    def cells(self, template: Cell, repeats: Repeats) -> list[Cell]:
        """Cells of the first process check the outputs and time both ends of every bucket. What tells the noise is
        breakable, at buckets of up to ``REPEATED_UP_TO`` tokens.

        Raises InputError for sizes above the largest bucket.
        """
        loaded = self.loaded
        axes = loaded.recipe.prefill
        union = union_of(self.named)
        profile = at_most(axes.profile_sizes, union, loaded, ("prefill", "profile_sizes"))
        for index, batch in enumerate(axes.batches):
            at_most(batch.sizes, union, loaded, ("prefill", "batches", index, "sizes"))
            _check_context(loaded, index)
        cells = []
        for process in range(1, repeats.processes + 1):
            for of in self._lists():
                everything = process == 1 or repeats.whole
                if of.backend == "full" and not everything:
                    continue
                cells.append(
                    replace(
                        template,
                        phase="prefill",
                        lists=(of,),
                        prefill_latency=tuple(self._latency(of, both_ends=everything)),
                        profile_sizes=tuple(size for size in profile if size <= of.sizes[-1]) if process == 1 else (),
                        gate=process == 1,
                        process=process,
                    )
                )
        return cells

    def first_list(self) -> CaptureList:
        """The recipe's first list."""
        return next(self._lists())

    def _lists(self) -> Iterator[CaptureList]:
        axes = self.loaded.recipe.prefill
        for backend in axes.backends:
            if backend == "eager":
                continue
            for order in dict.fromkeys(axes.order):
                for one in self.named:
                    of = CaptureList(one.name, "prefill", backend, one.sizes, order, waste_cap=axes.waste_cap)
                    if backend == "breakable":
                        yield of
                    elif (full := self._full(of)).sizes:
                        yield full

    def _full(self, of: CaptureList) -> CaptureList:
        """The list as far as it is recorded in full, with its request slots."""
        most = self.loaded.recipe.prefill.full_up_to or of.sizes[-1]
        sizes = tuple(size for size in of.sizes if size <= most)
        name = of.name if sizes == of.sizes else f"{of.name}-up-to-{most}"
        return replace(of, name=name, sizes=sizes, request_slots=max(max(sizes, default=0) // TOKENS_PER_SLOT, 1))

    def _latency(self, of: CaptureList, *, both_ends: bool) -> Iterator[PrefillAt]:
        axes = self.loaded.recipe.prefill
        if both_ends:
            tokens = {*of.sizes, *(below + 1 for below in (0, *of.sizes[:-1]))}
        else:
            tokens = {size for size in of.sizes if size <= REPEATED_UP_TO}
        executions: tuple[Execution, ...] = ("graph", "eager") if "eager" in axes.backends else ("graph",)
        split = EAGER_WITH_FULL_UP_TO if of.backend == "full" else of.sizes[-1]
        beside_eager = tuple(sorted(size for size in tokens if size <= split))
        if beside_eager:
            yield PrefillAt(beside_eager, executions=executions)
        longer = tuple(sorted(size for size in tokens if size > split))
        if longer:
            yield PrefillAt(longer, executions=("graph",))
        if both_ends:
            for batch in axes.batches:
                held = tuple(size for size in sorted(set(batch.sizes)) if size <= of.sizes[-1])
                if held and batch.requests <= (of.request_slots or batch.requests):
                    alone: tuple[Execution, ...] = ("graph",) if of.backend == "full" else executions
                    yield PrefillAt(held, batch.requests, batch.prefix, alone)


def joint_cells(template: Cell, decode: CaptureList, prefill: CaptureList) -> list[Cell]:
    """A list of each phase in one pool, in either order: what the phases take together."""
    joint = replace(template, phase="prefill", purpose="joint")
    return [
        replace(joint, lists=(decode, prefill), gate=False),
        # Serving engines capture prefill first; that order is the one whose outputs are checked.
        replace(joint, lists=(prefill, decode), gate=True),
    ]


def _check_context(loaded: LoadedRecipe, index: int) -> None:
    batch = loaded.recipe.prefill.batches[index]
    longest = -(-max(batch.sizes) // batch.requests) + batch.prefix
    limit = loaded.model.max_position_embeddings
    if longest > limit:
        raise InputError(
            f"requests of {longest} tokens, prefix included, are beyond the model's {limit} positions",
            where=loaded.source.where(("prefill", "batches", index)),
            action="Use a shorter prefix or more requests.",
        )
