"""Converts raw logs to data sets: MovieLens, KuaiRand, sequences, a user's own tables; and makes synthetic ones.

python -m tf_fusedrec.models.data_sets.convert --help
"""
