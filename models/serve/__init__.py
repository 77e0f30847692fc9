"""A server for exports of this project, with the REST interface of TensorFlow Serving: `fusedrec serve`.

loaded.py loads an export and calls its signatures. tensors.py turns JSON into tensors and back. batching.py joins
requests that arrive together into one call. rest.py answers HTTP. deltas.py applies the deltas of a folder. warmup.py
replays the warm-up requests. metrics.py is the page for Prometheus. A stock export needs TensorFlow, tornado and
prometheus_client; one with ops "ours" needs tf_fusedrec, too.
"""
