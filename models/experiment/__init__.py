"""Experiments: a YAML file of configs/ becomes a frozen, checked record.

records.py has the sections and reads the file. The sections data and model, the fields of tables, and the text of a
schedule have modules of their own. yaml_records.py converts nested dicts to records and back.
"""

from tf_fusedrec.models.experiment.records import EmbeddingConfig, Experiment, from_dict, load

__all__ = ["EmbeddingConfig", "Experiment", "from_dict", "load"]
