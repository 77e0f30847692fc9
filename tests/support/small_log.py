"""A small log with the skew of a real one: 2,000 impressions of 100 users in KuaiRand's format, in small_log/.

    python -m tests.support.small_log          # writes the files again

Most videos occur once, the most frequent ones 30 times and more. A few users make a third of the impressions. Some
impressions of a user have equal times. Labels depend on the user, the video and the duration.
"""

import gzip
import io
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).with_name("small_log")
ROWS, USERS, HEAD = 2000, 100, 150  # HEAD: videos that occur often
LABELS = {"is_click": 0.7, "is_like": 1.2, "is_follow": -4.0, "is_comment": -3.0, "is_profile_enter": -2.5,
          "long_view": -0.2}  # by log odds  # fmt: skip
DEGREES, DAYS = ("full_active", "high_active", "middle_active"), ("181-365", "366-730", "730+")
FIRST_MS, FORTNIGHT_MS = 1_649_350_000_000, 14 * 86_400_000


def columns() -> dict[str, np.ndarray]:
    """Returns the log by column, <int64>[ROWS] each, sorted by user and time."""
    random = np.random.RandomState(2026)  # whose numbers are the same in every version of NumPy
    users = np.sort(random.choice(np.arange(100, 1000), USERS, replace=False))
    share = random.lognormal(0, 0.9, USERS)
    extra = np.searchsorted(np.cumsum(share) / share.sum(), random.rand(ROWS - 5 * USERS))
    of_user = np.sort(np.concatenate([np.repeat(np.arange(USERS), 5), extra]))
    videos = random.choice(np.arange(10_000, 4_000_000), HEAD + ROWS, replace=False)
    often = np.searchsorted(np.cumsum(1 / np.arange(1, HEAD + 1)), 5.59 * random.rand(ROWS))
    of_video = np.where(random.rand(ROWS) < 0.6, np.minimum(often, HEAD - 1), HEAD + np.arange(ROWS))
    time = FIRST_MS + random.randint(0, FORTNIGHT_MS // 1000, ROWS) * 1000
    time[1::25] = time[::25]
    order = np.lexsort([time, of_user])
    duration = np.where(random.rand(ROWS) < 0.2, 0, np.exp(random.normal(10, 1, ROWS)).astype(np.int64))
    taste = random.normal(0, 1, USERS)[of_user] + random.normal(0, 1, HEAD + ROWS)[of_video]
    found = {"user_id": users[of_user], "video_id": videos[of_video], "time_ms": time[order]}
    for name, log_odds in LABELS.items():
        likely = log_odds + taste - (duration > 40_000) * (name == "long_view")
        found[name] = (random.rand(ROWS) < 1 / (1 + np.exp(-likely))).astype(np.int64)
    found["play_time_ms"] = (duration * random.rand(ROWS) * (0.5 + found["long_view"])).astype(np.int64)
    return {**found, "duration_ms": duration}


def contents() -> dict[str, str]:
    """Returns the text of each file by its name, as the committed files have it."""
    log = columns()
    users = np.unique(log["user_id"])
    features = [(user, DEGREES[user % 7 % 3], DAYS[user % 5 % 3]) for user in users]
    return {
        "log.csv.gz": _csv(log, zip(*log.values())),
        "user_features.csv": _csv(("user_id", "user_active_degree", "register_days_range"), features),
    }


def _csv(names, rows) -> str:
    return ",".join(names) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)


def read(name: str) -> str:
    """Returns the text of a committed file."""
    data = (FOLDER / name).read_bytes()
    return (gzip.decompress(data) if name.endswith(".gz") else data).decode()


def write_movielens(folder: pathlib.Path) -> pathlib.Path:
    """Writes the committed log as ratings in MovieLens-1M's files and returns the folder."""
    log = np.genfromtxt(io.StringIO(read("log.csv.gz")), np.int64, delimiter=",", names=True)
    rating = 1 + log["is_click"] + log["is_like"] + log["long_view"] + log["is_comment"]
    texts = {
        "ratings.csv.gz": _csv(("user_id", "movie_id", "rating", "timestamp"),
                               zip(log["user_id"], log["video_id"], rating, log["time_ms"] // 1000)),
        "users.dat.gz": "".join(
            f"{user}::{'MF'[user % 2]}::{(1, 18, 25, 35, 45, 50, 56)[user % 7]}::{user % 21}::{user}\n"
            for user in np.unique(log["user_id"])
        ),
        "movies.dat.gz": "".join(
            f"{movie}::Film {movie} (2000)::{('Action', 'Comedy|Drama')[movie % 2]}\n"
            for movie in np.unique(log["video_id"])
        ),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(gzip.compress(text.encode()))
    return folder


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in contents().items():
        data = text.encode()
        (FOLDER / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
