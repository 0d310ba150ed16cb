"""Computes from the footers, before a launch, what each rank will read in an epoch of a data set."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparkring.data.plan import Remainder, plan
from sparkring.data.reader import WHOLE_BYTES

if TYPE_CHECKING:
    from sparkring.data.dataset import DataFile, Dataset

USD_PER_GET = 0.0004 / 1000  # the price of a GET at S3 (Standard, us-east-1) and GCS (Standard)
GETS_PER_S = 5_500  # GETs that S3 serves for one prefix: Amazon S3 User Guide, "Best practices design patterns"


class RankShare(NamedTuple):
    """What one rank reads in an epoch. Files and row groups that the rank reads only in part are counted, too.

    `size_bytes` is the compressed size of the columns that are read. If only some rows of a row group are read, its
    size counts in proportion.
    """

    rows: int
    size_bytes: int
    files: int
    row_groups: int
    steps: int


class Requests(NamedTuple):
    """The number of GET requests that a data set in an object store needs: `opening` for the footers, then `per_epoch`.

    In an epoch, each rank makes one request for each small file that it reads from, and one for each series of adjacent
    columns in each row group of other files.
    Readers that fetch in smaller pieces, or open each file again for every epoch, make more requests. `folder` is the
    folder that receives the most requests, and `busiest` is the number of these requests in an epoch.
    """

    opening: int
    per_epoch: int
    busiest: int
    folder: str

    def price_usd(self, epochs: int) -> float:
        """Return the price, in US dollars, of opening the data set once and reading it for `epochs` epochs."""
        return (self.opening + epochs * self.per_epoch) * USD_PER_GET

    @property
    def throttled_below_s(self) -> float:
        """The shortest duration of an epoch, in seconds, in which S3 can serve all requests to the busiest folder."""
        return self.busiest / GETS_PER_S


class Outlook(NamedTuple):
    """What each rank reads in an epoch: `ours` for the even split, `petastorms` for Petastorm's whole row groups.

    For TFRecord files, `petastorms` has whole files instead, as tf.data's shard() divides them.
    """

    dataset: Dataset
    batch_size: int
    remainder: Remainder
    epochs: int
    ours: tuple[RankShare, ...]
    petastorms: tuple[RankShare, ...]
    requests: Requests

    @property
    def size(self) -> int:
        return len(self.ours)

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """For each rank, its first row in the even split and the row after its last. Rows are numbered across files."""
        return _stretches(self.ours)

    @property
    def rows_unread(self) -> int:
        """With the remainder "drop", the number of rows that no rank reads in an epoch. With any other remainder, 0."""
        if self.remainder != "drop":
            return 0
        return self.dataset.rows - sum(share.steps for share in self.ours) * self.batch_size

    @property
    def rows_twice(self) -> int:
        """With the remainder "pad", the number of rows that are read twice in an epoch. With any other remainder, 0."""
        if self.remainder != "pad":
            return 0
        return sum(share.steps for share in self.ours) * self.batch_size - self.dataset.rows


def outlook(dataset: Dataset, size: int, batch_size: int, *, remainder: Remainder = "drop", epochs: int = 1) -> Outlook:
    """Return what each of `size` ranks reads of `dataset` in an epoch, in batches of `batch_size` rows.

    With Petastorm, rank i % size reads row group i, and the last batch of a rank may be smaller. sparkring's shards are
    computed without shuffling; with shuffling, a rank may read from one row group more or from one fewer. If there is a
    filter, only the rows that pass it are counted, in Petastorm's shards, too.
    """
    ours, petastorms = _ours(dataset, size, batch_size, remainder), _petastorms(dataset, size, batch_size)
    return Outlook(dataset, batch_size, remainder, epochs, ours, petastorms, _requests(dataset, _stretches(ours)))


def _stretches(shares: Iterable[RankShare]) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise(itertools.accumulate((share.rows for share in shares), initial=0)))


def _ours(dataset: Dataset, size: int, batch_size: int, remainder: Remainder) -> tuple[RankShare, ...]:
    shares = []
    for shard in plan(dataset.counts(), size, batch_size, remainder=remainder):
        size_bytes = 0.0
        for row_range in shard.ranges:
            group = dataset.files[row_range.file].row_groups[row_range.row_group]
            size_bytes += group.size_bytes * row_range.rows / group.rows
        files = len({row_range.file for row_range in shard.ranges})
        shares.append(RankShare(shard.rows, round(size_bytes), files, len(shard.ranges), shard.steps))
    return tuple(shares)


def _petastorms(dataset: Dataset, size: int, batch_size: int) -> tuple[RankShare, ...]:
    if dataset.form is not None:
        return tuple(_whole_files(dataset.files[rank::size], batch_size) for rank in range(size))
    groups = [(number, group) for number, file in enumerate(dataset.files) for group in file.row_groups]
    shares = []
    for rank in range(size):
        mine = groups[rank::size]
        rows = sum(group.rows for _, group in mine)
        size_bytes = sum(group.size_bytes for _, group in mine)
        shares.append(RankShare(rows, size_bytes, len({file for file, _ in mine}), len(mine), -(-rows // batch_size)))
    return tuple(shares)


def _whole_files(files: Sequence[DataFile], batch_size: int) -> RankShare:
    groups = [group for file in files for group in file.row_groups]
    rows = sum(group.rows for group in groups)
    return RankShare(rows, sum(group.size_bytes for group in groups), len(files), len(groups), -(-rows // batch_size))


def _requests(dataset: Dataset, stretches: Iterable[tuple[int, int]]) -> Requests:
    # A row group, or a small file, is requested by the rank that reads its first row, and by each rank whose shard
    # begins later in it.
    inside = iter(sorted({begin for begin, end in stretches if end > begin}))
    begin, next_cut = 0, next(inside, None)
    by_folder: Counter[str] = Counter()
    runs = _column_runs(dataset)
    for file in dataset.files:
        folder, whole = file.path.rpartition("/")[0], file.size_bytes <= WHOLE_BYTES
        rows = sum(group.rows for group in file.row_groups)
        for part in [rows] if whole else [group.rows for group in file.row_groups]:
            end = begin + part
            asked = 1 if part else 0
            while next_cut is not None and next_cut < end:
                asked += next_cut > begin
                next_cut = next(inside, None)
            by_folder[folder] += asked if whole else runs * asked
            begin = end
    folder, busiest = by_folder.most_common(1)[0] if by_folder else ("", 0)
    # To count records, whole files of small records are read.
    opening = len(dataset.files) if dataset.form is None else max(len(dataset.files), dataset.row_groups)
    return Requests(opening, by_folder.total(), busiest, folder)


def _column_runs(dataset: Dataset) -> int:
    """Return the number of series of adjacent columns that are read."""
    if dataset.form is not None:  # a record has all columns
        return 1
    in_path = {key for file in dataset.files for key, _ in file.partitions}
    taken = [name in dataset.reads for name in dataset.stored_schema.names if name not in in_path]
    return max(1, sum(now and not before for before, now in itertools.pairwise([False, *taken])))
