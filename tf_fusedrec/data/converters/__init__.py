"""Raw logs as data sets: MovieLens, KuaiRand, sequences, tables of one's own, synthetic. convert.py is the command."""
