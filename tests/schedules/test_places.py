"""Every option of a table at every place, under every schedule and topology: it works, or it is refused when made.

There is no GPU here. A place is decided from the configuration before an op of a table runs, so tables are told that
they lie on one, and are made in host memory. tests/cuda runs the cells that work over the emulation.
"""

import types

import pytest

import tf_fusedrec as fr
from tests.schedules import clicks
from tf_fusedrec import optimizers
from tf_fusedrec.config import RECORDS
from tf_fusedrec.exchange.topology import RankLayout
from tf_fusedrec.schedules import DualBuffer, PipelinedModel, SemiAsync
from tf_fusedrec.tables import external, places
from tools.docs.places import OPTIONS, SCHEDULES, TOGETHER, TOPOLOGIES, option_works, schedule_works

VALUES = {
    "name": "other", "dim": 3, "optimizer": optimizers.Adam(0.1), "initializer": fr.Constant(1.0), "dtype": "bfloat16",
    "unknown": "zeros", "storage.dtype": "bfloat16", "storage.stochastic_rounding": True, "storage.hot_after": 2,
    "limits.eviction": "lfu", "limits.exact_eviction": True, "record_tombstones": True,
    "tier.memory_budget_per_rank": 1 << 20, "tier.folder": "", "tier.hot_rows_per_rank": 40,
    "external.folder": "a checkpoint", "external.table": "other", "trainable": False,
}  # fmt: skip


class Model(PipelinedModel):
    """A model that holds a layer, for schedules to check. It gets its schedule before the layer."""

    def __init__(self, embedding, schedule="sync"):
        super().__init__(schedule=schedule)
        self.embedding = embedding

    def call(self, ids):
        return self.embedding(ids)


@pytest.fixture
def placed(monkeypatch):
    """Sets place and topology of the layers that a test makes."""
    make = RankLayout.__init__

    def place_at(place, topology="one group"):
        monkeypatch.setattr(places, "on_gpu", lambda: place is not places.CPU)

        def init(layout, *arguments):
            make(layout, *arguments)
            layout.averages, layout.shares_gradients = topology == "weight_sync", topology == "gradient_sync"

        monkeypatch.setattr(RankLayout, "__init__", init)
        return {} if place is places.CPU else {"tier.host_rows": place is places.HOST_ROWS}

    return place_at


def config_of(option, folder):
    values = {**VALUES, "tier.folder": str(folder), "tier.host_rows": True}
    fields = {name: values.get(name, 7) for name in (option, *TOGETHER.get(option, ()))}
    if "storage.hot_after" in fields:
        fields["storage.dtype"] = "mixed"
    if "external.folder" not in fields:
        fields = {"optimizer": optimizers.Adagrad(0.1), **fields}
    return {"name": "table", "dim": 4, **fields}


def make_layer(fields):
    records = {
        name: record(**{path.split(".")[1]: value for path, value in fields.items() if path.startswith(f"{name}.")})
        for name, record in RECORDS.items()
        if any(path.startswith(f"{name}.") for path in fields)
    }
    tables = [fr.TableConfig(**{path: value for path, value in fields.items() if "." not in path}, **records)]
    if "external" in records:  # a model trains tables of its own, too
        tables.append(fr.TableConfig("own", 2, optimizers.SGD(0.1)))
    features = [fr.FeatureConfig(table.name, table.name) for table in tables]
    return fr.FusedEmbedding(features, tables)


def refusal(make):
    """Returns the result of `make`, and None; or None, and the error with which it refuses."""
    try:
        return make(), None
    except ValueError as error:  # nothing else: an op would answer with another error
        return None, str(error)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("place", places.PLACES, ids=lambda place: place.name)
def test_every_cell_works_or_is_refused_when_it_is_made(placed, place, topology, tmp_path, monkeypatch):
    monkeypatch.setattr(external, "_reader", lambda *_: types.SimpleNamespace(chunks=lambda: ()))
    more, cells = placed(place, topology), 0
    for option in OPTIONS:
        fields = {**config_of(option, tmp_path), **more}
        layer, why_not = refusal(lambda: make_layer(fields))  # noqa: B023
        model = None if layer is None else Model(layer)
        for schedule in SCHEDULES.values():
            cells += 1
            cell = f"{option}, {place.name}, {schedule}, {topology}"
            error = why_not
            if model is not None:
                _, error = refusal(lambda: setattr(model, "schedule", schedule))  # noqa: B023
            if option_works(option, place, topology) and schedule_works(schedule, place, topology):
                assert error is None, f"{cell}: {error}"
            else:
                assert error is not None, f"{cell}: not refused"
                assert "Use " in error, f"{cell}: {error}"
    assert cells == len(OPTIONS) * len(SCHEDULES)


def test_a_stale_schedule_over_host_rows_is_refused_without_a_remedy_that_is_refused(placed):
    fields = {**config_of("dim", ""), **placed(places.HOST_ROWS)}
    model = Model(make_layer(fields))
    with pytest.raises(ValueError, match=r"have host_rows on a GPU.*Use a schedule whose"):
        model.schedule = SemiAsync()
    model.schedule = DualBuffer()
    with pytest.raises(ValueError, match="have host_rows on a GPU"):
        Model(model.embedding, SemiAsync()).compile("sgd", "mse")


def test_an_option_that_a_gpu_lacks_is_named_with_a_remedy(placed):
    wanted = r"TableConfig.tier.memory_budget_per_rank of table 'item' is 4096, and must be 0 on a GPU. Use a table"
    placed(places.DEVICE)
    with pytest.raises(ValueError, match=wanted):
        clicks.make_embedding(table={"tier": fr.Tier(4096, "folder")})


def test_statistics_tell_the_traffic_of_tables_with_rows_in_host_memory(placed):
    traffic = {"hot_hits": 0, "bytes_to_device": 0, "bytes_to_host": 0}
    for place in places.PLACES:
        layer = make_layer({**config_of("dim", ""), **placed(place)})
        (statistics,) = layer.internals.groups[0].table.statistics.values()
        told = {name: count for name, count in statistics.items() if name in traffic}
        assert told == (traffic if place is places.HOST_ROWS else {})  # zeros, because the rows lie in host memory


def test_tables_lie_in_host_memory_without_a_gpu():
    layer = clicks.make_embedding(table={"tier": fr.Tier(host_rows=True)})
    assert [group.table.place for group in layer.internals.groups] == [places.CPU]
