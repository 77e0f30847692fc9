"""A small log in KuaiRand's files: random labels of 12 users with 21 impressions each."""

import pathlib

import numpy as np

LABELS = ("is_click", "long_view", "is_profile_enter", "is_comment")
USERS, IMPRESSIONS = 12, 21


def write(folder: pathlib.Path) -> pathlib.Path:
    """Writes the log and the users' features into `folder`, and returns it."""
    generator = np.random.default_rng(0)
    lines = [",".join(["user_id", "video_id", "time_ms", "duration_ms", *LABELS])]
    for user in range(USERS):
        for time in generator.permutation(IMPRESSIONS):
            labels = generator.integers(0, 2, len(LABELS))
            lines.append(",".join(map(str, [user, generator.integers(30), 1000 * time, 5000, *labels])))
    (folder / "log.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    features = ["user_id,user_active_degree,register_days_range", *(f"{user},full,a" for user in range(USERS))]
    (folder / "user_features.csv").write_text("\n".join(features) + "\n", encoding="utf-8")
    return folder
