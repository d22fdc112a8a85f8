"""Every captured list in figures: bytes and where they lie, seconds, the gate, and lists measured again alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from graphtune.figures.base import Column, NamedTable, Table, mib, setting_words
from graphtune.results import CapturedList, CellResult, GateCheck
from graphtune.tune.memory_model import ListKey, MeasuredList, MemoryModel, key_of


def list_totals(*models: MemoryModel) -> NamedTable | None:
    """Bytes and seconds of every list that was captured whole; a model for each phase."""
    measured = [one for memory in models for one in memory.lists]
    if not measured:
        return None
    columns = (
        Column("list", numeric=False),
        Column("phase", numeric=False),
        Column("setting", numeric=False),
        Column("graphs"),
        Column("graph memory, MiB"),
        Column("of it torch, MiB"),
        Column("outside torch, MiB"),
        Column("outside", numeric=False),
        Column("peak while capturing, MiB"),
        Column("per graph, MiB"),
        Column("capture, s, mean"),
        Column("processes"),
    )
    ordered = sorted(measured, key=lambda one: (one.list.phase, one.list.name, one.largest_bytes))
    says = (
        "Device bytes after all captures minus before the first, the most that any process read. Torch's part is read "
        "for every list. The rest, graph executables, shows only in the first list of a process, because the driver "
        "keeps their memory when they are destroyed: it is measured there, and elsewhere composed, that is taken over "
        "from the first list of the same sizes."
    )
    return NamedTable("All captured lists", says, Table(columns, tuple(map(_total_row, ordered))))


def _total_row(one: MeasuredList) -> tuple[str, ...]:
    count = len(one.list.sizes)
    return (
        one.list.name,
        one.list.phase,
        setting_words(one.list),
        f"{count}",
        mib(one.largest_bytes),
        mib(max(one.torch_bytes, default=None)),
        mib(max(one.outside_bytes, default=None)),
        "–" if not one.outside_bytes else "composed" if one.composed else "measured",
        mib(max(one.peak_bytes, default=None)),
        mib(one.largest_bytes / count),
        f"{sum(one.capture_s) / len(one.capture_s):.2f}" if one.capture_s else "–",
        f"{len(one.graph_bytes)}",
    )


def control_table(*models: MemoryModel) -> NamedTable | None:
    """Lists measured again alone, with the difference; None without controls."""
    controls = [one for memory in models for one in memory.controls]
    if not controls:
        return None
    columns = (
        Column("list", numeric=False),
        Column("phase", numeric=False),
        Column("setting", numeric=False),
        Column("after others, MiB"),
        Column("outside torch there", numeric=False),
        Column("alone, MiB"),
        Column("difference, MiB"),
    )
    rows = tuple(
        (
            one.list.name,
            one.list.phase,
            setting_words(one.list),
            mib(one.shared_bytes),
            "composed" if one.shared_composed else "measured",
            mib(one.alone_bytes),
            ("+" if one.difference_bytes > 0 else "") + mib(one.difference_bytes),
        )
        for one in controls
    )
    says = (
        "Lists captured again alone in a fresh process, where all of their bytes show. The difference is what is wrong "
        "with capturing lists in turn and composing their bytes."
    )
    return NamedTable("Controls", says, Table(columns, rows))


def joint_table(cells: Iterable[CellResult], *models: MemoryModel) -> NamedTable | None:
    """Lists of both phases captured one after the other into one pool; None where none were."""
    alone = {key_of(one.list): one.largest_bytes for memory in models for one in memory.lists}
    rows = []
    for cell in cells:
        sizes = [of.graph_bytes for of in cell.captured_lists]
        if cell.purpose != "joint" or len(sizes) < 2 or None in sizes:
            continue
        known = [size for size in sizes if size is not None]
        apart = [alone.get(key_of(of.list)) for of in cell.captured_lists]
        total = sum(size for size in apart if size is not None) if None not in apart else None
        rows.append(
            (
                " then ".join(f"{of.list.phase} {of.list.name}" for of in cell.captured_lists),
                mib(known[0]),
                mib(sum(known[1:])),
                mib(sum(known)),
                mib(total),
                mib(None if total is None else total - sum(known)),
            )
        )
    if not rows:
        return None
    columns = ("first, MiB", "second, MiB", "together, MiB", "each alone, MiB", "saved, MiB")
    says = (
        "A server captures both phases into one pool. Here both lists were, one after the other with nothing torn down "
        "in between; the second one uses what the first left in the pool. Alone is each list in a pool of its own."
    )
    table = Table((Column("captured", numeric=False), *map(Column, columns)), tuple(rows))
    return NamedTable("Both phases in one pool", says, table)


def gate_tables(cells: Iterable[CellResult]) -> tuple[NamedTable, ...]:
    """One row per list and setting over all processes that checked it, and every size that failed."""
    found: dict[ListKey, list[CapturedList]] = defaultdict(list)
    for cell in cells:
        for of in cell.captured_lists:
            if of.gate:
                found[key_of(of.list)].append(of)
    if not found:
        return ()
    columns = (
        Column("list", numeric=False),
        Column("phase", numeric=False),
        Column("setting", numeric=False),
        Column("sizes passed"),
        Column("bit for bit at the padded shape"),
        Column("largest error at the raw shape"),
        Column("tolerance"),
        Column("KV outside written slots", numeric=False),
        Column("processes that checked"),
    )
    green = sum(_is_green(same) for same in found.values())
    says = (
        f"{green} of {len(found)} lists are green. Every captured size is replayed with fewer live requests than rows, "
        "poisoned padding and lengths that cross a page, and compared with eager. A list is green when some process "
        "checked every size and none failed in any. A size that fails is not recommended."
    )
    tables = [NamedTable("Replay against eager", says, Table(columns, tuple(map(_gate_row, found.values()))))]
    failures = [
        (
            of.list.name,
            of.list.phase,
            setting_words(of.list),
            f"{check.size}",
            check.reason or "no reason stored",
        )
        for same in found.values()
        for of in same
        for check in of.gate
        if not check.passed
    ]
    if failures:
        head = (
            Column("list", numeric=False),
            Column("phase", numeric=False),
            Column("setting", numeric=False),
            Column("size"),
            Column("reason", numeric=False),
        )
        tables.append(NamedTable("Sizes that failed", "These are not recommended.", Table(head, tuple(failures))))
    return tuple(tables)


def _by_size(same: Sequence[CapturedList]) -> dict[int, list[GateCheck]]:
    checks: dict[int, list[GateCheck]] = defaultdict(list)
    for of in same:
        for check in of.gate:
            checks[check.size].append(check)
    return checks


def _is_green(same: Sequence[CapturedList]) -> bool:
    checks = _by_size(same)
    return set(checks) == set(same[0].list.sizes) and all(c.passed for checked in checks.values() for c in checked)


def _gate_row(same: list[CapturedList]) -> tuple[str, ...]:
    of = same[0].list
    checks = _by_size(same)
    everything = [check for checked in checks.values() for check in checked]
    errors = [check.error_at_raw for check in everything if check.error_at_raw is not None]
    return (
        of.name,
        of.phase,
        setting_words(of),
        f"{sum(all(c.passed for c in checked) for checked in checks.values())} of {len(of.sizes)}",
        f"{sum(all(c.equal_at_padded is True for c in checked) for checked in checks.values())}",
        f"{max(errors):.2g}" if errors else "–",
        f"{max(check.tolerance_at_raw for check in everything):.0e}",
        "untouched" if all(check.kv_untouched for check in everything) else "changed",
        f"{len(same)}",
    )
