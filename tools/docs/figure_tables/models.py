"""How well the models rank and retrieve."""

from __future__ import annotations

from tools.docs.figures import Row, Table

ML1M = "python -m benchmarks.retrieval_ml1m --json F"
LARGE = "python -m benchmarks.retrieval_ml1m --model hstu_large --validation --json F"
SPORTS = "python -m benchmarks.retrieval_sports --json F"
KUAIRAND = "python -m benchmarks.ranking --data path/to/kuairand --json F"
RANKING_ML1M = "python -m benchmarks.ranking --data path/to/ml-1m --settings 4 --json F"
RANKING = "python -m benchmarks.ranking --data DIR --json F"
ML1M_SIZES = "python -m benchmarks.ranking --data path/to/ml-1m --sizes --json F"
KUAIRAND_SIZES = "python -m benchmarks.ranking --data path/to/kuairand --sizes --json F"
SHARED = "python -m benchmarks.retrieval_ml1m --negatives 64 --expansion 2 --json F"

# Rows of benchmarks.ranking: the meaning of a field by its name, by result.
RANKED = {
    "ranking_ml1m": {
        "auc": "MovieLens-1M as ranking, AUC of a rating of at least 4",
        "second_auc": "MovieLens-1M as ranking, AUC of a rating of 5",
        "gauc": "MovieLens-1M as ranking, GAUC of a rating of at least 4",
        "second_gauc": "MovieLens-1M as ranking, GAUC of a rating of 5",
    },
    "ranking_kuairand": {
        "auc": "KuaiRand, AUC of click",
        "second_auc": "KuaiRand, AUC of long view",
        "gauc": "KuaiRand, GAUC of click",
        "second_gauc": "KuaiRand, GAUC of long view",
    },
}


def scores(result: str, field: str) -> str:
    """Returns the format string of a metric of rates, DLRM, DIN, DCN-V2 and GRM."""
    return " / ".join(f"{{{result}[{field}_{model}]:.3f}}" for model in ("rates", "dlrm", "din", "dcn", "grm"))


def by_size(result: str) -> str:
    """Returns the format string of the GAUC of GRM in four sizes, then of DLRM."""
    return " / ".join(
        ", ".join(f"{{{result}[sizes][{place}][gauc]:.3f}}" for place in places) for places in (range(4), range(4, 8))
    )


THEME = Table(
    "Quality of models",
    "MovieLens-1M: a user's last rating is test, ties in time keep the order of the file, and the whole catalogue is "
    "ranked for 6,040 users; a sixth of the timestamps of our copy are estimates. MovieLens-1M as ranking and "
    "KuaiRand: means of 3 seeds, settings chosen on a validation split, at most five epochs. On MovieLens-1M all "
    "models were best at the fifth. Amazon Sports: a user's last item in the order of the file is test, the one before "
    "validation, and the models have not trained on the validation items; all unseen ones of 18,357 items are ranked "
    "for 35,598 users. A validation split chose among five settings and at most 60 epochs, for each model.",
    (
        Row(
            "HSTU, {retrieval_ml1m[epochs]} epochs: HR@10, NDCG@10",
            "{retrieval_ml1m[hr_at_10]:.3f}, {retrieval_ml1m[ndcg_at_10]:.3f}", ML1M,
        ),
        Row(
            "the same as published / by others with a stable sort",
            "{retrieval_ml1m[published][paper][hr_at_10]:.3f}, "
            "{retrieval_ml1m[published][paper][ndcg_at_10]:.3f} / "
            "{retrieval_ml1m[published][others_with_stable_sort][hr_at_10]:.3f}, "
            "{retrieval_ml1m[published][others_with_stable_sort][ndcg_at_10]:.3f}", ML1M,
        ),
        Row(
            "the same: HR@50, HR@200; seconds of one core per epoch",
            "{retrieval_ml1m[hr_at_50]:.3f}, {retrieval_ml1m[hr_at_200]:.3f}; "
            "{retrieval_ml1m[processor_seconds_per_epoch]:.1f}", ML1M,
        ),
        Row(
            "128 own negatives / 64 and 64 of another position: HR@10",
            "{retrieval_ml1m_negatives128[hr_at_10]:.3f} / {retrieval_ml1m_negatives64_k2[hr_at_10]:.3f}",
            SHARED,
        ),
        Row(
            "the same: difference and its 95 % interval",
            "{shared_negatives[difference]:.4f}, {shared_negatives[low]:.3f} to {shared_negatives[high]:.3f}",
            SHARED,
        ),
        Row(
            "HSTU-large, not trained on the items of validation, which chose epoch "
            "{retrieval_ml1m_hstu_large[best_epoch]} of {retrieval_ml1m_hstu_large[epochs]}: HR@10, NDCG@10",
            "{retrieval_ml1m_hstu_large[hr_at_10]:.3f}, {retrieval_ml1m_hstu_large[ndcg_at_10]:.3f}",
            LARGE,
        ),
        Row(
            "the same as published / by others with a stable sort",
            "{retrieval_ml1m_hstu_large[published][paper][hr_at_10]:.3f}, "
            "{retrieval_ml1m_hstu_large[published][paper][ndcg_at_10]:.3f} / "
            "{retrieval_ml1m_hstu_large[published][others_with_stable_sort][hr_at_10]:.3f}, "
            "{retrieval_ml1m_hstu_large[published][others_with_stable_sort][ndcg_at_10]:.3f}",
            LARGE,
        ),
        Row(
            "SASRec: HR@10, NDCG@10: ours / as published",
            "{retrieval_ml1m_sasrec[hr_at_10]:.3f}, {retrieval_ml1m_sasrec[ndcg_at_10]:.3f} / "
            "{retrieval_ml1m_sasrec[published][paper][hr_at_10]:.3f}, "
            "{retrieval_ml1m_sasrec[published][paper][ndcg_at_10]:.3f}",
            "python -m benchmarks.retrieval_ml1m --model sasrec --json F",
        ),
        Row(
            "Amazon Sports, HR@10, NDCG@10: popularity / SASRec after {retrieval_sports[models][sasrec][epochs]} "
            "epochs / HSTU after {retrieval_sports[models][hstu][epochs]} / FuXi-alpha after "
            "{retrieval_sports[models][fuxi][epochs]}",
            "{retrieval_sports[hr_at_10_popularity]:.4f}, {retrieval_sports[ndcg_at_10_popularity]:.4f} / "
            "{retrieval_sports[hr_at_10_sasrec]:.4f}, {retrieval_sports[ndcg_at_10_sasrec]:.4f} / "
            "{retrieval_sports[hr_at_10_hstu]:.4f}, {retrieval_sports[ndcg_at_10_hstu]:.4f} / "
            "{retrieval_sports[hr_at_10_fuxi]:.4f}, {retrieval_sports[ndcg_at_10_fuxi]:.4f}",
            SPORTS,
        ),
        Row(
            "the same by others, tuned: SASRec / HSTU / FuXi-alpha",
            " / ".join(
                f"{{retrieval_sports[published][{model}][hr_at_10]:.4f}}, "
                f"{{retrieval_sports[published][{model}][ndcg_at_10]:.4f}}"
                for model in ("sasrec", "hstu", "fuxi")
            ),
            SPORTS,
        ),
        *(
            Row(f"{of}: rates / DLRM / DIN / DCN-V2 / GRM", scores(result, field), command)
            for result, command in (("ranking_ml1m", RANKING_ML1M), ("ranking_kuairand", KUAIRAND))
            for field, of in RANKED[result].items()
        ),
        Row(
            "MovieLens-1M as ranking, rating of at least 4: GRM minus the best baseline, AUC; GAUC, 95 % intervals",
            "{ranking_ml1m[auc_difference_low]:+.4f} to {ranking_ml1m[auc_difference_high]:+.4f}; "
            "{ranking_ml1m[gauc_difference_low]:+.4f} to {ranking_ml1m[gauc_difference_high]:+.4f}",
            RANKING_ML1M,
        ),
        Row(
            "the same, rating of 5",
            "{ranking_ml1m[second_auc_difference_low]:+.4f} to {ranking_ml1m[second_auc_difference_high]:+.4f}; "
            "{ranking_ml1m[second_gauc_difference_low]:+.4f} to {ranking_ml1m[second_gauc_difference_high]:+.4f}",
            RANKING_ML1M,
        ),
        Row(
            "MovieLens-1M as ranking, GAUC of a rating of at least 4, four sizes: GRM / DLRM",
            by_size("ranking_ml1m_sizes"), ML1M_SIZES,
        ),
        Row("KuaiRand, GAUC of click, four sizes: GRM / DLRM", by_size("ranking_kuairand_sizes"), KUAIRAND_SIZES),
        Row(
            "KuaiRand, GAUC of click after {convergence[steps]} steps: rows in our table / in TFRA's",
            "{convergence[gauc][native]:.3f} / {convergence[gauc][tfra]:.3f}",
            "python -m benchmarks.convergence --data path/to/kuairand --json F",
        ),
        Row(
            "MovieLens-1M, one epoch, HR@10: popularity / ours",
            "{main_job[popularity_hr_at_10]:.3f} / {main_job[hr_at_10]:.3f}", "make train DATA=path/to/ml-1m",
        ),
        Row(
            "synthetic ranking, AUC of click: rates / ours",
            "{main_job[rates_ctr_auc]:.3f} / {main_job[ctr_auc]:.3f}", "make train",
        ),
    ),
)  # fmt: skip
