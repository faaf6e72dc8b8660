"""Statistics over a handful of runs: intervals, exact tests, and a fit with runs that were cut off."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev

import torch

# Two-sided 95 % points of Student's t for 1 to 20 degrees of freedom. Beyond 20 the last one is used; the
# interval is at most 6 % too wide.
T_95 = [
    float(point)
    for point in (
        "12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 "
        "2.201 2.179 2.160 2.145 2.131 2.120 2.110 2.101 2.093 2.086"
    ).split()
]
MAX_PAIRS = 16  # beyond it not all 2^n signs are tried


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the half width of its 95 % t-interval, None for a single value."""
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), T_95[min(len(values) - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(len(values))


def share_interval(count: int, total: int) -> tuple[float, float]:
    """The exact 95 % interval of a share (Clopper and Pearson 1934): it covers at least that often."""

    def at_least(share: float) -> float:  # P(X >= count)
        return sum(_binomial(k, total, share) for k in range(count, total + 1))

    def at_most(share: float) -> float:  # P(X <= count)
        return sum(_binomial(k, total, share) for k in range(count + 1))

    low = 0.0 if count == 0 else _solve(at_least, 0.025)
    high = 1.0 if count == total else _solve(lambda share: -at_most(share), -0.025)
    return low, high


def _binomial(count: int, total: int, share: float) -> float:
    return math.comb(total, count) * share**count * (1 - share) ** (total - count)


def _solve(rising: Callable[[float], float], value: float) -> float:
    """Where a rising function of [0, 1] has a value, by halving."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return (low + high) / 2


def fisher_p(count: int, total: int, other: int, other_total: int) -> float:
    """Fisher's exact two-sided p-value that two shares are equal.

    The sum over all tables with these margins that are at most as likely as the one found.
    """
    both, everyone = count + other, total + other_total

    def chance(k: int) -> float:
        return math.comb(total, k) * math.comb(other_total, both - k) / math.comb(everyone, both)

    tables = [chance(k) for k in range(max(0, both - other_total), min(both, total) + 1)]
    return min(1.0, sum(p for p in tables if p <= chance(count) * (1 + 1e-9)))


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """The exact two-sided p-value of paired differences: the share of all 2^n choices of their signs whose
    sum is at least as far from 0. Its least value is 2 / 2^n, .0625 for five pairs. None without a pair.
    """
    if not 0 < len(differences) <= MAX_PAIRS:
        return None
    found = abs(sum(differences))
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    rounding = 1e-9 * sum(map(abs, differences))
    return sum(value >= found - rounding for value in sums) / len(sums)


def swap_p(ones: Sequence[float], others: Sequence[float]) -> float | None:
    """The exact two-sided p-value of a difference of means between unpaired runs.

    The share of all ways to deal the values into two groups of these sizes whose means are at least as far
    apart. None if either is empty or there are too many values to deal.
    """
    values, size = [*ones, *others], len(ones)
    if not size or not others or len(values) > MAX_PAIRS:
        return None
    total, found = sum(values), abs(fmean(ones) - fmean(others))
    hits, count, rounding = 0, 0, 1e-9 * sum(map(abs, values))
    for chosen in range(2 ** len(values)):
        if chosen.bit_count() != size:
            continue
        part = sum(value for index, value in enumerate(values) if chosen >> index & 1)
        count += 1
        hits += abs(part / size - (total - part) / (len(values) - size)) >= found - rounding
    return hits / count


@dataclass(frozen=True)
class Fit:
    """Coefficients of `survival_fit` with their half widths (95 %), and the scatter of log times."""

    coefficients: tuple[float, ...]
    halves: tuple[float, ...]
    scatter: float


def survival_fit(
    factors: Sequence[Sequence[float]], times: Sequence[float], seen: Sequence[bool]
) -> Fit | None:
    """log time = intercept + coefficients · factors + normal noise, by maximum likelihood.

    A run whose event was not `seen` counts as one that comes after its last step (`times`): leaving such runs
    out would make the events look earlier than they are. Intervals are those of the observed information,
    with Student's t and the scatter of as many degrees of freedom as there are events more than coefficients:
    exact where every event was seen.
    None if fewer events were seen than there are coefficients, the scatter included, or if the factors do not
    tell the runs apart.
    """
    X = torch.tensor([[1.0, *row] for row in factors], dtype=torch.float64)
    log_times = torch.tensor(times, dtype=torch.float64).log()
    happened = torch.tensor(seen)
    X_seen = X[happened]
    if len(X_seen) <= X.shape[1] or torch.linalg.matrix_rank(X_seen) < X.shape[1]:
        return None

    def loss(parameters: torch.Tensor) -> torch.Tensor:
        z = (log_times - X @ parameters[:-1]) / parameters[-1].exp()
        density = -0.5 * z**2 - parameters[-1] - 0.5 * math.log(2 * math.pi)
        return -torch.where(happened, density, torch.special.log_ndtr(-z)).sum()

    start = torch.linalg.lstsq(X_seen, log_times[happened][:, None]).solution[:, 0]
    parameters = torch.cat([start, torch.tensor([-1.0], dtype=torch.float64)]).requires_grad_()
    optimizer = torch.optim.LBFGS([parameters], max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(parameters)
        value.backward()
        return value

    optimizer.step(closure)
    found = parameters.detach()
    hessian = torch.autograd.functional.hessian(loss, found)
    if not hessian.isfinite().all() or torch.linalg.eigvalsh(hessian).min() <= 0:
        return None
    freedom = len(X_seen) - X.shape[1]
    wider = math.sqrt(len(X_seen) / freedom)
    errors = torch.linalg.inv(hessian).diagonal()[:-1].sqrt() * wider
    halves = T_95[min(freedom, len(T_95)) - 1] * errors
    return Fit(tuple(found[:-1].tolist()), tuple(halves.tolist()), float(found[-1].exp()) * wider)
