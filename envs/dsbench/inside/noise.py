"""Permutation tests of features against a target: do they tell more of it than of a shuffled copy? Runs in the sandbox.

Four statistics: the largest squared rank correlation of a feature; the largest correlation ratio over its 8 quantile
bins, which also sees relations that rise and fall; the largest squared correlation of a product of two features, which
sees pairs that tell something only together; and the share of the target that all features explain as a sum, which
sees many small effects. A statistic stands out if it exceeds all of its values on 150 shuffled targets, so that noise
passes in about 3 of 100 tables. Products of three or more features alone are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FEWEST_ROWS = 30
"""Tables with fewer rows are not judged: chance correlations are too large there."""
MOST_ROWS, MOST_COLUMNS, MOST_TARGETS = 2000, 100, 12
BINS = 8
SHUFFLES = 150
PAIRED_COLUMNS = 24
"""Columns whose products are looked at."""
MOST_CLASSES = 50
"""A target in words with more classes is text, about which single columns say little."""


def tells(features: Any, target: Any) -> bool:
    """Whether the features tell anything of the target; True where this cannot be decided."""
    import numpy as np

    rng = np.random.default_rng(0)
    if len(features) < FEWEST_ROWS or not features.shape[1]:
        return True
    rows = np.sort(rng.permutation(len(features))[:MOST_ROWS])
    columns = np.sort(rng.permutation(features.shape[1])[:MOST_COLUMNS])
    wanted = _targets(target.iloc[rows])
    if wanted is None:
        return True
    wanted = _standard(wanted)
    if not wanted.any():
        return False  # a constant target: there is nothing to learn
    ranks = np.stack([_ranks(features.iloc[rows, column]) for column in columns], axis=1)
    standard, bins, counts = _standard(ranks), *_bins(ranks)

    def correlation(of: Any) -> float:
        return float(np.square(standard.T @ of / len(of)).max())

    def ratio(of: Any) -> float:
        # Variance of the bins' means: per feature the sum over its bins of sum^2 / count, `of` having unit variance.
        parts = np.square(bins.T @ of) / counts[:, None]
        return float(parts.reshape(-1, BINS, of.shape[1]).sum(axis=1).max() / len(of))

    first, second = np.triu_indices(min(PAIRED_COLUMNS, len(columns)), 1)
    products = _standard(standard[:, first] * standard[:, second])

    def interaction(of: Any) -> float:
        return float(np.square(products.T @ of / len(of)).max(initial=0.0))

    # A sum of nearly as many features as rows explains anything.
    basis = np.linalg.qr(standard[:, : max(1, len(rows) // 3)])[0]

    def explained(of: Any) -> float:
        return float(np.square(basis.T @ of).sum(axis=0).max() / len(of))

    statistics = (correlation, ratio, interaction, explained)
    return any(_stands_out(statistic, wanted, rng) for statistic in statistics)


def _stands_out(statistic: Callable[[Any], float], wanted: Any, rng: Any) -> bool:
    return statistic(wanted) > max(statistic(wanted[rng.permutation(len(wanted))]) for _ in range(SHUFFLES))


def _targets(target: Any) -> Any:
    """`[rows, targets]`: ranks of numbers, one column per class of words or few numbers; None for texts."""
    import numpy as np
    import pandas as pd

    made = []
    for place in range(target.shape[1]):
        column = target.iloc[:, place]
        codes, names = pd.factorize(column, use_na_sentinel=False)
        if len(names) <= MOST_TARGETS:
            made += [(codes == code).astype(float) for code in range(len(names))]
        elif pd.to_numeric(column, errors="coerce").notna().all():
            made.append(_ranks(column))
        elif len(names) <= MOST_CLASSES:
            common = np.argsort(-np.bincount(codes), kind="stable")[:MOST_TARGETS]
            made += [(codes == code).astype(float) for code in common]
        else:
            return None
    return np.stack(made[:MOST_TARGETS], axis=1)


def _ranks(column: Any) -> Any:
    """Ranks from 0 to 1, ties sharing their mean; words by their order, missing values in the middle."""
    import numpy as np
    import pandas as pd

    numbers = pd.to_numeric(column, errors="coerce")
    if numbers.notna().sum() < column.notna().sum() / 2:
        numbers = pd.Series(pd.factorize(column.astype(str), sort=True)[0])
    numbers = pd.Series(np.asarray(numbers, dtype=float))
    return numbers.rank(pct=True).fillna(0.5).to_numpy()


def _standard(values: Any) -> Any:
    """Columns with mean 0 and variance 1; constant ones are 0."""
    import numpy as np

    centred = values - values.mean(axis=0)
    spread = centred.std(axis=0)
    return np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 1e-9)


def _bins(ranks: Any) -> tuple[Any, Any]:
    """`[rows, columns * BINS]` membership in each feature's quantile bins, and the size of each bin, at least 1."""
    import numpy as np

    place = np.minimum((ranks * BINS).astype(int), BINS - 1)
    member = (place[:, :, None] == np.arange(BINS)).reshape(len(ranks), -1).astype(float)
    return member, np.maximum(member.sum(axis=0), 1)
