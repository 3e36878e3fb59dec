"""Memory of the extraction: on each GPU, and on the host of the shard's one node."""

from __future__ import annotations

from draftsmith.estimate import storage
from draftsmith.estimate.model import Figure
from draftsmith.estimate.target import Subject
from draftsmith.estimate.weights import kv_bytes_per_token, weights
from draftsmith.extract_shard import plan

_GB = 10**9
# Resident memory of the processes with PyTorch and vLLM in them, as measured: one process on a CPU with vLLM 0.32; driver,
# engine and the first worker on an H200 with vLLM 0.26 (2.6 to 2.9 GB, benchmarks/RESULTS.md), and what each more is assumed to add.
_CPU_PROCESS = 1.4 * _GB
_GPU_PROCESSES, _MORE_WORKER = 2.8 * _GB, 1.5 * _GB


def step_tokens(subject: Subject) -> int:
    """Tokens of an engine step, as :func:`draftsmith.engine.vllm_arguments` sets it."""
    return subject.config.engine.max_num_batched_tokens or (2048 if subject.device == "cpu" else 16384)


def on_gpu(subject: Subject, longest: int, gpu_bytes: int | None) -> list[Figure]:
    """What each GPU holds; ``gpu_bytes`` is its memory, where known."""
    if subject.device == "cpu":
        return []
    tp, engine = subject.config.engine.tp, subject.config.engine
    whole, how = weights(subject)
    per_token, cache = kv_bytes_per_token(subject)
    states = storage.per_token(subject, "target")
    step = step_tokens(subject)
    figures = [
        Figure(name="weights", bytes=whole // tp, formula=f"{whole / _GB:,.1f} GB / {tp} ranks; {how}"),
        Figure(
            name="captured states", bytes=2 * step * states,
            formula=f"2 x {step:,} tokens of a step x {states:,} bytes: as the model gives them, and the copies on their way",
        ),
    ]  # fmt: skip
    if gpu_bytes is None:
        return [
            *figures,
            Figure(
                name="KV cache, at least", bytes=longest * per_token,
                formula=f"{longest:,} tokens of the longest row x {per_token:,} bytes ({cache})",
            ),
        ]  # fmt: skip
    room = int(gpu_bytes * engine.gpu_memory_utilization) - figures[0].bytes - figures[1].bytes
    formula = (
        f"{engine.gpu_memory_utilization:g} x {gpu_bytes / _GB:,.1f} GB - the above (vLLM takes all that is left, less its own "
        f"activations): {max(0, room) // max(1, per_token):,} tokens of {per_token:,} bytes ({cache})"
    )
    return [*figures, Figure(name="KV cache", bytes=max(0, room), formula=formula)]


def on_host(subject: Subject, lengths: list[list[int]]) -> list[Figure]:
    """What the shard's processes hold on the host; ``lengths`` are those of the rows of each of its batches."""
    config, tp = subject.config, subject.config.engine.tp
    kind = config.extract.storage
    figures = []
    if subject.device == "cpu":
        whole, how = weights(subject)
        cache = config.engine.kv_cache_gib * 2**30
        figures += [
            Figure(name="processes", bytes=int(_CPU_PROCESS * tp), formula=f"{tp} x 1.4 GB with PyTorch and vLLM, as measured"),
            Figure(name="weights", bytes=whole, formula=f"{whole / _GB:,.2f} GB; {how}"),
            Figure(name="KV cache", bytes=int(cache * tp), formula=f"{tp} ranks x engine.kv_cache_gib {config.engine.kv_cache_gib:g}"),
        ]  # fmt: skip
    else:
        size = _GPU_PROCESSES + (tp - 1) * _MORE_WORKER
        formula = f"2.8 GB as measured, and 1.5 GB for each of {tp - 1} more workers, as assumed"
        figures.append(Figure(name="processes", bytes=int(size), formula=formula))
    if lengths:
        figures.append(_ring(subject, kind, lengths))
    if config.engine.args.get("load_format") != "dummy" and config.extract.verify_rows:
        rows, width = subject.outline["vocab_size"], subject.outline["hidden_size"]
        item = 4 if subject.dtype == "float32" else 2
        figures.append(
            Figure(
                name="the target's head", bytes=rows * width * item,
                formula=f"{rows:,} x {width:,} x {item} bytes, for comparing states with the engine's tokens",
            )
        )  # fmt: skip
    return figures


def _ring(subject: Subject, kind: str, lengths: list[list[int]]) -> Figure:
    """The batch buffers, pinned on a GPU's host (draftsmith.extract_shard.buffers); writers need nothing besides."""
    longest, most = max(sum(batch) for batch in lengths), max(len(batch) for batch in lengths)
    # As Session.attach sizes them: the most tokens and the most rows that a batch has.
    head, size = storage.layout(subject, kind, [0] * (most - 1) + [longest])
    each = size - head + 4 * longest
    count = plan.buffers(step_tokens(subject), longest, len(lengths))
    return Figure(
        name="batch buffers", bytes=count * each,
        formula=f"{count} buffers (at most {plan.IN_WRITING} in writing + {step_tokens(subject):,} tokens of a step / {longest:,} of a batch + 2) "
        f"x {each:,} bytes, with 4 bytes a token to look at",
    )  # fmt: skip
