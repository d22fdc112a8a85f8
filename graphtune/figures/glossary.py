"""What the words of a page mean; each is explained in the section that uses it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup, escape

from graphtune.figures.base import Drawing, NamedTable, Table


@dataclass(frozen=True)
class Word:
    """A word as shown, what it means, and the expression that finds it in a text."""

    name: str
    means: str
    found_by: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w-])(?:{self.found_by or re.escape(self.name) + 's?'})(?![\w-])", re.IGNORECASE)


WORDS: tuple[Word, ...] = (
    Word("decode", "The phase in which every running request gets one token per step."),
    Word("prefill", "The phase that reads new tokens of prompts, before a request decodes."),
    Word("CUDA graph", "A recorded sequence of kernels that is launched with one call."),
    Word("replay", "One launch of a recorded graph: all kernels of a step at once.", "replay(?:s|ed)?"),
    Word("eager", "Every kernel of a step launched by itself from the model's Python code, without a graph."),
    Word("capture", "Recording a step as a graph for one size.", "capture[sd]?|capturing"),
    Word("size", "The number of requests (decode) or tokens (prefill) that a graph was recorded for.", "sizes?"),
    Word("bucket", "A captured size; a batch is padded up to the next one."),
    Word("padded", "Filled up with rows that carry no request, to reach a captured size.", "padd(?:ed|ing)"),
    Word("padding waste", "Share of computed rows that are padding, over steps that a graph serves."),
    Word("graph coverage", "Share of steps that a graph serves; the others run eager.", "(?:graph )?coverage"),
    Word("expected step", "Mean step time over the traffic, each step weighted by how often it occurs."),
    Word("step time", "Wall time of one step, from its start until its output can be read.", "step times?|step_us"),
    Word("gpu_us", "Time on the device, from the start of the first kernel to the end of the last, in µs."),
    Word("host_us", "Time on the CPU until the last launch returns, the device idle before, in µs."),
    Word("hidden_us", "What the host does while the GPU works: host_us + gpu_us − step_us."),
    Word(
        "overlapped step",
        "A step during which the next one is prepared, as overlap schedulers of servers do.",
        "overlapped(?: steps?)?",
    ),
    Word("plan", "Dividing attention's work for the batch at hand, on the CPU before each step.", "plan(?:ning)?"),
    Word("fill", "Copying the batch into the static buffers that a graph reads.", "fill(?:ing)?"),
    Word("launch", "A call that hands a kernel, or a whole graph, to the device.", "launch(?:es|ed|ing)?"),
    Word("kernel", "One program that the device runs; a step is some hundreds of them."),
    Word("idle share", "Share of a step in which no kernel runs.", "idle(?: share| time)?"),
    Word("static buffers", "Tensors at fixed addresses that every replay reads its input from."),
    Word("workspace", "Scratch memory of the attention kernels."),
    Word("activation peak", "Most memory that intermediate results of one step hold at a time."),
    Word("engine's reserve", "Memory that a serving engine leaves free by its own rule."),
    Word("graph memory", "Device memory after all captures minus before the first; the KV cache lacks it."),
    Word("graph pool", "Memory from which all graphs of a process take their intermediate results."),
    Word("executable", "The form of a graph that the driver can launch; its memory lies outside torch."),
    Word("KV tokens", "Tokens whose keys and values attention reads, or that fit the KV cache."),
    Word("KV cache", "Memory for the keys and values of all tokens of running requests."),
    Word("warm-up", "Eager runs of a size before it is recorded, so that nothing is loaded while recording."),
    Word("record", "Running a step once while the driver writes its kernels down.", "record(?:ed|ing)?"),
    Word("instantiate", "Turning a recorded graph into an executable one."),
    Word("full graph", "One graph for the whole step.", "full graphs?|full(?=, )"),
    Word("breakable", "A graph cut at attention: recorded segments, with attention run eagerly in between."),
    Word("segment", "A recorded part of a breakable graph."),
    Word("break", "A place between two segments where code runs eagerly.", "breaks?"),
    Word("crossover", "The number of tokens from which a padded replay is faster than eager at the exact size."),
    Word("waste cap", "Largest ratio of padded to real tokens up to which an engine replays; above it runs eager."),
    Word("both shared", "Output and workspace are the same memory for all sizes."),
    Word("per size", "Every size has an output or workspace of its own."),
    Word("descending", "Captured from the largest size to the smallest."),
    Word("ascending", "Captured from the smallest size to the largest."),
    Word("composed", "Put together from this list's bytes in torch and another list's bytes outside torch."),
    Word("interpolated", "On the line between two measured points."),
    Word("disturbed", "Sampled while the machine did something else, as the samples themselves show."),
    Word(
        "process",
        "One run of the program from start to end; figures of several show how far they agree.",
        "process(?:es)?",
    ),
    Word("cell", "What one process of a sweep measures."),
    Word("median", "The middle one of the samples in order.", "medians?"),
    Word("geometric mean", "The n-th root of the product of n figures; the mean for ratios.", "geometric means?"),
    Word("front", "Lists that no other list beats in both graph memory and step time."),
    Word("interval", "Where the ratio lies at the stated confidence, corrected for the number of rows.", "intervals?"),
    Word("tolerance", "The difference up to which two figures count as the same, or as equal results."),
    Word("undecided", "The interval reaches beyond the tolerance and back: more processes would decide."),
    Word("base", "The measurement that is compared against."),
)


def words_in(text: str) -> tuple[Word, ...]:
    """Words of the glossary that the text uses, in the glossary's order."""
    return tuple(word for word in WORDS if word.pattern.search(text))


def section_text(drawings: Iterable[Drawing], tables: Iterable[NamedTable]) -> str:
    """Everything that a section says in words: titles, sentences, legends, and the texts of its tables."""
    parts: list[str] = []
    for drawing in drawings:
        parts += [drawing.title, drawing.says, *(key.label for key in drawing.keys), table_text(drawing.table)]
    for named in tables:
        parts += [named.title, named.says, table_text(named.table)]
    return "\n".join(parts)


def table_text(table: Table) -> str:
    """Column titles and the short texts among the cells; long ones are messages, not words of the page."""
    texts = [index for index, column in enumerate(table.columns) if not column.numeric]
    cells = dict.fromkeys(row[index] for row in table.rows for index in texts if len(row[index]) < 40)
    return "\n".join([*(column.title for column in table.columns), *cells])


def explained(text: str) -> Markup:
    """The text with each word of the glossary marked where it stands first, its meaning as a tip."""
    marked, at = [], 0
    for start, end, word in _first_places(text):
        tip = Markup('<dfn title="{}">{}</dfn>').format(word.means, text[start:end])
        marked += [escape(text[at:start]), tip]
        at = end
    return Markup("").join([*marked, escape(text[at:])])


def _first_places(text: str) -> list[tuple[int, int, Word]]:
    """Where each word stands first, in order; of two that overlap the longer."""
    found = [(match.start(), match.end(), word) for word in WORDS if (match := word.pattern.search(text))]
    found.sort(key=lambda place: (place[0], -place[1]))
    places: list[tuple[int, int, Word]] = []
    for place in found:
        if not places or place[0] >= places[-1][1]:
            places.append(place)
    return places
