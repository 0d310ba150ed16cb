"""What the engine says about ranks, gangs and the values that are sent to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkring.history.describe.text import counted, duration, rank_list, size
from sparkring.history.events import Failure
from sparkring.wire.messages import ModelWeights, TrainsAlone

UNLIKE = 1e-6  # weights whose sums differ by this part are not the same


def waiting_for_ranks(joined: int, size: int, reason: str) -> str:
    """Say how many ranks have connected during a slow start. `reason` says why the start is slow."""
    return f"waiting for ranks to start: {joined} of {size} have connected" + (reason and f" ({reason})")


def slots_given_back(joined: int, size: int, reason: str, pause_s: float) -> str:
    """Say that the ranks that have connected have ended, so that others can use their slots. `reason` is why."""
    waited = f"{joined} of {size} ranks had connected and waited for the others" + (reason and f" ({reason})")
    return f"{waited}: their task slots are free again, and all ranks start again in {duration(round(pause_s))}"


def waiting_for_imports(ranks: Sequence[int]) -> str:
    """Say which ranks an interrupted cell is still waiting for, and how the user can end the gang instead."""
    return f"waiting for {rank_list(ranks)} to finish importing a package; interrupt again to end the gang instead"


def interrupted(running: int, left: str, *, warm: bool) -> str:
    """Say how an interrupt ended a run: `2 ranks ended`. `left` says whether a warm gang stays up, in a sentence."""
    ended = f"{counted(running, 'rank')} {'stopped' if warm else 'ended'}" if running else "before the ranks were up"
    return f"{ended}. {left}" if left else ended


def gang_kept(*, released: bool) -> str:
    """Say that a warm gang stays up after a run. `released` says whether collectives were ended to free its ranks."""
    kept = "The gang stays up: its ranks keep the variables of the cells."
    if released:
        kept += " The collectives in which ranks waited were ended, so call hvd.init() or init_process_group() again."
    return kept


def gang_gone(dead: Sequence[int], stuck: Sequence[int]) -> str:
    """Say that a warm gang has ended, why it has ended, and what this means for the user."""
    if dead:
        why = f"{rank_list(dead)} died"
    else:
        why = f"{rank_list(stuck)} did not respond" if stuck else "it could not continue"
    return f"The gang has ended, and the variables of its cells are lost ({why}). The next cell starts a new one."


def deaths(failures: Mapping[int, Failure]) -> str:
    """Say which ranks of a warm gang have died, and why."""
    by_summary: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        summary = failure.summary + (f" ({failure.advice})" if failure.cause == "lost" and failure.advice else "")
        by_summary.setdefault(summary, []).append(rank)
    return "; ".join(f"{rank_list(ranks)}: {reason}" for reason, ranks in by_summary.items())


def large_value(name: str, size_bytes: int) -> str:
    """Return a notice about a large value that is sent to every rank."""
    return f"`{name}` ({size(size_bytes)}) is sent to every rank; if possible, load or create large data on the ranks"


def only_on_ranks(names: Sequence[str]) -> str:
    """Say that a cell has assigned to the notebook's variables `names` on the ranks only."""
    named = ", ".join(f"`{name}`" for name in names)
    unchanged = "value does" if len(names) == 1 else "values do"
    advice = f"--pull {','.join(names)} copies rank 0's"
    return f"the cell assigns {named} on the ranks only: the notebook's {unchanged} not change. {advice}"


def unread_change(name: str) -> str:
    """Return a notice about a notebook value that the cell of each item changes but does not read."""
    return (
        f"`{name}` is changed in the items' processes, but not in the notebook: end the cell with the value that you "
        "want back"
    )


def host_goes(rank: int, host: str, grace_s: float) -> str:
    """Say that a rank has got SIGTERM, and that the ranks save a checkpoint before it ends."""
    return (
        f"rank {rank}: host {host} is shutting down (SIGTERM); the ranks save at their next step, within {grace_s:g} s"
    )


def unlike_weights(reports: Mapping[int, ModelWeights], makes_ring: Mapping[str, str]) -> str:
    """Say which ranks have other weights than the first, and what to do; return '' if all have the same, or others.

    Without a mistake, the weights are the same bit by bit. So the limit only has to be above the errors of the sums.
    """
    (rank, first), *others = sorted(reports.items())
    if any((report.model, report.parameters) != (first.model, first.parameters) for _, report in others):
        return ""  # the ranks have different models on purpose
    limit = UNLIKE * first.magnitude
    unlike = [
        other
        for other, report in others
        if max(abs(report.total - first.total), abs(report.magnitude - first.magnitude)) > limit
    ]
    if not unlike:
        return ""
    advice = makes_ring.get(first.library, "")
    return (
        f"the weights of `{first.model}` on {rank_list(unlike)} differ from those on rank {rank}, although the ranks "
        "have exchanged values"
        + (f". To train one model on all ranks, {advice}." if advice else ".")
        + " If each rank is meant to train a model of its own, add --independent."
    )


def lone_ranks(size: int, reports: Sequence[TrainsAlone], makes_ring: Mapping[str, str]) -> str:
    """Say that the ranks train without one another, and what to do. `makes_ring` is the attribute of a Framework."""
    connected = ", although they are connected" if any(report.connected for report in reports) else ""
    if all(report.ended for report in reports):
        text = f"the ranks exchanged nothing{connected}: each trained alone, so there are {size} models instead of one."
    else:
        text = f"the ranks have exchanged nothing so far{connected}: each trains alone."
    first, *_ = reports
    advice = makes_ring.get(first.library)
    text += f" To train one model on all ranks, {advice}." if advice else ""
    return f"{text} If each rank is meant to train alone, add --independent (independent=True for sparkring.run)."
