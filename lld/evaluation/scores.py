"""The figures of an evaluation: means, 95 % intervals, the paper's averages, and a table of them."""

from lld.evaluate import bootstrap_means, paper_averages, percentile_interval, summarize
from lld.evaluation.folder import SCORES, sha256

# Columns of a benchmark's row, and their titles
COLUMNS = {
    "searches": "searches",
    "valid_action_rate": "valid",
    "truncation_rate": "truncated",
    "gold_in_results": "gold found",
}


def score_records(records_by_benchmark: dict[str, list[dict]]) -> dict:
    """{"benchmarks": {name: metrics and 95 % intervals}, "averages": {name: {"em", "em_interval"} or None}}.

    Records are sorted and the bootstrap is seeded by the benchmark's name: a figure depends neither on the
    order in which records were written nor on which other benchmarks there are.
    """
    benchmarks, em, resampled = {}, {}, {}
    for name, records in records_by_benchmark.items():
        records = sorted(records, key=lambda record: record["id"])
        seed = int(sha256(name)[:8], 16)
        benchmarks[name] = summarize(records)
        for score in SCORES:
            means = bootstrap_means([record[score] for record in records], seed=seed)
            benchmarks[name][f"{score}_interval"] = percentile_interval(means)
            if score == "em":
                resampled[name] = means
        em[name] = benchmarks[name]["em"]
    averages, spread = paper_averages(em), paper_averages(resampled)
    for name, value in averages.items():
        if value is not None:
            averages[name] = {"em": value, "em_interval": percentile_interval(spread[name])}
    return {"benchmarks": benchmarks, "averages": averages}


def format_table(scores: dict) -> str:
    """The figures as one table, scores in percent."""
    rows = [["benchmark", "n", "EM [95 %]", "F1", "cover-EM", *COLUMNS.values()]]
    for name, row in scores["benchmarks"].items():
        cells = [name, str(row["num_questions"]), _with_interval(row)]
        cells += [_percent(row["f1"]), _percent(row["cover_em"])]
        for column in COLUMNS:
            value = row.get(column)
            cells.append(f"{value:.2f}" if column == "searches" else _percent(value))
        rows.append(cells)
    for name, row in scores["averages"].items():
        if row is not None:  # all of its benchmarks were evaluated
            rows.append([name, "", _with_interval(row)])
    # Column widths ignore the rows of averages, which are shorter.
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _with_interval(row: dict) -> str:
    """EM and its interval; a single question has no interval."""
    low, high = row["em_interval"]
    interval = "–" if row.get("num_questions") == 1 else f"{_percent(low)}, {_percent(high)}"
    return f"{_percent(row['em'])} [{interval}]"
