"""A tape: the ATen operations of one call, recorded once and replayed without the model's Python.

The CPU's counterpart of a CUDA graph: frozen addresses and shapes, intermediates in a pool that reuses bytes, nothing
written outside that pool while recording. It checks the machinery around graphs; on a CPU it saves no time. Where it
differs from a CUDA graph: operations within the pool do run while recording (their results are destroyed afterwards);
a failed recording returns its memory once its traceback is gone; tensors from outside are kept alive; operations on
other threads are not seen, nor are pickling and raw pointers; ``Tensor.to("cpu")`` costs nothing here and is let pass;
modules of torch that leave their fused path under a function mode (``nn.TransformerEncoderLayer``) are recorded so.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphtune.worker.graphs.backend import CaptureError, Forward
from graphtune.worker.graphs.failure import explain
from graphtune.worker.graphs.tape_pool import BytePool
from graphtune.worker.graphs.tape_recorder import (
    Entry,
    HostReads,
    Made,
    Outside,
    Recorder,
    RecorderBesideCompiler,
    Recording,
    Ref,
    at_address,
    describe,
    view_of,
)


class Tape:
    """A recording written out as straight-line Python over tensors at frozen addresses."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._run, self._name = write_out(recording.entries, recording.pool)

    @property
    def output(self) -> torch.Tensor:
        """The tensor that the call returned: garbage before the first replay, rewritten by each."""
        return self.recording.output

    @property
    def nodes(self) -> int:
        """Operations per replay; views and allocations are none."""
        return len(self.recording.entries)

    def operations(self) -> Counter[str]:
        """Operations per replay by name."""
        return Counter(str(entry.call) for entry in self.recording.entries)

    @property
    def externals(self) -> tuple[Outside, ...]:
        """Every tensor outside the pool whose memory a replay reads or writes, with the line that first used it."""
        return tuple(outside for outside in self.recording.outside if not outside.constant)

    def replay(self) -> torch.Tensor:
        """Run the entries and return ``output``."""
        try:
            # Inference mode also lets inference tensors from outside be written.
            with torch.inference_mode():
                self._run()
        except Exception as error:
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == self._name and frame.lineno is not None:
                    error.add_note(f"while replaying {self.recording.entries[frame.lineno - 2].origin}")
            raise
        return self.output

    def unowned(self, owners: Mapping[str, torch.Tensor]) -> list[Outside]:
        """The externals that lie in no owner's storage: stray temporaries that nobody promised to keep."""
        spans = [storage_span(tensor) for tensor in owners.values()]

        def owned(outside: Outside) -> bool:
            low, high = storage_span(outside.tensor)
            return any(start <= low and high <= stop for start, stop in spans)

        return [outside for outside in self.externals if not owned(outside)]

    def escaped(self) -> list[Made]:
        """Tensors made while recording that are still alive, the output apart: the next replay overwrites them."""
        gc.collect()  # else cycles that nobody can reach would be named too
        alive = [made for made in self.recording.made if made.block() is not None]
        return [made for made in alive if made.address != self.recording.output_address]


def record(forward: Forward, pool: BytePool, *, hold_output: bool = True) -> Recording:
    """Call ``forward`` once, recording its operations and placing what it makes in ``pool``.

    Call it twice before: a cache that is built lazily would otherwise live in the pool. Nothing outside the pool is
    written, neither tensors nor torch's random state, and the pool bytes that were used are destroyed, so the output
    is garbage until the first replay. Without ``hold_output``, later recordings may use the output's bytes again.
    Raises CaptureError naming operation, file, line and source text.
    """
    return record_with(make_recorder(pool), forward, pool, hold_output=hold_output)


def make_recorder(pool: BytePool) -> Recorder:
    """A recorder for one recording into ``pool``."""
    return RecorderBesideCompiler(pool) if "torch._dynamo" in sys.modules else Recorder(pool)


def record_with(recorder: Recorder, forward: Forward, pool: BytePool, *, hold_output: bool) -> Recording:
    """``record`` with a recorder at hand, which ``forward`` may pause."""
    random_state = torch.get_rng_state()
    try:
        with recorder, HostReads(recorder):
            returned = forward()
    except (CaptureError, MemoryError):
        raise
    except Exception as error:
        raise CaptureError(explain(error)) from error
    finally:
        torch.set_rng_state(random_state)
    if recorder.refused is not None:
        # The model caught the refusal; a CUDA capture is lost then too.
        raise CaptureError(recorder.refused)
    if not isinstance(returned, torch.Tensor):
        raise CaptureError(f"the recorded call must return one tensor, not {type(returned).__name__}")
    recording = recorder.recording(returned, hold_output)
    for made in recording.made:
        pool.poison(made.address, made.nbytes)
    return recording


def write_out(entries: Sequence[Entry], pool: BytePool) -> tuple[Callable[[], None], str]:
    """Entries as one generated function, entry i on line i + 2, and the file name that its frames carry."""
    names: dict[Any, str] = {}
    values: dict[str, Any] = {}

    def bind(value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        key = value if isinstance(value, Ref) else id(value)
        if key not in names:
            names[key] = f"v{len(names)}"
            values[names[key]] = tensors_of(value, pool)
        return names[key]

    def line(entry: Entry) -> str:
        arguments = [bind(value) for value in entry.args]
        arguments += [f"{name}={bind(value)}" for name, value in entry.kwargs.items()]
        call = f"{bind(entry.call._op)}({', '.join(arguments)})"
        copies = [f"{bind(ref)}.copy_(x{''.join(f'[{i}]' for i in path)})" for path, ref in entry.results]
        return "; ".join([f"x = {call}", *copies, "x = None"]) if copies else call

    name = f"<tape {id(entries):x}>"
    # Replays run in inference mode, where inference tensors skip what autograd would want to know of each operation.
    with torch.inference_mode():
        body = [line(entry) for entry in entries] or ["pass"]
    source = "\n    ".join(["def run():", *body])
    exec(compile(source, name, "exec"), values)
    return values["run"], name


def tensors_of(value: Any, pool: BytePool) -> Any:
    """Descriptions, alone or in lists, as tensors over the memory they describe; anything else as it is."""
    if isinstance(value, Outside):
        tensor = value.tensor
        return view_of(tensor.untyped_storage(), int(tensor.storage_offset()), describe(tensor))
    if isinstance(value, (list, tuple)):
        return type(value)(tensors_of(item, pool) for item in value)
    return at_address(value, pool) if isinstance(value, Ref) else value


def storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and end of the storage under a tensor."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
