"""Synthetic data with planted structure, in both layouts. `fusedrec train` uses them if no data set is given.

Items belong to clusters, and only the users who meet an item reveal its cluster. Popularity is therefore useless, and a
model that learns item embeddings and reads the sequence is far better. All data are a pure function of the arguments.

Ranking: A user likes two clusters and has a current interest, a third cluster that drifts. Impressions are from these
  clusters and from anywhere. A click is likely if the user likes the item's cluster, and likelier if it is the cluster
  of the latest click. The history reveals both. Conversion after a click depends on whether the item's price class
  (0..3) equals the user's budget, a contextual column.
Retrieval: Users have sessions of minutes and breaks of hours to days. Inside a session the next item is mostly one of
  the next three in the ring of the item's cluster. After a break it is any item of one of the user's two clusters. The
  last item thus reveals the cluster, and the time gap to the target reveals whether that cluster still counts.
"""

from __future__ import annotations

import pathlib

import numpy as np

from tf_fusedrec.data.rows import Ragged, Rows, Values, splits_of
from tf_fusedrec.models.data_sets.interactions import Interactions, write_last_held_out
from tf_fusedrec.models.data_sets.layouts import DatasetInfo, write_dataset

CLICK_BIT, CONVERSION_BIT = 1, 2  # bits of history_action; 0 is an impression without a click
START = 1_700_000_000  # seconds; all interactions are later
BUDGETS = 4
DEVICES = 3


def write_synthetic_ranking(
    output: str | pathlib.Path,
    *,
    users: int = 2000,
    items: int = 1000,
    clusters: int = 20,
    mean_history: int = 40,
    exposures: int = 10,
    seed: int = 0,
) -> DatasetInfo:
    """Writes the ranking layout: labels exposed_click and exposed_conversion, contextual user_budget and user_device.

    A user's timeline is history, then `exposures` impressions exposed in train, then as many exposed in test. The
    history of test includes the exposures of train.
    """
    _check_sizes(users=users, items=items, clusters=clusters, mean_history=mean_history, exposures=exposures)
    rng = np.random.default_rng([seed, 1])
    cluster_of = rng.permutation(items) % clusters
    price_of = rng.integers(0, BUDGETS, items)
    budget = rng.integers(0, BUDGETS, users)
    liked = _two_clusters(rng, users, clusters)
    history = _lengths(rng, users, mean_history)
    steps = int(history.max()) + 2 * exposures

    members, first_member = _members(cluster_of, clusters)
    item = np.empty((users, steps), np.int64)
    click = np.empty((users, steps), bool)
    interest = rng.integers(0, clusters, users)
    clicked_last = np.full(users, -1)
    everyone = np.arange(users)
    for step in range(steps):
        interest = np.where(rng.random(users) < 0.1, rng.integers(0, clusters, users), interest)
        from_liked = liked[everyone, rng.integers(0, 2, users)]
        source = rng.random(users)
        cluster = np.select([source < 0.3, source < 0.5], [from_liked, interest], rng.integers(0, clusters, users))
        item[:, step] = _draw(rng, members, first_member, cluster)
        likes = (liked == cluster[:, None]).any(axis=1)
        chance = 0.08 + 0.5 * likes + 0.3 * (cluster == clicked_last)
        click[:, step] = rng.random(users) < chance
        clicked_last = np.where(click[:, step], cluster, clicked_last)
    fits = price_of[item] == budget[:, None]
    conversion = click & (rng.random((users, steps)) < np.where(fits, 0.8, 0.1))
    time = START + np.cumsum(rng.integers(20, 4 * 3600, (users, steps)), axis=1)

    context = {
        "user_id": everyone + 1,
        "user_budget": budget,
        "user_device": rng.integers(0, DEVICES, users),
    }
    action = click * CLICK_BIT + conversion * CONVERSION_BIT

    def rows(begin: np.ndarray) -> Rows:
        """Rows with exposures from begin <int64>[users] on."""
        end = begin + exposures
        columns: dict[str, Values] = dict(context)
        columns["history_item"] = _window(item + 1, 0 * begin, begin)
        columns["history_action"] = _window(action, 0 * begin, begin)
        columns["history_time"] = _window(time, 0 * begin, begin)
        columns["exposed_item"] = _window(item + 1, begin, end)
        columns["exposed_time"] = _window(time, begin, end)
        columns["exposed_click"] = _window(click.astype(np.float32), begin, end)
        columns["exposed_conversion"] = _window(conversion.astype(np.float32), begin, end)
        return Rows(columns, users)

    return write_dataset(
        output,
        task="ranking",
        source=f"synthetic ranking: users={users} items={items} clusters={clusters} mean_history={mean_history} "
        f"exposures={exposures} seed={seed}",
        split=f"By time within a user: the last {exposures} impressions are exposed in test, those before in train.",
        users=users,
        train=rows(history),
        test=rows(history + exposures),
        item_ids=np.arange(1, items + 1),
        train_items=_window(item + 1, 0 * history, history + exposures).values,
    )


def write_synthetic_retrieval(
    output: str | pathlib.Path,
    *,
    users: int = 2000,
    items: int = 1000,
    clusters: int = 50,
    mean_history: int = 40,
    seed: int = 0,
    held_out: str = "test",
) -> DatasetInfo:
    """Writes the retrieval layout. `held_out`: see write_last_held_out."""
    _check_sizes(users=users, items=items, clusters=clusters, mean_history=mean_history)
    rng = np.random.default_rng([seed, 2])
    cluster_of = rng.permutation(items) % clusters
    liked = _two_clusters(rng, users, clusters)
    length = _lengths(rng, users, mean_history) + 2  # at least an item, its successor, and the target
    steps = int(length.max())

    members, first_member = _members(cluster_of, clusters)
    size = np.diff(np.append(first_member, items))
    place_of = np.empty(items, np.int64)  # the item's place in the ring of its cluster
    place_of[members] = np.arange(items) - np.repeat(first_member, size)
    everyone = np.arange(users)
    item = np.empty((users, steps), np.int64)
    gap = np.empty((users, steps), np.int64)
    for step in range(steps):
        fresh = _draw(rng, members, first_member, liked[everyone, rng.integers(0, 2, users)])
        breaks = rng.random(users) < (1.0 if step == 0 else 0.15)
        if step == 0:
            item[:, 0] = fresh
        else:
            before = item[:, step - 1]
            cluster = cluster_of[before]
            place = (place_of[before] + rng.integers(1, 4, users)) % size[cluster]
            follows = members[first_member[cluster] + place]
            anything = rng.integers(0, items, users)
            follows = np.where(rng.random(users) < 0.1, anything, follows)
            item[:, step] = np.where(breaks, fresh, follows)
        gap[:, step] = np.where(breaks, rng.integers(6 * 3600, 72 * 3600, users), rng.integers(20, 600, users))
    time = START + np.cumsum(gap, axis=1)

    begin = np.zeros(users, np.int64)
    return write_last_held_out(
        output,
        Interactions(
            np.repeat(everyone + 1, length),
            _window(item + 1, begin, length).values,
            _window(time, begin, length).values,
        ),
        path=pathlib.Path(output),
        source=f"synthetic retrieval: users={users} items={items} clusters={clusters} mean_history={mean_history} "
        f"seed={seed}",
        catalogue=np.arange(1, items + 1),
        held_out=held_out,
    )


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
    if sizes["items"] < sizes["clusters"]:
        raise ValueError(
            f"items must be >= clusters = {sizes['clusters']}, got {sizes['items']}: every cluster needs an item."
        )


def _two_clusters(rng: np.random.Generator, users: int, clusters: int) -> np.ndarray:
    """Clusters <int64>[users, 2] that each user likes. They differ if there are at least two clusters."""
    first = rng.integers(0, clusters, users)
    return np.stack([first, (first + rng.integers(1, max(clusters, 2), users)) % clusters], axis=1)


def _lengths(rng: np.random.Generator, users: int, mean: int) -> np.ndarray:
    """Lengths <int64>[users], log-normal with this mean, clipped to [1, 8 * mean], long-tailed like real histories."""
    sigma = 0.8
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, users)  # This median gives the mean.
    return np.clip(drawn, 1, 8 * mean).astype(np.int64)


def _members(cluster_of: np.ndarray, clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Items [I] sorted by cluster, and the start of each cluster [clusters] among them."""
    members = np.argsort(cluster_of, kind="stable")
    return members, splits_of(np.bincount(cluster_of, minlength=clusters))[:-1]


def _draw(rng: np.random.Generator, members: np.ndarray, first_member: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    """Draws one item <int64>[B] of each cluster [B]. Early members of a cluster are more popular."""
    size = np.diff(np.append(first_member, len(members)))[cluster]
    return members[first_member[cluster] + (size * rng.random(len(cluster)) ** 1.5).astype(np.int64)]


def _window(table: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Ragged:
    """The values begin..end of each row of table [B, steps]."""
    steps = np.arange(table.shape[1])
    inside = (steps >= begin[:, None]) & (steps < end[:, None])
    return Ragged(table[inside], splits_of(end - begin))
