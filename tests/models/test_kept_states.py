"""An export with a cache of user states answers as the model on whole histories, whatever requests came before.

The states lie in memory alone, or in a file, too.
"""

import concurrent.futures
import json

import numpy as np
import pytest

import tf_fusedrec as fr
from tests.models import experiments
from tests.models.batches import START, retrieval_batch
from tests.support.served import served
from tf_fusedrec import keras, ops, tf
from tf_fusedrec.layers import jagged
from tf_fusedrec.models.build import columns, make_embedding, make_model, no_rows
from tf_fusedrec.models.experiment import from_dict
from tf_fusedrec.models.export import export
from tf_fusedrec.models.kept_states import KeptStates, StateOptions
from tf_fusedrec.models.serve import program
from tf_fusedrec.models.serve.loaded import Export
from tf_fusedrec.models.user_state import GRMStates, RetrievalStates
from tf_fusedrec.saved_model import state_cache

ITEMS = np.arange(1, 21)
LONGEST, USERS = 20, 5  # max_history of the experiments
TOLERANCE = 2e-6  # float32 sums in another order


def made(fields):
    """Returns a model with rows for the items 1 to 20. Other ids have their initial rows."""
    experiment = from_dict(fields)
    keras.utils.set_random_seed(3)
    model = make_model(experiment, make_embedding(experiment), ITEMS, np.ones(len(ITEMS), np.int64))
    model(no_rows(columns(experiment.model, "train")))
    rows = np.random.default_rng(0).normal(0, 0.5, [len(ITEMS), 8]).astype(np.float32)
    fr.checkpoint.warm_start(model, "item", ITEMS, rows)
    return model


GRM = {**experiments.RANKING, "model": {**experiments.RANKING["model"], "causal_context": True}}


class Ranking:
    """A client of a served GRM, whose cache holds about three of five users.

    exported: Result of the fixture of that name.
    tier_folder: Folder of a file, which holds about one user more; None: no file.
    """

    def __init__(self, exported, tier_folder):
        self.model, self.options, self.folder, longest_bytes = exported
        self.loaded = tf.saved_model.load(str(self.folder))
        self.in_file = tier_folder is not None
        if self.in_file:
            # The least that is accepted.
            self.ask({"tier_folder": str(tier_folder), "tier_bytes": np.int64(longest_bytes)}, "spill_states")
        self.random = np.random.default_rng(5)
        self.budgets = self.random.integers(0, 4, USERS)
        self.histories = [np.zeros([0, 3], np.int64)] * USERS  # item, action, time

    def happen(self, user, count):
        """Adds events. A history that is full starts again from its newest events; its client knows no state then."""
        old = self.histories[user]
        times = (old[-1, 2] if len(old) else START) + np.cumsum(self.random.integers(0, 90_000, count))
        new = np.stack([self.random.integers(1, 30, count), self.random.integers(0, 4, count), times], axis=1)
        both = np.concatenate([old, new])
        fits = len(both) <= LONGEST
        self.histories[user] = both if fits else both[-LONGEST // 2 :]
        return fits

    def inputs(self, users, before, candidates):
        rows = [self.histories[user][begin:] for user, begin in zip(users, before)]
        events = np.concatenate([*rows, np.zeros([0, 3], np.int64)])
        shown = [np.arange(count) + 3 * user for user, count in zip(users, candidates)]
        shown = np.concatenate([*shown, []]).astype(np.int64)
        return {
            "user": np.array(users, np.int64), "events_before": np.array(before, np.int64),
            "user_budget": self.budgets[users],
            "history_row_splits": np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
            "history_item": events[:, 0], "history_action": events[:, 1], "history_time": events[:, 2],
            "exposed_row_splits": np.concatenate([[0], np.cumsum(candidates)]).astype(np.int64),
            "exposed_item": shown % 25, "exposed_time": shown * 100 + START + 10**8,
        }  # fmt: skip

    def ask(self, inputs, signature="with_state"):
        answer = self.loaded.signatures[signature](**{name: tf.constant(value) for name, value in inputs.items()})
        return {name: value.numpy() for name, value in answer.items()}

    def wanted(self, inputs):
        """Returns the answers on whole histories, at most max_exposures candidates in a row."""
        rows = [
            (user, first, min(first + 4, end))
            for user, begin, end in zip(inputs["user"], *(inputs["exposed_row_splits"][n:] for n in (0, 1)))
            for first in range(begin, end, 4)
        ]
        users, lengths = [user for user, _, _ in rows], [end - begin for _, begin, end in rows]
        whole = self.inputs(users, [0] * len(users), lengths)
        whole |= {name: inputs[name] for name in ("exposed_item", "exposed_time")}
        return self.ask(
            {name: whole[name] for name in whole if name not in ("user", "events_before")}, "serving_default"
        )

    def counts(self):
        return {name: int(value) for name, value in self.ask({}, "state_statistics").items()}

    def change(self):
        """Changes rows in place, and then the version."""
        table = self.loaded.served_tables._tables["item"].resource_handle
        ids, handles = ops.table_keys(table, 0)
        records = ops.table_read_records(table, handles).numpy()
        records[:, 16:] = (records[:, 16:].copy().view(np.float32) * 0.75).view(np.uint8)  # counters come first
        ops.table_import(table, 0, ids, records)
        assert self.ask({}, "next_version")["version"] > 0


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns a GRM, its options of states, its export, and the bytes of the longest state.

    Three candidates go in a piece. A test may change the weights of the model, but not the export.
    """
    model, folder = made(GRM), tmp_path_factory.mktemp("states") / "model"
    roomy = KeptStates(GRMStates(model), model.config, StateOptions(10**6, page_tokens=4))
    options = StateOptions(3 * roomy.cache.state_bytes(14), page_tokens=4, piece=3)
    export(model, folder, "ours", options)
    return model, options, folder, roomy.cache.state_bytes(1 + LONGEST)


@pytest.fixture(scope="module", params=[False, True], ids=["memory", "file"])
def ranking(request, exported, tmp_path_factory):
    return Ranking(exported, tmp_path_factory.mktemp("tier") if request.param else None)


# Random requests find the faults of either. A change of the version and the server's program cost seconds.
in_memory = pytest.mark.parametrize("ranking", [False], ids=["memory"], indirect=True)
in_file = pytest.mark.parametrize("ranking", [True], ids=["file"], indirect=True)


@pytest.mark.slow
def test_random_requests_answer_as_on_whole_histories(ranking):
    random, known = np.random.default_rng(1), [0] * USERS
    refused = again = 0
    for step in range(60):
        users = random.permutation(USERS)[: random.integers(1, 4)].tolist()
        for user in users:
            if not ranking.happen(user, int(random.choice([0, 1, 3, 6]))):
                known[user] = 0
        if step % 15 == 14:
            ranking.change()
            assert ranking.counts()["states"] == ranking.counts()["tier_states"] == 0
        # A client may be behind what the server knows, because another request brought the events.
        before = [max(known[user] - int(random.choice([0, 0, 1])), 0) for user in users]
        inputs = ranking.inputs(users, before, random.integers(0, 8, len(users)))
        got, want = ranking.ask(inputs), ranking.wanted(inputs)
        found = np.repeat(got["found"], np.diff(inputs["exposed_row_splits"]))
        for task, scores in want.items():
            np.testing.assert_allclose(got[task], np.where(found, scores, np.nan), rtol=0, atol=TOLERANCE)
        for user, is_found in zip(users, got["found"]):
            known[user] = len(ranking.histories[user]) if is_found else 0
        refused += np.sum(~got["found"])
        again += np.sum(got["found"] & (np.array(before) > 0))
    counts = ranking.counts()
    assert refused > 3 and again > 30 and counts["hits"] >= again and counts["evictions"] > 3
    assert (counts["tier_hits"] > 3 and counts["tier_evictions"] > 3) == ranking.in_file


@pytest.mark.slow
@in_memory
def test_a_delta_makes_states_of_the_older_version_unreachable(ranking, tmp_path):
    ranking.happen(2, 6)
    events = len(ranking.histories[2])
    whole, later = ranking.inputs([2], [0], [2]), ranking.inputs([2], [events], [2])
    old = ranking.ask(whole)["ctr"]
    assert ranking.ask(later)["found"]
    for weight in ranking.model.trainable_variables:
        weight.assign(weight * 1.25)
    export(ranking.model, tmp_path / "delta", "ours", ranking.options, base=ranking.folder)
    ranking.ask({"path": str(tmp_path / "delta")}, "apply_delta")
    assert not ranking.ask(later)["found"]
    new = ranking.ask(whole)["ctr"]
    assert np.abs(new - old).max() > 1e-3
    np.testing.assert_allclose(new, ranking.wanted(whole)["ctr"], rtol=0, atol=TOLERANCE)
    found = ranking.ask(later)
    assert found["found"]
    np.testing.assert_allclose(found["ctr"], new, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_concurrent_requests_of_one_user(ranking):
    """Clients that do not know of each other: each has seen a part of the history, and gets the answer of that part."""
    ranking.happen(0, 12)
    whole = ranking.histories[0] = ranking.histories[0][-10:]

    def serve(seed):
        random, before = np.random.default_rng(seed), 0
        for _ in range(12):
            seen = int(random.integers(before, len(whole) + 1))
            inputs = ranking.inputs([0], [before], [2])
            inputs |= {name: inputs[name][: seen - before] for name in inputs if name.startswith("history_")}
            inputs["history_row_splits"] = np.array([0, seen - before])
            got = ranking.ask(inputs)
            if got["found"][0]:
                np.testing.assert_allclose(got["ctr"], wanted[seen], rtol=0, atol=TOLERANCE)
            before = seen if got["found"][0] else 0

    wanted = []
    for seen in range(len(whole) + 1):
        ranking.histories[0] = whole[:seen]
        wanted.append(ranking.wanted(ranking.inputs([0], [0], [2]))["ctr"])
    ranking.histories[0] = whole
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(serve, range(4)))


@pytest.mark.slow
@in_file
def test_a_server_keeps_states_between_requests_of_many_clients(ranking, monkeypatch, tmp_path):
    """Clients ask at once, so that their users share calls. The page for Prometheus shows what the cache did."""
    export = Export(ranking.folder)  # as it was written, without the changes of other tests
    with pytest.raises(ValueError, match="are refused: .*tier_bytes must hold the longest state: 21 tokens"):
        program._spill(export, str(tmp_path), 1000)
    program._spill(export, str(tmp_path), 10**5)
    with pytest.raises(ValueError, match="are refused: the cache has a file already"):
        program._spill(export, str(tmp_path), 10**5)
    monkeypatch.setattr(ranking, "ask", lambda inputs, signature: export.call(signature, inputs))
    for user in range(USERS):
        ranking.histories[user] = ranking.histories[user][:0]
        ranking.happen(user, 6 + user)
    whole = [ranking.inputs([user], [0], [2]) for user in range(USERS)]
    for user in range(USERS):
        ranking.happen(user, 1)
    later = [ranking.inputs([user], [6 + user], [1 + user]) for user in range(USERS)]
    wanted = [ranking.wanted(inputs)["ctr"] for inputs in later]
    with served(export) as (client, _), concurrent.futures.ThreadPoolExecutor(USERS) as pool:

        def ask(inputs):
            return client.predict({name: value.tolist() for name, value in inputs.items()}, "with_state")

        begun = list(pool.map(ask, [*whole, *whole]))
        assert all(answer["found"] == [True] for answer in begun)
        for answer, scores in zip(pool.map(ask, later), wanted):
            np.testing.assert_allclose(answer["ctr"], scores if answer["found"][0] else np.nan, rtol=0, atol=TOLERANCE)
        found = client.metrics()
        counts = client.predict({}, "state_statistics")
        for name in ("bytes", "states"):
            assert found[f"fusedrec_state_cache_{name}"] == counts[name] > 0
        for name in ("hits", "misses", "evictions"):
            assert found[f"fusedrec_state_cache_{name}_total"] == counts[name]
        assert counts["hits"] > 0 and counts["evictions"] > 0  # The cache holds about three users.
        assert found["fusedrec_state_cache_tier_hits_total"] > 0
        status, answer = client.send(f"{client.model}:predict", b'{"signature_name": "with_state", "inputs": {}}')
        assert status == 400 and "'events_before'" in answer["error"]
        none = {**later[0], "exposed_row_splits": np.array([0, 0])}
        none |= {name: np.array([], np.int64) for name in ("exposed_item", "exposed_time")}
        assert ask(none)["ctr"] == []
        wrong = {name: value.tolist() for name, value in {**later[0], "events_before": np.array([-1])}.items()}
        body = json.dumps({"signature_name": "with_state", "inputs": wrong}).encode()
        status, answer = client.send(f"{client.model}:predict", body)
        assert status == 400 and "events_before must be >= 0" in answer["error"]


@pytest.mark.slow
def test_bad_requests_are_named_and_the_server_goes_on(ranking):
    ranking.happen(1, 12)
    ranking.histories[1] = ranking.histories[1][-10:]
    whole = ranking.inputs([1], [0], [2])
    wanted = ranking.ask(whole)["ctr"]

    def answers_still():
        np.testing.assert_allclose(ranking.ask(ranking.inputs([1], [10], [2]))["ctr"], wanted, rtol=0, atol=TOLERANCE)

    older = ranking.inputs([1], [9], [2])
    older |= {"events_before": np.array([10]), "history_time": older["history_time"] - 1}
    contradicting = ranking.inputs([1], [8], [2])
    contradicting["history_time"] = contradicting["history_time"] + 1
    many = ranking.inputs([1], [0], [2])
    many |= {name: np.repeat(many[name], 3) for name in ("history_item", "history_action", "history_time")}
    many["history_row_splits"] = np.array([0, 30])
    for wrong, words in (
        (older, "an event is older than the state of its user"),
        (contradicting, "the history contradicts the state of its user"),
        (many, "a user has more than max_history = 20 events"),
        ({**whole, "events_before": np.array([-1])}, "events_before must be >= 0"),
        ({**whole, "user": np.array([1, 2])}, "user and events_before must have one entry for each row"),
        ({**whole, "history_action": np.append(whole["history_action"], 3)}, "must have the same number of values"),
        ({**whole, "exposed_row_splits": np.array([0, 3])}, "do not form a valid RaggedTensor"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            ranking.ask(wrong)
        answers_still()
    # A gap: the client believes that the state has more events than it has.
    gap = ranking.ask({**ranking.inputs([1], [10], [2]), "events_before": np.array([12])})
    assert not gap["found"][0] and np.isnan(gap["ctr"]).all()
    nothing = ranking.ask(ranking.inputs([1], [10], [0]))
    assert nothing["found"][0] and not nothing["ctr"].size
    assert not ranking.ask(ranking.inputs([], [], []))["ctr"].size
    answers_still()


@pytest.mark.slow
@in_memory
def test_a_request_to_a_state_runs_few_operations_more(ranking):
    """A state pays for short histories only if its request runs few operations, whatever their number of tokens."""

    def operations(signature):
        functions = ranking.loaded.signatures[signature].graph.as_graph_def().library.function
        return max(len(function.node_def) for function in functions)

    assert operations("serving_default") > 500
    assert operations("with_state") < 2.1 * operations("serving_default")


@pytest.mark.slow
@in_memory
def test_what_cannot_have_states_is_refused(tmp_path, ranking, monkeypatch):
    with pytest.raises(ValueError, match="states need ops \"ours\", got ops 'stock'"):
        export(ranking.model, tmp_path / "a", "stock", StateOptions(10**6))
    words = "max_bytes must hold the longest state: 21 tokens, 28.. bytes; got 2000"
    with pytest.raises(ValueError, match=words) as refused:
        export(ranking.model, tmp_path / "a", "ours", StateOptions(2000))
    needed = int(str(refused.value).split(" bytes; got")[0].split()[-1])
    with monkeypatch.context() as without, pytest.raises(NameError, match="_Resource"):  # that is made next
        without.delattr(state_cache, "_Resource")
        export(ranking.model, tmp_path / "a", "ours", StateOptions(needed))
    other = made(experiments.ranking("din"))
    with pytest.raises(ValueError, match="states need a GRM, got DIN. Export without states"):
        export(other, tmp_path / "a", "ours", StateOptions(10**6))


@pytest.fixture(scope="module")
def retrieval():
    return made(experiments.RETRIEVAL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "times"), [("hstu", "buckets"), ("fuxi_alpha", "buckets"), ("fuxi_beta", "power"), ("sasrec", "none")]
)
def test_retrieval_with_states(encoder, times, monkeypatch):
    """The signature's function, which an export would trace. FuXi-beta has keys without columns."""
    model = {**experiments.RETRIEVAL["model"], "encoder": encoder, "time_encoding": times}
    retrieval = made({**experiments.RETRIEVAL, "model": model})
    given = {}
    monkeypatch.setattr(fr, "export", lambda *arguments, signatures, **options: given.update(signatures))
    export(retrieval, "nowhere", "ours", StateOptions(10**6, page_tokens=4))
    batch = retrieval_batch([12, 0, 1, 7])
    now = tf.constant([START + 10**8] * 4, tf.int64)
    want = retrieval.embed_users(batch["item_id"], batch["timestamp"], now)
    users = tf.constant([7, 8, 9, 10], tf.int64)
    for before in ([0, 0, 0, 0], [8, 0, 1, 7], [12, 0, 1, 7]):
        new = [n - b for n, b in zip([12, 0, 1, 7], before)]
        inputs = {name: jagged.last(column, tf.constant(new)).values for name, column in batch.items()}
        inputs |= {"row_splits": tf.constant([0, *np.cumsum(new)], tf.int64), "query_time": now, "user": users}
        got = given["with_state"].function({**inputs, "events_before": tf.constant(before, tf.int64)})
        assert got["found"].numpy().all()
        np.testing.assert_allclose(got["user_embedding"], want, rtol=0, atol=TOLERANCE)
    counts = given["state_statistics"].function({})
    assert counts["states"] == 3 and counts["hits"] == 6 and counts["misses"] == 0


def test_bfloat16_states_take_half_the_bytes(retrieval):
    """Keys and values have 8 bits, so an embedding differs in the third digit."""
    batch = retrieval_batch([12, 3])
    model = retrieval
    states, now = RetrievalStates(model), tf.constant([START + 10**8] * 2, tf.int64)
    options = [StateOptions(10**6, dtype=dtype) for dtype in ("float32", "bfloat16")]
    sizes, differences = [], []
    want = model.embed_users(batch["item_id"], batch["timestamp"], now)
    users, version = tf.constant([1, 2], tf.int64), tf.constant(0, tf.int64)
    for kept in (KeptStates(states, model.config, one) for one in options):
        resumed = kept.resume(users, version, tf.zeros([2], tf.int64), batch["timestamp"])
        _, change = states.answer(batch["item_id"], batch["timestamp"], now, resumed.state)
        assert kept.keep(resumed, change).numpy().all()
        none = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), tf.zeros([3], tf.int64))
        again = kept.resume(users, version, tf.constant([12, 3], tf.int64), none)
        vectors, _ = states.embed_users(none, none, now, again.state)
        sizes.append(kept.cache.state_bytes(64) - kept.cache.state_bytes(0))
        differences.append(float(tf.reduce_max(tf.abs(vectors - want))))
    assert sizes[1] * 2 == sizes[0] + 64 * 8  # times stay int64
    assert differences[0] < TOLERANCE < differences[1] < 2e-2
    with pytest.raises(ValueError, match="dtype must be .float32. or .bfloat16., got 'int8'"):
        KeptStates(states, model.config, StateOptions(10**6, dtype="int8"))
