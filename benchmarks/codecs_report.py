"""The result of benchmarks/codecs.py as a page."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def report(results: Row) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in results["hardware"].items())
    codecs = results["codecs"]
    lines = [
        f"# Codecs, {results['date']}",
        "",
        f"`python benchmarks/codecs.py` on {machine}. Medians over rounds; in brackets by CPU time.",
        "",
        *table(["section", "rounds", "load average before and after"], _conditions(results["conditions"])),
        "",
    ]
    for name in results["bytes"]:
        lines += [f"## {name.capitalize()}", "", *_data(results, name, codecs), ""]
    lines += ["## Workers of the loader (receipts)", "", *_workers(results["workers"]), ""]
    lines += ["## Checks (receipts, CPU ms per sample, no workers)", "", *_checks(results["checking"]), ""]
    lines += ["## Recoding (receipts, one worker)", "", *_recoding(results["recoding"]), ""]
    lines += ["## Peak resident memory, MiB (53 receipts, one worker)", "", *_memory(results["memory"]), ""]
    return "\n".join(lines)


def _conditions(conditions: Row) -> list[list[str]]:
    return [
        [section, str(each["rounds"]), " and ".join(map(str, each["load_average"]))]
        for section, each in conditions.items()
    ]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _data(results: Row, name: str, codecs: list[str]) -> list[str]:
    sizes, made, load = results["bytes"][name], results["preprocessing"][name], results["loading"][name]
    tokens = load["tokens_per_sample"]
    fly, raw = load["of_on_the_fly"], load["of_raw"]
    rows = []
    for codec in codecs:
        stored = sizes["stored"][codec]
        rows.append(
            [
                codec,
                f"{stored / sizes['images'] / 1000:,.0f} KB",
                f"{stored / sizes['files']:.2f}",
                f"{made[codec]['per_s']:.1f}",
                _both(made[codec]),
                f"{made[codec]['per_s'] / made['raw']['per_s']:.2f}",
                f"{tokens * fly[codec]['per_s']:,.0f}",
                _both(raw[codec]),
                _both(fly[codec], 1),
            ]
        )
    header = ["codec", "per image", "of the source's bytes", "preprocess, images/s", "of decode + resize alone"]
    header += ["of raw", "load, tokens/s in one process", "of raw", "of the processor on the fly"]
    files = f"{sizes['images']} {load['formats']} files of {sizes['files'] / sizes['images'] / 1000:,.0f} KB"
    floor, flying = made["floor"]["per_s"], fly["on_the_fly"]["per_s"]
    about = f"{files}; decode + resize alone {floor:.1f} images/s; the processor {flying:.1f} samples/s."
    return [about, "", *table(header, rows)]


def _both(row: Row, digits: int = 2) -> str:
    return f"{row['ratio']:.{digits}f} ({row['cpu_ratio']:.{digits}f})"


def _workers(found: Row) -> list[str]:
    header = ["codec", "one worker, samples/s", "two workers", "times"]
    return table(
        header,
        [
            [name, f"{row['one_per_s']:,.0f}", f"{row['two_per_s']:,.0f}", f"{row['two_over_one']:.2f}"]
            for name, row in found.items()
        ],
    )


def _checks(found: Row) -> list[str]:
    rows = [[name, *(f"{row[check]:.2f}" for check in ("off", "stored", "pixels"))] for name, row in found.items()]
    return table(["codec", "`off`", "`stored`", "`pixels`"], rows)


def _recoding(found: Row) -> list[str]:
    rows = [[name, f"{row['per_s']:.1f}", f"{row['per_cpu_s']:.1f}"] for name, row in found.items()]
    return table(["", "images/s", "images per CPU second"], rows)


def _memory(found: Row) -> list[str]:
    rows = [
        [name, str(row["preprocess"]), str(row.get("recode", "")), str(row["loader_worker"])]
        for name, row in found.items()
    ]
    return table(["codec", "`vlmdata preprocess`", "`vlmdata recode` from raw", "a loader's worker"], rows)
