"""The page of a result of ``loader.py``."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def table(header: list[str], lines: list[list[Any]]) -> str:
    rows = [header, ["---"] * len(header), *([str(cell) for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def giga(rate: float) -> str:
    return f"{rate / 1e9:.2f}"


def report(results: Row) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in results["hardware"].items())
    through, plain = results["throughput"], results["webdataset"]
    sections = [f"# Loader, {results['date']}\n\n{machine}; load average at the end {results['load_average_at_end']}\n"]
    sections.append(
        f"## Bytes per second ({results['source']}, {through['epoch_bytes'] / 1e6:,.0f} MB an epoch in "
        f"{through['packs']} packs, page cache)\n\n"
        f"memcpy: {giga(through['copy_bytes_per_s'])} GB/s, {giga(through['copy_bytes_per_cpu_s'])} GB per CPU second. "
        "Aim: 0.5 of it with one worker.\n\n"
        + table(
            ["workers", "checksums", "GB/s", "of memcpy", "least, most", "of memcpy, in CPU time"],
            [
                [
                    row["num_workers"],
                    "on" if row["verify"] else "off",
                    giga(row["bytes_per_s"]),
                    f"**{row['ratio']:.2f}**",
                    f"{row['ratio_least']:.2f}, {row['ratio_most']:.2f}",
                    f"**{row['cpu_ratio']:.2f}**",
                ]
                for row in through["rows"]
            ],
        )
    )
    sections.append(
        f"## Against plain webdataset ({plain['samples']} samples, one process)\n\n"
        f"webdataset {plain['webdataset_samples_per_s']:,.0f} samples/s, loader {plain['loader_samples_per_s']:,.0f} "
        f"samples/s packed: **{plain['ratio']:.1f}** times, **{plain['cpu_ratio']:.1f}** in CPU time.\n"
    )
    header = [
        "source",
        "rows",
        "on the fly, samples/s",
        "loader",
        "times",
        "loader + bf16 pixel_values on the CPU",
        "times",
    ]
    lines = []
    for row in results["on_the_fly"]:
        line = [f"{row['source']} ({row['formats']})", row["rows"], f"{row['on_the_fly_samples_per_s']:.1f}"]
        for name in ("loader", "loader_and_pixel_values"):
            line.append(f"{row[f'{name}_samples_per_s']:,.0f}")
            line.append(f"**{row[f'{name}_ratio']:.1f}** ({row[f'{name}_cpu_ratio']:.1f})")
        lines.append(line)
    aim = (
        "Decode, transformers' processor and tokenizer per sample, one thread each, no workers. In brackets: CPU time. "
    )
    aim += "Aim: 20 times.\n\n"
    sections.append("## Against work on the fly\n\n" + aim + table(header, lines))
    sections.append(
        "## Short samples (text)\n\n"
        + table(
            ["workers", "samples a pack", "samples/s", "tokens/s"],
            [
                [
                    row["num_workers"],
                    f"{row['samples_per_pack']:.0f}",
                    f"{row['samples_per_s']:,.0f}",
                    f"{row['tokens_per_s']:,.0f}",
                ]
                for row in results["short_samples"]
            ],
        )
    )
    sections.append(
        "## Seconds to the first batch\n\n"
        + table(
            ["data", "samples", "workers", "opened and planned", "first batch", "first batch of a resume in mid-epoch"],
            [
                [
                    row["data"],
                    f"{row['samples']:,}",
                    row["num_workers"],
                    *(f"{row[name]:.2f}" for name in ("open", "fresh", "resumed")),
                ]
                for row in results["first_batch"]
            ],
        )
    )
    sections.append(
        "## Bytes a rank reads in an epoch\n\n"
        + table(
            ["context parallel", "parts", "mean MB", "most MB", "most, of a whole rank"],
            [
                [
                    row["context_parallel"],
                    ", ".join(row["parts"]) or "none (middle stage)",
                    f"{row['mean'] / 1e6:,.2f}",
                    f"{row['most'] / 1e6:,.2f}",
                    f"{row['share']:.4f}",
                ]
                for row in results["bytes_read"]
            ],
        )
    )
    return "\n".join(sections)
