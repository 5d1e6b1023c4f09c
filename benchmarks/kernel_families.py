"""Where a step's time goes, by families of kernels, from the trace of a profiled run of train.py.

    torchrun ... train.py ... --set run.profile=[10,11] --out runs/cord
    python benchmarks/kernel_families.py runs/cord/profile/rank-00000.json --steps 2

A kernel belongs to the first family whose pattern its name matches; attention of the tower and of the decoder differ in
the kernel (FlashAttention 4 only in the tower) or in the head size that stands in cuDNN's names (64, 72 or 128 in
towers, 256 in decoders). Times are sums over streams: what overlaps counts twice, and waiting for other ranks within a
communication kernel is communication. `busy`: the share of the time from the first kernel's begin to the last one's end
in which any kernel ran. It is the trace of one rank: where ranks encode different images, rank 0 has the costliest one.

Communication `alone` is the time in which only messages ran. `transfer` is what messages take without waiting: each
takes as long as on the rank that came last to it. It is known if the folder has the traces of all ranks.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
from pathlib import Path
from typing import Any

FAMILIES = {
    "communication": r"nccl",
    "tower attention": r"flash_?attn|FlashAttention|sdpa.*_\d+x\d+x(64|72|80|128)_|compute_dot_do_o.*, (64|72|80|128)>",
    "decoder attention": r"sdpa|compute_dot_do_o",
    "delta rule and convolution": r"causal_conv1d|chunk_|prepare_wy|recompute_w_u|merge_16x16|l2norm_|_delta_",
    "rotation in the tower": r"_split_and_rotate|rope",
    "AdamW, gradient norm and scaling": r"multi_tensor",
    "matrix products": r"nvjet|gemm|cublas|cutlass|splitKreduce",
    "norms": r"_sum_and_(rms_)?norm|_sum_of_parts|rmsnorm|layer_?norm|::ln_(fwd|bwd)|normalization",
    "GELU, SwiGLU": r"[Gg]elu|[Ss]wi?glu|sigmoid_silu|mul_silu",
    "copies and fills": r"[Mm]emcpy|[Mm]emset|copy_kernel|FillFunctor|CatArray",
}


def family(name: str) -> str:
    return next((each for each, pattern in FAMILIES.items() if re.search(pattern, name)), "other")


def covered(kernels: list[dict[str, Any]]) -> float:
    """The length of the time in which any of these kernels ran, in milliseconds."""
    length, last = 0.0, float("-inf")
    for each in sorted(kernels, key=lambda each: each["ts"]):
        end = each["ts"] + each["dur"]
        length += max(0.0, end - max(each["ts"], last))
        last = max(last, end)
    return length / 1e3


def kernels_of(trace: Path) -> list[dict[str, Any]]:
    """The kernels, copies and fills of a trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def messages_of(kernels: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Durations of messages in milliseconds, in the order of each kind, which is the same on all ranks."""
    found: dict[str, list[float]] = {}
    for each in sorted(kernels, key=lambda each: each["ts"]):
        if family(each["name"]) == "communication":
            found.setdefault(each["name"], []).append(each["dur"] / 1e3)
    return found


def transfer(traces: list[Path]) -> float | None:
    """Milliseconds of messages without waiting for another rank; None if ranks differ in their messages."""
    ranks = [messages_of(kernels_of(trace)) for trace in traces]
    if len({tuple((name, len(found[name])) for name in sorted(found)) for found in ranks}) != 1:
        return None
    return sum(min(each) for name in ranks[0] for each in zip(*(found[name] for found in ranks), strict=True))


def kernel_sums(trace: Path, steps: int) -> dict[str, Any]:
    """Milliseconds a step by family and of the longest kernels, and how busy the device was."""
    kernels = kernels_of(trace)
    span = (max(each["ts"] + each["dur"] for each in kernels) - min(each["ts"] for each in kernels)) / 1e3
    busy = covered(kernels)
    families: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    for each in kernels:
        families[family(each["name"])] += each["dur"] / 1e3 / steps
        names[each["name"][:100]] += each["dur"] / 1e3 / steps
    others = [each for each in kernels if family(each["name"]) != "communication"]
    traces = sorted(trace.parent.glob("rank-*.json"))
    sent = transfer(traces) if len(traces) > 1 else None
    return {
        "families": dict(families),
        "kernels": len(kernels) / steps,
        "span": span / steps,
        "busy": busy / span,
        "alone": (busy - covered(others)) / steps,
        "transfer": None if sent is None else sent / steps,
        "longest": dict(names.most_common(30)),
        "longest_of_other": {k: v for k, v in names.most_common() if family(k) == "other" and v > 0.2},
    }


def table(profiles: dict[str, dict[str, Any]]) -> list[str]:
    """Rows of a Markdown table, a column for each profile."""
    lines = ["| kernels of a step, ms (share) | " + " | ".join(profiles) + " |", "|---|" + "---|" * len(profiles)]
    totals = {name: sum(found["families"].values()) for name, found in profiles.items()}
    for row in [*FAMILIES, "other"]:
        values = {name: found["families"].get(row, 0.0) for name, found in profiles.items()}
        lines.append(f"| {row} | " + " | ".join(f"{v:.1f} ({v / totals[k]:.0%})" for k, v in values.items()) + " |")
    for row in ("alone", "transfer"):  # earlier results have neither
        if any(found.get(row) for found in profiles.values()):
            values = [f"{each:.1f}" if (each := found.get(row)) is not None else "" for found in profiles.values()]
            lines.append(f"| communication, {row} | " + " | ".join(values) + " |")
    lines.append("| all kernels | " + " | ".join(f"{total:.0f}" for total in totals.values()) + " |")
    lines.append("| kernels | " + " | ".join(f"{found['kernels']:,.0f}" for found in profiles.values()) + " |")
    lines.append("| from the first to the last | " + " | ".join(f"{p['span']:.0f}" for p in profiles.values()) + " |")
    lines.append("| busy of that | " + " | ".join(f"{found['busy']:.0%}" for found in profiles.values()) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=1, help="steps that were profiled")
    options = parser.parse_args()
    found = kernel_sums(options.trace, options.steps)
    print("\n".join(table({"": found})))
    for title in ("longest", "longest_of_other"):
        print(f"\n{title}:")
        for name, value in found[title].items():
            print(f"{value:9.2f} ms  {name}")


if __name__ == "__main__":
    main()
