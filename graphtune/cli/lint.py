"""`graphtune lint`: verdicts on capture settings, with no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graphtune.engines.base import DeviceFacts, Engine
    from graphtune.tune.verdict import LintReport

# Engines have one-dash flags such as -cc.key=value, whose letters must not be taken for -h.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}


def register(app: typer.Typer) -> None:
    """Add the ``lint`` command."""
    app.command("lint", context_settings=CONTEXT)(lint)


def lint(
    context: typer.Context,
    engine: Annotated[
        str | None, typer.Option("--engine", help="sglang, vllm or tensorrt-llm; a launch command or a log may say it.")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="YAML or JSON file that the engine is given.")] = None,
    log: Annotated[str | None, typer.Option("--log", help="Server log, or the JSON of SGLang's /server_info.")] = None,
    gpu_mem: Annotated[str | None, typer.Option("--gpu-mem", help="Card: 80 (nominal), 81559MiB, 80GiB.")] = None,
    compute_capability: Annotated[
        str | None, typer.Option("--compute-capability", help="Such as 9.0 or 10.0; some lists and modes depend on it.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option("--engine-version", help="Default: the version checked.")
    ] = None,
    dense_share: Annotated[
        float | None, typer.Option("--dense-share", help="Padding share below which neighbours are dense.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check capture settings: flags of the engine, "A LAUNCH COMMAND" in quotes, --config FILE or --log FILE.

    Verdicts: error (crashes or refuses), gap (a reachable batch has no graph), mode (runs another than asked), changed
    (silently altered), waste (never reached), dense (saves little), risk. Exit 1 on error or gap, 2 on bad input.
    """
    report = _report(context.args, engine, config, log, gpu_mem, compute_capability, engine_version, dense_share)
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps({"schema": 1, **asdict(report), "exit_code": report.exit_code}, indent=1))
    else:
        for line in report_lines(report):
            typer.echo(line)
    raise typer.Exit(report.exit_code)


def _report(
    args: list[str],
    engine: str | None,
    config: str | None,
    log: str | None,
    gpu_mem: str | None,
    capability: str | None,
    version: str | None,
    dense_share: float | None,
) -> LintReport:
    from graphtune.engines import engine_named
    from graphtune.engines.launch_source import launch_of
    from graphtune.errors import InputError
    from graphtune.tune.lint import lint_launch

    if dense_share is not None and not 0 < dense_share < 1:
        raise InputError(f"{dense_share} is no share", where="--dense-share", action="Above 0 and below 1.")
    if log is not None:
        if args or config is not None:
            raise InputError("a log is checked alone", where="--log", action="Leave out flags and --config.")
        return _log_report(log, engine)
    named, launch, source = launch_of(args, engine, config)
    if named is None:
        raise InputError("no engine is named", where="lint", action="Add --engine sglang, vllm or tensorrt-llm.")
    chosen: Engine = engine_named(named)
    if version is not None:
        chosen = chosen.at_version(version)
    return lint_launch(chosen, launch, _device(gpu_mem, capability), source=source, dense_share=dense_share)


def _log_report(log: str, engine: str | None) -> LintReport:
    from graphtune.engines import engine_named
    from graphtune.tune.lint_log import lint_log
    from graphtune.tune.log_summary import summarise_file

    return lint_log(summarise_file(log, engine_named(engine).name if engine is not None else None))


def _device(gpu_mem: str | None, capability: str | None) -> DeviceFacts:
    import re

    from graphtune.engines.base import DeviceFacts
    from graphtune.errors import InputError
    from graphtune.units import parse_gpu_memory

    memory = parse_gpu_memory(gpu_mem) if gpu_mem is not None else None
    pair = None
    if capability is not None:
        found = re.fullmatch(r"(\d{1,2})\.(\d)", capability)
        if found is None:
            raise InputError(
                f"{capability!r} is no compute capability", where="--compute-capability", action="Write 9.0."
            )
        pair = (int(found[1]), int(found[2]))
    return DeviceFacts(memory.nvml_total_mib if memory else None, pair, memory.card if memory else None)


def report_lines(report: LintReport) -> list[str]:
    """A report in plain lines: what is captured, then the verdicts, worst first, each with its edit, which is one line
    to be copied."""
    import shlex

    from graphtune.terminal import wrapped
    from graphtune.tune.verdict import MEANING

    lines = [f"{report.engine} {report.version or '(version not stated)'}, from {report.source}"]
    for phase in report.phases:
        sizes = f"{phase.sizes[0]}…{phase.sizes[-1]} {phase.unit}" if phase.sizes else "no sizes"
        runner = f" (runner {phase.runner})" if phase.runner else ""
        reach = f"; {phase.reach}" if phase.reach else ""
        lines += wrapped(f"{phase.phase}{runner}: {phase.graphs}, {sizes}{reach}", "  ", "    ", break_words=False)
    for verdict in report.verdicts:
        where = f" [{verdict.where}]" if verdict.where else ""
        runner = f" (runner {verdict.runner})" if verdict.runner else ""
        text = f"{verdict.code}{runner}{where}: {verdict.message}"
        lines += wrapped(text, following="  ", break_words=False)
        lines += [f"    mend: {edit}" for edit in verdict.edit]
        if verdict.mended is not None and verdict.mended.args:
            lines.append(f"    then: {shlex.join(verdict.mended.args)}")
        if verdict.mended is not None and verdict.mended.yaml:
            lines += [f"    | {row}" for row in verdict.mended.yaml.splitlines()]
    if not report.verdicts:
        lines.append("nothing to report")
    codes = dict.fromkeys(verdict.code for verdict in report.verdicts)
    for text in (*(f"{code}: {MEANING[code]}" for code in codes), *(f"assumed: {one}" for one in report.assumptions)):
        lines += wrapped(text, "  ", "    ", break_words=False)
    return lines
