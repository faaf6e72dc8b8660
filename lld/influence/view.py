"""The results: agreement with true changes, console output, figure."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lld.episode import Episode
from lld.record.runs import printable
from lld.report.figure import literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATRICES = {
    "total": "closed form at the LM head",
    "true_model": "true change after a small SGD step on all weights",
}


def readable(episode: Episode, tokenizer) -> list[str]:
    """What the model wrote, a line for each turn, with the titles that its search found."""
    lines = []
    for turn in episode.turns:
        line = tokenizer.decode(episode.token_ids[turn.start : turn.end]).strip()
        if turn.searched:
            titles = [passage.contents.partition("\n")[0].strip('"') for passage in turn.passages]
            line += f"  [found: {', '.join(titles)}]"
        lines.append(line)
    return lines


def agreement(predicted_K: torch.Tensor, measured_K: torch.Tensor) -> dict[str, float]:
    """How predicted and measured changes agree.

    Their correlation, the slope of the line through 0 (measured = slope x predicted), and the share of equal
    signs.
    """
    x_K, y_K = predicted_K.double(), measured_K.double()
    correlation = float(torch.corrcoef(torch.stack([x_K, y_K]))[0, 1]) if len(x_K) > 1 else float("nan")
    return {
        "pairs": len(x_K),
        "correlation": correlation,
        "slope": float(x_K @ y_K / (x_K @ x_K)),
        "same_sign": float((x_K.sign() == y_K.sign()).double().mean()),
    }


def relation(advantage: float, member: int, response: int) -> str:
    """The relation of a member of a group to one of its correct responses, on which it acts."""
    if advantage < 0:
        return "wrong on right"
    return "right on itself" if member == response else "right on other right"


def compare(analyses: list[dict]) -> dict[str, dict | None]:
    """How the closed form agrees with the true changes, over all measured groups and by who acts on whom.

    None where there are fewer than two pairs.
    """
    rows = {"all": [], "wrong on right": [], "right on other right": [], "right on itself": []}
    for group in analyses:
        matrix = group["matrix"]
        if "true_model" not in matrix:
            continue
        for member, response in enumerate(group["responses"]):
            for r, on in enumerate(group["right"]):
                values = [matrix[name][member][r] for name in ("total", "true_head", "true_model")]
                rows["all"].append(values)
                rows[relation(response["advantage"], member, on)].append(values)
    table = {}
    for kind, values in rows.items():
        table[kind] = None
        if len(values) > 1:
            total_K, head_K, model_K = torch.tensor(values, dtype=torch.float64).view(-1, 3).T
            table[kind] = {
                "head": agreement(total_K, head_K),
                "model": agreement(total_K, model_K),
                "lowering": float((total_K < 0).double().mean()),
                "lowering_true_model": float((model_K < 0).double().mean()),
            }
    return table


def print_case(group: dict) -> None:
    """Prints one group: its responses, who moves whom, and the token pairs behind the look-alike pair."""
    print(printable(f"\nOne group: {group['text']}  (gold: {', '.join(group['golden_answers'])})"))
    for sample, response in enumerate(group["responses"]):
        print(f"  #{sample} A = {response['advantage']:+.2f}")
        for line in response["text"]:
            print(f"      {printable(line)}")
    for name, title in MATRICES.items():
        if name in group["matrix"]:
            print_matrix(group["matrix"][name], group["right"], title)
    if group["pair"] is None:
        print("\nNo wrong answer with the first search of a correct response lowers that response here.")
    else:
        print_pair(group["pair"])


def print_matrix(values: list[list[float]], right: list[int], title: str) -> None:
    columns = "".join(f"{f'on #{r}':>9}" for r in right)
    print(
        "\nChange of log p of each correct response by each member's update, nats per unit of "
        f"learning rate; {title}:\n      {columns}"
    )
    for sample, row in enumerate(values):
        mark = "" if sample in right else "   wrong"
        print(f"  #{sample}  " + "".join(f"{value:9.2f}" for value in row) + mark)
    print("  sum " + "".join(f"{sum(column):9.2f}" for column in zip(*values, strict=True)))


def print_pair(pair: dict) -> None:
    print(
        f"\nThe wrong #{pair['member']} made the same first search as the correct #{pair['response']} and "
        f"moves it by {pair['value']:.2f}. By part and turn (of -> on):"
    )
    for share in pair["parts"]:
        if abs(share["value"]) >= 0.01 * abs(pair["value"]):
            print(f"  {share['of']:>9} -> {share['on']:<9} {share['value']:9.3f}")
    for name in ("lowering", "raising"):
        print(f"Most {name} token pairs:")
        for row in pair[name]:
            print(f"  {row['value']:9.3f}  {describe_token(row['of'])} -> {describe_token(row['on'])}")


def describe_token(token: dict) -> str:
    return f"{token['text']!r} ({token['part']}, turn {token['turn']}, token {token['offset']})"


def share_below_zero(figures: dict) -> str:
    """The conclusion of Fig. 3a in one sentence."""
    return (
        f"Delta below 0 in {figures['num_negative']} of {len(figures['bars'])} groups with mixed rewards "
        f"({figures['num_questions']} questions played): share {figures['negative_share']:.2f}"
    )


def print_conclusion(figures: dict) -> None:
    """Prints the conclusion and, if it was measured, the agreement with the true change, in one line."""
    line = f"\n{share_below_zero(figures)}"
    row = figures["agreement"].get("all")
    if row:
        line += (
            "; the closed form agrees with the true change of the whole model: correlation "
            f"{row['model']['correlation']:.3f}, same sign {row['model']['same_sign']:.2f}"
        )
    print(line)


def print_summary(figures: dict) -> None:
    """Prints the agreement with the true changes and the bars of Fig. 3a."""
    print(
        "\nClosed form against the true change after an SGD step on one member's loss, all response pairs "
        "of the measured groups:"
    )
    print(
        f"  {'who on whom':<22}{'pairs':>6}  {'head: corr.':>11} {'slope':>6}  {'whole model: corr.':>18} "
        f"{'slope':>6} {'same sign':>9}  {'lowering':>8} {'truly':>6}"
    )
    for kind, row in figures["agreement"].items():
        if row is not None:
            head, model = row["head"], row["model"]
            print(
                f"  {kind:<22}{head['pairs']:>6}  {head['correlation']:>11.4f} {head['slope']:>6.3f}  "
                f"{model['correlation']:>18.3f} {model['slope']:>6.2f} {model['same_sign']:>9.2f}  "
                f"{row['lowering']:>8.2f} {row['lowering_true_model']:>6.2f}"
            )
    print(
        f"\nFig. 3a: one update ({figures['optimizer']}, lr {figures['lr']:g}) on each question's own "
        "episodes, from the same weights. Delta = mean change of log p of its correct responses, nats:"
    )
    for bar in figures["bars"]:
        print(f"  {bar['delta']:+9.4f}  {bar['num_right']} correct  {printable(bar['text'])}")
    print(share_below_zero(figures))


def draw(figures: dict, path: Path) -> None:
    """The matrices of the group and the bars of Fig. 3a as one PNG."""
    from matplotlib.figure import Figure

    group = figures["case"]
    panels = [name for name in MATRICES if name in group["matrix"]]
    figure = Figure(figsize=(4.4 * len(panels) + 6, 5), dpi=130, layout="constrained")
    axes = figure.subplots(1, len(panels) + 1, width_ratios=[1] * len(panels) + [1.35], squeeze=False)[0]
    for ax, name in zip(axes[:-1], panels, strict=True):
        draw_matrix(ax, group["matrix"][name], group["right"], MATRICES[name])
    draw_bars(axes[-1], figures)
    figure.suptitle(literal(printable(group["text"])), fontsize=10, x=0.01, ha="left")
    figure.savefig(path)


def draw_matrix(ax: "Axes", values: list[list[float]], right: list[int], title: str) -> None:
    """One matrix as coloured numbers: a row per member, a last row of sums, a column per correct response."""
    values = [*values, [sum(column) for column in zip(*values, strict=True)]]
    largest = max(abs(value) for row in values for value in row) or 1.0
    ax.imshow(values, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
    for g, row in enumerate(values):
        for r, value in enumerate(row):
            color = "white" if abs(value) > 0.6 * largest else "black"
            ax.text(r, g, f"{value:.1f}", ha="center", va="center", fontsize=7, color=color)
    marks = [f"#{g} {'right' if g in right else 'wrong'}" for g in range(len(values) - 1)]
    ax.axhline(len(values) - 1.5, color="#444", linewidth=0.8)
    ax.set_yticks(range(len(values)), [*marks, "all together"], fontsize=8)
    ax.set_xticks(range(len(right)), [f"#{r}" for r in right], fontsize=8)
    ax.set_xlabel("log p of the correct response …", fontsize=9)
    ax.set_ylabel("… moved by the update of", fontsize=9)
    ax.set_title(f"{title}\n(nats per unit of learning rate)", fontsize=9, loc="left")


def draw_bars(ax: "Axes", figures: dict) -> None:
    """Fig. 3a: the change of each question's correct responses, sorted."""
    deltas = [bar["delta"] for bar in figures["bars"]]
    ax.bar(range(len(deltas)), deltas, color=["#E69F00" if delta < 0 else "#0072B2" for delta in deltas])
    # A rare correct response gains nats, while others lose hundredths
    ax.set_yscale("symlog", linthresh=0.01)
    ax.axhline(0, color="#888", linewidth=0.8)
    ax.set_xlabel("questions with mixed rewards, sorted", fontsize=9)
    ax.set_ylabel("Δ of the correct responses (nats, logarithmic beyond ±0.01)", fontsize=9)
    ax.set_title(
        f"One update on each question alone ({figures['optimizer']}, lr "
        f"{figures['lr']:g}):\n{figures['num_negative']} of {len(deltas)} lose likelihood",
        fontsize=9,
        loc="left",
    )
    ax.spines[["top", "right"]].set_visible(False)
